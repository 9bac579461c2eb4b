import { Commands } from "./commands.ts";
import { Contexts } from "./contexts.ts";
import { Guest, SandboxFiles } from "./guest.ts";
import { type Call, pages, pathOf, type Transport } from "./http.ts";
import type { LiveSandbox, Options, SandboxLogs, SandboxRequest, SandboxSave } from "./types.ts";

const sandboxesPath = "/v1/sandboxes";

/** Live sandboxes, which stay after a command has ended. */
export class Sandboxes {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Creates a sandbox and returns it when commands can be run in it. */
  async create(request: SandboxRequest = {}, options: Options = {}): Promise<Sandbox> {
    const { signal } = options;
    const call: Call = { method: "POST", path: sandboxesPath, json: request, resend: false, signal };
    return new Sandbox(this.#transport, await this.#transport.json(call));
  }

  /** Returns the sandboxes of the key's organisation, the newest first. */
  list(
    filter: { state?: LiveSandbox["state"]; name?: string } = {},
    options: Options = {},
  ): AsyncGenerator<LiveSandbox, void> {
    const { signal } = options;
    const call: Call = { method: "GET", path: sandboxesPath, query: filter, resend: true, signal };
    return pages(this.#transport, call, "sandboxes");
  }

  async get(id: string, options: Options = {}): Promise<Sandbox> {
    const { signal } = options;
    const call: Call = { method: "GET", path: pathOf(sandboxesPath, id), resend: true, signal };
    return new Sandbox(this.#transport, await this.#transport.json(call));
  }
}

/** A live sandbox. Its requests act as the user `user` of the sandbox. */
export class Sandbox {
  readonly id: string;
  readonly commands: Commands;
  readonly files: SandboxFiles;
  readonly contexts: Contexts;
  /** The state when it was last asked for: see refresh. */
  info: LiveSandbox;
  readonly #transport: Transport;

  constructor(transport: Transport, info: LiveSandbox, user?: string) {
    const path = pathOf(sandboxesPath, info.id);
    const guest = new Guest(transport, `${path}/guest`, user);
    this.#transport = transport;
    this.info = info;
    this.id = info.id;
    this.commands = new Commands(guest);
    this.files = new SandboxFiles(guest);
    this.contexts = new Contexts(transport, `${path}/contexts`);
  }

  /** Returns the same sandbox, whose commands and files act as root. */
  asRoot(): Sandbox {
    return new Sandbox(this.#transport, this.info, "root");
  }

  /** Reads the state again. */
  refresh(options: Options = {}): Promise<LiveSandbox> {
    return this.#change("GET", options, [], { resend: true });
  }

  /** Makes the sandbox expire in a number of seconds from now, by default as many as its last start had. */
  extend(options: Options & { timeout?: number } = {}): Promise<LiveSandbox> {
    return this.#change("POST", options, ["extend"], { json: { timeout: options.timeout } });
  }

  /** Stops the sandbox, saves its home, and returns when it is paused. */
  pause(options: Options = {}): Promise<LiveSandbox> {
    return this.#change("POST", options, ["pause"]);
  }

  /** Starts the paused sandbox and returns when commands can be run in it. */
  resume(options: Options & { timeout?: number } = {}): Promise<LiveSandbox> {
    return this.#change("POST", options, ["resume"], { json: { timeout: options.timeout } });
  }

  /** Saves the home of the sandbox, which runs on. */
  save(options: Options = {}): Promise<SandboxSave> {
    return this.#call("POST", options, ["save"], { resend: true });
  }

  /** Returns what processes have printed since the last start. */
  logs(options: Options = {}): Promise<SandboxLogs> {
    return this.#call("GET", options, ["logs"], { resend: true });
  }

  /** Ends the sandbox for good. Deleting one that has ended changes nothing. */
  delete(options: Options = {}): Promise<LiveSandbox> {
    return this.#change("DELETE", options, [], { resend: true });
  }

  async #change(method: Call["method"], options: Options, path: string[], call: Partial<Call> = {}) {
    return this.info = await this.#call<LiveSandbox>(method, options, path, call);
  }

  #call<T>(method: Call["method"], options: Options, path: string[], call: Partial<Call> = {}): Promise<T> {
    const { signal } = options;
    const at = pathOf(sandboxesPath, this.id, ...path);
    return this.#transport.json({ method, path: at, resend: false, signal, ...call });
  }
}
