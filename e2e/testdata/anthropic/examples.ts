// Programs of the forms in which Anthropic's pages use the code execution tool and the Files API.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setTimeout } from 'node:timers/promises';

import Anthropic, { toFile } from '@anthropic-ai/sdk';

const model = 'claude-opus-4-6';
const tools: Anthropic.Messages.ToolUnion[] = [{ type: 'code_execution_20250825', name: 'code_execution' }];
const betas: Anthropic.AnthropicBeta[] = ['files-api-2025-04-14'];

const client = new Anthropic({ maxRetries: 0 });

const user = (content: Anthropic.MessageParam['content']): Anthropic.MessageParam => ({ role: 'user', content });

const ask = (content: Anthropic.MessageParam['content'], more: { container?: string } = {}) =>
  client.messages.create({ model, max_tokens: 4096, messages: [user(content)], tools, ...more });

// results returns the results of Bash commands in a message.
function results(message: Anthropic.Message): Anthropic.BashCodeExecutionResultBlock[] {
  return message.content.flatMap((block) =>
    block.type === 'bash_code_execution_tool_result' && block.content.type === 'bash_code_execution_result' ? [block.content] : [],
  );
}

test('quick start', async () => {
  const message = await ask('Calculate the mean and standard deviation of [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]');
  assert.deepEqual(message.content.map((block) => block.type), ['text', 'server_tool_use', 'bash_code_execution_tool_result', 'text']);
  const [result] = results(message);
  assert.deepEqual([result.stdout, result.stderr, result.return_code], ['5.5 2.8723\n', '', 0]);
  assert.equal(message.stop_reason, 'end_turn');
  assert.ok(message.usage.output_tokens > 0 && message._request_id);
  assert.ok(Date.parse(message.container!.expires_at) > Date.now());
});

test('first revision', async () => {
  const message = await client.beta.messages.create({
    model,
    betas: ['code-execution-2025-05-22'],
    max_tokens: 4096,
    messages: [{ role: 'user', content: 'Calculate the mean and standard deviation of [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]' }],
    tools: [{ type: 'code_execution_20250522', name: 'code_execution' }],
  });
  const block = message.content[2];
  assert.ok(block.type === 'code_execution_tool_result' && block.content.type === 'code_execution_result');
  assert.deepEqual([block.content.stdout, block.content.return_code], ['5.5 2.8723\n', 0]);
});

test('the stream accumulates a message', async () => {
  const stream = client.messages.stream({ model, max_tokens: 4096, messages: [user('Calculate the mean and standard deviation of [1..10]')], tools });
  const kinds: string[] = [];
  let text = '';
  stream.on('streamEvent', (event) => kinds.push(event.type)).on('text', (delta) => (text += delta));
  const message = await stream.finalMessage();
  assert.equal(kinds.at(0), 'message_start');
  assert.equal(kinds.at(-1), 'message_stop');
  assert.equal(results(message)[0].stdout, '5.5 2.8723\n');
  const use = message.content[1];
  assert.ok(use.type === 'server_tool_use' && String((use.input as { command: string }).command).startsWith('python3'));
  assert.equal(text, message.content.map((block) => (block.type === 'text' ? block.text : '')).join(''));
  assert.ok(message.stop_reason === 'end_turn' && message.container?.id.startsWith('container_') && message.usage.output_tokens > 0);
});

test('a broken stream is an error', async () => {
  const stream = client.messages.stream({ model, max_tokens: 4096, messages: [user('Break')], tools });
  await assert.rejects(stream.finalMessage(), (e) => e instanceof Anthropic.APIError && e.type === 'api_error');
});

test('upload and analyze', async () => {
  const file = await client.beta.files.upload({ file: await toFile(Buffer.from('a,1\nb,41\n'), 'data.csv', { type: 'text/csv' }), betas });
  assert.deepEqual([file.filename, file.mime_type, file.size_bytes, file.downloadable], ['data.csv', 'text/csv', 9, false]);
  const content: Anthropic.Beta.BetaContentBlockParam[] = [{ type: 'text', text: 'Analyze this CSV data' }, { type: 'container_upload', file_id: file.id }];
  const message = await client.beta.messages.create({
    model, betas, max_tokens: 4096, messages: [{ role: 'user', content }], tools: [{ type: 'code_execution_20250825', name: 'code_execution' }],
  });
  const result = message.content.find((block) => block.type === 'bash_code_execution_tool_result');
  assert.ok(result?.content.type === 'bash_code_execution_result' && result.content.stdout === 'total 42\n');
  await assert.rejects(client.files.download(file.id), (e) => e instanceof Anthropic.FileNotDownloadableError && e.errorCode === 'file_not_downloadable');
  assert.equal((await client.beta.files.delete(file.id)).type, 'file_deleted');
  await assert.rejects(client.beta.files.retrieveMetadata(file.id), Anthropic.NotFoundError);
});

test('download what a program left', async () => {
  const message = await ask('Plot this and save it as a chart');
  const [id] = results(message).flatMap((result) => result.content.map((output) => output.file_id));
  const metadata = await client.files.retrieveMetadata(id);
  assert.deepEqual([metadata.filename, metadata.mime_type, metadata.downloadable], ['chart.png', 'image/png', true]);
  const content = Buffer.from(await (await client.files.download(id)).arrayBuffer());
  assert.equal(content.toString('latin1'), '\x89PNG chart');
});

test('lists of files', async () => {
  const made: string[] = [];
  for (const name of ['1.txt', '2.txt', '3.txt']) {
    made.push((await client.files.upload({ file: await toFile(Buffer.from('x'), name) })).id);
  }
  const listed: string[] = [];
  for await (const file of client.files.list({ limit: 2 })) {
    listed.push(file.id);
  }
  const beta: string[] = [];
  for await (const file of client.beta.files.list({ limit: 2 })) {
    beta.push(file.id);
  }
  assert.deepEqual(beta, listed);
  assert.equal(new Set(listed).size, listed.length);
  assert.ok(made.every((id) => listed.includes(id)));
  await Promise.all(made.map((id) => client.files.delete(id)));
});

test('a container is used again', async () => {
  const first = await ask('Write a file with a random number to /tmp/number.txt');
  const second = await ask('Read the number from /tmp/number.txt and calculate its square', { container: first.container!.id });
  assert.equal(results(second)[0].stdout, 'square 22193521\n');
  assert.equal(second.container!.id, first.container!.id);
  await assert.rejects(ask('Read the number', { container: 'container_that_is_not' }), Anthropic.NotFoundError);
});

test('a paused turn goes on', async () => {
  const messages = [user('Loop')];
  let message = await client.messages.create({ model, max_tokens: 4096, messages, tools });
  assert.equal(message.stop_reason, 'pause_turn');
  let calls = results(message).length;
  while (message.stop_reason === 'pause_turn') {
    messages.push({ role: 'assistant', content: message.content });
    message = await client.messages.create({ model, max_tokens: 4096, messages, tools, container: message.container!.id });
    calls += results(message).length;
  }
  assert.equal(message.stop_reason, 'end_turn');
  assert.ok(calls > 10);
});

test('tool runner', async () => {
  const runner = client.beta.messages.toolRunner({
    model,
    max_tokens: 1024,
    messages: [{ role: 'user', content: 'Forecast' }],
    tools: [
      {
        name: 'get_weather',
        input_schema: { type: 'object', properties: { location: { type: 'string' } } },
        parse: (input) => input as { location: string },
        run: ({ location }: { location: string }) => 'sunny in ' + location,
      },
    ],
  });
  const [block] = (await runner.runUntilDone()).content; // without a conversation that the server stores
  assert.ok(block.type === 'text' && block.text.includes('sunny in Paris'));
});

test('batches', async () => {
  const { batches } = client.messages;
  const item = (custom_id: string, text: string): Anthropic.Messages.BatchCreateParams.Request => ({
    custom_id, params: { model, max_tokens: 4096, messages: [user(text)], tools },
  });
  const ended = async (batch: Anthropic.Messages.MessageBatch) => {
    while (batch.processing_status !== 'ended') {
      await setTimeout(100);
      batch = await batches.retrieve(batch.id);
    }
    assert.ok(Date.parse(batch.ended_at!) >= Date.parse(batch.created_at));
    const results = new Map<string, Anthropic.Messages.MessageBatchResult>();
    for await (const line of await batches.results(batch.id)) {
      results.set(line.custom_id, line.result);
    }
    return { counts: batch.request_counts, results };
  };

  const created = await batches.create({ requests: [item('mean', 'Calculate the mean and standard deviation'), item('broken', 'Break')] });
  const done = await ended(created);
  assert.deepEqual(done.counts, { processing: 0, succeeded: 1, errored: 1, canceled: 0, expired: 0 });
  const mean = done.results.get('mean'), broken = done.results.get('broken');
  assert.ok(mean?.type === 'succeeded' && results(mean.message)[0].stdout === '5.5 2.8723\n');
  assert.ok(broken?.type === 'errored' && broken.error.error.type === 'api_error' && broken.error.error.message);

  const slow = await batches.create({ requests: [item('slow', 'Sleep')] });
  await assert.rejects(batches.results(slow.id), (e) => e instanceof Anthropic.AnthropicError && e.message.includes('results_url'));
  await assert.rejects(batches.delete(slow.id), Anthropic.BadRequestError);
  assert.ok(Date.parse((await batches.cancel(slow.id)).cancel_initiated_at!) > 0);
  const canceled = await ended(slow);
  assert.equal(canceled.results.get('slow')?.type, 'canceled');
  assert.equal(canceled.counts.canceled, 1);

  const listed: string[] = [];
  for await (const batch of batches.list({ limit: 1 })) {
    listed.push(batch.id);
  }
  assert.deepEqual(listed, [slow.id, created.id]);
  for (const id of listed) {
    assert.deepEqual({ ...(await batches.delete(id)) }, { id, type: 'message_batch_deleted' });
  }
  await assert.rejects(batches.retrieve(created.id), Anthropic.NotFoundError);
});

test('models', async () => {
  const listed: string[] = [];
  for await (const one of client.models.list({ limit: 1 })) {
    listed.push(one.id);
  }
  assert.deepEqual(listed, ['small']);
  const one = await client.models.retrieve(model); // since * stands for all names
  assert.ok(one.type === 'model' && one.display_name === model && Date.parse(one.created_at) === 0);
});

test('errors are typed', async () => {
  await assert.rejects(new Anthropic({ apiKey: 'sk-ant-other' }).messages.create({ model, max_tokens: 1, messages: [user('Hi')] }), Anthropic.AuthenticationError);
  await assert.rejects(client.messages.create({ model, max_tokens: 1, messages: [] }), Anthropic.BadRequestError);
  await assert.rejects(
    ask('Limit'),
    (e) => e instanceof Anthropic.RateLimitError && e.type === 'rate_limit_error' && e.headers.get('retry-after') === '7' && !!e.requestID,
  );
  await assert.rejects(ask('Overload'), (e) => e instanceof Anthropic.APIError && e.status === 529 && e.type === 'overloaded_error');
});
