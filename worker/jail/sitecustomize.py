# Runs once, before the program. Makes stdout line-buffered, as on a terminal, and puts the user's
# site on the path. Waits for the program if this interpreter was prewarmed. Then removes
# every trace of itself. It is compiled at every start, and each line costs a few microseconds.
# Nobody waits for what is done before the wait.
import os
import site
import sys

here = __file__.rpartition("/")[0]
sys.path.remove(here)
sys.path_importer_cache.pop(here, None)
os.environ.pop("PYTHONPATH", None)
if sys.stdout is not None:
    sys.stdout.reconfigure(line_buffering=True)

user = site.ENABLE_USER_SITE and os.path.abspath(site.USER_SITE)
system = site.getsitepackages(site.PREFIXES[-2:])
machinery = sys.modules["_frozen_importlib_external"]


def add_user_site():
    """Adds the user's site and the paths it names before the system's site and after a virtual environment's, as site does."""
    first = next((i for i, place in enumerate(sys.path) if place in system), len(sys.path))
    later = sys.path[first:]
    del sys.path[first:]
    site.addsitedir(user)
    sys.path += [place for place in later if place not in sys.path]


# Added even if it does not exist yet, with a finder that sees when it is created: import x then
# works after pip has installed x. Without a finder the import system would look only once.
if absent := user and user not in sys.path:
    add_user_site()
    sys.path_importer_cache[user] = machinery.FileFinder(user, *machinery._get_supported_file_loaders())


def begin():
    """Blocks until the order is whole: no code of the program or its home may run before."""
    try:
        if (last or os.read(3, 2)) != b"N":
            os._exit(1)
        os.close(3)
    except BaseException:
        os._exit(1)


def skip():
    """Replaces site's search for usercustomize when the search would find nothing."""
    site.execusercustomize = search


# See wire.PrewarmFD. site would report an error and go on to the program.
if prewarmed := os.environ.pop("BULLPEN_PREWARM", None):
    try:
        # Lists the directories too, as any search without a result does.
        customized = machinery.PathFinder.find_spec("usercustomize")
        code = None
        if spec := machinery.PathFinder.find_spec("sitecustomize"):
            code = spec.loader.get_code("sitecustomize")
        if code:
            module = sys.modules["_frozen_importlib"].module_from_spec(spec)
        if prewarmed != "1":
            # The program will run in a fork of this interpreter.
            forks = {"__builtins__": dict(__builtins__)}  # a copy: the program may change its own
            # Its source is freed before the fork. The code objects of this file and of zygote.py are
            # kept, because a fork would otherwise free them.
            kept = sys._getframe().f_code, compile(open(prewarmed, "rb").read(), prewarmed, "exec")
            exec(kept[1], forks)
        os.write(3, b".")
        order = b""
        while b"\0\0" not in order:
            order += os.read(3, 4096) or os._exit(1)
        settings, _, last = order.partition(b"\0\0")
        home, stdin, *added = settings.split(b"\0")
        os.chdir(home)
        if stdin != b"/dev/null":
            fd = os.open(stdin, os.O_RDONLY)
            os.dup2(fd, 0)
            os.close(fd)
        env = dict(variable.split(b"=", 1) for variable in added)
        if any(name not in os.environb for name in env):
            # Rebuilt, in the order in which a program receives its environment.
            env = dict(os.environb) | env
            for name in env.keys() & os.environb.keys():
                del os.environb[name]
        for name in sorted(env):
            os.environb[name] = env[name]
    except BaseException as e:
        os.write(2, b"prepare the interpreter: %s: %s\n" % (type(e).__name__.encode(), str(e).encode()))
        os._exit(1)

if prewarmed and user and os.access(user, os.F_OK):
    begin()
    if absent:
        add_user_site()
    prewarmed = None  # the user's site may have modules of these names

# The distribution may have its own sitecustomize, which this file hid. If it has none, site takes
# the error to mean that none exists.
del sys.modules["sitecustomize"]
if not prewarmed:
    import sitecustomize
else:
    if user and not customized:
        search, site.execusercustomize = site.execusercustomize, skip
    try:
        if not spec:
            raise ModuleNotFoundError(name="sitecustomize")
        if not code:
            sys.modules["_frozen_importlib"]._load(spec)
        else:
            sys.modules["sitecustomize"] = module
            try:
                exec(code, vars(module))
            except BaseException:
                sys.modules.pop("sitecustomize", None)
                raise
    finally:
        begin()
