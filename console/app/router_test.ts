import assert from "node:assert/strict";
import { link, match, path } from "./router.ts";

Deno.test("paths lead back to their arguments", () => {
  for (const id of ["trc_abc", "a/b", "ä ü", "%", "?x=#y", "..", "<b>", "\u202e"]) {
    const hash = link(path("threads", id), { tab: "a&b=c" });
    const [at] = hash.slice(1).split("?");
    assert.deepEqual(match("/threads/:id", at), { id });
  }
  assert.equal(match("/threads/:id", "/threads"), null);
  assert.equal(match("/threads/:id", "/threads/%"), null);
  assert.equal(match("/threads", "/executions"), null);
});
