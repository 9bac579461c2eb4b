"""A tool for OpenAI's Agents SDK with which a model runs programs."""

from __future__ import annotations

from agents import FunctionTool, function_tool
from typing_extensions import Unpack

from . import params
from ._async import AsyncBullpen

__all__ = ["code_tool"]

LONGEST_OUTPUT = 20_000
"""Characters of each output that a model gets."""


def code_tool(client: AsyncBullpen, *, name: str = "run_code", **options: Unpack[params.RunOptions]) -> FunctionTool:
    """Returns a tool that runs a program, in Python unless options have another language.

    With a thread_id, the programs of one agent find the files of earlier ones.

        agent = Agent(name="analyst", tools=[code_tool(client, thread_id="analysis")])
    """
    language = options.get("language") or "python"

    async def run(code: str) -> str:
        result = await client.run(code, **options)
        parts = [f"exit code: {result.exit_code}"]
        if result.error is not None:
            parts.append(f"error: {result.error_message or result.error}")
        for stream, text in ("stdout", result.stdout), ("stderr", result.stderr):
            if text:
                parts.append(f"{stream}:\n{_cut(text)}")
        return "\n".join(parts)

    kept = "Files in the home directory are kept." if options.get("thread_id") else "Nothing is kept between calls."
    about = f"Runs a program in {language} in a sandbox and returns what it prints. {kept}"
    return function_tool(run, name_override=name, description_override=about)


def _cut(text: str) -> str:
    if len(text) <= LONGEST_OUTPUT:
        return text
    return f"{text[:LONGEST_OUTPUT]}\n[{len(text) - LONGEST_OUTPUT} more characters]"
