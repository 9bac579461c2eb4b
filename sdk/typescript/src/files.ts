import { type Call, type Transport } from "./http.ts";
import type { ChangedFile, Data, File, Options, SignedURL } from "./types.ts";

/** Where files are: in the home of a thread, or in a storage connection. Paths are relative to it. */
export type FilesAt = { thread_id: string } | { connection: string };

/** Files of threads and of storage connections. */
export class Files {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Stores a file. The next execution finds it. */
  async write(at: FilesAt, path: string, data: Data, options: Options = {}): Promise<void> {
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
    const content_length = bytes instanceof Uint8Array ? bytes.byteLength : bytes.size;
    const signed = await this.#call<SignedURL>("upload_url", at, { path, content_length }, options);
    await this.#transport.json({ ...signedCall(signed), body: bytes, signal: options.signal });
  }

  /** Returns the content of a file. */
  async read(at: FilesAt, path: string, options: Options & { version?: number } = {}): Promise<Uint8Array> {
    const signed = await this.downloadURL(at, path, options);
    return await this.#transport.bytes({ ...signedCall(signed), signal: options.signal });
  }

  /** Returns the content of a file that is UTF-8. */
  async readText(at: FilesAt, path: string, options: Options & { version?: number } = {}): Promise<string> {
    return new TextDecoder().decode(await this.read(at, path, options));
  }

  /** Lists the files at a path, and everything below it if recursive is true. */
  async list(
    at: FilesAt,
    path?: string,
    options: Options & { recursive?: boolean; version?: number } = {},
  ): Promise<File[]> {
    const { recursive, version } = options;
    return (await this.#call<{ files: File[] }>("list", at, { path, recursive, version }, options)).files;
  }

  /** Deletes what is at a path; a directory with its content only if recursive is true. */
  delete(at: FilesAt, path: string, options: Options & { recursive?: boolean } = {}): Promise<ChangedFile> {
    return this.#call("delete", at, { path, recursive: options.recursive }, options, false);
  }

  /** Renames a file or a directory. */
  rename(at: FilesAt, path: string, to: string, options: Options = {}): Promise<ChangedFile> {
    return this.#call("rename", at, { path, to }, options, false);
  }

  /** Returns a URL from which anyone can download a file for 15 minutes. */
  downloadURL(at: FilesAt, path: string, options: Options & { version?: number } = {}): Promise<SignedURL> {
    return this.#call("download_url", at, { path, version: options.version }, options);
  }

  #call<T>(name: string, at: FilesAt, body: object, options: Options, resend = true): Promise<T> {
    const where = "thread_id" in at ? { source: "thread", id: at.thread_id } : { source: "volume", id: at.connection };
    const { signal } = options;
    return this.#transport.json({
      method: "POST",
      path: `/v1/files/${name}`,
      json: { ...where, ...body },
      resend,
      signal,
    });
  }
}

function signedCall(signed: SignedURL): Call {
  const headers = Object.fromEntries(signed.headers.map(({ name, value }) => [name, value]));
  return { method: signed.method, path: new URL(signed.url).pathname, url: signed.url, headers, resend: true };
}
