// The client of the Sandbox Agent API 0.4, unmodified, with a coding agent: a tool with a permission, a refusal, and a turn
// after the agent's worker was lost. It prints a line before that, and waits for one.
import assert from 'node:assert/strict'
import { createInterface } from 'node:readline'
import { SandboxAgent } from 'sandbox-agent'

const agent = process.env.AGENT
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
const run = (command) => [{ type: 'text', text: `run: ${command} :end` }]

const sdk = await SandboxAgent.connect({ baseUrl: process.env.ACP_URL, token: process.env.BULLPEN_API_KEY })
const session = await sdk.createSession({ agent, cwd: '/home/user' })
let said = ''
let asked = 0
let reply = 'once'
session.onEvent(({ sender, payload }) => {
  const update = sender === 'agent' && payload.method === 'session/update' ? payload.params.update : {}
  if (update.sessionUpdate === 'agent_message_chunk') said += update.content.text
})
session.onPermissionRequest(({ id }) => {
  asked++
  session.respondPermission(id, reply)
})

// until waits until a condition holds: the last messages may come after the answer of a prompt.
async function until(condition) {
  for (let i = 0; !condition(); i++) {
    assert.ok(i < 1000, `never: ${condition}: ${said}`)
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}

assert.equal((await session.prompt(run('echo needle-4711 > made.txt; echo found: $(cat made.txt)'))).stopReason, 'end_turn')
await until(() => said.includes('I see: needle-4711'))
assert.equal(asked, 1)

reply = 'reject'
await session.prompt(run('echo needle-2 > refused.txt'))
assert.equal(asked, 2)

console.log('lose the worker')
assert.equal((await lines.next()).done, false)
said = ''
reply = 'once'
assert.equal((await session.prompt(run('echo found: $(cat made.txt) $(ls)'))).stopReason, 'end_turn')
await until(() => said.includes('I see: needle-4711'))
assert.ok(!said.includes('refused.txt'), said)
// The client only forgets a session that it destroys. Deleting it ends its agent.
await sdk.destroySession(session.id)
const sessions = `${process.env.ACP_URL}/v1/sessions`
const headers = { authorization: `Bearer ${process.env.BULLPEN_API_KEY}` }
for (const { sessionId } of (await (await fetch(sessions, { headers })).json()).sessions) {
  assert.equal((await fetch(`${sessions}/${sessionId}`, { method: 'DELETE', headers })).status, 204)
}
console.log('done')
process.exit(0)
