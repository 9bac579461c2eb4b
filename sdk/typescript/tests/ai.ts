/** The tools with the AI SDK and its mock model, against the server of BULLPEN_URL: node --test ai.js */
import assert from "node:assert/strict";
import { test } from "node:test";

import { generateText, stepCountIs, type ToolSet } from "ai";
import { MockLanguageModelV4 } from "ai/test";

import { codeTool, contextTool } from "../src/ai.ts";
import { Bullpen } from "../src/index.ts";

const bullpen = Bullpen.fromEnv();
type Generated = Awaited<ReturnType<MockLanguageModelV4["doGenerate"]>>;

const usage: Generated["usage"] = {
  inputTokens: { total: 1, noCache: 1, cacheRead: 0, cacheWrite: 0 },
  outputTokens: { total: 1, text: 1, reasoning: 0 },
};

/** Lets a model run programs one after another, and returns what it gets for each. */
async function outputsOf(tools: ToolSet, ...programs: string[]) {
  const [toolName = ""] = Object.keys(tools);
  const answers = programs.map((code, i): Generated => ({
    content: [{ type: "tool-call", toolCallId: `call-${i}`, toolName, input: JSON.stringify({ code }) }],
    finishReason: { unified: "tool-calls", raw: undefined },
    usage,
    warnings: [],
  }));
  const last: Generated = {
    content: [{ type: "text", text: "done" }],
    finishReason: { unified: "stop", raw: undefined },
    usage,
    warnings: [],
  };
  const model = new MockLanguageModelV4({ doGenerate: [...answers, last] });
  const { text } = await generateText({ model, tools, prompt: "Work.", stopWhen: stepCountIs(programs.length + 1) });
  assert.equal(text, "done");
  const messages = model.doGenerateCalls.at(-1)!.prompt.filter(({ role }) => role === "tool");
  return messages.flatMap(({ content }) => content as { output: { type: string; value: unknown } }[]).map((
    { output },
  ) => output);
}

const text = (text: string) => ({ type: "content", value: [{ type: "text", text }] });

test("a model runs programs", async () => {
  const outputs = await outputsOf(
    { python: codeTool(bullpen, { timeout: 30 }) },
    "print('hello')\n6 * 7",
    "import sys; sys.exit('no')",
    "x = 1",
  );
  assert.deepEqual(outputs, [
    text("<stdout>\nhello\n\n</stdout>\n<result>\n42\n</result>"),
    text("<stderr>\nno\n\n</stderr>\n<end>\nexit code 1\n</end>"),
    text("The program printed nothing."),
  ]);
});

test("a model sees pictures", async () => {
  const picture = btoa("not really a picture");
  const code = `display({"image/png": "${picture}", "text/plain": "a picture"}, raw=True)`;
  const [output] = await outputsOf({ python: codeTool(bullpen) }, code);
  const { type, mediaType, data } = (output?.value as Record<string, unknown>[])[1]!;
  assert.deepEqual([type, mediaType, data], ["file", "image/png", { type: "data", data: picture }]);
});

test("a model runs programs that share files", async () => {
  const outputs = await outputsOf(
    { bash: codeTool(bullpen, { language: "bash", thread_id: "ai-" + crypto.randomUUID() }) },
    "echo hello >file",
    "cat file",
  );
  assert.deepEqual(outputs[1], text("<stdout>\nhello\n\n</stdout>"));
});

test("a long output is cut, and says so", async () => {
  const [output] = await outputsOf({ python: codeTool(bullpen) }, "print('a' * 15000 + 'b' * 15000)");
  assert.match(JSON.stringify(output), /aaa\\n\[10001 characters are left out here\]\\nbbb/);
});

test("a model runs cells that share variables", async () => {
  const sandbox = await bullpen.sandboxes.create({ timeout: 300 });
  try {
    const context = await sandbox.contexts.create({ language: "python" });
    const outputs = await outputsOf({ python: contextTool(context) }, "total = 40", "total + 2", "1 / 0");
    assert.deepEqual(outputs[1], text("<result>\n42\n</result>"));
    assert.match(JSON.stringify(outputs[2]), /ZeroDivisionError: division by zero/);
  } finally {
    await sandbox.delete();
  }
});

test("a model gets the error of a call that fails", async () => {
  const [output] = await outputsOf({ python: codeTool(bullpen, { timeout: 1_000_000 }) }, "1");
  assert.equal(output?.type, "error-text");
});
