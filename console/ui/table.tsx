import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Paged } from "../app/live.ts";
import { Failure } from "./text.tsx";

export interface Column<T> {
  head: string;
  cell: (row: T) => ComponentChildren;
  class?: string; // such as number, for right-aligned cells
}

const rowHeight = 34; // as in style.css
const overscan = 12; // rows that are rendered above and below the visible ones
const fewRows = 60; // lists of up to this many rows are rendered whole

// Table shows rows. It renders only the visible rows of a long list, and reads the next page when its end comes into
// view.
export function Table<T>({ label, columns, list, keyOf, empty, hrefOf }: {
  label: string;
  columns: Column<T>[];
  list: Pick<Paged<T>, "value" | "error" | "loading" | "more">;
  keyOf: (row: T) => string;
  empty: ComponentChildren;
  hrefOf?: (row: T) => string; // the page of a row, a link in its first cell
}) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  const rows = list.value;
  const total = rows?.length ?? 0;
  useEffect(() => {
    const at = box.current;
    if (!at) return;
    const measure = () => setView({ top: at.scrollTop, height: at.clientHeight || 800 });
    measure();
    at.addEventListener("scroll", measure, { passive: true });
    return () => at.removeEventListener("scroll", measure);
  }, [total > 0]);
  const whole = total <= fewRows;
  const from = whole ? 0 : Math.max(0, Math.floor(view.top / rowHeight) - overscan);
  const to = whole ? total : Math.min(total, Math.ceil((view.top + view.height) / rowHeight) + overscan);
  const atEnd = to === total && view.top > 0;
  useEffect(() => {
    if (atEnd && list.more) list.more();
  }, [atEnd, total]);
  if (!rows) return list.error ? <Failure of={list.error} /> : <p class="faint" aria-busy="true">Loading …</p>;
  return (
    <>
      <Failure of={list.error} />
      {total === 0 && !list.more ? empty : (
        <div class="rows" ref={box} tabIndex={0} role="group" aria-label={label}>
          <table aria-rowcount={list.more ? -1 : total + 1}>
            <thead>
              <tr>{columns.map((c) => <th scope="col" class={c.class} key={c.head}>{c.head}</th>)}</tr>
            </thead>
            <tbody>
              {from > 0 && <Space rows={from} columns={columns.length} />}
              {rows.slice(from, to).map((row, i) => (
                <tr key={keyOf(row)} aria-rowindex={from + i + 2}>
                  {columns.map((c, n) => (
                    <td class={c.class} key={c.head}>
                      {n === 0 && hrefOf ? <a href={hrefOf(row)}>{c.cell(row)}</a> : c.cell(row)}
                    </td>
                  ))}
                </tr>
              ))}
              {to < total && <Space rows={total - to} columns={columns.length} />}
            </tbody>
          </table>
          {list.more && <button class="more" onClick={list.more}>Load more</button>}
        </div>
      )}
    </>
  );
}

// Space takes the place of rows that are not rendered.
function Space({ rows, columns }: { rows: number; columns: number }) {
  return (
    <tr aria-hidden="true" class="space">
      <td colSpan={columns} style={{ height: `${rows * rowHeight}px` }} />
    </tr>
  );
}
