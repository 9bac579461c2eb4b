"""A day with E2B's Python client, which is unmodified. The directory has the version under test."""

import os

import httpx
from e2b import CommandExitException, Sandbox, SandboxQuery, SandboxState, TimeoutException


def check(got, want):
    assert got == want, f"got {got!r}, want {want!r}"


def raises(kind, call):
    try:
        got = call()
    except kind as error:
        return str(error)
    raise AssertionError(f"got {got!r}, want {kind}")


run = os.environ["RUN"]
sandbox = Sandbox.create(timeout=120, metadata={"run of": f"{run} & more"}, envs={"UPPER": "1", "lower": "2"})
commands, files = sandbox.commands, sandbox.files

result = commands.run('echo "$UPPER $lower"; pwd; id -un; echo error >&2')
check((result.stdout, result.stderr), ("1 2\n/home/user\nuser\n", "error\n"))
check(commands.run('pwd; echo "$ONE"', cwd="/tmp", envs={"ONE": "x"}).stdout, "/tmp\nx\n")
check(commands.run("id -u", user="root").stdout, "0\n")
raises(CommandExitException, lambda: commands.run("exit 3"))
raises(TimeoutException, lambda: commands.run("sleep 60", timeout=1))
seen = []
check(commands.run("echo a; sleep 0.2; echo b", on_stdout=seen.append).stdout, "a\nb\n")
check("".join(seen), "a\nb\n")

background = commands.run("cat; echo end", background=True, stdin=True)
commands.send_stdin(background.pid, "in\n")
check([p.pid for p in commands.list()], [background.pid])
commands.close_stdin(background.pid)
check(background.wait().stdout, "in\nend\n")
sleeper = commands.run("sleep 600", background=True)
check(commands.kill(sleeper.pid), True)
check(commands.kill(sleeper.pid), False)

files.write("dir/a.txt", "content")
check(files.read("dir/a.txt"), "content")
files.write("bytes", b"\x00\xff")
check(bytes(files.read("bytes", format="bytes")), b"\x00\xff")
entry = files.list("dir")[0]
check((entry.name, entry.path, entry.permissions, entry.owner), ("a.txt", "/home/user/dir/a.txt", "-rw-r--r--", "user"))
files.rename("dir/a.txt", "dir/b.txt")
check((files.exists("dir/a.txt"), files.exists("dir/b.txt")), (False, True))
check((files.make_dir("new"), files.make_dir("new")), (True, False))
files.remove("dir/b.txt")
check(files.exists("dir/b.txt"), False)

check(sandbox.is_running(), True)
query = SandboxQuery(metadata={"run of": f"{run} & more"}, state=[SandboxState.RUNNING])
check([s.sandbox_id for s in Sandbox.list(query=query).next_items()], [sandbox.sandbox_id])
check(Sandbox.list(query=SandboxQuery(metadata={"run of": "none"})).next_items(), [])
before = sandbox.get_info().end_at
sandbox.set_timeout(600)
assert sandbox.get_info().end_at > before
assert sandbox.get_metrics()[0].mem_total > 0
check(Sandbox.connect(sandbox.sandbox_id).files.read("bytes", format="bytes"), b"\x00\xff")

commands.run("python3 -m http.server 8000", background=True, timeout=0)
commands.run("until curl -sf localhost:8000 || python3 -c 'import socket; socket.create_connection((\"localhost\", 8000))'; "
             "do sleep 0.1; done")
url, host = os.environ["E2B_SANDBOX_URL"], sandbox.get_host(8000)
check(httpx.get(url + "/new/", headers={"Host": host}).status_code, 403)
token = {"Host": host, "E2B-Traffic-Access-Token": sandbox.traffic_access_token}
check(httpx.get(url + "/new/", headers=token).status_code, 200)

check((sandbox.pause() is not False, sandbox.pause() is False), (True, True))
check(sandbox.is_running(), False)
raises(TimeoutException, lambda: commands.run("true"))
again = Sandbox.connect(sandbox.sandbox_id, timeout=60)
check(again.commands.run("ls").stdout, "bytes\ndir\nnew\n")
check(commands.run("echo the handle is still good").exit_code, 0)

assert "snapshot_memory_unsupported" in raises(
    Exception, lambda: Sandbox.create(lifecycle={"on_timeout": {"action": "pause", "keep_memory": True}}))
assert "not found" in raises(Exception, lambda: Sandbox.create("unknown"))
assert "allow_internet_access" in raises(Exception, lambda: Sandbox.create(allow_internet_access=False))
check((sandbox.kill(), sandbox.kill()), (True, False))
check(sandbox.is_running(), False)
