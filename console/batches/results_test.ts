import assert from "node:assert/strict";
import { search } from "./results.ts";

const result = (index: number, status: string, stdout = "") => {
  const text = {
    index,
    trace_id: null,
    status,
    exit_code: 1,
    stdout,
    stderr: "Traceback\n\x1b[31mValueError\x1b[0m: \u202e7\n",
  };
  return JSON.stringify({ ...text, error: null, error_message: null, duration_ms: 5, metadata: { row: "1" } }) + "\n";
};

const all = () => true;

// stream returns an answer that makes its pieces when they are read.
function stream(...pieces: Array<() => string>): Response {
  const encoder = new TextEncoder();
  return new Response(
    new ReadableStream({
      pull(c) {
        const piece = pieces.shift();
        if (piece) c.enqueue(encoder.encode(piece()));
        else c.close();
      },
    }),
  );
}

Deno.test("results may be cut at every character, and an unfinished line does not count", async () => {
  const text = result(0, "failed") + "\n" + result(1, "success") + `{"index":2,"sta`;
  for (let cut = 0; cut <= text.length; cut++) {
    const { rows, next } = await search(stream(() => text.slice(0, cut), () => text.slice(cut)), (s) => s === "failed");
    assert.deepEqual(rows.map((r) => [r.index, r.error]), [[0, "ValueError: \\u202e7"]], `cut at ${cut}`);
    assert.equal(next, null);
  }
});

Deno.test("a search ends at 100 results, and goes on after the last one", async () => {
  const text = Array.from({ length: 250 }, (_, i) => result(i, i % 2 ? "failed" : "success")).join("");
  const { rows, next } = await search(stream(() => text), (s) => s === "failed");
  assert.equal(rows.length, 100);
  assert.equal(next, "199");
});

Deno.test("an output of any length is neither kept nor an error", async () => {
  const long = Array.from({ length: 64 }, () => () => "x".repeat(1 << 20));
  const line = result(7, "failed", "OUTPUT").split("OUTPUT");
  const answer = stream(() => line[0], ...long, () => line[1] + result(8, "failed"));
  const { rows } = await search(answer, all);
  assert.deepEqual(rows.map((r) => [r.index, r.error.slice(0, 23)]), [
    [7, "The output is too long "],
    [8, "ValueError: \\u202e7"],
  ]);
});

Deno.test("a search without results stops reading", async () => {
  let made = 0;
  const pieces = Array.from({ length: 1000 }, (_, i) => () => (made++, result(i, "success", "x".repeat(1 << 17))));
  const { rows, next } = await search(stream(...pieces), (s) => s === "failed");
  assert.equal(rows.length, 0);
  assert.ok(Number(next) > 10 && made < 200, `${next} of ${made}`);
});
