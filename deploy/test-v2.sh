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
. deploy/vm.sh
[ $# -gt 0 ] || set -- worker worker/home worker/home/cache worker/pool worker/jail/{cgroup,disk,egress,hostmemory,nsjail}
packages=$*
if [ "$emulated" ]; then
	flags="-test.skip='^TestAbuse$/^memory$/./^in_(locks_of_files|open_directories)|^TestQueriesAreLimited$' ${flags:--test.short}"
	echo "test-v2: no KVM: the processor is emulated; flags are $flags"
fi
make_vm

work=$vm/tests
rm -rf "$work"
mkdir -p "$work/bin" "$work/docs"
cp -a go.mod "$work"
cp -a bin/bullpen bin/nsjail bin/deno "$work/bin"
cp -a docs/explanation docs/reference "$work/docs"
for p in $packages; do
	dir=$work/$p
	mkdir -p "$dir"
	CGO_ENABLED=0 go test -c -o "$dir/test" "./$p"
	[ ! -e "$p/testdata" ] || cp -a "$p/testdata" "$dir"
done
cat >"$work/run" <<-SCRIPT
	#!/bin/bash
	uname -r; grep cgroup /proc/mounts; cat /proc/self/cgroup
	bin/bullpen doctor || failed=1
	bin/bullpen quickstart || failed=1
	for p in $packages; do
		(cd \$p && ./test -test.shuffle=on -test.timeout=4h ${flags:-}) || failed=1
	done
	exit \${failed:-0}
SCRIPT
chmod +x "$work/run"
boot_vm "$work"
