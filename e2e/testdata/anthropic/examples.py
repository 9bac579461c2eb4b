"""Programs of the forms in which Anthropic's pages use the code execution tool and the Files API."""

import io
import os
import sys
import time
import traceback

import anthropic
from anthropic.types import Message
from anthropic.types.beta import BetaMessage

MODEL = "claude-opus-4-6"
TOOLS = [{"type": "code_execution_20250825", "name": "code_execution"}]
FILES = "files-api-2025-04-14"

client = anthropic.Anthropic()


def strict(response):
    """Parses the answer again, with the errors that the SDK leaves out."""
    kind = Message if type(response).__module__.startswith("anthropic.types.message") else BetaMessage
    kind.model_validate_json(response.model_dump_json())
    return response


def again(value):
    """Parses an object that is no message again, with the errors that the SDK leaves out."""
    type(value).model_validate_json(value.model_dump_json())
    return value


def ask(text, **more):
    return strict(client.messages.create(model=MODEL, max_tokens=4096, messages=[{"role": "user", "content": text}], tools=TOOLS, **more))


def results(response):
    return [b.content for b in response.content if b.type.endswith("_tool_result")]


def quick_start():
    response = ask("Calculate the mean and standard deviation of [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]")
    assert [b.type for b in response.content] == ["text", "server_tool_use", "bash_code_execution_tool_result", "text"], response
    result = response.content[2].content
    assert isinstance(result, anthropic.types.BashCodeExecutionResultBlock), result
    assert (result.stdout, result.stderr, result.return_code) == ("5.5 2.8723\n", "", 0), result
    assert response.stop_reason == "end_turn" and response.usage.output_tokens > 0, response
    assert response.container.id.startswith("container_") and response.container.expires_at.year > 2000, response.container


def first_revision():
    response = strict(client.beta.messages.create(
        model=MODEL, betas=["code-execution-2025-05-22"], max_tokens=4096,
        messages=[{"role": "user", "content": "Calculate the mean and standard deviation of [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"}],
        tools=[{"type": "code_execution_20250522", "name": "code_execution"}],
    ))
    use, result = response.content[1], response.content[2]
    assert use.name == "code_execution" and "statistics" in use.input["code"], use
    assert isinstance(result, anthropic.types.beta.BetaCodeExecutionToolResultBlock), result
    assert result.content.stdout == "5.5 2.8723\n" and result.content.return_code == 0, result


def later_revisions():
    for revision in ["20260120", "20260521"]:
        response = strict(client.beta.messages.create(
            model=MODEL, max_tokens=4096, messages=[{"role": "user", "content": "Fail"}], tools=[{"type": "code_execution_" + revision, "name": "code_execution"}],
        ))
        assert results(response)[0].return_code == 3, response


def upload_and_analyze():
    file = client.beta.files.upload(file=("dir/data.csv", io.BytesIO(b"a,1\nb,41\n"), "text/csv"))
    assert file.type == "file" and file.filename == "data.csv" and file.mime_type == "text/csv" and file.size_bytes == 9 and not file.downloadable, file
    content = [{"type": "text", "text": "Analyze this CSV data"}, {"type": "container_upload", "file_id": file.id}]
    response = strict(client.beta.messages.create(
        model=MODEL, betas=[FILES], max_tokens=4096, messages=[{"role": "user", "content": content}], tools=TOOLS))
    assert results(response)[0].stdout == "total 42\n", response
    # The next turn repeats the block.
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": response.content}, {"role": "user", "content": content}]
    again = strict(client.beta.messages.create(model=MODEL, max_tokens=4096, container=response.container.id, messages=messages, tools=TOOLS))
    assert results(again)[0].stdout == "total 42\n" and again.container.id == response.container.id, again
    try:
        client.beta.files.download(file.id)
        raise AssertionError("an uploaded file was downloaded")
    except anthropic.BadRequestError as e:
        assert e.body["error"]["details"]["error_code"] == "file_not_downloadable" and e.request_id, e.body
    assert client.beta.files.delete(file.id).type == "file_deleted"
    try:
        client.beta.files.retrieve_metadata(file.id)
        raise AssertionError("a deleted file is there")
    except anthropic.NotFoundError as e:
        assert e.body["error"]["type"] == "not_found_error", e.body


def retrieve_files():
    response = strict(client.beta.messages.create(
        model=MODEL, betas=[FILES], max_tokens=4096, messages=[{"role": "user", "content": "Plot this and save it as a chart"}], tools=TOOLS))
    ids = [f.file_id for block in response.content if block.type == "bash_code_execution_tool_result" for f in block.content.content]
    assert len(ids) == 1, response
    metadata = client.beta.files.retrieve_metadata(ids[0])
    assert metadata.filename == "chart.png" and metadata.mime_type == "image/png" and metadata.downloadable, metadata
    assert client.beta.files.download(ids[0]).read() == b"\x89PNG chart"


def lists_of_files():
    made = [client.beta.files.upload(file=(f"{n}.txt", b"x")).id for n in range(3)]
    listed = [f.id for f in client.beta.files.list(limit=2)]  # asks for all pages
    assert set(made) <= set(listed) and len(listed) == len(set(listed)), listed
    stable = [f.id for f in client.files.list(limit=2)]
    assert stable == listed, stable
    assert {f.id for f in client.files.list(ids=made)} == set(made)
    # The other way to page, of earlier versions of the SDK.
    before = client.get("/v1/files", cast_to=object, options={"params": {"before_id": listed[2], "limit": 1}})
    assert [f["id"] for f in before["data"]] == [listed[1]] and before["has_more"] and before["first_id"] == listed[1], before
    for id in made:
        client.files.delete(id)


def reuse():
    first = ask("Write a file with a random number to /tmp/number.txt")
    second = ask("Read the number from /tmp/number.txt and calculate its square", container=first.container.id)
    assert results(second)[0].stdout == "square 22193521\n", second
    third = strict(client.beta.messages.create(
        model=MODEL, max_tokens=4096, container={"id": first.container.id}, messages=[{"role": "user", "content": "Read the number"}], tools=TOOLS))
    assert results(third)[0].stdout == "square 22193521\n" and third.container.id == first.container.id, third
    try:
        ask("Read the number", container="container_that_is_not")
        raise AssertionError("a container that does not exist was used")
    except anthropic.NotFoundError as e:
        assert e.body["error"]["type"] == "not_found_error", e.body


def streaming():
    with client.messages.stream(
        model=MODEL, max_tokens=4096, tools=TOOLS, messages=[{"role": "user", "content": "Calculate the mean and standard deviation of [1..10]"}]) as stream:
        kinds = [event.type for event in stream]
        response = strict(stream.get_final_message())
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_start") == 4 == kinds.count("content_block_stop"), kinds
    assert results(response)[0].stdout == "5.5 2.8723\n" and response.stop_reason == "end_turn" and response.usage.output_tokens > 0, response
    assert response.content[1].input["command"].startswith("python3"), response
    assert response.container and response.container.id.startswith("container_"), response


def broken_stream():
    try:
        with client.messages.stream(model=MODEL, max_tokens=4096, tools=TOOLS, messages=[{"role": "user", "content": "Break"}]) as stream:
            stream.get_final_message()
        raise AssertionError("a broken reply seems to be whole")
    except anthropic.APIStatusError as e:
        assert e.body["error"]["type"] == "api_error", e.body


def editor():
    response = ask("Edit the config")
    create, replace, view, missing, outside, cat = results(response)
    assert create.type == "text_editor_code_execution_create_result" and not create.is_file_update, create
    assert replace.lines == ["-debug: true", "+debug: false"] and replace.old_start == 1, replace
    assert view.content == "debug: false\nport: 80\n" and (view.num_lines, view.start_line, view.total_lines) == (2, 1, 2), view
    assert missing.error_code == "file_not_found", missing
    assert outside.error_code == "invalid_tool_input" and "home directory" in outside.error_message, outside
    assert cat.stdout == "debug: false\nport: 80\n", cat


def paused():
    messages = [{"role": "user", "content": "Loop"}]
    response = ask("Loop")
    calls = len(results(response))
    assert response.stop_reason == "pause_turn" and calls == 10, response
    while response.stop_reason == "pause_turn":
        messages.append({"role": "assistant", "content": response.content})
        response = strict(client.messages.create(model=MODEL, max_tokens=4096, container=response.container.id, messages=messages, tools=TOOLS))
        calls += len(results(response))
    assert response.stop_reason == "end_turn" and calls == 13, (calls, response)


def own_tool():
    tools = TOOLS + [{"name": "get_weather", "description": "The weather", "input_schema": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}}]
    messages = [{"role": "user", "content": "What is the weather?"}]
    response = strict(client.messages.create(model=MODEL, max_tokens=4096, messages=messages, tools=tools))
    assert response.stop_reason == "tool_use" and [b.type for b in response.content] == ["server_tool_use", "tool_use"], response
    use = response.content[1]
    assert use.input == {"location": "Paris"}, use
    messages += [{"role": "assistant", "content": response.content}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "15 degrees"}]}]
    response = strict(client.messages.create(model=MODEL, max_tokens=4096, messages=messages, tools=tools))
    assert response.content[0].type == "bash_code_execution_tool_result" and response.content[0].content.stdout == "here\n", response
    assert "15 degrees" in response.content[1].text, response


def failures():
    result = results(ask("Fail"))[0]
    assert (result.stdout, result.stderr, result.return_code) == ("out\n", "err\n", 3), result
    result = results(ask("Print 50 MB"))[0]
    assert result.return_code == 0 and 60_000 < len(result.stdout) < 70_000 and result.stdout.endswith("cut off.]"), len(result.stdout)
    response = ask("Cut")
    assert response.stop_reason == "max_tokens" and [b.type for b in response.content] == ["text"], response
    for key, kind in [("sk-local-" + "x" * 43, anthropic.AuthenticationError), ("sk-ant-other", anthropic.AuthenticationError)]:
        try:
            anthropic.Anthropic(api_key=key).messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "x"}])
            raise AssertionError("a bad key was accepted")
        except kind as e:
            assert e.body["error"]["type"] == "authentication_error", e.body
    try:
        client.with_options(max_retries=0).messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "Overload"}])
        raise AssertionError("no error")
    except anthropic.APIStatusError as e:
        assert e.status_code == 529 and e.body["error"]["type"] == "overloaded_error" and e.response.headers["retry-after"], e.body
    try:
        client.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "x"}], tools=[{"type": "web_search_20250305", "name": "web_search"}])
        raise AssertionError("a tool that does not exist was accepted")
    except anthropic.BadRequestError as e:
        assert "web_search" in e.body["error"]["message"], e.body


def batches():
    def item(id, text):
        return {"custom_id": id, "params": {"model": MODEL, "max_tokens": 4096, "messages": [{"role": "user", "content": text}], "tools": TOOLS}}

    for batches in [client.messages.batches, client.beta.messages.batches]:
        def ended(batch):
            while batch.processing_status != "ended":
                time.sleep(0.1)
                batch = again(batches.retrieve(batch.id))
            assert batch.ended_at and batch.request_counts.processing == 0, batch
            return batch, {r.custom_id: again(r).result for r in batches.results(batch.id)}

        created = again(batches.create(requests=[item("mean", "Calculate the mean and standard deviation"), item("broken", "Break")]))
        assert created.type == "message_batch" and sum(dict(created.request_counts).values()) == 2 and created.expires_at > created.created_at, created
        done, got = ended(created)
        assert (done.id, done.request_counts.succeeded, done.request_counts.errored) == (created.id, 1, 1) and done.cancel_initiated_at is None, done
        assert got["mean"].type == "succeeded" and results(got["mean"].message)[0].stdout == "5.5 2.8723\n" and got["mean"].message.stop_reason == "end_turn", got
        assert got["broken"].type == "errored" and got["broken"].error.error.type == "api_error" and got["broken"].error.type == "error", got

        slow = batches.create(requests=[item("slow", "Sleep")])
        try:
            batches.delete(slow.id)
            raise AssertionError("a batch was deleted before its end")
        except anthropic.BadRequestError as e:
            assert e.body["error"]["type"] == "invalid_request_error", e.body
        try:
            batches.results(slow.id)
            raise AssertionError("a batch has results before its end")
        except anthropic.AnthropicError as e:
            assert "results_url" in str(e), e
        assert again(batches.cancel(slow.id)).cancel_initiated_at
        canceled, got = ended(slow)
        assert got["slow"].type == "canceled" and canceled.request_counts.canceled == 1, (canceled, got)

        listed = [again(b).id for b in batches.list(limit=1)]  # asks for all pages
        assert listed[:2] == [slow.id, created.id] and len(listed) == len(set(listed)), listed
        for id in listed:
            deleted = again(batches.delete(id))
            assert (deleted.id, deleted.type) == (id, "message_batch_deleted"), deleted
        assert not batches.list().data
        try:
            batches.retrieve(created.id)
            raise AssertionError("a deleted batch is there")
        except anthropic.NotFoundError as e:
            assert e.body["error"]["type"] == "not_found_error", e.body


def counting():
    assert client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "x" * 400}]).input_tokens == 100


def tool_runner():
    @anthropic.beta_tool
    def get_weather(location: str) -> str:
        """Returns the weather.

        Args:
            location: The city.
        """
        return "sunny in " + location

    # The runner asks for a conversation that the server stores, and is told to send all messages.
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=1024, tools=[get_weather], messages=[{"role": "user", "content": "Forecast"}])
    assert "sunny in Paris" in runner.until_done().content[0].text


def models():
    listed = [again(m).id for m in client.models.list(limit=1)]
    assert listed == ["small"], listed
    assert again(client.models.retrieve(MODEL)).display_name == MODEL  # since * stands for all names


def rate_limit():
    limited = anthropic.Anthropic(api_key=os.environ["LIMITED_API_KEY"], max_retries=0)  # for one request a minute
    try:
        while True:
            limited.models.list()
    except anthropic.RateLimitError as e:
        assert e.body["error"]["type"] == "rate_limit_error" and int(e.response.headers["retry-after"]) > 0 and e.request_id == e.response.headers["x-request-id"], e.response.headers


failed = []
for example in [
    quick_start, first_revision, later_revisions, upload_and_analyze, retrieve_files, lists_of_files, reuse, streaming, broken_stream, editor, paused, own_tool, failures,
    batches, counting, tool_runner, models, rate_limit,
]:
    if len(sys.argv) < 2 or example.__name__ in sys.argv[1:]:
        try:
            example()
        except Exception:
            failed.append(example.__name__)
            traceback.print_exc()
        else:
            print("ok", example.__name__)
sys.exit(f"failed: {failed}" if failed else 0)
