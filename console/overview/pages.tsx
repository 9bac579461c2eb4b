import { call } from "../api/client.ts";
import type { Overview as Figures } from "../api/schema.ts";
import { useLive, usePolling } from "../app/live.ts";
import { link, type Page, useParam } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { Chart } from "../ui/chart.tsx";
import { bytes, count, duration, Failure, formatTime, Name, Problem, Section, Time, Zone } from "../ui/text.tsx";
import { useContext } from "preact/hooks";

export const pages: Page[] = [
  { path: "/", title: "Overview", view: Overview, nav: { group: "Work", key: "o" }, scope: "read" },
];

const failed = ["failed", "timeout", "oom", "seccomp"];

function Overview() {
  const [org] = useParam("org");
  const { global } = useSession();
  const list = useLive((signal) => call("getOverview", { org }, signal), [org]);
  usePolling(5000, list);
  const o = list.value;
  if (!o) return <Failure of={list.error} />;
  const sum = (n: { interactive: number; background: number } | undefined) =>
    n ? count(n.interactive + n.background) : "–";
  const failures = failed.reduce((n, status) => n + (o.total.ends[status] ?? 0), 0);
  const tiles: Array<[value: string, name: string, href?: string]> = [
    [count(o.total.arrivals), "arrived", link("/executions")],
    [sum(o.queue?.queued), "queued", link("/executions", { status: "queued" })],
    [sum(o.queue?.running), "running", link("/executions", { status: "running" })],
    [count(failures), "failed", link("/executions", { status: "failed" })],
    [duration(o.total.wait.p50_ms), "waiting time, p50"],
    [duration(o.total.wait.p99_ms), "waiting time, p99"],
    [duration(o.total.duration.p50_ms), "run time, p50"],
    [duration(o.total.duration.p99_ms), "run time, p99"],
    [count(o.sandboxes.running ?? 0), "live sandboxes", link("/sandboxes")],
  ];
  return (
    <>
      <Failure of={list.error} />
      <p class="faint">
        {o.org ? `Executions of ${o.org}` : "Executions of all organisations"}{" "}
        in the last hour. The figures are complete since <Time at={o.from} />.
      </p>
      <div class="tiles">
        {tiles.map(([value, name, href]) => (
          <div class="tile" key={name}>
            <b>{value}</b>
            {href ? <a href={href}>{name}</a> : <span>{name}</span>}
          </div>
        ))}
      </div>
      <Minutes of={o} />
      <Webhooks />
      {global && !o.org && <Server of={o} />}
    </>
  );
}

function Minutes({ of: o }: { of: Figures }) {
  const zone = useContext(Zone);
  const labels = o.minutes.map((m) => formatTime(m.at, zone).slice(11, 16));
  const known = o.minutes.flatMap((m) => Object.keys(m.ends));
  const ends = ["success", "failed", "timeout", "oom", "seccomp", "cancelled"].filter((s) =>
    s === "success" || known.includes(s)
  );
  const times = (what: "wait" | "duration") => [
    { name: "p50", values: o.minutes.map((m) => m[what].p50_ms) },
    { name: "p99", values: o.minutes.map((m) => m[what].p99_ms) },
  ];
  return (
    <div class="columns">
      <Chart
        title="Arrivals per minute"
        labels={labels}
        series={[{ name: "arrivals", values: o.minutes.map((m) => m.arrivals) }]} />
      <Chart
        title="Ended per minute"
        labels={labels}
        series={ends.map((name) => ({ name, values: o.minutes.map((m) => m.ends[name] ?? 0) }))} />
      <Chart title="Waiting time" labels={labels} kind="lines" series={times("wait")} format={duration} />
      <Chart title="Run time" labels={labels} kind="lines" series={times("duration")} format={duration} />
    </div>
  );
}

const most = 100; // webhooks that are counted

function Webhooks() {
  const list = useLive(async (signal) => {
    const [pending, endpoints] = await Promise.all([
      call("listDeliveries", { status: "pending", limit: most }, signal),
      call("listEndpoints", {}, signal),
    ]);
    return { pending, endpoints };
  }, []);
  usePolling(15_000, list);
  const { org } = useSession();
  const w = list.value;
  return (
    <Section title={`Webhooks of ${org}`}>
      <Failure of={list.error} />
      <div class="tiles">
        <div class="tile">
          <b>{w ? count(w.pending.deliveries.length) + (w.pending.next_cursor ? " or more" : "") : "–"}</b>
          <a href={link("/webhooks", { status: "pending" })}>pending</a>
        </div>
        <div class="tile">
          <b>{w ? count(w.endpoints.endpoints.length) : "–"}</b>
          <a href={link("/webhooks")}>failing endpoints</a>
        </div>
      </div>
    </Section>
  );
}

function Server({ of: o }: { of: Figures }) {
  const processes = useLive((signal) => call("listProcesses", {}, signal), []);
  usePolling(15_000, processes);
  const s = o.server;
  if (!s) return null;
  return (
    <Section title="Server">
      <div class="tiles">
        <div class="tile">
          <b>{s.workers ? count(s.workers.count) : "–"}</b>
          <a href={link("/admin/workers")}>workers</a>
        </div>
        <div class="tile">
          <b>{s.workers ? `${count(s.workers.slots - s.workers.free_slots)} of ${count(s.workers.slots)}` : "–"}</b>
          <span>slots in use</span>
        </div>
        {processes.value?.processes.map((p) =>
          p.disk && (
            <div class="tile" key={p.name}>
              <b>{bytes(p.disk.free)}</b>
              <span>
                free on the disk of <Name>{p.name}</Name>
              </span>
            </div>
          )
        )}
      </div>
      <Failure of={processes.error} />
      {processes.value?.processes.flatMap((p) =>
        p.problems.map((problem) => (
          <Problem key={p.name + problem.need} of={`${p.name}: ${problem.need}: ${problem.message}`} />
        ))
      )}
    </Section>
  );
}
