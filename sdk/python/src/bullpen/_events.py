"""Results and events."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

from . import types
from ._model import Model
from ._rich import Shown


class Result(types.Result):
    """What a program did, or why it did not run to its end."""

    trace_id: str = ""
    """The execution."""


class Event(Model):
    """One event of an execution. Its type decides which fields are set."""

    type: str
    """status, output, display or result."""
    seq: int = 0
    """Its number; a stream can be resumed after it."""
    trace_id: str | None = None
    """Of status and result."""
    status: str | None = None
    """Of status and result."""
    stream: str | None = None
    """Of output: stdout or stderr."""
    data: str = ""
    """Of output. Bytes that are not UTF-8 are U+FFFD."""
    base64: str | None = None
    """Of output: the exact bytes, if they are not UTF-8."""
    index: int | None = None
    """Of display: its index in the results."""
    display: types.Display | None = None
    omitted: list[str] | None = None
    """Of display: what only the result has, such as image/png."""
    result: Result | None = None
    output_truncated: bool | None = None
    """Of result: the events have less than the program wrote."""

    @property
    def content(self) -> bytes:
        """The bytes that the program wrote."""
        return b64decode(self.base64) if self.base64 is not None else self.data.encode()


class CellEvent(Model):
    """One event of the run of a cell. Its type decides which fields are set."""

    type: str
    """start, stdout, stderr, display, error, end, or gap for events that are no longer kept."""
    seq: int = 0
    """Its number."""
    run: int | None = None
    """Of start: the number of the run."""
    text: str = ""
    """Of stdout and stderr."""
    status: str | None = None
    """Of end: ok, error, interrupted, timeout or lost."""
    display: types.Display | None = None
    error: types.CellError | None = None

    @classmethod
    def of(cls, line: dict[str, Any]) -> CellEvent:
        """Returns the event of a line, whose display or error is in the line itself."""
        kind = line.get("type")
        if kind in ("display", "error"):
            about = {name: line.pop(name, None) for name in ("type", "seq")}
            return cls.model_validate({**about, kind: line})
        return cls.model_validate(line)


class AgentEvent(Model):
    """One event of an agent session. Its type determines the content of data."""

    sequence: int
    """Its position in the session, to resume a stream after."""
    type: str
    data: Any = None
    time: str | None = None
    synthetic: bool | None = None
    """Made by the server, not by the agent."""

    @property
    def ends_turn(self) -> bool:
        """Whether the agent does nothing more until it receives a message or an answer."""
        return self.type in ("turn.ended", "session.ended", "permission.requested", "question.requested")


class AgentSession(Model):
    """A session of a coding agent. Times are in milliseconds since 1970."""

    sessionId: str
    agent: str
    ended: bool = False
    eventCount: int = 0
    pendingQuestions: list[dict[str, Any]] | None = None
    pendingPermissions: list[dict[str, Any]] | None = None


class CommandResult(Shown):
    """How a command in a live sandbox ended."""

    stdout: str
    stderr: str
    exit_code: int
    """-1 if the command did not exit."""
    signal: str | None = None
    """What ended the command, if it did not exit."""
    timed_out: bool = False
    lost: int = 0
    """Bytes of output that were not read in time."""
    truncated: bool = False
    """The command printed more than 64 Mi characters. Callbacks have received all."""


class Entry(Model):
    """A file or directory of a live sandbox."""

    name: str
    path: str
    type: str
    """file or directory, of the target if the entry is a link."""
    size: int = 0
    """In bytes."""
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Entry:
        kind = str(entry.get("type", "")).removeprefix("FILE_TYPE_").lower()
        return cls.model_validate({**entry, "type": kind or "unspecified"})
