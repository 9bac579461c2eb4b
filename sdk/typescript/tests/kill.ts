/**
 * Runs programs in each way while the server is killed again and again: e2e/sdk_test.go counts what they do.
 *
 * CODE is a program that has an effect under the name on its standard input. The name and the execution of each program
 * that has ended are printed.
 */
import assert from "node:assert/strict";

import { Bullpen, collect } from "../src/index.ts";

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

await Promise.all(
  Object.entries(ways).map(async ([way, run]) => {
    for (let i = 0; i < Number(process.argv[2]); i++) {
      for (const [name, trace_id] of Object.entries(await run(`${way}-${i}`))) console.log(name, trace_id);
    }
  }),
);
