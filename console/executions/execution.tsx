import { call } from "../api/client.ts";
import type { Execution as Whole } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { stored } from "../threads/source.ts";
import { Action } from "../ui/action.tsx";
import { Waterfall } from "../ui/chart.tsx";
import { Files } from "../ui/files.tsx";
import { Output } from "../ui/output.tsx";
import { bytes, duration, Facts, Failure, Name, Pairs, Problem, Section, Status, Time } from "../ui/text.tsx";
import { Delivery } from "../webhooks/delivery.tsx";

const over = (status: string) => status !== "queued" && status !== "running";

export function Execution({ args: { id } }: { args: Record<string, string> }) {
  const { value: e, error, reload } = useLive((signal) => call("getExecution", { id }, signal), [id], "executions");
  const mayExecute = useMay("execute");
  const mayFiles = useMay("files");
  if (!e) return <Failure of={error} />;
  return (
    <>
      <div class="actions">
        <code>{id}</code> <Status of={e.status} />
        {mayExecute && <a class="button" href={link("/run", { from: id })}>Edit and run again</a>}
        {mayExecute && !over(e.status) && (
          <Action danger run={() => call("cancelExecution", { id }).then(reload)}>Cancel</Action>
        )}
      </div>
      <Failure of={error} />
      <Problem of={e.error && (e.error_message ?? e.error)} />
      <Facts of={facts(e)} />
      <Section title="Output">
        <Output id={id} onResult={reload} />
      </Section>
      {e.steps && e.steps.length > 0 && (
        <Section title="Where the time went">
          <Waterfall steps={e.steps} />
        </Section>
      )}
      {e.network && (
        <Section title="Network">
          <Facts
            of={[["Received", bytes(e.network.bytes_in)], ["Sent", bytes(e.network.bytes_out)], [
              "Blocked connections",
              e.network.blocked_total,
            ]]} />
          {e.network.blocked_connections.map((c, i) => (
            <p key={i}>
              <Time at={c.at} /> <Name>{`${c.protocol} ${c.host ?? c.address ?? ""}:${c.port ?? ""} ${c.reason}`}</Name>
            </p>
          ))}
        </Section>
      )}
      {e.thread_id && e.completed_at && mayFiles && <HomeFiles id={id} thread={e.thread_id} />}
      {e.webhook_url && <Delivery id={id} />}
    </>
  );
}

// HomeFiles shows the thread's files as the execution left them, while that version is kept.
function HomeFiles({ id, thread }: { id: string; thread: string }) {
  const { value: t, error } = useLive((signal) => call("getThread", { id: thread }, signal), [thread], "executions");
  const version = t?.versions.find((v) => v.trace_id === id)?.number;
  return (
    <Section title="Files">
      <Failure of={error} />
      {t && !version && <p class="faint">It stored no version of the thread, or that version has been removed.</p>}
      {version && <Files of={stored("thread", thread, version, false)} />}
    </Section>
  );
}

function facts(e: Whole): Parameters<typeof Facts>[0]["of"] {
  const to = (page: string, id: string | null | undefined) =>
    id
      ? (
        <a href={link(path(page, id))}>
          <Name>{id}</Name>
        </a>
      )
      : undefined;
  return [
    ["Language", e.language],
    ["Profile", e.profile],
    ["Mode", e.delivery_mode],
    ["Created", <Time at={e.created_at} />],
    ["Ended", e.completed_at ? <Time at={e.completed_at} /> : undefined],
    ["Waited", duration(e.queued_ms)],
    ["Ran", e.completed_at ? duration(e.duration_ms) : undefined],
    ["Exit code", e.exit_code ?? undefined],
    ["Timeout", `${e.timeout} s`],
    ["Attempt", e.attempt || undefined],
    ["Thread", to("threads", e.thread_id)],
    ["Schedule", to("schedules", e.schedule_id)],
    ["Batch", to("batches", e.batch?.id)],
    ["Pipeline", to("pipelines", e.pipeline_id)],
    ["Step", e.step],
    ["Waiting for", e.waiting_for?.message],
    ["Metadata", <Pairs of={e.metadata} />],
    ["stdout", e.stdout_truncated ? "truncated in the result" : undefined],
    ["stderr", e.stderr_truncated ? "truncated in the result" : undefined],
  ];
}
