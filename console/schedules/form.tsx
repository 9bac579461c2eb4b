import { call } from "../api/client.ts";
import { pause } from "../api/events.ts";
import type { ScheduleRequest } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { navigate, path } from "../app/router.ts";
import { Form } from "../ui/form.tsx";
import { Failure } from "../ui/text.tsx";
import { Tick } from "./list.tsx";

type Value = Record<string, unknown>;

function ScheduleForm(
  { value, label, send }: { value: Value; label: string; send: (body: ScheduleRequest) => Promise<{ id: string }> },
) {
  return (
    <Form
      schema="ScheduleRequest"
      value={value}
      label={label}
      after="every"
      fields={["name", "cron", "time_zone", "every", "request"]}
      more={["overlap", "missed", "jitter", "paused"]}
      submit={async (v) => navigate(path("schedules", (await send(v as ScheduleRequest)).id))}>
      {(v) => <Preview cron={v.cron as string} every={v.every as number} zone={v.time_zone as string} />}
    </Form>
  );
}

export function NewSchedule() {
  return (
    <ScheduleForm
      value={{ request: { language: "python" } }}
      label="Create"
      send={(body) => call("createSchedule", { body })} />
  );
}

export function EditSchedule({ args: { id } }: { args: Record<string, string> }) {
  const { value: s, error } = useLive((signal) => call("getSchedule", { id }, signal), [id]);
  if (!s) return <Failure of={error} />;
  const { name, cron, time_zone, every, overlap, missed, jitter, request } = s;
  return (
    <ScheduleForm
      value={{ name, cron, time_zone, every, overlap, missed, jitter, request }}
      label="Save"
      send={(body) => call("patchSchedule", { id, body })} />
  );
}

// Preview shows the next ticks of the timing that the reader types, or its error.
function Preview({ cron, every, zone }: { cron?: string; every?: number; zone?: string }) {
  const { value, error } = useLive(async (signal) => {
    await pause(250, signal); // until the reader stops typing
    if (signal.aborted || !cron && !every) return { ticks: [] };
    return call("previewSchedule", { cron, every, time_zone: zone, count: 5 }, signal);
  }, [cron, every, zone]);
  return (
    <fieldset>
      <legend>next ticks</legend>
      <Failure of={error} />
      {!cron && !every && <p class="faint">Set cron, such as 30 2 * * *, or every.</p>}
      {value && value.ticks.length > 0 && (
        <ol class="ticks">
          {value.ticks.map((at) => (
            <li key={at}>
              <Tick at={at} />
            </li>
          ))}
        </ol>
      )}
    </fieldset>
  );
}
