// Calls of the guest of a sandbox: the Connect protocol with JSON.
import { address, ApiError, call, send } from "../api/client.ts";

const unary = (id: string, name: string, body: unknown, signal?: AbortSignal) => {
  const [service, method] = name.split("/");
  return call("callGuest", { id, service, method, body }, signal) as Promise<never>;
};

export interface Process {
  pid: number;
  config?: { cmd?: string; args?: string[]; cwd?: string };
}

// ProcessEvent is an event of a process. Output is base64.
export interface ProcessEvent {
  start?: { pid: number };
  data?: { stdout?: string; stderr?: string; pty?: string; seq?: string };
  end?: { exitCode?: number; exited?: boolean; status?: string; error?: string };
  gap?: { last?: string };
}

export async function processes(id: string, signal?: AbortSignal): Promise<Process[]> {
  return (await unary(id, "process.Process/List", {}, signal) as { processes?: Process[] }).processes ?? [];
}

export const sendSignal = (id: string, pid: number, signal: "SIGNAL_SIGTERM" | "SIGNAL_SIGKILL") =>
  unary(id, "process.Process/SendSignal", { process: { pid }, signal });

// start starts a command in the background and returns its process id.
export async function start(id: string, user: string, command: string): Promise<number> {
  const stop = new AbortController();
  const process = { cmd: "/bin/sh", args: ["-c", command] };
  try {
    for await (const e of stream(id, "Start", { process, stdin: false, numbered: true }, stop.signal, user)) {
      if (e.start) return e.start.pid;
    }
  } finally {
    stop.abort();
  }
  throw new ApiError("the guest did not say which process it started", 0, "guest");
}

// output streams the events of a process after a sequence number.
export const output = (id: string, pid: number, after: string, signal: AbortSignal) =>
  stream(id, "Connect", { process: { pid }, afterSeq: after }, signal);

// stream calls a method that streams the events of a process.
async function* stream(
  id: string,
  method: string,
  message: unknown,
  signal: AbortSignal,
  user = "",
): AsyncGenerator<ProcessEvent> {
  const text = new TextEncoder().encode(JSON.stringify(message));
  const body = new Uint8Array(5 + text.length);
  new DataView(body.buffer).setUint32(1, text.length);
  body.set(text, 5);
  const headers = new Headers({ "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1" });
  if (user) headers.set("Bullpen-User", user);
  const url = address("callGuest", { id, service: "process.Process", method });
  const answer = await send("POST", url, { body, headers, signal });
  for await (const { last, message } of messages(answer.body!)) {
    if (!last) yield message.event as ProcessEvent;
    else if (message.error) throw new ApiError(message.error.message ?? message.error.code, 400, message.error.code);
    else return;
  }
}

interface Message {
  last: boolean; // it ends the stream
  message: { event?: ProcessEvent; error?: { code: string; message?: string } };
}

const maxMessage = 4 << 20; // bytes

// messages decodes a stream. Each message has a header of one byte of flags and four of length.
export async function* messages(body: ReadableStream<Uint8Array>): AsyncGenerator<Message> {
  const reader = body.getReader();
  let rest = new Uint8Array(0);
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const all = new Uint8Array(rest.length + value.length);
      all.set(rest);
      all.set(value, rest.length);
      rest = all;
      while (rest.length >= 5) {
        const length = new DataView(rest.buffer, rest.byteOffset).getUint32(1);
        if (length > maxMessage) throw new ApiError("the guest sent a message that is too long", 400, "guest");
        if (rest.length < 5 + length) break;
        const text = new TextDecoder().decode(rest.subarray(5, 5 + length));
        yield { last: (rest[0] & 2) !== 0, message: JSON.parse(text) };
        rest = rest.subarray(5 + length);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone
  }
}

interface GuestEntry {
  name: string;
  path: string;
  type?: string;
  size?: string;
  modifiedTime?: string;
  isSymlink?: boolean;
}

// entry describes a file or a directory. It describes a link by its target.
function entry(e: GuestEntry) {
  const type = e.type === "FILE_TYPE_FILE"
    ? "file"
    : e.type === "FILE_TYPE_DIRECTORY"
    ? "directory"
    : e.isSymlink
    ? "link"
    : "special";
  return { name: e.name, path: e.path, type, size: Number(e.size ?? 0), modified: e.modifiedTime } as const;
}

const filesystem = <T>(id: string, method: string, body: unknown, signal?: AbortSignal): Promise<T> =>
  unary(id, "filesystem.Filesystem/" + method, body, signal);

export async function list(id: string, path: string, signal: AbortSignal) {
  const at = entry((await filesystem<{ entry: GuestEntry }>(id, "Stat", { path }, signal)).entry);
  if (at.type !== "directory") return [{ ...at, path }];
  const { entries } = await filesystem<{ entries?: GuestEntry[] }>(id, "ListDir", { path, depth: 1 }, signal);
  return (entries ?? []).map(entry);
}

export const remove = (id: string, path: string) => filesystem(id, "Remove", { path });
export const move = (id: string, source: string, destination: string) =>
  filesystem(id, "Move", { source, destination });

// file returns the address of a file's content.
export function file(id: string, path: string): URL {
  const url = address("readGuest", { id, name: "files" });
  url.searchParams.set("path", path);
  return url;
}
