// The frame around all pages: sign-in, navigation, keyboard shortcuts, and the sign that shows whether data is live.
import type { ComponentChildren } from "preact";
import { useContext, useEffect, useErrorBoundary, useMemo, useRef, useState } from "preact/hooks";
import { actFor, type ApiError, base, call, onSignedOut } from "../api/client.ts";
import type { Caller } from "../api/schema.ts";
import { languages, statuses } from "../executions/list.tsx";
import { Dialog, Messages, notify, useSubmit } from "../ui/action.tsx";
import { Empty, Failure, formatTime, Name, Zone } from "../ui/text.tsx";
import { asError, Changes, ChangesContext } from "./live.ts";
import { type Group, link, match, navigate, type Page, useLocation } from "./router.ts";
import { Session } from "./session.ts";

const groups: Group[] = ["Work", "Agents", "Storage", "Delivery", "Account", "Administration"];

export function App({ pages }: { pages: Page[] }) {
  const [caller, setCaller] = useState<Caller | null>();
  const [error, setError] = useState<ApiError>();
  useEffect(() => {
    onSignedOut(() => setCaller(null));
    call("getSession", {}).then(setCaller, (e) => asError(e).status === 401 ? setCaller(null) : setError(asError(e)));
  }, []);
  const [zone, setZone] = useSetting<"local" | "utc">("zone", "local");
  const [theme, setTheme] = useSetting<"" | "light" | "dark">("theme", "");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  if (error) {
    return (
      <main class="alone">
        <h1>bullpen</h1>
        <Failure of={error} />
      </main>
    );
  }
  if (caller === undefined) return null;
  if (caller === null) return <SignIn signedIn={setCaller} />;
  actFor(caller.org);
  return (
    <Session.Provider value={caller}>
      <Zone.Provider value={zone}>
        <Shell
          pages={pages.filter((p) => may(caller, p))}
          caller={caller}
          zone={zone}
          setZone={setZone}
          theme={theme}
          setTheme={setTheme} />
        <Messages />
      </Zone.Provider>
    </Session.Provider>
  );
}

function may(caller: Caller, page: Page): boolean {
  return (!page.scope || caller.scopes.includes(page.scope)) && (!page.global || caller.global);
}

function useSetting<T extends string>(name: string, initial: T): [T, (v: T) => void] {
  const [value, set] = useState<T>(() => {
    try {
      return (localStorage.getItem("bullpen." + name) as T) ?? initial;
    } catch {
      return initial; // the browser keeps nothing for this page
    }
  });
  return [value, (v) => {
    set(v);
    try {
      localStorage.setItem("bullpen." + name, v);
    } catch {
      // as above
    }
  }];
}

function SignIn({ signedIn }: { signedIn: (c: Caller) => void }) {
  const [key, setKey] = useState("");
  const [oidc, setOIDC] = useState(false);
  useEffect(() => {
    call("getLogin", {}).then((login) => setOIDC(login.oidc), () => {}); // a key still works
  }, []);
  const { busy, submit, failure } = useSubmit(async (secret: string) => {
    actFor("");
    signedIn(await call("createSession", { headers: { Authorization: "Bearer " + secret.trim() } }));
  });
  const back = "/console/" + location.hash;
  return (
    <main class="alone">
      <h1>bullpen</h1>
      <p>Sandboxes for untrusted code.</p>
      <form onSubmit={(e) => (e.preventDefault(), submit(key))}>
        <label for="key">API key</label>
        <input
          id="key"
          type="password"
          autocomplete="off"
          required
          autofocus
          value={key}
          placeholder="sk-…"
          onInput={(e) => setKey(e.currentTarget.value)} />
        <p class="help">
          The browser sends the key once and keeps only a session. A new server's first key is in the file{" "}
          <code>bootstrap.key</code> of its data directory.
        </p>
        {failure}
        <button class="primary" disabled={busy} aria-busy={busy}>Sign in</button>
      </form>
      {oidc && (
        <p>
          <a class="button" href={new URL("login?return=" + encodeURIComponent(back), base).href}>
            Sign in with your organisation
          </a>
        </p>
      )}
    </main>
  );
}

function Shell({ pages, caller, zone, setZone, theme, setTheme }: {
  pages: Page[];
  caller: Caller;
  zone: "local" | "utc";
  setZone: (z: "local" | "utc") => void;
  theme: "" | "light" | "dark";
  setTheme: (t: "" | "light" | "dark") => void;
}) {
  const { path } = useLocation();
  const [help, setHelp] = useState(false);
  const [menu, setMenu] = useState(false);
  const changes = useMemo(() => new Changes(), []);
  useEffect(() => (changes.start(), () => changes.close()), [changes]);
  const search = useRef<HTMLInputElement>(null);
  useKeys(pages, () => search.current?.focus(), () => setHelp(true));
  const found = pages.map((page) => ({ page, args: match(page.path, path) })).find((p) => p.args);
  const at = found?.page;
  const main = useRef<HTMLElement>(null);
  useEffect(() => {
    document.title = (at ? at.title + " · " : "") + "bullpen";
    setMenu(false);
    main.current?.focus({ preventScroll: true });
    scrollTo(0, 0);
  }, [path]);
  const View = at?.view;
  return (
    <ChangesContext.Provider value={changes}>
      <header class="top">
        <a class="skip" href={"#" + path} onClick={(e) => (e.preventDefault(), main.current?.focus())}>
          Skip to content
        </a>
        <button class="menu" aria-expanded={menu} aria-controls="nav" onClick={() => setMenu(!menu)}>Menu</button>
        <a class="brand" href="#/">bullpen</a>
        <form role="search" onSubmit={(e) => (e.preventDefault(), jump(search.current!.value))}>
          <input
            ref={search}
            type="search"
            aria-label="Search executions by id, status, language or metadata name=value"
            placeholder="Search: id, status, metadata name=value  ( / )" />
        </form>
        <LiveSign />
        <select aria-label="Time zone" value={zone} onChange={(e) => setZone(e.currentTarget.value as "local" | "utc")}>
          <option value="local">local time</option>
          <option value="utc">UTC</option>
        </select>
        <select
          aria-label="Theme"
          value={theme}
          onChange={(e) => setTheme(e.currentTarget.value as "" | "light" | "dark")}>
          <option value="">system theme</option>
          <option value="light">light</option>
          <option value="dark">dark</option>
        </select>
        <span class="caller">
          <Name>{caller.name}</Name> · <Name>{caller.org}</Name>
        </span>
        <button
          onClick={() =>
            call("deleteSession", {}).then(() => location.reload(), (e) => notify(asError(e).message, true))}>
          Sign out
        </button>
      </header>
      <nav id="nav" class={menu ? "open" : ""} aria-label="Pages">
        {groups.map((group) => {
          const list = pages.filter((p) => p.nav?.group === group);
          return list.length > 0 && (
            <div key={group} role="group" aria-label={group}>
              <h2>{group}</h2>
              {list.map((p) => (
                <a key={p.path} href={link(p.path)} aria-current={isAt(p.path, path) ? "page" : undefined}>{p.title}</a>
              ))}
            </div>
          );
        })}
        <div>
          <a href={new URL("docs", base).href} target="_blank" rel="noreferrer">API</a>
          <button class="quiet" onClick={() => setHelp(true)}>Shortcuts ( ? )</button>
        </div>
      </nav>
      <main ref={main} tabIndex={-1}>
        {at && <h1>{at.title}</h1>}
        {View
          ? (
            <Boundary key={path}>
              <View args={found!.args!} />
            </Boundary>
          )
          : (
            <>
              <h1>Not found</h1>
              <Empty>There is no such page, or you have no access to it.</Empty>
            </>
          )}
      </main>
      {help && <Help pages={pages} close={() => setHelp(false)} />}
    </ChangesContext.Provider>
  );
}

// Boundary shows the error of a page that fails to render, and keeps the frame around it.
function Boundary({ children }: { children: ComponentChildren }) {
  const [error] = useErrorBoundary();
  return error ? <Failure of={asError(error)} /> : <>{children}</>;
}

const isAt = (page: string, path: string) => page === path || page !== "/" && path.startsWith(page + "/");

// LiveSign shows whether the page is live, or how old its data is.
function LiveSign() {
  const changes = useContext(ChangesContext)!;
  const [, draw] = useState(0);
  useEffect(() => changes.watch(() => draw((n) => n + 1)), [changes]);
  const zone = useContext(Zone);
  if (changes.state === "live") return <span class="status good" role="status">live</span>;
  if (changes.state === "connecting") return <span class="status wait" role="status">connecting</span>;
  return (
    <span class="status bad" role="status">
      {changes.state === "stale" ? "reconnecting" : "not live"}: data from {formatTime(changes.since, zone).slice(11)}
    </span>
  );
}

const pagesOfIDs: Record<string, string> = { trc: "executions", bat: "batches", sch: "schedules", run: "pipelines" };

// jump opens the object with an id, or the executions that match words such as failed, python or order=4711.
function jump(text: string) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  const id = words.length === 1 && words[0].match(/^([a-z]{3})_[\w-]{20,26}$/);
  if (id && pagesOfIDs[id[1]]) return navigate(`/${pagesOfIDs[id[1]]}/${id[0]}`);
  const query: Record<string, string> = {};
  for (const word of words) {
    const at = word.indexOf("=");
    if (at > 0) query["metadata." + word.slice(0, at)] = word.slice(at + 1);
    else if (languages.includes(word)) query.language = word;
    else if (statuses.includes(word)) query.status = word;
    else return notify(`“${word}” is not an id, a status, a language or name=value of metadata.`, true);
  }
  navigate("/executions", query);
}

function useKeys(pages: Page[], search: () => void, help: () => void) {
  useEffect(() => {
    let prefix = 0; // when g was pressed
    const pressed = (e: KeyboardEvent) => {
      const at = e.composedPath()[0] as HTMLElement;
      if (
        e.ctrlKey || e.metaKey || e.altKey || at.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName) ||
        document.querySelector("dialog[open]")
      ) return;
      if (prefix && Date.now() - prefix < 1500) {
        prefix = 0;
        const page = pages.find((p) => p.nav?.key === e.key);
        if (page) return e.preventDefault(), navigate(page.path);
      }
      if (e.key === "g") prefix = Date.now();
      else if (e.key === "/") e.preventDefault(), search();
      else if (e.key === "?") e.preventDefault(), help();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [pages]);
}

function Help({ pages, close }: { pages: Page[]; close: () => void }) {
  const keys: Array<[string, string]> = [["/", "search"], ["?", "this list"], [
    "Esc",
    "close, or leave the editor",
  ]];
  for (const p of pages) if (p.nav?.key) keys.push(["g " + p.nav.key, p.title]);
  return (
    <Dialog title="Keyboard shortcuts" close={close}>
      <dl class="facts">
        {keys.map(([key, what]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
