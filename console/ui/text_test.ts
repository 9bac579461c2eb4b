import assert from "node:assert/strict";
import { jsonText } from "./text.tsx";

Deno.test("the text of JSON is not much longer than what it was made of", () => {
  assert.equal(jsonText({ a: [1] }), '{\n  "a": [\n    1\n  ]\n}');
  assert.equal(jsonText(undefined), "");
  for (const depth of [100, 3000, 100_000]) {
    const text = '{"a":['.repeat(depth) + "]}".repeat(depth);
    assert.ok(jsonText(JSON.parse(text)).length <= text.length, `${depth} levels`);
  }
});
