import { call } from "../api/client.ts";
import type { Pipeline, PipelineCache } from "../api/schema.ts";
import { useList, useTick } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { Action } from "../ui/action.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, count, duration, Empty, Name, Section, Status, Time } from "../ui/text.tsx";

// took returns how long something ran, or has been running, in milliseconds.
export function took(from: string | null, to: string | null): number | null {
  return from === null ? null : (to === null ? Date.now() : Date.parse(to)) - Date.parse(from);
}

// Took shows how long something took, or has been running.
export function Took({ from, to }: { from: string | null; to: string | null }) {
  useTick();
  return <>{duration(took(from, to))}</>;
}

const columns: Column<Pipeline>[] = [
  { head: "Run", cell: (p) => <code>{p.id}</code> },
  { head: "Pipeline", cell: (p) => <Name>{p.name ?? "–"}</Name> },
  { head: "Status", cell: (p) => <Status of={p.cancelling && !p.ended_at ? "cancelling" : p.status} /> },
  { head: "Branch", cell: (p) => <Name>{p.branch ?? "–"}</Name> },
  {
    head: "Commit",
    cell: (p) => (
      <code>
        <Name>{p.commit?.slice(0, 12) ?? "–"}</Name>
      </code>
    ),
  },
  { head: "Created", cell: (p) => <Time at={p.created_at} /> },
  { head: "Took", cell: (p) => <Took from={p.created_at} to={p.ended_at} />, class: "number" },
];

export function Pipelines() {
  const list = useList("listPipelines", {}, "pipelines", (p) => p.id, "pipelines");
  return (
    <>
      {useMay("execute") && (
        <div class="actions">
          <a class="button" href="#/pipelines/new">Run pipeline</a>
        </div>
      )}
      <Table
        label="Pipelines"
        columns={columns}
        list={list}
        keyOf={(p) => p.id}
        hrefOf={(p) => link(path("pipelines", p.id))}
        empty={
          <Empty command="bullpen ci run ci.yaml">
            No pipelines yet. A pipeline is a file of steps that need each other.
          </Empty>
        } />
      {list.value && list.value.length > 0 && (
        <Section title="Caches">
          <Caches />
        </Section>
      )}
    </>
  );
}

function Caches() {
  const list = useList("listPipelineCaches", {}, "caches", (c) => c.key, "pipelines");
  const columns: Column<PipelineCache>[] = [
    { head: "Key", cell: (c) => <Name>{c.key}</Name> },
    { head: "Size", cell: (c) => bytes(c.bytes), class: "number" },
    { head: "Files", cell: (c) => count(c.files), class: "number" },
    { head: "Created", cell: (c) => <Time at={c.created_at} /> },
  ];
  if (useMay("admin")) {
    columns.push({
      head: "Actions",
      cell: (c) => (
        <Action
          danger
          confirm="Remove this cache? The next step with its key creates it again."
          run={() => call("removePipelineCache", { key: c.key }).then(list.reload)}>
          Remove
        </Action>
      ),
    });
  }
  return (
    <Table
      label="Caches"
      columns={columns}
      list={list}
      keyOf={(c) => c.key}
      empty={<Empty>No caches yet.</Empty>} />
  );
}
