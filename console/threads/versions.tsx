import { call } from "../api/client.ts";
import type { FileChange, FileCompareRequest, FileState, ThreadVersion } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { link, path, useLocation, useParam } from "../app/router.ts";
import { FileName } from "../ui/files.tsx";
import { Diff } from "../ui/diff.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, count, Empty, Failure, Time } from "../ui/text.tsx";

const none = <Empty>No versions yet. The next execution creates one.</Empty>;

// Execution links to an execution.
export function Execution({ id }: { id: string | null }) {
  return id ? <a href={link(path("executions", id))}>{id}</a> : <span class="faint">–</span>;
}

// Versions lists the versions of a thread or a volume, with links to their files.
export function Versions({ of, mayFiles }: { of: ThreadVersion[]; mayFiles: boolean }) {
  const at = useLocation().path;
  const columns: Column<ThreadVersion>[] = [
    { head: "Version", cell: (v) => v.number },
    { head: "Created", cell: (v) => <Time at={v.created_at} /> },
    { head: "Execution", cell: (v) => <Execution id={v.trace_id} /> },
    { head: "Size", cell: (v) => bytes(v.bytes), class: "number" },
    { head: "Files", cell: (v) => count(v.files), class: "number" },
  ];
  if (mayFiles) {
    columns.push({
      head: "Changes",
      cell: (v) => <a href={link(at, { tab: "Compare", from: v.number - 1, to: v.number })}>Show changes</a>,
    });
  }
  return (
    <Table
      label="Versions"
      columns={columns}
      list={{ value: of, loading: false }}
      keyOf={(v) => String(v.number)}
      hrefOf={mayFiles ? (v) => link(at, { version: v.number }) : undefined}
      empty={none} />
  );
}

// VersionChoice selects the version whose files are shown.
export function VersionChoice({ of }: { of: ThreadVersion[] }) {
  const [version, set] = useParam("version");
  return (
    <label class="actions">
      Version
      <select value={version} onChange={(e) => set(e.currentTarget.value)}>
        <option value="">newest</option>
        {of.map((v) => <option key={v.number} value={v.number}>{v.number}</option>)}
      </select>
    </label>
  );
}

// Difference compares two versions, or a directory or file of them. The page's address names all three.
export function Difference({ source, id, versions }: {
  source: FileCompareRequest["source"];
  id: string;
  versions: ThreadVersion[];
}) {
  const at = useLocation();
  const [from, setFrom] = useParam("from");
  const [to, setTo] = useParam("to");
  const [below, setBelow] = useParam("below");
  const first = from ? Number(from) : (Number(to) || (versions[0]?.number ?? 0)) - 1;
  const { value, error } = useLive(
    (signal) => {
      const body = { source, id, from: first, to: Number(to) || undefined, path: below || undefined };
      return call("compareFiles", { body }, signal);
    },
    [source, id, first, to, below],
  );
  if (!versions.length) return none;
  const choice = (label: string, value: string, set: (v: string) => void, other: string, name: string) => (
    <label>
      {label}{" "}
      <select value={value} onChange={(e) => set(e.currentTarget.value)}>
        {other === "" && <option value="">{name}</option>}
        {versions.map((v) => <option key={v.number} value={v.number}>{v.number}</option>)}
        {other !== "" && <option value={other}>{name}</option>}
      </select>
    </label>
  );
  const diff = value?.diff;
  return (
    <>
      <div class="actions">
        {choice("From version", String(first), setFrom, "0", "none")}
        {choice("to", to, setTo, "", "newest")}
        {below && <button onClick={() => setBelow("")}>All files</button>}
        {below && <FileName of={below} />}
      </div>
      <Failure of={error} />
      {value?.truncated && <p class="faint">There are more changes. Open a directory to see its own.</p>}
      {value && !diff && (
        <Table
          label="Changes"
          columns={changes}
          list={{ value: value.changes, loading: false }}
          keyOf={(c) => c.path}
          hrefOf={(c) => link(at.path, { ...Object.fromEntries(at.query), below: c.path })}
          empty={<Empty>No differences.</Empty>} />
      )}
      {diff?.text && <Diff of={diff.text} />}
      {diff && !diff.text && (
        <Empty>
          {diff.kind === "binary"
            ? "Binary content differs."
            : diff.kind === "too_large"
            ? "The file is too large to compare."
            : "The text is the same."}
        </Empty>
      )}
    </>
  );
}

const changes: Column<FileChange>[] = [
  { head: "Path", cell: (c) => <FileName of={c.path} /> },
  { head: "Change", cell: (c) => <span class={c.change}>{c.change}</span> },
  { head: "Before", cell: (c) => <State of={c.before} /> },
  { head: "After", cell: (c) => <State of={c.after} /> },
];

function State({ of }: { of: FileState | null }) {
  if (!of) return <span class="faint">–</span>;
  return (
    <>
      {of.type === "file" ? bytes(of.size) : of.type} <span class="faint">{of.mode}</span>
    </>
  );
}
