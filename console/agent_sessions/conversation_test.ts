import assert from "node:assert/strict";
import type { SessionEvent } from "./api.ts";
import { Conversation } from "./conversation.ts";

let sequence = 0;

const event = (type: string, data: unknown) =>
  ({ sequence: ++sequence, time: "2026-11-29T12:00:00Z", type, data }) as SessionEvent;
const item = (text: string, status = "completed") => ({
  item: { item_id: "itm_1", kind: "message", role: "assistant", content: [{ type: "text", text }], status },
});

Deno.test("what an agent types is replaced by the complete item", () => {
  const talk = new Conversation();
  talk.add(event("turn.started", {}), 100);
  talk.add(event("item.started", item("", "in_progress")), 100);
  talk.add(event("item.delta", { item_id: "itm_1", delta: "Hel" }), 100);
  talk.add(event("item.delta", { item_id: "itm_1", delta: "lo" }), 100);
  assert.ok(talk.working);
  assert.equal(talk.lines.length, 1);
  assert.ok(talk.lines[0].kind === "item" && talk.lines[0].typed === "Hello");
  talk.add(event("item.completed", item("Hello.")), 100);
  assert.ok(talk.lines[0].kind === "item" && talk.lines[0].typed === "");
  assert.equal(talk.lines[0].item.content[0].text, "Hello.");
});

Deno.test("an agent waits until its last question is answered", () => {
  const talk = new Conversation();
  const permission = { permission_id: "a", action: "file_change", status: "requested", metadata: null };
  const question = { question_id: "a", prompt: "Go on?", options: [], response: null, status: "requested" };
  talk.add(event("permission.requested", permission), 100);
  talk.add(event("question.requested", question), 100);
  talk.add(event("permission.resolved", { ...permission, status: "accept" }), 100);
  assert.ok(talk.waits);
  talk.add(event("question.resolved", { ...question, status: "rejected" }), 100);
  assert.ok(!talk.waits);
  assert.equal(talk.lines.length, 2);
});

Deno.test("a long conversation keeps its end, and changes of lines that are gone are ignored", () => {
  const talk = new Conversation();
  talk.add(event("item.started", item("first", "in_progress")), 100);
  for (let i = 0; i < 1500; i++) talk.add(event("error", { message: `failure ${i}` }), 100);
  talk.add(event("item.delta", { item_id: "itm_1", delta: "late" }), 100);
  talk.add(event("an.event.of.a.later.version", { anything: true }), 100);
  assert.ok(talk.cut);
  assert.equal(talk.lines.length, 1000);
  assert.ok(talk.lines.at(-1)!.kind === "note");
});

Deno.test("a conversation of long texts keeps its end", () => {
  const talk = new Conversation();
  const long = "x".repeat(1 << 20);
  for (let i = 0; i < 20; i++) {
    talk.add(event("item.started", { item: { ...item("").item, item_id: `itm_${i}` } }), 100);
    talk.add(event("item.delta", { item_id: `itm_${i}`, delta: long }), long.length);
    talk.add(event("item.completed", { item: { ...item(long).item, item_id: `itm_${i}` } }), long.length);
  }
  assert.ok(talk.cut);
  assert.equal(talk.lines.length, 3);
  for (let i = 0; i < 50; i++) talk.add(event("item.delta", { item_id: "itm_19", delta: long }), long.length);
  assert.equal(talk.lines.length, 1);
});
