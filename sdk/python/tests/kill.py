"""Runs programs in each way while the server is killed again and again: e2e/sdk_test.go counts what they do.

CODE is a program that has an effect under the name on its standard input. The name and the execution of each program that
has ended are printed.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from bullpen import Bullpen

CODE = os.environ["CODE"]


def run(client: Bullpen, name: str) -> dict[str, str | None]:
    result = client.run(CODE, language="bash", stdin=name)
    assert result.exit_code == 0, result
    return {name: result.trace_id}


def stream(client: Bullpen, name: str) -> dict[str, str | None]:
    events = list(client.stream(CODE, language="bash", stdin=name))
    assert [e.seq for e in events] == list(range(1, len(events) + 1)), events
    assert events[-1].result is not None and events[-1].result.exit_code == 0, events
    assert "".join(e.data for e in events if e.type == "output") == events[-1].result.stdout, events
    return {name: events[-1].result.trace_id}


def submit(client: Bullpen, name: str) -> dict[str, str | None]:
    execution = client.wait(client.submit(CODE, language="bash", stdin=name).trace_id)
    assert execution.exit_code == 0, execution
    return {name: execution.trace_id}


def map_rows(client: Bullpen, name: str) -> dict[str, str | None]:
    rows = [f"{name}-{i}" for i in range(3)]
    results = client.map(CODE, rows, language="bash", progress=False)
    assert all(r.exit_code == 0 for r in results), results
    return {row: r.trace_id for row, r in zip(rows, results)}


def main() -> None:
    ways = {"run": run, "stream": stream, "submit": submit, "map": map_rows}

    def loop(way: str) -> None:
        for i in range(int(sys.argv[1])):
            for name, trace_id in ways[way](client, f"{way}-{i}").items():
                sys.stdout.write(f"{name} {trace_id}\n")  # in one piece, since the threads share it
                sys.stdout.flush()

    with Bullpen.from_env(patience=120) as client, ThreadPoolExecutor() as pool:
        list(pool.map(loop, ways))  # raises what a loop raises


if __name__ == "__main__":
    main()
