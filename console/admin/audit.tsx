import { useState } from "preact/hooks";
import { call } from "../api/client.ts";
import type { AuditRecord as One, AuditVerification } from "../api/schema.ts";
import { useList, useLive } from "../app/live.ts";
import { link, navigate, path, useLocation } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { Opener } from "../ui/action.tsx";
import { Difference } from "../ui/diff.tsx";
import { Form, TimeField } from "../ui/form.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { count, Empty, Facts, Failure, Name, Problem, Section, Status, Time } from "../ui/text.tsx";

// outcome shows how an action ended. An action in progress, or whose server died, has only an intent.
const outcome = (r: One) => <Status of={r.stage === "intent" ? "unknown" : r.error ? "failed" : "success"} />;

const objectOf = ({ object: { kind, name, org } }: One) =>
  `${kind} ${name}` + (org && kind !== "org" ? ` of ${org}` : "");

// actions leaves out the intents whose outcome is in the list.
function actions(records: One[]): One[] {
  const done = new Set(records.map((r) => r.intent));
  return records.filter((r) => r.stage === "outcome" || !done.has(r.sequence));
}

const columns: Column<One>[] = [
  { head: "Record", cell: (r) => r.sequence },
  { head: "Time", cell: (r) => <Time at={r.time} /> },
  { head: "Action", cell: (r) => <code>{r.action}</code> },
  { head: "Outcome", cell: outcome },
  { head: "HTTP status", cell: (r) => r.status ?? "–", class: "number" },
  { head: "Actor", cell: (r) => <Name>{`${r.actor.name} of ${r.actor.org}`}</Name> },
  { head: "Object", cell: (r) => <Name>{objectOf(r)}</Name> },
];

const fields = ["org", "actor", "action"] as const;

export function Audit() {
  const { query } = useLocation();
  const { global } = useSession();
  const filter = Object.fromEntries(query) as Record<string, string>;
  const set = (name: string, value: string) => navigate("/admin/audit", { ...filter, [name]: value });
  const list = useList("listAudit", filter, "records", (r) => String(r.sequence));
  const field = (name: string, placeholder: string) => (
    <label>
      {name}
      <br />
      <input
        value={filter[name] ?? ""}
        size={17}
        placeholder={placeholder}
        spellcheck={false}
        onChange={(e) => set(name, e.currentTarget.value.trim())} />
    </label>
  );
  return (
    <>
      <form class="filters" onSubmit={(e) => e.preventDefault()}>
        {fields.map((name) => field(name, { org: "any", actor: "key_… or mem_…", action: "such as key.create" }[name]))}
        <TimeField name="created_after" value={filter.created_after} set={set} />
        <TimeField name="created_before" value={filter.created_before} set={set} />
        {query.size > 0 && <a href="#/admin/audit">Clear filters</a>}
      </form>
      <div class="actions">
        <button onClick={list.reload}>Refresh</button>
        {global && <Verification />}
      </div>
      <Table
        label="Audit records"
        columns={columns}
        list={{ ...list, value: list.value && actions(list.value) }}
        keyOf={(r) => String(r.sequence)}
        hrefOf={(r) => link(path("admin", "audit", String(r.sequence)), { at: r.time })}
        empty={<Empty command="bullpen audit list --after 24h">No matching records.</Empty>} />
    </>
  );
}

// Verification verifies the hash chain of the audit log.
function Verification() {
  const [found, setFound] = useState<AuditVerification>();
  return (
    <Opener label="Verify" title="Verify that no record was altered or removed">
      {() => (
        <>
          <Form
            schema="AuditVerifyRequest"
            label="Verify"
            submit={(body) => call("verifyAudit", { body }).then(setFound)} />
          {found && <Verified of={found} />}
        </>
      )}
    </Opener>
  );
}

function Verified({ of: v }: { of: AuditVerification }) {
  const unfinished = v.unfinished.join(", ");
  return (
    <div role="status">
      <Problem of={v.problem} />
      <Facts
        of={[
          ["Chain", <Status of={v.valid ? "intact" : "broken"} />],
          ["Records", count(v.records)],
          ["First", v.first],
          ["Last", v.last],
          ["Actions without an outcome", unfinished || "none"],
        ]} />
      {v.head_hash && (
        <p class="help">
          Hash of the last record. Keep a copy outside this server: <code>{v.head_hash}</code>
        </p>
      )}
    </div>
  );
}

// AuditRecord shows one record. The parameter at is its time, by which the API finds it.
export function AuditRecord({ args: { sequence } }: { args: Record<string, string> }) {
  const at = useLocation().query.get("at") ?? "";
  const { value, error, loading } = useLive(async (signal) => {
    const created_before = new Date(Date.parse(at) + 1).toISOString();
    return (await call("listAudit", { created_after: at, created_before, limit: 100 }, signal)).records;
  }, [at]);
  const r = value?.find((r) => String(r.sequence) === sequence);
  if (error) return <Failure of={error} />;
  if (!r) return loading ? null : <Empty>No such record.</Empty>;
  const begin = link("/admin/audit", { actor: r.actor.id, created_before: new Date(Date.parse(at) + 1).toISOString() });
  return (
    <>
      <Facts
        of={[
          ["Action", <code>{r.action}</code>],
          ["Outcome", outcome(r)],
          ["Time", <Time at={r.time} />],
          [
            "Actor",
            <a href={begin}>
              <Name>{`${r.actor.name} (${r.actor.id})`}</Name>
            </a>,
          ],
          ["Organisation of the actor", <Name>{r.actor.org}</Name>],
          ["Object", <Name>{`${r.object.kind} ${r.object.name}`}</Name>],
          ["Organisation of the object", r.object.org ? <Name>{r.object.org}</Name> : undefined],
          ["HTTP status", r.status ?? undefined],
          ["Error", r.error ?? undefined],
          ["Source IP", <Name>{r.source_ip}</Name>],
          ["User agent", <Name>{r.user_agent}</Name>],
          ["Request", <Name>{r.request_id}</Name>],
          ["Intent record", r.intent ?? undefined],
          ["Execution", r.trace_id ? <a href={link(path("executions", r.trace_id))}>{r.trace_id}</a> : undefined],
        ]} />
      {(r.before || r.after) && (
        <Section title="Changes">
          <Difference before={text(r.before)} after={text(r.error && !r.after ? r.before : r.after)} />
        </Section>
      )}
      <Section title="Chain">
        <Facts of={[["Hash", <code>{r.hash}</code>], ["Previous hash", <code>{r.previous}</code>]]} />
      </Section>
    </>
  );
}

const text = (object: unknown) => object ? JSON.stringify(object, null, 2) : "";
