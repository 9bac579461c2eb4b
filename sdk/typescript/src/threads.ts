import { type Call, pages, pathOf, removal, type Transport } from "./http.ts";
import type { Options, Thread, WholeThread } from "./types.ts";

const threadsPath = "/v1/threads";

/** Threads: home directories that executions share, one after another. */
export class Threads {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Returns the threads of the key's organisation by id. */
  list(options: Options = {}): AsyncGenerator<Thread, void> {
    const { signal } = options;
    return pages(this.#transport, { method: "GET", path: threadsPath, resend: true, signal }, "threads");
  }

  /** Returns a thread with its versions. */
  get(id: string, options: Options = {}): Promise<WholeThread> {
    return this.#call("GET", options, [id], { resend: true });
  }

  /** Removes a thread with all its versions. */
  delete(id: string, options: Options = {}): Promise<void> {
    return this.#call("DELETE", options, [id], removal);
  }

  /** Creates a thread from a version of another, by default the newest. */
  fork(id: string, to: string, options: Options & { version?: number } = {}): Promise<WholeThread> {
    return this.#call("POST", options, [id, "fork"], { json: { id: to, version: options.version } });
  }

  #call<T>(method: Call["method"], options: Options, path: string[], call: Partial<Call> = {}): Promise<T> {
    const { signal } = options;
    return this.#transport.json({ method, path: pathOf(threadsPath, ...path), resend: false, signal, ...call });
  }
}
