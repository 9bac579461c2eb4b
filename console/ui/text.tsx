// Small parts that show values.
import type { ComponentChildren } from "preact";
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { ApiError } from "../api/client.ts";

// visible escapes characters that are invisible or change the text around them: controls, bidirectional formatting,
// fillers and tags. Names and output come from untrusted programs.
export function visible(text: string): string {
  return text.replace(hidden, (c) => `\\u${c.codePointAt(0)!.toString(16).padStart(4, "0")}`);
}

const hidden = new RegExp(
  "[\\0-\\x08\\v-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ufff9-\\ufffb" + // controls
    "\\u061c\\u200b-\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff" + // directions and what has no width
    "\\xad\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u3164\\uffa0\\u{e0000}-\\u{e0fff}]", // fillers and tags
  "gu",
);

// Name shows untrusted text in a line.
export function Name({ children }: { children: string | null | undefined }) {
  return <bdi>{visible(children ?? "")}</bdi>;
}

export const Zone = createContext<"local" | "utc">("local");

export function formatTime(at: string | number | Date, zone: "local" | "utc"): string {
  const time = new Date(at);
  if (zone === "utc") return time.toISOString().slice(0, 19).replace("T", " ") + "Z";
  const two = (n: number) => String(n).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ` +
    `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
}

// Time shows a time in the zone of the reader's choice, and in the other on hover.
export function Time({ at }: { at: string | null | undefined }) {
  const zone = useContext(Zone);
  if (!at) return <span class="faint">–</span>;
  return <time dateTime={at} title={formatTime(at, zone === "utc" ? "local" : "utc")}>{formatTime(at, zone)}</time>;
}

export function duration(ms: number | null | undefined): string {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.round(ms / 1000) % 60} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor(minutes / 60) % 24} h`;
}

export function bytes(n: number | string | null | undefined): string {
  if (n === null || n === undefined) return "–";
  if (typeof n === "string") return n; // the API writes sizes of settings with their unit
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return `${unit && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

export const count = (n: number) => n.toLocaleString("en");

const tones: Record<string, string> = {
  success: "good",
  succeeded: "good",
  delivered: "good",
  completed: "good",
  started: "good",
  active: "good",
  ready: "good",
  intact: "good",
  running: "busy",
  starting: "busy",
  failed: "bad",
  timeout: "bad",
  oom: "bad",
  seccomp: "bad",
  blocked: "bad",
  error: "bad",
  unhealthy: "bad",
  missed: "bad",
  deleting: "bad",
  revoked: "bad",
  expired: "bad",
  disabled: "bad",
  broken: "bad",
  failing: "wait",
  suspended: "wait",
  unknown: "wait",
  queued: "wait",
  waiting: "wait",
  pending: "wait",
  paused: "wait",
  stopping: "wait",
  cancelling: "wait",
  draining: "wait",
};

// Status shows a status as a word and a coloured sign.
export function Status({ of }: { of: string | null | undefined }) {
  return of ? <span class={"status " + (tones[of] ?? "")}>{of}</span> : <span class="faint">–</span>;
}

// Facts lists names and values. It omits undefined values.
export function Facts({ of }: { of: Array<[name: string, value: ComponentChildren]> }) {
  return (
    <dl class="facts">
      {of.filter(([, value]) => value !== undefined).map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value === null || value === "" ? <span class="faint">–</span> : value}</dd>
        </div>
      ))}
    </dl>
  );
}

// Problem shows what is wrong with an object, if anything is.
export function Problem({ of }: { of: string | null | undefined }) {
  if (!of) return null;
  return (
    <p class="failure">
      <Name>{of}</Name>
    </p>
  );
}

// Failure shows the error of a request.
export function Failure({ of }: { of?: ApiError }) {
  return of
    ? (
      <p class="failure" role="alert">
        <Name>{of.message}</Name>
      </p>
    )
    : null;
}

// Empty is the empty state of a list, with a command that creates an object.
export function Empty({ children, command }: { children: ComponentChildren; command?: string }) {
  return (
    <div class="empty">
      <p>{children}</p>
      {command && <pre><code>{command}</code></pre>}
    </div>
  );
}

export function JSONText({ of }: { of: unknown }) {
  return <pre class="json" tabIndex={0}>{visible(jsonText(of))}</pre>;
}

const maxIndented = 32; // levels up to which JSON is indented: the indentation grows with the square of the depth

export function jsonText(value: unknown): string {
  try {
    return JSON.stringify(value, null, isDeeper(value, maxIndented) ? 0 : 2) ?? "";
  } catch {
    return "Nested too deeply to show.";
  }
}

function isDeeper(value: unknown, levels: number): boolean {
  return typeof value === "object" && value !== null &&
    (levels === 0 || Object.values(value).some((v) => isDeeper(v, levels - 1)));
}

// Section is a part of a page with a heading.
export function Section({ title, actions, children }: {
  title: string;
  actions?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <section aria-label={visible(title)}>
      <header>
        <h2>
          <Name>{title}</Name>
        </h2>
        {actions && <div class="actions">{actions}</div>}
      </header>
      {children}
    </section>
  );
}

// Pairs shows names and values of a map, such as metadata.
export function Pairs({ of }: { of: Record<string, unknown> | null | undefined }) {
  const list = Object.entries(of ?? {});
  if (!list.length) return <span class="faint">–</span>;
  return (
    <>
      {list.map(([name, value]) => (
        <span class="pair" key={name}>
          <Name>{`${name}=${value}`}</Name>
        </span>
      ))}
    </>
  );
}
