# Run by sitecustomize.py in an interpreter that is there to be forked from: it never
# sees anything of a tenant's. Each order that comes on descriptor 3 makes a jail within
# the jail, with namespaces, a root, and ids of its own; fork returns in the
# interpreter that is to run a program there. What has been imported for it here is
# taken out again, so that a program finds what it would have found.
#
# An order is a message of strings that each end with a zero byte: the id here that
# is root there, and the next one up is the program's; the id that the program has
# there; the most processes of it; the numbers of the system calls clone and
# unshare; the filter, in hexadecimal; and what to mount, as the five
# arguments of mount(2) each. The descriptors that come with it are: the init's
# executable, its control socket, its lock, the program's stdout and stderr, and files
# of control groups that a process enters by writing 0 to them.
def fork():
    import os
    import sys

    for name in filter(None, os.environ.pop("BULLPEN_PRELOAD", "").split(",")):
        __import__(name)
    modules = dict(sys.modules)
    finders = dict(sys.path_importer_cache)
    import _signal
    import _socket
    import ctypes

    NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
        0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    # The interpreter's lock is held across these calls: after clone there is nobody
    # who would give it back.
    libc = ctypes.PyDLL(None, use_errno=True)

    def call(name, *args):
        result = getattr(libc, name)(*args)
        if result == -1:
            errno = ctypes.get_errno()
            raise OSError(errno, name + ": " + os.strerror(errno))
        return result

    def drop_from_bounding_set(capabilities):
        for c in capabilities:
            call("prctl", 24, c, 0, 0, 0)

    last = int(open("/proc/sys/kernel/cap_last_cap").read())
    ours = (5, 6, 7, 8)  # CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP: the init's

    def jail(fields, mounts, fds):
        """Makes this process the first of a jail; returns in the second."""
        unshare = int(fields[4])
        high = range(100, 100 + len(fds))
        for fd, to in zip(fds, high):
            os.dup2(fd, to, False)
        os.closerange(3, 100)
        init, control, lock, out, err, *groups = high
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        for group in groups:
            os.write(group, b"0")
            os.close(group)
        call("syscall", unshare, NEWCGROUP)
        for source, target, kind, flags, data in mounts:
            call("mount", source, target, kind, ctypes.c_ulong(int(flags)), data)
        lo = call("socket", 2, 2 | os.O_CLOEXEC, 0)
        call("ioctl", lo, ctypes.c_ulong(0x8914), b"lo".ljust(16, b"\0") + b"\1".ljust(24, b"\0"))  # up
        os.close(lo)
        drop_from_bounding_set(c for c in range(last + 1) if c not in ours)
        theirs, mine = (s.detach() for s in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM))
        if os.fork():
            os.dup2(theirs, 5)
            os.dup2(control, 3)
            os.dup2(lock, 4)
            os.closerange(6, init)
            os.closerange(init + 1, init + len(fds))
            for ignored in (_signal.SIGPIPE, _signal.SIGXFSZ):
                _signal.signal(ignored, _signal.SIG_DFL)
            os.execve(init, [b"init", b"child"], {b"GOGC": b"off", b"GOMAXPROCS": b"2"})
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(mine, 3)
        os.closerange(4, 120)
        drop_from_bounding_set(ours)
        me = int(fields[1])
        os.setresgid(me, me, me)
        os.setresuid(me, me, me)
        call("prctl", 4, 1, 0, 0, 0)  # dumpable, as after an exec
        most = ctypes.c_ulong * 2
        call("setrlimit", 6, most(int(fields[2]), int(fields[2])))
        code = bytes.fromhex(fields[5].decode())

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

        call("prctl", 22, 2, ctypes.byref(Program(len(code) // 8, code)), 0, 0)

    def serve():
        orders = _socket.socket(fileno=3)
        os.write(3, b".")
        while True:
            message, ancillary, *_ = orders.recvmsg(1 << 16, _socket.CMSG_SPACE(64))
            if not message:
                os._exit(0)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
            fds = memoryview(ancillary[0][2]).cast("i").tolist()
            fields = message.split(b"\0")[:-1]
            mounts = [fields[i:i + 5] for i in range(6, len(fields), 5)]
            ready, go = os.pipe()
            flags = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | _signal.SIGCHLD
            pid = call("syscall", int(fields[3]), ctypes.c_ulong(flags), None, None, None, None)
            if pid == 0:
                os.close(go)
                if not os.read(ready, 1):
                    os._exit(1)
                fds_and_more = fds
                orders.detach()
                return fields, mounts, fds_and_more
            for fd in (ready, *fds):
                os.close(fd)
            first = int(fields[0])
            lines = b"0 %d 1\n%s %d 1\n" % (first, fields[1], first + 1)
            try:
                for ids in ("gid_map", "uid_map"):
                    with open("/proc/%d/%s" % (pid, ids), "wb", 0) as f:
                        f.write(lines)
                os.write(go, b".")
            except OSError as e:
                os.write(2, b"map the ids of a jail: %s\n" % str(e).encode())
            os.close(go)

    fields, mounts, fds = serve()
    try:
        jail(fields, mounts, fds)
    except BaseException as e:
        os.write(2, b"make a jail: %s: %s\n" % (type(e).__name__.encode(), str(e).encode()))
        os._exit(1)
    for name in [name for name in sys.modules if name not in modules]:
        del sys.modules[name]
    sys.path_importer_cache.clear()
    sys.path_importer_cache.update(finders)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
