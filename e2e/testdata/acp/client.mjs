// A day with the client of the Sandbox Agent API 0.4, which is unmodified. At each step it prints a line, and
// waits for one while the test stops servers.
import assert from 'node:assert/strict'
import { createInterface } from 'node:readline'
import { AcpHttpClient } from 'acp-http-client'
import { InMemorySessionPersistDriver, SandboxAgent } from 'sandbox-agent'

const baseUrl = process.env.ACP_URL
const token = process.env.BULLPEN_API_KEY
const permission = 'List files in the current directory using available tools.'
const question = 'Use the AskUserQuestion tool to ask exactly one yes/no question, then wait for a reply. Do not answer yourself.'

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
async function step(name) {
  console.log(name)
  assert.equal((await lines.next()).done, false)
}

const text = (s) => [{ type: 'text', text: s }]

// watch returns what a session's agent has sent, and a promise of the next permission that it requests.
function watch(session) {
  const seen = { updates: [], said: '', asked: null, ask: null }
  const next = () => { seen.asked = new Promise((resolve) => { seen.ask = resolve }) }
  next()
  session.onEvent(({ sender, payload }) => {
    if (sender !== 'agent' || payload.method !== 'session/update') return
    const { update } = payload.params
    seen.updates.push(update)
    if (update.sessionUpdate === 'agent_message_chunk') seen.said += update.content.text
  })
  session.onPermissionRequest((request) => { seen.ask(request); next() })
  return seen
}

// until waits until a condition holds: the last messages may come after the answer of a prompt.
async function until(condition) {
  for (let i = 0; !condition(); i++) {
    assert.ok(i < 1000, `never: ${condition}: ${JSON.stringify(seen)}`)
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}

const sdk = await SandboxAgent.connect({ baseUrl, token })
const session = await sdk.createSession({ agent: 'mock', mode: 'plan', model: 'mock', cwd: '/work' })
const seen = watch(session)
assert.deepEqual(await session.prompt(text('hello')), { stopReason: 'end_turn' })
await until(() => seen.said === 'mock: hello')
assert.equal((await session.getModes()).currentModeId, 'plan')
await session.setMode('build')
await assert.rejects(session.setMode('wild'))
assert.equal((await session.getConfigOptions()).find((o) => o.id === 'model').currentValue, 'mock')

// A prompt that fails, and a session that does not exist, are errors of their promises alone.
await assert.rejects(session.prompt(text('/mock error')), /Mock error event/)
await assert.rejects(session.rawSend('_x/unknown', {}), /Method not supported/)
await assert.rejects(sdk.createSession({ agent: 'none' }), /unsupported agent: none/)

// Tools, permissions and questions.
assert.equal((await session.prompt(text('/mock tool'))).stopReason, 'end_turn')
await until(() => seen.updates.some((u) => u.sessionUpdate === 'tool_call_update' && u.status === 'failed'))
for (const reply of ['once', 'always', 'reject']) {
  const asked = seen.asked
  const answer = session.prompt(text(reply === 'reject' ? question : permission))
  const { id, availableReplies } = await asked
  assert.ok(availableReplies.includes(reply), availableReplies.join())
  await session.respondPermission(id, reply)
  assert.equal((await answer).stopReason, 'end_turn')
}
assert.equal((await session.prompt(text(permission))).stopReason, 'end_turn') // it was granted for the session

// The gateway leaves while a prompt waits for a permission.
const asked = seen.asked
const late = session.prompt(text(question))
const { id } = await asked
seen.said = ''
await step('asked')
await session.respondPermission(id, 'once')
assert.equal((await late).stopReason, 'end_turn')
assert.equal((await session.prompt(text('after a restart'))).stopReason, 'end_turn')
await until(() => seen.said === 'mock: after a restart')

// The gateway is killed while nothing is in progress. The client opens the stream again with the first request
// after it has noticed that.
await step('idle')
seen.said = ''
assert.equal((await session.prompt(text('after a crash'))).stopReason, 'end_turn')
for (let i = 0; seen.said !== 'mock: after a crash'; i++) {
  assert.ok(i < 100, seen.said)
  await session.setMode('build')
  await new Promise((resolve) => setTimeout(resolve, 100))
}

// The gateway is killed while a prompt is in progress. Repeating requests is the user's part, and safe.
async function retrying(input, init) {
  for (let i = 0; ; i++) {
    try {
      const response = await fetch(input, init)
      if (response.status < 500 || i === 100) return response
    } catch (error) {
      if (init?.method === 'GET' || init?.signal?.aborted || i === 100) throw error
    }
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}
const patient = await SandboxAgent.connect({ baseUrl, token, fetch: retrying })
const cut = await patient.createSession({ agent: 'mock' })
const cutSeen = watch(cut)
const cutAsked = cutSeen.asked
const cutAnswer = cut.prompt(text(question))
const { id: cutID } = await cutAsked
await step('in progress')
await cut.respondPermission(cutID, 'once')
assert.equal((await cutAnswer).stopReason, 'end_turn')
const requests = []
const all = await patient.getEvents({ sessionId: cut.id, limit: 100 })
for (const { payload } of all.items) if (payload.method === 'session/request_permission') requests.push(payload.id)
assert.equal(new Set(requests).size, requests.length, 'asked twice')

// destroySession ends the turn in progress: it withdraws the permission and cancels the turn, in any order.
const ended = cut.prompt(text(question))
await cutSeen.asked
await patient.destroySession(cut.id)
assert.match((await ended).stopReason, /^(cancelled|end_turn)$/)

// The same session on another connection.
const persist = new InMemorySessionPersistDriver()
const first = await SandboxAgent.connect({ baseUrl, token, persist })
const created = await first.createSession({ agent: 'mock' })
await created.prompt(text('first run'))
await first.dispose()
const second = await SandboxAgent.connect({ baseUrl, token, persist })
const restored = await second.resumeSession(created.id)
assert.notEqual(restored.lastConnectionId, created.lastConnectionId)
assert.equal((await restored.prompt(text('second run'))).stopReason, 'end_turn')
const events = await second.getEvents({ sessionId: restored.id, limit: 500 })
assert.ok(events.items.some(({ payload }) => payload.params?.prompt?.[0]?.text.includes('Previous session history is replayed')))
await second.dispose()

// Sessions outlive connections that were not closed.
const updates = []
const client = new AcpHttpClient({
  baseUrl, token, transport: { path: `/v1/acp/${encodeURIComponent('a server/é')}`, bootstrapQuery: { agent: 'mock' } },
  client: { sessionUpdate: async ({ update }) => { updates.push(update) } },
})
assert.equal((await client.initialize()).protocolVersion, 1)
await client.loadSession({ sessionId: session.agentSessionId, cwd: '/', mcpServers: [] })
await until(() => updates.some((u) => u.sessionUpdate === 'user_message_chunk' && u.content.text.includes('after a crash')))
assert.ok((await client.listSessions({})).sessions.length >= 2)
await client.disconnect()

// Configurations, agents and servers.
const directory = '/work'
await sdk.setMcpConfig({ directory, mcpName: 'a' }, { type: 'local', command: 'node', args: ['server.js'] })
assert.deepEqual(await sdk.getMcpConfig({ directory, mcpName: 'a' }), { type: 'local', command: 'node', args: ['server.js'] })
await sdk.deleteMcpConfig({ directory, mcpName: 'a' })
await assert.rejects(sdk.getMcpConfig({ directory, mcpName: 'a' }))
await sdk.setSkillsConfig({ directory, skillName: 'a' }, { sources: [{ type: 'github', source: 'a/b' }] })
assert.equal((await sdk.getSkillsConfig({ directory, skillName: 'a' })).sources.length, 1)
await sdk.deleteSkillsConfig({ directory, skillName: 'a' })
assert.equal((await sdk.getHealth()).status, 'ok')
assert.ok((await sdk.listAgents()).agents.some((a) => a.id === 'mock' && a.installed))
await assert.rejects(sdk.getDesktopStatus())
const servers = () => sdk.listAcpServers().then((list) => list.servers.filter((s) => s.agent === 'mock').length)
assert.equal(await servers(), 2)
await patient.dispose()
assert.equal(await servers(), 1)
await sdk.dispose()
console.log('done')
process.exit(0)
