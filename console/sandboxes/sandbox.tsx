import { call, send } from "../api/client.ts";
import type { LiveSandbox, SandboxAct, SandboxTimeout } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { Action, Opener } from "../ui/action.tsx";
import { Files, type Source } from "../ui/files.tsx";
import { Form } from "../ui/form.tsx";
import { Log, useLog } from "../ui/output.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { Tabs } from "../ui/tabs.tsx";
import { Empty, Facts, Failure, Name, Pairs, Status, Time } from "../ui/text.tsx";
import { file, list, move, remove } from "./guest.ts";
import { Processes } from "./processes.tsx";

export function Sandbox({ args: { id } }: { args: Record<string, string> }) {
  const { value: s, error, reload } = useLive((signal) => call("getSandbox", { id }, signal), [id], "sandboxes");
  const mayExecute = useMay("execute");
  if (!s) return <Failure of={error} />;
  const running = s.state === "running";
  const timeout = (label: string, run: (body: SandboxTimeout) => Promise<unknown>) => (
    <Opener label={label}>
      {(close) => (
        <Form
          schema="SandboxTimeout"
          label={label}
          submit={(body) => run(body).then(() => (close(), reload()))} />
      )}
    </Opener>
  );
  return (
    <>
      <div class="actions">
        <code>{id}</code> <Status of={s.state} />
        {mayExecute && running && timeout("Extend", (body) => call("extendSandbox", { id, body }))}
        {mayExecute && running && <Action run={() => call("pauseSandbox", { id }).then(reload)}>Pause</Action>}
        {mayExecute && s.state === "paused" && timeout("Resume", (body) => call("resumeSandbox", { id, body }))}
        {mayExecute && s.state !== "ended" && (
          <Action
            danger
            confirm="Delete this sandbox? It cannot be resumed."
            run={() => call("deleteSandbox", { id }).then(reload)}>
            Delete
          </Action>
        )}
      </div>
      <Failure of={error} />
      <Facts of={facts(s)} />
      <Tabs
        of={[
          mayExecute && running && ["Processes", () => <Processes id={id} idle={Boolean(s.idle_timeout)} />],
          mayExecute && running && ["Files", () => <Files of={guestFiles(id)} />],
          mayExecute && ["Log", () => <Logs key={`${s.trace_id} ${s.state}`} id={id} />],
          ["History", () => <Acts of={s.acts} />],
        ]} />
    </>
  );
}

function facts(s: LiveSandbox): Parameters<typeof Facts>[0]["of"] {
  return [
    ["Name", <Name>{s.name}</Name>],
    ["Profile", s.profile || "the key's profile"],
    ["Reason", s.reason ? <Name>{s.message ?? s.reason}</Name> : undefined],
    ["Created", <Time at={s.created_at} />],
    ["Started", <Time at={s.started_at} />],
    ["Stopped", s.stopped_at ? <Time at={s.stopped_at} /> : undefined],
    [s.stopped_at ? "Expired" : "Expires", s.reason && s.stopped_at ? undefined : <Time at={s.expires_at} />],
    ["On timeout", s.on_timeout],
    ["Idle timeout", s.idle_timeout ? `${s.idle_timeout} s` : undefined],
    ["Starts", s.starts],
    ["Execution", <a href={link(path("executions", s.trace_id))}>{s.trace_id}</a>],
    [
      "Thread",
      s.thread_id
        ? (
          <a href={link(path("threads", s.thread_id))}>
            <Name>{s.thread_id}</Name>
          </a>
        )
        : undefined,
    ],
    ["API key", <Name>{s.key_id}</Name>],
    ["Metadata", <Pairs of={s.metadata} />],
  ];
}

function guestFiles(id: string): Source {
  return {
    key: id,
    start: "/home/user",
    top: ["/", "/"],
    list: (path, signal) => list(id, path, signal),
    address: (path) => Promise.resolve(file(id, path)),
    upload: (path, body) =>
      send("POST", file(id, path), { body, headers: { "Content-Type": "application/octet-stream" } }),
    rename: (from, to) => move(id, from, to),
    remove: (path) => remove(id, path),
  };
}

// Logs shows the output of processes since the last start.
function Logs({ id }: { id: string }) {
  const log = useLog([id]);
  const { value, error, reload, loading } = useLive(
    async (signal) => {
      const { entries, truncated } = await call("readSandboxLogs", { id }, signal);
      log.clear();
      for (const e of entries) {
        const source = `${e.pid} ${e.stream}`;
        if (e.type === "start") log.add("gap", `${e.pid} $ ${e.command}\n`);
        else if (e.type === "output") log.add(e.stream === "stderr" ? "stderr" : "stdout", e.text ?? "", source);
        else if (e.type === "end") log.add("gap", `${e.pid} ended with exit code ${e.exit_code}\n`);
        else if (e.type === "dropped") log.add("gap", `… ${e.count} entries missing …\n`);
      }
      return { truncated };
    },
    [id],
    "sandboxes",
  );
  return (
    <>
      <div class="actions">
        <button onClick={reload} disabled={loading}>Refresh</button>
      </div>
      <Failure of={error} />
      {value?.truncated && <p class="faint">The log has reached its limit: entries are missing.</p>}
      {log.cut && <p class="faint">Only the end is shown.</p>}
      <Log pieces={log.pieces} ended={!loading} />
    </>
  );
}

const acts: Column<SandboxAct>[] = [
  { head: "Action", cell: (a) => a.act },
  { head: "At", cell: (a) => <Time at={a.at} /> },
  { head: "API key or member", cell: (a) => <Name>{a.key_id}</Name> },
  {
    head: "Request",
    cell: (a) => (
      <code>
        <Name>{a.request_id}</Name>
      </code>
    ),
  },
];

const Acts = ({ of }: { of: SandboxAct[] }) => (
  <Table
    label="History"
    columns={acts}
    list={{ value: of, loading: false }}
    keyOf={(a) => a.at + a.act}
    empty={<Empty>No actions yet.</Empty>} />
);
