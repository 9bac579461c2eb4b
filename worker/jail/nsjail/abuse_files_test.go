package nsjail

import "github.com/bullpen-run/bullpen/worker/jail"

func fileAttacks() []attack {
	return []attack{
		{
			name: "files of the host", language: "bash",
			code: "cat /etc/shadow /root/.bashrc /proc/kcore /sys/kernel/x 2>/dev/null; find /root /sys /var /opt /mnt /srv " +
				"/boot -mindepth 1 ! -path /mnt/data 2>/dev/null; ls -A /mnt/data; wc -l < /etc/passwd; cat " +
				"/etc/resolv.conf; hostname", stdout: "3\nbullpen",
		},
		{
			name: "the way up", language: "bash",
			code: "cd ../../../../..; pwd; ls -d .. | wc -l; [ / -ef /.. ] && [ / -ef /proc/self/root ]; echo $?; ls " +
				"/proc/1/root/ 2>/dev/null; true", stdout: "/\n1\n0",
		},
		{
			name: "links to what the host has", language: "bash",
			code: "ln -s /etc/shadow a; ln -s /proc/1/root b; ln -s ../../../../root c; cat a b/etc/shadow c/.bashrc " +
				"2>/dev/null | wc -c; ln /etc/passwd d 2>/dev/null; ln /usr/bin/env e 2>/dev/null; ls", stdout: "0\na\nb\nc",
		},
		{name: "replacing its own program", language: "python", code: `
import os
os.unlink('main.py'); os.symlink('/etc/passwd', 'main.py'); print(open('main.py').readline()[:4])`, stdout: "root"},
		{name: "replacing its home", language: "python", code: tried(
			"os.rename, os.environ['HOME'], '/tmp/home'", "os.rmdir, os.environ['HOME']", "os.symlink, '/', os.environ['HOME']",
			"os.rename, '/tmp', '/tmp2'",
			"os.rename, '/home', '/tmp/home'",
		), stdout: "EXDEV\nEROFS\nEEXIST\nEROFS\nEXDEV"},
		{
			name: "closing its home", language: "bash", code: "chmod 0 ~ /tmp/. 2>/dev/null; cd /; ls ~ 2>/dev/null; echo $?",
			stdout: "2",
		},
		{name: "device nodes", language: "python", code: tried(
			"os.mknod, 'c', 0o20666, os.makedev(1, 1)", "os.mknod, 'b', 0o60666, os.makedev(254, 0)", "open, '/dev/mem'",
			"open, '/dev/kmsg'", "open, '/dev/vda'",
			"open, '/dev/fuse'", "open, '/dev/net/tun'", "open, '/dev/kvm'",
		) + "print(len(os.listdir('/dev')))", stdout: "EPERM\nEPERM\nENOENT\nENOENT\nENOENT\nENOENT\nENOENT\nENOENT\n10"},
		{name: "marks of an overlay", language: "python", code: errnos + `
print(no(os.mknod, 'w', 0o20000, 0) in ('EPERM', 'done'))
os.mkdir('d')
print(no(os.setxattr, 'd', 'trusted.overlay.opaque', b'y'))`, stdout: "True\nEPERM"},
		{
			name: "FIFO and socket", language: "bash",
			code: "mkfifo f; (echo through > f &); cat f; python3 -c \"import socket; " +
				"socket.socket(socket.AF_UNIX).bind('s')\"; ls", stdout: "through\nf\ns",
		},
		{
			name: "setuid files of its own", language: "bash", code: "cp /usr/bin/id .; chmod 6755 id; ./id -u; stat -c %u id",
			stdout: "1000\n1000",
		},
		{
			name: "setuid files of the host", language: "bash",
			code:   "su -c id 2>&1 | grep -c uid=0; passwd -d root 2>&1 | grep -c changed; grep -vc nosuid /proc/mounts; true",
			stdout: "0\n0\n0",
		},
		{name: "names that are not UTF-8, options, line breaks", language: "python", code: `
import os
for name in (b'\xff\xfe', b'-rf', b'--', b'a\nb', b'*', b'x' * 255): open(name, 'w').close()
print(len(os.listdir(b'.')))`, stdout: "7"},
		{
			name: "writing what is shared", language: "bash",
			code: "for f in /usr/bin/env /etc/passwd /bin/sh /run/bullpen/python/sitecustomize.py; do (echo x >> $f) " +
				"2>/dev/null; echo $?; chmod 777 $f 2>/dev/null; done; touch /usr/x 2>/dev/null; echo $?", stdout: "1\n1\n1\n1\n1",
		},
		{
			name: "writing the code it is given", language: "bash",
			code:   "(echo echo changed >> $0) 2>/dev/null; rm -f $0 2>/dev/null; mv /run/bullpen/job /tmp 2>/dev/null; echo $?",
			stdout: "1",
		},
		{
			name: "stdout opened again", language: "bash",
			code: "echo a > /dev/stdout; echo b > /proc/self/fd/1; echo c > /dev/fd/1", stdout: "a\nb\nc",
		},
		{
			name: "running what it wrote", language: "bash", code: "printf '#!/bin/sh\\nexit 4\\n' > x; chmod +x x; ./x",
			want: jail.Outcome{Kind: jail.Exited, ExitCode: 4},
		},
	}
}
