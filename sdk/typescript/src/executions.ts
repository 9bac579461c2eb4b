import { pages, pathOf, type Transport } from "./http.ts";
import type { Cancelled, Execution, ListedExecution, Options } from "./types.ts";

export const executionsPath = "/v1/executions";

/** Selects executions. All fields that are set must match. */
export interface ExecutionFilter {
  status?: ListedExecution["status"];
  language?: string;
  delivery_mode?: ListedExecution["delivery_mode"];
  thread_id?: string;
  /** The id of a schedule, a batch or a run of a pipeline that started them. */
  schedule?: string;
  batch?: string;
  pipeline?: string;
  /** Created at this time or later, and before this time, as in RFC 3339. */
  created_after?: string;
  created_before?: string;
  metadata?: Record<string, string>;
}

/** Executions: the runs of programs, and their records. */
export class Executions {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Returns the executions of the key's organisation, the newest first. */
  list(filter: ExecutionFilter = {}, options: Options = {}): AsyncGenerator<ListedExecution, void> {
    const { metadata = {}, ...fields } = filter;
    const selected = Object.entries(metadata).map(([name, value]) => [`metadata.${name}`, value]);
    const query = { ...fields, ...Object.fromEntries(selected) };
    const { signal } = options;
    return pages(this.#transport, { method: "GET", path: executionsPath, query, resend: true, signal }, "executions");
  }

  /** Returns the state of an execution, with its result if it has ended. */
  get(trace_id: string, options: Options = {}): Promise<Execution> {
    const { signal } = options;
    return this.#transport.json({ method: "GET", path: pathOf(executionsPath, trace_id), resend: true, signal });
  }

  /** Ends an execution. A running program gets SIGTERM, and SIGKILL after its grace period. */
  cancel(trace_id: string, options: Options = {}): Promise<Cancelled> {
    const { signal } = options;
    const path = pathOf(executionsPath, trace_id, "cancel");
    return this.#transport.json({ method: "POST", path, resend: true, signal });
  }
}
