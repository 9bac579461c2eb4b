// Live data: the server's stream of changes reports what to read again.
import { createContext } from "preact";
import { useCallback, useContext, useEffect, useRef, useState } from "preact/hooks";
import { type Answer, ApiError, type Args, base, call } from "../api/client.ts";
import type { Calls } from "../api/schema.ts";
import { follow, type StreamState } from "../api/events.ts";

// Changes is the stream of changes of one signed-in page.
export class Changes {
  state: StreamState = "connecting";
  since = Date.now(); // when the data was last current
  private readonly listeners = new Set<(kinds: string[] | null) => void>();
  private readonly watchers = new Set<() => void>();
  private readonly stop = new AbortController();

  start() {
    follow({
      url: () => new URL("v1/changes", base),
      signal: this.stop.signal,
      onEvent: (data) => {
        if (!data) return;
        const event = JSON.parse(data) as { kinds?: string[] };
        if (event.kinds) this.emit(event.kinds);
      },
      onState: (state) => {
        const reconnected = state === "live" && this.state === "stale";
        if (this.state === "live") this.since = Date.now();
        this.state = state;
        this.watchers.forEach((f) => f());
        if (reconnected) this.emit(null); // changes in between were missed
      },
    });
  }

  close() {
    this.stop.abort();
  }

  // on calls f with the kinds of objects that have changed, or with null if any may have changed.
  on(f: (kinds: string[] | null) => void): () => void {
    this.listeners.add(f);
    return () => this.listeners.delete(f);
  }

  // watch calls f when the state changes.
  watch(f: () => void): () => void {
    this.watchers.add(f);
    return () => this.watchers.delete(f);
  }

  private emit(kinds: string[] | null) {
    this.listeners.forEach((f) => f(kinds));
  }
}

export const ChangesContext = createContext<Changes | null>(null);

export interface Loaded<T> {
  value?: T; // the last value, kept after an error
  error?: ApiError;
  loading: boolean;
  reload(): void;
}

const maxLoad = 60_000; // ms, after which a request on a dead connection fails

// useLive reads data when the page is shown, when deps change, and when objects of one of the kinds change.
export function useLive<T>(load: (signal: AbortSignal) => Promise<T>, deps: unknown[], ...kinds: string[]): Loaded<T> {
  const [state, set] = useState<{ value?: T; error?: ApiError; loading: boolean }>({ loading: true });
  const changes = useContext(ChangesContext);
  const [turn, setTurn] = useState(0);
  const key = JSON.stringify(deps);
  const shown = useRef(key);
  const reload = useCallback(() => setTurn((n) => n + 1), []);
  useEffect(() => {
    const stop = new AbortController();
    const fresh = shown.current !== key;
    shown.current = key;
    set((old) => ({ value: fresh ? undefined : old.value, error: fresh ? undefined : old.error, loading: true }));
    load(AbortSignal.any([stop.signal, AbortSignal.timeout(maxLoad)])).then(
      (value) => stop.signal.aborted || set({ value, loading: false }),
      (error) => stop.signal.aborted || set((old) => ({ value: old.value, error: asError(error), loading: false })),
    );
    return () => stop.abort();
  }, [key, turn]);
  const busy = useRef(state.loading);
  busy.current = state.loading;
  useEffect(() => {
    let timer = 0;
    const again = () => {
      timer = 0;
      if (busy.current) timer = setTimeout(again, 250);
      else reload();
    };
    const off = changes?.on((changed) => {
      if (!timer && (!changed || changed.some((kind) => kinds.includes(kind)))) timer = setTimeout(again, 250);
    });
    return () => {
      clearTimeout(timer);
      off?.();
    };
  }, [changes, kinds.join()]);
  return { ...state, reload };
}

export function asError(e: unknown): ApiError {
  return e instanceof ApiError ? e : new ApiError(e instanceof Error ? e.message : String(e), 0, "page");
}

// useTick renders every second, for components that show elapsed or remaining time.
export function useTick() {
  const [, set] = useState(0);
  useEvery(1000, () => set((n) => n + 1));
}

// usePolling reloads data at intervals. It never interrupts a read: a slow one would not finish.
export function usePolling(ms: number, ...all: Pick<Loaded<unknown>, "loading" | "reload">[]) {
  useEvery(ms, () => all.forEach((data) => data.loading || data.reload()));
}

// useEvery calls f at intervals while the page is visible.
function useEvery(ms: number, f: () => void) {
  const last = useRef(f);
  last.current = f;
  useEffect(() => {
    const timer = setInterval(() => document.hidden || last.current(), ms);
    return () => clearInterval(timer);
  }, [ms]);
}

export interface Paged<T> extends Loaded<T[]> {
  more?: () => void; // reads the next page; absent at the end
}

// usePages reads a paged list: the first page stays current, the others are read on demand.
export function usePages<T>(
  load: (cursor: string | undefined, signal: AbortSignal) => Promise<{ rows: T[]; next: string | null }>,
  keyOf: (row: T) => string,
  deps: unknown[],
  ...kinds: string[]
): Paged<T> {
  const first = useLive((signal) => load(undefined, signal), deps, ...kinds);
  const [rest, setRest] = useState<{ rows: T[]; next: string | null } | null>(null);
  const [error, setError] = useState<ApiError>();
  const key = JSON.stringify(deps);
  const reading = useRef<AbortController>(undefined);
  useEffect(() => {
    setRest(null);
    setError(undefined);
    return () => (reading.current?.abort(), reading.current = undefined);
  }, [key]);
  const next = rest ? rest.next : first.value?.next;
  const more = () => {
    if (reading.current) return;
    const { signal } = reading.current = new AbortController();
    load(next!, signal).then((page) => {
      if (signal.aborted) return;
      setRest((old) => ({ rows: [...(old?.rows ?? first.value!.rows), ...page.rows], next: page.next }));
      setError(undefined);
    }).catch((e) => signal.aborted || setError(asError(e))).finally(() =>
      signal.aborted || (reading.current = undefined)
    );
  };
  let rows = first.value?.rows;
  if (rows && rest) {
    const fresh = new Set(rows.map(keyOf));
    rows = [...rows, ...rest.rows.filter((row) => !fresh.has(keyOf(row)))];
  }
  return {
    value: rows,
    error: first.error ?? error,
    loading: first.loading,
    reload: first.reload,
    more: next ? more : undefined,
  };
}

type Row<T> = T extends Array<infer R> ? R : never;

// useList reads a list of the API in pages. field is the property of the answer that holds the rows.
export function useList<K extends keyof Calls, F extends keyof Answer<K>>(
  id: K,
  args: Args<K>,
  field: F,
  keyOf: (row: Row<Answer<K>[F]>) => string,
  ...kinds: string[]
): Paged<Row<Answer<K>[F]>> {
  const load = async (cursor: string | undefined, signal: AbortSignal) => {
    const page = await call(id, { limit: 50, ...args, cursor }, signal);
    return { rows: page[field] as Row<Answer<K>[F]>[], next: (page as { next_cursor: string | null }).next_cursor };
  };
  return usePages(load, keyOf, [id, args], ...kinds);
}
