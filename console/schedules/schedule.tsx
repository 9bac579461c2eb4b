import { useEffect } from "preact/hooks";
import { call } from "../api/client.ts";
import type { ScheduleRun, WholeSchedule } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { link, navigate, path } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { ExecutionTable } from "../executions/list.tsx";
import { Execution } from "../threads/versions.tsx";
import { Action, notify } from "../ui/action.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { duration, Empty, Facts, Failure, Name, Pairs, Problem, Section, Status, Time } from "../ui/text.tsx";
import { Rule, statusOf, Tick, useFuture } from "./list.tsx";

const columns: Column<ScheduleRun>[] = [
  { head: "Tick", cell: (r) => <Time at={r.tick} /> },
  { head: "Outcome", cell: (r) => <Status of={r.outcome} /> },
  { head: "Delay", cell: (r) => duration(Math.max(0, Date.parse(r.at) - Date.parse(r.tick))), class: "number" },
  {
    head: "Execution",
    cell: (r) => <Execution id={r.trace_id} />,
  },
  { head: "Reason", cell: (r) => <Name>{r.reason}</Name> },
];

// NextTicks reads the schedule again after its last known tick.
function NextTicks({ of: s, reload }: { of: WholeSchedule; reload: () => void }) {
  const next = useFuture(s.next);
  const outdated = s.next.length > 0 && next.length === 0;
  useEffect(() => {
    if (outdated) reload();
  }, [outdated]);
  if (!next.length) return <p class="faint">{s.paused ? "None while paused." : "None."}</p>;
  return (
    <ol class="ticks">
      {next.map((at) => (
        <li key={at}>
          <Tick at={at} />
        </li>
      ))}
    </ol>
  );
}

export function Schedule({ args: { id } }: { args: Record<string, string> }) {
  const { value: s, error, reload } = useLive((signal) => call("getSchedule", { id }, signal), [id], "schedules");
  const mayExecute = useMay("execute");
  if (!s) return <Failure of={error} />;
  const started = ({ trace_id }: { trace_id: string }) => (notify(`Started ${trace_id}.`), reload());
  return (
    <>
      <div class="actions">
        <strong>
          <Name>{s.name}</Name>
        </strong>{" "}
        <Status of={statusOf(s)} />
        {mayExecute && (
          <>
            <Action run={() => call("runSchedule", { id }).then(started)}>Run now</Action>
            <Action run={() => call("patchSchedule", { id, body: { paused: !s.paused } }).then(reload)}>
              {s.paused ? "Resume" : "Pause"}
            </Action>
            <a class="button" href={link(path("schedules", id, "edit"))}>Edit</a>
            <Action
              danger
              confirm="Delete this schedule? Executions that have started continue."
              run={() => call("deleteSchedule", { id }).then(() => navigate("/schedules"))}
              done="Schedule deleted.">
              Delete
            </Action>
          </>
        )}
      </div>
      <Failure of={error} />
      <Problem of={s.error} />
      <Problem of={s.waiting_for?.message} />
      <Facts
        of={[
          ["ID", <code>{id}</code>],
          ["Ticks", <Rule of={s} />],
          ["Jitter", s.jitter ? `up to ${duration(s.jitter * 1000)}` : undefined],
          ["Overlap", s.overlap],
          ["Missed", s.missed],
          ["Waiting ticks", s.waiting || undefined],
          ["Key", <code>{s.key_id}</code>],
          ["Created", <Time at={s.created_at} />],
          ["Updated", <Time at={s.updated_at} />],
        ]} />
      <div class="columns">
        <Section title="Next ticks">
          <NextTicks of={s} reload={reload} />
        </Section>
        <Section title="Request">
          <Facts
            of={[
              ["Language", s.request.language ?? "python"],
              ["Timeout", s.request.timeout ? `${s.request.timeout} s` : undefined],
              ["Profile", s.request.profile ?? undefined],
              ["Thread", s.request.thread_id ? <Name>{s.request.thread_id}</Name> : undefined],
              ["Arguments", s.request.args?.length ? <Name>{s.request.args.join(" ")}</Name> : undefined],
              ["Metadata", s.request.metadata ? <Pairs of={s.request.metadata} /> : undefined],
            ]} />
          <pre class="file" tabIndex={0}><Name>{s.request.code}</Name></pre>
        </Section>
      </div>
      <Section title="History">
        <Table
          label="History"
          columns={columns}
          list={{ value: s.runs, loading: false }}
          keyOf={(r) => r.tick + r.at}
          empty={<Empty>No ticks yet.</Empty>} />
      </Section>
      <Section title="Executions">
        <ExecutionTable filter={{ schedule: id }} empty="No executions yet." />
      </Section>
    </>
  );
}
