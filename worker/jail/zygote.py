# sitecustomize.py runs this file in a zygote's interpreter, which never sees any data of a tenant.
# Each order on descriptor 3 creates a jail inside the zygote's jail, with its own namespaces and
# ids. In the forked interpreter that will run a program there, this file runs to its end. Modules
# imported for this purpose are removed again, so that a program sees the usual state. Memory
# touched after a fork is copied. As much as possible is therefore created before the fork, and
# state is global, because globals are not cleared.
#
# An order is a message of strings that each end with a zero byte. The first is the id in the
# zygote's jail of the new jail's root; the next id is the program's. Then come the id of the
# program in the new jail, its maximum number of processes, the number of the calls of mount(2) to
# make there, and these calls, five strings each. The descriptors that come with an order are the init's executable, its control
# socket, its lock, files of control groups that a process joins by writing 0 to them, and the
# program's stdout and stderr. The variable BULLPEN_ZYGOTE holds the numbers of the system calls
# clone, unshare and seccomp and, in hexadecimal, the filter.
def ending():
    """Makes forks exit fast. Returns a function to call when all preloaded state exists, and one to call in a fork before the program.

    At exit an interpreter clears all its objects, which in a fork would first copy their pages.
    If the program has run to its end and nothing remains that could notice, a fork exits
    at once. Otherwise it exits as any interpreter does.
    """
    import sys

    known = set(sys.modules)  # modules with nothing to do at exit
    import _io
    import _thread
    import _warnings
    import _weakref
    import atexit
    import gc
    import itertools
    import operator
    import os

    # Saved, because a program may replace them.
    objects, blocks, debug, threads, leave = gc.get_objects, sys.getallocatedblocks, gc.get_debug, _thread._count, os._exit
    module, builtin, function = type(sys), type(len), type(ending)
    flags = type.__dict__["__flags__"].__get__
    line = type.__dict__["__mro__"].__get__
    names = type.__dict__["__dict__"].__get__
    callback = _weakref.ReferenceType.__dict__["__callback__"].__get__
    # Compared by id, because a program's classes may define __eq__.
    a_class, weak, *proxies = map(id, (type, _weakref.ReferenceType, _weakref.ProxyType, _weakref.CallableProxyType))
    files = set(map(id, (_io.FileIO, _io.BufferedReader, _io.BufferedWriter, _io.BufferedRandom, _io.TextIOWrapper)))
    main = sys.modules["__main__"]
    attributes = vars(main)
    own = set(attributes)
    out, err = sys.stdout, sys.stderr
    streams = set()
    for stream in (sys.stdin, out, err):
        while stream is not None:
            streams.add(id(stream))
            stream = getattr(stream, "buffer", None) or getattr(stream, "raw", None)
    # C modules that have nothing to do at exit, and neither have their objects.
    inert = frozenset(
        "_abc _ast _asyncio _bisect _blake2 _bz2 _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw"
        " _collections _contextvars _crypt _csv _datetime _decimal _elementtree _functools _hashlib _heapq _json _locale"
        " _lsprof _lzma _md5 _multibytecodec _opcode _operator _pickle _posixsubprocess _queue _random _sha1 _sha2 _sha256"
        " _sha3 _sha512 _signal _socket _sre _ssl _stat _statistics _string _struct _symtable _tokenize _typing _uuid"
        " _weakref _zoneinfo array atexit binascii cmath errno fcntl gc grp itertools math mmap pwd pyexpat resource select"
        " syslog termios time typing.io typing.re unicodedata zlib".split()
    )
    quick, most, filters, probe = False, 0, [], None

    def simple(name):
        m = sys.modules[name]
        if name in inert:
            return True
        source = type(m) is module and vars(m).get("__file__")
        return type(source) is str and source.endswith(".py")

    def tidies(call):
        """Reports whether a callback of a weak reference only removes it from a table of the library."""
        if type(call) is builtin:
            return call.__name__ in ("_destroy", "_localdummy_destroyed")
        tables = ("_frozen_importlib", "_weakrefset", "importlib._bootstrap", "logging", "weakref")
        return type(call) is function and call.__module__ in tables and call.__name__ != "_cb"

    def has_end(kind):
        return any("__del__" in names(c) for c in line(kind))

    def notice(all_objects):
        """Reports whether any of the objects would notice the exit."""
        plain = set()
        for o in all_objects:
            kind = type(o)
            if id(kind) in plain or id(kind) in files and (o.closed or id(o) in streams):
                continue
            if id(kind) in proxies or has_end(kind):
                return True
            ancestors = set(map(id, line(kind)))
            if weak in ancestors:
                if (call := callback(o)) is not None and not tidies(call):
                    return True
            elif a_class in ancestors:
                # The collector does not list instances of a class without this flag
                # (Py_TPFLAGS_HAVE_GC).
                if not flags(o) & 1 << 14 and has_end(o):
                    return True
            else:
                plain.add(id(kind))
        return False

    def unnoticed():
        """Reports whether an immediate exit with status 0 would go unnoticed."""
        # The interpreter removes these two when the program has run to its end, but not after
        # SystemExit.
        if "__file__" in attributes or "__cached__" in attributes or not own <= attributes.keys():
            return False
        if sys.modules["__main__"] is not main or not vars(sys).keys().isdisjoint(("last_type", "last_exc")):
            return False
        if sys.stdout is not out or sys.stderr is not err or sys.__stdout__ is not out or sys.__stderr__ is not err:
            return False
        if threads() > 0 or gc.callbacks or debug() or blocks() > most:
            return False
        python = sys.modules.get("warnings", _warnings)
        if _warnings.filters != filters or python.filters != filters or not all(map(simple, sys.modules.keys() - known)):
            return False
        left = objects()
        # The list lacks objects that the program has frozen itself.
        return id(probe) in map(id, left) and not notice(left)

    def end():
        try:
            if quick and unnoticed():
                out.flush()
                err.flush()
                leave(0)
        except BaseException:
            pass  # what fails here fails again at the regular exit, and the interpreter reports it

    def ready():
        nonlocal quick, most, filters
        quick = not notice(o for o in objects() if type(o) is not type)
        filters = list(_warnings.filters)
        most = blocks() + 50_000  # checking more would take long

    def begin():
        nonlocal probe
        probe = []

    # Registered first, so that they run last. If a program traces or profiles all calls of Python
    # functions, end is not called.
    atexit.register(gc.unfreeze)  # otherwise frozen objects, and what they refer to, would not be cleared
    untraced = [()]
    for get in (sys.getprofile, sys.gettrace):
        untraced = itertools.compress([()], map(operator.is_, itertools.starmap(get, untraced), itertools.repeat(None)))
    atexit.register(next, itertools.starmap(end, untraced), None)
    for name in sys.modules.keys() - known:
        del sys.modules[name]
    return ready, begin


import os
import sys

ready, begin = ending()
clone, unshare, seccomp, code = os.environ.pop("BULLPEN_ZYGOTE").split(",")
if preload := os.environ.pop("BULLPEN_PRELOAD", None):
    # An allocator of pyarrow, which pandas imports, would start a thread and keep it through a fork.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for name in preload.split(","):
        __import__(name)
    del os.environ["JE_ARROW_MALLOC_CONF"]
    # Libraries that end their threads before a fork do so now, because clone does not notify them.
    # Other libraries keep their threads for good, and a fork would lack them.
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        os._exit(0)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("what is preloaded has threads: leave out the module that starts them, of " + preload)
modules = dict(sys.modules)
finders = dict(sys.path_importer_cache)
ready()
import _signal
import _socket
import ctypes
import gc
import struct

# PyDLL holds the interpreter's lock across these calls. After clone, no other thread exists that
# could release it.
libc = ctypes.PyDLL(None, use_errno=True)
syscall, prctl, setrlimit, mount, ioctl = libc.syscall, libc.prctl, libc.setrlimit, libc.mount, libc.ioctl
clone, unshare, seccomp = map(ctypes.c_long, map(int, (clone, unshare, seccomp)))
NEWCGROUP, NEWNET = ctypes.c_ulong(0x2000000), ctypes.c_ulong(0x40000000)
# CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER and NEWPID
namespaces = ctypes.c_ulong(0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | _signal.SIGCHLD)
# CAP_KILL, SETGID, SETUID and SETPCAP: an init has these, a program has none.
inits = (5, 6, 7, 8)
others = [c for c in range(int(open("/proc/sys/kernel/cap_last_cap").read()) + 1) if c not in inits]
up = ctypes.c_ulong(0x8914), struct.pack("16sh22x", b"lo", 1)  # SIOCSIFFLAGS and IFF_UP
code = bytes.fromhex(code)


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


filter_ = ctypes.byref(Filter(len(code) // 8, code))
calls_file = os.memfd_create("filter")
os.write(calls_file, code)
limits = ctypes.c_ulong * 2
signals = limits()
libc.getrlimit(11, signals)
signals[:] = [min(1024, signals[1])] * 2  # same limit as in jailinit
orders = _socket.socket(fileno=3)


def check(result, what=None):
    if result == -1:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), what)
    return result


def put(path, text):
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def serve():
    """Creates a process for each order and returns in it. Logs the failure of an order and continues with the next."""
    while True:
        message, ancillary, flags, _ = orders.recvmsg(65536, 64)
        if not message:
            os._exit(0)
        open_here = []
        try:
            open_here = memoryview(ancillary[0][2]).cast("i").tolist()
            fds = tuple(open_here)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        try:
            root, program, processes, count, *mounts, end = message.split(b"\0")
            if flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC) or end or len(mounts) != 5 * int(count):
                raise ValueError("an order that is not whole")
            ready, go = os.pipe()
            open_here += ready, go
            pid = check(syscall(clone, namespaces, None, None, None, None))
            if pid == 0:
                os.close(go)
                if not os.read(ready, 1):
                    os._exit(1)
                return int(program), int(processes), mounts, fds
            lines = b"0 %s 1\n%s %d 1\n" % (root, program, int(root) + 1)
            put("/proc/%d/gid_map" % pid, lines)
            put("/proc/%d/uid_map" % pid, lines)
            os.write(go, b".")
        except OSError as e:
            os.write(2, b"make the namespaces of a jail: %s\n" % str(e).encode())
        for fd in open_here:
            os.close(fd)


def split(processes, mounts, fds):
    """Makes this process the first of a jail. Returns in the second process, with the descriptor of its future stderr."""
    fds += (calls_file,)
    high = range(100, 100 + len(fds))
    for fd, to in zip(fds, high):
        os.dup2(fd, to, False)  # closed by exec
    os.closerange(3, 100)
    init, control, lock, *groups, out, err, calls = high
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # Only now that root of the jail has an id do files of /proc/net belong to it (see jailinit).
    check(syscall(unshare, NEWNET))
    net = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    check(ioctl(net.fileno(), *up), "bring up the loopback")
    net.close()
    for group in groups:
        os.write(group, b"0")
    check(syscall(unshare, NEWCGROUP))
    mounts = iter(mounts)
    for source, target, kind, flags, options in zip(*[mounts] * 5):
        check(mount(source, target, kind, ctypes.c_ulong(int(flags)), options), "mount " + target.decode())
    for c in others:
        check(prctl(24, c, 0, 0, 0))  # removed from the bounding set
    check(setrlimit(6, limits(processes, processes)))
    theirs, mine = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    if os.fork():
        os.dup2(theirs.fileno(), 5)
        os.dup2(control, 3)
        os.dup2(lock, 4)
        os.dup2(calls, 6)
        os.execve(init, [b"init", b"fork"], {})
    # As in jailinit: SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_NEW_LISTENER, or without.
    listener = syscall(seccomp, ctypes.c_ulong(1), ctypes.c_ulong(8), filter_)
    if listener == -1:
        check(syscall(seccomp, ctypes.c_ulong(1), ctypes.c_ulong(0), filter_))
    else:
        mine.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))])
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # all forks share locks and flags of the inherited one
    os.dup2(out, 1)
    os.dup2(mine.fileno(), 3)
    os.dup2(err, 4)
    theirs.detach(), mine.detach()
    os.closerange(5, high[-1] + 1)
    return 4


def confine(program):
    """Applies the ids, limits and capabilities of a program to this process."""
    check(setrlimit(11, signals))
    for c in inits:
        check(prctl(24, c, 0, 0, 0))
    os.setresgid(program, program, program)
    os.setresuid(program, program, program)
    check(prctl(4, 1, 0, 0, 0))  # dumpable, as after an exec


hidden = [sys.modules.pop(name) for name in list(sys.modules) if name not in modules]
# ctypes stays loaded to the end and would keep its imports alive. A program's os is freed earlier.
for module in hidden:
    for name, value in list(vars(module).items()):
        if type(value) is type(sys):
            delattr(module, name)
sys.path_importer_cache.clear()
sys.path_importer_cache.update(finders)
# Frozen: a collection in a fork would otherwise touch these objects and copy their pages.
gc.collect()
gc.freeze()
os.write(3, b".")
program, *jail = serve()
try:
    err = split(*jail)
    confine(program)
except BaseException as e:
    os.write(2, b"make a jail: %s: %s\n" % (type(e).__name__.encode(), str(e).encode()))
    os._exit(1)
os.dup2(err, 2)
os.close(err)
orders.detach()
if "numpy.random" in sys.modules:
    sys.modules["numpy.random"].seed()
begin()
