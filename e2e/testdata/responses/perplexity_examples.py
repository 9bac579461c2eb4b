"""Programs of the forms in which Perplexity's pages use the sandbox."""

import os
import sys
import time
import traceback

import perplexity

MODEL = "openai/gpt-5.5"
TOOLS = [{"type": "sandbox"}]

client = perplexity.Perplexity(max_retries=0)


def strict(value):
    """Parses an object again, with the errors that the SDK leaves out."""
    type(value).model_validate_json(value.model_dump_json())
    return value


def quick_start():
    response = strict(client.responses.create(model=MODEL, input="The mean and standard deviation of 1 to 10?", tools=TOOLS))
    assert [i.type for i in response.output] == ["message", "sandbox_results", "message"], response
    item = response.output[1]
    assert (item.language, item.status) == ("python", "completed") and "statistics" in item.code and item.container_id, item
    [result] = item.results
    assert (result.stdout, result.stderr, result.exit_code, result.status) == ("5.5 2.8723\n", "", 0, "completed"), result
    assert result.duration_ms >= 0, result
    assert response.status == "completed" and "5.5 2.8723" in response.output_text, response
    assert response.usage.tool_calls_details["sandbox"].invocation == 1, response.usage


def presets():
    assert client.responses.create(preset="pro-search", input="Hi").output_text == "Hello!"
    assert client.responses.create(models=[MODEL], input="Hi", max_steps=3, instructions="Be short.").output_text == "Hello!"


def failures():
    response = strict(client.responses.create(model=MODEL, input="Fail", tools=TOOLS))
    [result] = response.output[0].results
    assert (result.stdout, result.stderr, result.exit_code, result.status) == ("out\n", "err\n", 3, "completed"), result
    assert response.status == "completed", response


def stream():
    deltas, numbers, kinds = [], [], []
    for event in client.responses.create(model=MODEL, input="The mean and standard deviation of 1 to 10?", tools=TOOLS, stream=True):
        numbers.append(event.sequence_number)
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
        if event.type == "response.output_item.done" and event.item.type == "sandbox_results":
            assert event.item.results[0].stdout == "5.5 2.8723\n", event
    assert numbers == list(range(len(numbers))) and len(deltas) > 3, (numbers, deltas)
    assert kinds[0] == "response.created" and event.type == "response.completed" and event.response.output_text == "".join(deltas), kinds


def files():
    response = client.responses.create(model=MODEL, input="Save a file", tools=TOOLS)
    [file] = client.responses.files.list(response.id).data
    assert (file.filename, file.bytes) == ("report.csv", 3), file
    assert client.responses.files.content(file.id, response_id=response.id).read() == b"a,1"


def functions():
    tools = [{"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"location": {"type": "string"}}}}]
    response = strict(client.responses.create(model=MODEL, tools=tools, input="How is the weather?"))
    [call] = response.output
    assert call.type == "function_call" and response.status == "requires_action", response
    items = [{"type": "message", "role": "user", "content": "How is the weather?"},
             {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
             {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert client.responses.create(model=MODEL, tools=tools, input=items).output_text == "Done: sunny"


def ended(response):
    while response.status in ("queued", "in_progress"):
        time.sleep(0.1)
        response = strict(client.responses.retrieve(response.id))
    return response


def background():
    response = strict(client.responses.create(model=MODEL, input="Save a file", tools=TOOLS, background=True))
    assert response.status == "queued" and response.background and not response.output, response
    response = ended(response)
    assert response.status == "completed" and response.output[0].results[0].stdout == "saved\n", response
    [file] = client.responses.files.list(response.id).data
    assert (file.filename, file.bytes) == ("report.csv", 3), file
    assert client.responses.files.content(file.id, response_id=response.id).read() == b"a,1"
    failed = ended(client.responses.create(model=MODEL, input="Break", background=True))
    assert failed.status == "failed" and failed.error.message, failed


def cut_stream():
    seen = []
    with client.responses.create(model=MODEL, input="The mean and standard deviation of 1 to 10?", tools=TOOLS, background=True, stream=True) as events:
        for event in events:
            seen.append(strict(event))
            if len(seen) == 4:
                break
    id = seen[0].response.id
    with client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number) as events:
        seen += [strict(event) for event in events]
    assert [e.sequence_number for e in seen] == list(range(len(seen))), seen
    assert seen[-1].type == "response.completed" and seen[-1].response.output[1].results[0].stdout == "5.5 2.8723\n", seen[-1]
    assert seen[-1].response.output_text == "".join(e.delta for e in seen if e.type == "response.output_text.delta"), seen[-1]
    assert client.responses.retrieve(id).output_text == seen[-1].response.output_text


def cancel():
    with client.responses.create(model=MODEL, input="Sleep", tools=TOOLS, background=True, stream=True) as events:
        for event in events:
            if event.type == "response.created":
                id = event.response.id
            if event.type == "response.output_item.added" and event.item.type == "sandbox_results":
                answer = strict(client.responses.cancel(id))
                assert (answer.response_id, answer.status) == (id, "cancelling"), answer
    assert event.type == "response.cancelled", event  # for which the SDK has no type
    response = ended(client.responses.retrieve(id))
    assert response.status == "cancelled", response
    try:
        client.responses.cancel(id)
    except perplexity.BadRequestError:
        pass
    else:
        raise AssertionError("a response was cancelled twice")


def previous():
    first = ended(client.responses.create(model=MODEL, input="Say hello", background=True))
    second = strict(client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id))
    assert second.previous_response_id == first.id and second.output_text == "Hello!", second
    assert client.responses.retrieve(second.id).output_text == "Hello!"
    hidden = strict(client.responses.create(model=MODEL, input="Hi", store=False))
    assert hidden.store is False, hidden
    try:
        client.responses.retrieve(hidden.id)
    except perplexity.NotFoundError as e:
        assert e.response.headers["x-request-id"], e.response.headers
    else:
        raise AssertionError("a response that was not stored is there")


def errors():
    def fails(kind, **more):
        try:
            client.responses.create(**{"model": MODEL, "input": "Hi", **more})
        except kind as e:
            assert e.response.headers["x-request-id"], e.response.headers
            return e
        raise AssertionError(f"{more} succeeded")

    fails(perplexity.BadRequestError, previous_response_id="resp_none")
    assert fails(perplexity.RateLimitError, input="Limit").response.headers["retry-after"] == "7"
    fails(perplexity.InternalServerError, input="Break")
    try:
        perplexity.Perplexity(api_key="pplx-other", max_retries=0).responses.create(model=MODEL, input="Hi")
    except perplexity.AuthenticationError:
        pass
    else:
        raise AssertionError("another key succeeded")


def models():
    assert [m.id for m in strict(client.models.list()).data] == ["small"]


def rate_limit():
    limited = perplexity.Perplexity(api_key=os.environ["LIMITED_API_KEY"], max_retries=0)  # for one request a minute
    try:
        while True:
            limited.models.list()
    except perplexity.RateLimitError as e:
        assert int(e.response.headers["retry-after"]) > 0 and e.response.headers["x-request-id"], e.response.headers


failed = 0
for example in [quick_start, presets, failures, stream, files, functions, background, cut_stream, cancel, previous, errors, models, rate_limit]:
    try:
        example()
    except Exception:
        failed += 1
        print(f"{example.__name__} failed", file=sys.stderr)
        traceback.print_exc()
sys.exit(failed)
