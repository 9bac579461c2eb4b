import type { ComponentChildren } from "preact";
import { call } from "../api/client.ts";
import type { DeadLetter as One } from "../api/schema.ts";
import { useList, useLive, usePolling } from "../app/live.ts";
import { link, navigate, path } from "../app/router.ts";
import { Action } from "../ui/action.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, count, Empty, Facts, Failure, Name, Pairs, Problem, Section, Time } from "../ui/text.tsx";

const to = (page: string, id: string | null | undefined) =>
  id
    ? (
      <a href={link(page + encodeURIComponent(id))}>
        <Name>{id}</Name>
      </a>
    )
    : undefined;

const columns: Column<One>[] = [
  { head: "ID", cell: (d) => <code>{d.id}</code> },
  { head: "Since", cell: (d) => <Time at={d.set_aside_at} /> },
  { head: "Reason", cell: (d) => d.reason },
  { head: "Organisation", cell: (d) => to("/admin/orgs/", d.org) ?? "–" },
  { head: "Requeued as", cell: (d) => d.requeued_as ?? "–" },
  { head: "Message", cell: (d) => <Name>{d.message}</Name> },
];

export function DeadLetters() {
  const list = useList("listDeadLetters", {}, "dead_letters", (d) => d.id);
  usePolling(15_000, list);
  return (
    <Table
      label="Dead letters"
      columns={columns}
      list={list}
      keyOf={(d) => d.id}
      hrefOf={(d) => link(path("admin", "dead-letters", d.id))}
      empty={<Empty command="bullpen deadletter list">No dead letters.</Empty>} />
  );
}

export function DeadLetter({ args: { id } }: { args: Record<string, string> }) {
  const { value: d, error, reload } = useLive((signal) => call("getDeadLetter", { id }, signal), [id]);
  if (!d) return <Failure of={error} />;
  const { execution: e, malformed: m } = d;
  return (
    <>
      <div class="actions">
        <code>{id}</code>
        {e && !d.requeued_as && (
          <Action run={() => call("requeueDeadLetter", { id }).then(reload)} done="Requeued as a new execution.">
            Requeue
          </Action>
        )}
        <Action
          danger
          confirm="Delete the dead letter and its job? This cannot be undone."
          run={() => call("deleteDeadLetter", { id }).then(() => navigate("/admin/dead-letters"))}>
          Delete
        </Action>
      </div>
      <Failure of={error} />
      <Problem of={d.message} />
      <Facts
        of={[
          ["Reason", d.reason],
          ["Since", <Time at={d.set_aside_at} />],
          ["Organisation", to("/admin/orgs/", d.org)],
          ["Key", to("/admin/keys/", d.key_id)],
          ["Attempt", d.attempt ?? undefined],
          ["Lost workers", d.workers.length ? <Name>{d.workers.join(", ")}</Name> : undefined],
          ["Requeued as", to("/executions/", d.requeued_as)],
          ["Requeued", d.requeued_at ? <Time at={d.requeued_at} /> : undefined],
        ]} />
      {e && (
        <Section title="Execution">
          <Facts
            of={[
              ["Language", e.language],
              ["Program", bytes(e.code_bytes)],
              ["Profile", e.profile],
              ["Mode", e.delivery_mode],
              ["Created", <Time at={e.created_at} />],
              ["Timeout", `${e.timeout} s`],
              ["Maximum attempts", count(e.max_attempts)],
              ["Thread", to("/threads/", e.thread_id)],
              ["Webhook", e.webhook_url ? <Name>{e.webhook_url}</Name> : undefined],
              ["Request", e.request_id ? <Name>{e.request_id}</Name> : undefined],
              ["Metadata", <Pairs of={e.metadata} />],
            ]} />
        </Section>
      )}
      {m && (
        <Section title="Message">
          <Facts
            of={[
              ["Subject", <Name>{m.subject}</Name>],
              ["Size", bytes(m.bytes)],
              ...Object.entries(m.headers).map((
                [name, values],
              ): [string, ComponentChildren] => [name, <Name>{values.join(", ")}</Name>]),
            ]} />
          <pre class="file" tabIndex={0}><Name>{m.data}</Name></pre>
        </Section>
      )}
    </>
  );
}
