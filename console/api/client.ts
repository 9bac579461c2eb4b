// Calls of the HTTP API, typed by the OpenAPI document.
import { type Calls, type Error as ErrorBody, routes } from "./schema.ts";

// base is the address of the server, which may have a path prefix: the page is at BASE/console/.
export const base = new URL("../", location.origin + location.pathname);

// ApiError is an error with the API's message.
export class ApiError extends Error {
  constructor(message: string, readonly status: number, readonly code: string, readonly reason?: string) {
    super(message);
  }
}

let org = "";

// actFor names the organisation in all later requests. The server compares it with the session, so that a tab has no
// effect after the browser has signed in to another organisation.
export function actFor(name: string) {
  org = name;
}

// signedOut is called when the server no longer accepts the session.
let signedOut = () => {};

export function onSignedOut(f: () => void) {
  signedOut = f;
}

// send sends a request to a path below the server's address. It throws an ApiError if the request fails.
export async function send(method: string, path: string | URL, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (org) headers.set("X-Bullpen-Org", org);
  let answer: Response;
  try {
    answer = await fetch(new URL(path, base), { ...init, method, headers, credentials: "same-origin" });
  } catch (e) {
    if (init.signal?.aborted) throw e;
    throw new ApiError("the server cannot be reached; check the connection", 0, "unreachable");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null) as Partial<ErrorBody> & { detail?: string } | null;
  const text = body?.message ?? body?.detail ?? `the server answered ${answer.status} ${answer.statusText}`;
  if (answer.status === 401 && org) signedOut();
  throw new ApiError(text, answer.status, String(body?.error ?? answer.status), body?.reason);
}

// sendJSON sends a JSON body, or none, and decodes the answer.
export async function sendJSON<T>(
  method: string,
  path: string | URL,
  body?: unknown,
  init: RequestInit = {},
): Promise<T> {
  const headers = new Headers(init.headers);
  if (body !== undefined) headers.set("Content-Type", "application/json");
  const answer = await send(method, path, {
    ...init,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await answer.text();
  return (text ? JSON.parse(text) : undefined) as T;
}

export type Args<K extends keyof Calls> = Calls[K]["args"];
export type Answer<K extends keyof Calls> = Calls[K]["answer"];

// segment encodes a text as one segment of a path. Browsers resolve . and .. as directories, which leads to another
// route, so segment turns them into names that no object has.
export function segment(text: string): string {
  return encodeURIComponent(text === "." || text === ".." ? text + " " : text);
}

// address returns the URL of an operation with its path and query arguments.
export function address<K extends keyof Calls>(id: K, args: Args<K>): URL {
  let path = routes[id][1];
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(args)) {
    if (name === "body" || name === "headers" || value === undefined || value === null || value === "") continue;
    if (path.includes(`{${name}}`)) path = path.replace(`{${name}}`, segment(String(value)));
    else query.set(name, String(value));
  }
  const url = new URL(path, base);
  url.search = query.toString();
  return url;
}

// signedURL moves a signed URL to the address at which this page reaches the server: without --public-url, the server
// does not know the path prefix of a proxy.
export const signedURL = (url: string) => new URL(url.slice(url.lastIndexOf("/v1/") + 1), base);

// call calls an operation of the API.
export function call<K extends keyof Calls>(id: K, args: Args<K>, signal?: AbortSignal): Promise<Answer<K>> {
  const { body, headers } = args as { body?: unknown; headers?: Record<string, string> };
  return sendJSON(routes[id][0], address(id, args), body, { headers, signal });
}
