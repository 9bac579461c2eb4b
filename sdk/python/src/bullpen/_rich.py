"""How results show themselves in notebooks.

The code that made a result is not trusted, and a notebook runs the scripts of the HTML that it shows. So HTML is shown in
a frame that has no access to the notebook, and forms that a notebook would run, such as JavaScript, are left out.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

from ._model import Model

if TYPE_CHECKING:
    from .types import CellError, Display

IMAGES = ("image/png", "image/jpeg", "image/gif")


class Shown(Model):
    """A model with rich results, or one of them."""

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        plain, rich = bundle(self)
        return {"text/plain": plain, "text/html": rich}


def bundle(shown: Shown) -> tuple[str, str]:
    """Returns what to show, as text and as HTML."""
    if "data" in type(shown).model_fields:
        return display(shown)  # type: ignore[arg-type]
    plain: list[str] = []
    rich: list[str] = []

    def text(content: str | None) -> None:
        if content:
            plain.append(content.rstrip("\n"))
            rich.append(f"<pre>{html.escape(content)}</pre>")

    text(getattr(shown, "stdout", None))
    for result in getattr(shown, "results", None) or []:
        p, r = display(result)
        plain.append(p)
        rich.append(r)
    text(getattr(shown, "stderr", None))
    error: CellError | str | None = getattr(shown, "error", None)
    if isinstance(error, str):
        text(getattr(shown, "error_message", None) or error)
    elif error is not None:
        text("\n".join(error.traceback) or f"{error.name}: {error.value}")
    elif getattr(shown, "exit_code", 0):
        text(f"exit code {shown.exit_code}")  # type: ignore[attr-defined]
    return "\n".join(plain), "".join(rich)


def display(shown: Display) -> tuple[str, str]:
    """Returns one display, as text and as HTML."""
    data = {kind: "".join(value) if isinstance(value, list) else value for kind, value in shown.data.items()}
    plain = str(data.get("text/plain", ", ".join(data)))
    for kind in IMAGES:
        if kind in data:
            source = html.escape(f"data:{kind};base64,{data[kind]}")
            return plain, f'<img src="{source}" alt="{html.escape(plain)}">'
    if "image/svg+xml" in data:
        return plain, frame(str(data["image/svg+xml"]))
    if "text/html" in data:
        return plain, frame(str(data["text/html"]))
    if "text/plain" not in data and "application/json" in data:
        plain = json.dumps(data["application/json"], indent=2)
    return plain, f"<pre>{html.escape(plain)}</pre>"


def frame(document: str) -> str:
    """Returns a frame whose scripts can reach nothing of the page around it."""
    return (f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(document)}" '
            'style="width: 100%; height: 400px; border: 0"></iframe>')
