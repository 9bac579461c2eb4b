import { useEffect } from "preact/hooks";
import { address, call } from "../api/client.ts";
import type { Batch as Whole } from "../api/schema.ts";
import { useLive, usePages } from "../app/live.ts";
import { link, navigate, path, useParam } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { ExecutionTable } from "../executions/list.tsx";
import { Action } from "../ui/action.tsx";
import { Parts } from "../ui/chart.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { count, duration, Empty, Facts, Failure, Name, Pairs, Problem, Section, Status, Time } from "../ui/text.tsx";
import { ended, partsOf } from "./list.tsx";
import { findResults, type Row } from "./results.ts";

const over = (b: Whole) => ["completed", "cancelled", "failed"].includes(b.status);

export function Batch({ args: { id } }: { args: Record<string, string> }) {
  const { value: b, error, reload } = useLive((signal) => call("getBatch", { id }, signal), [id], "batches");
  const mayExecute = useMay("execute");
  if (!b) return <Failure of={error} />;
  const c = b.counts;
  return (
    <>
      <div class="actions">
        <code>{id}</code> <Status of={b.status} />
        {mayExecute && <Actions b={b} reload={reload} />}
        <a class="button" href={address("getBatchResults", { id }).href} download={`${id}.jsonl`}>
          Download results
        </a>
      </div>
      <Failure of={error} />
      <Problem of={b.reason} />
      <Problem of={b.waiting_for?.message} />
      <Section title={`${count(ended(c))} of ${count(c.total)} items have ended`}>
        <Parts label="Items" of={partsOf(c)} />
      </Section>
      <Facts
        of={[
          ["Rate", over(b) ? undefined : `${b.rate} per second`],
          ["Time left", over(b) ? undefined : b.time_left === null ? "unknown" : duration(b.time_left * 1000)],
          ["Created", <Time at={b.created_at} />],
          ["Started", <Time at={b.started_at} />],
          ["Ended", b.completed_at ? <Time at={b.completed_at} /> : undefined],
          [
            "Took",
            b.started_at && b.completed_at
              ? duration(Date.parse(b.completed_at) - Date.parse(b.started_at))
              : undefined,
          ],
          ["Retries", b.retries || undefined],
          ["Priority", b.priority || undefined],
          ["In parallel", b.max_parallel ?? "as many as the plan allows"],
          ["After a failure", b.stop_on_failure ? "stop" : "continue"],
          ["Metadata", <Pairs of={b.metadata} />],
          ["Key", <code>{b.key_id}</code>],
          ["Webhook", b.webhook_url ? <Name>{b.webhook_url}</Name> : undefined],
          ["Delivery", b.webhook_delivery_status ? <Status of={b.webhook_delivery_status} /> : undefined],
        ]} />
      <Results b={b} />
      <Section title="Executions">
        <ExecutionTable filter={{ batch: id }} empty="No item has been submitted yet." />
      </Section>
    </>
  );
}

function Actions({ b, reload }: { b: Whole; reload: () => void }) {
  const { id, status, counts } = b;
  if (!over(b)) {
    return (
      <>
        {status === "paused" && <Action run={() => call("resumeBatch", { id }).then(reload)}>Resume</Action>}
        {(status === "running" || status === "queued") && (
          <Action run={() => call("pauseBatch", { id }).then(reload)}>Pause</Action>
        )}
        {status !== "stopping" && (
          <Action
            danger
            confirm="Cancel all items that have not ended?"
            run={() => call("cancelBatch", { id }).then(reload)}>
            Cancel
          </Action>
        )}
      </>
    );
  }
  const retry = (cancelled: boolean) => call("retryBatch", { id, body: { cancelled } }).then(reload);
  return (
    <>
      {counts.failed > 0 && <Action run={() => retry(false)} done="Retrying the failed items.">Retry failed</Action>}
      {counts.cancelled > 0 && (
        <Action run={() => retry(true)} done="Retrying the items.">
          {counts.failed > 0 ? "Retry failed and cancelled" : "Retry cancelled"}
        </Action>
      )}
      <Action
        danger
        confirm="Delete this batch? The records of its executions are kept."
        run={() => call("deleteBatch", { id }).then(() => navigate("/batches"))}
        done="Batch deleted.">
        Delete
      </Action>
    </>
  );
}

const columns: Column<Row>[] = [
  {
    head: "Item",
    cell: (r) => r.trace_id ? <a href={link(path("executions", r.trace_id))}>{r.index}</a> : r.index,
    class: "number",
  },
  { head: "Status", cell: (r) => <Status of={r.status} /> },
  { head: "Exit code", cell: (r) => r.exit_code ?? "–", class: "number" },
  { head: "Ran", cell: (r) => duration(r.duration_ms), class: "number" },
  {
    head: "Error",
    cell: (r) => (
      <span class="mono">
        <Name>{r.error}</Name>
      </span>
    ),
  },
  { head: "Metadata", cell: (r) => <Pairs of={r.metadata} /> },
];

const selections: Record<string, (status: string) => boolean> = {
  failed: (s) => s !== "success" && s !== "cancelled",
  cancelled: (s) => s === "cancelled",
  all: () => true,
};

// Results lists the items that have ended, by default the failed ones.
function Results({ b }: { b: Whole }) {
  const [show, setShow] = useParam("show", "failed");
  const want = selections[show] ?? selections.all;
  const list = usePages((cursor, signal) => findResults(b.id, cursor, want, signal), (r) => String(r.index), [
    b.id,
    show,
    b.retries,
  ]);
  const changed = show === "failed" ? b.counts.failed : ended(b.counts);
  useEffect(() => {
    if (list.value && !list.more) list.reload();
  }, [changed]);
  return (
    <Section
      title="Results"
      actions={
        <select
          aria-label="Results of"
          value={show}
          onChange={(e) => setShow(e.currentTarget.value)}>
          <option value="failed">failed items</option>
          <option value="cancelled">cancelled items</option>
          <option value="all">all items that have ended</option>
        </select>
      }>
      <Table
        label="Results"
        columns={columns}
        list={list}
        keyOf={(r) => String(r.index)}
        empty={
          <Empty>
            {over(b) ? "No such items." : "No such items have ended yet."}
          </Empty>
        } />
    </Section>
  );
}
