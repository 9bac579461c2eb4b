// SVG charts of a few series, with the same figures as a table on request.
import { useEffect, useRef, useState } from "preact/hooks";
import { bytes, count, duration, Name } from "./text.tsx";

export interface Series {
  name: string;
  values: Array<number | null>;
  colour?: number; // of s0 to s5 in style.css, if not by the order
}

const height = 150, left = 56, bottom = 18; // pixels

// Chart draws stacked bars or lines. labels name the positions, such as times or days.
export function Chart({ title, labels, series, kind = "bars", format = String }: {
  title: string;
  labels: string[];
  series: Series[];
  kind?: "bars" | "lines";
  format?: (n: number) => string;
}) {
  const [table, setTable] = useState(false);
  const [width, setWidth] = useState(640);
  const at = useRef<SVGSVGElement>(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(200, Math.round(entry.contentRect.width))));
    observer.observe(at.current!);
    return () => observer.disconnect();
  }, []);
  const sums = labels.map((_, i) => series.reduce((sum, s) => sum + (s.values[i] ?? 0), 0));
  const values = kind === "bars" ? sums : series.flatMap((s) => s.values.map((v) => v ?? 0));
  const top = niceTop(Math.max(0, ...values), format === bytes ? 1024 : 1000);
  const x = (i: number) => left + (width - left) * (i / Math.max(1, labels.length));
  const y = (v: number) => (height - bottom) * (1 - v / top) + 6;
  const step = (width - left) / Math.max(1, labels.length);
  return (
    <figure class="chart">
      <figcaption>
        {title}
        {(series.length > 1 || series[0]?.name !== title) && (
          series.map((s, n) => (
            <span class={`key s${s.colour ?? n}`} key={s.name}>
              <Name>{s.name}</Name>
            </span>
          ))
        )}
        <button class="quiet" aria-expanded={table} onClick={() => setTable(!table)}>
          Figures
        </button>
      </figcaption>
      <svg ref={at} height={height + 8} role="img" aria-label={`${title}: highest ${format(Math.max(0, ...values))}`}>
        {[0, top / 2, top].map((v) => (
          <g key={v}>
            <line class="grid" x1={left} x2={width} y1={y(v)} y2={y(v)} />
            <text x={left - 4} y={y(v) + 4} text-anchor="end">{format(v)}</text>
          </g>
        ))}
        {kind === "bars"
          ? labels.map((label, i) => {
            let sum = 0;
            return series.map((s, n) => {
              const v = s.values[i] ?? 0;
              sum += v;
              return v > 0 && (
                <rect
                  class={`s${s.colour ?? n}`}
                  key={s.name}
                  x={x(i) + step * 0.1}
                  width={step * 0.8}
                  y={y(sum)}
                  height={y(0) - y(v)}>
                  <title>{`${label} ${s.name}: ${format(v)}`}</title>
                </rect>
              );
            });
          })
          : series.map((s, n) => (
            <path
              class={`line s${s.colour ?? n}`}
              key={s.name}
              d={line(s.values, (i) => x(i) + step / 2, y)} />
          ))}
        {[0, Math.floor(labels.length / 2), labels.length - 1].filter((i, n, all) => i >= 0 && all.indexOf(i) === n)
          .map((i) => (
            <text
              key={i}
              x={x(i) + step / 2}
              y={height + 4}
              text-anchor={labels.length > 2 && i === labels.length - 1 ? "end" : "middle"}>
              {labels[i]}
            </text>
          ))}
      </svg>
      {table && (
        <div class="rows" tabIndex={0} role="group" aria-label={`${title}, figures`}>
          <table>
            <thead>
              <tr>
                <th scope="col" />
                {series.map((s) => (
                  <th scope="col" key={s.name}>
                    <Name>{s.name}</Name>
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {labels.map((label, i) => (
                <tr key={i}>
                  <th scope="row">{label}</th>
                  {series.map((s) => (
                    <td key={s.name} class="number">{s.values[i] === null ? "–" : format(s.values[i]!)}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </figure>
  );
}

// niceTop returns a round number of at least v, in units that are powers of base.
function niceTop(v: number, base: number): number {
  if (v <= 0) return 1;
  const unit = base ** Math.floor(Math.log(v) / Math.log(base) + 1e-9);
  const power = unit * 10 ** Math.floor(Math.log10(v / unit) + 1e-9);
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= v)!;
}

function line(values: Array<number | null>, x: (i: number) => number, y: (v: number) => number): string {
  let path = "", pen = "M";
  for (const [i, v] of values.entries()) {
    if (v === null) pen = "M";
    else path += `${pen}${x(i).toFixed(1)} ${y(v).toFixed(1)}`, pen = "L";
  }
  return path;
}

// Meter shows how much of a limit is used.
export function Meter({ label, used, limit, format, remark }: {
  label: string;
  used: number;
  limit: number | null;
  format: (n: number) => string;
  remark?: string;
}) {
  const part = limit ? Math.min(1, used / limit) : 0;
  return (
    <div class="meter">
      <span>{label}</span>
      {limit !== null && <progress class={part > 0.9 ? "bad" : ""} max={1} value={part} aria-label={label} />}
      <span class="number">{format(used)}{limit !== null && ` of ${format(limit)}`}{remark && `, ${remark}`}</span>
    </div>
  );
}

export interface Part {
  name: string;
  value: number;
  class: string; // of a series: s0 to s5, or rest
}

// Parts shows the parts of a whole as one bar, with the figures below unless it is small.
export function Parts({ label, of, small }: { label: string; of: Part[]; small?: boolean }) {
  const total = of.reduce((sum, p) => sum + p.value, 0);
  const shown = of.filter((p) => p.value > 0);
  let at = 0;
  return (
    <div class={small ? "parts small" : "parts"}>
      <svg
        viewBox="0 0 100 1"
        preserveAspectRatio="none"
        role="img"
        aria-label={`${label}: ${shown.map((p) => `${p.value} ${p.name}`).join(", ")}`}>
        {shown.map((p) => {
          const x = at;
          at += p.value / total * 100;
          return <rect key={p.name} class={p.class} x={x} width={at - x} height={1} />;
        })}
      </svg>
      {!small && <p>{of.map((p) => <span key={p.name} class={`key ${p.class}`}>{count(p.value)} {p.name}</span>)}</p>}
    </div>
  );
}

// Span is a period of time in a waterfall, such as a step of an execution.
export interface Span {
  name: string;
  after_ms: number; // since the beginning of the whole
  duration_ms: number;
  start?: string; // a remark on the name
  within?: string | null;
  bad?: boolean;
  href?: string;
}

// Waterfall shows periods of time on one axis.
export function Waterfall({ steps, label = "Steps" }: { steps: Span[]; label?: string }) {
  const end = Math.max(...steps.map((s) => s.after_ms + s.duration_ms), 0.001);
  return (
    <div class="waterfall" role="table" aria-label={label}>
      {steps.map((s, i) => {
        const name = <Name>{`${s.within ? "· " : ""}${s.name}${s.start ? ` (${s.start})` : ""}`}</Name>;
        return (
          <div class={"row" + (s.within ? " inner" : "") + (s.bad ? " bad" : "")} role="row" key={i}>
            <span class="name" role="cell">{s.href ? <a href={s.href}>{name}</a> : name}</span>
            <div class="bar" role="cell" aria-label={`begins after ${duration(s.after_ms)}`}>
              <span style={{ left: `${s.after_ms / end * 100}%`, width: `${s.duration_ms / end * 100}%` }} />
            </div>
            <span role="cell" class="number">
              {s.duration_ms < 10 ? `${s.duration_ms.toFixed(2)} ms` : duration(s.duration_ms)}
            </span>
          </div>
        );
      })}
    </div>
  );
}
