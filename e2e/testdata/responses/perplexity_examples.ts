// Programs of the forms in which Perplexity's pages use the sandbox.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setTimeout } from 'node:timers/promises';

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

// ended waits for the end of a response in the background.
async function ended(response: Perplexity.Responses.ResponseRetrieveResponse) {
  while (response.status === 'queued' || response.status === 'in_progress') {
    await setTimeout(100);
    response = await client.responses.retrieve(response.id);
  }
  return response;
}

test('background', async () => {
  const queued = await client.responses.create({ model, input: 'Save a file', tools, background: true });
  assert.ok(queued.status === 'queued' && queued.background && queued.output.length === 0);
  const response = await ended(queued);
  const [item] = response.output;
  assert.ok(response.status === 'completed' && item.type === 'sandbox_results' && item.results[0].stdout === 'saved\n');
  const [file] = (await client.responses.files.list(response.id)).data;
  assert.deepEqual([file.filename, file.bytes], ['report.csv', 3]);
  const content = await client.responses.files.content(file.id, { response_id: response.id });
  assert.equal(await content.text(), 'a,1');
});

test('a stream that is cut goes on', async () => {
  const numbers: number[] = [];
  let id = '', text = '', completed = false;
  const read = (event: Perplexity.Responses.ResponseStreamChunk) => {
    numbers.push(event.sequence_number);
    if (event.type === 'response.created') {
      id = event.response!.id;
    } else if (event.type === 'response.output_text.delta') {
      text += event.delta;
    }
    completed = event.type === 'response.completed';
  };
  for await (const event of await client.responses.create({ model, input: question, tools, background: true, stream: true })) {
    read(event);
    if (numbers.length === 4) {
      break; // closes the connection
    }
  }
  // The SDK's retrieve has no parameters for streams.
  const rest = await client.get<AsyncIterable<Perplexity.Responses.ResponseStreamChunk>>(`/v1/responses/${id}`, {
    query: { stream: true, starting_after: numbers.at(-1)! }, stream: true,
  });
  for await (const event of rest) {
    read(event);
  }
  assert.deepEqual(numbers, [...numbers.keys()]);
  assert.ok(completed);
  assert.equal((await client.responses.retrieve(id)).output_text, text);
});

test('cancel', async () => {
  const { id } = await client.responses.create({ model, input: 'Sleep', tools, background: true });
  assert.deepEqual({ ...(await client.responses.cancel(id)) }, { response_id: id, status: 'cancelling' });
  assert.equal((await ended(await client.responses.retrieve(id))).status, 'cancelled');
  await assert.rejects(client.responses.cancel(id), Perplexity.BadRequestError);
});

test('a response goes on from another one', async () => {
  const first = await client.responses.create({ model, input: 'Say hello' });
  const second = await client.responses.create({ model, input: 'Hi', previous_response_id: first.id });
  assert.ok(second.previous_response_id === first.id && second.output_text === 'Hello!');
  const hidden = await client.responses.create({ model, input: 'Hi', store: false });
  await assert.rejects(client.responses.retrieve(hidden.id), Perplexity.NotFoundError);
  await assert.rejects(client.responses.create({ model, input: 'Hi', previous_response_id: hidden.id }), Perplexity.BadRequestError);
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
