"""Runs the adapters with the real packages, against the server of BULLPEN_URL."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pandas
from agents import Agent, Model, ModelResponse, Runner, Usage, set_tracing_disabled
from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.messages.tool import tool_call
from langchain_core.outputs import ChatGeneration, ChatResult
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from bullpen import AsyncBullpen, Bullpen
from bullpen.deepagents import BullpenBackend
from bullpen.openai_agents import code_tool
from bullpen.pandas import map_frame

RUN = "run" + secrets.token_hex(6)


class Script(BaseChatModel):
    """A chat model that calls tools as a list says."""

    calls: list[ToolCall]

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        done = sum(isinstance(m, AIMessage) for m in messages)
        call = self.calls[done:done + 1]
        message = AIMessage(content="" if call else str(messages[-1].content), tool_calls=call)
        return ChatResult(generations=[ChatGeneration(message=message)])


def call(name: str, **args: Any) -> ToolCall:
    return tool_call(name=name, args=args, id=secrets.token_hex(4))


def deepagents(client: Bullpen) -> None:
    with client.sandboxes.create(timeout=300) as sandbox:
        backend = BullpenBackend(sandbox)
        root = backend.execute("pwd").output.strip()
        executed = backend.execute("echo one; echo two >&2; exit 3")
        assert (executed.output, executed.exit_code) == ("one\ntwo\n", 3), executed
        killed = backend.execute("echo begun; sleep 60", timeout=1)
        assert killed.output.startswith("begun\n") and killed.exit_code is None, killed
        assert backend.write(f"{root}/src/a.py", "print('a')\nprint('b')\n").error is None
        assert backend.edit(f"{root}/src/a.py", "'b'", "'c'").occurrences == 1
        read = backend.read(f"{root}/src/a.py")
        assert read.file_data is not None and "print('c')" in read.file_data["content"], read
        listed = backend.ls(f"{root}/src").entries
        assert listed is not None and [e["path"] for e in listed] == [f"{root}/src/a.py"], listed
        found = backend.grep("print('c')", root).matches
        assert found is not None and [m["line"] for m in found] == [2], found
        globbed = backend.glob("*.py", root).matches
        assert globbed is not None and len(globbed) == 1, globbed
        uploads = backend.upload_files([(f"{root}/b.bin", b"\x00\xff"), ("/etc/passwd", b"x")])
        assert uploads[0].error is None and uploads[1].error is not None, uploads
        down = backend.download_files([f"{root}/b.bin", f"{root}/none", f"{root}/src"])
        assert [d.content for d in down] == [b"\x00\xff", None, None], down
        assert [d.error for d in down[:2]] == [None, "file_not_found"], down
        model = Script(calls=[
            call("write_file", file_path=f"{root}/plan.txt", content="six times seven"),
            call("execute", command=f"cat {root}/plan.txt; echo; expr 6 \\* 7"),
        ])
        answer = create_deep_agent(model=model, backend=backend).invoke({"messages": [("user", "go")]})
        assert "six times seven\n42" in answer["messages"][-1].content, answer["messages"][-1]


class Scripted(Model):
    """A model that calls the tool once and answers with what it returned."""

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:
        output: Any
        if isinstance(input, list) and input[-1].get("type") == "function_call_output":
            text = ResponseOutputText(text=input[-1]["output"], type="output_text", annotations=[])
            output = ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")
        else:
            code = '{"code": "import sys; print(6 * 7); print(\'oops\', file=sys.stderr); sys.exit(3)"}'
            output = ResponseFunctionToolCall(id="f", call_id="c", name="run_code", arguments=code, type="function_call")
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


async def openai_agents() -> None:
    set_tracing_disabled(True)
    async with AsyncBullpen.from_env() as client:
        tool = code_tool(client, thread_id=RUN)
        assert tool.params_json_schema["required"] == ["code"], tool.params_json_schema
        answer = await Runner.run(Agent(name="analyst", model=Scripted(), tools=[tool]), "what is 6 * 7?")
        assert answer.final_output == "exit code: 3\nstdout:\n42\n\nstderr:\noops\n", answer.final_output


def frames(client: Bullpen) -> None:
    frame = pandas.DataFrame({"n": [1, 2, 0], "word": ["a", "b", "c"]}, index=["x", "y", "z"])
    code = "import json, sys; r = json.load(sys.stdin); print('noise'); print(json.dumps({'w': r['word'], 'q': 6 // r['n']}))"
    mapped = map_frame(client, code, frame, progress=False)
    assert list(mapped.index) == ["x", "y", "z"], mapped
    assert list(mapped["q"])[:2] == [6, 3] and list(mapped["w"])[:2] == ["a", "b"], mapped
    assert mapped["error"].isna().tolist() == [True, True, False], mapped
    assert "ZeroDivisionError" in mapped["error"]["z"], mapped
    for ending in ("csv", "json", "jsonl", "parquet"):
        client.files.write(f"frame.{ending}", frame, thread_id=RUN)
        back = client.files.read_frame(f"frame.{ending}", thread_id=RUN)
        assert back["n"].tolist() == [1, 2, 0] and back["word"].tolist() == ["a", "b", "c"], (ending, back)
    client.threads.delete(RUN)


def main() -> None:
    with Bullpen.from_env() as client:
        frames(client)
        print("pandas")
        deepagents(client)
        print("deepagents")
    asyncio.run(openai_agents())
    print("openai agents")


if __name__ == "__main__":
    main()
