// Programs of the forms in which Perplexity's pages use the sandbox.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import Perplexity from '@perplexity-ai/perplexity_ai';

const model = 'openai/gpt-5.5';
const tools = [{ type: 'sandbox' as const }];
const question = 'The mean and standard deviation of 1 to 10?';

const client = new Perplexity({ maxRetries: 0 });

test('quick start', async () => {
  const response = await client.responses.create({ model, input: question, tools });
  const [message, item] = response.output;
  assert.ok(message.type === 'message' && item.type === 'sandbox_results');
  assert.ok(item.language === 'python' && item.status === 'completed' && item.code.includes('statistics') && item.container_id);
  const [result] = item.results;
  assert.deepEqual([result.stdout, result.stderr, result.exit_code, result.status], ['5.5 2.8723\n', '', 0, 'completed']);
  assert.ok(response.status === 'completed' && response.output_text.includes('5.5 2.8723'));
  assert.equal(response.usage?.tool_calls_details?.['sandbox']?.invocation, 1);
});

test('events of a stream', async () => {
  const stream = await client.responses.create({ model, input: question, tools, stream: true });
  let text = '', printed = '', next = 0, completed = '';
  for await (const event of stream) {
    assert.equal(event.sequence_number, next++);
    if (event.type === 'response.output_text.delta') {
      text += event.delta;
    }
    if (event.type === 'response.output_item.done' && event.item.type === 'sandbox_results') {
      printed += event.item.results[0].stdout;
    }
    if (event.type === 'response.completed') {
      completed = event.response!.output.map((item) => (item.type === 'message' ? item.content.map((part) => part.text).join('') : '')).join('');
    }
  }
  assert.equal(printed, '5.5 2.8723\n');
  assert.equal(completed, text);
});

test('a failure is a result', async () => {
  const response = await client.responses.create({ model, input: 'Fail', tools });
  const [item] = response.output;
  assert.ok(item.type === 'sandbox_results' && response.status === 'completed');
  assert.deepEqual([item.results[0].stdout, item.results[0].stderr, item.results[0].exit_code], ['out\n', 'err\n', 3]);
});

test('files', async () => {
  const response = await client.responses.create({ model, input: 'Save a file', tools });
  const [file] = (await client.responses.files.list(response.id)).data;
  assert.deepEqual([file.filename, file.bytes], ['report.csv', 3]);
  const content = await client.responses.files.content(file.id, { response_id: response.id });
  assert.equal(await content.text(), 'a,1');
});

test('functions', async () => {
  const functions = [{ type: 'function' as const, name: 'get_weather', parameters: { type: 'object', properties: { location: { type: 'string' } } } }];
  const response = await client.responses.create({ model, input: 'How is the weather?', tools: functions });
  const [call] = response.output;
  assert.ok(call.type === 'function_call' && response.status === 'requires_action');
  const again = await client.responses.create({
    model,
    tools: functions,
    input: [
      { type: 'message', role: 'user', content: 'How is the weather?' },
      { type: 'function_call', call_id: call.call_id, name: call.name, arguments: call.arguments },
      { type: 'function_call_output', call_id: call.call_id, output: 'sunny' },
    ],
  });
  assert.equal(again.output_text, 'Done: sunny');
});

test('errors are typed', async () => {
  await assert.rejects(new Perplexity({ apiKey: 'pplx-other' }).responses.create({ model, input: 'Hi' }), Perplexity.AuthenticationError);
  await assert.rejects(client.responses.create({ model: '', input: 'Hi' }), Perplexity.BadRequestError);
  await assert.rejects(client.responses.files.list('resp_none'), Perplexity.NotFoundError);
  await assert.rejects(
    client.responses.create({ model, input: 'Limit' }),
    (e) => e instanceof Perplexity.RateLimitError && e.headers?.get('retry-after') === '7' && !!e.headers.get('x-request-id'),
  );
  await assert.rejects(client.responses.create({ model, input: 'Break' }), Perplexity.InternalServerError);
});
