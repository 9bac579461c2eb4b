import assert from "node:assert/strict";
import { compare } from "./diff.tsx";

Deno.test("a difference keeps the lines that both texts have", () => {
  for (
    const [before, after, want] of [
      ["", "", ""],
      ["a b c", "a b c", " a  b  c"],
      ["a b c", "a x c", " a -b +x  c"],
      ["a b", "b a", "-a  b +a"],
      ["", "a b", "+a +b"],
      ["a b", "", "-a -b"],
      ["{ x }", "{ x y }", " {  x +y  }"],
    ]
  ) {
    const lines = (text: string) => text ? text.split(" ") : [];
    const got = compare(lines(before), lines(after)).map(([sign, line]) => sign + line).join(" ");
    assert.equal(got, want, `from “${before}” to “${after}”`);
  }
});

Deno.test("texts that are too long to compare count as different as a whole", () => {
  const text = Array.from({ length: 2100 }, (_, i) => String(i));
  const signs = compare(text, text).map(([sign]) => sign).join("");
  assert.equal(signs, "-".repeat(text.length) + "+".repeat(text.length));
});
