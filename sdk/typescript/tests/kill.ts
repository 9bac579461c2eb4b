/**
 * Runs programs in each way while the server is killed again and again: e2e/sdk_test.go counts what they do.
 *
 * CODE is a program that has an effect under the name on its standard input. The name and the execution of each program
 * that has ended are printed. What runs in a live sandbox is counted here, by the lines of a file in it, and turns of an
 * agent by their events.
 */
import assert from "node:assert/strict";

import { Bullpen, collect, UnknownOutcomeError } from "../src/index.ts";

const bullpen = Bullpen.fromEnv({ patience: 120 });
const program = { code: process.env["CODE"]!, language: "bash" } as const;

/** The ways to run a program. Each returns the names and executions of what has run. */
const ways: Record<string, (name: string) => Promise<Record<string, string | null>>> = {
  run: async (name) => {
    const result = await bullpen.run({ ...program, stdin: name });
    assert.equal(result.exit_code, 0, JSON.stringify(result));
    return { [name]: result.trace_id };
  },
  stream: async (name) => {
    const events = await collect(bullpen.stream({ ...program, stdin: name }));
    const about = JSON.stringify(events);
    assert.deepEqual(events.map(({ seq }) => seq), events.map((_, i) => i + 1), about);
    const last = events.at(-1);
    assert.ok(last?.type === "result" && last.result.exit_code === 0, about);
    assert.equal(events.map((e) => e.type === "output" ? e.data : "").join(""), last.result.stdout, about);
    return { [name]: last.trace_id };
  },
  submit: async (name) => {
    const execution = await bullpen.wait((await bullpen.submit({ ...program, stdin: name })).trace_id);
    assert.equal(execution.exit_code, 0, JSON.stringify(execution));
    return { [name]: execution.trace_id };
  },
  map: async (name) => {
    const rows = [0, 1, 2].map((i) => `${name}-${i}`);
    const results = await bullpen.map(program, rows);
    assert.ok(results.every(({ exit_code }) => exit_code === 0), JSON.stringify(results));
    return Object.fromEntries(rows.map((row, i) => [row, results[i]!.trace_id]));
  },
};

const count = Number(process.argv[2]);

/** Runs the programs of a way one after another. */
async function inEachWay([way, run]: [string, (name: string) => Promise<Record<string, string | null>>]) {
  for (let i = 0; i < count; i++) {
    for (const [name, trace_id] of Object.entries(await run(`${way}-${i}`))) console.log(name, trace_id);
  }
}

const sandbox = await bullpen.sandboxes.create({ timeout: 900 });
const context = await sandbox.contexts.create({ language: "python" });
const session = await bullpen.agentSessions.create({ agent: "mock" });

/** Runs commands, each of which writes a line. Only a command whose outcome is unknown may have written none. */
async function commands() {
  const script = "echo $NAME >>commands; for i in 1 2 3 4 5; do echo $i; sleep 0.1; done";
  const unknown: string[] = [];
  for (let i = 0; i < count; i++) {
    try {
      const { stdout, exit_code } = await sandbox.commands.run(script, { env_vars: { NAME: `${i}` } });
      assert.deepEqual({ stdout, exit_code }, { stdout: "1\n2\n3\n4\n5\n", exit_code: 0 });
    } catch (error) {
      if (!(error instanceof UnknownOutcomeError)) throw error;
      unknown.push(`${i}`);
    }
  }
  const lines = (await sandbox.files.readText("commands")).trim().split("\n");
  assert.equal(new Set(lines).size, lines.length, `commands ran twice: ${lines}`);
  const lost = Array.from({ length: count }, (_, i) => `${i}`).filter((i) => !lines.includes(i));
  assert.deepEqual(lost.filter((i) => !unknown.includes(i)), [], "commands are lost");
}

/** Runs cells, each of which adds one. */
async function cells() {
  await context.run("import time\nn = 0");
  for (let i = 1; i <= count; i++) {
    const cell = "n += 1; time.sleep(0.3); print(n)";
    if (i % 2) assert.equal((await context.run(cell)).stdout, `${i}\n`);
    else assert.deepEqual((await collect(context.stream(cell))).map(({ seq }) => seq), [1, 2, 3]);
  }
  assert.equal((await context.run("n")).results[0]?.data["text/plain"], String(count));
}

/** Sends messages to an agent, each of which is one turn. */
async function turns() {
  for (let i = 0; i < count; i++) {
    const types = (await collect(bullpen.agentSessions.stream(session, `say ${i}`))).map(({ type }) => type);
    assert.deepEqual([types[0], types.at(-1)], ["turn.started", "turn.ended"], String(types));
  }
  const events = await collect(bullpen.agentSessions.events(session));
  assert.equal(events.filter(({ type }) => type === "turn.started").length, count);
}

await Promise.all([...Object.entries(ways).map(inEachWay), commands(), cells(), turns()]);
await sandbox.delete();
