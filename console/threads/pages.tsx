import type { Thread as Listed } from "../api/schema.ts";
import { useList } from "../app/live.ts";
import { link, type Page, path } from "../app/router.ts";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, count, Empty, Name, Time } from "../ui/text.tsx";
import { Thread } from "./thread.tsx";
import { Execution } from "./versions.tsx";

const columns: Column<Listed>[] = [
  { head: "Thread", cell: (t) => <Name>{t.id}</Name> },
  { head: "Version", cell: (t) => t.version, class: "number" },
  { head: "Size", cell: (t) => bytes(t.bytes), class: "number" },
  { head: "Files", cell: (t) => count(t.files), class: "number" },
  { head: "Last used", cell: (t) => <Time at={t.used_at} /> },
  { head: "Created", cell: (t) => <Time at={t.created_at} /> },
  { head: "Held by", cell: (t) => <Execution id={t.holder} /> },
];

function Threads() {
  const list = useList("listThreads", {}, "threads", (t) => t.id, "executions");
  return (
    <Table
      label="Threads"
      columns={columns}
      list={list}
      keyOf={(t) => t.id}
      hrefOf={(t) => link(path("threads", t.id))}
      empty={
        <Empty command="echo 'date >> visits' | bullpen run --thread notebook-1 -l bash -">
          No threads yet. A thread is a home directory that outlives executions. The first execution creates it:
        </Empty>
      } />
  );
}

export const pages: Page[] = [
  { path: "/threads", title: "Threads", view: Threads, nav: { group: "Storage", key: "t" }, scope: "read" },
  { path: "/threads/:id", title: "Thread", view: Thread, scope: "read" },
];
