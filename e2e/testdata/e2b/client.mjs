// A day with E2B's TypeScript client, which is unmodified.
import assert from 'node:assert/strict'
import { CommandExitError, Sandbox, TimeoutError } from 'e2b'

const metadata = { 'run of': 'js & more' }
const sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata, envs: { UPPER: '1', lower: '2' } })
const { commands, files } = sandbox

const result = await commands.run('echo "$UPPER $lower"; pwd; id -un; echo error >&2')
assert.equal(result.stdout, '1 2\n/home/user\nuser\n')
assert.equal(result.stderr, 'error\n')
assert.equal((await commands.run('pwd; echo "$ONE"', { cwd: '/tmp', envs: { ONE: 'x' } })).stdout, '/tmp\nx\n')
assert.equal((await commands.run('id -u', { user: 'root' })).stdout, '0\n')
await assert.rejects(commands.run('exit 3'), CommandExitError)
await assert.rejects(commands.run('sleep 60', { timeoutMs: 1000 }), TimeoutError)

const background = await commands.run('cat; echo end', { background: true, stdin: true })
await commands.sendStdin(background.pid, 'in\n')
await commands.closeStdin(background.pid)
assert.equal((await background.wait()).stdout, 'in\nend\n')
const sleeper = await commands.run('sleep 600', { background: true })
assert.equal(await commands.kill(sleeper.pid), true)

await files.write('dir/a.txt', 'content')
assert.equal(await files.read('dir/a.txt'), 'content')
await files.write('bytes', new Uint8Array([0, 255]).buffer)
assert.deepEqual(Array.from(await files.read('bytes', { format: 'bytes' })), [0, 255])
assert.deepEqual((await files.list('dir')).map((e) => [e.name, e.owner]), [['a.txt', 'user']])
await files.rename('dir/a.txt', 'dir/b.txt')
assert.equal(await files.exists('dir/a.txt'), false)
assert.equal(await files.makeDir('new'), true)
assert.equal(await files.makeDir('new'), false)
await files.remove('dir/b.txt')
assert.equal(await files.exists('dir/b.txt'), false)

assert.equal(await sandbox.isRunning(), true)
const listed = await Sandbox.list({ query: { metadata, state: ['running'] } }).nextItems()
assert.deepEqual(listed.map((s) => s.sandboxId), [sandbox.sandboxId])
await sandbox.setTimeout(600_000)
assert.equal((await (await Sandbox.connect(sandbox.sandboxId)).commands.run('echo 1')).stdout, '1\n')

assert.equal(await sandbox.pause(), true)
assert.equal(await sandbox.pause(), false)
assert.equal(await sandbox.isRunning(), false)
await assert.rejects(commands.run('true'))
const again = await Sandbox.connect(sandbox.sandboxId)
assert.equal((await again.commands.run('ls')).stdout, 'bytes\ndir\nnew\n')
await assert.rejects(sandbox.pause({ keepMemory: true }), /snapshot_memory_unsupported/)
await assert.rejects(Sandbox.create('unknown'), /not found/)
assert.equal(await sandbox.kill(), true)
assert.equal(await sandbox.kill(), false)
