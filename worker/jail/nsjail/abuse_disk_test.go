package nsjail

import (
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func diskAttacks() []attack {
	places := "for d in (os.environ['HOME'], '/tmp', '/dev/shm'):\n"
	return []attack{
		{
			name: "10 GB file", language: "python", limits: small, code: errnos + `
def fill(d):
    with open(d + '/x', 'wb', 0) as f:
        for i in range(10000): f.write(bytes(1 << 20))
` + places + "  print(no(fill, d), os.stat(d + '/x').st_size <= 4 << 20)",
			stdout: "ENOSPC True\nENOSPC True\nENOSPC True",
		},
		{
			name: "10 GB by fallocate", language: "python", limits: small, code: errnos + places +
				"  print(no(os.posix_fallocate, os.open(d + '/x', os.O_CREAT | os.O_RDWR), 0, 10 << 30))",
			stdout: "ENOSPC\nENOSPC\nENOSPC",
		},
		{
			name: "10 GB with a hole", language: "python", limits: small, code: errnos + places + `
  f = os.open(d + '/x', os.O_CREAT | os.O_RDWR)
  os.ftruncate(f, 10 << 30)
  print(os.fstat(f).st_blocks, no(lambda: [os.pwrite(f, b'x', i << 20) for i in range(10000)]))`,
			stdout: "0 ENOSPC\n0 ENOSPC\n0 ENOSPC",
		},
		{name: "a million files", language: "python", limits: small, code: errnos + places +
			"  print(no(lambda: [open(f'{d}/{i}', 'w').close() for i in range(1000000)]))", stdout: "ENOSPC\nENOSPC\nENOSPC"},
		{
			name: "hard links without end", language: "python", limits: small, code: errnos + places +
				"  open(d + '/x', 'w').close(); print(no(lambda: [os.link(d + '/x', f'{d}/{i}') for i in range(1000000)]))",
			stdout: "ENOSPC\nENOSPC\nENOSPC",
		},
		{name: "deep directories", language: "python", limits: small, code: errnos + places + `
  def deeper():
    os.chdir(d)
    while True: os.mkdir('d' * 200); os.chdir('d' * 200)
  print(no(deeper))`, stdout: "ENOSPC\nENOSPC\nENOSPC"},
		{
			name: "large attributes", language: "python", limits: small, code: errnos + places + `
  open(d + '/x', 'w').close()
  print(no(lambda: [os.setxattr(d + '/x', f'user.{i}', bytes(60000)) for i in range(10000)]) in ('ENOSPC', 'ENOTSUP'))`,
			stdout: "True\nTrue\nTrue",
		},
		{name: "deleted and still open", language: "python", limits: small, code: errnos + `
def hide():
    kept = []
    while True:
        kept.append(open('x', 'wb', 0)); os.unlink('x')
        kept[-1].write(bytes(1 << 20))
print(no(hide))`, stdout: "ENOSPC"},
		{
			name: "full, emptied, full again", language: "bash", limits: small, stdout: "1\n0",
			code: "head -c 5000000 /dev/zero > x 2>/dev/null; echo $?; rm x; head -c 3000000 /dev/zero > x; echo $?",
		},
		{
			name: "a home on disk, larger than memory", language: "python",
			limits: func(s *jail.Spec) { s.Memory, s.HomeBytes, s.Inodes = 32<<20, 60<<20, 100 },
			code: errnos + `
def fill(d):
    i = 0
    while True:
        with open(f'{d}/{i}', 'wb', 0) as f:
            while True: f.write(bytes(1 << 20))
        i += 1
def sparse():
    f = os.open('sparse', os.O_RDWR | os.O_CREAT); os.ftruncate(f, 1 << 40)
    while True: os.lseek(f, 1 << 21, 1); os.write(f, bytes(1 << 20))
def inodes():
    for i in range(1000): os.mkdir(f'd{i}')
def hidden():
    f = open('hidden', 'wb', 0); os.unlink('hidden')
    while True: f.write(bytes(1 << 20))
print(no(fill, '.'), no(hidden)); os.unlink('0')
print(no(lambda: os.posix_fallocate(os.open('x', os.O_RDWR | os.O_CREAT), 0, 1 << 30))); os.unlink('x')
print(no(sparse)); os.unlink('sparse')
print(no(inodes), no(os.mknod, 'dev', 0o20666, os.makedev(1, 1)))`,
			stdout: "ENOSPC ENOSPC\nENOSPC\nENOSPC\nENOSPC EPERM",
		},
		{
			name: "anywhere else", language: "bash",
			stdout: "/dev/full /dev/null /dev/random /dev/shm /dev/urandom /dev/zero /home/baponi /tmp 4",
			code: `find / -path /proc -prune -o -path /usr -prune -o -writable ! -type l -print 2>/dev/null | sort | tr '\n' ' '
touch /data/x /run/x /var/tmp/x /run/bullpen/job/main.sh 2>&1 | wc -l`,
		},
		{name: "leaving something for the next jail", run: func(t *testing.T, m *Maker) {
			// The canary programs check that these files are gone.
			runCode(t, m, "bash", "for d in ~ /tmp /dev/shm; do echo secret > $d/x; mkdir -p $d/a/b; chmod 0 $d/a; ln -s / "+
				"$d/s; done; echo left").
				want(t, jail.Exited, "left")
		}},
	}
}
