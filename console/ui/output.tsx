// The output of an execution, while it runs and after.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { ApiError } from "../api/client.ts";
import { address } from "../api/client.ts";
import { follow, type StreamState } from "../api/events.ts";
import type { Event, ResultEvent } from "../api/schema.ts";
import { type Span, Terminal } from "./ansi.ts";
import { Failure } from "./text.tsx";

export interface Piece {
  key: number;
  stream: "stdout" | "stderr" | "gap";
  spans: Span[];
  length: number;
}

const maxShown = 1 << 20; // characters of output that the page shows; the newest
const minLength = 32; // characters that each piece and each change of colour counts as, for its cost in the page

// OutputLog keeps the end of an output, and calls draw at most once per frame.
export class OutputLog {
  readonly pieces: Piece[] = [];
  cut = false; // whether older pieces are gone
  private length = 0;
  private added = 0;
  private frame = 0;
  private readonly terminals = new Map<string, Terminal>();

  constructor(private readonly draw: () => void) {}

  // add adds output. A piece continues the colours of its source.
  add(stream: Piece["stream"], text: string, source: string = stream) {
    const terminal = this.terminals.get(source) ?? new Terminal();
    this.terminals.set(source, terminal);
    const spans = terminal.write(text);
    const length = Math.max(text.length, minLength * (1 + spans.length));
    this.pieces.push({ key: this.added++, stream, spans, length });
    this.length += length;
    let gone = 0;
    while (this.length > maxShown && gone < this.pieces.length - 1) this.length -= this.pieces[gone++].length;
    if (gone) {
      this.pieces.splice(0, gone);
      this.cut = true;
    }
    this.frame ||= requestAnimationFrame(() => (this.frame = 0, this.draw()));
  }

  clear() {
    this.pieces.length = this.length = 0;
    this.cut = false;
    this.terminals.clear();
  }

  close = () => cancelAnimationFrame(this.frame);
}

// useLog returns a log of output, and a new one when deps change.
export function useLog(deps: unknown[]) {
  const [, draw] = useState(0);
  const log = useMemo(() => new OutputLog(() => draw((n) => n + 1)), deps);
  useEffect(() => log.close, [log]);
  return log;
}

// Output follows the events of an execution. It calls onResult with the result.
export function Output({ id, onResult }: { id: string; onResult?: (e: ResultEvent) => void }) {
  const [state, setState] = useState<StreamState>("connecting");
  const [error, setError] = useState<ApiError>();
  const [only, setOnly] = useState<"" | "stdout" | "stderr">("");
  const log = useLog([id]);
  useEffect(() => {
    const stop = new AbortController();
    follow({
      url: () => address("getOutput", { id }),
      signal: stop.signal,
      onState: (s, e) => (setState(s), setError(e)),
      onEvent: (data) => {
        if (!data) return;
        const event = JSON.parse(data) as Event;
        if (event.type === "output") {
          const e = event as { stream: "stdout" | "stderr"; data: string };
          log.add(e.stream, e.data);
        } else if (event.type === "keepalive") {
          const missing = (event as { missing?: { first: number; last: number } }).missing;
          if (missing) log.add("gap", "… output missing …\n");
        } else if (event.type === "result") {
          onResult?.(event as ResultEvent);
          return "end";
        }
      },
    });
    return () => stop.abort();
  }, [id]);
  const shown = log.pieces.filter((p) => !only || p.stream === only || p.stream === "gap");
  return (
    <div class="output">
      <div class="actions">
        <StreamSign state={state} />
        <select aria-label="Streams" value={only} onChange={(e) => setOnly(e.currentTarget.value as typeof only)}>
          <option value="">both streams</option>
          <option value="stdout">stdout</option>
          <option value="stderr">stderr</option>
        </select>
        <a href={address("getStdout", { id }).href} download={`${id}.stdout`}>stdout</a>
        <a href={address("getStderr", { id }).href} download={`${id}.stderr`}>stderr</a>
      </div>
      <Failure of={error} />
      {log.cut && <p class="faint">Only the end is shown. Download the stream for all output that was kept.</p>}
      <Log pieces={shown} ended={state === "ended"} />
    </div>
  );
}

export function StreamSign({ state }: { state: StreamState }) {
  const words = {
    connecting: "connecting",
    live: "live",
    stale: "connection lost, retrying",
    ended: "ended",
    failed: "failed",
  };
  const tone = { connecting: "wait", live: "good", stale: "bad", ended: "", failed: "bad" };
  return <span class={"status " + tone[state]} role="status">{words[state]}</span>;
}

// useEnd returns the properties of a box that scrolls to its end until the reader scrolls up.
export function useEnd<T extends HTMLElement>() {
  const ref = useRef<T>(null);
  const atEnd = useRef(true);
  useEffect(() => {
    if (atEnd.current && ref.current) ref.current.scrollTop = ref.current.scrollHeight;
  });
  const onScroll = ({ currentTarget: box }: { currentTarget: T }) => { // it may have left the page already
    atEnd.current = box.scrollHeight - box.scrollTop - box.clientHeight < 20;
  };
  return { ref, onScroll };
}

export function Log({ pieces, ended }: { pieces: Piece[]; ended: boolean }) {
  return (
    <pre class="log" {...useEnd<HTMLPreElement>()} tabIndex={0} role="log" aria-live="off" aria-label="Output">
      {pieces.length === 0 && <span class="faint">{ended ? "No output." : "No output yet."}</span>}
      {pieces.map((p) => <span key={p.key} class={p.stream}><Spans of={p.spans} /></span>)}
    </pre>
  );
}

// Spans shows terminal output.
export function Spans({ of }: { of: Span[] }) {
  return (
    <>
      {of.map((s, i) => (
        <span key={i} class={s.class} style={{ color: s.color, background: s.background }}>{s.text}</span>
      ))}
    </>
  );
}
