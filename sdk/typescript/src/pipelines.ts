import { type Call, pages, pathOf, sleep, type Transport } from "./http.ts";
import type { Options, Pipeline, PipelineRequest, WholePipeline } from "./types.ts";

const pipelinesPath = "/v1/pipelines";

/** Seconds between two looks at a run that has not ended. */
const firstPause = 0.1;
const longestPause = 2;

/** Pipelines: steps that share files. */
export class Pipelines {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Starts a run and returns it when it has ended. A failed run is no error: look at its status. */
  async run(request: PipelineRequest, options: Options = {}): Promise<WholePipeline> {
    return await this.wait((await this.start(request, options)).id, options);
  }

  /** Starts a run and does not wait for it. */
  start(request: PipelineRequest, options: Options = {}): Promise<WholePipeline> {
    return this.#call("POST", options, [], { json: request });
  }

  /** Returns a run when it has ended. */
  async wait(id: string, options: Options = {}): Promise<WholePipeline> {
    for (let pause = firstPause;; pause = Math.min(pause * 1.5, longestPause)) {
      const run = await this.get(id, options);
      if (run.ended_at !== null) return run;
      await sleep(pause, options.signal);
    }
  }

  /** Returns the runs of the key's organisation, the newest first. */
  list(options: Options = {}): AsyncGenerator<Pipeline, void> {
    const { signal } = options;
    return pages(this.#transport, { method: "GET", path: pipelinesPath, resend: true, signal }, "pipelines");
  }

  /** Returns a run with its steps. */
  get(id: string, options: Options = {}): Promise<WholePipeline> {
    return this.#call("GET", options, [id], { resend: true });
  }

  cancel(id: string, options: Options = {}): Promise<WholePipeline> {
    return this.#call("POST", options, [id, "cancel"], { resend: true });
  }

  #call<T>(method: Call["method"], options: Options, path: string[], call: Partial<Call> = {}): Promise<T> {
    const { signal } = options;
    return this.#transport.json({ method, path: pathOf(pipelinesPath, ...path), resend: false, signal, ...call });
  }
}
