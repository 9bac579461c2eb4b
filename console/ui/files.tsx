// A file browser for threads, volumes and sandboxes. It shows contents as text, or in a fully sandboxed frame.
import { useEffect, useState } from "preact/hooks";
import { type ApiError, send } from "../api/client.ts";
import { asError, useLive } from "../app/live.ts";
import { link, useLocation } from "../app/router.ts";
import { Action, notify, Opener, useSubmit } from "./action.tsx";
import { type Column, Table } from "./table.tsx";
import { bytes, Empty, Facts, Failure, Name, Time, visible } from "./text.tsx";

export interface Entry {
  name: string;
  path: string;
  type: "file" | "directory" | "link" | "special";
  size: number;
  modified?: string;
}

// Source is a place of files. Absent methods are not supported.
export interface Source {
  key: string; // differs for different files
  kinds?: string[]; // of changes after which lists are read again
  start: string; // the directory that is shown first
  top: [name: string, path: string];
  // list returns the entries of a directory, or a file itself.
  list(path: string, signal: AbortSignal): Promise<Entry[]>;
  address(path: string): Promise<URL>; // from which a file is downloaded
  inline?(path: string): Promise<URL>; // from which a frame may show it
  upload?(path: string, file: File, progress: (text: string) => void): Promise<unknown>;
  rename?(from: string, to: string): Promise<unknown>;
  remove?(path: string, directory: boolean): Promise<unknown>;
}

// FileName escapes line breaks and tabs in a name.
export const FileName = ({ of }: { of: string }) => <Name>{of.replaceAll("\n", "\\n").replaceAll("\t", "\\t")}</Name>;

const join = (dir: string, name: string) => dir === "" ? name : dir.replace(/\/$/, "") + "/" + name;
const nameOf = (path: string) => path.slice(path.lastIndexOf("/") + 1);
const parentOf = (path: string) => path.slice(0, Math.max(path.lastIndexOf("/"), path.startsWith("/") ? 1 : 0));

// Files shows the file or directory that the parameter path of the page's address names.
export function Files({ of }: { of: Source }) {
  const at = useLocation();
  const path = at.query.get("path") || of.start;
  const to = (path: string) => link(at.path, { ...Object.fromEntries(at.query), path: path === of.start ? "" : path });
  const go = (path: string) => (location.hash = to(path));
  const read = (signal: AbortSignal) => of.list(path, signal);
  const { value, error, loading, reload } = useLive(read, [of.key, path], ...of.kinds ?? []);
  const sorted = value?.toSorted((a, b) => Number(b.type === "directory") - Number(a.type === "directory"));
  const file = value?.length === 1 && value[0].path === path && value[0].type !== "directory" ? value[0] : undefined;
  const [over, setOver] = useState(false);
  const [state, setState] = useState("");
  const upload = async (files: FileList | null) => {
    for (const f of files ?? []) {
      try {
        setState(`uploading ${f.name}`);
        await of.upload!(join(path, f.name), f, (progress) => setState(`uploading ${f.name}: ${progress}`));
        notify(`Uploaded ${f.name}.`);
      } catch (e) {
        notify(`${f.name}: ${asError(e).message}`, true);
      }
    }
    setState("");
    reload();
  };
  const drop = {
    onDragOver: (e: DragEvent) => (e.preventDefault(), setOver(true)),
    onDragLeave: () => setOver(false),
    onDrop: (e: DragEvent) => (e.preventDefault(), setOver(false), void upload(e.dataTransfer?.files ?? null)),
  };
  const may = of.upload && !file;
  return (
    <div class={"files" + (over ? " over" : "")} {...may ? drop : {}}>
      <div class="actions">
        <Crumbs source={of} path={path} to={to} />
        {may && (
          <label class="button">
            Upload
            <input type="file" multiple class="unseen" onChange={(e) => upload(e.currentTarget.files)} />
          </label>
        )}
        {may && (
          <span class="faint" role="status">
            <Name>{state || "or drop files here"}</Name>
          </span>
        )}
      </div>
      {file ? <Content source={of} file={file} renamed={go} removed={() => go(parentOf(path) || of.start)} /> : (
        <Table
          label="Files"
          columns={columns(of, reload)}
          keyOf={(f) => f.path}
          hrefOf={(f) => to(f.path)}
          list={{ value: sorted, error, loading }}
          empty={<Empty>This directory is empty.</Empty>} />
      )}
    </div>
  );
}

function Crumbs({ source, path, to }: { source: Source; path: string; to: (path: string) => string }) {
  const parts = path.split("/").filter(Boolean);
  const prefix = path.startsWith("/") ? "/" : "";
  return (
    <span class="crumbs">
      <a href={to(source.top[1])}>{source.top[0]}</a>
      {parts.map((name, i) => (
        <span key={i}>
          /{" "}
          <a
            href={to(prefix + parts.slice(0, i + 1).join("/"))}
            aria-current={i === parts.length - 1 ? "page" : undefined}>
            <FileName of={name} />
          </a>
        </span>
      ))}
    </span>
  );
}

const sizes: Record<string, string> = { directory: "", link: "link", special: "special" };

function columns(source: Source, reload: () => void): Column<Entry>[] {
  return [
    {
      head: "Name",
      cell: (f) => (
        <>
          <FileName of={f.name} />
          {f.type === "directory" ? "/" : ""}
        </>
      ),
    },
    { head: "Size", cell: (f) => sizes[f.type] ?? bytes(f.size), class: "number" },
    { head: "Modified", cell: (f) => <Time at={f.modified} /> },
    {
      head: "Actions",
      cell: (f) => (
        <>
          {f.type === "file" && <Download source={source} path={f.path} />}{" "}
          {source.rename && <Rename source={source} path={f.path} done={reload} />}{" "}
          {source.remove && <Remove source={source} file={f} done={reload} />}
        </>
      ),
    },
  ];
}

function Download({ source, path }: { source: Source; path: string }) {
  return (
    <Action
      run={async () => {
        const a = document.createElement("a");
        a.href = (await source.address(path)).href;
        a.download = nameOf(path);
        a.click();
      }}>
      Download
    </Action>
  );
}

function Remove({ source, file, done }: { source: Source; file: Entry; done: () => void }) {
  const directory = file.type === "directory";
  return (
    <Action
      danger
      confirm={`Delete ${visible(file.name)}${directory ? " with everything in it" : ""}?`}
      run={() => source.remove!(file.path, directory).then(done)}>
      Delete
    </Action>
  );
}

function Rename({ source, path, done }: { source: Source; path: string; done: (to: string) => void }) {
  return (
    <Opener label="Rename">
      {(close) => <RenameForm path={path} rename={(to) => source.rename!(path, to).then(() => (close(), done(to)))} />}
    </Opener>
  );
}

function RenameForm({ path, rename }: { path: string; rename: (to: string) => Promise<unknown> }) {
  const [to, setTo] = useState(path);
  const { busy, submit, failure } = useSubmit(rename);
  return (
    <form class="form" onSubmit={(e) => (e.preventDefault(), submit(to))}>
      <label>
        New path <input value={to} required spellcheck={false} onInput={(e) => setTo(e.currentTarget.value)} />
      </label>
      {failure}
      <div class="actions">
        <button class="primary" disabled={busy}>Rename</button>
      </div>
    </form>
  );
}

const maxText = 512 << 10; // bytes of a file that the page shows
const rich = /\.(png|jpe?g|gif|webp|avif|svg|html?)$/i;

function Content({ source, file, renamed, removed }: {
  source: Source;
  file: Entry;
  renamed: (to: string) => void;
  removed: () => void;
}) {
  const [frame, setFrame] = useState<URL>();
  useEffect(() => setFrame(undefined), [source.key, file.path]);
  return (
    <>
      <Facts
        of={[
          ["Size", bytes(file.size)],
          ["Modified", <Time at={file.modified} />],
          ["Type", file.type === "file" ? undefined : file.type],
        ]} />
      <div class="actions">
        {file.type === "file" && <Download source={source} path={file.path} />}
        {source.rename && <Rename source={source} path={file.path} done={renamed} />}
        {source.remove && <Remove source={source} file={file} done={removed} />}
        {frame && <button onClick={() => setFrame(undefined)}>Show as text</button>}
        {!frame && source.inline && rich.test(file.name) && (
          <Action run={async () => setFrame(await source.inline!(file.path))}>Preview</Action>
        )}
      </div>
      {frame
        ? <iframe class="viewer" title={visible(file.name)} sandbox="" referrerpolicy="no-referrer" src={frame.href} />
        : file.type === "file" && <Text source={source} file={file} />}
    </>
  );
}

function Text({ source, file }: { source: Source; file: Entry }) {
  const [text, setText] = useState<string | null>(); // null: it is binary
  const [error, setError] = useState<ApiError>();
  useEffect(() => {
    const stop = new AbortController();
    setText(undefined);
    setError(undefined);
    (async () => {
      const init = { headers: { Range: `bytes=0-${maxText - 1}` }, signal: stop.signal };
      const answer = file.size > 0 && await send("GET", await source.address(file.path), init);
      const content = new Uint8Array(answer ? await answer.arrayBuffer() : []);
      setText(content.includes(0) ? null : new TextDecoder().decode(content));
    })().catch((e) => stop.signal.aborted || setError(asError(e)));
    return () => stop.abort();
  }, [source.key, file.path, file.modified, file.size]);
  if (error) return <Failure of={error} />;
  if (text === undefined) return <p class="faint" aria-busy="true">Loading …</p>;
  if (text === null) return <p class="faint">This is a binary file. Download it to open it.</p>;
  if (text === "") return <p class="faint">The file is empty.</p>;
  return (
    <>
      {file.size > maxText && (
        <p class="faint">Only the first {bytes(maxText)} are shown. Download the file for the rest.</p>
      )}
      <pre class="file" tabIndex={0}>{visible(text.replaceAll("\r\n", "\n"))}</pre>
    </>
  );
}
