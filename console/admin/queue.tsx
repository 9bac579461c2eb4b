import { call } from "../api/client.ts";
import type { ClassCounts, QueuedExecution } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { Meter } from "../ui/chart.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { count, duration, Empty, Facts, Failure, Name, Section, Time } from "../ui/text.tsx";

const sum = (c: ClassCounts) => c.interactive + c.background;

const columns: Column<QueuedExecution>[] = [
  { head: "Execution", cell: (e) => <code>{e.trace_id}</code> },
  { head: "Class", cell: (e) => e.class },
  { head: "Created", cell: (e) => <Time at={e.created_at} /> },
  { head: "Before it", cell: (e) => count(e.position), class: "number" },
  { head: "Starts in", cell: (e) => e.estimated_wait === null ? "unknown" : duration(e.estimated_wait * 1000), class: "number" },
  { head: "Waiting for", cell: (e) => <Name>{e.waiting_for?.message ?? "a free slot"}</Name> },
];

export function Queue() {
  const { org } = useSession();
  const { value: q, error, loading } = useLive((signal) => call("getQueue", {}, signal), [], "executions");
  return (
    <>
      <Failure of={error} />
      {q && (
        <Section title={`Your organisation, ${org}`}>
          <Meter label="Running" used={sum(q.organisation.running)} limit={q.organisation.concurrent} format={count} />
          <Meter label="Queued" used={sum(q.organisation.queued)} limit={q.organisation.max_queued} format={count} />
          <Meter label="Running with your key" used={sum(q.key.running)} limit={q.key.concurrent} format={count} />
          <Facts of={[["Interactive ones queued", count(q.organisation.queued.interactive)],
            ["Background ones queued", count(q.organisation.queued.background)]]} />
          <Table label="The execution that waits longest" columns={columns} list={{ value: q.oldest ? [q.oldest] : [], error, loading }}
            keyOf={(e) => e.trace_id} hrefOf={(e) => link(path("executions", e.trace_id))}
            empty={<Empty command="bullpen queue">Nothing of your key waits.</Empty>} />
        </Section>
      )}
    </>
  );
}
