import assert from "node:assert/strict";
import { read, type StreamEvent } from "./events.ts";

async function events(...pieces: Uint8Array<ArrayBuffer>[]): Promise<StreamEvent[]> {
  const body = new ReadableStream<Uint8Array<ArrayBuffer>>({
    start(c) {
      pieces.forEach((p) => c.enqueue(p));
      c.close();
    },
  });
  return await Array.fromAsync(read(new Response(body)));
}

Deno.test("a stream may be cut at every byte", async () => {
  const bytes = new TextEncoder().encode(
    'id: 1\ndata: {"a":"ä\u2028"}\n\n: keepalive\n\nid:2\r\ndata: x\ndata: y\r\n\r\ndata: lost',
  );
  const whole = await events(bytes);
  assert.deepEqual(whole.filter((e) => e.data), [{ id: "1", data: '{"a":"ä\u2028"}' }, { id: "2", data: "x\ny" }]);
  for (let cut = 0; cut <= bytes.length; cut++) {
    assert.deepEqual(await events(bytes.slice(0, cut), bytes.slice(cut)), whole, `cut at ${cut}`);
  }
});
