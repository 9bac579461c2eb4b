import type { Args } from "../api/client.ts";
import type { ListedExecution } from "../api/schema.ts";
import { useList } from "../app/live.ts";
import { link, navigate, path, useLocation } from "../app/router.ts";
import { TimeField } from "../ui/form.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { duration, Empty, Name, Pairs, Status, Time } from "../ui/text.tsx";

export const statuses = ["queued", "running", "success", "failed", "timeout", "oom", "seccomp", "cancelled"];
export const languages = ["python", "node", "bash", "ruby", "deno"];
const modes = ["inline", "streaming", "webhook", "sandbox"];
const texts = ["thread_id", "key", "schedule", "batch", "pipeline", "request_id"];

const columns: Column<ListedExecution>[] = [
  { head: "Execution", cell: (e) => <code>{e.trace_id}</code> },
  { head: "Status", cell: (e) => <Status of={e.status} /> },
  { head: "Language", cell: (e) => e.language },
  { head: "Created", cell: (e) => <Time at={e.created_at} /> },
  { head: "Waited", cell: (e) => duration(e.queued_ms), class: "number" },
  { head: "Ran", cell: (e) => e.completed_at ? duration(e.duration_ms) : "–", class: "number" },
  { head: "Exit code", cell: (e) => e.exit_code ?? "–", class: "number" },
  { head: "Mode", cell: (e) => e.delivery_mode },
  { head: "Webhook", cell: (e) => <Status of={e.webhook_delivery_status} /> },
  { head: "Thread", cell: (e) => <Name>{e.thread_id}</Name> },
  { head: "Metadata", cell: (e) => <Pairs of={e.metadata} /> },
];

// ExecutionTable lists the executions that match a filter.
export function ExecutionTable({ filter, empty }: { filter: Args<"listExecutions">; empty?: string }) {
  const list = useList("listExecutions", filter, "executions", (e) => e.trace_id, "executions");
  return (
    <Table
      label="Executions"
      columns={columns}
      list={list}
      keyOf={(e) => e.trace_id}
      hrefOf={(e) => link(path("executions", e.trace_id))}
      empty={<Empty command={`echo 'print(6 * 7)' | bullpen run -`}>{empty ?? "No matching executions."}</Empty>} />
  );
}

export function Executions() {
  const { query } = useLocation();
  const filter = Object.fromEntries(query) as Args<"listExecutions">;
  const set = (name: string, value: string) => navigate("/executions", { ...Object.fromEntries(query), [name]: value });
  const choice = (name: string, values: string[]) => (
    <label>
      {name}
      <br />
      <select value={query.get(name) ?? ""} onChange={(e) => set(name, e.currentTarget.value)}>
        <option value="">any</option>
        {values.map((v) => <option key={v}>{v}</option>)}
      </select>
    </label>
  );
  return (
    <>
      <form class="filters" onSubmit={(e) => e.preventDefault()}>
        {choice("status", statuses)}
        {choice("language", languages)}
        {choice("delivery_mode", modes)}
        <TimeField name="created_after" value={query.get("created_after")} set={set} />
        <TimeField name="created_before" value={query.get("created_before")} set={set} />
        <AddFilter add={set} />
        {[...query].filter(([name]) => texts.includes(name) || name.startsWith("metadata.")).map(([name, value]) => (
          <button key={name} type="button" aria-label={`Remove the filter ${name}`} onClick={() => set(name, "")}>
            <Name>{`${name}=${value}`}</Name> ×
          </button>
        ))}
        {query.size > 0 && <a href="#/executions">Clear filters</a>}
      </form>
      <ExecutionTable
        filter={filter}
        empty={query.size ? undefined : "No executions yet. Run a program here, or:"} />
    </>
  );
}

function AddFilter({ add }: { add: (name: string, value: string) => void }) {
  return (
    <label>
      other: {texts.join(", ")} or metadata.NAME
      <br />
      <input
        placeholder="thread_id=… or metadata.order=4711"
        size={30}
        onChange={(e) => {
          const [name, ...rest] = e.currentTarget.value.split("=");
          if (rest.length && (texts.includes(name) || name.startsWith("metadata."))) {
            e.currentTarget.setCustomValidity("");
            add(name, rest.join("="));
            e.currentTarget.value = "";
          } else {
            e.currentTarget.setCustomValidity(e.currentTarget.value ? "Write NAME=VALUE with one of these names." : "");
            e.currentTarget.reportValidity();
          }
        }} />
    </label>
  );
}
