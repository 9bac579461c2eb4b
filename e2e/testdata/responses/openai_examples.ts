// Programs of the forms in which OpenAI's pages use the code interpreter and the shell.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setTimeout } from 'node:timers/promises';

import OpenAI, { toFile } from 'openai';

type Response = OpenAI.Responses.Response;
type Interpreter = OpenAI.Responses.Tool.CodeInterpreter['container'];

const model = 'gpt-5.5';
const include: OpenAI.Responses.ResponseIncludable[] = ['code_interpreter_call.outputs'];
const interpreter = (container: Interpreter): OpenAI.Responses.Tool[] => [{ type: 'code_interpreter', container }];
const tools = interpreter({ type: 'auto', memory_limit: '1g' });
const question = 'The mean and standard deviation of 1 to 10?';

const client = new OpenAI({ maxRetries: 0 });

// calls returns the calls of the code interpreter in a response.
function calls(response: Response): OpenAI.Responses.ResponseCodeInterpreterToolCall[] {
  return response.output.flatMap((item) => (item.type === 'code_interpreter_call' ? [item] : []));
}

// logs returns what the programs of a response printed.
function logs(response: Response): string {
  return calls(response).flatMap((call) => call.outputs ?? []).map((output) => (output.type === 'logs' ? output.logs : '')).join('');
}

// citation returns the first file that a response cites, with the text to which it belongs.
function citation(response: Response) {
  for (const item of response.output) {
    for (const part of item.type === 'message' ? item.content : []) {
      for (const annotation of part.type === 'output_text' ? part.annotations : []) {
        if (annotation.type === 'container_file_citation') {
          return annotation;
        }
      }
    }
  }
  throw new assert.AssertionError({ message: 'no file is cited' });
}

test('quick start', async () => {
  const response = await client.responses.create({ model, tools, include, instructions: 'You are a tutor.', input: question });
  assert.deepEqual(response.output.map((item) => item.type), ['message', 'code_interpreter_call', 'message']);
  const [call] = calls(response);
  assert.ok(call.status === 'completed' && call.code?.includes('statistics') && call.container_id.startsWith('cntr_'));
  assert.equal(logs(response), '5.5 2.8723\n');
  assert.ok(response.status === 'completed' && response.output_text.includes('5.5 2.8723') && response.usage!.total_tokens > 0);
});

test('events of a stream', async () => {
  const stream = await client.responses.create({ model, tools, input: question, stream: true });
  let text = '', code = '', next = 0;
  let last: OpenAI.Responses.ResponseStreamEvent | undefined;
  for await (const event of stream) {
    assert.equal(event.sequence_number, next++);
    if (event.type === 'response.output_text.delta') {
      text += event.delta;
    }
    if (event.type === 'response.code_interpreter_call_code.delta') {
      code += event.delta;
    }
    last = event;
  }
  assert.ok(last?.type === 'response.completed' && code.includes('statistics') && text.includes('5.5 2.8723'));
});

test('the helper for streams accumulates a response', async () => {
  const stream = client.responses.stream({ model, tools, include, input: question });
  let text = '';
  stream.on('response.output_text.delta', (event) => (text += event.delta));
  const response = await stream.finalResponse();
  assert.equal(response.output_text, text);
  assert.equal(logs(response), '5.5 2.8723\n');
});

test('files of a container', async () => {
  const response = await client.responses.create({ model, tools, input: 'Save a file' });
  const cited = citation(response);
  assert.equal(cited.filename, 'report.csv');
  assert.equal(response.output_text.slice(cited.start_index, cited.end_index), 'report.csv');
  const content = await client.containers.files.content.retrieve(cited.file_id, { container_id: cited.container_id });
  assert.equal(await content.text(), 'a,1');
  const file = await client.containers.files.retrieve(cited.file_id, { container_id: cited.container_id });
  assert.deepEqual([file.path, file.bytes, file.source], ['/mnt/data/report.csv', 3, 'assistant']);
  const again = await client.responses.create({ model, include, tools: interpreter(cited.container_id), input: 'Read the file' });
  assert.equal(logs(again), 'a,1\n');
  const history: OpenAI.Responses.ResponseInput = [
    { role: 'user', content: 'Save a file' }, ...(response.output as OpenAI.Responses.ResponseInputItem[]), { role: 'user', content: 'Read the file' },
  ];
  const later = await client.responses.create({ model, include, tools, input: history });
  assert.equal(logs(later), 'a,1\n');
});

test('containers', async () => {
  const file = await client.files.create({ file: await toFile(Buffer.from('b,2'), 'report.csv'), purpose: 'user_data' });
  assert.equal((await client.files.retrieve(file.id)).bytes, 3);
  const container = await client.containers.create({ name: 'test-container', memory_limit: '1g', file_ids: [file.id] });
  const read = async () => logs(await client.responses.create({ model, include, tools: interpreter(container.id), input: 'Read the file' }));
  assert.equal(await read(), 'b,2\n');
  const added = await client.containers.files.create(container.id, { file: await toFile(Buffer.from('c,3'), 'report.csv') });
  assert.equal(added.path, '/mnt/data/report.csv');
  assert.equal(await read(), 'c,3\n');
  const listed = [];
  for await (const one of client.containers.files.list(container.id)) {
    listed.push(one.path);
  }
  assert.deepEqual(listed, ['/mnt/data/report.csv']);
  await client.containers.files.delete(added.id, { container_id: container.id });
  await assert.rejects(client.containers.files.retrieve(added.id, { container_id: container.id }), OpenAI.NotFoundError);
  const again = await client.containers.files.create(container.id, { file_id: file.id });
  assert.equal(again.source, 'user');
  const ids: string[] = [];
  for await (const one of client.containers.list({ limit: 1 })) {
    ids.push(one.id);
  }
  assert.equal(ids[0], container.id); // the newest
  assert.equal(new Set(ids).size, ids.length);
  assert.ok((await client.files.delete(file.id)).deleted);
  await client.containers.delete(container.id);
  await assert.rejects(client.containers.retrieve(container.id), OpenAI.NotFoundError);
});

test('shell', async () => {
  const response = await client.responses.create({ model, tools: [{ type: 'shell', environment: { type: 'container_auto' } }], input: 'List' });
  const [call, output] = response.output;
  assert.ok(call.type === 'shell_call' && call.action.commands.length === 2);
  assert.ok(output.type === 'shell_call_output' && output.call_id === call.call_id);
  assert.deepEqual(output.output.map((one) => [one.stdout, one.outcome]), [['list.txt\n', { type: 'exit', exit_code: 0 }], ['one\n', { type: 'exit', exit_code: 2 }]]);
});

test('functions', async () => {
  const functions: OpenAI.Responses.Tool[] = [
    { type: 'function', name: 'get_weather', strict: true, parameters: { type: 'object', properties: { location: { type: 'string' } } } },
  ];
  const input: OpenAI.Responses.ResponseInput = [{ role: 'user', content: 'How is the weather?' }];
  const response = await client.responses.create({ model, tools: functions, input });
  const [call] = response.output;
  assert.ok(call.type === 'function_call' && call.arguments === '{"location":"Paris"}');
  input.push(call, { type: 'function_call_output', call_id: call.call_id, output: 'sunny' });
  assert.equal((await client.responses.create({ model, tools: functions, input })).output_text, 'Done: sunny');
});

// ended waits for the end of a response in the background.
async function ended(response: Response): Promise<Response> {
  while (response.status === 'queued' || response.status === 'in_progress') {
    await setTimeout(100);
    response = await client.responses.retrieve(response.id, { include });
  }
  return response;
}

test('background', async () => {
  const queued = await client.responses.create({ model, tools, input: question, background: true });
  assert.ok(queued.status === 'queued' && queued.background && queued.output.length === 0);
  const response = await ended(queued);
  assert.equal(response.status, 'completed');
  assert.equal(logs(response), '5.5 2.8723\n');
  assert.ok(response.output_text.includes('5.5 2.8723') && response.completed_at! >= response.created_at);
  await client.responses.delete(response.id);
  await assert.rejects(client.responses.retrieve(response.id), (e) => e instanceof OpenAI.NotFoundError && !!e.requestID);
});

test('a stream that is cut goes on', async () => {
  const numbers: number[] = [];
  let id = '', text = '', final: Response | undefined;
  const read = (event: OpenAI.Responses.ResponseStreamEvent) => {
    numbers.push(event.sequence_number);
    if (event.type === 'response.created') {
      id = event.response.id;
    } else if (event.type === 'response.output_text.delta') {
      text += event.delta;
    } else if (event.type === 'response.completed') {
      final = event.response;
    }
  };
  for await (const event of await client.responses.create({ model, tools, include, input: question, background: true, stream: true })) {
    read(event);
    if (numbers.length === 5) {
      break; // closes the connection
    }
  }
  for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: numbers.at(-1)! })) {
    read(event);
  }
  assert.deepEqual(numbers, [...numbers.keys()]);
  assert.ok(final && final.status === 'completed');
  assert.equal(logs(final), '5.5 2.8723\n');
  assert.equal(text, (await client.responses.retrieve(id)).output_text);
  const again = client.responses.stream({ response_id: id, starting_after: 4 });
  assert.equal((await again.finalResponse()).output_text, text);
});

test('cancel', async () => {
  let id = '', last = '';
  for await (const event of await client.responses.create({ model, tools, input: 'Sleep', background: true, stream: true })) {
    if (event.type === 'response.created') {
      id = event.response.id;
    } else if (event.type === 'response.code_interpreter_call.interpreting') {
      await client.responses.cancel(id);
    }
    last = event.type;
  }
  assert.equal(last, 'response.cancelled'); // for which the SDK has no type
  assert.equal((await client.responses.retrieve(id)).status, 'cancelled');
  const { id: inline } = await client.responses.create({ model, input: 'Hi' });
  await assert.rejects(client.responses.cancel(inline), OpenAI.BadRequestError);
});

test('a response goes on from another one', async () => {
  const first = await ended(await client.responses.create({ model, tools, input: 'Save a file', background: true }));
  const second = await client.responses.create({ model, tools, include, input: 'Read the file', previous_response_id: first.id });
  assert.equal(second.previous_response_id, first.id);
  assert.equal(logs(second), 'a,1\n');
  assert.equal(calls(second)[0].container_id, calls(first)[0].container_id);
  const hidden = await client.responses.create({ model, input: 'Hi', store: false });
  await assert.rejects(client.responses.retrieve(hidden.id), OpenAI.NotFoundError);
  await assert.rejects(
    client.responses.create({ model, input: 'Hi', previous_response_id: hidden.id }),
    (e) => e instanceof OpenAI.BadRequestError && e.param === 'previous_response_id',
  );
});

test('webhooks', async () => {
  const response = await client.responses.create({ model, input: 'Hi', background: true });
  for (;;) {
    const got = await fetch(process.env['WEBHOOKS_URL']!); // a server passes each webhook on, with its headers
    const body = await got.text();
    const event = await client.webhooks.unwrap(body, got.headers); // with OPENAI_WEBHOOK_SECRET
    await assert.rejects(client.webhooks.unwrap(body + ' ', got.headers), OpenAI.InvalidWebhookSignatureError);
    if (event.type === 'response.completed' && event.data.id === response.id) {
      assert.ok(event.object === 'event' && event.created_at >= response.created_at);
      assert.equal((await client.responses.retrieve(event.data.id)).output_text, 'Hello!');
      return;
    }
  }
});

test('models', async () => {
  const listed: string[] = [];
  for await (const one of client.models.list()) {
    listed.push(one.id);
  }
  assert.deepEqual(listed, ['small']);
  assert.equal((await client.models.retrieve('openai/' + model)).object, 'model'); // since * stands for all names
});

test('errors are typed', async () => {
  const ask = (input: string, more = {}) => client.responses.create({ model, input, ...more });
  await assert.rejects(
    new OpenAI({ apiKey: 'sk-other' }).responses.create({ model, input: 'Hi' }),
    (e) => e instanceof OpenAI.AuthenticationError && e.code === 'invalid_api_key' && !!e.requestID,
  );
  await assert.rejects(ask('Hi', { tools: interpreter('cntr_none') }), OpenAI.NotFoundError);
  await assert.rejects(ask('Hi', { prompt: { id: 'pmpt_1' } }), (e) => e instanceof OpenAI.BadRequestError && e.param === 'prompt');
  await assert.rejects(ask('Limit'), (e) => e instanceof OpenAI.RateLimitError && e.headers.get('retry-after') === '7' && e.type === 'rate_limit_error');
  await assert.rejects(ask('Break'), OpenAI.InternalServerError);
});
