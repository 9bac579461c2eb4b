# Runs once, before the program: makes stdout line-buffered, as on a terminal,
# puts the user's site on the path, and then is as if it had never been there. It
# is compiled at every start: each line costs some microseconds.
import os
import site
import sys

here = __file__.rpartition("/")[0]
sys.path.remove(here)
sys.path_importer_cache.pop(here, None)
os.environ.pop("PYTHONPATH", None)
if sys.stdout is not None:
    sys.stdout.reconfigure(line_buffering=True)

# Where site would have put it, also if it is not there yet, with a finder that
# sees it come: import x works after pip has installed x. Without a finder the
# import system would look once and never again.
user = site.ENABLE_USER_SITE and os.path.abspath(site.USER_SITE)
if user and user not in sys.path:
    # Before the system's, and after a virtual environment's.
    for place in site.getsitepackages(site.PREFIXES[-2:]):
        if place in sys.path:
            sys.path.insert(sys.path.index(place), user)
            break
    else:
        sys.path.append(user)
    machinery = sys.modules["_frozen_importlib_external"]
    sys.path_importer_cache[user] = machinery.FileFinder(user, *machinery._get_supported_file_loaders())

# The distribution may have a sitecustomize of its own, which ours hid. If not,
# site takes the error as a word that there is none.
del sys.modules["sitecustomize"]
import sitecustomize
