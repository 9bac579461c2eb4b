# Runs once, before the program: makes stdout line-buffered, as on a terminal, puts the
# user's site on the path, waits for the program if this interpreter was started ahead
# of it, and then is as if it had never been there. It is compiled at every start:
# each line costs some microseconds. What is done before the wait costs nobody any.
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
    """Puts the user's site, and what it names, where site would have put it: before the system's, and after a virtual environment's."""
    first = next((i for i, place in enumerate(sys.path) if place in system), len(sys.path))
    later = sys.path[first:]
    del sys.path[first:]
    site.addsitedir(user)
    sys.path += [place for place in later if place not in sys.path]


# Also if it is not there yet, with a finder that sees it come: import x works after
# pip has installed x. Without a finder the import system would look once and never again.
if absent := user and user not in sys.path:
    add_user_site()
    sys.path_importer_cache[user] = machinery.FileFinder(user, *machinery._get_supported_file_loaders())


def begin():
    """Returns when the stream has ended: until then nothing of the program's, nor of its home's, may run."""
    os.read(3, 1)
    os.close(3)


def skip():
    """Is in the place of site's search for usercustomize where that would find nothing."""
    site.execusercustomize = search


# As wire.AheadFD says.
if ahead := os.environ.pop("BULLPEN_AHEAD", None):
    # Lists the directories, too, as any search does that finds nothing.
    customized = machinery.PathFinder.find_spec("usercustomize")
    code = None
    if spec := machinery.PathFinder.find_spec("sitecustomize"):
        code = spec.loader.get_code("sitecustomize")
    if code:
        module = sys.modules["_frozen_importlib"].module_from_spec(spec)
    if ahead != "1":
        # The program is for one that is forked from this interpreter.
        forks = {"__builtins__": dict(__builtins__)}  # a copy: the program may change its own
        # What it is compiled from is gone before, and what this and that are compiled to is
        # kept: else a fork would clear it.
        kept = sys._getframe().f_code, compile(open(ahead, "rb").read(), ahead, "exec")
        exec(kept[1], forks)
    os.write(3, b".")
    told = b""
    while not told.endswith(b"\0\0"):
        told += os.read(3, 4096) or os._exit(1)
    home, stdin, *added = told.split(b"\0")[:-2]
    os.chdir(home)
    if stdin != b"/dev/null":
        fd = os.open(stdin, os.O_RDONLY)
        os.dup2(fd, 0)
        os.close(fd)
    env = dict(variable.split(b"=", 1) for variable in added)
    if any(name not in os.environb for name in env):
        # Anew, in the order in which the environment of a program is handed to it.
        env = dict(os.environb) | env
        for name in env.keys() & os.environb.keys():
            del os.environb[name]
    for name in sorted(env):
        os.environb[name] = env[name]

if ahead and user and os.access(user, os.F_OK):
    begin()
    if absent:
        add_user_site()
    ahead = None  # it may have modules of these names

# The distribution may have a sitecustomize of its own, which ours hid. If not,
# site takes the error as a word that there is none.
del sys.modules["sitecustomize"]
if not ahead:
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
