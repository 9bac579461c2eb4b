# Runs once, before the program: makes stdout line-buffered, as on a terminal,
# and then is as if it had never been there.
def _bullpen():
    import os
    import sys

    here = __file__.rpartition("/")[0]
    sys.path[:] = [p for p in sys.path if p != here]
    sys.path_importer_cache.pop(here, None)
    os.environ.pop("PYTHONPATH", None)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)
    # The distribution may have a sitecustomize of its own, which ours hid.
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize
    except ImportError as e:
        if e.name != "sitecustomize":
            raise
        # The import system insists on finding the module it has just run.
        sys.modules["sitecustomize"] = ours


_bullpen()
del _bullpen
