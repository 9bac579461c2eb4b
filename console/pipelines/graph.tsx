// The graph of a run: a card for each step with its cells, in columns by dependency, and lines between cards.
import type { PipelineCell } from "../api/schema.ts";
import { link } from "../app/router.ts";
import { Name, Status } from "../ui/text.tsx";
import { Took } from "./list.tsx";

// Slot is a card, or a place where a line crosses a column.
interface Slot {
  step?: string;
  cells: PipelineCell[];
  from: Slot[];
  column: number;
  height: number;
  y: number;
}

const width = 232, gap = 36, between = 16, head = 28, row = 30; // pixels

const middle = (s: Slot) => s.y + s.height / 2;
const left = (s: Slot) => s.column * (width + gap);

// layout arranges the steps in columns. A step is to the right of all steps that it needs.
export function layout(cells: PipelineCell[]): Slot[][] {
  const cards = new Map<string, Slot>(); // in the order of the file
  for (const cell of cells) {
    const card = cards.get(cell.step);
    if (card) card.cells.push(cell);
    else cards.set(cell.step, { step: cell.step, cells: [cell], from: [], column: -1, height: 0, y: 0 });
  }
  const columnOf = (card: Slot): number => {
    if (card.column < 0) card.column = Math.max(0, ...needs(card).map((need) => columnOf(need) + 1));
    return card.column;
  };
  const needs = (card: Slot) => card.cells[0].needs.flatMap((step) => cards.get(step) ?? []);
  const columns: Slot[][] = [];
  for (const card of cards.values()) {
    card.height = (card.cells[0].cell === null ? 0 : head) + row * card.cells.length;
    (columns[columnOf(card)] ??= []).push(card);
  }
  const passing = new Map<string, Slot>();
  for (const card of cards.values()) {
    for (const need of needs(card)) {
      let from = need;
      for (let column = need.column + 1; column < card.column; column++) {
        const key = `${need.step} ${column}`;
        let slot = passing.get(key);
        if (!slot) {
          passing.set(key, slot = { cells: [], from: [from], column, height: 4, y: 0 });
          columns[column].push(slot);
        }
        from = slot;
      }
      card.from.push(from);
    }
  }
  for (const column of columns) {
    const wanted = (s: Slot) => s.from.length ? s.from.reduce((sum, f) => sum + middle(f), 0) / s.from.length : 0;
    column.sort((a, b) => wanted(a) - wanted(b)); // stable: the order of the file decides between equals
    let y = 0;
    for (const slot of column) {
      slot.y = Math.max(y, wanted(slot) - slot.height / 2);
      y = slot.y + slot.height + between;
    }
  }
  return columns;
}

// values returns the values of a cell such as python=3.12,os=linux without their names.
const values = (cell: string) => cell.split(",").map((v) => v.slice(v.indexOf("=") + 1)).join(", ");

export const keyOf = (c: PipelineCell) => c.cell === null ? c.step : `${c.step} ${c.cell}`;

export function Graph({ id, cells, chosen }: { id: string; cells: PipelineCell[]; chosen?: PipelineCell }) {
  const columns = layout(cells);
  const slots = columns.flat();
  const size = { width: columns.length * (width + gap) - gap, height: Math.max(...slots.map((s) => s.y + s.height)) };
  return (
    <div class="graph" role="group" aria-label="Steps" tabIndex={0}>
      <div style={{ width: `${size.width}px`, height: `${size.height}px` }}>
        <svg width={size.width} height={size.height} aria-hidden="true">
          {slots.flatMap((slot) => slot.from.map((from, i) => <path key={i} d={curve(from, slot)} />))}
        </svg>
        {slots.map((s) =>
          s.step !== undefined && (
            <div
              class="card"
              key={s.step}
              role="group"
              aria-label={s.step}
              style={{ left: `${left(s)}px`, top: `${s.y}px`, width: `${width}px`, height: `${s.height}px` }}>
              {s.cells[0].cell !== null && <strong>{s.step}</strong>}
              {s.cells.map((c) => (
                <a
                  key={c.cell}
                  href={link(`/pipelines/${id}`, { cell: keyOf(c) })}
                  aria-current={c === chosen ? "true" : undefined}
                  title={keyOf(c)}>
                  <span class="name">
                    <Name>{c.cell ? values(c.cell) : c.step}</Name>
                  </span>{" "}
                  <Status of={c.status} />
                  {c.started_at && (
                    <span class="faint">
                      <Took from={c.started_at} to={c.ended_at} />
                    </span>
                  )}
                </a>
              ))}
            </div>
          )
        )}
      </div>
    </div>
  );
}

// curve returns the line from a slot to one in the next column, and through it if it is not a card.
function curve(from: Slot, to: Slot): string {
  const x = left(from) + width, y = middle(from), end = left(to);
  return `M${x} ${y}C${x + gap / 2} ${y} ${end - gap / 2} ${middle(to)} ${end} ${middle(to)}` +
    (to.step === undefined ? `h${width}` : "");
}
