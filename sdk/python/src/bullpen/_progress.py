"""The progress of map, shown by tqdm where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Callable[[], object]]:
    """Yields a function to call after each of total steps. If show is None, a terminal or notebook decides."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, disable=None if show is None else not show) as bar:
        yield bar.update
