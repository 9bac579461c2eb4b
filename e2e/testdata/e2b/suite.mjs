// The most important tests of E2B's TypeScript SDK, packages/js-sdk/tests of e2b-dev/E2B, as a table of short
// cases of our own, with their names. suite.py has the whole table.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { request } from 'node:http'
import { CommandExitError, InvalidArgumentError, NotFoundError, Sandbox, TimeoutError } from 'e2b'

// passes are E2B's tests that pass. The third element is the options of a sandbox for the case alone.
const passes = [
  ['commands/run.test.ts: run', async ({ commands }) => {
    const { exitCode, stdout, stderr } = await commands.run('echo "one, two!"')
    assert.deepEqual({ exitCode, stdout, stderr }, { exitCode: 0, stdout: 'one, two!\n', stderr: '' })
  }],
  ['commands/run.test.ts: run with special characters', async ({ commands }) => {
    assert.equal((await commands.run("echo '!@#$%^&*()_+ é 漢 🙂'")).stdout, '!@#$%^&*()_+ é 漢 🙂\n')
  }],
  ['commands/run.test.ts: run with too short timeout', async ({ commands }) => {
    await assert.rejects(commands.run('sleep 60', { timeoutMs: 1000 }), TimeoutError)
  }],
  ['commands/connect.test.ts: connect to process', async ({ commands }) => {
    const { pid } = await commands.run('read line; echo $line', { background: true, stdin: true })
    const again = await commands.connect(pid)
    await commands.sendStdin(pid, 'here\n')
    assert.equal((await again.wait()).stdout, 'here\n')
  }],
  ['commands/connect.test.ts: connect to non-existing process', async ({ commands }) => {
    await assert.rejects(commands.connect(999999), NotFoundError)
  }],
  ['commands/envVars.test.ts: sandbox global env vars', async ({ commands }) => {
    assert.equal((await commands.run('echo $ONE')).stdout, 'a\n')
  }, { envs: { ONE: 'a' } }],
  ['commands/kill.test.ts: kill process', async ({ commands }) => {
    const { pid } = await commands.run('sleep 600', { background: true })
    assert.equal(await commands.kill(pid), true)
    await assert.rejects(commands.run(`kill -0 ${pid}`), CommandExitError)
  }],
  ['commands/kill.test.ts: kill non-existing process', async ({ commands }) => {
    assert.equal(await commands.kill(999999), false)
  }],
  ['commands/list.test.ts: list processes', async ({ commands }) => {
    const { pid } = await commands.run('sleep 600', { background: true })
    const found = (await commands.list()).filter((p) => p.pid === pid)
    assert.deepEqual(found.map((p) => p.args), [['-l', '-c', 'sleep 600']])
    await commands.kill(pid)
  }],
  ['commands/sandboxKilledDuringRun.test.ts: killing the sandbox while a command is running throws an actionable error',
    async (box) => {
      const command = await box.commands.run('sleep 600', { background: true })
      await box.kill()
      await assert.rejects(command.wait(), TimeoutError)
    }, {}],
  ['commands/sendStdin.test.ts: close stdin via command handle', async ({ commands }) => {
    const command = await commands.run('cat', { background: true, stdin: true })
    await command.sendStdin('é\n漢')
    await command.closeStdin()
    assert.equal((await command.wait()).stdout, 'é\n漢')
  }],
  ['files/contentEncoding.test.ts: write and read file with gzip content encoding', async ({ files }) => {
    await files.write('gzip', 'a'.repeat(9999), { gzip: true })
    assert.equal(await files.read('gzip', { gzip: true }), 'a'.repeat(9999))
  }],
  ['files/info.test.ts: get info of a symlink', async ({ commands, files }) => {
    await files.write('links/target', '1')
    await commands.run('ln -s target links/link')
    assert.equal((await files.getInfo('links/link')).symlinkTarget, '/home/user/links/target')
  }],
  ['files/list.test.ts: list directory', async ({ files }) => {
    await files.write('list/a/b', '1')
    const paths = async (depth) => (await files.list('list', { depth })).map((entry) => entry.path)
    assert.deepEqual(await paths(1), ['/home/user/list/a'])
    assert.deepEqual(await paths(2), ['/home/user/list/a', '/home/user/list/a/b'])
    await assert.rejects(files.list('list', { depth: -1 }), InvalidArgumentError)
  }],
  ['files/list.test.ts: file entry details', async ({ files }) => {
    await files.write('details/a', '12345')
    const [{ name, type, mode, permissions, owner, group, size, modifiedTime }] = await files.list('details')
    assert.deepEqual({ name, type, mode, permissions, owner, group, size },
      { name: 'a', type: 'file', mode: 0o644, permissions: '-rw-r--r--', owner: 'user', group: 'user', size: 5 })
    assert.ok(modifiedTime instanceof Date)
  }],
  ['files/makeDir.test.ts: make existing directory', async ({ files }) => {
    assert.deepEqual([await files.makeDir('twice/deeper'), await files.makeDir('twice/deeper')], [true, false])
  }],
  ['files/metadata.test.ts: write file with metadata', async ({ files }) => {
    const metadata = { author: 'me' }
    assert.deepEqual((await files.write('metadata', '1', { metadata })).metadata, metadata)
    assert.deepEqual((await files.getInfo('metadata')).metadata, metadata)
  }],
  ['files/read.test.ts: read empty file in all formats', async ({ files }) => {
    await files.write('empty', '')
    assert.equal(await files.read('empty'), '')
    assert.equal((await files.read('empty', { format: 'bytes' })).length, 0)
    assert.equal((await files.read('empty', { format: 'blob' })).size, 0)
    assert.equal(await text(await files.read('empty', { format: 'stream' })), '')
  }],
  ['files/read.test.ts: read file as stream', async ({ files }) => {
    const long = '0123456789 and more. '.repeat(100_000)
    await files.write('long', long)
    assert.ok((await text(await files.read('long', { format: 'stream' }))) === long)
  }],
  ['files/read.test.ts: read non-existing file', async ({ files }) => {
    await assert.rejects(files.read('missing'), NotFoundError)
  }],
  ['files/remove.test.ts: remove file', async ({ files }) => {
    await files.write('removed', '1')
    await files.remove('removed')
    assert.equal(await files.exists('removed'), false)
  }],
  ['files/rename.test.ts: rename file', async ({ files }) => {
    await files.write('old', '1')
    assert.equal((await files.rename('old', 'new/a')).path, '/home/user/new/a')
    await assert.rejects(files.rename('old', 'other'), NotFoundError)
  }],
  ['files/signing.test.ts: test access file with valid signing', async (box) => {
    await box.files.write('signed a', 'content')
    const url = new URL(await box.downloadUrl('signed a', { user: 'user', useSignatureExpiration: 120_000 }))
    assert.deepEqual(await fetchPort(box, 49983, url.pathname + url.search), { status: 200, body: 'content' })
  }],
  ['files/signing.test.ts: test access file with expired signing', async (box) => {
    const url = new URL(await box.downloadUrl('signed b', { user: 'user', useSignatureExpiration: -120_000 }))
    const { status, body } = await fetchPort(box, 49983, url.pathname + url.search)
    assert.deepEqual([status, JSON.parse(body)], [401, { code: 401, message: 'signature is already expired' }])
  }],
  ['files/write.test.ts: writeFiles with different data types', async ({ files }) => {
    const bytes = new Uint8Array([98])
    const data = ['a', bytes.buffer, new Blob(['c']), new Blob(['d']).stream()]
    await files.writeFiles(data.map((content, i) => ({ path: `types/${i}`, data: content })))
    assert.deepEqual(await Promise.all(data.map((_, i) => files.read(`types/${i}`))), ['a', 'b', 'c', 'd'])
  }],
  ['files/write.test.ts: write ReadableStream with octet stream upload', async ({ files }) => {
    await files.write('octet', new Blob(['é'.repeat(100_000)]).stream(), { useOctetStream: true })
    assert.ok((await files.read('octet')) === 'é'.repeat(100_000))
  }],
  ['pty/ptyCreate.test.ts: create PTY', async ({ pty }) => {
    let seen = ''
    const onData = (data) => { seen += new TextDecoder().decode(data) }
    const terminal = await pty.create({ cols: 80, rows: 24, onData, envs: { ONE: 'a' }, cwd: '/tmp' })
    await pty.resize(terminal.pid, { cols: 100, rows: 30 })
    await pty.sendInput(terminal.pid, new TextEncoder().encode('echo in $ONE $PWD; stty size; exit\n'))
    assert.equal((await terminal.wait()).exitCode, 0)
    assert.match(seen, /in a \/tmp\r?\n30 100/)
  }],
  ['pty/kill.test.ts: kill PTY', async ({ pty, commands }) => {
    const { pid } = await pty.create({ cols: 80, rows: 24, onData() {} })
    assert.deepEqual([await pty.kill(pid), await pty.kill(999999)], [true, false])
    await assert.rejects(commands.run(`kill -0 ${pid}`), CommandExitError)
  }],
  ['api/kill.test.ts: kill existing sandbox', async (box) => {
    assert.deepEqual([await Sandbox.kill(box.sandboxId), await Sandbox.kill(box.sandboxId)], [true, false])
  }, {}],
  ['api/list.test.ts: paginate running and paused sandboxes', async (box, metadata) => {
    const other = await Sandbox.create({ metadata })
    await box.pause()
    const pages = Sandbox.list({ query: { metadata, state: ['running', 'paused'] }, limit: 1 })
    const found = []
    while (pages.hasNext) {
      found.push((await pages.nextItems()).map(({ sandboxId, state }) => [sandboxId, state]))
    }
    await other.kill()
    assert.deepEqual(found, [[[other.sandboxId, 'running']], [[box.sandboxId, 'paused']]])
  }, {}],
  ['sandbox/connect.test.ts: connect resumes paused sandbox', async (box) => {
    await box.files.write('kept', '1')
    await box.pause()
    assert.equal(await box.isRunning(), false)
    assert.equal(await (await Sandbox.connect(box.sandboxId)).files.read('kept'), '1')
  }, {}],
  ['sandbox/connect.test.ts: connect does not shorten timeout on running sandbox', async (box) => {
    const { endAt } = await box.getInfo()
    await Sandbox.connect(box.sandboxId, { timeoutMs: 10_000 })
    assert.deepEqual((await box.getInfo()).endAt, endAt)
  }, { timeoutMs: 300_000 }],
  ['sandbox/metrics.test.ts: sbx metrics', async (box) => {
    const [{ cpuCount, memUsed, memTotal, diskTotal }] = await box.getMetrics()
    assert.ok(cpuCount > 0 && memUsed > 0 && memTotal > memUsed && diskTotal > 0)
  }],
]

// differs are E2B's tests that cannot pass: what contains the signal, and what raises or returns it.
const differs = [
  ['files/watch.test.ts: watch directory changes', 'cannot watch directories: list them instead',
    ({ files }) => files.watchDir('/home/user', () => {})],
  ['sandbox/fork.test.ts: fork a sandbox', '501: forks of sandboxes are not implemented', (box) => box.fork()],
  ['sandbox/snapshot-api.test.ts: create a snapshot from sandbox', '501: snapshots of sandboxes are not implemented',
    (box) => box.createSnapshot()],
  ['sandbox/lifecyclePayload.test.ts: auto-resume wakes paused sandbox on http request',
    '400: autoResume.enabled must be false',
    () => Sandbox.create({ lifecycle: { onTimeout: 'pause', autoResume: true } })],
  ['sandbox/network.test.ts: deny specific IP address', '400: network.denyOut is not supported',
    () => Sandbox.create({ network: { denyOut: ['8.8.8.8'] } })],
  ['sandbox/network.test.ts: denies a previously reachable IP after update', "501: changes of a sandbox's network",
    (box) => box.updateNetwork({ denyOut: ['8.8.8.8'] })],
]

const text = (stream) => new Response(stream).text()

// fetchPort requests a page of a port of the sandbox, as with its wildcard domain: the server is the one under test.
function fetchPort(box, port, path) {
  return new Promise((resolve, reject) => {
    request(process.env.E2B_SANDBOX_URL + path, { headers: { Host: box.getHost(port) } }, async (answer) => {
      resolve({ status: answer.statusCode, body: (await answer.toArray()).join('') })
    }).on('error', reject).end()
  })
}

const shared = await Sandbox.create({ timeoutMs: 300_000 })
// run calls a case with a sandbox, and returns what went wrong.
async function run(test, own, signal) {
  const metadata = { case: randomUUID() }
  const box = own ? await Sandbox.create({ timeoutMs: 300_000, metadata, ...own }) : shared
  let seen = ''
  try {
    seen = String(await test(box, metadata))
  } catch (error) {
    if (signal === undefined) {
      return error.stack
    }
    seen = `${error.name}: ${error.message}`
  } finally {
    if (own) {
      await box.kill()
    }
  }
  return signal === undefined || seen.includes(signal) ? '' : `the signal was ${seen}, want ${signal}`
}

const results = []
for (const [name, test, own] of passes) {
  results.push([name, await run(test, own)])
}
for (const [name, signal, test, own] of differs) {
  results.push([name, await run(test, own, signal)])
}
await shared.kill()
const failed = results.filter(([, wrong]) => wrong)
for (const [name, wrong] of failed) {
  console.error(`${name}: ${wrong}`)
}
console.log(`${passes.length} tests pass and ${differs.length} differ as listed, but for ${failed.length}`)
process.exitCode = failed.length && 1
