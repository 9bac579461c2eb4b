import assert from "node:assert/strict";
import { type Span, Terminal } from "./ansi.ts";

// joined returns spans with neighbours of one style joined, so that cuts do not show.
function joined(spans: Span[]): string[] {
  const list: string[] = [];
  let last = "";
  for (const { text, ...style } of spans) {
    const key = JSON.stringify(style);
    if (key === last) list[list.length - 1] += text;
    else list.push(key + text);
    last = key;
  }
  return list;
}

const write = (...pieces: string[]) => {
  const terminal = new Terminal();
  return joined(pieces.flatMap((p) => terminal.write(p)));
};

const hostile = [
  "plain \x1b[1;31mbold red\x1b[0m after",
  "\x1b[38;5;200mpalette\x1b[48;2;1;2;3mtrue colour\x1b[m",
  "\x1b]0;title\x07after a title",
  "\x1b]8;;javascript:alert(1)\x1b\\link\x1b]8;;\x1b\\",
  '\x1bP$q"p\x1b\\after a device string',
  "\x1b[2J\x1b[H\x1b[?1049hscreens",
  "\x1b[31\nnot a sequence",
  "\x1bcreset \x1b(0 charsets",
  "<img src=x onerror=alert(1)>&amp;",
  "right to left \u202e override \u2066 isolate \u200f mark",
  "invisible \u00ad\u034f\u115f\u180e\u2064\u3164\uffa0\ufeff\u{e0041}\u{e01ef}",
  "nul \x00 bell \x07 backspace \b delete \x7f c1 \x9b31m",
  "progress 10%\rprogress 20%\r\nend\r\n",
  "\x1b[38;5;999999999;1mfar\x1b[999999m\x1b[38mshort",
];

Deno.test("a piece may end anywhere", () => {
  for (const text of hostile) {
    const whole = write(text);
    for (let cut = 0; cut <= text.length; cut++) {
      // A carriage return at the end of a piece cannot be told from one before a line end.
      // The server cuts between characters.
      if (text[cut - 1] === "\r" || /[\ud800-\udbff]/.test(text[cut - 1])) continue;
      assert.deepEqual(write(text.slice(0, cut), text.slice(cut)), whole, `${JSON.stringify(text)} cut at ${cut}`);
    }
  }
});

Deno.test("nothing that a browser or a terminal would carry out is left", () => {
  for (const text of hostile) {
    const shown = write(text).join("");
    // deno-lint-ignore no-control-regex
    const control = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]|\p{Default_Ignorable_Code_Point}/u;
    assert.doesNotMatch(shown, control, JSON.stringify(text));
  }
});

Deno.test("colours and fonts", () => {
  const spans = new Terminal().write("a\x1b[1;31mb\x1b[22mc\x1b[38;5;196md\x1b[0me\x1b[38;2;300;0;5mf");
  assert.deepEqual(spans.map((s) => [s.text, s.class, s.color]), [
    ["a", "", undefined],
    ["b", "bold a1", undefined],
    ["c", "a1", undefined],
    ["d", "", "rgb(255 0 0)"],
    ["e", "", undefined],
    ["f", "", "rgb(44 0 5)"],
  ]);
});

Deno.test("an escape sequence without an end becomes text", () => {
  const terminal = new Terminal();
  let shown = "";
  for (let i = 0; i < 10; i++) {
    shown += terminal.write((i ? "" : "\x1b]") + "x".repeat(1000)).map((s) => s.text).join("");
  }
  assert.ok(shown.length > 5000, `${shown.length} of 10,000 characters`);
});
