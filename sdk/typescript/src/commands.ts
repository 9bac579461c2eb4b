import {
  BullpenError,
  ConnectionError,
  GuestError,
  messageOf,
  UnknownOutcomeError,
  UnreachableError,
} from "./errors.ts";
import type { Guest } from "./guest.ts";
import { randomName } from "./http.ts";
import type { Options } from "./types.ts";

/** Options of a command. */
export interface CommandOptions extends Options {
  /** Added to the sandbox's variables. */
  env_vars?: Record<string, string>;
  /** The working directory, absolute or relative to the home; by default the home. */
  cwd?: string;
  /** Seconds for which the command may run, together with what it has started. */
  timeout?: number;
  /** Its standard input; by default none. */
  stdin?: string | Uint8Array;
  /** Called with pieces of the output as they arrive. */
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
}

/** How a command ended. */
export interface CommandResult {
  stdout: string;
  stderr: string;
  /** -1 if the command did not exit by itself. */
  exit_code: number;
  /** What ended it if it did not exit, such as "signal: killed"; else empty. */
  status: string;
  /** Whether its timeout has passed. */
  timed_out: boolean;
  /** Bytes of output that were lost because they were not read in time. */
  lost: number;
  /** Whether the command printed more than 64 Mi characters. onStdout and onStderr have received all. */
  truncated: boolean;
}

/** The most characters of each output that a result has: a command may print without end. */
const longestOutput = 64 << 20;

/** The largest message of a sandbox's guest, which a tenant may control, in bytes. */
const longestMessage = 4 << 20;

/** The largest piece of standard input that is sent at once, in bytes. */
const inputPiece = 32 << 10;

/** Commands in a live sandbox. */
export class Commands {
  readonly #guest: Guest;

  constructor(guest: Guest) {
    this.#guest = guest;
  }

  /**
   * Runs a command and returns its result: a text with `/bin/sh -c`, a list as a program with its arguments. It resumes
   * after a broken connection, without losing or repeating output. If the signal aborts, the command is killed.
   */
  async run(command: string | string[], options: CommandOptions = {}): Promise<CommandResult> {
    const run = new Run(this.#guest, options);
    const [cmd = "", ...args] = typeof command === "string" ? ["/bin/sh", "-c", command] : command;
    try {
      return await run.run(cmd, args);
    } catch (error) {
      if (options.signal?.aborted) await run.kill();
      throw error;
    }
  }
}

/** An event of a process. Fields that are zero are absent. */
interface ProcessEvent {
  start?: { pid?: number };
  data?: { stdout?: string; stderr?: string; seq?: string };
  gap?: { last?: string; bytes?: string; total?: string };
  end?: { exitCode?: number; exited?: boolean; status?: string };
}

/** A command that runs. */
class Run {
  readonly #guest: Guest;
  readonly #options: CommandOptions;
  /** By which the process is found if the connection breaks before its id arrives. */
  readonly #tag = randomName();
  readonly #stdout: Output;
  readonly #stderr: Output;
  #pid = 0;
  #seq = "0";
  #received = 0;
  #lost = 0;

  constructor(guest: Guest, options: CommandOptions) {
    this.#guest = guest;
    this.#options = options;
    this.#stdout = new Output(options.onStdout);
    this.#stderr = new Output(options.onStderr);
  }

  async run(cmd: string, args: string[]): Promise<CommandResult> {
    const { env_vars, cwd, stdin, timeout } = this.#options;
    const start = {
      process: { cmd, args, envs: env_vars, cwd },
      tag: this.#tag,
      stdin: stdin !== undefined,
      numbered: true,
    };
    // The guest ends the process at this time.
    const headers = timeout ? { "Connect-Timeout-Ms": String(Math.max(1, Math.round(timeout * 1000))) } : {};
    const pause = this.#guest.transport.newPause();
    let input: Promise<void> | undefined;
    let events = this.#events("Start", start, headers);
    for (;;) {
      const before = this.#seq;
      try {
        for await (const event of events) {
          if (event.start) {
            this.#pid = event.start.pid ?? 0;
            input ??= stdin === undefined ? Promise.resolve() : this.#send(stdin);
            input.catch(() => {}); // it is awaited at the end, which its failure brings about
          }
          if (event.data) this.#write(event.data);
          if (event.gap) this.#skip(event.gap);
          if (event.end) {
            await input;
            return this.#result(event.end);
          }
        }
        throw new ConnectionError("the output of the command ended too early");
      } catch (error) {
        if (error instanceof GuestError && error.code === "deadline_exceeded") {
          return { ...this.#result({}), timed_out: true };
        }
        if (!(error instanceof ConnectionError) || error instanceof UnreachableError) throw error;
        const unknown = this.#pid === 0;
        if (this.#seq !== before) pause.reset();
        if (!(await pause.wait(0, this.#options.signal))) throw error;
        this.#guest.transport.retrying(error);
        if (unknown && !(await this.#started())) {
          throw new UnknownOutcomeError("the connection broke before the command was found to run", { cause: error });
        }
        events = this.#events("Connect", { process: this.#selector(), afterSeq: this.#seq }, {});
      }
    }
  }

  /** Kills the process and what it has started. */
  async kill(): Promise<void> {
    try {
      const signal = "SIGNAL_SIGKILL";
      await this.#guest.rpc("process.Process/SendSignal", { process: this.#selector(), signal }, {});
    } catch {
      // It has ended, or there is no way to it.
    }
  }

  #selector(): object {
    return this.#pid === 0 ? { tag: this.#tag } : { pid: this.#pid };
  }

  /** Reports whether the process runs, after a connection that broke before its id arrived. */
  async #started(): Promise<boolean> {
    type Processes = { processes?: { tag?: string; pid: number }[] };
    const { processes = [] } = await this.#guest.rpc<Processes>("process.Process/List", {}, this.#options, true);
    const found = processes.find(({ tag }) => tag === this.#tag);
    this.#pid = found?.pid ?? 0;
    return found !== undefined;
  }

  /** The events of a call of Start or Connect. */
  async *#events(method: string, request: object, headers: Record<string, string>): AsyncGenerator<ProcessEvent, void> {
    const { body } = await this.#guest.transport.open(
      this.#guest.call("POST", `process.Process/${method}`, this.#options, {
        body: envelope(JSON.stringify(request)),
        headers: { "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", ...headers },
        resend: method === "Connect",
      }),
    );
    for await (const { last, text } of envelopes(body)) {
      const message = JSON.parse(text) as { event?: ProcessEvent; error?: { code: string; message?: string } };
      if (message.error) {
        const { code, message: detail = code } = message.error;
        throw new GuestError(code, detail);
      }
      if (last) return;
      if (message.event) yield message.event;
    }
  }

  #write(data: NonNullable<ProcessEvent["data"]>): void {
    this.#seq = data.seq ?? this.#seq;
    const bytes = fromBase64(data.stdout ?? data.stderr ?? "");
    this.#received += bytes.length;
    (data.stderr === undefined ? this.#stdout : this.#stderr).write(bytes);
  }

  /** Notes output that is lost. */
  #skip(gap: NonNullable<ProcessEvent["gap"]>): void {
    this.#seq = gap.last ?? this.#seq;
    const lost = Number(gap.bytes ?? 0) || Math.max(0, Number(gap.total ?? 0) - this.#received);
    this.#received += lost;
    this.#lost += lost;
  }

  async #send(stdin: string | Uint8Array): Promise<void> {
    const bytes = typeof stdin === "string" ? new TextEncoder().encode(stdin) : stdin;
    const process = this.#selector();
    try {
      for (let at = 0; at < bytes.length; at += inputPiece) {
        const input = { stdin: toBase64(bytes.subarray(at, at + inputPiece)) };
        await this.#guest.rpc("process.Process/SendInput", { process, input }, this.#options);
      }
      await this.#guest.rpc("process.Process/CloseStdin", { process }, this.#options, true);
    } catch (error) {
      const ended = error instanceof GuestError && ["failed_precondition", "not_found"].includes(error.code);
      if (ended) return; // The command has closed its standard input, or has ended.
      await this.kill(); // It may have missed a part.
      throw new BullpenError(`send standard input to the command: ${messageOf(error)}`, { cause: error });
    }
  }

  #result(end: NonNullable<ProcessEvent["end"]>): CommandResult {
    return {
      stdout: this.#stdout.end(),
      stderr: this.#stderr.end(),
      exit_code: end.exited ? (end.exitCode ?? 0) : -1,
      status: end.exited ? "" : (end.status ?? ""),
      timed_out: false,
      lost: this.#lost,
      truncated: this.#stdout.truncated || this.#stderr.truncated,
    };
  }
}

/** Keeps the beginning of an output. */
class Output {
  truncated = false;
  #length = 0;
  readonly #decoder = new TextDecoder();
  readonly #parts: string[] = [];
  readonly #on: ((text: string) => void) | undefined;

  constructor(on: ((text: string) => void) | undefined) {
    this.#on = on;
  }

  write(bytes: Uint8Array): void {
    this.#add(this.#decoder.decode(bytes, { stream: true }));
  }

  end(): string {
    this.#add(this.#decoder.decode());
    return this.#parts.join("");
  }

  #add(text: string): void {
    if (text === "") return;
    const kept = text.slice(0, longestOutput - this.#length);
    if (kept !== "") this.#parts.push(kept);
    this.#length += kept.length;
    this.truncated ||= kept.length < text.length;
    this.#on?.(text);
  }
}

/** Returns a message of the Connect protocol: a byte of flags, its length in four bytes, and JSON. */
function envelope(text: string): Uint8Array {
  const json = new TextEncoder().encode(text);
  const message = new Uint8Array(5 + json.length);
  new DataView(message.buffer).setUint32(1, json.length);
  message.set(json, 5);
  return message;
}

/** The messages in a body. */
async function* envelopes(body: AsyncIterable<Uint8Array>): AsyncGenerator<{ last: boolean; text: string }, void> {
  let rest = new Uint8Array();
  for await (const chunk of body) {
    const bytes = new Uint8Array(rest.length + chunk.length);
    bytes.set(rest);
    bytes.set(chunk, rest.length);
    let at = 0;
    while (bytes.length - at >= 5) {
      const length = new DataView(bytes.buffer).getUint32(at + 1);
      if (length > longestMessage) {
        throw new GuestError("resource_exhausted", `the sandbox sends a message of ${length} bytes`);
      }
      if (bytes.length - at - 5 < length) break;
      const text = new TextDecoder().decode(bytes.subarray(at + 5, at + 5 + length));
      yield { last: (bytes[at]! & 2) !== 0, text };
      at += 5 + length;
    }
    rest = bytes.slice(at);
  }
}

function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

function toBase64(bytes: Uint8Array): string {
  return btoa(Array.from(bytes, (b) => String.fromCharCode(b)).join(""));
}
