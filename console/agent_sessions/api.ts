// The Sandbox Agent API, which serves the sessions of coding agents.
import { base, segment, send, sendJSON } from "../api/client.ts";
import type { Entry, Source } from "../ui/files.tsx";

export interface AgentSession {
  sessionId: string;
  agent: string;
  agentMode: string;
  permissionMode: string;
  model: string | null;
  title: string | null;
  directory: string | null;
  ended: boolean;
  eventCount: number;
  createdAt: number; // milliseconds since 1970
  updatedAt: number;
}

export interface Permission {
  permission_id: string;
  action: string;
  status: string;
  metadata: unknown;
}

export interface Question {
  question_id: string;
  prompt: string;
  options: string[];
  response: string | null;
  status: string;
}

export interface Part {
  type: "text" | "json" | "tool_call" | "tool_result" | "file_ref" | "reasoning" | "image" | "status";
  text?: string;
  visibility?: string;
  json?: unknown;
  name?: string;
  arguments?: string;
  output?: string;
  path?: string;
  action?: string;
  diff?: string | null;
  label?: string;
  detail?: string | null;
}

export interface Item {
  item_id: string;
  kind: string;
  role: string | null;
  content: Part[];
  status: string;
}

export interface SessionEvent {
  sequence: number;
  time: string;
  type: string;
  data: never; // as type says
}

export interface Agent {
  id: string;
  installed: boolean;
}

// at returns the address of a route with parts of its path.
export const at = (...parts: string[]) => new URL(["sandbox-agent/v1", ...parts.map(segment)].join("/"), base);

export const call = <T>(method: string, path: string[], body?: unknown, signal?: AbortSignal) =>
  sendJSON<T>(method, at(...path), body, { signal });

// homeOf returns the files in the directory of a session.
export function homeOf(session: string, mayChange: boolean): Source {
  const fs = (route: string, query: Record<string, string>) => {
    const url = at("fs", route);
    url.search = new URLSearchParams({ session_id: session, ...query }).toString();
    return url;
  };
  type Listed = { name: string; path: string; entryType: Entry["type"]; size: number; modified?: string };
  const entry = (e: Listed, path: string): Entry => (
    { name: path.slice(path.lastIndexOf("/") + 1), path, type: e.entryType, size: e.size, modified: e.modified }
  );
  const files: Source = {
    key: session,
    kinds: ["agent_sessions"],
    start: "",
    top: ["the session's directory", ""],
    list: async (path, signal) => {
      if (!path) path = ".";
      const found = await sendJSON<Listed>("GET", fs("stat", { path }), undefined, { signal });
      if (found.entryType !== "directory") return [entry(found, path)];
      const list = await sendJSON<Listed[]>("GET", fs("entries", { path }), undefined, { signal });
      return list.map((e) => entry(e, path ? path + "/" + e.name : e.name));
    },
    address: (path) => Promise.resolve(fs("file", { path })),
  };
  if (!mayChange) return files;
  return {
    ...files,
    upload: (path, file) => send("PUT", fs("file", { path }), { body: file.slice(0) }),
    rename: (from, to) => sendJSON("POST", fs("move", {}), { from, to }),
    remove: (path, directory) => send("DELETE", fs("entry", { path, recursive: String(directory) })),
  };
}
