import { address, call } from "../api/client.ts";
import type { Orgs, QuotaUse, Usage as Report, UsageRow } from "../api/schema.ts";
import { useLive, usePolling } from "../app/live.ts";
import { useParam } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { Chart, Meter, type Series } from "../ui/chart.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, count, duration, Empty, Failure, Name, Section, Time } from "../ui/text.tsx";

type Value = (row: UsageRow) => number;

const compact = (n: number) => new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(n);
const cpu = (n: number) => duration(n * 1000);
const memory = (gibSeconds: number) =>
  gibSeconds < 3600 ? `${compact(gibSeconds)} GiB·s` : `${compact(gibSeconds / 3600)} GiB·h`;

const outcomes = ["success", "failed", "timeout", "oom", "seccomp", "cancelled"] as const;
const colours: Record<typeof outcomes[number], number> = {
  success: 2,
  failed: 4,
  timeout: 1,
  oom: 3,
  seccomp: 0,
  cancelled: 5,
};

const metrics: Array<{ title: string; value: Value; format: (n: number) => string }> = [
  { title: "CPU time", value: (r) => r.cpu_seconds, format: cpu },
  { title: "Memory", value: (r) => r.memory_mib_seconds / 1024, format: memory },
  { title: "Live sandboxes", value: (r) => r.sandbox_seconds, format: cpu },
  { title: "Output", value: (r) => r.output_bytes, format: bytes },
  { title: "Network, sent", value: (r) => r.bytes_out, format: bytes },
  { title: "Stored", value: (r) => r.stored_byte_days, format: bytes },
  { title: "Webhook attempts", value: (r) => r.webhook_attempts, format: compact },
  { title: "Agent turns", value: (r) => r.agent_turns, format: compact },
];

const groups = { "": "nothing", key: "key", language: "language", org: "organisation" };

// everyOrg is the parameter org of the page for all organisations; no organisation has this name.
const everyOrg = "*";

export function Usage() {
  const { global, org: own } = useSession();
  const [from, setFrom] = useParam("from");
  const [to, setTo] = useParam("to");
  const [group, setGroup] = useParam("group");
  const [org, setOrg] = useParam("org");
  const args = { from, to, group_by: group ? `day,${group}` : "day" };
  const all = { ...args, org: org === everyOrg ? undefined : org };
  const report = useLive(
    (signal) => org ? call("getOrgUsage", all, signal) : call("getUsage", args, signal),
    [args, org],
  );
  usePolling(60_000, report);
  const { value, error } = report;
  const csv = org ? address("getOrgUsage", { ...all, format: "csv" }) : address("getUsage", { ...args, format: "csv" });
  return (
    <>
      <form class="filters" onSubmit={(e) => e.preventDefault()}>
        <label>
          from<br />
          <input type="date" value={from || value?.from} max={to} onChange={(e) => setFrom(e.currentTarget.value)} />
        </label>
        <label>
          to<br />
          <input type="date" value={to || value?.to} min={from} onChange={(e) => setTo(e.currentTarget.value)} />
        </label>
        <label>
          group by<br />
          <select value={group} onChange={(e) => setGroup(e.currentTarget.value)}>
            {Object.entries(groups).map(([name, label]) =>
              (name !== "org" || org === everyOrg) && <option key={name} value={name}>{label}</option>
            )}
          </select>
        </label>
        {global && <Organisations own={own} value={org} set={setOrg} />}
        <a class="button" href={csv.href} download="usage.csv">CSV</a>
      </form>
      <Failure of={error} />
      {value && <Charts report={value} group={group} />}
    </>
  );
}

function Organisations({ own, value, set }: { own: string; value: string; set: (v: string) => void }) {
  const { value: orgs } = useLive(
    async (signal) => {
      const list: Orgs["orgs"] = [];
      let cursor: string | undefined;
      do {
        const page = await call("listOrgs", { limit: 100, cursor }, signal);
        list.push(...page.orgs);
        cursor = page.next_cursor ?? undefined;
      } while (cursor && list.length < 2000);
      return list;
    },
    [],
    "orgs",
  );
  return (
    <label>
      organisation<br />
      <select value={value} onChange={(e) => set(e.currentTarget.value)}>
        <option value="">{own}</option>
        <option value={everyOrg}>all organisations</option>
        {orgs?.filter((o) => o.name !== own).map((o) => <option key={o.name} value={o.name}>{o.name}</option>)}
      </select>
    </label>
  );
}

function Charts({ report, group }: { report: Report; group: string }) {
  const days = daysOf(report);
  const labels = days.map((day) => day.slice(5));
  const perDay = (rows: UsageRow[], value: Value) => {
    const byDay = Map.groupBy(rows, (r) => r.day);
    return days.map((day) => sum(byDay.get(day) ?? [], value));
  };
  const parts = group ? partsOf(report.rows, group) : [];
  const seriesOf = (value: Value, name: string): Series[] =>
    group
      ? parts.map((p, colour) => ({ name: p.name, colour, values: perDay(p.rows, value) })).filter(isUsed)
      : [{ name, values: perDay(report.rows, value) }];
  const executions: Series[] = group
    ? seriesOf((r) => r.executions.total, "")
    : outcomes.map((o) => ({ name: o, colour: colours[o], values: perDay(report.rows, (r) => r.executions[o]) }))
      .filter(isUsed);
  const total = sum(report.rows, (r) => r.executions.total);
  const tile = (value: string, label: string) => (
    <div class="tile">
      <b>{value}</b>
      <span>{label}</span>
    </div>
  );
  if (!report.rows.length) {
    return (
      <>
        <Quotas of={report.quotas} />
        <Empty command="echo 'print(6 * 7)' | bullpen run -">No usage in this period.</Empty>
      </>
    );
  }
  const used = metrics.filter((m) => report.rows.some((r) => m.value(r) > 0));
  return (
    <>
      {!report.complete && (
        <p class="faint">The newest executions may be missing: the server has not counted them yet.</p>
      )}
      <div class="tiles">
        {tile(count(total), "executions")}
        {tile(
          total ? `${((1 - sum(report.rows, (r) => r.executions.success) / total) * 100).toFixed(1)} %` : "–",
          "did not succeed",
        )}
        {used.filter((m) => m.title !== "Stored").map((m) => tile(m.format(sum(report.rows, m.value)), m.title))}
      </div>
      <Quotas of={report.quotas} />
      <Chart title="Executions" labels={labels} format={compact} series={executions} />
      <div class="columns">
        {used.map((m) => (
          <Chart key={m.title} title={m.title} labels={labels} format={m.format} series={seriesOf(m.value, m.title)} />
        ))}
      </div>
      {group && <Groups rows={report.rows} group={group} />}
    </>
  );
}

const quotaNames: Record<QuotaUse["name"], [label: string, format: (n: number) => string]> = {
  cpu_seconds: ["CPU time", cpu],
  memory_mib_seconds: ["Memory", (n) => memory(n / 1024)],
  sandbox_seconds: ["Live sandboxes", cpu],
  stored_bytes: ["Stored", bytes],
};

function Quotas({ of }: { of: QuotaUse[] }) {
  if (!of.length) return null;
  return (
    <Section title="Quotas of this month">
      <div class="meters">
        {of.map((q) => {
          const [label, format] = quotaNames[q.name];
          return (
            <Meter
              key={q.name}
              label={label}
              used={q.used}
              limit={q.hard ?? q.soft}
              format={format}
              remark={q.soft !== null && q.hard !== null
                ? `warning at ${format(q.soft)}`
                : q.hard === null
                ? "a warning only"
                : undefined} />
          );
        })}
      </div>
      <p class="help">
        Quotas on time reset at <Time at={of[0].ends} />.
      </p>
    </Section>
  );
}

const isUsed = (s: Series) => s.values.some(Boolean);

const sum = (rows: UsageRow[], value: Value) => rows.reduce((n, r) => n + value(r), 0);

const groupOf = (r: UsageRow, group: string) => r[group as "key" | "language" | "org"] ?? "–";

// partsOf returns the rows of the groups with the most executions, and the rest as one group.
function partsOf(rows: UsageRow[], group: string): Array<{ name: string; rows: UsageRow[] }> {
  const parts = groupsOf(rows, group);
  const rest = parts.slice(5).flatMap((p) => p.rows);
  return parts.length <= 6 ? parts : [...parts.slice(0, 5), { name: "others", rows: rest }];
}

function groupsOf(rows: UsageRow[], group: string): Array<{ name: string; rows: UsageRow[] }> {
  const total = (p: { rows: UsageRow[] }) => sum(p.rows, (r) => r.executions.total);
  return [...Map.groupBy(rows, (r) => groupOf(r, group))].map(([name, rows]) => ({ name, rows })).sort((a, b) =>
    total(b) - total(a)
  );
}

// Groups is the table of the groups' totals.
function Groups({ rows, group }: { rows: UsageRow[]; group: string }) {
  const columns: Column<{ name: string; rows: UsageRow[] }>[] = [
    { head: "Group", cell: (g) => <Name>{g.name}</Name> },
    { head: "Executions", cell: (g) => count(sum(g.rows, (r) => r.executions.total)), class: "number" },
    ...outcomes.map((o) => ({
      head: o,
      cell: (g: { rows: UsageRow[] }) => count(sum(g.rows, (r) => r.executions[o])),
      class: "number",
    })),
    { head: "CPU", cell: (g) => cpu(sum(g.rows, (r) => r.cpu_seconds)), class: "number" },
    { head: "Memory", cell: (g) => memory(sum(g.rows, (r) => r.memory_mib_seconds / 1024)), class: "number" },
    { head: "Output", cell: (g) => bytes(sum(g.rows, (r) => r.output_bytes)), class: "number" },
  ];
  return (
    <Section title={`By ${groups[group as keyof typeof groups]}`}>
      <Table
        label="Usage"
        columns={columns}
        list={{ value: groupsOf(rows, group), loading: false }}
        keyOf={(g) => g.name}
        empty={null} />
    </Section>
  );
}

// daysOf returns the days that a report covers.
function daysOf({ from, to }: Report): string[] {
  const days: string[] = [];
  for (let at = Date.parse(from); at <= Date.parse(to); at += 86_400_000) {
    days.push(new Date(at).toISOString().slice(0, 10));
  }
  return days;
}
