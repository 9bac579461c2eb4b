// Addresses of pages: the fragment of the URL, so that they need no route on the server and work below any path prefix.
// Parameters of the fragment hold the state of a page.
import type { ComponentType } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

export type Group = "Work" | "Agents" | "Storage" | "Delivery" | "Account" | "Administration";

// Page is a page of the console. Each folder has a list of its pages; main.tsx joins them.
export interface Page {
  path: string; // such as /executions/:id
  title: string;
  view: ComponentType<{ args: Record<string, string> }>;
  nav?: { group: Group; key?: string }; // in the navigation; key is pressed after g
  scope?: "read" | "execute" | "files" | "admin";
  global?: boolean; // for global administrators
}

export interface Location {
  path: string;
  query: URLSearchParams;
}

function parse(hash: string): Location {
  const [path, query] = hash.slice(1).split("?", 2);
  return { path: path || "/", query: new URLSearchParams(query ?? "") };
}

export function useLocation(): Location {
  const [hash, set] = useState(location.hash);
  useEffect(() => {
    const changed = () => set(location.hash);
    changed(); // it may have changed before this
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return useMemo(() => parse(hash), [hash]);
}

export type Query = Record<string, string | number | undefined | null>;

// link returns the address of a page. Empty parameters are left out.
export function link(path: string, query: Query = {}): string {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") params.set(name, String(value));
  }
  const text = params.toString();
  return "#" + path + (text ? "?" + text : "");
}

export function navigate(path: string, query: Query = {}) {
  location.hash = link(path, query);
}

// useParam returns a parameter of the page's address and a function that changes it without a new entry in the
// browser's history.
export function useParam(name: string, initial = ""): [string, (value: string) => void] {
  const { path, query } = useLocation();
  const set = (value: string) => {
    const at = parse(location.hash);
    if (at.path !== path) return; // the reader has left the page
    if (value === initial || value === "") at.query.delete(name);
    else at.query.set(name, value);
    const text = at.query.toString();
    history.replaceState(null, "", "#" + at.path + (text ? "?" + text : ""));
    dispatchEvent(new HashChangeEvent("hashchange"));
  };
  return [query.get(name) ?? initial, set];
}

// match returns the arguments of a path that matches a pattern, such as {id: …} for /executions/:id, or null.
export function match(pattern: string, path: string): Record<string, string> | null {
  const want = pattern.split("/"), got = path.split("/");
  if (want.length !== got.length) return null;
  const args: Record<string, string> = {};
  for (const [i, part] of want.entries()) {
    if (part.startsWith(":")) {
      try {
        args[part.slice(1)] = decodeURIComponent(got[i]);
      } catch {
        return null;
      }
    } else if (part !== got[i]) return null;
  }
  return args;
}

// path joins parts to the path of a page.
export function path(...parts: string[]): string {
  return "/" + parts.map(encodeURIComponent).join("/");
}
