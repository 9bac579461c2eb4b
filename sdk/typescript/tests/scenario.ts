/** Runs a scenario against the server of BULLPEN_URL: scenario.ts SCENARIO_JSON. ../../README.md describes the file. */
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";

import {
  APIError,
  Bullpen,
  collect,
  type Context,
  GuestError,
  type Sandbox,
  webhooks,
  WebhookVerificationError,
} from "../src/index.ts";

// deno-lint-ignore no-explicit-any -- the arguments and results of a scenario have any form
type Any = any;

interface Step {
  name: string;
  call: string;
  args: Record<string, Any>;
  as?: string;
  expect?: Record<string, unknown>;
  error?: string;
}

const bullpen = Bullpen.fromEnv();
const sandboxes = new Map<string, Sandbox>();
const contexts = new Map<string, Context>();

async function created<T extends { id: string; info: unknown }>(into: Map<string, T>, object: Promise<T>) {
  const { id, info } = await object;
  into.set(id, await object);
  return info;
}

const sandboxOf = ({ sandbox }: Any) => sandboxes.get(sandbox)!;

/** The calls of scenarios, and how this client has them. */
const calls: Record<string, (args: Any) => Promise<unknown>> = {
  run: ({ idempotency_key, ...request }) => bullpen.run(request, { idempotencyKey: idempotency_key }),
  stream: async (request) => {
    const events = await collect(bullpen.stream(request));
    const text = (stream: string) =>
      events.map((e) => e.type === "output" && e.stream === stream ? e.data : "").join("");
    const last = events.at(-1);
    return { stdout: text("stdout"), stderr: text("stderr"), result: last?.type === "result" && last.result };
  },
  submit: (request) => bullpen.submit(request),
  wait: ({ trace_id }) => bullpen.wait(trace_id),
  map: async ({ rows, ...program }) => ({ results: await bullpen.map(program, rows) }),
  "executions.get": ({ trace_id }) => bullpen.executions.get(trace_id),
  "executions.cancel": ({ trace_id }) => bullpen.executions.cancel(trace_id),
  "files.write": ({ path, text, ...at }) => bullpen.files.write(at, path, text),
  "files.read": async ({ path, ...at }) => ({ text: await bullpen.files.readText(at, path) }),
  "files.list": async ({ path, ...at }) => ({ files: await bullpen.files.list(at, path) }),
  "threads.get": ({ id }) => bullpen.threads.get(id),
  "threads.list": async () => ({ threads: await collect(bullpen.threads.list()) }),
  "threads.delete": ({ id }) => bullpen.threads.delete(id),
  "sandboxes.create": (request) => created(sandboxes, bullpen.sandboxes.create(request)),
  "sandbox.commands.run": ({ sandbox, command, ...options }) => sandboxOf({ sandbox }).commands.run(command, options),
  "sandbox.files.write": ({ path, text, ...at }) => sandboxOf(at).files.write(path, text),
  "sandbox.files.read": async ({ path, ...at }) => ({ text: await sandboxOf(at).files.readText(path) }),
  "sandbox.files.list": async ({ path, ...at }) => ({ files: await sandboxOf(at).files.list(path) }),
  "sandbox.contexts.create": ({ sandbox, ...request }) =>
    created(contexts, sandboxOf({ sandbox }).contexts.create(request)),
  "sandbox.contexts.run": ({ context, code }) => contexts.get(context)!.run(code),
  "sandbox.delete": (args) => sandboxOf(args).delete(),
  "schedules.create": ({ name, cron, time_zone, ...request }) =>
    bullpen.schedules.create({ name, cron, time_zone, request }),
  "schedules.get": ({ id }) => bullpen.schedules.get(id),
  "schedules.list": async () => ({ schedules: await collect(bullpen.schedules.list()) }),
  "schedules.delete": ({ id }) => bullpen.schedules.delete(id),
  "pipelines.run": (request) => bullpen.pipelines.run(request),
  "webhooks.verify": ({ body, headers, secret, tolerance }) => webhooks.verify(body, headers, secret, { tolerance }),
};

/** Returns what is at a path. */
function found(value: Any, path: string): Any {
  return path.split(".").reduce((v, part) => v?.[part], value);
}

/** Returns a value in which the results of earlier steps have taken the place of their names. */
function filled(value: Any, saved: Any): Any {
  if (typeof value === "string") return value.replace(/\$\{([^}]+)\}/g, (_, path) => String(found(saved, path)));
  if (Array.isArray(value)) return value.map((v) => filled(v, saved));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, filled(v, saved)]));
}

function check(got: Any, want: Any, about: string): void {
  if (want?.contains !== undefined) assert.ok(got.includes(want.contains), `${about} is ${got}`);
  else if (want?.matches !== undefined) assert.match(String(got), new RegExp(want.matches), about);
  else assert.deepEqual(got, want, `${about} is ${JSON.stringify(got)}, not ${JSON.stringify(want)}`);
}

function codeOf(error: unknown): string {
  if (error instanceof APIError || error instanceof GuestError) return error.code;
  if (error instanceof WebhookVerificationError) return "webhook_verification";
  throw error;
}

const { steps } = JSON.parse(await readFile(process.argv[2]!, "utf8")) as { steps: Step[] };
const saved: Record<string, unknown> = { run: "r" + crypto.randomUUID().slice(0, 8) };
for (const step of steps) {
  const about = `${step.name} (${step.call})`;
  const call = calls[step.call];
  assert.ok(call, `${about}: this client has no such call`);
  let result: unknown;
  let code: string | undefined;
  try {
    result = await call(filled(step.args, saved));
  } catch (error) {
    code = codeOf(error);
    assert.equal(code, step.error, `${about}: ${error}`);
  }
  assert.equal(code, step.error, `${about}: no error`);
  for (const [path, want] of Object.entries(filled(step.expect ?? {}, saved))) {
    check(found(result, path), want, `${about}: ${path}`);
  }
  if (step.as) saved[step.as] = result;
  console.log(about);
}
console.log(steps.length, "steps");
