import { ConnectionError, messageOf } from "./errors.ts";
import { type Call, follow, idempotent, pages, pathOf, removal, type Source, type Transport } from "./http.ts";
import type { Options } from "./types.ts";

const sessionsPath = "/sandbox-agent/v1/sessions";

/** A new session. Fields that are absent select the agent's defaults. */
export interface AgentSessionRequest {
  /** Such as mock or claude. */
  agent: string;
  agentMode?: string;
  permissionMode?: string;
  model?: string;
  variant?: string;
  directory?: string;
  title?: string;
  /** Servers of the Model Context Protocol whose tools the agent can use, by name. */
  mcp?: Record<string, unknown>;
}

/** A session of a coding agent. Times are in milliseconds since 1970. */
export interface AgentSession {
  sessionId: string;
  agent: string;
  agentMode: string;
  permissionMode: string;
  model: string | null;
  variant: string | null;
  nativeSessionId: string | null;
  ended: boolean;
  eventCount: number;
  createdAt: number;
  updatedAt: number;
  directory: string | null;
  title: string | null;
  /** Not in lists. */
  pendingQuestions?: AgentQuestion[];
  pendingPermissions?: AgentPermission[];
}

/** The data of the events permission.requested and permission.resolved. */
export interface AgentPermission {
  permission_id: string;
  action: string;
  status: "requested" | "accept" | "accept_for_session" | "reject";
  metadata: unknown;
}

/** The data of the events question.requested and question.resolved. */
export interface AgentQuestion {
  question_id: string;
  prompt: string;
  options: string[];
  response: string | null;
  status: "requested" | "answered" | "rejected";
}

/** An event of a session. Its type says what data has. */
export interface AgentEvent {
  event_id: string;
  /** Its position in the session. */
  sequence: number;
  time: string;
  /** Whether the server made it, and not the agent. */
  synthetic: boolean;
  type: string;
  data: Record<string, unknown>;
}

/** A message for an agent. */
export interface AgentMessage {
  message: string;
  /** Files in the session's home. */
  attachments?: { path: string }[];
  /** By default the session's. */
  model?: string;
  variant?: string;
}

/** Events after which the agent does nothing until it gets a message or an answer. */
const endsOfTurns = ["turn.ended", "session.ended", "permission.requested", "question.requested"];

/** Sessions of coding agents. */
export class AgentSessions {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Creates a session and returns its id. The server chooses the id unless it is given. */
  async create(request: AgentSessionRequest, options: Options & { id?: string } = {}): Promise<string> {
    const { id } = options;
    const path = id === undefined ? [] : [id];
    const created = await this.#call<{ sessionId?: string }>("POST", options, path, { json: request });
    return created.sessionId ?? id ?? "";
  }

  /** Returns the sessions of the key's organisation, the newest first. */
  list(options: Options = {}): AsyncGenerator<AgentSession, void> {
    const { signal } = options;
    return pages(this.#transport, { method: "GET", path: sessionsPath, resend: true, signal }, "sessions");
  }

  get(id: string, options: Options = {}): Promise<AgentSession> {
    return this.#call("GET", options, [id], { resend: true });
  }

  /** Adds a message to the session's queue, exactly once. */
  send(id: string, message: string | AgentMessage, options: Options = {}): Promise<void> {
    const call = { json: messageOfText(message), headers: idempotent(), resend: true };
    return this.#call("POST", options, [id, "messages"], call);
  }

  /**
   * Sends a message, exactly once, and returns the events of its turn as they happen, each once and in order. It ends
   * with the turn, or with a permission or a question that somebody must answer. It resumes after a broken connection.
   */
  stream(id: string, message: string | AgentMessage, options: Options = {}): AsyncGenerator<AgentEvent, void> {
    const source = new AgentSource(id, 0, (event) => endsOfTurns.includes(event.type), messageOfText(message));
    return follow(this.#transport, source, options.signal);
  }

  /** Returns the events of a session with sequence numbers above after, until the session ends. */
  follow(id: string, options: Options & { after?: number } = {}): AsyncGenerator<AgentEvent, void> {
    const source = new AgentSource(id, options.after ?? 0, (event) => event.type === "session.ended");
    return follow(this.#transport, source, options.signal);
  }

  /** Returns the present events of a session with sequence numbers above after. */
  async *events(id: string, options: Options & { after?: number } = {}): AsyncGenerator<AgentEvent, void> {
    let offset = options.after ?? 0;
    for (let more = true; more;) {
      const page: { events: AgentEvent[]; hasMore: boolean } = await this.#call("GET", options, [id, "events"], {
        query: { offset, limit: 100 },
        resend: true,
      });
      yield* page.events;
      offset = page.events.at(-1)?.sequence ?? offset;
      more = page.hasMore;
    }
  }

  /** Grants a pending permission, or rejects it. `always` is for the session. */
  answerPermission(
    id: string,
    permission: string,
    reply: "once" | "always" | "reject",
    options: Options = {},
  ): Promise<void> {
    return this.#call("POST", options, [id, "permissions", permission, "reply"], { json: { reply } });
  }

  /** Answers a pending question. Without answers, it rejects the question. */
  answerQuestion(id: string, question: string, answers: string[], options: Options = {}): Promise<void> {
    if (answers.length === 0) return this.#call("POST", options, [id, "questions", question, "reject"]);
    return this.#call("POST", options, [id, "questions", question, "reply"], { json: { answers: [answers] } });
  }

  /** Interrupts the turn in progress. It does nothing if there is none. */
  interrupt(id: string, options: Options = {}): Promise<void> {
    return this.#call("POST", options, [id, "interrupt"], { resend: true });
  }

  /** Ends a session and keeps its events. */
  end(id: string, options: Options = {}): Promise<void> {
    return this.#call("POST", options, [id, "terminate"], { resend: true });
  }

  /** Ends a session and deletes it with its files. */
  delete(id: string, options: Options = {}): Promise<void> {
    return this.#call("DELETE", options, [id], removal);
  }

  #call<T>(method: Call["method"], options: Options, path: string[], call: Partial<Call> = {}): Promise<T> {
    const { signal } = options;
    return this.#transport.json({ method, path: pathOf(sessionsPath, ...path), resend: false, signal, ...call });
  }
}

function messageOfText(message: string | AgentMessage): AgentMessage {
  return typeof message === "string" ? { message } : message;
}

/** The connections that carry events of a session. */
class AgentSource implements Source<AgentEvent> {
  readonly isLast: (event: AgentEvent) => boolean;
  readonly #id: string;
  readonly #message: AgentMessage | undefined;
  /** Makes the server send the message once, however often it gets it. */
  readonly #key = idempotent();
  #after: number;

  constructor(id: string, after: number, isLast: (event: AgentEvent) => boolean, message?: AgentMessage) {
    this.isLast = isLast;
    this.#id = id;
    this.#message = message;
    this.#after = after;
  }

  call(): Call {
    const headers = { Accept: "text/event-stream" };
    if (this.#message && this.#after === 0) {
      return {
        method: "POST",
        path: pathOf(sessionsPath, this.#id, "messages", "stream"),
        json: this.#message,
        headers: { ...headers, ...this.#key },
        resend: true,
      };
    }
    const path = pathOf(sessionsPath, this.#id, "events", "sse");
    return { method: "GET", path, query: { offset: this.#after }, headers, resend: true };
  }

  read(line: string): AgentEvent | undefined {
    if (!line.startsWith("data:")) return undefined; // the end of an event, its id, or a comment
    const event = JSON.parse(line.slice("data:".length)) as AgentEvent;
    if (event.sequence <= this.#after) return undefined;
    this.#after = event.sequence;
    return event;
  }

  lost(cause: unknown): Error {
    const message = `lost the server while following session ${this.#id} after event ${this.#after}`;
    return new ConnectionError(`${message}: ${messageOf(cause)}`, { cause });
  }
}
