import type { Schedule } from "../api/schema.ts";
import { useList, useTick } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { type Column, Table } from "../ui/table.tsx";
import { duration, Empty, Name, Status, Time } from "../ui/text.tsx";

type Timing = Pick<Schedule, "cron" | "every" | "time_zone">;

// Rule shows the rule by which a schedule ticks.
export function Rule({ of: s }: { of: Timing }) {
  if (s.every) return <>every {s.every < 60 ? `${s.every} s` : duration(s.every * 1000)}</>;
  return (
    <>
      <code>
        <Name>{s.cron}</Name>
      </code>{" "}
      <Name>{s.time_zone}</Name>
    </>
  );
}

export const statusOf = (s: Schedule) => s.paused ? "paused" : s.error ? "error" : "active";

// Tick shows a future time and how long until then.
export function Tick({ at }: { at: string | undefined }) {
  useTick();
  if (!at) return <span class="faint">–</span>;
  return (
    <>
      <Time at={at} /> <span class="faint">{remaining(Date.parse(at) - Date.now())}</span>
    </>
  );
}

function remaining(ms: number): string {
  if (ms < 0) return "now";
  return "in " + (ms < 60_000 ? `${Math.ceil(ms / 1000)} s` : duration(ms));
}

// useFuture returns the ticks that are in the future.
export function useFuture(ticks: string[]): string[] {
  useTick();
  return ticks.filter((at) => Date.parse(at) > Date.now());
}

function NextTick({ of: s }: { of: Schedule }) {
  return <Tick at={useFuture(s.next)[0]} />;
}

const columns: Column<Schedule>[] = [
  { head: "Name", cell: (s) => <Name>{s.name}</Name> },
  { head: "Status", cell: (s) => <Status of={statusOf(s)} /> },
  { head: "Ticks", cell: (s) => <Rule of={s} /> },
  { head: "Next tick", cell: (s) => <NextTick of={s} /> },
  { head: "Overlap", cell: (s) => s.overlap },
  { head: "Missed", cell: (s) => s.missed },
  { head: "Updated", cell: (s) => <Time at={s.updated_at} /> },
];

export function Schedules() {
  const list = useList("listSchedules", {}, "schedules", (s) => s.id, "schedules");
  return (
    <>
      {useMay("execute") && (
        <div class="actions">
          <a class="button" href="#/schedules/new">Create schedule</a>
        </div>
      )}
      <Table
        label="Schedules"
        columns={columns}
        list={list}
        keyOf={(s) => s.id}
        hrefOf={(s) => link(path("schedules", s.id))}
        empty={
          <Empty command="bullpen schedule create --name report --cron '30 2 * * *' --time-zone Europe/Berlin report.py">
            No schedules yet. A schedule runs a program at set times.
          </Empty>
        } />
    </>
  );
}
