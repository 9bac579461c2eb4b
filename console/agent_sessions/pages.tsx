import { useState } from "preact/hooks";
import { useLive } from "../app/live.ts";
import { link, navigate, type Page, path } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { Opener, useSubmit } from "../ui/action.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { count, Empty, Failure, Name, Status, Time } from "../ui/text.tsx";
import { type Agent, type AgentSession, call } from "./api.ts";
import { Session } from "./session.tsx";

const columns: Column<AgentSession>[] = [
  { head: "Session", cell: (s) => <Name>{s.sessionId}</Name> },
  { head: "Title", cell: (s) => <Name>{s.title}</Name> },
  { head: "Status", cell: (s) => <Status of={s.ended ? "ended" : "open"} /> },
  { head: "Agent", cell: (s) => <Name>{s.agent}</Name> },
  { head: "Mode", cell: (s) => <Name>{s.agentMode}</Name> },
  { head: "Model", cell: (s) => <Name>{s.model}</Name> },
  { head: "Events", cell: (s) => count(s.eventCount), class: "number" },
  { head: "Updated", cell: (s) => <Time at={new Date(s.updatedAt).toISOString()} /> },
  { head: "Created", cell: (s) => <Time at={new Date(s.createdAt).toISOString()} /> },
];

function Sessions() {
  const mayExecute = useMay("execute");
  const list = useLive(
    async (signal) => (await call<{ sessions: AgentSession[] }>("GET", ["sessions"], undefined, signal)).sessions,
    [],
    "agent_sessions",
  );
  return (
    <>
      {mayExecute && (
        <div class="filters">
          <Opener label="Create agent session" primary>{(close) => <Create close={close} />}</Opener>
        </div>
      )}
      <Table
        label="Agent sessions"
        columns={columns}
        list={list}
        keyOf={(s) => s.sessionId}
        hrefOf={(s) => link(path("agent-sessions", s.sessionId))}
        empty={
          <Empty command="bullpen agent session create demo --agent mock">
            No agent sessions. Create one here, or:
          </Empty>
        } />
    </>
  );
}

interface Named {
  id: string;
  name?: string;
}

function Create({ close }: { close: () => void }) {
  const [value, setValue] = useState<Record<string, string>>({ agent: "mock" });
  const agents = useLive(
    async (signal) => (await call<{ agents: Agent[] }>("GET", ["agents"], undefined, signal)).agents,
    [],
  );
  const useNamed = (what: "modes" | "models") =>
    useLive(
      async (signal) =>
        (await call<Record<string, Named[]>>("GET", ["agents", value.agent, what], undefined, signal))[what],
      [value.agent],
    ).value ?? [];
  const modes = useNamed("modes"), models = useNamed("models");
  const { busy, submit, failure } = useSubmit(async (all: Record<string, string>) => {
    const { id, ...body } = Object.fromEntries(Object.entries(all).filter(([, v]) => v));
    const made = await call<{ sessionId?: string }>("POST", id ? ["sessions", id] : ["sessions"], body);
    close();
    navigate(path("agent-sessions", id || made.sessionId!));
  });
  const set = (name: string, v: string) => setValue({ ...value, [name]: v });
  const choice = (name: string, label: string, options: Named[], none?: string) => (
    <div class="field">
      <label for={"new-" + name}>{label}</label>
      <select id={"new-" + name} value={value[name] ?? ""} onChange={(e) => set(name, e.currentTarget.value)}>
        {none && <option value="">{none}</option>}
        {options.map((o) => <option key={o.id} value={o.id}>{o.name ?? o.id}</option>)}
      </select>
    </div>
  );
  const text = (name: string, label: string, help: string) => (
    <div class="field">
      <label for={"new-" + name}>{label}</label>
      <input
        id={"new-" + name}
        aria-describedby={`new-${name}-help`}
        value={value[name] ?? ""}
        spellcheck={false}
        onInput={(e) => set(name, e.currentTarget.value)} />
      <p class="help" id={`new-${name}-help`}>{help}</p>
    </div>
  );
  return (
    <form class="form" onSubmit={(e) => (e.preventDefault(), submit(value))}>
      <Failure of={agents.error} />
      {choice(
        "agent",
        "agent",
        (agents.value ?? []).map(({ id, installed }) => (
          { id, name: installed ? id : `${id} (not installed)` }
        )),
      )}
      {choice("agentMode", "mode", modes, "default")}
      {choice("permissionMode", "permissions", ["plan", "acceptEdits", "bypass"].map((id) => ({ id })), "default")}
      {choice("model", "model", models, "default")}
      {text("title", "title", "Shown in lists.")}
      {text("id", "id", "Any text of up to 200 bytes. If empty, the server chooses one.")}
      {text(
        "directory",
        "directory",
        "Where the agent works, in the session's home. If empty, the home itself.",
      )}
      {failure}
      <div class="actions">
        <button class="primary" disabled={busy} aria-busy={busy}>Create</button>
      </div>
    </form>
  );
}

export const pages: Page[] = [
  {
    path: "/agent-sessions",
    title: "Agent sessions",
    view: Sessions,
    nav: { group: "Agents", key: "a" },
    scope: "read",
  },
  { path: "/agent-sessions/:id", title: "Agent session", view: Session, scope: "read" },
];
