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
  talk.add(event("turn.started", {}));
  talk.add(event("item.started", item("", "in_progress")));
  talk.add(event("item.delta", { item_id: "itm_1", delta: "Hel" }));
  talk.add(event("item.delta", { item_id: "itm_1", delta: "lo" }));
  assert.ok(talk.working);
  assert.equal(talk.lines.length, 1);
  assert.ok(talk.lines[0].kind === "item" && talk.lines[0].typed === "Hello");
  talk.add(event("item.completed", item("Hello.")));
  assert.ok(talk.lines[0].kind === "item" && talk.lines[0].typed === "");
  assert.equal(talk.lines[0].item.content[0].text, "Hello.");
});

Deno.test("an agent waits until its last question is answered", () => {
  const talk = new Conversation();
  const permission = { permission_id: "a", action: "file_change", status: "requested", metadata: null };
  const question = { question_id: "a", prompt: "Go on?", options: [], response: null, status: "requested" };
  talk.add(event("permission.requested", permission));
  talk.add(event("question.requested", question));
  talk.add(event("permission.resolved", { ...permission, status: "accept" }));
  assert.ok(talk.waits);
  talk.add(event("question.resolved", { ...question, status: "rejected" }));
  assert.ok(!talk.waits);
  assert.equal(talk.lines.length, 2);
});

Deno.test("a long conversation keeps its end, and changes of lines that are gone are ignored", () => {
  const talk = new Conversation();
  talk.add(event("item.started", item("first", "in_progress")));
  for (let i = 0; i < 1500; i++) talk.add(event("error", { message: `failure ${i}` }));
  talk.add(event("item.delta", { item_id: "itm_1", delta: "late" }));
  talk.add(event("an.event.of.a.later.version", { anything: true }));
  assert.ok(talk.cut);
  assert.equal(talk.lines.length, 1000);
  assert.ok(talk.lines.at(-1)!.kind === "note");
});
