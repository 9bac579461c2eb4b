package nsjail

// seccompPolicy is a deny-list in nsjail's language (kafel). An allow-list would break with every
// new libc. The missing capabilities already forbid most of these calls. They are denied again
// because each of them has been an escape from a user namespace before. Package filter adds what
// this language cannot express, and what must be allowed while a jail inside another one is
// created.
//
// clone3 fails with ENOSYS, because its flags are in memory, where a filter cannot see them; every
// libc falls back to clone. Numbers in EPERM conditions are masked to the 32 bits that the kernel
// uses, or compared so that odd upper bits are denied.
//
// SO_ATTACH_FILTER, SO_ATTACH_BPF and their reuseport forms (26, 50, 51, 52) are denied. The programs
// they attach use up a limit of the whole host (net.core.bpf_jit_limit), without which no jail
// starts. io_setup is denied because of fs.aio-max-nr. 457, 458 and 467 are statmount, listmount
// and open_tree_attr. Of the internet protocols only TCP and UDP (6, 17) are allowed: the others
// may load kernel modules.
const seccompPolicy = `
POLICY bullpen {
  KILL_PROCESS {
    kexec_load, kexec_file_load, reboot, init_module, finit_module, delete_module,
    swapon, swapoff, iopl, ioperm
  },
  ERRNO(38) { clone3, io_setup, io_submit, SYSCALL[457], SYSCALL[458], SYSCALL[467] },
  ERRNO(97) {
    socket(family) { family != 1 && family != 2 && family != 10 && family != 16 },
    socketpair(family) { family != 1 }
  },
  ERRNO(93) {
    socket(family, type, protocol) {
      (family == 16 && protocol != 0) ||
      ((family == 2 || family == 10) && protocol != 0 && protocol != 6 && protocol != 17)
    }
  },
  ERRNO(1) {
    setsockopt(fd, level, optname) {
      (level & 0xffffffff) == 1 &&
      ((optname & 0xffffffff) == 26 || (optname & 0xffffffff) == 50 || (optname & 0xffffffff) == 51 || (optname & 0xffffffff) == 52)
    },
    ptrace, process_vm_readv, process_vm_writev, kcmp, pidfd_getfd,
    add_key, keyctl, request_key,
    bpf, perf_event_open, userfaultfd, lookup_dcookie,
    io_uring_setup, io_uring_enter, io_uring_register,
    umount, pivot_root, chroot, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr,
    setns,
    name_to_handle_at, open_by_handle_at, fanotify_init, fanotify_mark,
    clock_settime, clock_adjtime, adjtimex, settimeofday,
    sethostname, setdomainname,
    syslog, acct, quotactl, quotactl_fd, nfsservctl, vhangup, modify_ldt,
    personality(persona) { persona != 0 && persona != 0xffffffff && persona != 0x0040000 },
    ioctl(fd, cmd) { (cmd & 0xffffffff) == 0x5412 || (cmd & 0xffffffff) == 0x541C }
  }
}
USE bullpen DEFAULT ALLOW
`
