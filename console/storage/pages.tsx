import { call } from "../api/client.ts";
import type { Connection, ConnectionRequest } from "../api/schema.ts";
import { useList } from "../app/live.ts";
import { link, navigate, type Page, path } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { Opener } from "../ui/action.tsx";
import { Form } from "../ui/form.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { bytes, Empty, Name, Time } from "../ui/text.tsx";
import { Storage } from "./connection.tsx";

const columns: Column<Connection>[] = [
  { head: "Connection", cell: (c) => <code>{c.slug}</code> },
  { head: "Kind", cell: (c) => c.kind },
  {
    head: "Location",
    cell: (c) => <Name>{[c.endpoint, c.bucket ?? c.directory, c.prefix].filter(Boolean).join("/")}</Name>,
  },
  { head: "Quota", cell: (c) => bytes(c.bytes), class: "number" },
  { head: "Access", cell: (c) => c.removing ? "being removed" : c.read_only ? "read only" : "read and write" },
  { head: "Tested", cell: (c) => <Time at={c.tested_at} /> },
  { head: "Updated", cell: (c) => <Time at={c.updated_at} /> },
  { head: "Organisation", cell: (c) => c.org },
  { head: "Description", cell: (c) => <Name>{c.description}</Name> },
];

const fields = [
  "slug",
  "kind",
  "bytes",
  "bucket",
  "endpoint",
  "region",
  "path_style",
  "credential",
  "directory",
  "prefix",
  "read_only",
  "description",
];

function Connections() {
  const { org } = useSession();
  const list = useList("listConnections", {}, "connections", (c) => c.org + "/" + c.slug, "connections");
  return (
    <>
      <div class="filters">
        <Opener label="Create connection" primary>
          {(close) => (
            <Form
              schema="ConnectionRequest"
              fields={fields}
              label="Create"
              submit={async (body) => {
                const made = await call("createConnection", { body: body as unknown as ConnectionRequest });
                close();
                navigate(path("storage", made.slug));
              }} />
          )}
        </Opener>
      </div>
      <Table
        label="Storage connections"
        columns={columns}
        list={list}
        keyOf={(c) => c.org + "/" + c.slug}
        hrefOf={(c) => link(path("storage", c.slug), { org: c.org === org ? "" : c.org })}
        empty={
          <Empty command="bullpen connection create work --kind volume --bytes 1GiB">
            No storage connections. Programs see buckets, directories and volumes under /data. Create one here, or:
          </Empty>
        } />
    </>
  );
}

export const pages: Page[] = [
  { path: "/storage", title: "Storage connections", view: Connections, nav: { group: "Storage" }, scope: "admin" },
  { path: "/storage/:slug", title: "Storage connection", view: Storage, scope: "admin" },
];
