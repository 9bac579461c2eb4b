import { useEffect, useMemo, useState } from "preact/hooks";
import type { ApiError } from "../api/client.ts";
import { follow, type StreamState } from "../api/events.ts";
import { useLive } from "../app/live.ts";
import { navigate } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { Action, notify, useSubmit } from "../ui/action.tsx";
import { Diff } from "../ui/diff.tsx";
import { Files } from "../ui/files.tsx";
import { StreamSign, useEnd } from "../ui/output.tsx";
import { Tabs } from "../ui/tabs.tsx";
import { count, Facts, Failure, JSONText, Name, Status, Time, visible } from "../ui/text.tsx";
import { type AgentSession, at, call, homeOf, type Item, type Part, type Permission, type Question } from "./api.ts";
import { Conversation, type Line } from "./conversation.ts";

const eventsShown = 5000; // the newest events that the page reads when it opens

export function Session({ args: { id } }: { args: Record<string, string> }) {
  const { value: s, error, reload } = useLive(
    (signal) => call<AgentSession>("GET", ["sessions", id], undefined, signal),
    [id],
    "agent_sessions",
  );
  const mayExecute = useMay("execute");
  const mayFiles = useMay("files");
  if (!s) return <Failure of={error} />;
  return (
    <>
      <div class="actions">
        <code>
          <Name>{id}</Name>
        </code>{" "}
        <Status of={s.ended ? "ended" : "open"} />
        {mayExecute && !s.ended && (
          <Action
            danger
            confirm="End this session? It stays readable."
            run={() => call("POST", ["sessions", id, "terminate"]).then(reload)}>
            End
          </Action>
        )}
        {mayExecute && (
          <Action
            danger
            confirm="End this session and delete it with its files?"
            run={() => call("DELETE", ["sessions", id]).then(() => navigate("/agent-sessions"))}>
            Delete
          </Action>
        )}
      </div>
      <Failure of={error} />
      <Facts
        of={[
          ["Title", s.title ? <Name>{s.title}</Name> : undefined],
          ["Agent", <Name>{s.agent}</Name>],
          ["Mode", <Name>{s.agentMode}</Name>],
          ["Permissions", <Name>{s.permissionMode}</Name>],
          ["Model", <Name>{s.model}</Name>],
          ["Directory", s.directory ? <Name>{s.directory}</Name> : undefined],
          ["Events", count(s.eventCount)],
          ["Created", <Time at={new Date(s.createdAt).toISOString()} />],
          ["Updated", <Time at={new Date(s.updatedAt).toISOString()} />],
        ]} />
      <Tabs
        of={[
          ["Conversation", () => <Talk id={id} session={s} mayAnswer={mayExecute && !s.ended} />],
          mayFiles && ["Files", () => <Files of={homeOf(id, !s.ended)} />],
        ]} />
    </>
  );
}

// Talk shows the conversation live. It reads each event of the session's stream once.
function Talk({ id, session, mayAnswer }: { id: string; session: AgentSession; mayAnswer: boolean }) {
  const [state, setState] = useState<StreamState>("connecting");
  const [error, setError] = useState<ApiError>();
  const [, draw] = useState(0);
  const talk = useMemo(() => new Conversation(), [id]);
  useEffect(() => {
    const stop = new AbortController();
    let frame = 0;
    follow({
      url: () => {
        const url = at("sessions", id, "events", "sse");
        url.search = "offset=" + Math.max(0, session.eventCount - eventsShown);
        return url;
      },
      signal: stop.signal,
      onState: (s, e) => (setState(s), setError(e)),
      onEvent: (data) => {
        if (data) talk.add(JSON.parse(data), data.length);
        frame ||= requestAnimationFrame(() => (frame = 0, draw((n) => n + 1)));
      },
    });
    return () => (stop.abort(), cancelAnimationFrame(frame));
  }, [id]);
  const reply: Reply = (kind, key, verb, body) => call("POST", ["sessions", id, kind, key, verb], body);
  return (
    <>
      <div class="actions">
        <StreamSign state={state} />
        {!talk.ended && talk.waits && <span class="status wait" role="status">the agent is waiting for an answer</span>}
        {!talk.waits && talk.working && <span class="status busy" role="status">the agent is working</span>}
      </div>
      <Failure of={error} />
      {(talk.cut || session.eventCount > eventsShown) && (
        <p class="faint">
          Only the end of the conversation is shown.
        </p>
      )}
      <div class="talk" {...useEnd<HTMLDivElement>()} tabIndex={0} role="log" aria-label="Conversation">
        {talk.lines.length === 0 && <p class="faint">No messages yet.</p>}
        {talk.lines.map((line) => <Entry key={line.key} of={line} reply={mayAnswer ? reply : undefined} />)}
      </div>
      {mayAnswer && <Compose id={id} busy={talk.working} />}
    </>
  );
}

type Reply = (kind: string, key: string, verb: string, body?: unknown) => Promise<unknown>;

function Entry({ of, reply }: { of: Line; reply?: Reply }) {
  switch (of.kind) {
    case "item":
      return <ItemEntry item={of.item} typed={of.typed} at={of.at} />;
    case "permission":
      return <PermissionEntry of={of.permission} at={of.at} reply={reply} />;
    case "question":
      return <QuestionEntry of={of.question} at={of.at} reply={reply} />;
    case "note":
      return (
        <div class={of.bad ? "bad" : ""}>
          <header>
            <Time at={of.at} />
          </header>
          <Name>{of.text}</Name>
        </div>
      );
  }
}

const kinds: Record<string, string> = { tool_call: "tool call", tool_result: "tool result", status: "status" };
const progress: Record<string, string> = { failed: " (failed)", in_progress: " …" };

function ItemEntry({ item, typed, at }: { item: Item; typed: string; at: string }) {
  // The streamed text replaces the text with which the item started.
  const parts = typed ? item.content.filter((p) => p.type !== "text") : item.content;
  return (
    <div class={(item.role === "user" ? "user" : "") + (item.status === "failed" ? " bad" : "")}>
      <header>
        <b>
          <Name>{item.role ?? "agent"}</Name>
        </b>
        <span>{kinds[item.kind] ?? ""}{progress[item.status] ?? ""}</span>
        <Time at={at} />
      </header>
      {typed && <div class="text">{visible(typed)}</div>}
      {parts.map((p, i) => <PartEntry key={i} of={p} />)}
    </div>
  );
}

function PartEntry({ of }: { of: Part }) {
  switch (of.type) {
    case "text":
      return <div class="text">{visible(of.text ?? "")}</div>;
    case "reasoning":
      return (
        <details>
          <summary class="faint">{of.visibility === "private" ? "Private reasoning" : "Reasoning"}</summary>
          <div class="text">{visible(of.text ?? "")}</div>
        </details>
      );
    case "tool_call":
      return (
        <>
          <code>
            <Name>{of.name}</Name>
          </code>
          <JSONText of={parsed(of.arguments)} />
        </>
      );
    case "tool_result":
      if (!of.output) return <span class="faint">no output</span>;
      return <pre class="file" tabIndex={0}>{visible(of.output)}</pre>;
    case "file_ref":
      return (
        <>
          <div>
            <span class="faint">{of.action}</span>{" "}
            <code>
              <Name>{of.path}</Name>
            </code>
          </div>
          {of.diff && <Diff of={of.diff} />}
        </>
      );
    case "json":
      return <JSONText of={of.json} />;
    case "image":
      return (
        <div>
          <span class="faint">picture</span>{" "}
          <code>
            <Name>{of.path}</Name>
          </code>
        </div>
      );
    case "status":
      return <div class="text">{visible([of.label, of.detail].filter(Boolean).join(": "))}</div>;
  }
}

function parsed(text = ""): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

const decisions: Record<string, string> = {
  accept: "allowed once",
  accept_for_session: "always allowed",
  reject: "rejected",
};

function PermissionEntry({ of, at, reply }: { of: Permission; at: string; reply?: Reply }) {
  const answer = (text: string) => reply!("permissions", of.permission_id, "reply", { reply: text });
  const pending = of.status === "requested";
  return (
    <div class={pending ? "ask" : ""}>
      <header>
        <b>permission</b>
        <span>{decisions[of.status] ?? ""}</span>
        <Time at={at} />
      </header>
      <div>
        The agent requests permission for{" "}
        <code>
          <Name>{of.action}</Name>
        </code>
      </div>
      {of.metadata !== null && <JSONText of={of.metadata} />}
      {pending && reply && (
        <div class="actions">
          <Action run={() => answer("once")}>Allow once</Action>
          <Action run={() => answer("always")}>Always allow</Action>
          <Action danger run={() => answer("reject")}>Reject</Action>
        </div>
      )}
    </div>
  );
}

function QuestionEntry({ of, at, reply }: { of: Question; at: string; reply?: Reply }) {
  const [other, setOther] = useState("");
  const answer = (text: string) => reply!("questions", of.question_id, "reply", { answers: [[text]] });
  const pending = of.status === "requested";
  return (
    <div class={pending ? "ask" : ""}>
      <header>
        <b>question</b>
        <span>{pending ? "" : of.status}</span>
        <Time at={at} />
      </header>
      <div class="text">{visible(of.prompt)}</div>
      {of.response !== null && <div class="text">{visible(of.response)}</div>}
      {pending && reply && (
        <div class="actions">
          {of.options.map((option) => (
            <Action key={option} run={() => answer(option)}>
              <Name>{option}</Name>
            </Action>
          ))}
          <input
            aria-label="Another answer"
            placeholder="another answer"
            value={other}
            onInput={(e) => setOther(e.currentTarget.value)} />
          <Action run={() => answer(other)} disabled={!other}>Answer</Action>
          <Action danger run={() => reply("questions", of.question_id, "reject")}>Reject</Action>
        </div>
      )}
    </div>
  );
}

function Compose({ id, busy: queued }: { id: string; busy: boolean }) {
  const [text, setText] = useState("");
  const { busy, submit, failure } = useSubmit(async (message: string) => {
    await call("POST", ["sessions", id, "messages"], { message });
    setText("");
    if (queued) notify("The message is queued until the agent's turn ends.");
  });
  return (
    <form class="compose" onSubmit={(e) => (e.preventDefault(), submit(text))}>
      <textarea
        rows={3}
        aria-label="Message"
        placeholder="Message to the agent (Ctrl+Enter sends it)"
        required
        value={text}
        onInput={(e) => setText(e.currentTarget.value)}
        onKeyDown={(e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && text && !busy && submit(text)} />
      {failure}
      <div class="actions">
        <button class="primary" disabled={busy} aria-busy={busy}>Send</button>
      </div>
    </form>
  );
}
