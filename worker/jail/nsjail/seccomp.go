package nsjail

// seccompPolicy is a deny-list in nsjail's language (kafel). An allow-list would
// break with every new libc. Most of what is here is refused by the missing
// capabilities already; it is refused a second time because each of these has
// been a way out of a user namespace before.
//
// clone3 does not exist (ENOSYS), because its flags lie in memory where a filter
// cannot see them; every libc falls back to clone. Numbers in EPERM conditions
// are masked to the 32 bits the kernel looks at, or compared so that odd upper
// bits are refused.
const seccompPolicy = `
#define CLONE_NEW 0x7E020000
#define CLONE_NEW_OR_TIME 0x7E020080
POLICY bullpen {
  KILL_PROCESS {
    kexec_load, kexec_file_load, reboot, init_module, finit_module, delete_module,
    swapon, swapoff, iopl, ioperm
  },
  ERRNO(38) { clone3 },
  ERRNO(97) {
    socket(family) { family != 1 && family != 2 && family != 10 && family != 16 },
    socketpair(family) { family != 1 }
  },
  ERRNO(93) {
    socket(family, type, protocol) { family == 16 && protocol != 0 }
  },
  ERRNO(1) {
    ptrace, process_vm_readv, process_vm_writev, kcmp, pidfd_getfd,
    add_key, keyctl, request_key,
    bpf, perf_event_open, userfaultfd, lookup_dcookie,
    io_uring_setup, io_uring_enter, io_uring_register,
    mount, umount, pivot_root, chroot, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr,
    setns,
    unshare(flags) { (flags & CLONE_NEW_OR_TIME) != 0 },
    clone(flags) { (flags & CLONE_NEW) != 0 },
    open_by_handle_at,
    clock_settime, clock_adjtime, adjtimex, settimeofday,
    sethostname, setdomainname,
    syslog, acct, quotactl, quotactl_fd, nfsservctl, vhangup, modify_ldt,
    personality(persona) { persona != 0 && persona != 0xffffffff && persona != 0x0040000 },
    ioctl(fd, cmd) { (cmd & 0xffffffff) == 0x5412 || (cmd & 0xffffffff) == 0x541C }
  }
}
USE bullpen DEFAULT ALLOW
`
