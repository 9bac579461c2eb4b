"""The progress of map, shown by tqdm where it is installed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Callable[[], object]]:
    """Yields a function to call after each of total steps. If show is None, there is a bar on terminals and in notebooks."""
    if show is None:
        show = sys.stderr.isatty() or "ipykernel" in sys.modules
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of notebooks without widgets, where the bar is text
            from tqdm.auto import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, disable=not show) as bar:
        yield bar.update
