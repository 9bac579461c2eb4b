import assert from "node:assert/strict";
import { Changes } from "./live.ts";

Deno.test("a hidden page has no stream of changes, and reads everything again when it is shown", async () => {
  const page = Object.assign(new EventTarget(), { hidden: false });
  const streams: AbortSignal[] = [];
  Object.assign(globalThis, {
    document: page,
    fetch: (_: URL, init: RequestInit) => {
      streams.push(init.signal!);
      return Promise.resolve(
        new Response(
          new ReadableStream({
            start: (to) => {
              init.signal!.addEventListener("abort", () => to.error(init.signal!.reason));
            },
          }),
        ),
      );
    },
  });
  const show = (visible: boolean) => {
    page.hidden = !visible;
    page.dispatchEvent(new Event("visibilitychange"));
  };
  const changes = new Changes();
  const told = new Promise((resolve) => changes.on(resolve));
  changes.start();
  show(true); // it is already
  show(false);
  assert.deepEqual(streams.map((s) => s.aborted), [true]);
  show(true);
  assert.equal(await told, null);
  assert.deepEqual(streams.map((s) => s.aborted), [true, false]);
  changes.close();
  assert.ok(streams[1].aborted);
});
