import { call } from "../api/client.ts";
import type { Pool, Problem as ProcessProblem, Process, Worker as One } from "../api/schema.ts";
import { useLive, usePolling } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { Action } from "../ui/action.tsx";
import { Meter } from "../ui/chart.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, count, duration, Empty, Facts, Failure, Name, Problem, Section, Status, Time } from "../ui/text.tsx";

const refresh = 5000; // ms; the stream of changes does not report workers

const memory = (w: One) => `${bytes(w.machine.memory - w.machine.memory_available)} of ${bytes(w.machine.memory)}`;
const state = (w: One) => w.draining ? "draining" : w.running || w.running_sandboxes ? "running" : "ready";

const columns: Column<One>[] = [
  { head: "Worker", cell: (w) => <Name>{w.name}</Name> },
  { head: "Status", cell: (w) => <Status of={state(w)} /> },
  { head: "Slots busy", cell: (w) => `${w.running} of ${w.slots}`, class: "number" },
  { head: "Sandboxes", cell: (w) => `${w.running_sandboxes} of ${w.sandboxes}`, class: "number" },
  { head: "CPUs busy", cell: (w) => `${w.machine.cpus_busy.toFixed(1)} of ${w.machine.cpus}`, class: "number" },
  { head: "Memory used", cell: memory, class: "number" },
  { head: "Pool", cell: (w) => w.pool },
  { head: "Architecture", cell: (w) => w.architecture ?? "–" },
  { head: "Version", cell: (w) => <Name>{w.version}</Name> },
  { head: "Since", cell: (w) => <Time at={w.started_at} /> },
];

const pools: Column<Pool>[] = [
  { head: "Pool", cell: (p) => p.name },
  { head: "Workers", cell: (p) => p.workers, class: "number" },
  { head: "Recommended", cell: (p) => p.desired ? `${p.desired.workers} (${p.desired.reason})` : "–" },
  { head: "Slots busy", cell: (p) => `${p.running} of ${p.slots}`, class: "number" },
  { head: "Queued", cell: (p) => count(p.queued), class: "number" },
  { head: "Longest wait", cell: (p) => duration(p.oldest_wait_seconds * 1000), class: "number" },
  { head: "Mean run time", cell: (p) => duration(p.mean_seconds * 1000), class: "number" },
];

const processes: Column<Process>[] = [
  { head: "Process", cell: (p) => <Name>{p.name}</Name> },
  { head: "Roles", cell: (p) => p.roles.join(", ") },
  { head: "Version", cell: (p) => <Name>{p.version}</Name> },
  { head: "Since", cell: (p) => <Time at={p.started_at} /> },
  { head: "Problems", cell: (p) => problems(p) || <Status of="active" /> },
];

const problems = (p: Process) =>
  p.problems.length > 0 && (
    <span class="status bad">
      <Name>{p.problems.map(text).join("; ")}</Name>
    </span>
  );
const text = (p: ProcessProblem) => `${p.need}: ${p.message}`;

export function Workers() {
  const workers = useLive(async (signal) => (await call("listWorkers", {}, signal)).workers, []);
  const demand = useLive(async (signal) => (await call("getAutoscale", {}, signal)).pools, []);
  const running = useLive(async (signal) => (await call("listProcesses", {}, signal)).processes, []);
  usePolling(refresh, workers, demand);
  return (
    <>
      <Section title="Live workers">
        <Table
          label="Workers"
          columns={columns}
          list={workers}
          keyOf={(w) => w.name}
          hrefOf={(w) => link(path("admin", "workers", w.name))}
          empty={
            <Empty command="bullpen serve --roles worker --nats nats://nats.internal:4222 --store s3://bucket/prefix">
              No workers: executions stay queued.
            </Empty>
          } />
      </Section>
      <Section title="Pools">
        <Table
          label="Pools"
          columns={pools}
          list={demand}
          keyOf={(p) => p.name}
          empty={<Empty>No pools.</Empty>} />
      </Section>
      <Section title="Processes" actions={<button onClick={running.reload}>Refresh</button>}>
        <Table
          label="Processes of the deployment"
          columns={processes}
          list={running}
          keyOf={(p) => p.name}
          empty={<Empty>No processes.</Empty>} />
        {running.value?.flatMap((p) => [
          ...p.problems.map((problem) => <Problem key={p.name + problem.need} of={`${p.name}: ${text(problem)}`} />),
          ...Object.entries(p.missing).map(([what, why]) => (
            <p class="faint" key={p.name + what}>
              <Name>{`${p.name} lacks ${what}: ${why}`}</Name>
            </p>
          )),
        ])}
      </Section>
    </>
  );
}

export function Worker({ args: { name } }: { args: Record<string, string> }) {
  const list = useLive((signal) => call("listWorkers", {}, signal), [name]);
  usePolling(refresh, list);
  const { value, error, reload } = list;
  const w = value?.workers.find((w) => w.name === name);
  if (!value) return <Failure of={error} />;
  if (!w) return <Empty command="bullpen workers">No live worker has this name.</Empty>;
  return (
    <>
      <div class="actions">
        <code>
          <Name>{name}</Name>
        </code>{" "}
        <Status of={state(w)} />
        {w.draining
          ? (
            <Action run={() => call("undrainWorker", { name }).then(reload)} done="The worker is back in service.">
              Undrain
            </Action>
          )
          : (
            <Action
              run={() => call("drainWorker", { name }).then(reload)}
              done="The worker is draining."
              confirm="Drain the worker? It finishes its executions and accepts no new ones.">
              Drain
            </Action>
          )}
      </div>
      <Failure of={error} />
      <Section title="Load">
        <div class="meters">
          <Meter label="Slots" used={w.running} limit={w.slots} format={count} />
          <Meter label="Sandboxes" used={w.running_sandboxes} limit={w.sandboxes} format={count} />
          <Meter label="CPUs" used={w.machine.cpus_busy} limit={w.machine.cpus} format={(n) => n.toFixed(1)} />
          <Meter
            label="Memory"
            used={w.machine.memory - w.machine.memory_available}
            limit={w.machine.memory}
            format={bytes} />
          <Meter
            label="Memory of sandboxes"
            used={w.sandbox_memory - w.sandbox_memory_free}
            limit={w.sandbox_memory}
            format={bytes} />
        </div>
      </Section>
      <Section title="Details">
        <Facts
          of={[
            ["Pool", w.pool],
            ["Version", <Name>{w.version}</Name>],
            ["Architecture", w.architecture],
            ["Since", <Time at={w.started_at} />],
            ["Cached images", count(w.cached_images)],
            ["Cached threads", count(w.cached_threads)],
          ]} />
        <Facts of={Object.entries(w.languages).map(([language, version]) => [language, <Name>{version}</Name>])} />
        <p>
          {w.capabilities.map((c) => (
            <span class="pair" key={c}>
              <Name>{c}</Name>
            </span>
          ))}
        </p>
      </Section>
    </>
  );
}
