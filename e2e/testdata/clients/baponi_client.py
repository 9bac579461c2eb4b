"""The public client against a server: every call of its API. Any deviation is an exception."""

import asyncio
import os
import urllib.request

import baponi
from baponi import AsyncBaponi, Baponi

url, key = os.environ["BULLPEN_URL"], os.environ["BULLPEN_API_KEY"]


def raises(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


with Baponi(api_key=key, base_url=url) as client:
    result = client.execute("import os; print(os.environ['A'])", env_vars={"A": "b"}, metadata={"k": "v"})
    assert result.success and result.stdout == "b\n" and result.exit_code == 0, result
    result = client.execute("exit 3", language="bash", timeout=10)
    assert not result.success and result.exit_code == 3 and result.error is None, result
    result = client.execute("sleep 60", language="bash", timeout=1)
    assert result.exit_code == -1 and result.error == "execution timed out after 1s", result

    with client.execute_stream("print(1)\nprint(2)") as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "status" and kinds[-1] == "result" and kinds.count("output") == 2, kinds
        trace = stream.trace_id
    with client.reconnect_stream(trace, after_seq=2) as stream:
        assert [event.seq for event in stream] == [3, 4]
    assert client.get_execution(trace).status == "success"

    handle = client.execute_webhook("print('async')")
    assert handle.wait(timeout=60).stdout == "async\n"
    handle = client.execute_webhook("sleep 600", language="bash", timeout=600)
    assert handle.cancel().trace_id == handle.trace_id
    assert handle.wait(timeout=60).error == "Cancelled by user"

    client.execute("open('a.txt', 'w').write('hi')", thread_id="public-client")
    assert [f.path for f in client.list_files(id="public-client")] == ["a.txt"]
    signed = client.download_url(id="public-client", path="a.txt")
    assert urllib.request.urlopen(signed.url).read() == b"hi"
    signed = client.upload_url(id="public-client", path="b.txt", content_length=3)
    headers = {h.name: h.value for h in signed.headers}
    urllib.request.urlopen(urllib.request.Request(signed.url, b"bye", headers, method=signed.method))
    assert client.execute("print(open('b.txt').read())", thread_id="public-client").stdout == "bye\n"

    busy = client.execute_webhook("sleep 600", language="bash", timeout=600, thread_id="public-client")
    raises(baponi.ThreadBusyError, lambda: client.execute("1", thread_id="public-client"))
    busy.cancel()
    busy.wait(timeout=60)

raises(baponi.AuthenticationError, lambda: Baponi(api_key="sk-local-" + "0" * 32, base_url=url).execute("1"))


async def asynchronous():
    async with AsyncBaponi(api_key=key, base_url=url) as client:
        results = await asyncio.gather(*(client.execute(f"print({i})") for i in range(4)))
        assert [r.stdout for r in results] == [f"{i}\n" for i in range(4)], results
        async with await client.execute_stream("print(1)") as stream:
            assert (await stream.until_done()).stdout == "1\n"


asyncio.run(asynchronous())
urllib.request.urlopen(urllib.request.Request(f"{url}/v1/threads/public-client", headers={"Authorization": f"Bearer {key}"}, method="DELETE"))
print("ok")
