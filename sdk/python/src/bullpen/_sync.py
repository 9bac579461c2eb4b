# Generated from _async.py by `make sdk-types`. Do not edit.

"""The client. Bullpen is written here; Bullpen in _sync.py is made from it."""

from __future__ import annotations

import time
import builtins
import codecs
import os
import secrets
from collections.abc import Generator, Iterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from typing_extensions import Self, Unpack

from . import _wire, params, types
from ._events import AgentEvent, AgentSession, CellEvent, CommandResult, Entry, Event, Result
from ._model import Model
from ._progress import progress_bar
from ._version import __version__
from ._wire import Call, read, segment
from .errors import APIError, BullpenError, GuestError, LostError, UnknownOutcomeError, UnreachableError

if TYPE_CHECKING:
    import pandas

    from ._wire import Content

M = TypeVar("M", bound=Model)
OnRetry = Callable[[BullpenError], None]


class Bullpen:
    """A client of one server with one API key. Close it, or use it in a with statement.

    url is the server's, such as https://bullpen.example.com. Requests are sent again while the server is unavailable, for
    patience seconds, but never so that a program runs twice. on_retry is called with the cause each time. http_client
    sends the requests; give one for proxies or certificates of your own.
    """

    def __init__(self, url: str, api_key: str, *, patience: float = 30, on_retry: OnRetry | None = None,
                 http_client: httpx.Client | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise BullpenError(f"{url!r} is not the URL of a server: write https://HOST or http://HOST:PORT")
        if not api_key:
            raise BullpenError("the API key is empty")
        self.url = url.rstrip("/")
        self.patience = patience
        self._key = api_key
        self._on_retry = on_retry or (lambda _: None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = http_client or httpx.Client(limits=limits)
        self._owned = http_client is None
        self._reached = False
        self.executions = Executions(self)
        self.batches = Batches(self)
        self.threads = Threads(self)
        self.files = Files(self)
        self.sandboxes = Sandboxes(self)
        self.schedules = Schedules(self)
        self.pipelines = Pipelines(self)
        self.agent_sessions = AgentSessions(self)

    @classmethod
    def from_env(cls, **options: Any) -> Self:
        """Returns a client of the server at BULLPEN_URL (http://127.0.0.1:8080) with the key BULLPEN_API_KEY."""
        key = os.environ.get("BULLPEN_API_KEY")
        if not key:
            raise BullpenError("the variable BULLPEN_API_KEY is not set: a new server writes its first key to bootstrap.key")
        return cls(os.environ.get("BULLPEN_URL") or "http://127.0.0.1:8080", key, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections, except those of an http_client that was given."""
        if self._owned:
            self._http.close()

    def run(self, code: str, *, idempotency_key: str | None = None,
                  **options: Unpack[params.RunOptions]) -> Result:
        """Runs a program and waits for its result. A failing program's result is no error.

        For programs that run for longer than a minute, use stream, or submit and wait.
        """
        response = self._send(Call(
            "POST", "/v1/sandbox/execute", _wire.program(code, options, params.RunOptions), resend=True,
            headers=_wire.idempotent(idempotency_key), silence=_wire.answer_time(options)))
        return Result.model_validate({**response.json(), "trace_id": response.headers.get("X-Trace-Id", "")})

    def stream(self, code: str, *, idempotency_key: str | None = None,
               **options: Unpack[params.RunOptions]) -> Iterator[Event]:
        """Runs a program and yields its events, each once and in order, the result last.

        It resumes after a broken connection. The program continues if you stop reading: see executions.cancel.
        """
        call = Call("POST", "/v1/sandbox/execute", _wire.program(code, options, params.RunOptions), resend=True,
                    headers=_wire.idempotent(idempotency_key)).accepting(_wire.NDJSON)
        return self._resumed(_wire.ExecutionLines(call))

    def follow(self, trace_id: str, after_seq: int = 0) -> Iterator[Event]:
        """Yields the events of an execution with numbers above after_seq, as stream does."""
        return self._resumed(_wire.ExecutionLines(None, trace_id, after_seq))

    def submit(self, code: str, *, idempotency_key: str | None = None,
                     **options: Unpack[params.SubmitOptions]) -> types.Accepted:
        """Starts a program and does not wait for it.

        A second call with the same idempotency key returns the first one's execution, even after a restart of your program.
        """
        return self._get(types.Accepted, Call(
            "POST", "/v1/sandbox/execute", _wire.program(code, options, params.SubmitOptions), resend=True,
            headers={"Prefer": "respond-async", **_wire.idempotent(idempotency_key)}))

    def wait(self, trace_id: str) -> types.Execution:
        """Returns an execution when it has ended."""
        while True:
            execution = self._get(types.Execution, read(f"/v1/executions/{segment(trace_id)}", wait=30))
            if execution.completed_at is not None:
                return execution

    def map(self, code: str, rows: Iterable[Any], *, max_parallel: int | None = None, progress: bool | None = None,
                  idempotency_key: str | None = None, **options: Unpack[params.MapOptions]) -> list[types.BatchResult]:
        """Runs a program once for each row, as one batch, and returns the results in the order of the rows.

        The program reads its row as JSON from its standard input. If tqdm is installed, its bar shows the progress on
        terminals and in notebooks, or as progress says.
        """
        rows = list(rows)
        if not rows:
            return []
        batch = self.batches.create(_wire.map_lines(code, rows, options, max_parallel), idempotency_key=idempotency_key)
        results = []
        with progress_bar(len(rows), progress) as advance:
            for result in self.batches.results(batch.id, follow=True):
                results.append(result)
                advance()
        if len(results) != len(rows):
            raise BullpenError(f"{batch.id} has {len(results)} results of {len(rows)}: was it cancelled?")
        return results

    def request(self, method: str, path: str, *, json: Any = None, params: Mapping[str, Any] | None = None,
                      headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Sends a request that no other method covers. Only GET is sent again when the connection breaks."""
        return self._send(Call(method, path, json, headers=dict(headers or {}), query=params or {},
                                     resend=method == "GET"))

    def _get(self, model: type[M], call: Call) -> M:
        return model.model_validate_json((self._send(call)).content)

    def _send(self, call: Call) -> httpx.Response:
        """Returns a successful answer, with its body."""
        return self._attempts(call, stream=False)

    def _attempts(self, call: Call, *, stream: bool, reached: bool = False) -> httpx.Response:
        attempts = _wire.Attempts(call, self.patience, reached or self._reached)
        while True:
            try:
                return self._once(call, stream=stream)
            except BullpenError as error:
                if attempts.deleted(error):
                    return httpx.Response(204)
                pause = attempts.pause(error)
                self._on_retry(error)
            time.sleep(pause)

    def _guest(self, call: Call) -> httpx.Response:
        """Sends a request to the guest of a sandbox, whose errors have another form than the server's."""
        try:
            return self._send(call)
        except APIError as error:
            if error.code:
                raise
            raise _wire.guest_error(error) from None

    def _once(self, call: Call, *, stream: bool) -> httpx.Response:
        request = self._http.build_request(**call.request(self.url, self._key))
        request.headers["User-Agent"] = f"bullpen-python/{__version__}"
        try:
            response = self._http.send(request, stream=True)
            self._reached = True
            if response.is_success and stream:
                return response
            response.read()
        except httpx.HTTPError as error:
            raise _wire.connection_error(error, self.url) from error
        if response.is_success:
            return response
        raise _wire.answer_error(response)

    def _lines(self, call: Call, *, reached: bool = False) -> Generator[str, None]:
        """Yields the lines of one answer. A connection that breaks raises BrokenError."""
        response = self._attempts(call, stream=True, reached=reached)
        try:
            rest = ""
            decoder = codecs.getincrementaldecoder("utf-8")()
            for chunk in response.iter_bytes():
                *lines, rest = (rest + decoder.decode(chunk)).split("\n")  # not splitlines, which knows more ends of lines
                for line in lines:
                    if line.strip():
                        yield line
            if rest.strip():
                raise _wire.BrokenError("the answer ended within a line")
        except httpx.HTTPError as error:
            raise _wire.connection_error(error, self.url) from error
        finally:
            response.close()

    def _resumed(self, lines: _wire.Lines, *, ends: bool = False) -> Iterator[Any]:
        """Yields the items of a stream, and connects again when a connection breaks.

        If ends is true, the end of an answer is the end of the stream.
        """
        reconnects = _wire.Reconnects(self.patience)
        resumed = False
        while True:
            before = lines.position
            reconnects.connecting()
            cause = BullpenError("the stream broke off")
            try:
                with closing(self._lines(lines.rest(), reached=resumed)) as connection:
                    for line in connection:
                        item = lines.item(line)
                        if item is not None:
                            yield item
                        if lines.done:
                            return
                if ends:
                    return
            except _wire.BrokenError as error:
                cause = error
            except (UnreachableError, APIError) as error:
                if not resumed or (isinstance(error, APIError) and not error.temporary):
                    raise
                raise lines.lost(error) from error
            pause = reconnects.pause(lines.position > before, lines.lost(cause))
            self._on_retry(cause)
            time.sleep(pause)
            resumed = True

    def _pages(self, model: type[M], path: str, field: str, **query: Any) -> Iterator[M]:
        cursor: str | None = None
        while True:
            page = (self._send(read(path, **query, cursor=cursor))).json()
            for entry in page[field]:
                yield model.model_validate(entry)
            cursor = page.get("next_cursor")
            if cursor is None:
                return


class Executions:
    """Executions: the runs of programs."""

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def get(self, trace_id: str) -> types.Execution:
        """Returns the state of an execution, with its result if it has ended."""
        return self._client._get(types.Execution, read(f"/v1/executions/{segment(trace_id)}"))

    def list(self, **filters: str) -> Iterator[types.ListedExecution]:
        """Yields executions, the newest first. All filters must match: status, language, thread_id, batch and others.

        Metadata has dots: list(**{"metadata.order": "4711"}).
        """
        return self._client._pages(types.ListedExecution, "/v1/executions", "executions", limit=_wire.LARGEST_PAGE, **filters)

    def cancel(self, trace_id: str) -> types.Cancelled:
        """Ends an execution. A running program receives SIGTERM, and SIGKILL after its grace period."""
        return self._client._get(
            types.Cancelled, Call("POST", f"/v1/executions/{segment(trace_id)}/cancel", resend=True))

    def request(self, trace_id: str) -> types.SubmittedRequest:
        """Returns what was submitted, without the values of variables."""
        return self._client._get(types.SubmittedRequest, read(f"/v1/executions/{segment(trace_id)}/request"))

    def output(self, trace_id: str, stream: str = "stdout") -> bytes:
        """Returns the exact bytes of stdout or stderr of an execution that has ended."""
        return (self._client._send(read(f"/v1/executions/{segment(trace_id)}/output/{segment(stream)}"))).content


class Batches:
    """Batches: many executions that are submitted at once. map makes one."""

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def create(self, lines: bytes, *, idempotency_key: str | None = None) -> types.Batch:
        """Creates a batch from JSON lines: one request per line, after an optional first line {"batch": settings}."""
        headers = {"Content-Type": "application/jsonl", **_wire.idempotent(idempotency_key)}
        return self._client._get(
            types.Batch, Call("POST", "/v1/batches", content=lines, headers=headers, resend=True))

    def get(self, id: str) -> types.Batch:
        return self._client._get(types.Batch, read(f"/v1/batches/{segment(id)}"))

    def list(self) -> Iterator[types.Batch]:
        """Yields batches, the newest first."""
        return self._client._pages(types.Batch, "/v1/batches", "batches", limit=_wire.LARGEST_PAGE)

    def results(self, id: str, *, after: int = -1, follow: bool = False) -> Iterator[types.BatchResult]:
        """Yields results in the order of the items, those whose index is above after.

        Without follow it ends before the first unfinished item; with follow it waits.
        """
        return self._client._resumed(_wire.BatchLines(id, after, follow), ends=True)

    def cancel(self, id: str) -> types.Batch:
        """Cancels the items that have not ended."""
        return self._client._get(types.Batch, Call("POST", f"/v1/batches/{segment(id)}/cancel", resend=True))

    def delete(self, id: str) -> None:
        """Deletes a batch that has ended. The records of its executions stay."""
        self._client._send(_wire.remove(f"/v1/batches/{segment(id)}"))


class Threads:
    """Threads: home directories that executions with the same thread_id share."""

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def get(self, id: str) -> types.WholeThread:
        return self._client._get(types.WholeThread, read(f"/v1/threads/{segment(id)}"))

    def list(self) -> Iterator[types.Thread]:
        """Yields threads by id."""
        return self._client._pages(types.Thread, "/v1/threads", "threads", limit=_wire.LARGEST_PAGE)

    def fork(self, id: str, to: str, *, version: int | None = None) -> types.WholeThread:
        """Creates the thread to from a version of another, by default the newest."""
        return self._client._get(
            types.WholeThread, Call("POST", f"/v1/threads/{segment(id)}/fork", {"id": to, **_wire.present({"version": version})}))

    def delete(self, id: str) -> None:
        """Deletes a thread with all its versions."""
        self._client._send(_wire.remove(f"/v1/threads/{segment(id)}"))


class Files:
    """Files of a thread, relative to its home, or of a storage connection, relative to /data/SLUG.

    Name one of them: thread_id or connection.
    """

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def list(self, path: str = "", *, recursive: bool = False, thread_id: str | None = None,
                   connection: str | None = None) -> builtins.list[types.File]:
        body = {**_wire.source(thread_id, connection), "path": path, "recursive": recursive}
        return (self._client._get(types.Files, Call("POST", "/v1/files/list", body, resend=True))).files

    def read(self, path: str, *, thread_id: str | None = None, connection: str | None = None) -> bytes:
        """Returns the content of a file."""
        body = {**_wire.source(thread_id, connection), "path": path}
        signed = self._client._get(types.SignedURL, Call("POST", "/v1/files/download_url", body, resend=True))
        return (self._client._send(_wire.signed(signed))).content

    def read_text(self, path: str, *, thread_id: str | None = None, connection: str | None = None) -> str:
        return (self.read(path, thread_id=thread_id, connection=connection)).decode()

    def read_frame(self, path: str, *, thread_id: str | None = None,
                         connection: str | None = None) -> pandas.DataFrame:
        """Returns a file that ends in .csv, .json, .jsonl or .parquet as a data frame."""
        from .pandas import from_bytes

        return from_bytes(self.read(path, thread_id=thread_id, connection=connection), path)

    def download(self, path: str, to: str | Path, *, thread_id: str | None = None,
                       connection: str | None = None) -> None:
        """Writes a file to a file of this machine."""
        Path(to).write_bytes(self.read(path, thread_id=thread_id, connection=connection))

    def write(self, path: str, content: Content, *, thread_id: str | None = None,
                    connection: str | None = None) -> None:
        """Writes a file from text, bytes, a Path of this machine, an open file, or a data frame.

        The end of path decides the format of a data frame: .csv, .json, .jsonl or .parquet.
        """
        with _wire.opened(content, path) as (reader, size):
            body = {**_wire.source(thread_id, connection), "path": path, "content_length": size}
            if size < _wire.PARTS_FROM:
                signed = self._client._get(types.SignedURL, Call("POST", "/v1/files/upload_url", body, resend=True))
                self._client._send(_wire.signed(signed, reader.read()))
                return
            upload = self._client._get(types.PartUpload, Call("POST", "/v1/files/uploads", body, resend=True))
            for part in range(1, upload.parts + 1):
                data = reader.read(upload.part_size)
                self._client._send(Call("PUT", upload.url, content=data, query={"part": part}, resend=True))
            self._client._send(Call("POST", upload.url))

    def rename(self, path: str, to: str, *, thread_id: str | None = None, connection: str | None = None) -> None:
        """Renames a file or directory."""
        body = {**_wire.source(thread_id, connection), "path": path, "to": to}
        self._client._send(Call("POST", "/v1/files/rename", body))

    def delete(self, path: str, *, recursive: bool = False, thread_id: str | None = None,
                     connection: str | None = None) -> None:
        """Deletes what is at a path; a directory with its content only if recursive is true."""
        body = {**_wire.source(thread_id, connection), "path": path, "recursive": recursive}
        self._client._send(Call("POST", "/v1/files/delete", body))


class Sandboxes:
    """Live sandboxes, which live until they are paused or deleted, or until their timeout passes."""

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def create(self, **options: Unpack[params.SandboxOptions]) -> Sandbox:
        """Creates a sandbox and returns it when commands can be started in it.

        It is not sent again when the connection breaks, because that could create two.
        """
        return Sandbox(self._client, self._client._get(
            types.LiveSandbox, Call("POST", "/v1/sandboxes", options, silence=None)))

    def get(self, id: str) -> Sandbox:
        return Sandbox(self._client, self._client._get(types.LiveSandbox, read(f"/v1/sandboxes/{segment(id)}")))

    def list(self, *, state: str | None = None, name: str | None = None) -> Iterator[types.LiveSandbox]:
        """Yields sandboxes, the newest first."""
        return self._client._pages(types.LiveSandbox, "/v1/sandboxes", "sandboxes", limit=_wire.LARGEST_PAGE, state=state,
                                    name=name)


class Sandbox:
    """A live sandbox. In a with statement, it is deleted at the end."""

    def __init__(self, client: Bullpen, info: types.LiveSandbox) -> None:
        self._client = client
        self._path = f"/v1/sandboxes/{segment(info.id)}"
        self.id = info.id
        self.info = info
        """Its state after the last call of a method of this object."""
        self.commands = SandboxCommands(client, self._path)
        self.files = SandboxFiles(client, self._path)
        self.contexts = Contexts(client, self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self.delete()

    def extend(self, timeout: int | None = None) -> types.LiveSandbox:
        """Makes a running sandbox expire in timeout seconds from now, by default in as many as its last start had."""
        return self._change("POST", "/extend", _wire.present({"timeout": timeout}))

    def pause(self) -> types.LiveSandbox:
        """Stops the sandbox and saves its home."""
        return self._change("POST", "/pause")

    def resume(self, timeout: int | None = None) -> types.LiveSandbox:
        """Starts a paused sandbox."""
        return self._change("POST", "/resume", _wire.present({"timeout": timeout}))

    def delete(self) -> types.LiveSandbox:
        """Ends the sandbox for good. Deleting one that has ended changes nothing."""
        return self._change("DELETE", "", resend=True)

    def save(self) -> types.SandboxSave:
        """Saves the home of the sandbox, which runs on."""
        return self._client._get(types.SandboxSave, Call("POST", self._path + "/save", resend=True, silence=None))

    def logs(self) -> types.SandboxLogs:
        """Returns what its processes have printed since the last start."""
        return self._client._get(types.SandboxLogs, read(self._path + "/logs"))

    def _change(self, method: str, path: str, body: Any = None, *, resend: bool = False) -> types.LiveSandbox:
        call = Call(method, self._path + path, body, resend=resend, silence=None)
        self.info = self._client._get(types.LiveSandbox, call)
        return self.info


class SandboxCommands:
    """Commands of a live sandbox."""

    def __init__(self, client: Bullpen, sandbox: str) -> None:
        self._client = client
        self._service = f"{sandbox}/guest/process.Process"

    def run(self, command: str | Sequence[str], *, cwd: str | None = None, env_vars: Mapping[str, str] | None = None,
                  stdin: str | bytes | None = None, timeout: float | None = None, user: str | None = None,
                  on_stdout: Callable[[str], None] | None = None,
                  on_stderr: Callable[[str], None] | None = None) -> CommandResult:
        """Runs a command and returns how it ended: a line for bash, or a program and its arguments.

        on_stdout and on_stderr are called with output as it comes. After timeout seconds, the command and what it has
        started are killed. The same happens when this call is interrupted.
        """
        args = ["/bin/bash", "-c", command] if isinstance(command, str) else [*command]
        process = {"cmd": args[0], "args": args[1:], "envs": dict(env_vars or {}), **_wire.present({"cwd": cwd})}
        # The tag finds the process again if the connection breaks before its id has come.
        tag = f"py-{secrets.token_hex(8)}"
        start = {"process": process, "tag": tag, "stdin": stdin is not None, "numbered": True}
        output = _wire.Output(tag, on_stdout, on_stderr)
        sent = stdin is None
        timed_out = False
        try:
            with closing(self._events(output, start, timeout, user)) as events:
                for _ in events:
                    if not sent:
                        sent = True
                        self._input(output.process, stdin or b"", user)
        except GuestError as error:
            if error.code != "deadline_exceeded" or timeout is None:
                raise
            timed_out = True
        except BaseException as error:
            if not isinstance(error, BullpenError) and output.end is None:
                self._call("SendSignal", {"process": output.process, "signal": "SIGNAL_SIGKILL"}, user)
            raise
        return output.result(timed_out)

    def _events(self, output: _wire.Output, start: Any, timeout: float | None, user: str | None) -> Generator[None, None]:
        """Reads the events of a process to its end."""
        headers = _wire.guest_headers(user)
        headers["Content-Type"] = "application/connect+json"
        first = Call("POST", f"{self._service}/Start", content=_wire.enveloped(start), headers=dict(headers))
        if timeout is not None:
            first.headers["Connect-Timeout-Ms"] = str(max(int(timeout * 1000), 1))
        call = first
        reconnects = _wire.Reconnects(self._client.patience)
        while True:
            before = output.seq
            reconnects.connecting()
            try:
                with closing(self._messages(call, resumed=call is not first)) as connection:
                    for message in connection:
                        output.add(message)
                        yield
                        if output.end is not None:
                            return
                raise _wire.BrokenError("the stream of the command broke off")
            except (_wire.BrokenError, UnknownOutcomeError) as error:
                lost = LostError(f"the command with the tag {output.tag}", output.seq, error)
                pause = reconnects.pause(output.seq > before, lost)
                self._client._on_retry(error)
            time.sleep(pause)
            connect = {"process": output.process, "afterSeq": output.seq}
            call = Call("POST", f"{self._service}/Connect", content=_wire.enveloped(connect), headers=dict(headers), resend=True)

    def _messages(self, call: Call, *, resumed: bool) -> Generator[Any, None]:
        response = self._client._attempts(call, stream=True, reached=resumed)
        envelopes = _wire.Envelopes()
        try:
            for chunk in response.iter_bytes():
                for message in envelopes.add(chunk):
                    yield message
        except httpx.HTTPError as error:
            raise _wire.connection_error(error, self._client.url) from error
        finally:
            response.close()

    def _input(self, process: Any, stdin: str | bytes, user: str | None) -> None:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        try:
            for begin in range(0, len(data), _wire.INPUT_PIECE):
                piece = data[begin:begin + _wire.INPUT_PIECE]
                self._call("SendInput", {"process": process, "input": {"stdin": _wire.base64_text(piece)}}, user)
            self._call("CloseStdin", {"process": process}, user)
        except GuestError as error:
            if error.code not in ("failed_precondition", "not_found"):  # it has closed its standard input, or has ended
                raise

    def _call(self, method: str, body: Any, user: str | None) -> None:
        self._client._guest(Call("POST", f"{self._service}/{method}", body, headers=_wire.guest_headers(user)))


class SandboxFiles:
    """Files of a live sandbox. Paths are absolute or relative to the home. user is user, by default, or root."""

    def __init__(self, client: Bullpen, sandbox: str) -> None:
        self._client = client
        self._guest = f"{sandbox}/guest"

    def read(self, path: str, *, user: str | None = None) -> bytes:
        """Returns the content of a file."""
        call = Call("GET", f"{self._guest}/files", query={"path": path, "username": user}, headers=_wire.guest_headers(user),
                    resend=True)
        return (self._client._guest(call)).content

    def read_text(self, path: str, *, user: str | None = None) -> str:
        return (self.read(path, user=user)).decode()

    def read_frame(self, path: str, *, user: str | None = None) -> pandas.DataFrame:
        """Returns a file that ends in .csv, .json, .jsonl or .parquet as a data frame."""
        from .pandas import from_bytes

        return from_bytes(self.read(path, user=user), path)

    def download(self, path: str, to: str | Path, *, user: str | None = None) -> None:
        """Writes a file to a file of this machine."""
        Path(to).write_bytes(self.read(path, user=user))

    def write(self, path: str, content: Content, *, user: str | None = None) -> None:
        """Writes a file from text, bytes, a Path of this machine, an open file, or a data frame."""
        with _wire.opened(content, path) as (reader, _):
            data = reader.read()
        headers = {"Content-Type": "application/octet-stream", **_wire.guest_headers(user)}
        self._client._guest(Call("POST", f"{self._guest}/files", content=data, headers=headers, resend=True,
                                       query={"path": path, "username": user}))

    def list(self, path: str = "", *, depth: int = 1, user: str | None = None) -> builtins.list[Entry]:
        """Returns the entries of a directory, and of those below it to a depth."""
        answer = self._call("ListDir", {"path": path, "depth": depth}, user)
        return [Entry.of(entry) for entry in answer.get("entries", [])]

    def make_dir(self, path: str, *, user: str | None = None) -> None:
        """Creates a directory and its parents."""
        self._call("MakeDir", {"path": path}, user)

    def rename(self, path: str, to: str, *, user: str | None = None) -> None:
        """Renames a file or directory."""
        self._call("Move", {"source": path, "destination": to}, user)

    def delete(self, path: str, *, user: str | None = None) -> None:
        """Deletes a file, or a directory with everything in it."""
        self._call("Remove", {"path": path}, user)

    def _call(self, method: str, body: Any, user: str | None) -> dict[str, Any]:
        call = Call("POST", f"{self._guest}/filesystem.Filesystem/{method}", body, headers=_wire.guest_headers(user))
        answer: dict[str, Any] = (self._client._guest(call)).json()
        return answer


class Contexts:
    """Interpreters of a live sandbox that keep their state."""

    def __init__(self, client: Bullpen, sandbox: str) -> None:
        self._client = client
        self._path = f"{sandbox}/contexts"

    def create(self, **options: Unpack[params.ContextOptions]) -> Context:
        """Starts an interpreter."""
        return Context(self._client, self._path, self._client._get(
            types.Context, Call("POST", self._path, options)))

    def get(self, id: str) -> Context:
        return Context(self._client, self._path, self._client._get(
            types.Context, read(f"{self._path}/{segment(id)}")))

    def list(self) -> builtins.list[types.Context]:
        return (self._client._get(types.Contexts, read(self._path))).contexts


class Context:
    """An interpreter that keeps its variables."""

    def __init__(self, client: Bullpen, contexts: str, info: types.Context) -> None:
        self._client = client
        self._path = f"{contexts}/{segment(info.id)}"
        self.id = info.id
        self.info = info

    def run(self, code: str, **options: Unpack[params.CellOptions]) -> types.CellResult:
        """Runs a cell and returns its result, which shows itself in a notebook."""
        cell = _wire.Cell()
        for event in self.stream(code, **options):
            cell.add(event)
        return cell.result()

    def stream(self, code: str, **options: Unpack[params.CellOptions]) -> Iterator[CellEvent]:
        """Runs a cell and yields its events, each once and in order, the end last. It resumes after a broken connection.

        The cell runs on if you stop reading: see interrupt.
        """
        options.setdefault("call", f"py-{secrets.token_hex(16)}")  # so that sending it again runs nothing again
        call = Call("POST", f"{self._path}/execute", {"code": code, **options}, resend=True).accepting(_wire.NDJSON)
        return self._client._resumed(_wire.CellLines(self._path, call))

    def interrupt(self) -> bool:
        """Interrupts the cell that runs, and reports whether there was one."""
        call = Call("POST", f"{self._path}/interrupt", resend=True)
        return (self._client._get(types.ContextInterrupt, call)).interrupted

    def restart(self) -> None:
        """Starts the interpreter again, without its variables."""
        self.info = self._client._get(types.Context, Call("POST", f"{self._path}/restart"))

    def delete(self) -> None:
        self._client._send(_wire.remove(self._path))


class Schedules:
    """Programs that run at set times."""

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def create(self, code: str, *, request: params.SubmitOptions | None = None,
                     **options: Unpack[params.ScheduleOptions]) -> types.WholeSchedule:
        """Creates a schedule for a program. request has the program's other options, such as its language.

        It is not sent again when the connection breaks, because that could create two.
        """
        body = {**options, "request": {"code": code, **(request or {})}}
        return self._client._get(types.WholeSchedule, Call("POST", "/v1/schedules", body))

    def get(self, id: str) -> types.WholeSchedule:
        """Returns a schedule, its next ticks and its last ones."""
        return self._client._get(types.WholeSchedule, read(f"/v1/schedules/{segment(id)}"))

    def list(self) -> Iterator[types.Schedule]:
        """Yields schedules by id."""
        return self._client._pages(types.Schedule, "/v1/schedules", "schedules", limit=_wire.LARGEST_PAGE)

    def change(self, id: str, **options: Unpack[params.ScheduleOptions]) -> types.WholeSchedule:
        """Changes what is given: paused=True pauses the schedule."""
        return self._client._get(
            types.WholeSchedule, Call("PATCH", f"/v1/schedules/{segment(id)}", options, resend=True))

    def run(self, id: str) -> types.Accepted:
        """Starts an execution of a schedule now. It is not sent again when the connection breaks."""
        return self._client._get(types.Accepted, Call("POST", f"/v1/schedules/{segment(id)}/run"))

    def delete(self, id: str) -> None:
        """Deletes a schedule. Executions that have started continue."""
        self._client._send(_wire.remove(f"/v1/schedules/{segment(id)}"))


class Pipelines:
    """Pipelines: steps that depend on each other."""

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def start(self, file: str, **options: Unpack[params.PipelineOptions]) -> types.WholePipeline:
        """Starts a run of a pipeline, whose file is YAML text.

        It is not sent again when the connection breaks, because that could start two.
        """
        return self._client._get(types.WholePipeline, Call("POST", "/v1/pipelines", {"file": file, **options}))

    def get(self, id: str) -> types.WholePipeline:
        return self._client._get(types.WholePipeline, read(f"/v1/pipelines/{segment(id)}"))

    def list(self) -> Iterator[types.Pipeline]:
        """Yields runs, the newest first."""
        return self._client._pages(types.Pipeline, "/v1/pipelines", "pipelines", limit=_wire.LARGEST_PAGE)

    def wait(self, id: str) -> types.WholePipeline:
        """Returns a run when it has ended. It asks once a second."""
        while True:
            run = self.get(id)
            if run.ended_at is not None:
                return run
            time.sleep(1)

    def run(self, file: str, **options: Unpack[params.PipelineOptions]) -> types.WholePipeline:
        """Starts a run and waits for its end."""
        return self.wait((self.start(file, **options)).id)

    def cancel(self, id: str) -> types.WholePipeline:
        return self._client._get(
            types.WholePipeline, Call("POST", f"/v1/pipelines/{segment(id)}/cancel", resend=True))


class AgentSessions:
    """Sessions of coding agents."""

    def __init__(self, client: Bullpen) -> None:
        self._client = client

    def create(self, agent: str, *, id: str | None = None, **options: Any) -> str:
        """Creates a session and returns its id. options are agentMode, permissionMode, model and others.

        It is not sent again when the connection breaks.
        """
        call = Call("POST", _wire.session_path(id) if id else _wire.SESSIONS, {"agent": agent, **options})
        created = (self._client._send(call)).json()
        return str(created.get("sessionId") or id)

    def get(self, id: str) -> AgentSession:
        """Returns a session, with its pending questions and permissions."""
        return self._client._get(AgentSession, read(_wire.session_path(id)))

    def list(self) -> Iterator[AgentSession]:
        """Yields sessions, the newest first."""
        return self._client._pages(AgentSession, _wire.SESSIONS, "sessions")

    def send(self, id: str, message: str, *, idempotency_key: str | None = None, **options: Any) -> None:
        """Adds a message to a session's queue, exactly once."""
        self._client._send(Call("POST", f"{_wire.session_path(id)}/messages", {"message": message, **options},
                                      headers=_wire.idempotent(idempotency_key), resend=True))

    def stream(self, id: str, message: str, *, idempotency_key: str | None = None,
               **options: Any) -> Iterator[AgentEvent]:
        """Sends a message and yields the events of its turn, each once and in order.

        It ends with the first event that ends_turn: the agent may wait for an answer, after which follow has the rest.
        """
        call = Call("POST", f"{_wire.session_path(id)}/messages/stream", {"message": message, **options}, resend=True,
                    headers=_wire.idempotent(idempotency_key)).accepting(_wire.EVENT_STREAM)
        return self._client._resumed(_wire.AgentLines(_wire.session_path(id), 0, call))

    def follow(self, id: str, after: int = 0) -> Iterator[AgentEvent]:
        """Yields the events of a session with numbers above after, to the end of the session."""
        return self._client._resumed(_wire.AgentLines(_wire.session_path(id), after))

    def answer_permission(self, id: str, permission: str, reply: str) -> None:
        """Answers a pending permission: once, always (for the session) or reject."""
        self._client._send(Call(
            "POST", f"{_wire.session_path(id)}/permissions/{segment(permission)}/reply", {"reply": reply}))

    def answer_question(self, id: str, question: str, *answers: str) -> None:
        """Answers a pending question. Without answers, it rejects the question."""
        path = f"{_wire.session_path(id)}/questions/{segment(question)}"
        self._client._send(
            Call("POST", f"{path}/reply", {"answers": [answers]}) if answers else Call("POST", f"{path}/reject"))

    def interrupt(self, id: str) -> None:
        """Interrupts the turn in progress. The turn has ended once the event turn.ended arrives."""
        self._client._send(Call("POST", f"{_wire.session_path(id)}/interrupt", resend=True))

    def end(self, id: str) -> None:
        """Ends a session and keeps its events."""
        self._client._send(Call("POST", f"{_wire.session_path(id)}/terminate", resend=True))

    def delete(self, id: str) -> None:
        """Ends a session and deletes it with its files."""
        self._client._send(_wire.remove(_wire.session_path(id)))
