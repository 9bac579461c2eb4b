// The kinds of objects that administrators manage.
import { call } from "../api/client.ts";
import type { Image, Key, KeyMount, Member, Org, Plan, Quota, Sandbox, Secret, Session } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { link, path } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { Action, Opener } from "../ui/action.tsx";
import { Form } from "../ui/form.tsx";
import { Table } from "../ui/table.tsx";
import { bytes, count, Empty, Failure, Name, Pairs, Section, Status, Time } from "../ui/text.tsx";
import { type Kind, Shown } from "./kind.tsx";
import { useState } from "preact/hooks";

const ref = (plural: string, id: string | null | undefined) =>
  id
    ? (
      <a href={link(path("admin", plural, id))}>
        <Name>{id}</Name>
      </a>
    )
    : undefined;
const words = (list: string[] | null | undefined) => list?.length ? <Name>{list.join(", ")}</Name> : undefined;
const limit = (n: number | null | undefined) => n ? count(n) : "no limit";
const yes = (b: boolean | undefined) => b ? "yes" : "no";

const stateOf = (o: Org) => o.deleting_at ? "deleting" : o.suspended ? "suspended" : "active";

export const orgs: Kind<Org> = {
  plural: "orgs",
  title: "Organisations",
  one: "organisation",
  id: (o) => o.name,
  changedByGlobal: true,
  columns: [
    { head: "Name", cell: (o) => o.name },
    { head: "Title", cell: (o) => <Name>{o.title}</Name> },
    { head: "Status", cell: (o) => <Status of={stateOf(o)} /> },
    { head: "Plan", cell: (o) => ref("plans", o.plan) },
    { head: "Created", cell: (o) => <Time at={o.created_at} /> },
  ],
  facts: (o) => [
    ["Status", <Status of={stateOf(o)} />],
    ["Title", <Name>{o.title}</Name>],
    ["Plan", ref("plans", o.plan)],
    ["Created", <Time at={o.created_at} />],
    ["Deletion began", o.deleting_at && <Time at={o.deleting_at} />],
    [
      "See also",
      <>
        {["keys", "members", "secrets", "sessions", "audit"].map((plural) => (
          <span key={plural}>
            <a href={link("/admin/" + plural, { org: o.name })}>{plural}</a>
            {" "}
          </span>
        ))}
      </>,
    ],
  ],
  first: ["name", "title", "plan", "suspended"],
  create: { schema: "OrgRequest" },
  replace: { schema: "OrgRequest", hidden: ["name"] },
  remove: { label: "Delete", question: "Delete the organisation with all its data? This cannot be undone." },
  fixed: (o) => !!o.deleting_at,
  Actions: ({ of: { title, plan, suspended }, change }) => (
    <Action
      confirm={suspended
        ? undefined
        : "Suspend the organisation? Requests with its keys are rejected. Accepted work continues."}
      run={() => change({ title, plan, suspended: !suspended })}>
      {suspended ? "Resume" : "Suspend"}
    </Action>
  ),
  Details: ({ id }) => useSession().global ? <Stored org={id} /> : null,
  empty: { text: "No organisations.", command: "bullpen org create acme --plan pro" },
};

// Stored shows how much data an organisation has, even after its deletion.
function Stored({ org }: { org: string }) {
  const [all, setAll] = useState(false);
  const { value, error, loading, reload } = useLive(
    (signal) => call("getOrgData", { name: org }, signal),
    [org],
    "orgs",
  );
  const list = { value: value?.data.filter((d) => all || d.count > 0), error, loading };
  return (
    <Section
      title={`Stored data: ${value ? count(value.total) : "…"} objects`}
      actions={
        <>
          <button onClick={() => setAll(!all)}>{all ? "Hide empty kinds" : "Show all kinds"}</button>
          <button onClick={reload}>Refresh</button>
        </>
      }>
      <Table
        label="Stored data"
        list={list}
        keyOf={(d) => d.kind}
        empty={<Empty>No stored data.</Empty>}
        columns={[
          { head: "Kind", cell: (d) => d.kind },
          { head: "Count", cell: (d) => count(d.count), class: "number" },
          { head: "Bytes", cell: (d) => d.bytes ? bytes(d.bytes) : "–", class: "number" },
        ]} />
    </Section>
  );
}

const quota = (
  name: string,
  q: Quota | undefined,
): [string, string | undefined] => [name, q && `${limit(q.hard)}${q.soft ? `, warning at ${count(q.soft)}` : ""}`];

export const plans: Kind<Plan> = {
  plural: "plans",
  title: "Plans",
  one: "plan",
  id: (p) => p.name,
  changedByGlobal: true,
  columns: [
    { head: "Name", cell: (p) => p.name },
    { head: "Title", cell: (p) => <Name>{p.title}</Name> },
    { head: "Concurrent", cell: (p) => limit(p.concurrent), class: "number" },
    { head: "Queued", cell: (p) => limit(p.max_queued), class: "number" },
    { head: "Sandboxes", cell: (p) => limit(p.sandboxes), class: "number" },
    { head: "Timeout, s", cell: (p) => count(p.max_timeout ?? 86_400), class: "number" },
    { head: "Requests/min", cell: (p) => limit(p.request_rate), class: "number" },
    { head: "Weight", cell: (p) => p.weight, class: "number" },
    { head: "Async", cell: (p) => yes(p.async) },
    { head: "Streaming", cell: (p) => yes(p.streaming) },
  ],
  facts: (p) => [
    ["Title", <Name>{p.title}</Name>],
    ["Concurrent executions", limit(p.concurrent)],
    ["Queued executions", limit(p.max_queued)],
    ["Live sandboxes", limit(p.sandboxes)],
    ["Maximum timeout", `${count(p.max_timeout ?? 86_400)} s`],
    ["Requests per minute", limit(p.request_rate)],
    ["Queue weight", p.weight],
    ["Async", yes(p.async)],
    ["Streaming", yes(p.streaming)],
    ["Next plan", ref("plans", p.next)],
    quota("CPU seconds per month", p.monthly?.cpu_seconds),
    quota("Memory MiB seconds per month", p.monthly?.memory_mib_seconds),
    quota("Sandbox seconds per month", p.monthly?.sandbox_seconds),
    quota("Stored bytes", p.monthly?.stored_bytes),
  ],
  first: ["name", "title", "concurrent", "max_queued", "max_timeout", "request_rate", "weight"],
  create: { schema: "PlanRequest" },
  replace: { schema: "PlanRequest", hidden: ["name"] },
  remove: {
    label: "Remove",
    question: "Remove the plan? A changed built-in plan gets its original limits back.",
  },
  empty: { text: "No plans.", command: "bullpen plan create gold --concurrent 20" },
};

export const profiles: Kind<Sandbox> = {
  plural: "profiles",
  title: "Sandbox profiles",
  one: "sandbox profile",
  id: (p) => p.name,
  changedByGlobal: true,
  columns: [
    { head: "Name", cell: (p) => p.name },
    { head: "Image", cell: (p) => p.image || "default" },
    { head: "CPU", cell: (p) => p.cpu, class: "number" },
    { head: "Memory", cell: (p) => bytes(p.memory as string), class: "number" },
    { head: "Processes", cell: (p) => p.pids, class: "number" },
    { head: "Network", cell: (p) => p.network.policy },
    { head: "Preload", cell: (p) => words(p.preload) ?? "–" },
  ],
  facts: (p) => [
    ["Image", p.image || "the server's default, or the workers' runtimes"],
    ["CPU", p.cpu],
    ["Memory", bytes(p.memory as string)],
    ["Processes", p.pids],
    ["Home directory", bytes(p.disk.home as string)],
    ["/tmp", bytes(p.disk.tmp as string)],
    ["Changes to the image", p.disk.root ? bytes(p.disk.root as string) : undefined],
    ["Inodes of each", count(p.disk.inodes)],
    ["Output", bytes(p.output as string)],
    ["Open files", p.open_files],
    ["Terminals", p.terminals],
    ["Agents", p.prepare_agents ? "start with their session" : undefined],
    ["Network", p.network.policy],
    ["Allowed hosts", words(p.network.allow)],
    ["Isolation", p.isolation || undefined],
    ["System calls", words(p.system_calls)],
    ["Preload", words(p.preload)],
    ["Secrets", words(p.secrets)],
    ["Environment", <Pairs of={p.env} />],
  ],
  first: ["name", "image", "cpu", "memory", "network", "env"],
  create: { schema: "ProfileRequest" },
  replace: { schema: "ProfileRequest", hidden: ["name"] },
  remove: { label: "Remove", question: "Remove the sandbox profile?" },
  Details: ({ id, of: profile }) => profile?.preload?.length ? <Preload profile={id} /> : null,
  empty: { text: "No sandbox profiles.", command: "bullpen profile create web --memory 512MiB" },
};

function Preload({ profile }: { profile: string }) {
  const { value, error } = useLive(
    (signal) => call("getProfilePreload", { name: profile }, signal),
    [profile],
    "profiles",
  );
  return (
    <Section title="Preloading">
      <Failure of={error} />
      {value?.error && (
        <p class="failure">
          <Time at={value.at} /> on <Name>{value.worker}</Name>: <Name>{value.error}</Name>
        </p>
      )}
      {value && !value.error && <p class="faint">No worker has failed to import the modules in the last 24 hours.</p>}
    </Section>
  );
}

const expired = (k: Key) => k.expires_at !== null && Date.parse(k.expires_at) < Date.now();
const keyState = (k: Key) => k.revoked_at ? "revoked" : expired(k) ? "expired" : "active";
const mount = (m: KeyMount) => m.connection + (m.prefix ? "/" + m.prefix : "") + (m.read_only ? " (read only)" : "");
const scopes = (k: Key) => (k.global ? "global " : "") + k.scopes.join(", ");

export const keys: Kind<Key> = {
  plural: "keys",
  title: "API keys",
  one: "API key",
  id: (k) => k.id,
  org: "filter",
  columns: [
    { head: "ID", cell: (k) => <code>{k.id}</code> },
    { head: "Name", cell: (k) => <Name>{k.name}</Name> },
    { head: "Organisation", cell: (k) => ref("orgs", k.org) },
    { head: "Status", cell: (k) => <Status of={keyState(k)} /> },
    { head: "Scopes", cell: scopes },
    { head: "Profile", cell: (k) => ref("profiles", k.profile) },
    { head: "Key", cell: (k) => <code>{k.hint}</code> },
    { head: "Last used", cell: (k) => <Time at={k.last_used_at} /> },
    { head: "Expires", cell: (k) => <Time at={k.expires_at} /> },
    { head: "Created", cell: (k) => <Time at={k.created_at} /> },
  ],
  facts: (k) => [
    ["Status", <Status of={keyState(k)} />],
    ["Name", <Name>{k.name}</Name>],
    ["Organisation", ref("orgs", k.org)],
    ["Scopes", scopes(k)],
    ["Plan", ref("plans", k.plan)],
    ["Profile", ref("profiles", k.profile)],
    ["Other profiles", words(k.profiles)],
    ["Key", <code>{k.hint}</code>],
    ["Concurrent executions", k.concurrent ?? undefined],
    ["Maximum timeout", k.max_timeout ? `${k.max_timeout} s` : undefined],
    ["Requests per minute", k.request_rate ?? undefined],
    ["Allowed networks", words(k.allowed_networks)],
    ["Secrets", words(k.secrets)],
    ["Mounts", words(k.mounts?.map(mount))],
    ["Environment", k.env && <Pairs of={k.env} />],
    ["Created", <Time at={k.created_at} />],
    ["Last used", <Time at={k.last_used_at} />],
    ["Expires", k.expires_at ? <Time at={k.expires_at} /> : "never"],
    ["Previous secret valid until", k.overlap_until && <Time at={k.overlap_until} />],
    ["Revoked", k.revoked_at ? <Time at={k.revoked_at} /> : undefined],
    [
      "See also",
      <>
        <a href={link("/webhooks", { key: k.id })}>webhook</a> <a href={link("/admin/audit", { actor: k.id })}>audit</a>
      </>,
    ],
  ],
  first: ["name", "org", "scopes", "profile", "plan", "expires_at"],
  create: { schema: "KeyRequest" },
  replace: { schema: "KeySettings" },
  remove: { label: "Revoke", question: "Revoke the key? Requests with it are rejected from then on." },
  fixed: (k) => !!k.revoked_at,
  secret: (k) => k.key,
  Actions: ({ of: k, reload }) => (
    <Opener label="Rotate" title="Rotate the secret of the key">
      {(close) => <Rotate id={k.id} close={close} reload={reload} />}
    </Opener>
  ),
  empty: { text: "No API keys.", command: "bullpen key create --name ci --org acme" },
};

function Rotate({ id, close, reload }: { id: string; close: () => void; reload: () => void }) {
  const [secret, setSecret] = useState<string>();
  if (secret) return <Shown label="The new secret of the key." value={secret} close={close} />;
  return (
    <Form
      schema="KeyRotation"
      label="Rotate"
      submit={(body) => call("rotateKey", { id, body }).then((k) => (setSecret(k.key), reload()))} />
  );
}

const role = (m: Member) => (m.global ? "global " : "") + m.role;

export const members: Kind<Member> = {
  plural: "members",
  title: "Members",
  one: "member",
  id: (m) => m.id,
  org: "filter",
  columns: [
    { head: "ID", cell: (m) => <code>{m.id}</code> },
    { head: "Email", cell: (m) => <Name>{m.email ?? "–"}</Name> },
    { head: "Subject", cell: (m) => <Name>{m.subject ?? "–"}</Name> },
    { head: "Organisation", cell: (m) => ref("orgs", m.org) },
    { head: "Role", cell: role },
    { head: "Created", cell: (m) => <Time at={m.created_at} /> },
  ],
  facts: (m) => [
    ["Email", m.email ? <Name>{m.email}</Name> : undefined],
    ["Organisation", ref("orgs", m.org)],
    ["Role", role(m)],
    ["Subject", m.subject ? <Name>{m.subject}</Name> : "not signed in yet"],
    ["Identity provider", m.issuer ? <Name>{m.issuer}</Name> : undefined],
    ["Created", <Time at={m.created_at} />],
    ["See also", <a href={link("/admin/audit", { actor: m.id })}>audit</a>],
  ],
  first: ["org", "email", "subject", "role", "global"],
  create: { schema: "MemberRequest" },
  replace: { schema: "MemberSettings" },
  remove: { label: "Remove", question: "Remove the member? The member's sessions end. Running executions continue." },
  Note: NoProvider,
  empty: {
    text: "No members yet. Members sign in with a browser.",
    command: "bullpen member create --org acme --email ada@example.com --role operator",
  },
};

function NoProvider() {
  const { value } = useLive((signal) => call("getLogin", {}, signal), []);
  return value && !value.oidc
    ? <p class="failure">Members cannot sign in: the server has no identity provider (--oidc-issuer).</p>
    : null;
}

const use = (s: Secret) => s.variable ? "as a file or a variable" : "as a file";

export const secrets: Kind<Secret> = {
  plural: "secrets",
  title: "Secrets",
  one: "secret",
  id: (s) => s.name,
  org: "address",
  columns: [
    { head: "Name", cell: (s) => s.name },
    { head: "Size", cell: (s) => bytes(s.bytes), class: "number" },
    { head: "Use", cell: (s) => s.injection ? "injected" : use(s) },
    { head: "Hosts", cell: (s) => words(s.injection?.hosts) ?? "–" },
    { head: "Updated", cell: (s) => <Time at={s.updated_at} /> },
    { head: "Created", cell: (s) => <Time at={s.created_at} /> },
  ],
  facts: (s) => [
    ["Organisation", ref("orgs", s.org)],
    ["Size", bytes(s.bytes)],
    ["Use", s.injection ? "injected: the worker adds it to requests, and programs never see it" : use(s)],
    ["Hosts", words(s.injection?.hosts)],
    ["Header", s.injection && <Name>{s.injection.header}</Name>],
    ["Template", s.injection && <Name>{s.injection.template}</Name>],
    ["Created", <Time at={s.created_at} />],
    ["Updated", <Time at={s.updated_at} />],
  ],
  create: { schema: "SecretRequest", named: true },
  replace: { schema: "SecretRequest", value: (s) => ({ injection: s.injection }) },
  remove: {
    label: "Delete",
    question: "Delete the secret? Keys and profiles that name it execute nothing until it exists again.",
  },
  empty: { text: "No secrets.", command: "bullpen secret set TOKEN < token.txt" },
};

export const images: Kind<Image> = {
  plural: "images",
  title: "Images",
  one: "image",
  id: (i) => i.name,
  global: true,
  columns: [
    { head: "Name", cell: (i) => i.name },
    { head: "Size", cell: (i) => bytes(i.size), class: "number" },
    { head: "Unpacked", cell: (i) => bytes(i.unpacked_size), class: "number" },
    { head: "Architecture", cell: (i) => i.architecture ?? "any" },
    { head: "Languages", cell: (i) => words(Object.keys(i.languages)) ?? "none" },
    { head: "Digest", cell: (i) => <code>{i.digest.slice(0, 19)}…</code> },
    { head: "Created", cell: (i) => <Time at={i.created_at} /> },
  ],
  remove: { label: "Remove", question: "Remove the image?" },
  empty: {
    text: "No images: programs use the workers' runtimes. Import an image to use others:",
    command: "bullpen image import py-3.14 docker.io/library/python:3.14-slim",
  },
};

export const sessions: Kind<Session> = {
  plural: "sessions",
  title: "Browser sessions",
  one: "browser session",
  id: (s) => s.id,
  org: "filter",
  columns: [
    { head: "Name", cell: (s) => <Name>{s.name}</Name> },
    { head: "Organisation", cell: (s) => ref("orgs", s.org) },
    { head: "Key or member", cell: (s) => ref(s.key_id.startsWith("mem_") ? "members" : "keys", s.key_id) },
    { head: "Signed in", cell: (s) => <Time at={s.created_at} /> },
    { head: "Last used", cell: (s) => <Time at={s.used_at} /> },
    { head: "Expires", cell: (s) => <Time at={s.expires_at} /> },
    {
      head: "Browser",
      cell: (s) => (
        <>
          <This session={s} /> <Name>{s.user_agent}</Name>
        </>
      ),
    },
  ],
  remove: { label: "End", question: "End the session?" },
  empty: { text: "No browser sessions.", command: "bullpen session list" },
};

function This({ session }: { session: Session }) {
  return useSession().session?.id === session.id ? <b>this session ·</b> : null;
}
