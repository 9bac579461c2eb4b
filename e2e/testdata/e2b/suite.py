"""The tests of E2B's Python SDK, tests/sync of e2b-dev/E2B, as a table of short cases of our own, with their names.

cases.py describes the form. Names in js/ are of tests of the TypeScript SDK that have no Python twin. Tests that reach no
server are not here.
"""

import datetime
import io
import os
import time
import urllib.parse
import uuid
from importlib.metadata import version

import httpx
from e2b import (CommandExitException, FileType, InvalidArgumentException, NotFoundException, PtySize, Sandbox,
                 SandboxException, SandboxQuery, SandboxState, TimeoutException)

from cases import alone, check, differs, main, passes, until

CLIENT = tuple(int(part) for part in version("e2b").split(".")[:2])
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def raises(kind, call, *args, **options):
    try:
        got = call(*args, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"got {got!r}, want {kind.__name__}")


def listed(box, **query):
    page = Sandbox.list(query=SandboxQuery(metadata={"case": box.case}, **query))
    return [found.sandbox_id for found in page.next_items()]


def fetch(box, port, path="/", headers=None, method="GET", **options):
    """Requests a page of a port of the sandbox, as with its wildcard domain: the server is the one under test."""
    headers = {"Host": box.get_host(port), **(headers or {})}
    return httpx.request(method, os.environ["E2B_SANDBOX_URL"] + path, headers=headers, timeout=30, **options)


def fetch_signed(box, url, method="GET", **options):
    parts = urllib.parse.urlsplit(url)
    return fetch(box, 49983, f"{parts.path}?{parts.query}", method=method, **options)


def serve(box, port):
    """Starts a web server in the sandbox, and returns its process when it answers."""
    command = box.commands.run(f"python3 -m http.server {port}", background=True, timeout=0)
    token = {"E2B-Traffic-Access-Token": box.traffic_access_token}
    until(lambda: fetch(box, port, headers=token).status_code == 200)
    return command


# Commands


@passes("commands/test_run.py::test_run")
def _(box):
    got = box.commands.run('echo "one, two!"')
    check((got.exit_code, got.stdout, got.stderr), (0, "one, two!\n", ""))
    check(len(box.commands.run("head -c 20000000 /dev/zero | tr '\\0' a").stdout), 20_000_000)


@passes("commands/test_run.py::test_run_with_special_characters")
def _(box):
    check(box.commands.run("echo '!@#$%^&*()_+ é 漢 🙂'").stdout, "!@#$%^&*()_+ é 漢 🙂\n")


@passes("commands/test_run.py::test_run_with_broken_utf8")
def _(box):
    check(box.commands.run("head -c 8191 /dev/zero | tr '\\0' b; printf '\\xe2'").stdout, "b" * 8191 + "\ufffd")


@passes("commands/test_run.py::test_run_with_multiline_string")
def _(box):
    check(box.commands.run('echo "one\ntwo"').stdout, "one\ntwo\n")


@passes("commands/test_run.py::test_run_with_timeout")
def _(box):
    check(box.commands.run("true", timeout=20).exit_code, 0)


@passes("commands/test_run.py::test_run_with_too_short_timeout")
def _(box):
    raises(TimeoutException, box.commands.run, "sleep 60", timeout=1)


@passes("commands/test_run.py::test_run_with_too_short_timeout_iterating")
def _(box):
    raises(TimeoutException, list, box.commands.run("sleep 60", timeout=1, background=True))


@passes("commands/test_cmd_connect.py::test_connect_to_process")
def _(box):
    command = box.commands.run("read line; echo $line", background=True, stdin=True)
    again = box.commands.connect(command.pid)
    box.commands.send_stdin(command.pid, "here\n")
    check((again.pid, again.wait().stdout), (command.pid, "here\n"))


@passes("commands/test_cmd_connect.py::test_connect_to_non_existing_process")
def _(box):
    raises(NotFoundException, box.commands.connect, 999999)


@passes("commands/test_cmd_kill.py::test_kill_process")
def _(box):
    command = box.commands.run("sleep 600", background=True)
    check(box.commands.kill(command.pid), True)
    raises(CommandExitException, box.commands.run, f"kill -0 {command.pid}")
    raises(CommandExitException, command.wait)


@passes("commands/test_cmd_kill.py::test_kill_non_existing_process")
def _(box):
    check(box.commands.kill(999999), False)


@passes("commands/test_cmd_list.py::test_kill_process")
def _(box):
    started = {box.commands.run("sleep 600", background=True, cwd="/tmp").pid for _ in range(2)}
    found = [p for p in box.commands.list() if p.pid in started]
    check([(p.cmd, p.args, p.cwd) for p in found], [("/bin/bash", ["-l", "-c", "sleep 600"], "/tmp")] * 2)
    for pid in started:
        box.commands.kill(pid)


@passes("commands/test_env_vars.py::test_command_envs")
def _(box):
    check(box.commands.run("echo $ONE", envs={"ONE": "a b"}).stdout, "a b\n")


@passes("commands/test_env_vars.py::test_sandbox_envs", own={"envs": {"ONE": "a"}})
def _(box):
    check(box.commands.run("echo $ONE").stdout, "a\n")
    check(box.commands.run("echo $ONE", envs={"ONE": "b"}).stdout, "b\n")


@differs("commands/test_env_vars.py::test_bash_command_scoped_env_vars",
         why="the test's second command uses sudo; run commands with user=\"root\"",
         signal="CommandExitException: Command exited with code")
def _(box):
    check(box.commands.run("echo $SCOPED", envs={"SCOPED": "a"}).stdout, "a\n")
    check(box.commands.run("echo $SCOPED", user="root").stdout, "\n")
    box.commands.run('sudo echo "$SCOPED"')


@passes("commands/test_env_vars.py::test_python_command_scoped_env_vars")
def _(box):
    check(box.commands.run("python3 -c 'import os; print(os.environ[\"ONE\"])'", envs={"ONE": "a"}).stdout, "a\n")


@passes("commands/test_sandbox_killed_during_run.py::test_kill_sandbox_while_command_is_running", own={})
def _(box):
    command = box.commands.run("trap 'echo ending; exit 0' TERM; sleep 600 & wait", background=True, timeout=0)
    box.kill()
    raises(TimeoutException, command.wait)


def echoes(box, sent, want=None):
    command = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(command.pid, sent)
    check(next(iter(command))[0], want or sent)
    command.kill()


@passes("commands/test_send_stdin.py::test_send_stdin_to_process")
def _(box):
    echoes(box, "one, two!")


@passes("commands/test_send_stdin.py::test_send_bytes_stdin_to_process")
def _(box):
    echoes(box, b"one", "one")


@passes("commands/test_send_stdin.py::test_send_stdin_via_command_handle")
def _(box):
    command = box.commands.run("cat", background=True, stdin=True)
    command.send_stdin("one")
    check(next(iter(command))[0], "one")
    command.kill()


@passes("commands/test_send_stdin.py::test_close_stdin_via_command_handle")
def _(box):
    command = box.commands.run("cat", background=True, stdin=True)
    command.send_stdin("one")
    command.close_stdin()
    check((command.wait().exit_code, command.wait().stdout), (0, "one"))


@passes("commands/test_send_stdin.py::test_send_special_characters_to_process")
def _(box):
    echoes(box, "!@#$%^&*()_+ é 漢 🙂")


@passes("commands/test_send_stdin.py::test_send_multiline_string_to_process")
def _(box):
    echoes(box, "one\ntwo")


@passes("js/commands/sendStdin.test.ts: send empty stdin to process")
def _(box):
    command = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(command.pid, "")
    box.commands.send_stdin(command.pid, "x")
    check(next(iter(command))[0], "x")
    command.kill()


# Files


@passes("files/test_content_encoding.py::test_write_and_read_with_gzip")
def _(box):
    check(box.files.write("gzip/a", "a" * 9999, gzip=True).path, "/home/user/gzip/a")
    check(box.files.read("gzip/a", gzip=True), "a" * 9999)


@passes("files/test_content_encoding.py::test_write_gzip_read_plain")
def _(box):
    box.files.write("gzip/b", "text", gzip=True)
    check(box.files.read("gzip/b"), "text")


@passes("files/test_content_encoding.py::test_write_files_with_gzip")
def _(box):
    entries = [{"path": f"gzip/many{i}", "data": f"content {i}"} for i in range(3)]
    check(len(box.files.write_files(entries, gzip=True)), 3)
    check([box.files.read(e["path"]) for e in entries], [e["data"] for e in entries])


@passes("files/test_content_encoding.py::test_read_bytes_with_gzip")
def _(box):
    box.files.write("gzip/c", b"\x00\xffabc")
    check(box.files.read("gzip/c", format="bytes", gzip=True), bytearray(b"\x00\xffabc"))


@passes("files/test_exists.py::test_exists")
def _(box):
    box.files.write("exists", "")
    check(box.files.exists("exists"), True)


@passes("js/files/exists.test.ts: file does not exist")
def _(box):
    check((box.files.exists("missing"), box.files.exists("missing/deeper")), (False, False))


@passes("files/test_files_list.py::test_list_directory")
def _(box):
    for path in ("list/b/c/d", "list/a/e"):
        box.files.make_dir(path)
    box.files.write("list/f", "1")
    flat = ["/home/user/list/" + name for name in ("a", "b", "f")]
    two = ["/home/user/list/" + name for name in ("a", "a/e", "b", "b/c", "f")]
    three = ["/home/user/list/" + name for name in ("a", "a/e", "b", "b/c", "b/c/d", "f")]
    for depth, want in ((None, flat), (1, flat), (2, two), (3, three), (9, three)):
        check([entry.path for entry in box.files.list("list", depth=depth)], want)
    check([entry.type for entry in box.files.list("list")], [FileType.DIR, FileType.DIR, FileType.FILE])
    check([entry.path for entry in box.files.list("/home/user/list/")], flat)


@passes("files/test_files_list.py::test_list_directory_error_cases")
def _(box):
    assert "depth should be at least 1" in raises(InvalidArgumentException, box.files.list, "/", depth=-1)


def details(entry):
    assert entry.modified_time.tzinfo is not None
    assert abs(entry.modified_time.timestamp() - time.time()) < 3600
    return (entry.name, entry.path, entry.type, entry.mode, entry.permissions, entry.owner, entry.group,
            entry.symlink_target)


def file_details(path):
    return (os.path.basename(path), "/home/user/" + path, FileType.FILE, 0o644, "-rw-r--r--", "user", "user", None)


def directory_details(path):
    return (os.path.basename(path), "/home/user/" + path, FileType.DIR, 0o755, "drwxr-xr-x", "user", "user", None)


@passes("files/test_files_list.py::test_file_entry_details")
def _(box):
    box.files.write("entry/file.txt", "12345")
    entry, = box.files.list("entry", depth=1)
    check((details(entry), entry.size), (file_details("entry/file.txt"), 5))


@passes("files/test_files_list.py::test_directory_entry_details")
def _(box):
    box.files.make_dir("entries/inner")
    check([details(entry) for entry in box.files.list("entries")], [directory_details("entries/inner")])


@passes("files/test_files_list.py::test_mixed_entries")
def _(box):
    box.files.make_dir("mixed/a")
    box.files.write("mixed/b", "")
    want = [directory_details("mixed/a"), file_details("mixed/b")]
    check([details(entry) for entry in box.files.list("mixed")], want)


@passes("files/test_info.py::test_get_info_of_file")
def _(box):
    box.files.write("info/file", "1234")
    check(details(box.files.get_info("info/file")), file_details("info/file"))
    box.commands.run("chmod 750 info/file")
    check((box.files.get_info("info/file").mode, box.files.get_info("info/file").permissions), (0o750, "-rwxr-x---"))
    box.files.write("/tmp/of-root", "", user="root")
    check(box.files.get_info("/tmp/of-root").owner, "root")


@passes("files/test_info.py::test_get_info_of_nonexistent_file")
def _(box):
    raises(NotFoundException, box.files.get_info, "missing")


@passes("files/test_info.py::test_get_info_of_directory")
def _(box):
    box.files.make_dir("info/dir")
    got = box.files.get_info("info/dir")
    check(details(got), directory_details("info/dir"))
    assert got.size > 0


@passes("files/test_info.py::test_get_info_of_nonexistent_directory")
def _(box):
    raises(NotFoundException, box.files.get_info, "missing/directory")


@passes("files/test_info.py::test_file_symlink")
def _(box):
    box.files.write("links/target", "1")
    box.commands.run("ln -s target links/link; ln -s nothing links/dangling")
    got = box.files.get_info("links/link")
    link = FileType.SYMLINK if CLIENT >= (2, 63) else FileType.FILE  # older clients have the type of the target
    check((got.type, got.symlink_target), (link, "/home/user/links/target"))
    check(box.files.read("links/link"), "1")
    check(box.files.get_info("links/dangling").symlink_target, "/home/user/links/nothing")


@passes("files/test_make_dir.py::test_make_directory")
def _(box):
    check((box.files.make_dir("made"), box.files.exists("made")), (True, True))


@passes("files/test_make_dir.py::test_make_directory_already_exists")
def _(box):
    check((box.files.make_dir("twice"), box.files.make_dir("twice")), (True, False))


@passes("files/test_make_dir.py::test_make_nested_directory")
def _(box):
    check((box.files.make_dir("nested/a/b"), box.files.exists("nested/a/b")), (True, True))


AUTHOR = {"author": "me", "purpose": "a test"}


@passes("files/test_metadata.py::test_write_file_with_metadata")
def _(box):
    check(box.files.write("meta/a", "1", metadata=AUTHOR).metadata, AUTHOR)
    check(box.files.get_info("meta/a").metadata, AUTHOR)


@passes("files/test_metadata.py::test_write_file_with_metadata_octet_stream")
def _(box):
    check(box.files.write("meta/b", "1", metadata=AUTHOR, use_octet_stream=True).metadata, AUTHOR)
    check(box.files.get_info("meta/b").metadata, AUTHOR)


@passes("files/test_metadata.py::test_write_file_without_metadata")
def _(box):
    check((box.files.write("meta/c", "1").metadata, box.files.get_info("meta/c").metadata), (None, None))


@passes("files/test_metadata.py::test_write_files_applies_metadata_to_every_file")
def _(box):
    entries = [{"path": f"meta/many{i}", "data": "1"} for i in range(2)]
    check([info.metadata for info in box.files.write_files(entries, metadata=AUTHOR)], [AUTHOR, AUTHOR])
    check([box.files.get_info(e["path"]).metadata for e in entries], [AUTHOR, AUTHOR])


@passes("files/test_metadata.py::test_metadata_surfaced_when_listing")
def _(box):
    box.files.write("meta/list/a", "1", metadata=AUTHOR)
    check([entry.metadata for entry in box.files.list("meta/list")], [AUTHOR])


@passes("files/test_metadata.py::test_metadata_surfaced_after_rename")
def _(box):
    box.files.write("meta/old", "1", metadata=AUTHOR)
    check(box.files.rename("meta/old", "meta/new").metadata, AUTHOR)


@passes("files/test_metadata.py::test_overwriting_clears_stale_metadata")
def _(box):
    box.files.write("meta/d", "1", metadata=AUTHOR)
    check((box.files.write("meta/d", "2").metadata, box.files.get_info("meta/d").metadata), (None, None))


@passes("files/test_metadata.py::test_metadata_set_via_xattrs_surfaced_in_get_info")
def _(box):
    box.files.write("meta/e", "1")
    box.commands.run("python3 -c \"import os; os.setxattr('meta/e', 'user.e2b.author', b'me')\"")
    check(box.files.get_info("meta/e").metadata, {"author": "me"})


@passes("files/test_metadata.py::test_write_rejects_invalid_metadata")
def _(box):
    for bad in ({"a b": "c"}, {"": "c"}, {"a": "b\nc"}, {"a": "b\n"}, {"a\n": "b"}):
        raises(InvalidArgumentException, box.files.write, "meta/bad", "1", metadata=bad)
    check(box.files.exists("meta/bad"), False)


@passes("files/test_read.py::test_read_file")
def _(box):
    box.files.write("read/a b é 漢 '\"\\$*", "é 漢 🙂")
    check(box.files.read("read/a b é 漢 '\"\\$*"), "é 漢 🙂")


@passes("files/test_read.py::test_read_non_existing_file")
def _(box):
    raises(NotFoundException, box.files.read, "missing")


@passes("files/test_read.py::test_read_non_existing_file_catches_with_deprecated_not_found_exception")
def _(box):
    raises(NotFoundException, box.files.read, "/missing/absolute")


@passes("files/test_read.py::test_read_empty_file")
def _(box):
    box.commands.run("touch empty")
    check((box.files.read("empty"), box.files.read("empty", format="bytes")), ("", bytearray()))
    check(b"".join(box.files.read("empty", format="stream")), b"")


LONG = "0123456789 and more. " * 100_000


@passes("files/test_read.py::test_read_file_as_stream")
def _(box):
    box.files.write("read/long1", LONG)
    check(b"".join(box.files.read("read/long1", format="stream")) == LONG.encode(), True)


@passes("files/test_read.py::test_read_file_as_stream_with_gzip")
def _(box):
    box.files.write("read/long2", LONG)
    check(b"".join(box.files.read("read/long2", format="stream", gzip=True)) == LONG.encode(), True)


@passes("files/test_read.py::test_read_non_existing_file_as_stream")
def _(box):
    raises(NotFoundException, lambda: list(box.files.read("missing", format="stream")))


@passes("files/test_read.py::test_read_file_as_stream_context_manager")
def _(box):
    box.files.write("read/long3", LONG)
    with box.files.read("read/long3", format="stream") as stream:
        check(b"".join(stream) == LONG.encode(), True)


@passes("files/test_read.py::test_read_file_as_stream_partial_then_close")
def _(box):
    box.files.write("read/long4", LONG)
    stream = box.files.read("read/long4", format="stream")
    assert len(next(iter(stream))) > 0
    stream.close()


@passes("files/test_remove.py::test_remove_file")
def _(box):
    box.files.write("removed/a/b", "1")
    box.files.remove("removed/a/b")
    check((box.files.exists("removed/a/b"), box.files.exists("removed/a")), (False, True))
    box.files.remove("removed")
    check(box.files.exists("removed"), False)


@passes("files/test_remove.py::test_remove_non_existing_file")
def _(box):
    box.files.remove("missing")


@passes("files/test_rename.py::test_rename_file")
def _(box):
    box.files.write("rename/old", "1")
    check(box.files.rename("rename/old", "renamed/deeper/new").path, "/home/user/renamed/deeper/new")
    check((box.files.exists("rename/old"), box.files.read("renamed/deeper/new")), (False, "1"))


@passes("files/test_rename.py::test_rename_non_existing_file")
def _(box):
    raises(NotFoundException, box.files.rename, "missing", "other")


@passes("files/test_secured.py::test_download_url_with_signing")
def _(box):
    box.files.write("signed/a b", "content")
    got = fetch_signed(box, box.download_url("signed/a b", "user"))
    check((got.status_code, got.text), (200, "content"))


@passes("files/test_secured.py::test_download_url_with_signing_and_expiration")
def _(box):
    box.files.write("signed/b", "content")
    got = fetch_signed(box, box.download_url("signed/b", "user", 120))
    check((got.status_code, got.text), (200, "content"))


@passes("files/test_secured.py::test_download_url_with_expired_signing")
def _(box):
    box.files.write("signed/c", "content")
    got = fetch_signed(box, box.download_url("signed/c", "user", use_signature_expiration=-120))
    check((got.status_code, got.json()), (401, {"code": 401, "message": "signature is already expired"}))


@passes("js/files/signing.test.ts: test access file with valid signing as root")
def _(box):
    box.files.write("/tmp/signed", "content", user="root")
    got = fetch_signed(box, box.download_url("/tmp/signed", "root", 120))
    check((got.status_code, got.text), (200, "content"))


@passes("js/files/signing.test.ts: test upload file with valid signing")
def _(box):
    got = fetch_signed(box, box.upload_url("signed/up", "user", 120), "POST", files={"file": ("up", "content")})
    check((got.status_code, box.files.read("signed/up")), (200, "content"))


@passes("js/files/signing.test.ts: test upload file with valid signing as root user")
def _(box):
    got = fetch_signed(box, box.upload_url("/tmp/up", "root", 120), "POST", files={"file": ("up", "content")})
    check((got.status_code, box.files.get_info("/tmp/up", user="root").owner), (200, "root"))


@passes("js/files/signing.test.ts: test upload file with invalid signing")
def _(box):
    got = fetch_signed(box, box.upload_url("signed/no", "user", -120), "POST", files={"file": ("no", "content")})
    check((got.status_code, got.json()), (401, {"code": 401, "message": "signature is already expired"}))
    check(box.files.exists("signed/no"), False)


@passes("js/files/signing.test.ts: test command run with secured sbx")
def _(box):
    check(box.commands.run("echo 1").stdout, "1\n")
    check(fetch(box, 49983, "/files?path=/etc/passwd").status_code, 401)


NO_WATCH = {"why": "directories cannot be watched",
            "signal": "SandboxException: Code.UNIMPLEMENTED: this sandbox cannot watch directories: list them instead"}


@differs("files/test_watch.py::test_watch_directory_changes_with_entry_info", **NO_WATCH)
def _(box):
    box.files.make_dir("watched")
    box.files.watch_dir("watched", include_entry=True)


@differs("files/test_watch.py::test_watch_directory_changes_with_network_mounts_allowed", **NO_WATCH)
def _(box):
    box.files.make_dir("watched")
    box.files.watch_dir("watched", allow_network_mounts=True)


@differs("files/test_watch.py::test_watch_directory_changes", **NO_WATCH)
def _(box):
    box.files.make_dir("watched")
    box.files.watch_dir("watched")


@differs("files/test_watch.py::test_watch_iterated", **NO_WATCH)
def _(box):
    box.files.make_dir("watched")
    box.files.watch_dir("watched").get_new_events()


@differs("files/test_watch.py::test_watch_recursive_directory_changes", **NO_WATCH)
def _(box):
    box.files.make_dir("watched/deeper")
    box.files.watch_dir("watched", recursive=True)


@differs("files/test_watch.py::test_watch_recursive_directory_after_nested_folder_addition", **NO_WATCH)
def _(box):
    box.files.make_dir("watched")
    box.files.watch_dir("watched", recursive=True)


@differs("files/test_watch.py::test_watch_non_existing_directory", **NO_WATCH)
def _(box):
    box.files.watch_dir("missing")


@differs("files/test_watch.py::test_watch_file", **NO_WATCH)
def _(box):
    box.files.write("watched-file", "1")
    box.files.watch_dir("watched-file")


@differs("files/test_watch.py::test_watch_file_with_secured_envd", **NO_WATCH)
def _(box):
    box.files.watch_dir("/home/user/")


@passes("files/test_write.py::test_write_text_file")
def _(box):
    info = box.files.write("write/text", "é 漢 🙂")
    check((info.name, info.path, info.type), ("text", "/home/user/write/text", FileType.FILE))
    check(box.files.read("write/text"), "é 漢 🙂")
    check(box.files.write("/tmp/absolute", "1").path, "/tmp/absolute")
    check(box.files.write("~/in-home", "1").path, "/home/user/in-home")


@passes("files/test_write.py::test_write_binary_file")
def _(box):
    box.files.write("write/binary", io.BytesIO(bytes(range(256))))
    check(box.files.read("write/binary", format="bytes"), bytearray(range(256)))


@passes("files/test_write.py::test_write_multiple_files")
def _(box):
    check(box.files.write_files([]), [])
    for count in (1, 10):
        entries = [{"path": f"many{count}/{i}", "data": f"content {i}"} for i in range(count)]
        check([info.path for info in box.files.write_files(entries)], ["/home/user/" + e["path"] for e in entries])
        check([box.files.read(e["path"]) for e in entries], [e["data"] for e in entries])


@passes("files/test_write.py::test_overwrite_file")
def _(box):
    box.files.write("write/over", "a longer content")
    box.files.write("write/over", "short")
    check(box.files.read("write/over"), "short")


@passes("files/test_write.py::test_write_to_non_existing_directory")
def _(box):
    box.files.write("write/new/dirs/a", "1")
    check((box.files.read("write/new/dirs/a"), box.files.get_info("write/new").owner), ("1", "user"))


@passes("files/test_write.py::test_write_with_secured_envd", own={"secure": True})
def _(box):
    box.files.write("new/file", "1")
    check((box.is_running(), box.files.exists("new/file"), box.files.read("new/file")), (True, True, "1"))


@passes("files/test_write.py::test_write_files_with_different_data_types")
def _(box):
    data = {"str": "a", "bytes": b"b", "bytesio": io.BytesIO(b"c"), "stringio": io.StringIO("d")}
    check(len(box.files.write_files([{"path": "types/" + name, "data": data[name]} for name in data])), 4)
    check([box.files.read("types/" + name) for name in data], ["a", "b", "c", "d"])


@passes("files/test_write.py::test_write_io_with_octet_stream")
def _(box):
    check(box.files.write("octet/a", io.BytesIO(LONG.encode()), use_octet_stream=True).path, "/home/user/octet/a")
    check(box.files.read("octet/a") == LONG, True)


@passes("files/test_write.py::test_write_text_io_with_octet_stream")
def _(box):
    box.files.write("octet/b", io.StringIO("é"), use_octet_stream=True)
    check(box.files.read("octet/b"), "é")


@passes("files/test_write.py::test_write_io_with_octet_stream_and_gzip")
def _(box):
    box.files.write("octet/c", io.BytesIO(LONG.encode()), use_octet_stream=True, gzip=True)
    check(box.files.read("octet/c") == LONG, True)


# Terminals


def ends(terminal):
    """Returns what a terminal showed until its shell ended, and checks that it did so by itself."""
    seen = []
    check(terminal.wait(on_pty=seen.append).exit_code, 0)
    return b"".join(seen).decode()


@passes("pty/test_pty.py::test_pty")
def _(box):
    terminal = box.pty.create(PtySize(cols=80, rows=24), envs={"ONE": "a"}, cwd="/tmp")
    box.pty.send_stdin(terminal.pid, b"echo in $ONE $PWD $TERM\nexit\n")
    assert "in a /tmp xterm-256color" in ends(terminal)


@passes("pty/test_pty_connect.py::test_connect_to_pty")
def _(box):
    terminal = box.pty.create(PtySize(cols=80, rows=24), envs={"ONE": "a"})
    terminal.disconnect()
    again = box.pty.connect(terminal.pid)
    box.pty.send_stdin(terminal.pid, b"echo in $ONE\nexit\n")
    check(again.pid, terminal.pid)
    assert "in a" in ends(again)


@passes("pty/test_pty_kill.py::test_kill_pty")
def _(box):
    terminal = box.pty.create(PtySize(cols=80, rows=24))
    check(box.pty.kill(terminal.pid), True)
    raises(CommandExitException, box.commands.run, f"kill -0 {terminal.pid}")


@passes("pty/test_pty_kill.py::test_kill_non_existing_pty")
def _(box):
    check(box.pty.kill(999999), False)


@passes("pty/test_resize.py::test_resize")
def _(box):
    for resize, want in ((False, "24 80"), (True, "30 100")):
        terminal = box.pty.create(PtySize(cols=80, rows=24))
        if resize:
            box.pty.resize(terminal.pid, PtySize(cols=100, rows=30))
        box.pty.send_stdin(terminal.pid, b"stty size\nexit\n")
        assert want in ends(terminal)


@passes("pty/test_send_input.py::test_send_input")
def _(box):
    terminal = box.pty.create(PtySize(cols=80, rows=24))
    box.pty.send_stdin(terminal.pid, b"exit\n")
    ends(terminal)


# The API


@passes("api/test_sbx_info.py::test_get_info")
def _(box):
    got = Sandbox.get_info(box.sandbox_id)
    check((got.sandbox_id, got.state, got.metadata), (box.sandbox_id, SandboxState.RUNNING, {"case": box.case}))


@passes("api/test_sbx_kill.py::test_kill_existing_sandbox", own={})
def _(box):
    check((Sandbox.kill(box.sandbox_id), listed(box, state=[SandboxState.RUNNING])), (True, []))


@passes("api/test_sbx_kill.py::test_kill_non_existing_sandbox")
def _(box):
    check(Sandbox.kill("nonexistingsandbox"), False)


@passes("api/test_sbx_list.py::test_list_sandboxes", own={})
@passes("api/test_sbx_list.py::test_list_sandboxes_with_filter", own={})
def _(box):
    check(listed(box), [box.sandbox_id])


@passes("api/test_sbx_list.py::test_list_running_sandboxes", own={})
def _(box):
    check((listed(box, state=[SandboxState.RUNNING]), listed(box, state=[SandboxState.PAUSED])), ([box.sandbox_id], []))


@passes("api/test_sbx_list.py::test_list_paused_sandboxes", own={})
def _(box):
    box.beta_pause()
    check((listed(box, state=[SandboxState.RUNNING]), listed(box, state=[SandboxState.PAUSED])), ([], [box.sandbox_id]))


def paginates(box, pause_first, pause_second, states):
    """Lists two sandboxes in pages of one: the newer comes first."""
    other = create(box.case)
    box.beta_pause() if pause_first else None
    other.beta_pause() if pause_second else None
    pages = Sandbox.list(query=SandboxQuery(metadata={"case": box.case}, state=states), limit=1)
    first = pages.next_items()
    check(([s.sandbox_id for s in first], pages.has_next, pages.next_token is None), ([other.sandbox_id], True, False))
    second = pages.next_items()
    check(([s.sandbox_id for s in second], pages.has_next, pages.next_token), ([box.sandbox_id], False, None))
    other.kill()


@passes("api/test_sbx_list.py::test_paginate_running_sandboxes", own={})
def _(box):
    paginates(box, False, False, [SandboxState.RUNNING])


@passes("api/test_sbx_list.py::test_paginate_paused_sandboxes", own={})
def _(box):
    paginates(box, True, True, [SandboxState.PAUSED])


@passes("api/test_sbx_list.py::test_paginate_running_and_paused_sandboxes", own={})
def _(box):
    paginates(box, False, True, [SandboxState.RUNNING, SandboxState.PAUSED])


@passes("api/test_sbx_list.py::test_list_sandboxes_with_order", own={})
def _(box):
    other = create(box.case)
    for order, want in (("asc", [box, other]), ("desc", [other, box])):
        found = Sandbox.list(query=SandboxQuery(metadata={"case": box.case}), order=order).next_items()
        check([s.sandbox_id for s in found], [s.sandbox_id for s in want])
    other.kill()


@passes("api/test_sbx_list.py::test_list_sandboxes_started_after", own={})
def _(box):
    began = box.get_info().started_at
    check(listed(box, started_after=began), [box.sandbox_id])
    check(listed(box, started_after=began + datetime.timedelta(seconds=1)), [])


@passes("api/test_sbx_list.py::test_list_sandboxes_with_template_filter", own={})
def _(box):
    check(listed(box, template=box.get_info().template_id), [box.sandbox_id])
    check(listed(box, template="unknown-template"), [])


@passes("api/test_sbx_list.py::test_paginate_iterator", own={})
def _(box):
    pages, found = Sandbox.list(query=SandboxQuery(metadata={"case": box.case})), []
    while pages.has_next:
        found += pages.next_items()
    check([s.sandbox_id for s in found], [box.sandbox_id])


@passes("api/test_sbx_snapshot.py::test_pause_sandbox", own={})
def _(box):
    Sandbox.pause(box.sandbox_id)
    check(box.is_running(), False)


@passes("api/test_sbx_snapshot.py::test_resume_sandbox", own={})
def _(box):
    Sandbox.pause(box.sandbox_id)
    check(box.is_running(), False)
    Sandbox.connect(box.sandbox_id)
    check(box.is_running(), True)


# Sandboxes


@passes("sandbox/test_connect.py::test_connect")
def _(box):
    check((box.is_running(), Sandbox.connect(box.sandbox_id).is_running()), (True, True))


@passes("sandbox/test_connect.py::test_connect_with_secure", own={"secure": True})
def _(box):
    again = Sandbox.connect(box.sandbox_id)
    again.files.make_dir("dir")
    check(again.files.list("dir"), [])


@passes("sandbox/test_connect.py::test_connect_to_paused_sandbox_resumes", own={})
def _(box):
    box.beta_pause()
    check((box.is_running(), Sandbox.connect(box.sandbox_id).is_running()), (False, True))


@passes("js/sandbox/connect.test.ts: connect to non-running sandbox", own={})
def _(box):
    box.kill()
    assert "not found" in raises(SandboxException, Sandbox.connect, box.sandbox_id)


@passes("sandbox/test_connect.py::test_resume_does_not_shorten_timeout_on_running_sandbox", own={"timeout": 300})
def _(box):
    before = box.get_info().end_at
    Sandbox.connect(box.sandbox_id, timeout=10)
    check(box.get_info().end_at, before)


@passes("sandbox/test_connect.py::test_connect_extends_timeout_on_running_sandbox", own={"timeout": 300})
def _(box):
    before = box.get_info().end_at
    Sandbox.connect(box.sandbox_id, timeout=600)
    assert box.get_info().end_at > before


@passes("sandbox/test_create.py::test_start")
def _(box):
    check(box.is_running(), True)
    assert box.get_info().envd_version


@passes("sandbox/test_create.py::test_metadata", own={})
def _(box):
    found = Sandbox.list(query=SandboxQuery(metadata={"case": box.case})).next_items()
    check([(s.sandbox_id, s.metadata) for s in found], [(box.sandbox_id, {"case": box.case})])


@differs("sandbox/test_create.py::test_mcp_gateway_start_failure_kills_created_sandbox",
         why="there is no MCP gateway", signal="SandboxException: 404: template \"mcp-gateway\" was not found")
def _(box):
    Sandbox.create(mcp={"invalid_server": {}})


@passes("sandbox/test_create.py::test_filesystem_only_auto_pause_rejects_auto_resume")
def _(box):
    raises(InvalidArgumentException, Sandbox.create,
           lifecycle={"on_timeout": {"action": "pause", "keep_memory": False}, "auto_resume": True})


@passes("sandbox/test_create.py::test_keep_memory_not_allowed_with_kill")
def _(box):
    raises(InvalidArgumentException, Sandbox.create, lifecycle={"on_timeout": {"action": "kill", "keep_memory": False}})


@passes("sandbox/test_create.py::test_invalid_on_timeout_type_does_not_crash", own={"lifecycle": {"on_timeout": None}},)
def _(box):
    check(box.is_running(), True)


def times_out(box):
    box.set_timeout(0)
    until(lambda: not box.is_running())


REBOOTED = "the process is gone, the file is kept, the boot id has changed"


def reboots(box, pause):
    """Pauses a sandbox and resumes it. Returns what has stayed."""
    box.files.write("kept", "1")
    before, process = box.files.read(BOOT_ID), box.commands.run("sleep 600", background=True, timeout=0)
    pause()
    check(box.is_running(), False)
    box.connect()
    check((box.files.read("kept"), box.files.read(BOOT_ID) != before), ("1", True))
    raises(NotFoundException, box.commands.connect, process.pid)
    return REBOOTED


@passes("sandbox/test_create.py::test_auto_pause_filesystem_only_reboots",
        own={"lifecycle": {"on_timeout": {"action": "pause", "keep_memory": False}}})
def _(box):
    reboots(box, lambda: times_out(box))


@differs("sandbox/test_create.py::test_keep_memory_none_defaults_to_full_memory", why="a pause keeps files only",
         signal=REBOOTED if CLIENT >= (2, 51) else
         "SandboxException: 400: autoPauseMemory must not be true (snapshot_memory_unsupported)")
def _(_):
    def case(box):
        return reboots(box, lambda: times_out(box))
    return alone(case, create(uuid.uuid4().hex, lifecycle={"on_timeout": {"action": "pause", "keep_memory": None}}))


@passes("sandbox/test_create.py::test_auto_pause_without_auto_resume_requires_connect",
        own={"lifecycle": {"on_timeout": "pause", "auto_resume": False}})
def _(box):
    times_out(box)
    until(lambda: box.get_info().state == SandboxState.PAUSED)
    check(box.is_running(), False)
    box.connect()
    check((box.get_info().state, box.is_running()), (SandboxState.RUNNING, True))


@differs("sandbox/test_create.py::test_auto_resume_wakes_on_http_request",
         why="requests do not resume a sandbox",
         signal="SandboxException: 400: autoResume.enabled must be false: requests do not wake a paused sandbox")
def _(box):
    Sandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True})


NO_FORK = {"why": "a sandbox cannot be copied",
           "signal": "SandboxException: 501: forks of sandboxes are not implemented"}


@differs("sandbox/test_fork.py::test_fork", **NO_FORK)
def _(box):
    box.fork()


@differs("sandbox/test_fork.py::test_fork_multiple", **NO_FORK)
def _(box):
    box.fork(count=2, timeout=60)


@differs("sandbox/test_fork.py::test_fork_by_id", **NO_FORK)
def _(box):
    Sandbox.fork(box.sandbox_id)


@differs("sandbox/test_fork.py::test_fork_killed_sandbox", own={}, **NO_FORK)
def _(box):
    box.kill()
    box.fork()


@passes("sandbox/test_fork.py::test_fork_invalid_count")
def _(box):
    raises(InvalidArgumentException, Sandbox.fork, box.sandbox_id, count=0)


@differs("sandbox/test_host.py::test_ping_server", signal="403",
         why="ports need a token, unless the server has --sandbox-ports public")
def _(box):
    command = serve(box, 8001)
    got = fetch(box, 8001)
    command.kill()
    return got.status_code


@passes("js/sandbox/host.test.ts: ping server in non-running sandbox", own={})
def _(box):
    token = {"E2B-Traffic-Access-Token": box.traffic_access_token}
    serve(box, 8002)
    box.kill()
    got = fetch(box, 8002, headers=token)
    check((got.status_code, got.json()),
          (502, {"sandboxId": box.sandbox_id, "message": "The sandbox was not found", "code": 502}))


@differs("sandbox/test_internet_access.py::test_internet_access_disabled",
         why="the profile decides about the network",
         signal="SandboxException: 400: allow_internet_access must not be false: the network is the template's")
def _(box):
    Sandbox.create(allow_internet_access=False)


@differs("sandbox/test_internet_access.py::test_internet_access_enabled", own={"allow_internet_access": True},
         why="bullpen's tests have no internet: the case checks that the sandbox is created", signal="running")
@differs("sandbox/test_internet_access.py::test_internet_access_default",
         why="bullpen's tests have no internet: the case checks that the sandbox is created", signal="running")
def _(box):
    return box.get_info().state.value


@passes("sandbox/test_kill.py::test_kill", own={})
def _(box):
    box.kill()
    check(listed(box, state=[SandboxState.RUNNING]), [])


@passes("sandbox/test_metrics.py::test_sbx_metrics")
def _(box):
    got = until(box.get_metrics)[0]
    assert got.cpu_count > 0 and got.cpu_used_pct >= 0 and got.mem_used > 0 and got.mem_total > got.mem_used, got
    assert got.disk_used >= 0 and got.disk_total > 0, got


@passes("sandbox/test_metrics.py::test_sbx_metrics_time_range", own={})
def _(box):
    now = datetime.datetime.now(datetime.timezone.utc)
    minute = datetime.timedelta(minutes=1)
    check(len(box.get_metrics(start=now - minute, end=now + minute)), 1)
    check(box.get_metrics(start=now - 60 * minute, end=now - 30 * minute), [])


def no_rule(name, field):
    """A rule for the network. Clients before 2.51 ask for public ports with it, which is refused before most rules."""
    own_words = CLIENT >= (2, 51) or field == "allowOut"
    refused = f"{field} is not supported" if own_words else "allowPublicTraffic must not be true"
    return differs(name, why="the profile's network has the rules", signal=f"SandboxException: 400: network.{refused}")


def no_change(name):
    return differs(name, why="the profile's network has the rules",
                   signal="SandboxException: 501: changes of a sandbox's network are not implemented")


@no_rule("sandbox/test_network.py::test_allow_specific_ip_with_deny_all", "allowOut")
@no_rule("sandbox/test_network.py::test_allow_takes_precedence_over_deny", "allowOut")
def _(box):
    Sandbox.create(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["1.1.1.1"]})


@no_rule("sandbox/test_network.py::test_deny_specific_ip", "denyOut")
@no_rule("sandbox/test_network.py::test_deny_all_traffic", "denyOut")
def _(box):
    Sandbox.create(network={"deny_out": ["8.8.8.8"]})


@passes("sandbox/test_network.py::test_allow_public_traffic_false",
        own={"secure": True, "network": {"allow_public_traffic": False}})
def _(box):
    assert box.traffic_access_token
    serve(box, 8080)
    check(fetch(box, 8080).status_code, 403)


@differs("sandbox/test_network.py::test_allow_public_traffic_true",
         why="ports need a token, unless the server has --sandbox-ports public",
         signal="SandboxException: 400: network.allowPublicTraffic must not be true")
def _(box):
    Sandbox.create(network={"allow_public_traffic": True})


@no_rule("sandbox/test_network.py::test_firewall_transform_injects_headers", "rules")
def _(box):
    Sandbox.create(network={"rules": {"example.com": [{"transform": {"headers": {"X-Test": "1"}}}]}})


@no_change("sandbox/test_network.py::test_update_network_applies_restrictions")
def _(box):
    box.update_network({"deny_out": ["8.8.8.8"]})


@no_change("sandbox/test_network.py::test_update_network_clears_existing_rules")
def _(box):
    box.update_network({})


@no_rule("sandbox/test_network.py::test_mask_request_host", "maskRequestHost")
def _(box):
    Sandbox.create(network={"mask_request_host": "custom.example.com:${PORT}"})


@passes("sandbox/test_secure.py::test_start_secured", own={"secure": True})
def _(box):
    check(box.is_running(), True)
    check(fetch(box, 49983, "/files?path=/etc/passwd").status_code, 401)


@passes("sandbox/test_secure.py::test_connect_to_secured", own={"secure": True})
def _(box):
    check(Sandbox.connect(box.sandbox_id).commands.run("echo 1").stdout, "1\n")


@passes("sandbox/test_snapshot.py::test_snapshot", own={})
def _(box):
    box.beta_pause()
    check(box.is_running(), False)
    again = box.connect()
    check((again.is_running(), box.is_running(), again.sandbox_id), (True, True, box.sandbox_id))


@passes("js/sandbox/snapshot.test.ts: pause and resume a sandbox with env vars", own={"envs": {"ONE": "a"}})
def _(box):
    box.beta_pause()
    box.connect()
    check(box.commands.run("echo $ONE").stdout, "a\n")


@passes("js/sandbox/snapshot.test.ts: pause and resume a sandbox with file", own={})
def _(box):
    for count in range(3):
        box.files.write("log", "".join(str(i) for i in range(count + 1)))
        box.beta_pause()
        box.connect()
    check(box.files.read("log"), "012")


@differs("js/sandbox/snapshot.test.ts: pause and resume a sandbox with ongoing long running process", own={},
         why="a pause keeps files only", signal="NotFoundException")
def _(box):
    command = box.commands.run("sleep 600", background=True, timeout=0)
    box.beta_pause()
    box.connect().commands.connect(command.pid)


@passes("js/sandbox/snapshot.test.ts: pause and resume a sandbox with completed long running process", own={})
def _(box):
    box.commands.run("echo done > done")
    box.beta_pause()
    check(box.connect().files.read("done"), "done\n")


@differs("js/sandbox/snapshot.test.ts: pause and resume a sandbox with http server", own={},
         why="a pause keeps files only", signal="502 port is not open")
def _(box):
    token = {"E2B-Traffic-Access-Token": box.traffic_access_token}
    serve(box, 8003)
    box.beta_pause()
    box.connect()
    got = fetch(box, 8003, headers=token)
    return f"{got.status_code} {'port is not open' if 'port is not open' in got.text else got.text}"


NO_SNAPSHOT = {"why": "a sandbox cannot be copied",
               "signal": "SandboxException: 501: snapshots of sandboxes are not implemented"}


@differs("sandbox/test_snapshot_api.py::test_create_snapshot", **NO_SNAPSHOT)
@differs("sandbox/test_snapshot_api.py::test_create_sandbox_from_snapshot", **NO_SNAPSHOT)
@differs("sandbox/test_snapshot_api.py::test_create_multiple_sandboxes_from_snapshot", **NO_SNAPSHOT)
@differs("sandbox/test_snapshot_api.py::test_snapshot_preserves_filesystem", **NO_SNAPSHOT)
def _(box):
    box.create_snapshot()


@differs("sandbox/test_snapshot_api.py::test_create_named_snapshot", **NO_SNAPSHOT)
def _(box):
    box.create_snapshot(name="name")


@differs("sandbox/test_snapshot_api.py::test_create_snapshot_class_method", **NO_SNAPSHOT)
def _(box):
    Sandbox.create_snapshot(box.sandbox_id)


@differs("sandbox/test_snapshot_api.py::test_list_snapshots", **NO_SNAPSHOT)
def _(box):
    Sandbox.list_snapshots().next_items()


@differs("sandbox/test_snapshot_api.py::test_list_snapshots_for_sandbox", **NO_SNAPSHOT)
def _(box):
    Sandbox.list_snapshots(sandbox_id=box.sandbox_id).next_items()


@differs("sandbox/test_snapshot_api.py::test_list_snapshots_filtered_by_name", **NO_SNAPSHOT)
def _(box):
    Sandbox.list_snapshots(name="name").next_items()


@differs("sandbox/test_snapshot_api.py::test_delete_snapshot", why="a sandbox cannot be copied",
         signal="SandboxException: 501: removals of templates and snapshots are not implemented")
def _(box):
    Sandbox.delete_snapshot("name")


@passes("sandbox/test_snapshot_filesystem_only.py::test_pause_filesystem_only", own={})
def _(box):
    reboots(box, lambda: check(box.pause(keep_memory=False), True))


@passes("sandbox/test_timeout.py::test_shorten_timeout", own={})
def _(box):
    box.set_timeout(1)
    until(lambda: not box.is_running())


@passes("sandbox/test_timeout.py::test_shorten_then_lengthen_timeout", own={})
def _(box):
    box.set_timeout(30)
    shorter = box.get_info().end_at
    box.set_timeout(60)
    check((box.get_info().end_at > shorter, box.is_running()), (True, True))


@passes("sandbox/test_timeout.py::test_get_timeout")
def _(box):
    assert box.get_info().end_at > datetime.datetime.now(datetime.timezone.utc)


def create(case, **options):
    """Creates a sandbox whose metadata has the case."""
    box = Sandbox.create(**{"timeout": 300, "metadata": {"case": case}, **options})
    box.case = case
    return box


main("e2b", create)
