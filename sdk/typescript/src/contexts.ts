import { ConnectionError, messageOf } from "./errors.ts";
import { type Call, follow, ndjson, pathOf, randomName, removal, type Source, type Transport } from "./http.ts";
import type {
  CellError,
  CellRequest,
  CellResult,
  ContextRequest,
  ContextState,
  Display,
  Options,
  Schemas,
} from "./types.ts";

/** Contexts: interpreters in a live sandbox that keep their variables. */
export class Contexts {
  readonly #transport: Transport;
  readonly #path: string;

  constructor(transport: Transport, path: string) {
    this.#transport = transport;
    this.#path = path;
  }

  /** Starts an interpreter. */
  async create(request: ContextRequest = {}, options: Options = {}): Promise<Context> {
    const { signal } = options;
    const call: Call = { method: "POST", path: this.#path, json: request, resend: false, signal };
    return new Context(this.#transport, this.#path, await this.#transport.json(call));
  }

  async get(id: string, options: Options = {}): Promise<Context> {
    const { signal } = options;
    const call: Call = { method: "GET", path: pathOf(this.#path, id), resend: true, signal };
    return new Context(this.#transport, this.#path, await this.#transport.json(call));
  }

  async list(options: Options = {}): Promise<ContextState[]> {
    const { signal } = options;
    const call: Call = { method: "GET", path: this.#path, resend: true, signal };
    return (await this.#transport.json<Schemas["Contexts"]>(call)).contexts;
  }
}

/** An event of the run of a cell. */
export type CellEvent =
  & { seq: number }
  & (
    | { type: "start"; run: number }
    | { type: "stdout" | "stderr"; text: string }
    | ({ type: "display" } & Display)
    | ({ type: "error" } & CellError)
    | { type: "end"; status: CellResult["status"]; count: number; message?: string }
    /** Events that are no longer kept. */
    | { type: "gap" }
  );

/** An interpreter. */
export class Context {
  readonly id: string;
  /** The state when it was last asked for: see refresh. */
  info: ContextState;
  readonly #transport: Transport;
  readonly #path: string;

  constructor(transport: Transport, base: string, info: ContextState) {
    this.#transport = transport;
    this.#path = pathOf(base, info.id);
    this.info = info;
    this.id = info.id;
  }

  /** Runs a cell once and returns its result. A cell that fails has a result, too: look at `error`. */
  run(cell: string | CellRequest, options: Options = {}): Promise<CellResult> {
    return this.#call("POST", options, "/execute", { json: named(cell), resend: true });
  }

  /**
   * Runs a cell once and returns its events as they happen, each once and in order, the end last. It resumes by itself
   * after a broken connection. The cell runs on if you stop reading: see interrupt.
   */
  stream(cell: string | CellRequest, options: Options = {}): AsyncGenerator<CellEvent, void> {
    return follow(this.#transport, new CellSource(this.#path, named(cell)), options.signal);
  }

  /** Reads the state again. */
  async refresh(options: Options = {}): Promise<ContextState> {
    return this.info = await this.#call<ContextState>("GET", options, "", { resend: true });
  }

  /** Starts the interpreter again, without its variables. */
  async restart(options: Options = {}): Promise<ContextState> {
    return this.info = await this.#call<ContextState>("POST", options, "/restart");
  }

  /** Interrupts the cell that runs. Returns whether there was one. */
  async interrupt(options: Options = {}): Promise<boolean> {
    const call = { resend: true };
    return (await this.#call<Schemas["ContextInterrupt"]>("POST", options, "/interrupt", call)).interrupted;
  }

  /** Ends the context. */
  delete(options: Options = {}): Promise<void> {
    return this.#call("DELETE", options, "", removal);
  }

  #call<T>(method: Call["method"], options: Options, path: string, call: Partial<Call> = {}): Promise<T> {
    const { signal } = options;
    return this.#transport.json({ method, path: this.#path + path, resend: false, signal, ...call });
  }
}

/** Returns a cell with a name: a request with the name of an earlier run runs nothing. */
function named(cell: string | CellRequest): CellRequest {
  return { call: randomName(), ...(typeof cell === "string" ? { code: cell } : cell) };
}

/** The connections that carry the events of a run. */
class CellSource implements Source<CellEvent> {
  readonly #path: string;
  readonly #cell: CellRequest;
  #run = 0;
  #after = 0;

  constructor(path: string, cell: CellRequest) {
    this.#path = path;
    this.#cell = cell;
  }

  call(): Call {
    const headers = { Accept: ndjson };
    if (this.#run === 0) {
      return { method: "POST", path: `${this.#path}/execute`, json: this.#cell, headers, resend: true };
    }
    const path = pathOf(`${this.#path}/runs`, String(this.#run));
    return { method: "GET", path, query: { after_seq: this.#after }, headers, resend: true };
  }

  read(line: string): CellEvent | undefined {
    const event = JSON.parse(line) as CellEvent;
    if (event.seq <= this.#after) return undefined; // a keepalive has the number of the last event
    this.#after = event.seq;
    if (event.type === "start") this.#run = event.run;
    return event;
  }

  isLast(event: CellEvent): boolean {
    return event.type === "end";
  }

  lost(cause: unknown): Error {
    const message = `lost the server while following run ${this.#run} of a context: ${messageOf(cause)}`;
    return new ConnectionError(message, { cause });
  }
}
