"""Data frames: as files, and as the rows of a batch."""

from __future__ import annotations

import io
import json
from typing import Any

import pandas

from ._sync import Bullpen

__all__ = ["from_bytes", "map_frame", "to_bytes"]


def map_frame(client: Bullpen, code: str, frame: pandas.DataFrame, **options: Any) -> pandas.DataFrame:
    """Runs a program once for each row of a data frame, as one batch, and returns a data frame with the same index.

    The program reads its row as a JSON object from its standard input, and prints JSON in the last line of its output. The
    members of an object become columns; another value becomes the column value. The column error is empty for programs that
    succeed. options are those of Bullpen.map.
    """
    rows = json.loads(to_bytes(frame, "rows.json"))
    outcomes = [_outcome(result) for result in client.map(code, rows, **options)]
    mapped: pandas.DataFrame = pandas.DataFrame(outcomes, index=frame.index)
    return mapped


def _outcome(result: Any) -> dict[str, Any]:
    if result.error is not None:
        return {"error": result.error_message or result.error}
    if result.exit_code != 0:
        return {"error": (result.stderr or f"exit code {result.exit_code}").strip()}
    lines = (result.stdout or "").strip().splitlines()
    try:
        value = json.loads(lines[-1] if lines else "null")
    except ValueError:
        return {"error": f"the last line is not JSON: {lines[-1]}"}
    return {**(value if isinstance(value, dict) else {"value": value}), "error": None}


def to_bytes(frame: pandas.DataFrame, path: str) -> bytes:
    """Returns a data frame in the format that the end of a path names: .csv, .json, .jsonl or .parquet."""
    buffer = io.BytesIO()
    ending = _ending(path)
    if ending == "csv":
        frame.to_csv(buffer, index=False)
    elif ending == "json":
        frame.to_json(buffer, orient="records", date_format="iso")
    elif ending == "jsonl":
        frame.to_json(buffer, orient="records", date_format="iso", lines=True)
    else:
        frame.to_parquet(buffer)
    return buffer.getvalue()


def from_bytes(content: bytes, path: str) -> pandas.DataFrame:
    """Returns the data frame of a file with that path."""
    buffer = io.BytesIO(content)
    ending = _ending(path)
    if ending == "csv":
        return pandas.read_csv(buffer)
    if ending == "json":
        return pandas.read_json(buffer, orient="records")
    if ending == "jsonl":
        return pandas.read_json(buffer, orient="records", lines=True)
    return pandas.read_parquet(buffer)


def _ending(path: str) -> str:
    ending = path.rsplit(".", 1)[-1]
    if ending not in ("csv", "json", "jsonl", "parquet"):
        raise ValueError(f"{path} does not end in .csv, .json, .jsonl or .parquet")
    return ending
