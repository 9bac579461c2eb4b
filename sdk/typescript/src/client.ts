import { AgentSessions } from "./agentsessions.ts";
import { Batches, type MapOptions } from "./batches.ts";
import { BullpenError, LostError } from "./errors.ts";
import { Executions, executionsPath } from "./executions.ts";
import { Files } from "./files.ts";
import { type Call, type Config, follow, idempotent, ndjson, pathOf, type Source, Transport } from "./http.ts";
import { Pipelines } from "./pipelines.ts";
import { Sandboxes } from "./sandboxes.ts";
import { Schedules } from "./schedules.ts";
import { Threads } from "./threads.ts";
import type {
  Accepted,
  BatchItem,
  BatchResult,
  Event,
  ExecuteRequest,
  Execution,
  Options,
  Result,
  Schemas,
} from "./types.ts";

const executePath = "/v1/sandbox/execute";

/** Seconds for which one request of wait waits. */
const longPoll = 30;

/** Options of calls that start something. */
export interface SubmitOptions extends Options {
  /** A request with the key of an earlier one starts nothing, and has its outcome. Default: a random one. */
  idempotencyKey?: string | undefined;
}

/** Sends requests to one server with one API key. */
export class Bullpen {
  readonly executions: Executions;
  readonly threads: Threads;
  readonly files: Files;
  readonly batches: Batches;
  readonly sandboxes: Sandboxes;
  readonly schedules: Schedules;
  readonly pipelines: Pipelines;
  readonly agentSessions: AgentSessions;
  readonly #transport: Transport;

  /** Sends nothing. */
  constructor(config: Config) {
    const transport = new Transport(config);
    this.#transport = transport;
    this.executions = new Executions(transport);
    this.threads = new Threads(transport);
    this.files = new Files(transport);
    this.batches = new Batches(transport);
    this.sandboxes = new Sandboxes(transport);
    this.schedules = new Schedules(transport);
    this.pipelines = new Pipelines(transport);
    this.agentSessions = new AgentSessions(transport);
  }

  /** Returns a client with the URL and the key in the variables BULLPEN_URL and BULLPEN_API_KEY. */
  static fromEnv(config: Partial<Config> = {}): Bullpen {
    const { process } = globalThis as { process?: { env: Record<string, string | undefined> } };
    const url = config.url ?? process?.env["BULLPEN_URL"];
    const apiKey = config.apiKey ?? process?.env["BULLPEN_API_KEY"];
    if (!url) throw new BullpenError("BULLPEN_URL is not set: it is the server's URL, such as http://127.0.0.1:8080");
    if (!apiKey) throw new BullpenError("BULLPEN_API_KEY is not set: it is an API key of the server, sk-…");
    return new Bullpen({ ...config, url, apiKey });
  }

  /**
   * Runs a program and returns its result. A program that fails has a result, too: look at `success`, `exit_code` and
   * `error`. If the signal aborts, a program that has started goes on, and a queued one never starts.
   */
  async run(request: ExecuteRequest, options: SubmitOptions = {}): Promise<Result> {
    const { body, headers } = await this.#transport.answer<Schemas["Result"]>({
      method: "POST",
      path: executePath,
      json: request,
      headers: idempotent(options.idempotencyKey),
      resend: true,
      signal: options.signal,
    });
    return { ...body, trace_id: headers.get("X-Trace-Id") ?? "" };
  }

  /**
   * Runs a program and returns its events as they happen, each once and in order, the result last. It resumes by itself
   * after a broken connection. The program goes on if you stop reading: see executions.cancel.
   */
  stream(request: ExecuteRequest, options: SubmitOptions = {}): AsyncGenerator<Event, void> {
    const headers = { Accept: ndjson, ...idempotent(options.idempotencyKey) };
    const start: Call = { method: "POST", path: executePath, json: request, headers, resend: true };
    return follow(this.#transport, new EventSource({ start }), options.signal);
  }

  /** Returns the events of an execution with numbers above after_seq, as stream does. */
  follow(trace_id: string, options: Options & { after_seq?: number } = {}): AsyncGenerator<Event, void> {
    return follow(this.#transport, new EventSource({ trace_id, after_seq: options.after_seq ?? 0 }), options.signal);
  }

  /** Starts a program and does not wait for it. */
  submit(request: ExecuteRequest, options: SubmitOptions = {}): Promise<Accepted> {
    return this.#transport.json({
      method: "POST",
      path: executePath,
      json: request,
      headers: { Prefer: "respond-async", ...idempotent(options.idempotencyKey) },
      resend: true,
      signal: options.signal,
    });
  }

  /** Returns an execution when it has ended. */
  async wait(trace_id: string, options: Options = {}): Promise<Execution> {
    for (;;) {
      const { signal } = options;
      const path = pathOf(executionsPath, trace_id);
      const call: Call = { method: "GET", path, query: { wait: longPoll }, resend: true, signal };
      const execution = await this.#transport.json<Execution>(call);
      if (execution.completed_at !== null) return execution;
    }
  }

  /**
   * Runs a program once for each row, as one batch, and returns the results in the order of the rows. The program reads
   * its row as JSON from its standard input. Rows for which it fails have results, too.
   */
  map(program: BatchItem, rows: unknown[], options: MapOptions = {}): Promise<BatchResult[]> {
    return this.batches.map(program, rows, options);
  }
}

/** The connections that carry the events of an execution. */
class EventSource implements Source<Event> {
  #start: Call | undefined;
  #trace_id: string;
  #after: number;

  constructor(from: { start?: Call; trace_id?: string; after_seq?: number }) {
    this.#start = from.start;
    this.#trace_id = from.trace_id ?? "";
    this.#after = from.after_seq ?? 0;
  }

  call(): Call {
    if (this.#start && this.#trace_id === "") return this.#start;
    return {
      method: "GET",
      path: pathOf(executionsPath, this.#trace_id, "output"),
      query: { after_seq: this.#after },
      headers: { Accept: ndjson },
      resend: true,
    };
  }

  opened(headers: Headers): void {
    this.#trace_id ||= headers.get("X-Trace-Id") ?? "";
  }

  read(line: string): Event | undefined {
    const event = JSON.parse(line) as Schemas["Event"];
    if (event.type === "keepalive" || (event.type !== "result" && event.seq <= this.#after)) return undefined;
    if ("trace_id" in event) this.#trace_id = event.trace_id;
    this.#after = Math.max(this.#after, event.seq);
    return event;
  }

  isLast(event: Event): boolean {
    return event.type === "result";
  }

  lost(cause: unknown): Error {
    return new LostError(this.#trace_id, this.#after, cause);
  }
}
