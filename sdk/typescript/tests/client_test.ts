/** The client against a server whose connections break: nothing runs twice, and nothing is lost or repeated. */
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  Bullpen,
  collect,
  NotFoundError,
  RateLimitError,
  ServerError,
  UnknownOutcomeError,
  UnreachableError,
  webhooks,
  WebhookVerificationError,
} from "../src/index.ts";
import { type Answer, FakeServer, type Request } from "./fake.ts";

const trace_id = "trc_AbCdEfGhIjKlMnOpQrSt";
const ended = { stdout: "äöü\n", stderr: "", exit_code: 0, success: true };
const state = { id: "i1", state: "running" };

const events = [
  { type: "status", trace_id, status: "running", seq: 1 },
  { type: "output", stream: "stdout", data: "ä", seq: 2 },
  { type: "keepalive", seq: 2 },
  { type: "output", stream: "stderr", data: "öü\n", seq: 3 },
  { type: "result", trace_id, status: "success", result: ended, output_truncated: false, seq: 4 },
];

const cell = [
  { type: "start", seq: 1, run: 3 },
  { type: "stdout", seq: 2, text: "ä" },
  { type: "end", seq: 3, status: "ok", count: 1 },
];

const turn = [2, 3, 4].map((sequence) => ({ sequence, type: sequence === 4 ? "turn.ended" : "item.delta", data: {} }));

const output = [
  { start: { pid: 7 } },
  { data: { stdout: btoa("one"), seq: "1" } },
  { data: { stderr: btoa("two"), seq: "2" } },
  { data: { stdout: btoa("three"), seq: "3" } },
  { end: { exited: true, exitCode: 5 } },
];

const lines = (list: unknown[]) => list.map((entry) => JSON.stringify(entry) + "\n").join("");
const json = (body: unknown): Answer => ({
  headers: { "X-Trace-Id": trace_id, "Content-Type": "application/json" },
  body: JSON.stringify(body),
});
const queryOf = (request: Request, name: string) =>
  new URL(request.path, "http://localhost").searchParams.get(name) ?? "-1";

/** Messages of the Connect protocol. */
function envelopes(messages: { event?: unknown }[]): Uint8Array {
  const parts = [...messages, {}].flatMap((message, i) => {
    const text = new TextEncoder().encode(JSON.stringify(message));
    return [i === messages.length ? 2 : 0, 0, 0, text.length >> 8, text.length & 255, ...text];
  });
  return Uint8Array.from(parts);
}

/** The server of bullpen, as far as these tests need it. */
class Programs {
  /** What has been started, by its key. */
  readonly started: string[] = [];

  answer(request: Request): Answer {
    const path = request.path.replace(/\?.*/, "");
    const after = Number(queryOf(request, "after_seq"));
    switch (`${request.method} ${path}`) {
      case "POST /v1/sandbox/execute":
        this.#start(request.headers["idempotency-key"]);
        if (request.headers["prefer"]) return { ...json({ trace_id, status: "running" }), status: 202 };
        if (request.headers["accept"] === "application/x-ndjson") return { ...json({}), body: lines(events) };
        return json(ended);
      case `GET /v1/executions/${trace_id}/output`:
        return { body: lines(events.filter(({ seq }) => seq > after)) };
      case `GET /v1/executions/${trace_id}`:
        return json({ ...ended, trace_id, completed_at: "2026-11-20T12:00:00.000Z" });
      case "POST /v1/batches":
        this.#start(request.headers["idempotency-key"]);
        return { ...json({ id: "bat_1", counts: { total: 3 } }), status: 201 };
      case "GET /v1/batches/bat_1":
        return json({ id: "bat_1", counts: { total: 3 } });
      case "GET /v1/batches/bat_1/results": {
        const first = Number(queryOf(request, "after")) + 1;
        return {
          body: lines([0, 1, 2].slice(first).map((index) => ({ index, stdout: `ä${index}` }))).replace("\n", "\n\n"),
        };
      }
      case "POST /v1/sandboxes":
        return { ...json(state), status: 201 };
      case "GET /v1/sandboxes/i1":
        return json(state);
      case "POST /v1/sandboxes/i1/guest/process.Process/Start":
        this.#start(/"tag":"([^"]*)"/.exec(request.body)?.[1]);
        return { body: envelopes(output.map((event) => ({ event }))) };
      case "POST /v1/sandboxes/i1/guest/process.Process/List":
        return json({ processes: [{ pid: 7, tag: this.started[0] }] });
      case "POST /v1/sandboxes/i1/guest/process.Process/Connect": {
        const seen = Number(/"afterSeq":"(\d+)"/.exec(request.body)?.[1]);
        const rest = output.filter(({ data }) => !data || Number(data.seq) > seen);
        return { body: envelopes(rest.map((event) => ({ event }))) };
      }
      case "GET /v1/sandboxes/i1/contexts/c1":
        return json({ id: "c1" });
      case "POST /v1/sandboxes/i1/contexts/c1/execute":
        this.#start(JSON.parse(request.body).call);
        if (request.headers["accept"] === "application/json") return json({ run: 3, status: "ok", stdout: "ä" });
        return { body: lines(cell) };
      case "GET /v1/sandboxes/i1/contexts/c1/runs/3":
        return { body: lines(cell.filter(({ seq }) => seq > after)) };
      case "POST /sandbox-agent/v1/sessions/s1/messages/stream":
        this.#start(request.headers["idempotency-key"]);
        return { body: turn.map((event) => `id: ${event.sequence}\ndata: ${JSON.stringify(event)}\n\n`).join("") };
      case "GET /sandbox-agent/v1/sessions/s1/events/sse": {
        const rest = turn.filter(({ sequence }) => sequence > Number(queryOf(request, "offset")));
        return { body: rest.map((event) => `data: ${JSON.stringify(event)}\n\n`).join("") };
      }
      case "POST /v1/files/download_url": {
        const url = `http://${request.headers["host"]}/v1/files/content/token`;
        return json({ url, method: "GET", headers: [], expires_at: "" });
      }
      case "GET /v1/files/content/token":
        return { headers: { "Content-Length": "11" }, body: "the content" };
      default:
        return { status: 404, body: JSON.stringify({ error: "not_found", message: `there is no ${request.path}` }) };
    }
  }

  #start(key: string | undefined): void {
    assert.ok(key, "a submission has a key");
    if (!this.started.includes(key)) this.started.push(key);
  }
}

async function withServer<T>(
  answer: (request: Request) => Answer,
  use: (server: FakeServer, client: Bullpen) => Promise<T>,
): Promise<T> {
  const server = await new FakeServer(answer).listen();
  try {
    return await use(server, new Bullpen({ url: server.url, apiKey: "sk-test" }));
  } finally {
    await server.close();
  }
}

/** Calls that must have the same outcome wherever their connections break. */
const calls: Record<string, (client: Bullpen) => Promise<unknown>> = {
  run: (client) => client.run({ code: "print(1)" }),
  stream: (client) => collect(client.stream({ code: "print(1)" })),
  "submit and wait": async (client) => (await client.wait((await client.submit({ code: "print(1)" })).trace_id)).stdout,
  map: (client) => client.map({ code: "print(1)" }, [1, 2, 3]),
  "a command": async (client) => await (await client.sandboxes.get("i1")).commands.run("true"),
  "a cell": async (client) => await (await (await client.sandboxes.get("i1")).contexts.get("c1")).run("1"),
  "the events of a cell": async (client) =>
    await collect((await (await client.sandboxes.get("i1")).contexts.get("c1")).stream("1")),
  "a turn of an agent": (client) => collect(client.agentSessions.stream("s1", "hello")),
  "a file": (client) => client.files.readText({ thread_id: "t" }, "a.txt"),
};

/** After how many bytes an answer is to break off: every byte of its body, and some of its head, which is all the same. */
function cutsOf(answer: Uint8Array): number[] {
  const head = new TextDecoder("latin1").decode(answer).indexOf("\r\n\r\n") + "\r\n\r\n".length;
  return Array.from(answer.keys()).filter((cut) => cut >= head - 2 || cut % 16 === 0);
}

for (const [name, call] of Object.entries(calls)) {
  test(`${name}: the same wherever a connection breaks`, async () => {
    const whole = new Programs();
    const { answers, want } = await withServer((request) => whole.answer(request), async (server, client) => {
      return { want: await call(client), answers: server.answers };
    });
    const attempts = answers.flatMap((answer, i) => cutsOf(answer).map((cut) => ({ i, cut })));
    await Promise.all(attempts.map(async ({ i, cut }) => {
      const programs = new Programs();
      await withServer((request) => programs.answer(request), async (server, client) => {
        server.cuts.push(...Array(i), cut);
        assert.deepEqual(await call(client), want, `answer ${i} breaks off after ${cut} bytes`);
        assert.ok(
          programs.started.length <= 1,
          `answer ${i} breaks off after ${cut} bytes: started ${programs.started}`,
        );
      });
    }));
  });
}

test("a request that must not be repeated is sent once, and its outcome is unknown", async () => {
  const whole = new Programs();
  const size = await withServer((request) => whole.answer(request), async (server, client) => {
    await client.sandboxes.create();
    return server.answers[0]!.length - "\r\n0\r\n\r\n".length; // at which the content is complete
  });
  await Promise.all(Array.from({ length: size }, async (_, cut) => {
    const programs = new Programs();
    await withServer((request) => programs.answer(request), async (server, client) => {
      server.cuts.push(cut);
      await assert.rejects(client.sandboxes.create(), UnknownOutcomeError, `after ${cut} bytes`);
      assert.equal(server.requests.length, 1);
    });
  }));
});

test("a rejection is repeated if the server says that waiting helps", async () => {
  const rejection = (status: number, error: string, headers = {}) => ({
    status,
    headers,
    body: JSON.stringify({ error, message: "no" }),
  });
  const cases: { first: Answer; want: number | typeof ServerError | typeof RateLimitError }[] = [
    { first: rejection(503, "service_unavailable", { "Retry-After": "0" }), want: 2 },
    { first: rejection(503, "service_unavailable"), want: 2 },
    { first: rejection(429, "rate_limited", { "Retry-After": "0" }), want: 2 },
    { first: { status: 502, body: "a proxy" }, want: 2 },
    { first: rejection(503, "service_unavailable", { "X-Should-Retry": "false" }), want: ServerError },
    { first: rejection(503, "service_unavailable", { "Retry-After": "3600" }), want: ServerError },
    { first: rejection(429, "rate_limited"), want: RateLimitError },
    { first: rejection(500, "internal"), want: ServerError },
  ];
  await Promise.all(cases.map(async ({ first, want }) => {
    const answers = [first];
    const answer = () => answers.shift() ?? json(ended);
    await withServer(answer, async (server, client) => {
      const result = client.run({ code: "print(1)" });
      if (typeof want !== "number") return await assert.rejects(result, want);
      assert.equal((await result).stdout, ended.stdout);
      assert.equal(server.requests.length, want);
      assert.equal(new Set(server.requests.map(({ headers }) => headers["idempotency-key"])).size, 1);
    });
  }));
});

test("a server that was never there is an error at once, and one that restarts is waited for", async () => {
  const first = await new FakeServer(() => json(ended)).listen();
  const client = new Bullpen({ url: first.url, apiKey: "sk-test" });
  await client.run({ code: "print(1)" });
  await first.close();
  await assert.rejects(new Bullpen({ url: first.url, apiKey: "sk-test" }).run({ code: "print(1)" }), UnreachableError);
  let onRetry = () => {};
  const retried = new Promise<void>((resolve) => onRetry = resolve);
  const patient = new Bullpen({ url: first.url, apiKey: "sk-test", onRetry: () => onRetry() });
  await first.listen(Number(new URL(first.url).port));
  await patient.run({ code: "print(1)" });
  await first.close();
  const result = patient.run({ code: "print(1)" });
  await retried;
  await first.listen(Number(new URL(first.url).port));
  assert.equal((await result).stdout, ended.stdout);
  await first.close();
});

test("a signal ends a call with its reason", async () => {
  const waits = { status: 503, headers: { "Retry-After": "20" }, body: '{"error":"service_unavailable","message":""}' };
  await withServer(() => waits, async (_, client) => {
    const reason = new Error("no longer needed");
    const calls = [
      (signal: AbortSignal) => client.run({ code: "print(1)" }, { signal }),
      (signal: AbortSignal) => collect(client.stream({ code: "print(1)" }, { signal })),
      (signal: AbortSignal) => client.map({ code: "print(1)" }, [1], { signal }),
    ];
    for (const call of calls) {
      await assert.rejects(call(AbortSignal.abort(reason)), reason);
      const controller = new AbortController();
      const result = call(controller.signal);
      controller.abort(reason);
      await assert.rejects(result, reason);
    }
  });
});

test("an error has the code, the ids and the class of its answer", async () => {
  const body = JSON.stringify({ error: "not_found", message: "there is no such thread" });
  await withServer(() => ({ status: 404, headers: { "X-Request-Id": "req_1" }, body }), async (_, client) => {
    await assert.rejects(client.threads.get("a/b"), (error) => {
      assert.ok(error instanceof NotFoundError);
      const { code, status, request_id, message } = error;
      const want = { code: "not_found", status: 404, request_id: "req_1", message };
      assert.deepEqual({ code, status, request_id, message }, want);
      assert.equal(message, "there is no such thread (HTTP 404, not_found, req_1)");
      return true;
    });
  });
});

test("webhooks are verified", async () => {
  // The example of Standard Webhooks 1.0, but for the time.
  const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
  const body = '{"event":"webhook.test"}';
  const timestamp = String(Math.floor(Date.now() / 1000));
  const sign = async (text: string) => {
    const raw = Uint8Array.from(atob(secret.slice(6)), (c) => c.charCodeAt(0));
    const key = await crypto.subtle.importKey("raw", raw, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
    const signature = new Uint8Array(await crypto.subtle.sign("HMAC", key, new TextEncoder().encode(text)));
    return "v1," + btoa(String.fromCharCode(...signature));
  };
  const good = {
    "Webhook-Id": "msg_1",
    "Webhook-Timestamp": timestamp,
    "Webhook-Signature": `v1,AAAA v1a,x ${await sign(`msg_1.${timestamp}.${body}`)}`,
  };
  assert.equal((await webhooks.verify(body, good, secret)).event, "webhook.test");
  assert.equal(
    (await webhooks.verify(new TextEncoder().encode(body), new Headers(good), secret)).event,
    "webhook.test",
  );
  const old = String(Number(timestamp) - 301);
  const bad: [string, Record<string, string>, string][] = [
    [body + " ", good, secret],
    [body, { ...good, "Webhook-Id": "msg_2" }, secret],
    [body, { ...good, "Webhook-Timestamp": old, "Webhook-Signature": await sign(`msg_1.${old}.${body}`) }, secret],
    [body, { ...good, "Webhook-Timestamp": "soon", "Webhook-Signature": await sign(`msg_1.soon.${body}`) }, secret],
    [body, { ...good, "Webhook-Signature": "" }, secret],
    [body, { ...good, "Webhook-Signature": "v1,!" }, secret],
    [body, {}, secret],
    [body, good, "whsec_" + btoa("another secret of the same length")],
    [body, good, "whsec_!"],
  ];
  for (const [content, headers, key] of bad) {
    await assert.rejects(webhooks.verify(content, headers, key), WebhookVerificationError);
  }
});
