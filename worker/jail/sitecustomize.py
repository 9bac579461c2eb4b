# Runs once, before the program: waits for it if this interpreter was started ahead
# of it, makes stdout line-buffered, as on a terminal, puts the user's site on the
# path, and then is as if it had never been there. It is compiled at every start:
# each line costs some microseconds.
import os
import site
import sys

here = __file__.rpartition("/")[0]
sys.path.remove(here)
sys.path_importer_cache.pop(here, None)
os.environ.pop("PYTHONPATH", None)
if sys.stdout is not None:
    sys.stdout.reconfigure(line_buffering=True)

# As wire.AheadFD says. The environment is made anew, in the order in which that of a
# program is handed to it.
if ahead := os.environ.pop("BULLPEN_AHEAD", None):
    if ahead != "1":
        # The program is for one that is forked from this interpreter.
        forks = {"__builtins__": dict(__builtins__)}  # a copy: the program may change its own
        exec(open(ahead, "rb").read(), forks)
        forks["fork"]()
    os.write(3, b".")
    told = b""
    while part := os.read(3, 65536):
        told += part
    os.close(3)
    home, *added = told.split(b"\0")[:-1]
    os.chdir(home)
    env = dict(os.environb)
    for name in env:
        del os.environb[name]
    env.update(variable.split(b"=", 1) for variable in added)
    for name in sorted(env):
        os.environb[name] = env[name]

# Where site would have put it, also if it is not there yet, with a finder that
# sees it come: import x works after pip has installed x. Without a finder the
# import system would look once and never again. It is before the system's, and
# after a virtual environment's.
user = site.ENABLE_USER_SITE and os.path.abspath(site.USER_SITE)
if user and user not in sys.path:
    system = site.getsitepackages(site.PREFIXES[-2:])
    first = next((i for i, place in enumerate(sys.path) if place in system), len(sys.path))
    later = sys.path[first:]
    del sys.path[first:]
    site.addsitedir(user)
    sys.path += [place for place in later if place not in sys.path]
    machinery = sys.modules["_frozen_importlib_external"]
    sys.path_importer_cache[user] = machinery.FileFinder(user, *machinery._get_supported_file_loaders())

# The distribution may have a sitecustomize of its own, which ours hid. If not,
# site takes the error as a word that there is none.
del sys.modules["sitecustomize"]
import sitecustomize
