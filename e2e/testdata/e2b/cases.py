"""A table of short cases that stand for tests of E2B's, with their names.

A case is a function under @passes with the file and the test it stands for. What E2B's suite expects and bullpen does not
do is under @differs, with the reason, and with the signal that a program sees instead, which the case asserts.
"""

import sys
import time
import traceback
import uuid
from importlib.metadata import version

cases = []


def passes(name, *, own=None):
    """A test of E2B's that passes. own is the options of a sandbox for this case alone, or None for its group's."""
    return lambda run: cases.append((name, run, own, None, None)) or run


def differs(name, *, why, signal, own=None):
    """A test of E2B's that cannot pass. Its case raises, or returns, what contains the signal."""
    return lambda run: cases.append((name, run, own, why, signal)) or run


def check(got, want):
    assert got == want, f"got {got!r}, want {want!r}"


def until(condition, seconds=30):
    """Waits until condition() is true, and returns what it returned."""
    end = time.monotonic() + seconds
    while not (got := condition()):
        assert time.monotonic() < end, f"waited for {seconds} s"
        time.sleep(0.1)
    return got


def alone(run, box):
    """Runs a case in a sandbox of its own."""
    try:
        return run(box)
    finally:
        box.kill()


def result(run, signal):
    """Runs a case. Returns what went wrong, or an empty string."""
    try:
        seen = str(run())
    except Exception as error:
        if signal is None:
            return traceback.format_exc()
        seen = f"{type(error).__name__}: {error}"
    return "" if signal is None or signal in seen else f"the signal was {seen!r}, want {signal!r}"


def group_of(name):
    """The group of tests that a test is in: a directory of E2B's suites."""
    return name.removeprefix("js/").split("/")[0]


def table():
    """Returns the table of the documents."""
    groups, reasons = {}, {}
    for name, _, _, why, signal in cases:
        group = groups.setdefault(group_of(name), [0, 0])
        group[signal is not None] += 1
        if signal is not None:
            file, test = name.replace("::", ": ").split(": ", 1)
            reasons.setdefault((why, signal), {}).setdefault(file, []).append(test)
    lines = ["| tests | pass | differ |", "|---|---|---|"]
    lines += [f"| {group} | {passed} | {differ} |" for group, (passed, differ) in groups.items()]
    lines += ["", "| tests that differ | why | what a program sees |", "|---|---|---|"]
    for (why, signal), files in reasons.items():
        names = "; ".join(f"`{file}`: {', '.join(sorted(tests))}" for file, tests in files.items())
        lines.append(f"| {names} | {why} | `{signal}` |")
    return "\n".join(["", *lines, ""])


def main(package, create):
    """Runs all cases, or those whose name contains the argument, in sandboxes that create(case, **options) creates.
    With --table it prints the table of the documents."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if wanted == "--table":
        print(table())
        return
    run_id, shared, failed, counts = uuid.uuid4().hex, {}, [], {"pass": 0, "differ": 0}

    for name, run, own, why, signal in cases:
        if wanted not in name:
            continue
        began, group = time.monotonic(), group_of(name)
        if own is None and group not in shared:
            shared[group] = create(f"{run_id} {group}")
        if own is None:
            wrong = result(lambda: run(shared[group]), signal)
        else:
            wrong = result(lambda: alone(run, create(f"{run_id} {name}", **own)), signal)
        print(f"{time.monotonic() - began:.1f} s {name}: {wrong or (why and f'differs: {why}') or 'passes'}")
        if wrong:
            failed.append(f"{name}: {wrong}")
        else:
            counts["pass" if signal is None else "differ"] += 1
    for box in shared.values():
        box.kill()
    print(f"{package} {version(package)}: {counts['pass']} tests pass and {counts['differ']} differ as listed")
    if failed:
        sys.exit("\n".join(failed))
