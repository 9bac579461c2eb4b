"""Runs ../../scenario.json with both clients, against the server of BULLPEN_URL, and prints each step that has passed.

../../README.md describes the file.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bullpen import APIError, AsyncBullpen, Bullpen, GuestError, WebhookVerificationError, webhooks

Args = dict[str, Any]


class Handles:
    """A client, and the sandboxes and contexts that it has created."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.objects: dict[str, Any] = {}

    def take(self, args: Args, *names: str) -> Any:
        """Returns the object that the last of these arguments names."""
        return [self.objects[args.pop(name)] for name in names][-1]


def text_as(name: str, args: Args) -> Args:
    return {name: args.pop("text"), **args}


CALLS: dict[str, Callable[[Handles, Args], Any]] = {
    "run": lambda h, a: h.client.run(**a),
    "stream": lambda h, a: h.client.stream(**a),
    "submit": lambda h, a: h.client.submit(**a),
    "wait": lambda h, a: h.client.wait(**a),
    "map": lambda h, a: h.client.map(**a),
    "executions.get": lambda h, a: h.client.executions.get(**a),
    "executions.cancel": lambda h, a: h.client.executions.cancel(**a),
    "files.write": lambda h, a: h.client.files.write(**text_as("content", a)),
    "files.read": lambda h, a: h.client.files.read_text(**a),
    "files.list": lambda h, a: h.client.files.list(**a),
    "threads.get": lambda h, a: h.client.threads.get(**a),
    "threads.list": lambda h, a: h.client.threads.list(**a),
    "threads.delete": lambda h, a: h.client.threads.delete(**a),
    "sandboxes.create": lambda h, a: h.client.sandboxes.create(**a),
    "sandbox.commands.run": lambda h, a: h.take(a, "sandbox").commands.run(**a),
    "sandbox.files.write": lambda h, a: h.take(a, "sandbox").files.write(**text_as("content", a)),
    "sandbox.files.read": lambda h, a: h.take(a, "sandbox").files.read_text(**a),
    "sandbox.files.list": lambda h, a: h.take(a, "sandbox").files.list(**a),
    "sandbox.contexts.create": lambda h, a: h.take(a, "sandbox").contexts.create(**a),
    "sandbox.contexts.run": lambda h, a: h.take(a, "sandbox", "context").run(**a),
    "sandbox.delete": lambda h, a: h.take(a, "sandbox").delete(),
    "schedules.create": lambda h, a: h.client.schedules.create(**a),
    "schedules.get": lambda h, a: h.client.schedules.get(**a),
    "schedules.list": lambda h, a: h.client.schedules.list(**a),
    "schedules.delete": lambda h, a: h.client.schedules.delete(**a),
    "pipelines.run": lambda h, a: h.client.pipelines.run(**a),
    "webhooks.verify": lambda h, a: webhooks.verify(**a),
}


def shaped(call: str, value: Any) -> Any:
    """Returns the result of a call as the scenario has it."""
    if call == "stream":
        texts = {name: "".join(e.data for e in value if e.stream == name) for name in ("stdout", "stderr")}
        return {**texts, "result": value[-1].result.model_dump(mode="json")}
    if isinstance(value, list):
        field = "results" if call == "map" else call.split(".")[-2]
        return {field: [entry.model_dump(mode="json") for entry in value]}
    if isinstance(value, str):
        return {"text": value}
    if value is None:
        return {}
    return (value.info if hasattr(value, "info") else value).model_dump(mode="json")


def found(value: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(value, list):
            value = len(value) if part == "length" else value[int(part)]
        else:
            value = value.get(part)
    return value


def filled(value: Any, saved: Args) -> Any:
    """Returns a value in which the results of earlier steps have taken the place of their names."""
    if isinstance(value, str):
        return re.sub(r"\$\{([^}]+)\}", lambda m: str(found(saved, m[1])), value)
    if isinstance(value, dict):
        return {k: filled(v, saved) for k, v in value.items()}
    return [filled(v, saved) for v in value] if isinstance(value, list) else value


def matches(got: Any, want: Any) -> bool:
    if isinstance(want, dict) and "contains" in want:
        return want["contains"] in got
    if isinstance(want, dict) and "matches" in want:
        return re.search(want["matches"], str(got)) is not None
    return bool(got == want)


async def settled(value: Any) -> Any:
    """Returns a value, or what it stands for in either client."""
    if inspect.isawaitable(value):
        return await value
    if hasattr(value, "__aiter__"):
        return [x async for x in value]
    return list(value) if inspect.isgenerator(value) else value


async def run(client: Any) -> int:
    """Runs the scenario, and returns the number of its steps."""
    steps = json.loads((Path(__file__).parents[2] / "scenario.json").read_text())["steps"]
    handles = Handles(client)
    saved: Args = {"run": "r" + secrets.token_hex(6)}
    for step in steps:
        call, name = step["call"], f"{step['name']} ({step['call']})"
        try:
            value = await settled(CALLS[call](handles, filled(step["args"], saved)))
        except (APIError, GuestError) as error:
            assert error.code == step.get("error"), f"{name}: {error}"
            print(name, flush=True)
            continue
        except WebhookVerificationError as error:
            assert step.get("error") == "webhook_verification", f"{name}: {error}"
            continue
        assert "error" not in step, f"{name}: no error"
        if call in ("sandboxes.create", "sandbox.contexts.create"):
            handles.objects[value.id] = value
        result = shaped(call, value)
        for path, want in filled(step.get("expect", {}), saved).items():
            got = found(result, path)
            assert matches(got, want), f"{name}: {path} is {got!r}, not {want!r}"
        if "as" in step:
            saved[step["as"]] = result
        print(name, flush=True)
    return len(steps)


async def main() -> None:
    with Bullpen.from_env() as client:
        print(await run(client), "steps with Bullpen")
    async with AsyncBullpen.from_env() as asynchronous:
        print(await run(asynchronous), "steps with AsyncBullpen")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
