/** The guest: the program in a sandbox that starts processes and serves files. */
import type { Call, Transport } from "./http.ts";
import type { Data, Options } from "./types.ts";

/** Sends requests to the guest of a sandbox. */
export class Guest {
  readonly transport: Transport;
  readonly #path: string;
  readonly #user: string | undefined;

  constructor(transport: Transport, path: string, user: string | undefined) {
    this.transport = transport;
    this.#path = path;
    this.#user = user;
  }

  /** Returns a request to a path of the guest. */
  call(method: Call["method"], path: string, options: Options, call: Partial<Call> = {}): Call {
    const { signal } = options;
    const headers = { ...(this.#user ? { "Bullpen-User": this.#user } : {}), ...call.headers };
    return { method, path: `${this.#path}/${path}`, resend: false, signal, ...call, headers };
  }

  /** Calls a method of a service and returns its answer. */
  rpc<T>(method: string, request: object, options: Options, resend = false): Promise<T> {
    return this.transport.json(this.call("POST", method, options, { json: request, resend }));
  }

  /** Returns a request for a file. */
  file(method: "GET" | "POST", path: string, options: Options, call: Partial<Call>): Call {
    return this.call(method, "files", options, { query: { path, username: this.#user }, ...call });
  }
}

/** An entry of a directory in a sandbox. */
export interface SandboxEntry {
  name: string;
  path: string;
  type: "file" | "directory" | "other";
  /** In bytes. */
  size: number;
  /** As of chmod. */
  mode: number;
  owner: string;
  modified: string;
}

/** Files of a live sandbox. Paths are absolute or relative to the home. */
export class SandboxFiles {
  readonly #guest: Guest;

  constructor(guest: Guest) {
    this.#guest = guest;
  }

  /** Writes a file, and creates missing directories. */
  async write(path: string, data: Data, options: Options = {}): Promise<void> {
    const headers = { "Content-Type": "application/octet-stream" };
    const call = this.#guest.file("POST", path, options, { body: data, headers, resend: true });
    await this.#guest.transport.json(call);
  }

  read(path: string, options: Options = {}): Promise<Uint8Array> {
    const call = this.#guest.file("GET", path, options, { headers: { Accept: "*/*" }, resend: true });
    return this.#guest.transport.bytes(call);
  }

  /** Returns the content of a file that is UTF-8. */
  async readText(path: string, options: Options = {}): Promise<string> {
    return new TextDecoder().decode(await this.read(path, options));
  }

  /** Lists a directory, by default the home; with a depth, also the directories in it. */
  async list(path = ".", options: Options & { depth?: number } = {}): Promise<SandboxEntry[]> {
    const request = { path, depth: options.depth ?? 1 };
    const method = "filesystem.Filesystem/ListDir";
    const { entries = [] } = await this.#guest.rpc<{ entries?: Entry[] }>(method, request, options, true);
    return entries.map((e) => ({
      name: e.name,
      path: e.path,
      type: types[e.type ?? ""] ?? "other",
      size: Number(e.size ?? 0),
      mode: e.mode ?? 0,
      owner: e.owner ?? "",
      modified: e.modifiedTime ?? "",
    }));
  }

  /** Creates a directory and its parents. */
  async makeDir(path: string, options: Options = {}): Promise<void> {
    await this.#guest.rpc("filesystem.Filesystem/MakeDir", { path }, options);
  }

  /** Renames a file or a directory, and creates the parents of the new path. */
  async move(path: string, to: string, options: Options = {}): Promise<void> {
    await this.#guest.rpc("filesystem.Filesystem/Move", { source: path, destination: to }, options);
  }

  /** Removes a file or a directory with everything in it, if it exists. */
  async delete(path: string, options: Options = {}): Promise<void> {
    await this.#guest.rpc("filesystem.Filesystem/Remove", { path }, options, true);
  }
}

const types: Record<string, SandboxEntry["type"]> = { FILE_TYPE_FILE: "file", FILE_TYPE_DIRECTORY: "directory" };

/** An entry as the guest sends it. Fields that are zero are absent. */
interface Entry {
  name: string;
  path: string;
  type?: string;
  size?: string;
  mode?: number;
  owner?: string;
  modifiedTime?: string;
}
