"""Tests of what a real server does too seldom: answers that break off, and what a hostile program shows."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bullpen import (
    APIError,
    AsyncBullpen,
    Bullpen,
    BullpenError,
    ConflictError,
    GuestError,
    LostError,
    NotFoundError,
    RateLimitError,
    ServerError,
    UnknownOutcomeError,
    UnreachableError,
    types,
)
from bullpen._wire import Envelopes, Text

sys.path.append(str(Path(__file__).parents[1]))

RESULT = {
    "success": True, "stdout": "42\n", "stderr": "", "exit_code": 0, "error": None, "error_code": None,
    "error_message": None, "duration_ms": 1, "stdout_truncated": False, "stderr_truncated": False,
}
DISPLAY = {"data": {"text/plain": "x"}}
TRACE = {"X-Trace-Id": "trc_00000000000000000000"}

Answer = tuple[int, dict[str, str], Any]
"""The status, the headers and the body. A body of None breaks the connection; bytes break it after them."""


class Request(NamedTuple):
    path: str
    headers: dict[str, str]


class Server:
    """Answers one request after another as a list says, and keeps the requests."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[Request] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append(Request(self.path, dict(self.headers)))
                status, headers, body = outer.answers.pop(0)
                self.close_connection = not isinstance(body, (dict, str))
                if body is None:
                    return
                content = json.dumps(body).encode() if isinstance(body, dict) else body
                content = content.encode() if isinstance(content, str) else content
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content) + self.close_connection))  # one more than will come
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = do_PUT = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def keys(self) -> list[str | None]:
        return [r.headers.get("Idempotency-Key") for r in self.requests]


@pytest.fixture
def server() -> Iterator[Server]:
    s = Server()
    yield s
    s.http.shutdown()
    s.http.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[Bullpen]:
    with Bullpen(server.url, "sk-test", patience=5) as c:
        yield c


def error(code: str, **more: Any) -> dict[str, Any]:
    return {"error": code, "message": f"{code} occurred", **more}


def lines(*events: dict[str, Any]) -> str:
    return "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in events)


OUTPUT = [{"type": "output", "stream": "stdout", "data": f"{i}\u2028\n", "seq": i} for i in (1, 2, 3)]
END = {"type": "result", "trace_id": TRACE["X-Trace-Id"], "status": "success", "result": RESULT, "output_truncated": False,
       "seq": 4}


def test_run_is_sent_again_under_its_key(server: Server, client: Bullpen) -> None:
    server.answers = [(503, {"Retry-After": "1"}, error("service_unavailable")), (200, TRACE, None), (200, TRACE, b"{"),
                      (200, TRACE, RESULT)]
    result = client.run("print(6 * 7)")
    assert (result.stdout, result.trace_id) == ("42\n", TRACE["X-Trace-Id"])
    assert len(set(server.keys())) == 1 and server.keys()[0], server.keys()
    server.answers = [(200, TRACE, RESULT)]
    client.run("print(6 * 7)")
    assert server.keys()[-1] != server.keys()[0]


def test_async_run_is_sent_again_under_its_key(server: Server) -> None:
    async def run() -> None:
        async with AsyncBullpen(server.url, "sk-test") as client:
            server.answers = [(200, TRACE, None), (200, TRACE, RESULT)]
            assert (await client.run("print(6 * 7)")).stdout == "42\n"
            assert len(set(server.keys())) == 1, server.keys()

    asyncio.run(run())


def test_a_sandbox_is_not_created_twice(server: Server, client: Bullpen) -> None:
    server.answers = [(200, {}, None)]
    with pytest.raises(UnknownOutcomeError):
        client.sandboxes.create()
    assert len(server.requests) == 1


def test_a_limit_that_waiting_does_not_change_is_no_reason_to_wait(server: Server, client: Bullpen) -> None:
    server.answers = [(429, {"X-Should-Retry": "false"}, error("rate_limited", reason="plan_limit"))]
    with pytest.raises(RateLimitError) as caught:
        client.run("x")
    assert (caught.value.reason, caught.value.code, len(server.requests)) == ("plan_limit", "rate_limited", 1)


def test_patience_ends(server: Server) -> None:
    server.answers = [(503, {"Retry-After": "60"}, error("service_unavailable"))]
    with Bullpen(server.url, "sk-test", patience=1) as client, pytest.raises(ServerError) as caught:
        client.run("x")
    assert caught.value.retry_after == 60 and len(server.requests) == 1


@pytest.mark.parametrize(("status", "code", "kind"), [
    (404, "not_found", NotFoundError), (409, "conflict", ConflictError), (418, "newer_than_this_client", APIError),
    (500, "internal", ServerError),
])
def test_errors_have_the_code_and_the_ids(server: Server, client: Bullpen, status: int, code: str, kind: type) -> None:
    server.answers = [(status, {**TRACE, "X-Request-Id": "req_1"}, error(code))]
    with pytest.raises(kind) as caught:
        client.executions.get("trc_00000000000000000000")
    failed = caught.value
    assert isinstance(failed, APIError)
    assert (failed.code, failed.trace_id, failed.request_id) == (code, TRACE["X-Trace-Id"], "req_1")


def test_another_server_is_recognized(server: Server, client: Bullpen) -> None:
    server.answers = [(404, {}, "<html>")]
    with pytest.raises(NotFoundError, match="check the URL"):
        client.executions.get("trc_00000000000000000000")


def test_an_address_without_a_server_fails_at_once(server: Server, client: Bullpen) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(UnreachableError):
        client.run("x")


@pytest.mark.parametrize("url", ["bullpen.example.com", "ftp://bullpen.example.com", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BullpenError, match="not the URL"):
        Bullpen(url, "sk-test")


def test_a_stream_resumes_after_its_last_event(server: Server, client: Bullpen) -> None:
    status = {"type": "status", "trace_id": TRACE["X-Trace-Id"], "status": "running", "seq": 0}
    server.answers = [
        (200, TRACE, None),  # sent again
        (200, TRACE, lines({**status, "seq": 1}, {**OUTPUT[1]}, {"type": "keepalive", "seq": 2}).encode() + b'{"type":'),
        (200, TRACE, lines(OUTPUT[1], OUTPUT[2]).encode()),
        (200, TRACE, lines(END)),
    ]
    events = list(client.stream("x"))
    assert [e.seq for e in events] == [1, 2, 3, 4]
    assert events[1].data == "2\u2028\n"
    assert events[-1].result is not None and events[-1].result.trace_id == TRACE["X-Trace-Id"]
    assert [r.path.split("after_seq=")[-1] for r in server.requests[2:]] == ["2", "3"]
    assert len(set(server.keys()[:2])) == 1


def test_a_stream_whose_server_is_lost_says_where_it_was(server: Server) -> None:
    server.answers = [(200, TRACE, lines({"type": "status", "trace_id": TRACE["X-Trace-Id"], "seq": 1}).encode()),
                      *[(200, TRACE, None)] * 50]
    with Bullpen(server.url, "sk-test", patience=1) as client, pytest.raises(LostError) as caught:
        list(client.stream("x"))
    assert (caught.value.trace_id, caught.value.after_seq) == (TRACE["X-Trace-Id"], 1)


def test_the_key_is_sent_to_the_server_only(server: Server, client: Bullpen) -> None:
    signed = {"url": f"{server.url}/elsewhere", "method": "GET", "headers": [{"name": "X-A", "value": "b"}],
              "expires_at": "2026-11-20T12:00:00.000Z"}
    server.answers = [(200, {}, signed), (200, {}, "content"), (302, {"Location": "http://127.0.0.1:1/"}, error("moved"))]
    assert client.files.read("a", thread_id="t") == b"content"
    assert [r.headers.get("Authorization") for r in server.requests] == ["Bearer sk-test", None]
    assert server.requests[1].headers["X-A"] == "b"
    with pytest.raises(APIError):  # a redirect is not followed
        client.executions.get("trc_00000000000000000000")


def test_what_a_newer_server_answers_is_kept(server: Server, client: Bullpen) -> None:
    server.answers = [(200, TRACE, {**RESULT, "error_code": "eaten_by_a_grue", "colour": {"name": "blue"},
                                    "results": [{**DISPLAY, "sound": "la"}]})]
    result = client.run("x")
    assert result.error_code == "eaten_by_a_grue"
    assert result.model_extra == {"colour": {"name": "blue"}}
    assert result.results is not None and result.results[0].model_extra == {"sound": "la"}
    event = {"type": "hologram", "trace_id": TRACE["X-Trace-Id"], "seq": 1, "depth": 3}
    server.answers = [(200, TRACE, lines(event, END))]
    assert next(client.stream("x")).type == "hologram"


@pytest.mark.parametrize("data", [
    {"text/html": "<script>attack()</script>", "text/plain": "x"},
    {"image/svg+xml": "<svg onload=attack()>", "text/plain": "x"},
    {"text/plain": "<script>attack()</script>"},
    {"application/javascript": "attack()"},
    {"image/png": 'x"><script>attack()</script>'},
    {"application/json": {"<script>": "attack()"}},
])
def test_a_result_runs_no_script_in_the_notebook(data: dict[str, Any]) -> None:
    shown = types.Display(data=data)._repr_mimebundle_()
    assert set(shown) == {"text/plain", "text/html"}
    rich = shown["text/html"]
    assert "<script" not in rich and "<svg" not in rich
    assert "srcdoc" not in rich or '<iframe sandbox="allow-scripts"' in rich
    assert "attack()" not in rich or "&lt;" in rich


def test_a_result_shows_outputs_and_error() -> None:
    result = types.Result.model_validate({**RESULT, "stderr": "<warn>", "results": [{"data": {"image/png": "QUJD"}}],
                                          "error": "timeout", "error_message": "too late"})
    shown = result._repr_mimebundle_()
    assert shown["text/html"] == (
        '<pre>42\n</pre><img src="data:image/png;base64,QUJD" alt="image/png"><pre>&lt;warn&gt;</pre><pre>too late</pre>')


def test_a_misspelt_option_is_no_option(server: Server, client: Bullpen) -> None:
    misspelt: Any = {"timout": 5}
    asynchronous: Any = {"delay": 5}
    with pytest.raises(TypeError, match="no option 'timout'"):
        client.run("x", **misspelt)
    with pytest.raises(TypeError, match="no option 'delay'"):
        list(client.stream("x", **asynchronous))
    assert not server.requests


def test_a_hostile_guest_cannot_fill_the_memory() -> None:
    with pytest.raises(GuestError, match="2147483647 bytes"):
        list(Envelopes().add(b"\x00\x7f\xff\xff\xff"))
    text = Text(3)
    for piece in ("ab", "cd", "ef"):
        text.add(piece)
    assert (str(text), text.dropped) == ("abc", 3)


def test_sync_is_current() -> None:
    from generate import PACKAGE, without_async  # type: ignore[import-not-found,unused-ignore]

    before = (PACKAGE / "_sync.py").read_text()
    without_async()
    assert (PACKAGE / "_sync.py").read_text() == before, "run make sdk-types"


def methods(of: type) -> set[str]:
    named: Callable[[str], bool] = lambda name: not name.startswith("_")  # noqa: E731
    return set(filter(named, dir(of)))


def test_both_clients_have_the_same_methods() -> None:
    assert methods(Bullpen) == methods(AsyncBullpen)
