#!/bin/bash
# Installs the Debian package from dist/ in a virtual machine with Debian 12 and systemd, and starts its units there: that of a server in one
# process, then those of single roles. deploy/systemd/check.sh is what runs there. As root, with mmdebstrap, qemu-system-x86 and e2fsprogs.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/vm.sh
package=$(echo dist/bullpen_*_amd64.deb)
[ -e "$package" ] || { echo "test-units: no package in dist/: make release" >&2; exit 1; }
[ -z "$emulated" ] || echo "test-units: no KVM: the processor is emulated"
make_vm

work=$vm/units
rm -rf "$work"
mkdir -p "$work/bin"
cp "$package" "$work/bullpen.deb"
cp bin/deno/deno "$work/bin"
cp deploy/systemd/check.sh "$work/run"
# The drop-ins for directories of one owner and of several
awk -v dir="$work" '/^```ini$/ {file = dir "/directories-" ++n ".conf"; next} /^```$/ {file = ""} file {print >file}' docs/guides/storage.md
CGO_ENABLED=0 go build -o "$work/bin/nats-server" github.com/nats-io/nats-server/v2
CGO_ENABLED=0 go build -modfile=deploy/s3server/go.mod -o "$work/bin/versitygw" github.com/versity/versitygw/cmd/versitygw
boot_vm "$work"
