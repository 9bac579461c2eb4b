// Programs with the Vercel AI SDK, which checks every answer with its schemas.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createPerplexity } from '@ai-sdk/perplexity';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const anthropic = createAnthropic({ baseURL: process.env.ANTHROPIC_BASE_URL + '/v1' });
const openai = createOpenAI();
const perplexity = createPerplexity({ baseURL: process.env.PERPLEXITY_BASE_URL });

const weather = tool({ description: 'The weather', inputSchema: z.object({ city: z.string() }), execute: async ({ city }) => `sunny in ${city}` });

const vendors = {
  'anthropic 20250825': { model: anthropic('any'), hosted: { code_execution: anthropic.tools.codeExecution_20250825() } },
  'anthropic 20250522': { model: anthropic('any'), hosted: { code_execution: anthropic.tools.codeExecution_20250522() } },
  'anthropic 20260120': { model: anthropic('any'), hosted: { code_execution: anthropic.tools.codeExecution_20260120() } },
  'openai interpreter': { model: openai('any'), hosted: { code_interpreter: openai.tools.codeInterpreter() } },
  'openai shell': { model: openai('any'), hosted: { shell: openai.tools.shell({ environment: { type: 'containerAuto' } }) } },
};

for (const [name, { model, hosted }] of Object.entries(vendors)) {
  test(`${name}: a text`, async () => {
    assert.equal((await generateText({ model, prompt: 'Hi' })).text, 'Hello!');
  });
  test(`${name}: a streamed text`, async () => {
    const stream = streamText({ model, prompt: 'Hi', onError: ({ error }) => assert.fail(error) });
    let text = '';
    for await (const part of stream.textStream) text += part;
    assert.equal(text, 'Hello!');
  });
  test(`${name}: an object`, async () => {
    const { output } = await generateText({ model, prompt: 'An object', output: Output.object({ schema: z.object({ answer: z.number() }) }) });
    assert.equal(output.answer, 42);
  });
  test(`${name}: a hosted tool`, async () => {
    const result = await generateText({ model, prompt: 'Please run it', tools: hosted });
    assert.match(JSON.stringify(result.content), /42\\n/);
    assert.match(result.text, /Done: /);
    assert.equal(result.finishReason, 'stop');
  });
  test(`${name}: a streamed hosted tool`, async () => {
    const parts = [];
    for await (const part of streamText({ model, prompt: 'Please run it', tools: hosted }).fullStream) {
      assert.notEqual(part.type, 'error', part.error);
      parts.push(part);
    }
    assert.match(JSON.stringify(parts.filter((part) => part.type === 'tool-result')), /42\\n/);
  });
  test(`${name}: a conversation goes on`, async () => {
    const messages = [{ role: 'user', content: 'Please run it' }];
    const first = await generateText({ model, messages, tools: hosted });
    const second = await generateText({ model, messages: [...messages, ...first.response.messages, { role: 'user', content: 'Thank you' }], tools: hosted });
    assert.equal(second.text, 'Hello!');
  });
  test(`${name}: a hosted tool and one of the client`, async () => {
    const result = await generateText({ model, prompt: 'The weather?', tools: { ...hosted, weather }, stopWhen: stepCountIs(4) });
    assert.match(JSON.stringify(result.steps.map((step) => step.content)), /here\\n/);
    assert.match(result.text, /Done: .*sunny in Paris/);
  });
  test(`${name}: the same, streamed`, async () => {
    const stream = streamText({ model, prompt: 'The weather?', tools: { ...hosted, weather }, stopWhen: stepCountIs(4), onError: ({ error }) => assert.fail(error) });
    assert.match(await stream.text, /Done: .*sunny in Paris/);
  });
  test(`${name}: a tool of the client alone`, async () => {
    const result = await generateText({ model, prompt: 'The weather?', tools: { weather }, stopWhen: stepCountIs(4) });
    assert.match(result.text, /Done: .*sunny in Paris/);
  });
}

// The SDK repeats a request that has failed, but not one that has carried out calls. The program counts
// its runs in /tmp, which the container keeps.
test('no call is carried out twice', async () => {
  const { model, hosted } = vendors['anthropic 20250825'];
  const ask = (prompt, id) => generateText({ model, prompt, tools: hosted, providerOptions: { anthropic: id ? { container: { id } } : {} } });
  const first = await ask('Please run it');
  const { id } = first.finalStep?.providerMetadata?.anthropic?.container ?? first.providerMetadata.anthropic.container;
  await assert.rejects(ask('Break', id), (e) => e.statusCode === 424 && e.isRetryable === false);
  assert.match(JSON.stringify((await ask('Count', id)).content), /count 1\\n/);
});

// What programs of a model leave in the directories that their vendors' containers have is there later.
test('containers keep files', async () => {
  for (const [name, option] of [['openai interpreter', 'code_interpreter'], ['openai shell', 'shell']]) {
    const { model, hosted } = vendors[name];
    const result = await generateText({ model, prompt: 'Keep files', tools: hosted });
    assert.match(JSON.stringify(result.content), /written\\n/, option);
  }
});

test('chat completions', async () => {
  for (const model of [openai.chat('any'), perplexity('any')]) {
    assert.equal((await generateText({ model, prompt: 'Hi' })).text, 'Hello!');
    assert.equal(await streamText({ model, prompt: 'Hi' }).text, 'Hello!');
  }
  const result = await generateText({ model: openai.chat('any'), prompt: 'The weather?', tools: { weather }, stopWhen: stepCountIs(3) });
  assert.match(result.text, /Done: .*sunny in Paris/);
});
