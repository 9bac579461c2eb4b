"""Programs of the forms in which OpenAI's pages use the code interpreter and the shell."""

import json
import sys
import time
import traceback

import openai
from openai.types.responses import Response, ResponseCodeInterpreterToolCall, ResponseFunctionShellToolCall, ResponseFunctionShellToolCallOutput

MODEL = "gpt-5.5"
TOOLS = [{"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "4g"}}]
OUTPUTS = ["code_interpreter_call.outputs"]

client = openai.OpenAI(max_retries=0)


def strict(value):
    """Parses an object again, with the errors that the SDK leaves out."""
    type(value).model_validate_json(value.model_dump_json())
    return value


def quick_start():
    response = strict(client.responses.create(
        model=MODEL, tools=TOOLS, include=OUTPUTS, instructions="You are a tutor.", input="The mean and standard deviation of 1 to 10?",
    ))
    assert [i.type for i in response.output] == ["message", "code_interpreter_call", "message"], response
    call = response.output[1]
    assert isinstance(call, ResponseCodeInterpreterToolCall) and call.status == "completed" and "statistics" in call.code, call
    assert [o.logs for o in call.outputs] == ["5.5 2.8723\n"] and call.container_id.startswith("cntr_"), call
    assert response.status == "completed" and "5.5 2.8723" in response.output_text and response.usage.total_tokens > 0, response


def stream():
    deltas, numbers, code = [], [], ""
    with client.responses.create(model=MODEL, tools=TOOLS, input="The mean and standard deviation of 1 to 10?", stream=True) as events:
        for event in events:
            strict(event)
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if event.type == "response.code_interpreter_call_code.delta":
                code += event.delta
    assert numbers == list(range(len(numbers))), numbers
    assert event.type == "response.completed" and isinstance(event.response, Response), event
    assert "statistics" in code and len(deltas) > 3, (code, deltas)
    assert event.response.output_text == "".join(deltas), event
    assert event.response.output[1].outputs is None, event


def helper():
    with client.responses.stream(model=MODEL, tools=TOOLS, input="The mean and standard deviation of 1 to 10?") as s:
        kinds = [event.type for event in s]
        final = s.get_final_response()
    assert "response.code_interpreter_call.completed" in kinds and "5.5 2.8723" in final.output_text, (kinds, final)


def files():
    response = strict(client.responses.create(model=MODEL, tools=TOOLS, input="Save a file"))
    [citation] = response.output[-1].content[0].annotations
    assert citation.type == "container_file_citation" and citation.filename == "report.csv", citation
    assert response.output_text[citation.start_index:citation.end_index] == "report.csv", citation
    content = client.containers.files.content.retrieve(citation.file_id, container_id=citation.container_id)
    assert content.read() == b"a,1", content
    listed = client.containers.files.list(citation.container_id)
    assert [(f.path, f.bytes) for f in listed] == [("report.csv", 3)], listed
    assert strict(client.containers.files.retrieve(citation.file_id, container_id=citation.container_id)).source == "assistant"
    assert strict(client.containers.retrieve(citation.container_id)).status == "running"

    again = client.responses.create(model=MODEL, include=OUTPUTS, tools=[{"type": "code_interpreter", "container": citation.container_id}], input="Read the file")
    assert again.output[0].outputs[0].logs == "a,1\n", again
    history = [{"role": "user", "content": "Save a file"}, *[i.model_dump(exclude_none=True) for i in response.output], {"role": "user", "content": "Read the file"}]
    again = client.responses.create(model=MODEL, include=OUTPUTS, tools=TOOLS, input=history)
    assert again.output[0].outputs[0].logs == "a,1\n", again


def containers():
    file = strict(client.files.create(file=("report.csv", b"b,2"), purpose="user_data"))
    assert strict(client.files.retrieve(file.id)).bytes == 3
    container = strict(client.containers.create(name="test-container", memory_limit="4g", file_ids=[file.id]))
    ask = lambda: client.responses.create(model=MODEL, include=OUTPUTS, tools=[{"type": "code_interpreter", "container": container.id}], input="Read the file").output[0].outputs[0].logs
    assert ask() == "b,2\n", container
    assert strict(client.containers.files.create(container.id, file=("report.csv", b"c,3"))).path == "report.csv"
    assert ask() == "c,3\n", container
    assert client.files.delete(file.id).deleted
    client.containers.delete(container.id)
    empty = client.containers.create(name="empty")
    response = client.responses.create(model=MODEL, tools=[{"type": "code_interpreter", "container": empty.id}], input="Save a file")
    assert response.output[0].container_id == empty.id, response
    response = client.responses.create(model=MODEL, include=OUTPUTS, input="Read the file", tools=[{"type": "code_interpreter", "container": {"type": "auto", "file_ids": [client.files.create(file=("report.csv", b"d,4"), purpose="user_data").id]}}])
    assert response.output[0].outputs[0].logs == "d,4\n", response


def shell():
    response = strict(client.responses.create(model=MODEL, tools=[{"type": "shell", "environment": {"type": "container_auto"}}], input="List"))
    call, output = response.output[:2]
    assert isinstance(call, ResponseFunctionShellToolCall) and len(call.action.commands) == 2, call
    assert isinstance(output, ResponseFunctionShellToolCallOutput) and output.call_id == call.call_id, output
    assert [(o.stdout, o.outcome.exit_code) for o in output.output] == [("list.txt\n", 0), ("one\n", 2)], output
    with client.responses.create(model=MODEL, tools=[{"type": "shell", "environment": {"type": "container_auto"}}], input="List", stream=True) as events:
        kinds = [strict(event).type for event in events]
    assert kinds.count("response.shell_call_output_content.done") == 2, kinds


def functions():
    tools = [{"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"location": {"type": "string"}}}, "strict": True}]
    messages = [{"role": "user", "content": "How is the weather?"}]
    response = strict(client.responses.create(model=MODEL, tools=tools, input=messages))
    [call] = response.output
    assert call.type == "function_call" and call.arguments == '{"location":"Paris"}', call
    messages += response.output + [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert client.responses.create(model=MODEL, tools=tools, input=messages).output_text == "Done: sunny"


def background():
    response = strict(client.responses.create(model=MODEL, tools=TOOLS, input="The mean and standard deviation of 1 to 10?", background=True))
    assert response.status == "queued" and response.background, response
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = strict(client.responses.retrieve(response.id, include=OUTPUTS))
    assert response.status == "completed" and [o.logs for o in response.output[1].outputs] == ["5.5 2.8723\n"], response
    assert strict(client.responses.cancel(response.id)).status == "completed"

    with client.responses.create(model=MODEL, tools=TOOLS, input="The mean and standard deviation of 1 to 10?", background=True, stream=True) as events:
        for event in events:
            if event.type == "response.created":
                id = event.response.id
            if event.type == "response.code_interpreter_call.interpreting":
                break  # the connection is lost
    numbers, last = [], event.sequence_number
    with client.responses.retrieve(id, stream=True, starting_after=last) as events:
        for event in events:
            numbers.append(strict(event).sequence_number)
    assert numbers == list(range(last + 1, last + 1 + len(numbers))) and event.type == "response.completed", (numbers, event)
    assert "5.5 2.8723" in event.response.output_text, event

    again = strict(client.responses.create(model=MODEL, input="Hi", previous_response_id=id))
    assert again.status == "completed" and again.previous_response_id == id, again
    client.responses.delete(id)
    try:
        client.responses.retrieve(id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("a response is there after its deletion")


def webhook():
    """Verifies a webhook, as a receiver does. Its secret, header and body are in the file that is the argument."""
    with open(sys.argv[1]) as f:
        got = json.load(f)
    event = openai.OpenAI(webhook_secret=got["secret"]).webhooks.unwrap(got["body"], got["header"])
    assert event.type == "response.completed" and event.object == "event", event
    assert strict(client.responses.retrieve(event.data.id)).status == "completed"
    try:
        client.webhooks.unwrap(got["body"] + " ", got["header"], secret=got["secret"])
    except openai.InvalidWebhookSignatureError:
        pass
    else:
        raise AssertionError("a webhook with another body was accepted")


def errors():
    def fails(kind, **more):
        try:
            client.responses.create(**{"model": MODEL, "input": "Hi", **more})
        except kind as e:
            assert e.request_id, e.response.headers
            return e
        raise AssertionError(f"{more} succeeded")

    assert fails(openai.BadRequestError, previous_response_id="resp_1").param == "previous_response_id"
    assert fails(openai.RateLimitError, input="Limit").response.headers["retry-after"] == "7"
    fails(openai.InternalServerError, input="Overload")
    fails(openai.InternalServerError, input="Break")
    fails(openai.NotFoundError, tools=[{"type": "code_interpreter", "container": "cntr_none"}])
    try:
        openai.OpenAI(api_key="sk-other", max_retries=0).responses.create(model=MODEL, input="Hi")
    except openai.AuthenticationError as e:
        assert e.code == "invalid_api_key" and e.request_id, e
    else:
        raise AssertionError("another key succeeded")


failed = 0
for example in [quick_start, stream, helper, files, containers, shell, functions, background, webhook, errors]:
    try:
        example()
    except Exception:
        failed += 1
        print(f"{example.__name__} failed", file=sys.stderr)
        traceback.print_exc()
sys.exit(failed)
