import { type Args, call } from "../api/client.ts";
import type { LiveSandbox, SandboxRequest } from "../api/schema.ts";
import { useList } from "../app/live.ts";
import { link, navigate, type Page, path, useParam } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { Opener } from "../ui/action.tsx";
import { Form } from "../ui/form.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { Empty, Name, Pairs, Status, Time } from "../ui/text.tsx";
import { Sandbox } from "./sandbox.tsx";

type State = NonNullable<Args<"listSandboxes">["state"]>;
const states: State[] = ["starting", "running", "stopping", "paused", "ended"];
const order = [
  "name",
  "profile",
  "timeout",
  "on_timeout",
  "idle_timeout",
  "thread_id",
  "sub_paths",
  "env_vars",
  "metadata",
];

const columns: Column<LiveSandbox>[] = [
  { head: "Sandbox", cell: (s) => <code>{s.id}</code> },
  { head: "Name", cell: (s) => <Name>{s.name}</Name> },
  { head: "State", cell: (s) => <Status of={s.state} /> },
  { head: "Reason", cell: (s) => s.reason ?? <span class="faint">–</span> },
  { head: "Created", cell: (s) => <Time at={s.created_at} /> },
  { head: "Expires", cell: (s) => s.stopped_at ? <span class="faint">–</span> : <Time at={s.expires_at} /> },
  { head: "Starts", cell: (s) => s.starts, class: "number" },
  { head: "Thread", cell: (s) => <Name>{s.thread_id}</Name> },
  { head: "Metadata", cell: (s) => <Pairs of={s.metadata} /> },
];

function Sandboxes() {
  const [state, setState] = useParam("state");
  const mayExecute = useMay("execute");
  const list = useList("listSandboxes", { state: state as State }, "sandboxes", (s) => s.id, "sandboxes");
  return (
    <>
      <div class="filters">
        <label>
          state
          <br />
          <select value={state} onChange={(e) => setState(e.currentTarget.value)}>
            <option value="">any</option>
            {states.map((s) => <option key={s}>{s}</option>)}
          </select>
        </label>
        {mayExecute && (
          <Opener label="Create sandbox" primary>
            {(close) => (
              <Form
                schema="SandboxRequest"
                fields={order}
                label="Create"
                submit={async (body) => {
                  const made = await call("createSandbox", { body: body as SandboxRequest });
                  close();
                  navigate(path("sandboxes", made.id));
                }} />
            )}
          </Opener>
        )}
      </div>
      <Table
        label="Sandboxes"
        columns={columns}
        list={list}
        keyOf={(s) => s.id}
        hrefOf={(s) => link(path("sandboxes", s.id))}
        empty={
          <Empty command="bullpen sandbox create --name build --timeout 1h --on-timeout pause">
            {state ? `No ${state} sandboxes.` : "No sandboxes. A sandbox outlives its commands. Create one here, or:"}
          </Empty>
        } />
    </>
  );
}

export const pages: Page[] = [
  { path: "/sandboxes", title: "Sandboxes", view: Sandboxes, nav: { group: "Work", key: "x" }, scope: "read" },
  { path: "/sandboxes/:id", title: "Sandbox", view: Sandbox, scope: "read" },
];
