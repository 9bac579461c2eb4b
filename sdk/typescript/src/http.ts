/** Requests, their retries, and answers that arrive line by line. */
import {
  APIError,
  BullpenError,
  ConnectionError,
  errorOf,
  GuestError,
  messageOf,
  UnknownOutcomeError,
  UnreachableError,
} from "./errors.ts";
import type { Data } from "./types.ts";

/** How to reach a server. */
export interface Config {
  /** Of the server, such as https://bullpen.example.com; a path is a prefix. */
  url: string;
  /** The API key, sk-… */
  apiKey: string;
  /** Sends the requests; by default the global fetch. */
  fetch?: typeof fetch;
  /** Seconds for which requests are repeated while the server cannot be reached, 30 by default. 0: never. */
  patience?: number;
  /** Called with the cause before a request is repeated. */
  onRetry?: (cause: Error) => void;
}

/** A request and what may be done if it fails. */
export interface Call {
  method: "GET" | "POST" | "PUT" | "PATCH" | "DELETE";
  path: string;
  /** The whole address, instead of path: one that is signed and needs no key. */
  url?: string;
  query?: Record<string, string | number | boolean | null | undefined>;
  /** Sent as JSON. */
  json?: unknown;
  /** Sent as it is. */
  body?: Data;
  headers?: Record<string, string>;
  /** Whether it may be sent again although the server may have received it. */
  resend: boolean;
  /** Whether it removes what it names: when it is sent again, not_found is success. */
  removes?: boolean;
  signal?: AbortSignal | undefined;
}

/** What holds for every call that removes something and answers nothing. */
export const removal = { resend: true, removes: true } as const;

const firstPause = 0.2;
const longestPause = 5;
/** Seconds without anything from the server after which a stream counts as broken. It sends a keepalive every 15. */
const silence = 60;

const strange = "the answer is not one of bullpen's: check the URL, and the proxies on the way";

export const ndjson = "application/x-ndjson";

export class Transport {
  readonly url: string;
  readonly #config: Config;
  readonly #patience: number;
  /** Whether the server has answered before: if it cannot be reached now, it may be restarting. */
  #reached = false;

  constructor(config: Config) {
    let url: URL | undefined;
    try {
      url = new URL(config.url);
    } catch {
      // The check below reports it.
    }
    if (!url || !/^https?:$/.test(url.protocol) || url.search || url.hash) {
      throw new BullpenError(`${config.url} is not the URL of a server: write https://HOST or http://HOST:PORT`);
    }
    if (!config.apiKey) throw new BullpenError("the API key is empty");
    this.url = url.href.replace(/\/+$/, "");
    this.#config = config;
    this.#patience = config.patience ?? 30;
  }

  /** Sends a request and returns the JSON of the answer, undefined if it is empty. */
  async json<T>(call: Call): Promise<T> {
    return (await this.answer<T>(call)).body;
  }

  /** Does the same, and returns the headers as well. */
  answer<T>(call: Call): Promise<{ body: T; headers: Headers }> {
    return this.send(call, async (response) => {
      const { status, headers } = response;
      if (status === 204) return { body: undefined as T, headers };
      if (!headers.get("Content-Type")?.includes("json")) {
        throw new BullpenError(`${call.method} ${call.path}: ${strange}`);
      }
      return { body: JSON.parse(await response.text()) as T, headers };
    });
  }

  /** Sends a request and returns the bytes of the answer. */
  bytes(call: Call): Promise<Uint8Array> {
    return this.send(call, async (response) => {
      const bytes = new Uint8Array(await response.arrayBuffer());
      const length = response.headers.get("Content-Length");
      if (length !== null && !response.headers.has("Content-Encoding") && Number(length) !== bytes.length) {
        throw new Error(`${bytes.length} of ${length} bytes have arrived`);
      }
      return bytes;
    });
  }

  /**
   * Sends a request until it is answered, and reads the answer. An answer that cannot be read counts as a broken
   * connection: after a header Connection: close, Node.js reports none.
   */
  async send<T>(call: Call, read: (response: Response) => Promise<T>): Promise<T> {
    const pause = new Pause(this.#patience);
    let broke = false;
    for (;;) {
      const began = Date.now();
      try {
        return await this.#once(call, call.signal, read);
      } catch (error) {
        call.signal?.throwIfAborted();
        if (broke && call.removes && error instanceof APIError && error.code === "not_found") {
          return await read(new Response(null, { status: 204 })); // an earlier attempt has deleted it
        }
        if (error instanceof ConnectionError && !(error instanceof UnreachableError)) {
          // The wait for an answer may have been long: patience begins now.
          if (!broke || Date.now() - began > longestPause * 1000) pause.reset();
          broke = true;
        }
        if (!this.#mayRepeat(call, error) || !(await pause.wait(hintOf(error), call.signal))) {
          const unknown = broke && call.method !== "GET" && error instanceof ConnectionError;
          throw unknown
            ? new UnknownOutcomeError(`${error.message}; the server may have carried it out`, { cause: error })
            : error;
        }
        this.retrying(error as Error);
      }
    }
  }

  /** Opens an answer that is read as it arrives. */
  async open(call: Call): Promise<{ headers: Headers; body: AsyncGenerator<Uint8Array, void> }> {
    const controller = new AbortController();
    const abort = () => controller.abort(call.signal?.reason);
    call.signal?.throwIfAborted();
    call.signal?.addEventListener("abort", abort, { once: true });
    const close = () => {
      call.signal?.removeEventListener("abort", abort);
      controller.abort();
    };
    try {
      const attempt = { ...call, signal: controller.signal };
      const response = await this.send(attempt, (response) => Promise.resolve(response));
      return { headers: response.headers, body: chunks(response, call, close) };
    } catch (error) {
      close();
      throw error;
    }
  }

  /** Reports that a request is repeated. */
  retrying(cause: Error): void {
    this.#config.onRetry?.(cause);
  }

  newPause(): Pause {
    return new Pause(this.#patience);
  }

  #mayRepeat(call: Call, error: unknown): boolean {
    if (error instanceof UnreachableError) return this.#reached;
    if (error instanceof ConnectionError) return call.resend;
    if (!(error instanceof APIError) || error.permanent) return false;
    if (error.code === "") return call.resend && [502, 503, 504].includes(error.status); // of a proxy
    return error.status === 503 || (error.status === 429 && error.retry_after !== undefined);
  }

  async #once<T>(
    call: Call,
    signal: AbortSignal | undefined,
    read: (response: Response) => Promise<T>,
  ): Promise<T> {
    const headers: Record<string, string> = { Accept: "application/json", ...call.headers };
    let body = call.body as BodyInit | undefined;
    if (call.json !== undefined) {
      headers["Content-Type"] ??= "application/json";
      body = JSON.stringify(call.json);
    }
    if (!call.url) headers["Authorization"] = `Bearer ${this.#config.apiKey}`;
    const init: RequestInit = {
      method: call.method,
      headers,
      // The API has no redirects, and the key is not sent elsewhere.
      redirect: "manual",
      ...(body === undefined ? {} : { body }),
      ...(signal ? { signal } : {}),
    };
    const send = this.#config.fetch ?? fetch;
    try {
      const response = await send(call.url ?? this.url + withQuery(call.path, call.query), init);
      this.#reached = true;
      if (response.ok) return await read(response);
      throw await readError(response);
    } catch (error) {
      if (error instanceof BullpenError || signal?.aborted) throw error;
      throw this.#connectionError(error, call);
    }
  }

  #connectionError(cause: unknown, call: Call): ConnectionError {
    const causes = [cause, (cause as Error).cause] as (Error & { code?: string })[];
    const code = causes.map((c) => c?.code).find(Boolean) ?? "";
    const text = causes.map((c) => c?.message ?? "").join(" ");
    // A browser says nothing about the cause, and has none before the first answer if it may not call the server.
    const silent = code === "" && !/error sending request|terminated|socket/i.test(text);
    if (unreachableCodes.includes(code) || /client error \(Connect\)/.test(text) || (silent && !this.#reached)) {
      return new UnreachableError(`cannot reach ${this.url}: ${text.trim()}`, { cause });
    }
    return new ConnectionError(`${call.method} ${call.path}: the connection broke: ${messageOf(cause)}`, { cause });
  }
}

/** What fetch reports if no connection was made: in Node.js, and in Bun. */
const unreachableCodes = [
  "ECONNREFUSED",
  "EHOSTUNREACH",
  "ENETUNREACH",
  "ENOTFOUND",
  "EAI_AGAIN",
  "UND_ERR_CONNECT_TIMEOUT",
  "ConnectionRefused",
  "FailedToOpenSocket",
];

function hintOf(error: unknown): number {
  return error instanceof APIError ? (error.retry_after ?? 0) : 0;
}

/** Waits between repetitions, longer each time, until the patience is used up. */
export class Pause {
  readonly #patience: number;
  #next = firstPause;
  #began = Date.now();

  constructor(patience: number) {
    this.#patience = patience;
  }

  reset(): void {
    this.#next = firstPause;
    this.#began = Date.now();
  }

  /** Waits for at least as many seconds as hint. Returns false at once if that would exceed the patience. */
  async wait(hint: number, signal: AbortSignal | undefined): Promise<boolean> {
    const seconds = Math.max(hint, this.#next * (0.5 + Math.random()));
    if ((Date.now() - this.#began) / 1000 + seconds > this.#patience) return false;
    this.#next = Math.min(this.#next * 1.5, longestPause);
    await sleep(seconds, signal);
    return true;
  }
}

/** Waits for seconds. It throws the signal's reason if that aborts before. */
export function sleep(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, seconds * 1000);
    signal?.addEventListener("abort", abort, { once: true });
  });
}

/** The parts of an answer. A connection that is silent for too long counts as broken. */
async function* chunks(response: Response, call: Call, close: () => void): AsyncGenerator<Uint8Array, void> {
  const reader = response.body?.getReader();
  let watchdog: ReturnType<typeof setTimeout> | undefined;
  try {
    while (reader) {
      const silent = new Promise<never>((_, reject) => {
        watchdog = setTimeout(() => reject(new Error(`nothing arrived for ${silence} s`)), silence * 1000);
      });
      const { done, value } = await Promise.race([reader.read(), silent]);
      clearTimeout(watchdog);
      if (done) return;
      yield value;
    }
  } catch (cause) {
    call.signal?.throwIfAborted();
    throw new ConnectionError(`${call.method} ${call.path}: the answer broke off: ${messageOf(cause)}`, { cause });
  } finally {
    clearTimeout(watchdog);
    close();
  }
}

/** The complete lines of an answer, without line breaks. It throws if the answer ends within one. */
export async function* linesOf(body: AsyncIterable<Uint8Array>): AsyncGenerator<string, void> {
  const decoder = new TextDecoder();
  let parts: string[] = [];
  for await (const chunk of body) {
    const [first = "", ...more] = decoder.decode(chunk, { stream: true }).split("\n");
    parts.push(first);
    for (const part of more) {
      yield parts.join("");
      parts = [part];
    }
  }
  if (parts.join("") !== "") throw new ConnectionError("the answer ended within a line");
}

/** A sequence of connections that carry the values of one stream, each once and in order. */
export interface Source<T> {
  /** Returns the request for what follows the last value. */
  call(): Call;
  /** Called when a connection is open. */
  opened?(headers: Headers): void;
  /** Returns the value in a line, undefined for none or one that came before. */
  read(line: string): T | undefined;
  /** Reports whether nothing follows a value. */
  isLast(value: T): boolean;
  /** Returns the error to throw if the server is lost. */
  lost(cause: unknown): Error;
}

/** Returns the values of a source. It reconnects after a broken connection. */
export async function* follow<T>(
  transport: Transport,
  source: Source<T>,
  signal: AbortSignal | undefined,
): AsyncGenerator<T, void> {
  const pause = transport.newPause();
  for (let first = true;; first = false) {
    const began = Date.now();
    let progress = false;
    let cause: ConnectionError;
    let connection;
    try {
      connection = await transport.open({ ...source.call(), signal });
    } catch (error) {
      if (first || !(error instanceof ConnectionError)) throw error;
      throw source.lost(error);
    }
    try {
      source.opened?.(connection.headers);
      for await (const line of linesOf(connection.body)) {
        const value = source.read(line);
        if (value === undefined) continue;
        progress = true;
        yield value;
        if (source.isLast(value)) return;
      }
      cause = new ConnectionError("the stream ended too early");
    } catch (error) {
      if (!(error instanceof ConnectionError)) throw error;
      cause = error;
    }
    if (progress || Date.now() - began > longestPause * 1000) pause.reset();
    if (!(await pause.wait(0, signal))) throw source.lost(cause);
    transport.retrying(cause);
  }
}

/** The entries of a list in a member of the answers, page by page. */
export async function* pages<T>(transport: Transport, call: Call, member: string): AsyncGenerator<T, void> {
  let cursor: string | null | undefined;
  do {
    const query = { limit: 100, ...call.query, ...(cursor ? { cursor } : {}) };
    const page: Record<string, unknown> = await transport.json({ ...call, query });
    yield* page[member] as T[];
    cursor = page["next_cursor"] as string | null | undefined;
  } while (cursor);
}

/** Returns all entries of a list, or all events of a stream. */
export async function collect<T>(list: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const entry of list) all.push(entry);
  return all;
}

function withQuery(path: string, query: Call["query"] = {}): string {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  if (given.length === 0) return path;
  return `${path}?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}`;
}

/** Returns the parts as a path, encoded. */
export function pathOf(base: string, ...parts: string[]): string {
  return [base, ...parts.map(encodeURIComponent)].join("/");
}

/** Returns headers with a key that makes the server carry out a request only once. */
export function idempotent(key = randomName()): { "Idempotency-Key": string } {
  return { "Idempotency-Key": key };
}

/** Returns a name that nobody else has. */
export function randomName(): string {
  // Pages without TLS have no crypto.randomUUID.
  return "ts-" +
    Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

/** Codes for the answers of a sandbox's guest about files, which have a status alone. */
const codes: Record<number, string> = {
  400: "invalid_argument",
  401: "unauthenticated",
  403: "permission_denied",
  404: "not_found",
  413: "resource_exhausted",
  507: "resource_exhausted",
};

/** The largest part of an error's body that is read, in bytes. */
const maxErrorBody = 64 << 10;

async function beginningOf(response: Response): Promise<string> {
  const decoder = new TextDecoder();
  const reader = response.body?.getReader();
  let text = "";
  while (reader && text.length < maxErrorBody) {
    const { done, value } = await reader.read();
    if (done) return text;
    text += decoder.decode(value, { stream: true });
  }
  await reader?.cancel();
  return text;
}

async function readError(response: Response): Promise<BullpenError> {
  const retryAfter = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const details = {
    status: response.status,
    trace_id: response.headers.get("X-Trace-Id") ?? undefined,
    request_id: response.headers.get("X-Request-Id") ?? undefined,
    retry_after: retryAfter >= 0 ? retryAfter : undefined,
    permanent: response.headers.get("X-Should-Retry") === "false",
  };
  const text = await beginningOf(response);
  let envelope: Record<string, unknown> = {};
  try {
    envelope = Object(JSON.parse(text));
  } catch {
    // Not an answer of bullpen's.
  }
  const { error, message, reason, type, detail, code } = envelope as Record<string, string | undefined>;
  const agentCode = type?.match(/^urn:sandbox-agent:error:(.*)/)?.[1];
  if (agentCode !== undefined) return errorOf({ ...details, code: agentCode, message: detail ?? "" });
  if (error !== undefined) return errorOf({ ...details, code: error, message: message ?? "", reason });
  if (code !== undefined && message !== undefined) {
    return new GuestError(typeof code === "string" ? code : (codes[response.status] ?? "unknown"), message);
  }
  return errorOf({ ...details, code: "", message: strange });
}
