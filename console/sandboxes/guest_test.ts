import assert from "node:assert/strict";
import { messages } from "./guest.ts";

const framed = (flags: number, text: string) => {
  const body = new TextEncoder().encode(text);
  return [flags, 0, 0, body.length >> 8, body.length & 255, ...body];
};

Deno.test("a message of a guest's stream may be cut anywhere", async () => {
  const events = [{ start: { pid: 7 } }, { data: { stdout: "w6k=".repeat(100), seq: "1" } }, { end: { exited: true } }];
  const stream = Uint8Array.from([
    ...events.flatMap((event) => framed(0, JSON.stringify({ event }))),
    ...framed(2, `{"error":{"code":"not_found"}}`),
  ]);
  for (let size = 1; size <= stream.length; size++) {
    const pieces = new ReadableStream<Uint8Array>({
      start(to) {
        for (let at = 0; at < stream.length; at += size) to.enqueue(stream.subarray(at, at + size));
        to.close();
      },
    });
    const got = await Array.fromAsync(messages(pieces));
    assert.deepEqual(got.map((m) => m.message.event), [...events, undefined]);
    assert.deepEqual(got.at(-1), { last: true, message: { error: { code: "not_found" } } });
  }
});

Deno.test("a message that is too long is not waited for", async () => {
  let made = 0;
  const endless = new ReadableStream<Uint8Array>({
    pull: (to) => to.enqueue(made++ ? new Uint8Array(1 << 16) : Uint8Array.of(0, 255, 255, 255, 255)),
  });
  await assert.rejects(Array.fromAsync(messages(endless)), /too long/);
  assert.ok(made < 10, `${made} pieces were read`);
});
