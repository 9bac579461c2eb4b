import { ConnectionError, messageOf } from "./errors.ts";
import {
  type Call,
  collect,
  follow,
  idempotent,
  ndjson,
  pages,
  pathOf,
  removal,
  sleep,
  type Source,
  type Transport,
} from "./http.ts";
import type { Batch, BatchItem, BatchRequest, BatchResult, Options } from "./types.ts";

const batchesPath = "/v1/batches";

/** Seconds between two calls of onProgress. */
const progressPause = 1;

/** Options of map. */
export interface MapOptions extends Options {
  /** Called with the state of the batch when it is created, about once a second, and when it has ended. */
  onProgress?: (batch: Batch) => void;
  /** The most rows that are queued or run at a time. */
  max_parallel?: number;
  /** Cancel the rows that have not started when one fails. */
  stop_on_failure?: boolean;
  /** Of the batch. */
  metadata?: Record<string, string>;
  /** A batch with the key of an earlier one is that one. Default: a random key. */
  idempotencyKey?: string | undefined;
}

/** Batches: many executions in one request. */
export class Batches {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  create(request: BatchRequest, options: Options & { idempotencyKey?: string | undefined } = {}): Promise<Batch> {
    const { items, ...settings } = request;
    return this.#call("POST", options, [], {
      json: { ...settings, items }, // items must be the last member
      headers: idempotent(options.idempotencyKey),
    });
  }

  /** Returns the batches of the key's organisation, the newest first. */
  list(options: Options = {}): AsyncGenerator<Batch, void> {
    const { signal } = options;
    return pages(this.#transport, { method: "GET", path: batchesPath, resend: true, signal }, "batches");
  }

  get(id: string, options: Options = {}): Promise<Batch> {
    return this.#call("GET", options, [id]);
  }

  /** Makes a batch submit no more items. */
  pause(id: string, options: Options = {}): Promise<Batch> {
    return this.#call("POST", options, [id, "pause"]);
  }

  resume(id: string, options: Options = {}): Promise<Batch> {
    return this.#call("POST", options, [id, "resume"]);
  }

  /** Cancels the items of a batch that have not ended. */
  cancel(id: string, options: Options = {}): Promise<Batch> {
    return this.#call("POST", options, [id, "cancel"]);
  }

  /** Runs the failed items of a batch again, and the cancelled ones if cancelled is true. */
  retry(id: string, options: Options & { cancelled?: boolean } = {}): Promise<Batch> {
    const { cancelled = false } = options;
    return this.#call("POST", options, [id, "retry"], { json: { cancelled }, resend: false });
  }

  /** Removes a batch that has ended. The records of its executions stay. */
  delete(id: string, options: Options = {}): Promise<void> {
    return this.#call("DELETE", options, [id], removal);
  }

  /** Waits for the results of a batch and returns them in the order of its items: those with an index above after. */
  async *results(id: string, options: Options & { after?: number } = {}): AsyncGenerator<BatchResult, void> {
    const { after = -1, signal } = options;
    const { counts } = await this.get(id, options);
    if (after + 1 < counts.total) yield* follow(this.#transport, new ResultSource(id, after, counts.total), signal);
  }

  /** See Bullpen.map. */
  async map(program: BatchItem, rows: unknown[], options: MapOptions = {}): Promise<BatchResult[]> {
    const { signal: _, onProgress, idempotencyKey: __, ...settings } = options;
    if (rows.length === 0) return [];
    const items = rows.map((row) => ({ stdin: JSON.stringify(row) }));
    const created = await this.create({ ...settings, request: program, items }, options);
    onProgress?.(created);
    const ended = new AbortController();
    const reading = collect(this.results(created.id, options)).finally(() => ended.abort());
    const [results] = await Promise.all([reading, onProgress && this.#report(created.id, onProgress, ended.signal)]);
    onProgress?.(await this.get(created.id, options));
    return results;
  }

  /** Reports the state of a batch until the signal aborts. */
  async #report(id: string, onProgress: (batch: Batch) => void, signal: AbortSignal): Promise<void> {
    for (;;) {
      let batch: Batch;
      try {
        await sleep(progressPause, signal);
        batch = await this.get(id, { signal });
      } catch {
        return; // The results are there, or have the same error.
      }
      onProgress(batch);
    }
  }

  #call<T>(method: Call["method"], options: Options, path: string[], call: Partial<Call> = {}): Promise<T> {
    const { signal } = options;
    return this.#transport.json({ method, path: pathOf(batchesPath, ...path), resend: true, signal, ...call });
  }
}

/** The connections that carry the results of a batch. */
class ResultSource implements Source<BatchResult> {
  readonly #id: string;
  readonly #total: number;
  #after: number;

  constructor(id: string, after: number, total: number) {
    this.#id = id;
    this.#after = after;
    this.#total = total;
  }

  call(): Call {
    return {
      method: "GET",
      path: pathOf(batchesPath, this.#id, "results"),
      query: { follow: true, after: this.#after >= 0 ? this.#after : undefined },
      headers: { Accept: ndjson },
      resend: true,
    };
  }

  read(line: string): BatchResult | undefined {
    if (line.trim() === "") return undefined; // keeps the connection open
    const result = JSON.parse(line) as BatchResult;
    this.#after = result.index;
    return result;
  }

  isLast(result: BatchResult): boolean {
    return result.index === this.#total - 1;
  }

  lost(cause: unknown): Error {
    return new ConnectionError(`lost the server while reading the results of ${this.#id}: ${messageOf(cause)}`, {
      cause,
    });
  }
}
