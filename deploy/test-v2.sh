#!/bin/bash
# Tests jails on control groups of version 2 alone, as a fresh Debian 12 with systemd has them, in a virtual machine: from root's login,
# `bullpen doctor`, `bullpen quickstart`, and the tests of the packages that are named, or of those that create jails or what jails use.
# As root, with mmdebstrap, qemu-system-x86 and e2fsprogs.
# flags are for the tests: flags='-test.run=TestAbuse' deploy/test-v2.sh worker/jail/nsjail makes the attacks alone.
# Where the machine cannot run virtual machines with KVM, the processor is emulated: the tests take twenty times as long, so that flags
# are -test.short unless they are set, and attacks are left out that become too slow for the watch of the host's memory to find them, and
# a test of 3,000 queries, of which too many time out.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/bin/v2
[ $# -gt 0 ] || set -- worker worker/home worker/home/cache worker/pool worker/jail/{cgroup,disk,egress,hostmemory,nsjail}
packages=$*
# Where the processor has no virtualization, /dev/kvm may still open, but runs only kernels that were built for it.
if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then
	accel=kvm cpu=host mitigations=auto
else
	# Deep page tables and mitigations would cost an emulated processor the most.
	accel=tcg cpu=max,la57=off mitigations=off
	flags="-test.skip='^TestAbuse$/^memory$/./^in_(locks_of_files|open_directories)|^TestQueriesAreLimited$' ${flags:--test.short}"
	echo "test-v2: no KVM: the processor is emulated; flags are $flags"
fi

if [ ! -e "$work/disk" ]; then
	rm -rf "$work"
	mkdir -p "$work"
	trap 'rm -rf "$work"' EXIT
	# Root is logged in on the serial line, in a session as sshd would make one, and its shell runs what the second disk has.
	cat >"$work/profile" <<-'SCRIPT'
		stty -echo -onlcr
		mkdir -p /opt/test && tar -xf /dev/vdb -C /opt/test && cd /opt/test && ./run; echo "ended with $?"
		systemctl poweroff
	SCRIPT
	cat >"$work/login" <<-'UNIT'
		[Service]
		ExecStart=
		ExecStart=-/sbin/agetty --autologin root --noclear --keep-baud 115200 ttyS0 dumb
	UNIT
	mmdebstrap --quiet --variant=minbase \
		--include=systemd-sysv,libpam-systemd,dbus,udev,linux-image-amd64,python3,nodejs,ruby,libstdc++6,e2fsprogs,iproute2,procps,ca-certificates,tzdata \
		--customize-hook='passwd --quiet --root "$1" --delete root' \
		--customize-hook="upload $work/profile /root/.profile" \
		--customize-hook='mkdir -p "$1/etc/systemd/system/serial-getty@ttyS0.service.d"' \
		--customize-hook="upload $work/login /etc/systemd/system/serial-getty@ttyS0.service.d/login.conf" \
		--customize-hook='cp -L "$1/vmlinuz" "$1/initrd.img" '"$work" \
		bookworm "$work/root"
	mke2fs -q -t ext4 -d "$work/root" "$work/disk.new" 6G
	rm -rf "$work/root"
	mv "$work/disk.new" "$work/disk"
	trap - EXIT
fi

rm -rf "$work/tests"
mkdir -p "$work/tests/bin" "$work/tests/docs"
cp -a go.mod bin/bullpen bin/nsjail bin/deno docs/sandbox.md "$work/tests"
mv "$work/tests/bullpen" "$work/tests/nsjail" "$work/tests/deno" "$work/tests/bin"
mv "$work/tests/sandbox.md" "$work/tests/docs"
for p in $packages; do
	dir=$work/tests/$p
	mkdir -p "$dir"
	CGO_ENABLED=0 go test -c -o "$dir/test" "./$p"
	[ ! -e "$p/testdata" ] || cp -a "$p/testdata" "$dir"
done
cat >"$work/tests/run" <<-SCRIPT
	#!/bin/bash
	uname -r; grep cgroup /proc/mounts; cat /proc/self/cgroup
	bin/bullpen doctor || failed=1
	bin/bullpen quickstart || failed=1
	for p in $packages; do
		(cd \$p && ./test -test.shuffle=on -test.timeout=4h ${flags:-}) || failed=1
	done
	exit \${failed:-0}
SCRIPT
chmod +x "$work/tests/run"
tar -cf "$work/tests.tar" -C "$work/tests" .

# The serial line is the output; what the machine writes to its disk is forgotten.
qemu-system-x86_64 -machine q35 -accel "$accel" -cpu "$cpu" -smp 2 -m 4G -no-reboot -display none -monitor none -nic none \
	-kernel "$work/vmlinuz" -initrd "$work/initrd.img" -append "root=/dev/vda rw console=ttyS0 quiet panic=-1 systemd.show_status=0 mitigations=$mitigations" \
	-drive "file=$work/disk,format=raw,if=virtio,snapshot=on" -drive "file=$work/tests.tar,format=raw,if=virtio,readonly=on" \
	-serial stdio </dev/null | tee "$work/log"
grep -q '^ended with 0' "$work/log"
