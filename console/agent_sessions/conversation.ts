// The conversation of a session, built from its events.
import type { Item, Permission, Question, SessionEvent } from "./api.ts";

export type Line =
  & { key: string; at: string; size?: number } // size: of the events that made it
  & (
    | { kind: "item"; item: Item; typed: string } // typed: its text until it is complete
    | { kind: "permission"; permission: Permission }
    | { kind: "question"; question: Question }
    | { kind: "note"; text: string; bad: boolean }
  );

const maxLines = 1000; // that the page shows; the newest
const maxSize = 4 << 20; // characters of the events of these lines

export class Conversation {
  lines: Line[] = [];
  cut = false; // whether older lines are gone
  working = false; // whether a turn is running
  ended = false;
  private readonly known = new Map<string, Line>();
  private size = 0;

  // add adds an event. size is the length of its text.
  add(e: SessionEvent, size: number) {
    const data = e.data as Record<string, unknown>;
    const note = (text: string, bad = false) =>
      this.push(size, { kind: "note", key: `${e.sequence}`, at: e.time, text, bad });
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
          if (e.type === "item.completed") {
            line.typed = "";
            this.grow(line, -line.size!); // what was typed
          }
          this.grow(line, size);
        } else this.push(size, { kind: "item", key: item.item_id, at: e.time, item, typed: "" });
        break;
      }
      case "item.delta": {
        const line = this.known.get(data.item_id as string);
        if (line?.kind === "item") {
          line.typed += data.delta;
          this.grow(line, size);
        }
        break;
      }
      case "permission.requested":
      case "permission.resolved": {
        const permission = data as unknown as Permission;
        this.put(size, { kind: "permission", key: "p" + permission.permission_id, at: e.time, permission });
        break;
      }
      case "question.requested":
      case "question.resolved": {
        const question = data as unknown as Question;
        this.put(size, { kind: "question", key: "q" + question.question_id, at: e.time, question });
        break;
      }
      case "error":
        note(String(data.message), true);
        break;
      case "agent.unparsed":
        note(`unreadable output of the agent: ${data.error}`, true);
        break;
      case "session.ended":
        this.ended = true;
        this.working = false;
        note(`the session has ended: ${data.message ?? data.reason}`, data.reason === "error");
    }
  }

  // waits reports whether the agent waits for an answer.
  get waits(): boolean {
    return this.lines.some((l) =>
      l.kind === "permission"
        ? l.permission.status === "requested"
        : l.kind === "question" && l.question.status === "requested"
    );
  }

  // put adds a line, or replaces the line with its key at the same place and time.
  private put(size: number, line: Line) {
    const old = this.known.get(line.key);
    if (old) Object.assign(old, line, { at: old.at });
    else this.push(size, line);
  }

  private push(size: number, line: Line) {
    this.lines.push(line);
    this.known.set(line.key, line);
    this.grow(line, size);
  }

  // grow changes the size of a line, and removes the oldest lines beyond the limits.
  private grow(line: Line, size: number) {
    line.size = (line.size ?? 0) + size;
    this.size += size;
    while (this.lines.length > maxLines || this.size > maxSize && this.lines.length > 1) {
      const old = this.lines.shift()!;
      this.known.delete(old.key);
      this.size -= old.size!;
      this.cut = true;
    }
  }
}
