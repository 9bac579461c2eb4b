// The objects that administrators manage: each kind has a list, a page and forms, which a row of kinds.tsx describes.
import type { ComponentChildren, ComponentType } from "preact";
import { useState } from "preact/hooks";
import { ApiError, base, call, segment, send, sendJSON } from "../api/client.ts";
import { asError, useLive, usePages } from "../app/live.ts";
import { link, navigate, type Page, path, type Query, useLocation, useParam } from "../app/router.ts";
import { useSession } from "../app/session.ts";
import { Action, Opener, Secret } from "../ui/action.tsx";
import { Form } from "../ui/form.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { Empty, Facts, Failure } from "../ui/text.tsx";

type Value = Record<string, unknown>;

// Kind describes a kind of objects of type T.
export interface Kind<T> {
  plural: string; // in paths, in answers, and in the stream of changes
  title: string;
  one: string; // such as API key
  id: (object: T) => string;
  columns: Column<T>[];
  facts?: (object: T) => Array<[name: string, value: ComponentChildren]>; // absent if objects have no pages
  org?: "filter" | "address"; // whether ?org= filters the list, or is also part of the address of objects
  global?: boolean; // only global administrators list them
  changedByGlobal?: boolean;
  create?: { schema: string; hidden?: string[]; named?: boolean }; // named: the reader chooses the name, for a PUT
  replace?: { schema: string; hidden?: string[]; value?: (object: T) => Value };
  first?: string[]; // properties that forms show first; the others are under "More settings"
  remove?: { label: string; question: string };
  fixed?: (object: T) => boolean; // reports whether an object can no longer be changed
  secret?: (object: T) => string | undefined; // a secret that the API returns only once
  Actions?: ComponentType<{ of: T; change: (settings: Value) => Promise<unknown>; reload: () => void }>;
  Details?: ComponentType<{ id: string; of?: T }>;
  Note?: ComponentType;
  empty: { text: string; command: string };
}

function url(plural: string, id: string, query: Query): URL {
  const at = new URL(`v1/admin/${plural}${id && "/" + segment(id)}`, base);
  for (const [name, value] of Object.entries(query)) if (value) at.searchParams.set(name, String(value));
  return at;
}

// pagesOf returns the pages of a kind.
export function pagesOf<T>(kind: Kind<T>): Page[] {
  const at = "/admin/" + kind.plural;
  const list: Page = {
    path: at,
    title: kind.title,
    view: () => <List kind={kind} />,
    nav: { group: "Administration" },
    scope: "admin",
    global: kind.global,
  };
  const title = kind.one[0].toUpperCase() + kind.one.slice(1);
  if (!kind.facts) return [list];
  const view: Page["view"] = ({ args }) => <Detail kind={kind} id={args.id} />;
  return [list, { ...list, path: at + "/:id", title, nav: undefined, view }];
}

function List<T>({ kind }: { kind: Kind<T> }) {
  const { plural, id } = kind;
  const caller = useSession();
  const org = useLocation().query.get("org") ?? "";
  const list = usePages(
    async (cursor, signal) => {
      const at = url(plural, "", { cursor, org, limit: 100 });
      const page = await sendJSON<Record<string, unknown>>("GET", at, undefined, { signal });
      return { rows: page[plural] as T[], next: page.next_cursor as string | null };
    },
    id,
    [org],
    plural,
  );
  const mayChange = caller.global || !kind.changedByGlobal;
  const { remove, Note } = kind;
  const columns = kind.facts || !remove ? kind.columns : [...kind.columns, {
    head: "Action",
    class: "acts",
    cell: (object: T) => (
      <Action
        danger
        confirm={remove.question}
        run={() => send("DELETE", url(plural, id(object), {})).then(list.reload)}>
        {remove.label}
      </Action>
    ),
  }];
  const hrefOf = (object: T) => link(path("admin", plural, id(object)), { org: kind.org === "address" ? org : "" });
  return (
    <>
      {Note && <Note />}
      <div class="actions">
        {mayChange && kind.create && (
          <Opener label={`Create ${kind.one}`} primary>
            {(close) => <Create kind={kind} org={org} close={close} reload={list.reload} />}
          </Opener>
        )}
        {kind.org && <OrgChooser all={kind.org === "filter"} />}
      </div>
      <Table
        label={kind.title}
        columns={columns}
        list={list}
        keyOf={id}
        hrefOf={kind.facts && hrefOf}
        empty={<Empty command={kind.empty.command}>{kind.empty.text}</Empty>} />
    </>
  );
}

// OrgChooser sets the parameter org of the page, for global administrators.
export function OrgChooser({ all }: { all: boolean }) {
  const caller = useSession();
  const [org, setOrg] = useParam("org");
  const { value } = useLive(
    async (signal) => {
      return caller.global ? (await call("listOrgs", { limit: 100 }, signal)).orgs : [];
    },
    [],
    "orgs",
  );
  if (!caller.global) return null;
  return (
    <label>
      organisation{" "}
      <input
        list="orgs"
        value={org}
        placeholder={all ? "all" : caller.org}
        size={20}
        spellcheck={false}
        autocomplete="off"
        onChange={(e) => setOrg(e.currentTarget.value.trim())} />
      <datalist id="orgs">{value?.map((o) => <option key={o.name} value={o.name}>{o.title}</option>)}</datalist>
    </label>
  );
}

function Create<T>({ kind, org, close, reload }: {
  kind: Kind<T>;
  org: string;
  close: () => void;
  reload: () => void;
}) {
  const caller = useSession();
  const [name, setName] = useState("");
  const [made, setMade] = useState<T>();
  const { schema, hidden, named } = kind.create!;
  const secret = made && kind.secret?.(made);
  if (secret) return <Shown label={`The new ${kind.one}.`} value={secret} close={close} />;
  const submit = async (body: Value) => {
    const query = { org: kind.org === "address" ? org : "" };
    const object = await sendJSON<T>(named ? "PUT" : "POST", url(kind.plural, named ? name : "", query), body);
    reload();
    setMade(object);
    if (!kind.secret) navigate(path("admin", kind.plural, kind.id(object)), query);
  };
  return (
    <>
      {named && (
        <div class="form">
          {kind.org && <p class="help">For the organisation {org || caller.org}.</p>}
          <div class="field">
            <label for="new-name">
              name <span class="faint">(required)</span>
            </label>
            <input id="new-name" value={name} spellcheck={false} onInput={(e) => setName(e.currentTarget.value)} />
          </div>
        </div>
      )}
      {(!named || name) && (
        <Form
          schema={schema}
          hidden={hidden}
          first={kind.first}
          value={kind.org === "filter" ? { org: org || caller.org } : {}}
          submit={submit}
          label={`Create ${kind.one}`} />
      )}
    </>
  );
}

// Shown is the last step of a dialog that has created a secret.
export function Shown({ label, value, close }: { label: string; value: string; close: () => void }) {
  return (
    <>
      <Secret label={label} value={value} />
      <div class="actions">
        <button class="primary" onClick={close}>I have saved it</button>
      </div>
    </>
  );
}

interface Tagged<T> {
  object: T;
  tag: string | null; // the version of the object, for If-Match
}

function Detail<T>({ kind, id }: { kind: Kind<T>; id: string }) {
  const { plural, Actions, Details } = kind;
  const caller = useSession();
  const org = useLocation().query.get("org") ?? "";
  const at = url(plural, id, { org });
  const { value: last, error, reload } = useLive(
    async (signal): Promise<Tagged<T>> => {
      const answer = await send("GET", at, { signal });
      return { object: await answer.json(), tag: answer.headers.get("ETag") };
    },
    [at.href],
    plural,
  );
  const value = error?.status === 404 ? undefined : last;
  const change = async ({ tag }: Tagged<T>, settings: Value) => {
    try {
      await sendJSON("PUT", at, settings, { headers: tag ? { "If-Match": tag } : {} });
    } catch (e) {
      const error = asError(e);
      if (error.status !== 412) throw e;
      const text = "someone else has changed it: close this form to see the changes, then edit again";
      throw new ApiError(text, 412, error.code);
    } finally {
      reload();
    }
  };
  const changeable = value && (caller.global || !kind.changedByGlobal) && !kind.fixed?.(value.object);
  return (
    <>
      <div class="actions">
        <code>{id}</code>
        {changeable && kind.replace && (
          <Opener label="Edit" title={`Edit ${kind.one} ${id}`}>
            {(close) => <Edit kind={kind} of={value} submit={(v, settings) => change(v, settings).then(close)} />}
          </Opener>
        )}
        {changeable && Actions && (
          <Actions
            of={value.object}
            reload={reload}
            change={(settings) => change(value, settings)} />
        )}
        {changeable && kind.remove && (
          <Action
            danger
            confirm={kind.remove.question}
            run={() => send("DELETE", at).then(() => kind.fixed ? reload() : navigate("/admin/" + plural, { org }))}>
            {kind.remove.label}
          </Action>
        )}
      </div>
      <Failure of={error} />
      {value && <Facts of={kind.facts!(value.object)} />}
      {Details && <Details id={id} of={value?.object} />}
    </>
  );
}

// Edit edits the object as it was when the form was opened, so that the server detects changes made since.
function Edit<T>({ kind, of, submit }: {
  kind: Kind<T>;
  of: Tagged<T>;
  submit: (of: Tagged<T>, settings: Value) => Promise<unknown>;
}) {
  const [opened] = useState(of);
  const { schema, hidden, value } = kind.replace!;
  return (
    <Form
      schema={schema}
      hidden={hidden}
      first={kind.first}
      value={value ? value(opened.object) : { ...opened.object } as Value}
      label="Save"
      submit={(settings) => submit(opened, settings)} />
  );
}
