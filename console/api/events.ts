// Streams of server-sent events, read with fetch because EventSource hides errors.
import { ApiError, send } from "./client.ts";

export interface StreamEvent {
  id: string;
  data: string;
}

// read yields the events of one response.
export async function* read(answer: Response): AsyncGenerator<StreamEvent> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", id = "", data: string[] = [];
  try {
    for (;;) {
      const { done, value } = await withinTime(reader.read());
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop()!;
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { id, data: data.join("\n") };
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line.startsWith("id:")) id = line.slice(3).trim();
        else if (line.startsWith(":")) yield { id, data: "" }; // a keepalive
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone
  }
}

// silence is how long a stream may be silent before its connection counts as lost, in milliseconds. The server sends a
// keepalive every 10 to 15 s.
const silence = 40_000;

function withinTime<T>(p: Promise<T>): Promise<T> {
  let timer = 0;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new ApiError("the stream is silent", 0, "silent")), silence);
  });
  return Promise.race([p, late]).finally(() => clearTimeout(timer));
}

export type StreamState = "connecting" | "live" | "stale" | "ended" | "failed";

export interface Follow {
  url(last: string): URL; // with the id of the last event, or ""
  onEvent(data: string): "end" | void; // data is "" for a keepalive
  onState(state: StreamState, error?: ApiError): void;
  signal: AbortSignal;
}

// follow reads a stream until it ends. It reconnects with growing pauses. A hidden page has no connection: over
// HTTP/1.1, browsers open at most six per server, which six such pages would hold.
export async function follow({ url, onEvent, onState, signal }: Follow) {
  let last = "", failures = 0;
  onState(document.hidden ? "stale" : "connecting");
  while (!signal.aborted) {
    if (document.hidden) {
      await change(signal);
      continue;
    }
    const hidden = new AbortController();
    const hide = () => document.hidden && hidden.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const answer = await send("GET", url(last), {
        headers: { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) },
        signal: AbortSignal.any([signal, hidden.signal]),
      });
      if (answer.status === 204) return onState("ended");
      onState("live");
      for await (const event of read(answer)) {
        failures = 0;
        if (event.id) last = event.id;
        if (onEvent(event.data) === "end") return onState("ended");
      }
      failures++;
    } catch (e) {
      if (signal.aborted) return;
      if (hidden.signal.aborted) {
        onState("stale");
        continue;
      }
      const error = e instanceof ApiError ? e : undefined;
      if (error && error.status >= 400 && error.status < 500 && error.status !== 429) return onState("failed", error);
      failures++;
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    if (signal.aborted) return;
    onState("stale");
    await pause(Math.min(15_000, 250 * 2 ** failures) * (0.75 + Math.random() / 2), signal);
  }
}

// change waits until the page is shown or hidden.
function change(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", () => resolve(), { once: true, signal });
    signal.addEventListener("abort", () => resolve(), { once: true });
  });
}

export function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
