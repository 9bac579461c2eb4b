"""The first steps: run it with BULLPEN_URL and BULLPEN_API_KEY in the environment."""

from bullpen import Bullpen, ConflictError

with Bullpen.from_env() as client:
    # A program, and its result.
    result = client.run("print(6 * 7)")
    print(result.stdout, result.trace_id)

    # A program that fails is no error.
    failed = client.run("echo oops >&2; exit 3", language="bash")
    print(failed.exit_code, failed.stderr)

    # Its output while it runs.
    for event in client.stream("for i in 1 2 3; do echo $i; sleep 0.2; done", language="bash"):
        if event.type == "output":
            print(event.data, end="")

    # Later.
    accepted = client.submit("import time; time.sleep(1); print('late')")
    print(client.wait(accepted.trace_id).stdout)

    # One program for many rows.
    squares = client.map("import json, sys; print(json.load(sys.stdin) ** 2)", range(10))
    print([int(r.stdout or 0) for r in squares])

    # A thread keeps its files.
    client.files.write("numbers.csv", "n\n1\n2\n", thread_id="first-steps")
    print(client.run("cat numbers.csv", language="bash", thread_id="first-steps").stdout)
    try:
        client.threads.delete("first-steps")
    except ConflictError as busy:  # another execution uses it
        print(busy)

    # A sandbox that lives on, with commands, files, and an interpreter that keeps its variables.
    with client.sandboxes.create(timeout=600) as sandbox:
        print(sandbox.commands.run("echo hello; uname -s").stdout)
        sandbox.files.write("notes.txt", "remember")
        context = sandbox.contexts.create(language="python")
        context.run("total = 40")
        answer = context.run("total + 2").results[0]
        print(answer.data["text/plain"])
