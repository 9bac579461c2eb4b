import assert from "node:assert/strict";
import { OutputLog } from "./output.tsx";

let frames = 0;
globalThis.requestAnimationFrame = () => ++frames;

Deno.test("what is kept of an output is bounded, whatever it consists of", () => {
  const colours = "\x1b[31mx\x1b[0my".repeat(1000);
  for (const [piece, times] of [["x".repeat(1 << 16), 20], [colours, 20], ["x", 40_000], ["", 40_000]] as const) {
    const log = new OutputLog(() => {});
    for (let i = 0; i < times; i++) log.add(i % 2 ? "stdout" : "stderr", piece);
    const spans = log.pieces.reduce((sum, p) => sum + p.spans.length, 0);
    assert.ok(log.cut && log.pieces.length + spans <= 34_000, `${log.pieces.length} pieces, ${spans} spans`);
    assert.equal(log.pieces.at(-1)!.key - log.pieces[0].key, log.pieces.length - 1);
  }
});
