import { call } from "../api/client.ts";
import type { ClassCounts, OrgQueue, QueuedExecution } from "../api/schema.ts";
import { useLive, usePolling } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { type Column, Table } from "../ui/table.tsx";
import { count, duration, Empty, Facts, Failure, Name, Section, Time } from "../ui/text.tsx";

const refresh = 5000; // ms; the stream of changes reports only the caller's organisation

const wait = (seconds: number | null) => seconds === null ? "unknown" : duration(seconds * 1000);
const sum = (c: ClassCounts) => c.interactive + c.background;

const columns: Column<QueuedExecution>[] = [
  { head: "Execution", cell: (e) => <code>{e.trace_id}</code> },
  { head: "Class", cell: (e) => e.class },
  { head: "Created", cell: (e) => <Time at={e.created_at} /> },
  { head: "Ahead", cell: (e) => count(e.position), class: "number" },
  { head: "Starts in", cell: (e) => wait(e.estimated_wait), class: "number" },
  { head: "Waiting for", cell: (e) => <Name>{e.waiting_for?.message ?? "a free slot"}</Name> },
];

const ofOrgs: Column<OrgQueue>[] = [
  { head: "Organisation", cell: (q) => q.org },
  { head: "Queued", cell: (q) => classes(q.queued), class: "number" },
  { head: "Queue limit", cell: (q) => q.max_queued === null ? "no limit" : count(q.max_queued), class: "number" },
  { head: "Running", cell: (q) => classes(q.running), class: "number" },
  { head: "Concurrency limit", cell: (q) => q.concurrent === null ? "no limit" : count(q.concurrent), class: "number" },
];

const of = (n: number, limit: number | null) => limit === null ? count(n) : `${count(n)} of ${count(limit)}`;
const classes = (c: ClassCounts) => `${count(sum(c))}${c.interactive ? ` (${count(c.interactive)} interactive)` : ""}`;

// Queues shows the queues of all organisations, the longest first.
function Queues() {
  const list = useLive(
    async (signal) => {
      const { orgs } = await call("getOrgQueues", {}, signal);
      return orgs.toSorted((a, b) => sum(b.queued) - sum(a.queued) || sum(b.running) - sum(a.running));
    },
    [],
    "executions",
  );
  usePolling(refresh, list);
  return (
    <Section title="By organisation">
      <Table
        label="Queues of organisations"
        columns={ofOrgs}
        list={list}
        keyOf={(q) => q.org}
        hrefOf={(q) => link(path("admin", "orgs", q.org))}
        empty={<Empty command="bullpen top">Nothing is queued or running.</Empty>} />
    </Section>
  );
}

export function Queue() {
  const { org, global } = useSession();
  const { value: q, error, loading } = useLive((signal) => call("getQueue", {}, signal), [], "executions");
  return (
    <>
      {global && <Queues />}
      <Failure of={error} />
      {q && (
        <Section title={`Your organisation, ${org}`}>
          <Facts
            of={[
              ["Running", of(sum(q.organisation.running), q.organisation.concurrent)],
              ["Queued", of(sum(q.organisation.queued), q.organisation.max_queued)],
              ["Running with your key", of(sum(q.key.running), q.key.concurrent)],
              ["Queued with your key", count(sum(q.key.queued))],
            ]} />
          <p class="faint">The execution of your key that has waited longest:</p>
          <Table
            label="The execution that waits longest"
            columns={columns}
            list={{ value: q.oldest ? [q.oldest] : [], error, loading }}
            keyOf={(e) => e.trace_id}
            hrefOf={(e) => link(path("executions", e.trace_id))}
            empty={<Empty command="bullpen queue">Nothing is queued.</Empty>} />
        </Section>
      )}
    </>
  );
}
