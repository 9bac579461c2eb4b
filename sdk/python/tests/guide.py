"""Runs the Python blocks of documents, and compares what they print with the block of output that follows.

An ellipsis in the output stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

BLOCKS = re.compile(r"^```python\n(.*?)^```\n(?:```output\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def main() -> None:
    for page in sys.argv[1:]:
        names: dict[str, Any] = {"__name__": "guide"}
        blocks = BLOCKS.findall(Path(page).read_text())
        assert blocks, f"{page} has no Python"
        for code, want in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page, "exec"), names)
            pattern = ".*".join(map(re.escape, want.split("…")))
            assert re.fullmatch(pattern, printed.getvalue(), re.DOTALL), f"{page}:\n{code}\nprints\n{printed.getvalue()}"
        print(len(blocks), "blocks of", page)


if __name__ == "__main__":
    main()
