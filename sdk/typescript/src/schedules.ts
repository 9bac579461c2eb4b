import { type Call, pages, pathOf, removal, type Transport } from "./http.ts";
import type { Accepted, Options, Schedule, SchedulePreview, ScheduleRequest, WholeSchedule } from "./types.ts";

const schedulesPath = "/v1/schedules";

/** Schedules: executions at times. */
export class Schedules {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  create(request: ScheduleRequest, options: Options = {}): Promise<WholeSchedule> {
    return this.#call("POST", options, [], { json: request });
  }

  /** Returns the schedules of the key's organisation by id. */
  list(options: Options = {}): AsyncGenerator<Schedule, void> {
    const { signal } = options;
    return pages(this.#transport, { method: "GET", path: schedulesPath, resend: true, signal }, "schedules");
  }

  /** Returns a schedule with its next ticks and its last ones. */
  get(id: string, options: Options = {}): Promise<WholeSchedule> {
    return this.#call("GET", options, [id], { resend: true });
  }

  /** Changes the fields that the request has. */
  change(id: string, request: ScheduleRequest, options: Options = {}): Promise<WholeSchedule> {
    return this.#call("PATCH", options, [id], { json: request, resend: true });
  }

  /** Starts an execution of a schedule now. */
  run(id: string, options: Options = {}): Promise<Accepted> {
    return this.#call("POST", options, [id, "run"]);
  }

  /** Removes a schedule. Executions that have started go on. */
  delete(id: string, options: Options = {}): Promise<void> {
    return this.#call("DELETE", options, [id], removal);
  }

  /** Returns the first ticks of a schedule with this timing. It creates nothing. */
  preview(
    timing: { cron?: string; every?: number; time_zone?: string; from?: string; count?: number },
    options: Options = {},
  ): Promise<SchedulePreview> {
    return this.#call("GET", options, ["preview"], { query: timing, resend: true });
  }

  #call<T>(method: Call["method"], options: Options, path: string[], call: Partial<Call> = {}): Promise<T> {
    const { signal } = options;
    return this.#transport.json({ method, path: pathOf(schedulesPath, ...path), resend: false, signal, ...call });
  }
}
