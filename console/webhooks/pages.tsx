import { useState } from "preact/hooks";
import { call } from "../api/client.ts";
import type { Delivery, Endpoint, ListedDelivery } from "../api/schema.ts";
import { useList, useLive, usePolling } from "../app/live.ts";
import { link, type Page, path, useParam } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { Action } from "../ui/action.tsx";
import { TimeField } from "../ui/form.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { count, Empty, Name, Section, Status, Time } from "../ui/text.tsx";
import { Delivery as Details } from "./delivery.tsx";
import { Settings } from "./settings.tsx";

function Webhooks() {
  const [key] = useParam("key");
  return (
    <>
      <Settings key={key} of={key || undefined} />
      <Endpoints />
      <Deliveries />
    </>
  );
}

function Endpoints() {
  const list = useLive(async (signal) => (await call("listEndpoints", {}, signal)).endpoints, [], "executions");
  usePolling(15_000, list);
  const mayExecute = useMay("execute");
  const columns: Column<Endpoint>[] = [
    { head: "URL", cell: (e) => <Name>{e.url}</Name> },
    { head: "Status", cell: (e) => <Status of={e.disabled_at ? "disabled" : "failing"} /> },
    { head: "Failing since", cell: (e) => <Time at={e.failing_since} /> },
    { head: "Disabled", cell: (e) => <Time at={e.disabled_at} /> },
    { head: "Reason", cell: (e) => <Name>{e.reason ?? "–"}</Name> },
    {
      head: "Action",
      class: "acts",
      cell: (e) =>
        mayExecute && e.disabled_at && (
          <Action run={() => call("enableEndpoint", { body: { url: e.url } }).then(list.reload)}>Enable</Action>
        ),
    },
  ];
  return (
    <Section title="Failing endpoints">
      <Table
        label="Failing endpoints"
        columns={columns}
        list={list}
        keyOf={(e) => e.url}
        empty={<Empty command="bullpen webhook endpoints">No endpoint is failing.</Empty>} />
    </Section>
  );
}

const columns: Column<ListedDelivery>[] = [
  {
    head: "Webhook",
    cell: (d) =>
      d.event
        ? (
          <>
            <code>{d.webhook_id}</code> <Name>{d.event}</Name>
          </>
        )
        : (
          <a href={link(path("webhooks", d.trace_id))}>
            <code>{d.webhook_id}</code>
          </a>
        ),
  },
  { head: "Status", cell: (d) => <Status of={d.status} /> },
  { head: "URL", cell: (d) => <Name>{d.url}</Name> },
  { head: "Attempts", cell: (d) => d.attempts_made, class: "number" },
  { head: "Last response", cell: (d) => <Name>{String(d.last_status ?? d.last_error ?? "–")}</Name> },
  { head: "Last attempt", cell: (d) => <Time at={d.last_attempt_at} /> },
  { head: "Next attempt", cell: (d) => <Time at={d.next_at} /> },
  { head: "Reason", cell: (d) => <Name>{d.reason ?? "–"}</Name> },
];

function Deliveries() {
  const [status, setStatus] = useParam("status");
  const list = useList(
    "listDeliveries",
    { status: status as Delivery["status"] || undefined },
    "deliveries",
    (d) => d.webhook_id,
    "executions",
  );
  usePolling(15_000, list);
  const mayExecute = useMay("execute");
  return (
    <Section title="Deliveries">
      <form class="filters" onSubmit={(e) => e.preventDefault()}>
        <label>
          status
          <br />
          <select value={status} onChange={(e) => setStatus(e.currentTarget.value)}>
            <option value="">any</option>
            {["pending", "delivered", "failed"].map((s) => <option key={s}>{s}</option>)}
          </select>
        </label>
        {mayExecute && <ReplayFailed done={list.reload} />}
      </form>
      <Table
        label="Deliveries"
        columns={columns}
        list={list}
        keyOf={(d) => d.webhook_id}
        empty={
          <Empty command="bullpen key webhook set https://ci.example.com/hooks/bullpen">
            {status ? `No ${status} deliveries.` : "No deliveries yet."}
          </Empty>
        } />
    </Section>
  );
}

// ReplayFailed replays the deliveries that have failed since a time.
function ReplayFailed({ done: reload }: { done: () => void }) {
  const [since, setSince] = useState(() => new Date(Date.now() - 24 * 3600_000).toISOString());
  const [done, setDone] = useState<string>();
  const run = async () => {
    let after: string | undefined, replayed = 0;
    do {
      const progress = await call("replayFailed", { since, after });
      replayed += progress.replayed;
      after = progress.next ?? undefined;
      setDone(`${count(replayed)} replayed, ${count(progress.left)} left`);
    } while (after);
    reload();
  };
  return (
    <>
      <TimeField name="failed since" value={since} set={(_, value) => value && setSince(value)} />
      <Action run={run} confirm="Replay all deliveries that have failed since then?">Replay failed</Action>
      <span role="status">{done}</span>
    </>
  );
}

function One({ args: { id } }: { args: Record<string, string> }) {
  return (
    <>
      <p>
        Execution{" "}
        <a href={link(path("executions", id))}>
          <code>{id}</code>
        </a>
      </p>
      <Details id={id} />
    </>
  );
}

export const pages: Page[] = [
  { path: "/webhooks", title: "Webhooks", view: Webhooks, nav: { group: "Delivery", key: "h" }, scope: "read" },
  { path: "/webhooks/:id", title: "Webhook", view: One, scope: "read" },
];
