// The conversation of a session, made from its events.
import type { Item, Permission, Question, SessionEvent } from "./api.ts";

export type Line =
  | { kind: "item"; key: string; at: string; item: Item; typed: string } // typed: its text until it is complete
  | { kind: "permission"; key: string; at: string; permission: Permission }
  | { kind: "question"; key: string; at: string; question: Question }
  | { kind: "note"; key: string; at: string; text: string; bad: boolean };

const maxLines = 1000; // that the page shows; the newest

export class Conversation {
  lines: Line[] = [];
  cut = false; // whether older lines are gone
  working = false; // whether a turn runs
  ended = false;
  private readonly known = new Map<string, Line>();

  add(e: SessionEvent) {
    const data = e.data as Record<string, unknown>;
    const note = (text: string, bad = false) =>
      this.push({ kind: "note", key: `${e.sequence}`, at: e.time, text, bad });
    switch (e.type) {
      case "turn.started":
      case "turn.ended":
        this.working = e.type === "turn.started";
        break;
      case "item.started":
      case "item.completed": {
        const item = data.item as Item;
        const line = this.known.get(item.item_id);
        if (line?.kind === "item") {
          line.item = item;
          if (e.type === "item.completed") line.typed = "";
        } else this.push({ kind: "item", key: item.item_id, at: e.time, item, typed: "" });
        break;
      }
      case "item.delta": {
        const line = this.known.get(data.item_id as string);
        if (line?.kind === "item") line.typed += data.delta;
        break;
      }
      case "permission.requested":
      case "permission.resolved": {
        const permission = data as unknown as Permission;
        const line = this.known.get("p" + permission.permission_id);
        if (line?.kind === "permission") line.permission = permission;
        else this.push({ kind: "permission", key: "p" + permission.permission_id, at: e.time, permission });
        break;
      }
      case "question.requested":
      case "question.resolved": {
        const question = data as unknown as Question;
        const line = this.known.get("q" + question.question_id);
        if (line?.kind === "question") line.question = question;
        else this.push({ kind: "question", key: "q" + question.question_id, at: e.time, question });
        break;
      }
      case "error":
        note(String(data.message), true);
        break;
      case "agent.unparsed":
        note(`output of the agent that could not be read: ${data.error}`, true);
        break;
      case "session.ended":
        this.ended = true;
        this.working = false;
        note(`the session has ended: ${data.message ?? data.reason}`, data.reason === "error");
    }
  }

  // waits reports whether the agent waits for an answer.
  get waits(): boolean {
    return this.lines.some((l) => l.kind === "permission" ? l.permission.status === "requested"
      : l.kind === "question" && l.question.status === "requested");
  }

  private push(line: Line) {
    this.lines.push(line);
    this.known.set(line.key, line);
    if (this.lines.length > maxLines) {
      this.known.delete(this.lines.shift()!.key);
      this.cut = true;
    }
  }
}
