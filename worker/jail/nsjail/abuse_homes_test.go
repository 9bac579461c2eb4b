package nsjail

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// threadFiles returns the files in the home of each attacked thread.
func threadFiles() map[string]string { return map[string]string{"d/f": "x\n", "old": "old\n"} }

// untouched is the listing of a home that contains only threadFiles.
var untouched = []string{ // read only
	`drwxr-xr-x 0:0 "."`, `drwxr-xr-x 0:0 "./d"`, `-rw-r--r-- 0:0 "./d/f" 1 "x\n"`, `-rw-r--r-- 0:0 "./old" 1 "old\n"`,
}

// inThread returns an attack by a program in a thread's home. The program must print stdout, the
// saved version must equal version, and the next program in the home must work.
func inThread(name, language, code, stdout string, version ...string) attack {
	return attack{name: name, run: func(t *testing.T, m *Maker) {
		th := newThread(t, threadFiles())
		th.call(m, homeProgram(t, language, hiddenPython, code)).want(t, jail.Exited, stdout)
		th.wantVersion(version...)
		th.call(m, program(t, "bash", "cd ~ && echo works > works && cat works")).want(t, jail.Exited, "works")
	}}
}

func homeAttacks() []attack {
	return []attack{
		inThread("deletions made by hand", "python", errnos+`
print(no(os.mknod, 'w', 0o20000, 0), no(os.mknod, 'old2', 0o20000, os.makedev(0, 0)), no(os.mknod, '/tmp/w', 0o20000, 0))
print(no(os.rename, '/tmp/w', 'd/f'))
rc = libc.renameat2(-100, b'old', -100, b'd/old', 4)  # RENAME_WHITEOUT
print(rc, errno.errorcode[ctypes.get_errno()], os.listdir('d'))`, "EPERM EPERM done\nEXDEV\n-1 EINVAL ['f']",
			untouched...),
		inThread("marks of the overlay's own", "python", errnos+`
# Some kernels let everybody mark his own files with what begins with security, but for capabilities: Debian's 6.1, whose
# security modules include BPF. Nothing comes of that.
marks = {space: {no(os.setxattr, f, f'{space}.{x}', b'y') for f in ('d', 'old') for x in ('opaque', 'redirect', 'metacopy', 'origin')}
         for space in ('trusted.overlay', 'security.overlay', 'security')}
print(marks['trusted.overlay'])
print(no(os.setxattr, 'old', 'security.capability', bytes((1, 0, 0, 2)) + bytes(16)))
print([a for a in os.listxattr('d') + os.listxattr('old') if a.startswith('trusted')])`,
			"{'EPERM'}\nEPERM\n[]", untouched...),
		inThread("marks for users", "python", `
import os
for x in 'opaque', 'redirect', 'whiteout', 'whiteouts', 'metacopy', 'origin', 'impure':
    for f in 'd', 'old', 'd/f': os.setxattr(f, f'user.overlay.{x}', b'y')
os.setxattr('d', 'user.overlay.redirect', b'/old')
print(os.listdir('d'), open('d/f').read(), len(os.listxattr('old')))`, "['f'] x\n 7", untouched...),
		inThread("mounting overlays", "bash", `
mount -t overlay -o lowerdir=/usr:/etc x d 2>&1 | grep -c 'permi\|denied\|superuser'; mount -o remount,suid,dev ~ 2>&1 | grep -c 'permi\|denied\|superuser'
mount --bind / d 2>&1 | grep -c 'permi\|denied\|superuser'; umount ~ 2>/dev/null; echo $?; unshare -Um true 2>/dev/null; echo $?
grep ' /home/baponi ' /proc/self/mountinfo | cut -d' ' -f4,5; grep ' /home/baponi ' /proc/mounts | grep -o ' rw,nosuid,nodev'
grep -o '\(lower\|upper\|work\)dir[^,]*' /proc/self/mountinfo | grep -v '=/proc/self/fd/[0-9]*\(/upper\|/work\)\?$'; ls -A ~`,
			"1\n1\n1\n32\n1\n/ /home/baponi\n rw,nosuid,nodev\nd\nold", untouched...),
		inThread("symlinks everywhere", "bash", `
ln -s /etc/passwd main.py; ln -s / root; ln -s /proc/self/root magic; ln -s ../../../../.. up; ln -s . loop; rm -r d; ln -s /etc d; rm old; ln -s /proc/1/root/etc/shadow old
head -c 4 main.py; ls d/hostname`, "rootd/hostname",
			`drwxr-xr-x 0:0 "."`, `Lrwxrwxrwx 0:0 "./d" -> "/etc"`, `Lrwxrwxrwx 0:0 "./loop" -> "."`,
			`Lrwxrwxrwx 0:0 "./magic" -> "/proc/self/root"`,
			`Lrwxrwxrwx 0:0 "./main.py" -> "/etc/passwd"`, `Lrwxrwxrwx 0:0 "./old" -> "/proc/1/root/etc/shadow"`,
			`Lrwxrwxrwx 0:0 "./root" -> "/"`,
			`Lrwxrwxrwx 0:0 "./up" -> "../../../../.."`),
		inThread("hard links to what is not its own", "python", tried(
			"os.link, '/etc/passwd', 'a'", "os.link, '/usr/bin/env', 'b'",
			"os.link, '/run/bullpen/python/sitecustomize.py', 'c'", "os.link, '/proc/self/environ', 'e'",
			"os.link, '/proc/self/fd/0', 'g'",
		), "EXDEV\nEXDEV\nEXDEV\nEXDEV\nEXDEV", untouched...),
		inThread("FIFOs, sockets and devices", "bash", `
mkfifo main.py d/fifo; rm old; mkfifo old; python3 -c "import socket; [socket.socket(socket.AF_UNIX).bind(n) for n in ('d/s', 's')]"
for t in 'c 1 1' 'b 254 0' 'c 0 0' 'c 1 3'; do mknod n $t 2>/dev/null; echo $?; done; ls d`, "1\n1\n1\n1\nf\nfifo\ns",
			`drwxr-xr-x 0:0 "."`, `drwxr-xr-x 0:0 "./d"`, `-rw-r--r-- 0:0 "./d/f" 1 "x\n"`),
		inThread("set-uid files", "bash", `
cp /usr/bin/id .; chmod 6755 id; ./id -u; chmod 6755 old; mkdir g; chmod 2777 g; stat -c %A id old g; printf '#!/bin/sh\n' > id`, "1000\n-rwsr-sr-x\n-rwsr-sr-x\ndrwxrwsrwx",
			`drwxr-xr-x 0:0 "."`, `drwxr-xr-x 0:0 "./d"`, `-rw-r--r-- 0:0 "./d/f" 1 "x\n"`, `drwxrwxrwx 0:0 "./g"`,
			`-rwxr-xr-x 0:0 "./id" 1 "#!/bin/sh\n"`, `-rwxr-xr-x 0:0 "./old" 1 "old\n"`),
		inThread("names for others to stumble on", "python", `
import os
for name in (b'\xff\xfe', b'-rf', b'a\nb', b'*', b'\x01', b'#1', b'.wh.old', b'd/.wh..wh..opq'): open(name, 'w').close()
print(len(os.listdir(b'.')))`, "10", `drwxr-xr-x 0:0 "."`, `-rw-r--r-- 0:0 "./\x01" 1 ""`, `-rw-r--r-- 0:0 "./#1" 1 ""`,
			`-rw-r--r-- 0:0 "./*" 1 ""`,
			`-rw-r--r-- 0:0 "./-rf" 1 ""`, `-rw-r--r-- 0:0 "./.wh.old" 1 ""`, `-rw-r--r-- 0:0 "./a\nb" 1 ""`,
			`drwxr-xr-x 0:0 "./d"`,
			`-rw-r--r-- 0:0 "./d/.wh..wh..opq" 1 ""`, `-rw-r--r-- 0:0 "./d/f" 1 "x\n"`, `-rw-r--r-- 0:0 "./old" 1 "old\n"`,
			`-rw-r--r-- 0:0 "./\xff\xfe" 1 ""`),
		inThread("rm -rf of it all", "bash", "rm -rf ~ / --no-preserve-root 2>/dev/null; rm -rf ~/* ~/.[!.]*; ls -A ~", "",
			`drwxr-xr-x 0:0 "."`),
		{name: "directories that become links and back until the end", run: func(t *testing.T, m *Maker) {
			th := newThread(t, threadFiles())
			th.call(m, homeProgram(t, "python", hiddenPython, `
import ctypes, os
os.mkdir('t'); open('t/f', 'w').write('mine'); os.symlink('/etc', 'l')
if os.fork() == 0:
    os.setsid()
    swap = ctypes.CDLL(None).renameat2
    while True: swap(-100, b't', -100, b'l', 2); swap(-100, b'old', -100, b'd', 2)
while not os.path.islink('t'): pass
print('swapped')`)).want(t, jail.Exited, "swapped")
			got := th.version()
			for _, once := range []string{` -> "/etc"`, `/f" 1 "mine"`, `/f" 1 "x\n"`, ` 1 "old\n"`} {
				if strings.Count(got, once) != 1 || strings.Count(got, "\n") != 7 {
					t.Errorf("not one %s, or something else, in\n%s", once, got)
				}
			}
			th.call(m, program(t, "bash", "ls | wc -l")).want(t, jail.Exited, "4")
		}},
		inThread("switches of the file system", "python", errnos+`
import fcntl, struct
f, d = os.open('old', os.O_RDWR), os.open('.', os.O_RDONLY)
for name, code, arg in (('shutdown', 0x8004587d, struct.pack('I', 2)), ('freeze', 0xc0045877, bytes(4)), ('trim', 0xc0185879, bytes(24)),
        ('immutable', 0x40086602, struct.pack('L', 0x10)), ('append', 0x40086602, struct.pack('L', 0x20)), ('journal', 0x40086602, struct.pack('L', 0x4000)),
        ('project', 0x401c5820, struct.pack('5I8x', 0x200, 0, 0, 7, 0)), ('resize', 0x40086610, bytes(8)), ('swap', 0x40046611, bytes(4))):
    print(name, [no(fcntl.ioctl, x, code, arg) in ('EPERM', 'ENOTTY', 'EOPNOTSUPP', 'EINVAL') for x in (f, d)])`,
			"shutdown [True, True]\nfreeze [True, True]\ntrim [True, True]\nimmutable [True, True]\nappend [True, "+
				"True]\njournal [True, True]\nproject [True, True]\nresize [True, True]\nswap [True, True]", untouched...),
		inThread("writing to what is below", "python", errnos+`
import mmap
r = os.open('old', os.O_RDONLY)
print(no(mmap.mmap, r, 0, mmap.MAP_SHARED, mmap.PROT_WRITE), no(os.write, r, b'x'), no(os.ftruncate, r, 0))
print(no(os.fchmod, r, 0o777), no(os.utime, r, (0, 0)))
with open('d/f', 'r+b') as f: m = mmap.mmap(f.fileno(), 0); m[0:1] = b'z'; m.flush()
os.write(os.open(f'/proc/self/fd/{r}', os.O_WRONLY | os.O_TRUNC), b'new')`, "EACCES EBADF EINVAL\ndone done",
			`drwxr-xr-x 0:0 "."`, `drwxr-xr-x 0:0 "./d"`, `-rw-r--r-- 0:0 "./d/f" 1 "z\n"`, `-rwxrwxrwx 0:0 "./old" 1 "new"`),
		inThread("modes that bar everybody", "bash", "chmod 0 d/f d old ~", "",
			`drwx------ 0:0 "."`, `d--------- 0:0 "./d"`, `---------- 0:0 "./d/f" 1 "x\n"`, `---------- 0:0 "./old" 1 "old\n"`),
		{
			name: "a file in the place of the program's", want: jail.Outcome{Kind: jail.StartFailed},
			run: func(t *testing.T, m *Maker) {
				for _, taken := range []string{
					"ln -s /etc/passwd main.py",
					"mkfifo main.py; mkdir -p main.py.d; rm main.py; ln -s main.py.d/x main.py", "mkdir main.py",
				} {
					th := newThread(t, nil)
					th.call(m, program(t, "bash", taken)).want(t, jail.Exited, "")
					r := th.call(m, program(t, "python", "print(1)"))
					if r.Kind != jail.StartFailed || r.Step != "write /home/baponi/main.py" {
						t.Errorf("%s: %+v", taken, r.Outcome)
					}
				}
			},
		},
		inThread("giants that are all holes", "python", errnos+`
for name in 'a', 'b', 'c':
    with open(name, 'wb') as f: f.seek((2 << 40) - 1); f.write(b'x')
with open('old', 'ab') as f: f.truncate(1 << 40)
print(os.stat('c').st_blocks < 100)`, "True", `drwxr-xr-x 0:0 "."`, `-rw-r--r-- 0:0 "./a" 1 2199023255552 bytes`,
			`-rw-r--r-- 0:0 "./b" 1 2199023255552 bytes`,
			`-rw-r--r-- 0:0 "./c" 1 2199023255552 bytes`, `drwxr-xr-x 0:0 "./d"`, `-rw-r--r-- 0:0 "./d/f" 1 "x\n"`,
			`-rw-r--r-- 0:0 "./old" 1 1099511627776 bytes`),
		{name: "files of countless parts between holes", run: func(t *testing.T, m *Maker) {
			for where, refused := range map[string]string{
				"'a'": `"a" has 32769 parts`, "i % 64": `parts between holes with the files before it`,
			} {
				th := newThread(t, threadFiles())
				spec := th.spec()
				spec.HomeBytes = 512 << 20
				runProgram(t, m, spec, program(t, "python", fmt.Sprintf(`
for i in range(33000):
    with open(str(%s), 'ab') as f: f.truncate(8192 * (i + 1)); f.seek(0, 2); f.write(b'x')
print('done')`, where))).want(t, jail.Exited, "done")
				if err := th.save(); err == nil || !strings.Contains(err.Error(), refused) {
					t.Errorf("%s: %v", where, err)
				}
				th.wantVersion(untouched...)
				th.call(m, program(t, "bash", "cat old")).want(t, jail.Exited, "old")
			}
		}},
		{name: "directories without end", run: func(t *testing.T, m *Maker) {
			th := newThread(t, threadFiles())
			runProgram(t, m, th.spec(),
				program(t, "python", "import os\nfor i in range(2000): os.mkdir('d' * 100); os.chdir('d' * 100)\nprint('deep')")).
				want(t, jail.Exited, "deep")
			if err := th.save(); err == nil || !strings.Contains(err.Error(), "nested more than") {
				t.Errorf("%v", err)
			}
			th.wantVersion(untouched...)
			th.call(m, program(t, "bash", "cat old")).want(t, jail.Exited, "old")
		}},
	}
}
