# Makes and boots virtual machines with Debian 12, systemd and control groups of version 2 alone, for the scripts that source this file from the
# root of the tree. As root, with mmdebstrap, qemu-system-x86 and e2fsprogs.
vm=$PWD/bin/vm

# Where the processor has no virtualization, /dev/kvm may still open, but runs only kernels that were built for it.
if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then
	emulated='' accel=kvm cpu=host mitigations=auto
else
	# Deep page tables and mitigations would cost an emulated processor the most.
	emulated=1 accel=tcg cpu=max,la57=off mitigations=off
fi

# Makes the disk and takes the kernel from it, once.
make_vm() {
	[ ! -e "$vm/disk" ] || return 0
	rm -rf "$vm"
	mkdir -p "$vm"
	# Root is logged in on the serial line, in a session as sshd would make one, and its shell runs what the second disk has.
	cat >"$vm/profile" <<-'SCRIPT'
		stty -echo -onlcr
		mkdir -p /opt/test && tar -xf /dev/vdb -C /opt/test && cd /opt/test && ./run; echo "ended with $?"
		systemctl poweroff
	SCRIPT
	cat >"$vm/login" <<-'UNIT'
		[Service]
		ExecStart=
		ExecStart=-/sbin/agetty --autologin root --noclear --keep-baud 115200 ttyS0 dumb
	UNIT
	mmdebstrap --quiet --variant=minbase \
		--include=systemd-sysv,libpam-systemd,dbus,udev,linux-image-amd64,python3,nodejs,ruby,libstdc++6,zlib1g,e2fsprogs,iproute2,procps,ca-certificates,tzdata,curl,age \
		--customize-hook='passwd --quiet --root "$1" --delete root' \
		--customize-hook="upload $vm/profile /root/.profile" \
		--customize-hook='mkdir -p "$1/etc/systemd/system/serial-getty@ttyS0.service.d"' \
		--customize-hook="upload $vm/login /etc/systemd/system/serial-getty@ttyS0.service.d/login.conf" \
		--customize-hook='cp -L "$1/vmlinuz" "$1/initrd.img" '"$vm" \
		bookworm "$vm/root"
	mke2fs -q -t ext4 -d "$vm/root" "$vm/disk.new" 6G
	rm -rf "$vm/root"
	mv "$vm/disk.new" "$vm/disk"
}

# boot_vm DIR: boots a machine with a copy of DIR and prints what DIR/run prints there, of which bin/vm/log keeps a copy. It fails if run does.
# What the machine writes to its disk is forgotten.
boot_vm() {
	tar -cf "$vm/files.tar" -C "$1" .
	qemu-system-x86_64 -machine q35 -accel "$accel" -cpu "$cpu" -smp 2 -m 4G -no-reboot -display none -monitor none -nic none \
		-kernel "$vm/vmlinuz" -initrd "$vm/initrd.img" -append "root=/dev/vda rw console=ttyS0 quiet panic=-1 systemd.show_status=0 mitigations=$mitigations" \
		-drive "file=$vm/disk,format=raw,if=virtio,snapshot=on" -drive "file=$vm/files.tar,format=raw,if=virtio,readonly=on" \
		-serial stdio </dev/null | tee "$vm/log"
	grep -q '^ended with 0' "$vm/log"
}
