"""Programs of the forms in which OpenAI's pages use the code interpreter and the shell."""

import os
import sys
import time
import traceback
import urllib.request

import openai
from openai.types.responses import Response, ResponseCodeInterpreterToolCall, ResponseFunctionShellToolCall, ResponseFunctionShellToolCallOutput

MODEL = "gpt-5.5"
TOOLS = [{"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "1g"}}]
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
    assert [(f.path, f.bytes) for f in listed] == [("/mnt/data/report.csv", 3)], listed
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
    container = strict(client.containers.create(name="test-container", memory_limit="1g", file_ids=[file.id]))
    ask = lambda: client.responses.create(model=MODEL, include=OUTPUTS, tools=[{"type": "code_interpreter", "container": container.id}], input="Read the file").output[0].outputs[0].logs
    assert ask() == "b,2\n", container
    assert strict(client.containers.files.create(container.id, file=("report.csv", b"c,3"))).path == "/mnt/data/report.csv"
    assert ask() == "c,3\n", container
    [listed] = client.containers.files.list(container.id)
    assert client.containers.files.delete(listed.id, container_id=container.id) is None
    assert not client.containers.files.list(container.id).data
    assert strict(client.containers.files.create(container.id, file_id=file.id)).path == "/mnt/data/report.csv"
    assert file.id in [strict(f).id for f in client.files.list(limit=1)]
    assert client.files.delete(file.id).deleted
    client.containers.delete(container.id)
    made = [client.containers.create(name="empty").id for _ in range(3)]
    listed = [strict(c).id for c in client.containers.list(limit=2)]  # asks for all pages
    assert container.id not in listed and len(listed) == len(set(listed)), listed
    assert [c.id for c in client.containers.list(limit=2, order="asc") if c.id in made] == [id for id in reversed(listed) if id in made], listed
    empty = client.containers.retrieve(made[0])
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


def ended(response):
    while response.status in ("queued", "in_progress"):
        time.sleep(0.1)
        response = strict(client.responses.retrieve(response.id, include=OUTPUTS))
    return response


def absent(id):
    try:
        client.responses.retrieve(id)
    except openai.NotFoundError as e:
        assert e.request_id and e.type == "invalid_request_error", e
    else:
        raise AssertionError(f"{id} is there")


def background():
    response = strict(client.responses.create(model=MODEL, tools=TOOLS, input="The mean and standard deviation of 1 to 10?", background=True))
    assert response.status == "queued" and response.background and not response.output, response
    response = ended(response)
    assert response.status == "completed" and response.output[1].outputs[0].logs == "5.5 2.8723\n" and "5.5 2.8723" in response.output_text, response
    assert response.completed_at >= response.created_at and response.usage.total_tokens > 0, response
    assert strict(client.responses.retrieve(response.id)).output[1].outputs is None  # without include
    assert strict(client.responses.cancel(response.id)).status == "completed"  # as it has ended
    assert client.responses.delete(response.id) is None
    absent(response.id)


def cut_stream():
    events = client.responses.create(model=MODEL, tools=TOOLS, include=OUTPUTS, input="The mean and standard deviation of 1 to 10?", background=True, stream=True)
    seen = []
    with events:
        for event in events:
            seen.append(strict(event))
            if len(seen) == 5:
                break
    assert [e.type for e in seen[:2]] == ["response.created", "response.queued"], seen
    id = seen[0].response.id
    with client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number) as events:
        seen += [strict(event) for event in events]
    assert [e.sequence_number for e in seen] == list(range(len(seen))), seen
    final = seen[-1].response
    assert seen[-1].type == "response.completed" and final.output[1].outputs[0].logs == "5.5 2.8723\n", final
    assert final.output_text == "".join(e.delta for e in seen if e.type == "response.output_text.delta"), final
    with client.responses.retrieve(id, stream=True) as events:
        assert [e.sequence_number for e in events] == list(range(len(seen)))
    with client.responses.stream(response_id=id, starting_after=4) as events:
        assert [e.sequence_number for e in events] == list(range(5, len(seen)))
        assert events.get_final_response().output_text == final.output_text
    assert strict(client.responses.retrieve(id)).output_text == final.output_text


def cancel():
    with client.responses.create(model=MODEL, tools=TOOLS, input="Sleep", background=True, stream=True) as events:
        for event in events:
            if event.type == "response.created":
                id = event.response.id
            if event.type == "response.code_interpreter_call.interpreting":
                strict(client.responses.cancel(id))
    # The SDK has no type for this event, and passes it on as it came.
    assert event.type == "response.cancelled" and (event.response["id"], event.response["status"]) == (id, "cancelled"), event
    with client.responses.stream(response_id=id, starting_after=0) as events:
        assert [e.type for e in events][-1] == "response.cancelled"
    canceled = ended(client.responses.retrieve(id))
    assert canceled.status == "cancelled" and canceled.error is None, canceled
    response = client.responses.create(model=MODEL, input="Hi")
    try:
        client.responses.cancel(response.id)
    except openai.BadRequestError as e:
        assert e.param == "response_id", e
    else:
        raise AssertionError("a response that was not in the background was cancelled")


def previous():
    first = client.responses.create(model=MODEL, tools=TOOLS, input="Save a file", background=True)
    slow = client.responses.create(model=MODEL, tools=TOOLS, input="Sleep", background=True)
    try:
        client.responses.create(model=MODEL, tools=TOOLS, input="Read the file", previous_response_id=slow.id)
    except openai.BadRequestError as e:
        assert e.param == "previous_response_id", e
    else:
        raise AssertionError("a response went on from one that had not ended")
    client.responses.cancel(slow.id)
    first = ended(first)
    second = strict(client.responses.create(model=MODEL, tools=TOOLS, include=OUTPUTS, input="Read the file", previous_response_id=first.id))
    assert second.previous_response_id == first.id and second.output[0].outputs[0].logs == "a,1\n", second
    assert second.output[0].container_id == first.output[0].container_id, (first, second)
    client.responses.delete(first.id)
    third = ended(client.responses.create(model=MODEL, tools=TOOLS, input="Read the file", previous_response_id=second.id, background=True))
    assert third.output[0].container_id == first.output[0].container_id and third.output[0].outputs[0].logs == "a,1\n", third


def store():
    assert client.responses.retrieve(strict(client.responses.create(model=MODEL, input="Hi")).id).output_text == "Hello!"
    response = strict(client.responses.create(model=MODEL, input="Hi", store=False))
    assert response.store is False, response
    absent(response.id)
    try:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=response.id)
    except openai.BadRequestError as e:
        assert e.param == "previous_response_id", e
    else:
        raise AssertionError("a response went on from one that was not stored")


def webhooks():
    def received(id):
        while True:  # a server passes each webhook on, with its headers
            with urllib.request.urlopen(os.environ["WEBHOOKS_URL"]) as got:
                headers, body = got.headers, got.read()
            event = strict(client.webhooks.unwrap(body, headers))  # with OPENAI_WEBHOOK_SECRET
            if event.data.id == id:
                return event, headers, body

    response = client.responses.create(model=MODEL, input="Hi", background=True)
    event, headers, body = received(response.id)
    assert event.type == "response.completed" and event.object == "event" and event.id.startswith("evt_") and event.created_at >= response.created_at, event
    assert client.responses.retrieve(event.data.id).output_text == "Hello!"
    for kind, text in {"response.failed": "Break", "response.cancelled": "Sleep"}.items():
        response = client.responses.create(model=MODEL, tools=TOOLS, input=text, background=True)
        if text == "Sleep":
            client.responses.cancel(response.id)
        assert received(response.id)[0].type == kind
        error = strict(client.responses.retrieve(response.id)).error
        assert (error and error.code) == ("server_error" if text == "Break" else None), error
    for changed, secret in [(body + b" ", None), (body, "whsec_" + "AAAA" * 8)]:
        try:
            client.webhooks.unwrap(changed, headers, secret=secret)
        except openai.InvalidWebhookSignatureError:
            pass
        else:
            raise AssertionError("a webhook with another signature was accepted")


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
    assert fails(openai.BadRequestError, tools=[{"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "4g"}}]).param == "tools"
    fails(openai.NotFoundError, tools=[{"type": "code_interpreter", "container": "cntr_none"}])
    try:
        openai.OpenAI(api_key="sk-other", max_retries=0).responses.create(model=MODEL, input="Hi")
    except openai.AuthenticationError as e:
        assert e.code == "invalid_api_key" and e.request_id, e
    else:
        raise AssertionError("another key succeeded")


def models():
    assert [strict(m).id for m in client.models.list()] == ["small"]
    assert strict(client.models.retrieve("openai/" + MODEL)).object == "model"  # since * stands for all names


def rate_limit():
    limited = openai.OpenAI(api_key=os.environ["LIMITED_API_KEY"], max_retries=0)  # for one request a minute
    try:
        while True:
            limited.models.list()
    except openai.RateLimitError as e:
        assert e.code == "rate_limit_exceeded" and int(e.response.headers["retry-after"]) > 0 and e.request_id, e.response.headers


failed = 0
for example in [quick_start, stream, helper, files, containers, shell, functions, background, cut_stream, cancel, previous, store, webhooks, errors, models, rate_limit]:
    try:
        example()
    except Exception:
        failed += 1
        print(f"{example.__name__} failed", file=sys.stderr)
        traceback.print_exc()
sys.exit(failed)
