import type { Batch, BatchCounts } from "../api/schema.ts";
import { useList } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { type Part, Parts } from "../ui/chart.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { count, duration, Empty, Pairs, Status, Time } from "../ui/text.tsx";

// partsOf returns the numbers of a batch's items by status.
export function partsOf(c: BatchCounts): Part[] {
  return [
    { name: "succeeded", value: c.succeeded, class: "s2" },
    { name: "failed", value: c.failed, class: "s4" },
    { name: "cancelled", value: c.cancelled, class: "s5" },
    { name: "running", value: c.running, class: "s0" },
    { name: "queued", value: c.queued, class: "s1" },
    { name: "waiting", value: c.waiting, class: "rest" },
  ];
}

export const ended = (c: BatchCounts) => c.succeeded + c.failed + c.cancelled;

const columns: Column<Batch>[] = [
  { head: "Batch", cell: (b) => <code>{b.id}</code> },
  { head: "Status", cell: (b) => <Status of={b.status} /> },
  { head: "Progress", cell: (b) => <Parts small label="Items" of={partsOf(b.counts)} /> },
  { head: "Ended", cell: (b) => `${count(ended(b.counts))} of ${count(b.counts.total)}`, class: "number" },
  { head: "Failed", cell: (b) => count(b.counts.failed), class: "number" },
  { head: "Time left", cell: (b) => b.time_left === null ? "–" : duration(b.time_left * 1000), class: "number" },
  { head: "Created", cell: (b) => <Time at={b.created_at} /> },
  { head: "Metadata", cell: (b) => <Pairs of={b.metadata} /> },
];

export function Batches() {
  const list = useList("listBatches", {}, "batches", (b) => b.id, "batches");
  return (
    <>
      {useMay("execute") && (
        <div class="actions">
          <a class="button" href="#/batches/new">Create batch</a>
        </div>
      )}
      <Table
        label="Batches"
        columns={columns}
        list={list}
        keyOf={(b) => b.id}
        hrefOf={(b) => link(path("batches", b.id))}
        empty={
          <Empty command="bullpen batch run items.jsonl --program greet.py">
            No batches yet. A batch is up to 100,000 executions in one request.
          </Empty>
        } />
    </>
  );
}
