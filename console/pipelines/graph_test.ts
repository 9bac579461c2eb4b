import assert from "node:assert/strict";
import type { PipelineCell } from "../api/schema.ts";
import { layout } from "./graph.tsx";

const cell = (step: string, needs: string[], value: string | null = null) =>
  ({ step, needs, cell: value, status: "waiting" }) as PipelineCell;

// check fails unless cards stand right of what they need, do not overlap, and lines lead from column to column.
function check(cells: PipelineCell[]) {
  const columns = layout(cells);
  const columnOf = new Map(columns.flatMap((slots, i) => slots.map((s) => [s.step, i])));
  for (const c of cells) {
    for (const need of c.needs) assert.ok(columnOf.get(need)! < columnOf.get(c.step)!, `${need} before ${c.step}`);
  }
  for (const [i, slots] of columns.entries()) {
    let end = -1;
    for (const slot of slots) {
      assert.ok(slot.y > end, `${slot.step} overlaps`);
      end = slot.y + slot.height;
      for (const from of slot.from) assert.equal(from.column, i - 1);
    }
  }
  assert.deepEqual([...new Set(columns.flat().flatMap((s) => s.cells))].length, cells.length);
  return columns;
}

Deno.test("steps stand right of what they need, and lines pass the columns between", () => {
  const columns = check([
    cell("build", []),
    cell("docs", []),
    cell("test", ["build"], "a=1"),
    cell("test", ["build"], "a=2"),
    cell("deploy", ["test"]),
    cell("summary", ["deploy", "docs", "build"]),
  ]);
  assert.deepEqual(columns.map((slots) => slots.flatMap((s) => s.step ?? [])), [
    ["build", "docs"],
    ["test"],
    ["deploy"],
    ["summary"],
  ]);
});

Deno.test("a chain, steps without needs, and the largest pipeline have a graph", () => {
  const names = Array.from({ length: 64 }, (_, i) => `s${i}`);
  check(names.map((name, i) => cell(name, i ? [names[i - 1]] : [])));
  check(names.map((name) => cell(name, [])));
  check(names.flatMap((name, i) => [1, 2, 3, 4].map((n) => cell(name, names.slice(0, i), `n=${n}`))));
});
