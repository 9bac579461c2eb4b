// The output of an execution, while it runs and after.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { ApiError } from "../api/client.ts";
import { address } from "../api/client.ts";
import { follow, type StreamState } from "../api/events.ts";
import type { Event, ResultEvent } from "../api/schema.ts";
import { type Span, Terminal } from "./ansi.ts";
import { Failure } from "./text.tsx";

interface Piece {
  stream: "stdout" | "stderr" | "gap";
  spans: Span[];
  length: number;
}

const maxShown = 1 << 20; // characters of output that the page shows; the newest

// Output follows the events of an execution. It calls onResult with the last one.
export function Output({ id, onResult }: { id: string; onResult?: (e: ResultEvent) => void }) {
  const [state, setState] = useState<StreamState>("connecting");
  const [error, setError] = useState<ApiError>();
  const [, draw] = useState(0);
  const [only, setOnly] = useState<"" | "stdout" | "stderr">("");
  const log = useMemo(() => ({ pieces: [] as Piece[], length: 0, cut: false }), [id]);
  useEffect(() => {
    const terminals = { stdout: new Terminal(), stderr: new Terminal() };
    const stop = new AbortController();
    let frame = 0;
    const add = (piece: Piece) => {
      log.pieces.push(piece);
      log.length += piece.length;
      while (log.length > maxShown && log.pieces.length > 1) {
        log.length -= log.pieces.shift()!.length;
        log.cut = true;
      }
      frame ||= requestAnimationFrame(() => (frame = 0, draw((n) => n + 1)));
    };
    follow({
      url: () => address("getOutput", { id }),
      signal: stop.signal,
      onState: (s, e) => (setState(s), setError(e)),
      onEvent: (data) => {
        if (!data) return;
        const event = JSON.parse(data) as Event;
        if (event.type === "output") {
          const e = event as { stream: "stdout" | "stderr"; data: string };
          add({ stream: e.stream, spans: terminals[e.stream].write(e.data), length: e.data.length });
        } else if (event.type === "keepalive") {
          const missing = (event as { missing?: { first: number; last: number } }).missing;
          if (missing) add({ stream: "gap", spans: [{ class: "", text: `… output is missing here …\n` }], length: 0 });
        } else if (event.type === "result") {
          onResult?.(event as ResultEvent);
          return "end";
        }
      },
    });
    return () => (stop.abort(), cancelAnimationFrame(frame));
  }, [id]);
  const shown = log.pieces.filter((p) => !only || p.stream === only);
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
      {log.cut && <p class="faint">Only the end is shown here; download the stream for all that is kept.</p>}
      <Log pieces={shown} ended={state === "ended"} />
    </div>
  );
}

export function StreamSign({ state }: { state: StreamState }) {
  const words = { connecting: "connecting", live: "live", stale: "connection lost, trying again", ended: "ended", failed: "failed" };
  const tone = { connecting: "wait", live: "good", stale: "bad", ended: "", failed: "bad" };
  return <span class={"status " + tone[state]} role="status">{words[state]}</span>;
}

// Log keeps its end in view until the reader scrolls up.
function Log({ pieces, ended }: { pieces: Piece[]; ended: boolean }) {
  const at = useRef<HTMLPreElement>(null);
  const atEnd = useRef(true);
  useEffect(() => {
    if (atEnd.current && at.current) at.current.scrollTop = at.current.scrollHeight;
  });
  return (
    <pre class="log" ref={at} tabIndex={0} role="log" aria-live="off" aria-label="Output"
      onScroll={(e) => {
        const box = e.currentTarget;
        atEnd.current = box.scrollHeight - box.scrollTop - box.clientHeight < 20;
      }}>
      {pieces.length === 0 && <span class="faint">{ended ? "It printed nothing." : "Nothing yet."}</span>}
      {pieces.map((p, i) => <span key={i} class={p.stream}><Spans of={p.spans} /></span>)}
    </pre>
  );
}

// Spans shows text of a terminal.
export function Spans({ of }: { of: Span[] }) {
  return <>{of.map((s, i) => <span key={i} class={s.class} style={{ color: s.color, background: s.background }}>{s.text}</span>)}</>;
}
