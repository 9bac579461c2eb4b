// The client of the Sandbox Agent API 0.4, unmodified, starts the server that SANDBOX_AGENT_BIN names, and stops it.
import assert from 'node:assert/strict'
import { SandboxAgent } from 'sandbox-agent'
import { local } from 'sandbox-agent/local'

const client = await SandboxAgent.start({ sandbox: local({ log: 'inherit' }) })
const { agents } = await client.listAgents()
assert.ok(agents.some(({ id, installed }) => id === 'mock' && installed))
const session = await client.createSession({ agent: 'mock' })
let said = ''
session.onEvent(({ payload }) => {
  const update = payload.params?.update
  if (update?.sessionUpdate === 'agent_message_chunk') said += update.content.text
})
for (const message of ['hello', 'again']) {
  const answer = await session.prompt([{ type: 'text', text: message }])
  assert.equal(answer.stopReason, 'end_turn')
}
for (let i = 0; said !== 'mock: hellomock: again'; i++) { // the last events may come after the answer
  assert.ok(i < 1000, said)
  await new Promise((resolve) => setTimeout(resolve, 10))
}
await client.destroySandbox()
console.log('done')
