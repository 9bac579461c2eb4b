import { call } from "../api/client.ts";
import type { FileChange, FileCompareRequest, FileState, ThreadVersion } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { link, path, useLocation, useParam } from "../app/router.ts";
import { Diff } from "../ui/diff.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, count, Empty, Failure, Name, Time } from "../ui/text.tsx";

// Versions lists the versions of a thread or a volume.
export function Versions({ of }: { of: ThreadVersion[] }) {
  const at = useLocation().path;
  const columns: Column<ThreadVersion>[] = [
    { head: "Version", cell: (v) => v.number },
    { head: "Created", cell: (v) => <Time at={v.created_at} /> },
    {
      head: "Execution",
      cell: (v) => v.trace_id ? <a href={link(path("executions", v.trace_id))}>{v.trace_id}</a> : <span class="faint">–</span>,
    },
    { head: "Size", cell: (v) => bytes(v.bytes), class: "number" },
    { head: "Files", cell: (v) => count(v.files), class: "number" },
    { head: "Changes", cell: (v) => <a href={link(at, { tab: "Difference", from: v.number - 1 || undefined, to: v.number })}>what it changed</a> },
  ];
  return (
    <Table label="Versions" columns={columns} list={{ value: of, loading: false }} keyOf={(v) => String(v.number)}
      hrefOf={(v) => link(at, { version: v.number })} empty={<Empty>There is no version yet: an execution makes one.</Empty>} />
  );
}

// VersionChoice chooses the version whose files are shown.
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

// Difference compares two versions. The versions and the path are in the page's address.
export function Difference({ source, id, versions }: {
  source: FileCompareRequest["source"];
  id: string;
  versions: ThreadVersion[];
}) {
  const at = useLocation();
  const [from, setFrom] = useParam("from");
  const [to, setTo] = useParam("to");
  const [file, setFile] = useParam("file");
  const second = to ? Number(to) : versions[0]?.number;
  const first = from ? Number(from) : Math.max(0, (second ?? 0) - 1);
  const { value, error } = useLive(
    (signal) => call("compareFiles", { body: { source, id, from: first, to: second, path: file || undefined } }, signal),
    [source, id, first, second, file],
  );
  if (!versions.length) return <Empty>There is no version yet: an execution makes one.</Empty>;
  const choice = (label: string, value: number, set: (v: string) => void, none: boolean) => (
    <label>
      {label} <select value={value} onChange={(e) => set(e.currentTarget.value)}>
        {versions.map((v) => <option key={v.number} value={v.number}>{v.number}</option>)}
        {none && <option value={0}>nothing</option>}
      </select>
    </label>
  );
  const columns: Column<FileChange>[] = [
    { head: "Path", cell: (c) => <Name>{c.path}</Name> },
    { head: "Change", cell: (c) => <span class={c.change}>{c.change}</span> },
    { head: "Before", cell: (c) => <State of={c.before} /> },
    { head: "After", cell: (c) => <State of={c.after} /> },
  ];
  return (
    <>
      <div class="actions">
        {choice("From", first, setFrom, true)}
        {choice("to", second!, setTo, false)}
        {file && <button onClick={() => setFile("")}>All files</button>}
        {file && <Name>{file}</Name>}
      </div>
      <Failure of={error} />
      {value && !file && (
        <>
          {value.truncated && <p class="faint">There are more changes than are shown.</p>}
          <Table label="Changes" columns={columns} list={{ value: value.changes, loading: false }} keyOf={(c) => c.path}
            hrefOf={(c) => link(at.path, { ...Object.fromEntries(at.query), file: c.path })}
            empty={<Empty>Nothing differs.</Empty>} />
        </>
      )}
      {value && file && (value.diff?.kind === "text" && value.diff.text
        ? <Diff of={value.diff.text} />
        : <Empty>{value.diff?.kind === "binary" ? "The content differs, and is no text." : value.diff?.kind === "too_large"
          ? "The file is too large to compare." : "Its text does not differ."}</Empty>)}
    </>
  );
}

function State({ of }: { of: FileState | null }) {
  return of ? <>{of.type === "file" ? bytes(of.size) : of.type} <span class="faint">{of.mode}</span></> : <span class="faint">–</span>;
}
