"""What requests are made of, and when they are sent again. Nothing here waits, so that both clients share it."""

from __future__ import annotations

import base64
import codecs
import io
import json
import os
import random
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, Union, cast
from urllib.parse import quote

import httpx
from pydantic_core import to_json

from ._events import AgentEvent, CellEvent, CommandResult, Event
from .errors import APIError, BullpenError, GuestError, LostError, UnknownOutcomeError, UnreachableError, api_error
from .types import BatchResult, CellResult, SignedURL

if TYPE_CHECKING:
    import pandas

    Content = Union[str, bytes, Path, IO[bytes], pandas.DataFrame]
    """What a file is written from: text, bytes, a file of this machine, an open file, or a data frame."""

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between attempts."""
CONNECT_TIMEOUT = 10.0
ANSWER_TIMEOUT = 90.0
"""Seconds without a byte after which a connection counts as broken. Streams have something to send every 15 s."""
LARGEST_PAGE = 100
LONGEST_OUTPUT = 64 << 20
"""Characters of each output of a command that its result has."""
LONGEST_CELL_OUTPUT = 1 << 20
"""Characters of each output of a cell that its result has."""
LONGEST_MESSAGE = 4 << 20
"""Bytes of a message of the guest of a sandbox, which a tenant may control."""
INPUT_PIECE = 32 << 10
"""Bytes of standard input that are sent at once."""
PARTS_FROM = 64 << 20
"""The size in bytes from which a file is uploaded in parts."""
NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"


class BrokenError(BullpenError):
    """A connection broke before the whole answer came. It never reaches callers of the client."""


@dataclass
class Call:
    """A request, and whether it may be sent again."""

    method: str
    path: str
    """Of a route, or the whole address of a signed URL, which needs no key."""
    body: Any = None
    """Sent as JSON."""
    content: bytes | None = None
    """Sent as it is."""
    headers: dict[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    resend: bool = False
    """It may be sent again although the server may have received it."""
    removes: bool = False
    """It removes what it names: when it is sent again, not_found is success."""
    silence: float | None = ANSWER_TIMEOUT

    def accepting(self, kind: str) -> Call:
        self.headers["Accept"] = kind
        return self

    @property
    def signed(self) -> bool:
        return not self.path.startswith("/")

    def request(self, base: str, key: str) -> dict[str, Any]:
        """Returns the arguments of httpx's build_request."""
        headers = {"Accept": "application/json", **self.headers}
        content = self.content
        if self.body is not None:
            content = to_json(self.body)
            headers.setdefault("Content-Type", "application/json")
        if not self.signed:
            headers["Authorization"] = f"Bearer {key}"
        return {
            "method": self.method, "url": self.path if self.signed else base + self.path, "content": content,
            "headers": headers, "params": present(self.query) or None,
            "timeout": httpx.Timeout(CONNECT_TIMEOUT, read=self.silence, write=ANSWER_TIMEOUT, pool=None),
        }


def read(path: str, **query: Any) -> Call:
    return Call("GET", path, query=query, resend=True)


def remove(path: str) -> Call:
    """Returns a call that removes something and answers nothing."""
    return Call("DELETE", path, resend=True, removes=True)


class Pauses:
    """The pauses between attempts. There are none left when the server has been unavailable for too long."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        self.began = time.monotonic()
        self.length = FIRST_PAUSE

    def next(self, hint: float = 0) -> float | None:
        """Returns seconds to wait, at least as many as the server asks for."""
        pause = max(self.length * random.uniform(0.5, 1.5), hint)
        self.length = min(self.length * 1.5, LONGEST_PAUSE)
        return pause if time.monotonic() - self.began + pause <= self.patience else None


class Attempts:
    """Decides whether a request is sent again after an error."""

    def __init__(self, call: Call, patience: float, reached: bool) -> None:
        self.call = call
        self.pauses = Pauses(patience)
        self.reached = reached
        """The server has answered before, so that it may be restarting if it cannot be reached."""
        self.broke = False

    def deleted(self, error: BullpenError) -> bool:
        """Returns whether an earlier attempt has deleted what is to be deleted."""
        return self.broke and self.call.removes and isinstance(error, APIError) and error.code == "not_found"

    def pause(self, error: BullpenError) -> float:
        """Returns seconds to wait before the next attempt, or raises the error."""
        if isinstance(error, APIError):
            self.reached = True
            again, hint = error.temporary, error.retry_after or 0
        elif isinstance(error, UnreachableError):
            again, hint = self.reached, 0
        else:
            again, hint = isinstance(error, BrokenError) and self.call.resend, 0
            if not self.broke:  # the wait for the answer may have been long: patience begins now
                self.pauses.reset()
            self.broke = self.reached = True
        pause = self.pauses.next(hint) if again else None
        if pause is not None:
            return pause
        if self.broke and not isinstance(error, APIError) and self.call.method != "GET":
            raise UnknownOutcomeError(f"{error}; the server may have carried out the request") from error
        raise UnreachableError(str(error)) if isinstance(error, BrokenError) else error


class Reconnects:
    """Decides whether a stream whose connection broke is resumed. Patience is for connections that bring nothing."""

    def __init__(self, patience: float) -> None:
        self.pauses = Pauses(patience)
        self.began = time.monotonic()

    def connecting(self) -> None:
        self.began = time.monotonic()

    def pause(self, progress: bool, lost: BullpenError) -> float:
        if progress or time.monotonic() - self.began > LONGEST_PAUSE:
            self.pauses.reset()
        pause = self.pauses.next()
        if pause is None:
            raise lost
        return pause


def connection_error(error: httpx.HTTPError, url: str) -> BullpenError:
    """Returns the client's form of an error of httpx."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return UnreachableError(f"cannot reach {url}: {error}")
    return BrokenError(f"the connection to {url} broke: {error or type(error).__name__}")


def answer_error(response: httpx.Response) -> APIError:
    return api_error(response.status_code, {k.lower(): v for k, v in response.headers.items()}, response.content)


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {k: v for k, v in fields.items() if v is not None}


def segment(name: str) -> str:
    """Returns a name as a part of a path."""
    return quote(name, safe="")


def idempotent(key: str | None = None) -> dict[str, str]:
    """Returns a header that makes the server carry out a request only once: with this key, or with a new one."""
    return {"Idempotency-Key": key or "py-" + secrets.token_hex(16)}


def answer_time(options: Mapping[str, Any]) -> float:
    """Returns seconds after which an inline answer is certainly overdue."""
    return ANSWER_TIMEOUT + float(options.get("timeout") or 60) + float(options.get("kill_grace") or 0)


def program(code: str, options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Returns the body of a request for an execution. The server would ignore a misspelt option."""
    for name in options:
        if name not in known.__annotations__:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(known.__annotations__)}")
    return {"code": code, **options}


def map_lines(code: str, rows: list[Any], options: Mapping[str, Any], max_parallel: int | None) -> bytes:
    """Returns the body of a batch whose items have rows as their standard input."""
    settings = present({"max_parallel": max_parallel, "request": {"code": code, **present(options)}})
    lines = [to_json({"batch": settings})]
    lines += [to_json({"stdin": to_json(row).decode()}) for row in rows]
    return b"\n".join(lines) + b"\n"


class Lines(Protocol):
    """Reads the lines of a stream, over as many connections as it takes."""

    position: int
    """The number of the last event."""
    done: bool
    """The last event has come."""

    def item(self, line: str) -> Any:
        """Returns what a line is for the caller, or None if it is nothing new."""

    def rest(self) -> Call:
        """Returns the request for what follows the last event. Before the first one, it is the first request again."""

    def lost(self, cause: object) -> BullpenError:
        """Returns the error for a caller who gets no more events."""


class ExecutionLines:
    """The events of an execution."""

    def __init__(self, first: Call | None = None, trace_id: str = "", after_seq: int = 0) -> None:
        self.first = first
        self.trace_id = trace_id
        self.position = after_seq
        self.done = False

    def item(self, line: str) -> Event | None:
        event: dict[str, Any] = json.loads(line)
        kind, seq = event.get("type"), event.get("seq", 0)
        if kind == "keepalive" or (kind != "result" and seq <= self.position):
            return None
        self.trace_id = event.get("trace_id") or self.trace_id
        self.position = max(self.position, seq)
        if kind == "result":
            self.done = True
            event["result"]["trace_id"] = self.trace_id
        return Event.model_validate(event)

    def rest(self) -> Call:
        if self.first and not self.trace_id:
            return self.first
        path = f"/v1/executions/{segment(self.trace_id)}/output"
        return read(path, after_seq=self.position).accepting(NDJSON)

    def lost(self, cause: object) -> BullpenError:
        if not self.trace_id:
            return UnknownOutcomeError(f"the stream broke off before it named its execution: {cause}")
        return LostError(self.trace_id, self.position, cause)


class CellLines:
    """The events of the run of a cell."""

    def __init__(self, context: str, first: Call | None = None, run: int = 0, after_seq: int = 0) -> None:
        self.context = context
        """The path of the context."""
        self.first = first
        self.run = run
        self.position = after_seq
        self.done = False

    def item(self, line: str) -> CellEvent | None:
        event = CellEvent.of(json.loads(line))
        if event.seq <= self.position:  # a keepalive has the number of the last event
            return None
        self.position = event.seq
        self.run = event.run or self.run
        self.done = event.type == "end"
        return event

    def rest(self) -> Call:
        if self.first and not self.run:
            return self.first
        return read(f"{self.context}/runs/{self.run}", after_seq=self.position).accepting(NDJSON)

    def lost(self, cause: object) -> BullpenError:
        return UnknownOutcomeError(f"lost the server while following the run of a cell; the cell may run on: {cause}")


class BatchLines:
    """The results of a batch, in the order of its items. The end of an answer is the end of the results."""

    def __init__(self, batch: str, after: int, follow: bool) -> None:
        self.batch = batch
        self.position = after
        self.follow = follow
        self.done = False

    def item(self, line: str) -> BatchResult | None:
        result = BatchResult.model_validate_json(line)
        self.position = result.index
        return result

    def rest(self) -> Call:
        after = self.position if self.position >= 0 else None
        path = f"/v1/batches/{segment(self.batch)}/results"
        return read(path, after=after, follow="true" if self.follow else "false").accepting(NDJSON)

    def lost(self, cause: object) -> BullpenError:
        return LostError(self.batch, self.position, cause)


class AgentLines:
    """The events of an agent session: of one turn, or to the end of the session."""

    def __init__(self, session: str, after: int, first: Call | None = None) -> None:
        self.session = session
        """The path of the session."""
        self.first = first
        self.position = after
        self.done = False

    def item(self, line: str) -> AgentEvent | None:
        if not line.startswith("data:"):
            return None  # the id of an event, or a comment that keeps the connection alive
        event = AgentEvent.model_validate_json(line.removeprefix("data:"))
        if event.sequence <= self.position:
            return None
        self.position = event.sequence
        self.done = event.ends_turn if self.first else event.type == "session.ended"
        return event

    def rest(self) -> Call:
        if self.first and self.position == 0:
            return self.first
        return read(f"{self.session}/events/sse", offset=self.position).accepting(EVENT_STREAM)

    def lost(self, cause: object) -> BullpenError:
        return LostError(self.session.rsplit("/", 1)[-1], self.position, cause)


def enveloped(message: Any) -> bytes:
    """Returns a message of the Connect protocol's streams."""
    body = to_json(message)
    return struct.pack(">BI", 0, len(body)) + body


class Envelopes:
    """Splits the bytes of a stream of the Connect protocol into messages."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def add(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Yields the messages that are complete. The error of the last one is raised as GuestError."""
        self.buffer += chunk
        while len(self.buffer) >= 5:
            flags, size = struct.unpack_from(">BI", self.buffer)
            if size > LONGEST_MESSAGE:
                raise GuestError("resource_exhausted", f"the guest sends a message of {size} bytes")
            if len(self.buffer) < 5 + size:
                return
            message = json.loads(self.buffer[5:5 + size] or b"{}")
            del self.buffer[:5 + size]
            if not flags & 2:
                yield message
            elif "error" in message:
                raise GuestError(message["error"].get("code", "unknown"), message["error"].get("message", ""))


class Text:
    """Keeps the beginning of what a program prints, which may be without end."""

    def __init__(self, limit: int) -> None:
        self.parts: list[str] = []
        self.left = limit
        self.dropped = 0
        """Characters that were not kept."""

    def add(self, text: str) -> None:
        kept = text[:self.left]
        self.parts.append(kept)
        self.left -= len(kept)
        self.dropped += len(text) - len(kept)

    def __str__(self) -> str:
        return "".join(self.parts)


class Output:
    """Collects what a command printed, and how it ended."""

    def __init__(self, tag: str, on_stdout: Callable[[str], None] | None, on_stderr: Callable[[str], None] | None) -> None:
        self.tag = tag
        self.pid: int | None = None
        self.seq = self.received = self.lost = 0
        self.end: dict[str, Any] | None = None
        self.texts = {"stdout": Text(LONGEST_OUTPUT), "stderr": Text(LONGEST_OUTPUT)}
        self.callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        self.decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self.texts}

    @property
    def process(self) -> dict[str, Any]:
        """Selects the process."""
        return {"tag": self.tag} if self.pid is None else {"pid": self.pid}

    def add(self, message: dict[str, Any]) -> None:
        event = message.get("event", {})
        if "start" in event:
            self.pid = event["start"].get("pid")
        elif "end" in event:
            self.end = event["end"]
            for name in self.texts:
                self._print(name, b"", final=True)
        elif "gap" in event:
            gap = event["gap"]
            self.seq = int(gap.get("last", 0))
            lost = int(gap.get("bytes", 0)) or max(int(gap.get("total", 0)) - self.received, 0)
            self.received += lost
            self.lost += lost
        elif "data" in event:
            self.seq = int(event["data"].get("seq", self.seq))
            for name in self.texts:
                chunk = base64.b64decode(event["data"].get(name, ""))
                self.received += len(chunk)
                self._print(name, chunk)

    def _print(self, name: str, chunk: bytes, *, final: bool = False) -> None:
        text = self.decoders[name].decode(chunk, final)
        self.texts[name].add(text)
        callback = self.callbacks[name]
        if text and callback:
            callback(text)

    def result(self, timed_out: bool) -> CommandResult:
        end = self.end or {}
        exited = bool(end.get("exited"))
        return CommandResult(
            stdout=str(self.texts["stdout"]), stderr=str(self.texts["stderr"]),
            exit_code=end.get("exitCode", 0) if exited else -1, signal=None if exited else end.get("status"),
            timed_out=timed_out, lost=self.lost, truncated=any(text.dropped for text in self.texts.values()))


class Cell:
    """Collects the events of a cell, as much as the server does for a client that does not stream."""

    def __init__(self) -> None:
        self.texts = {"stdout": Text(LONGEST_CELL_OUTPUT), "stderr": Text(LONGEST_CELL_OUTPUT)}
        self.gap = False
        self.fields: dict[str, Any] = {"run": 0, "results": [], "error": None, "count": 0}

    def add(self, event: CellEvent) -> None:
        if event.type in self.texts:
            self.texts[event.type].add(event.text)
        elif event.type == "display":
            self.fields["results"].append(event.display)
        elif event.type == "error":
            self.fields["error"] = event.error
        elif event.type == "gap":
            self.gap = True
        elif event.type == "start":
            self.fields["run"] = event.run
        elif event.type == "end":
            self.fields.update(present(event.model_dump(exclude={"type", "seq", "text", "display", "error"})))

    def result(self) -> CellResult:
        for name, text in self.texts.items():
            self.fields[name] = str(text)
            self.fields[f"{name}_truncated"] = self.gap or text.dropped > 0
        return CellResult.model_validate(self.fields)


def guest_headers(user: str | None) -> dict[str, str]:
    """Returns the headers that name the user of a sandbox as whom a request to its guest acts."""
    return {"Connect-Protocol-Version": "1", **present({"Bullpen-User": user})}


# The codes of the Connect protocol for statuses of the guest's route of files.
_FILE_CODES = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found", 413: "resource_exhausted",
    507: "resource_exhausted",
}


def guest_error(error: APIError) -> GuestError:
    """Returns the guest's form of an error that is not one of the server's."""
    try:
        body = json.loads(error.body)
    except ValueError:
        body = {}
    code = body.get("code")
    if not isinstance(code, str):
        code = _FILE_CODES.get(error.status, "unknown")
    return GuestError(code, body.get("message") or f"the guest answers with HTTP {error.status}")


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def source(thread_id: str | None, connection: str | None) -> dict[str, str]:
    """Returns the fields that name where files are."""
    if (thread_id is None) == (connection is None):
        raise TypeError("name a thread_id or a connection")
    return {"source": "thread", "id": thread_id} if thread_id is not None else {"source": "volume", "id": str(connection)}


def signed(url: SignedURL, content: bytes | None = None) -> Call:
    """Returns the request for a signed URL."""
    return Call(url.method, url.url, content=content, headers={h.name: h.value for h in url.headers}, resend=True)


SESSIONS = "/sandbox-agent/v1/sessions"


def session_path(id: str) -> str:
    return f"{SESSIONS}/{segment(id)}"


@contextmanager
def opened(content: Content, path: str) -> Iterator[tuple[IO[bytes], int]]:
    """Yields a reader of what to write to a file with this path, and the size in bytes."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
        return
    if isinstance(content, str):
        content = content.encode()
    elif not isinstance(content, bytes) and hasattr(content, "to_csv"):
        from .pandas import to_bytes

        content = to_bytes(cast("pandas.DataFrame", content), path)
    elif not isinstance(content, bytes) and hasattr(content, "read"):
        content = content.read()
    if not isinstance(content, bytes):
        raise TypeError(f"a file is written from str, bytes, Path, an open file or a data frame, not {type(content).__name__}")
    yield io.BytesIO(content), len(content)
