// Charts of a few series over time or categories, as SVG, with the same figures as a table for screen readers.
import { useState } from "preact/hooks";

export interface Series {
  name: string;
  values: Array<number | null>;
}

const width = 640, height = 150, left = 44, bottom = 18;

// Chart draws bars, stacked, or lines. labels are the names of the positions, such as times or days.
export function Chart({ title, labels, series, kind = "bars", format = String }: {
  title: string;
  labels: string[];
  series: Series[];
  kind?: "bars" | "lines";
  format?: (n: number) => string;
}) {
  const [table, setTable] = useState(false);
  const sums = labels.map((_, i) => series.reduce((sum, s) => sum + (s.values[i] ?? 0), 0));
  const values = kind === "bars" ? sums : series.flatMap((s) => s.values.map((v) => v ?? 0));
  const top = niceTop(Math.max(0, ...values));
  const x = (i: number) => left + (width - left) * (i / Math.max(1, labels.length));
  const y = (v: number) => (height - bottom) * (1 - v / top) + 4;
  const step = (width - left) / Math.max(1, labels.length);
  return (
    <figure class="chart">
      <figcaption>
        {title}
        {series.map((s, n) => <span class={`key s${n}`} key={s.name}>{s.name}</span>)}
        <button class="quiet" aria-expanded={table} onClick={() => setTable(!table)}>figures</button>
      </figcaption>
      <svg viewBox={`0 0 ${width} ${height + 6}`} role="img" aria-label={`${title}: highest ${format(Math.max(0, ...values))}`}>
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
                <rect class={`s${n}`} key={s.name} x={x(i) + step * 0.1} width={step * 0.8} y={y(sum)} height={y(0) - y(v)}>
                  <title>{`${label} ${s.name}: ${format(v)}`}</title>
                </rect>
              );
            });
          })
          : series.map((s, n) => <path class={`line s${n}`} key={s.name} d={line(s.values, (i) => x(i) + step / 2, y)} />)}
        {[0, Math.floor(labels.length / 2), labels.length - 1].filter((i, n, all) => i >= 0 && all.indexOf(i) === n).map((i) => (
          <text key={i} x={x(i) + step / 2} y={height + 2}
            text-anchor={labels.length > 2 && i === labels.length - 1 ? "end" : "middle"}>{labels[i]}</text>
        ))}
      </svg>
      {table && (
        <div class="rows" tabIndex={0} role="region" aria-label={`${title}, figures`}>
          <table>
            <thead><tr><th scope="col" />{series.map((s) => <th scope="col" key={s.name}>{s.name}</th>)}</tr></thead>
            <tbody>
              {labels.map((label, i) => (
                <tr key={i}>
                  <th scope="row">{label}</th>
                  {series.map((s) => <td key={s.name} class="number">{s.values[i] === null ? "–" : format(s.values[i]!)}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </figure>
  );
}

function niceTop(v: number): number {
  if (v <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(v));
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
export function Meter({ label, used, limit, format }: { label: string; used: number; limit: number | null; format: (n: number) => string }) {
  const part = limit ? Math.min(1, used / limit) : 0;
  return (
    <div class="meter">
      <span>{label}</span>
      {limit !== null && (
        <progress class={part > 0.9 ? "bad" : ""} max={1} value={part} aria-label={label} />
      )}
      <span class="number">{format(used)}{limit !== null && ` of ${format(limit)}`}</span>
    </div>
  );
}
