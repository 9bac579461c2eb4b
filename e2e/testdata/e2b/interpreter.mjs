// The most important tests of E2B's code interpreter in TypeScript, js/tests of e2b-dev/code-interpreter, as a table of short
// cases of our own, with their names. interpreter.py has the whole table.
import assert from 'node:assert/strict'
import { Sandbox } from '@e2b/code-interpreter'
import { NotFoundError, TimeoutError } from 'e2b'

// draws is code that shows a line.
const draws = `
import matplotlib.pyplot as plt
plt.close('all')
plt.plot([1, 2, 3], [1, 10, 100], label='p')
plt.yscale('log')
plt.xlabel('Time (s)')
plt.show()
`

// passes are E2B's tests that pass. The third element is the options of a sandbox for the case alone.
const passes = [
  ['bash.test.ts: bash', async (box) => {
    assert.equal((await box.runCode('!pwd')).logs.stdout.join('').trim(), '/home/user')
  }],
  ['basic.test.ts: basic', async (box) => {
    assert.equal((await box.runCode('n = 6; n * 7')).text, '42')
  }],
  ['callbacks.test.ts: callbacks', async (box) => {
    const results = []
    const errors = []
    const lines = []
    const code = "import sys; print('é漢🙂'); print('error', file=sys.stderr)\ndisplay(42)\nnowhere"
    const execution = await box.runCode(code, {
      onResult: (result) => results.push([result.text, result.isMainResult]), onError: (error) => errors.push(error.name),
      onStdout: ({ line }) => lines.push(line), onStderr: ({ line }) => lines.push(line),
    })
    assert.deepEqual([results, errors, lines], [[['42', false]], ['NameError'], ['é漢🙂\n', 'error\n']])
    assert.equal(execution.error.name, 'NameError')
  }],
  ['contexts.test.ts: create, list, restart and remove contexts', async (box) => {
    const context = await box.createCodeContext({ language: 'python', cwd: '/tmp' })
    assert.deepEqual((await box.listCodeContexts()).at(-1), context)
    assert.equal(context.cwd, '/tmp')
    await box.runCode('n = 1', { context })
    assert.equal((await box.runCode('n', { context })).text, '1')
    await box.restartCodeContext(context)
    assert.equal((await box.runCode('n', { context })).error.name, 'NameError')
    await box.removeCodeContext(context)
    const all = await box.listCodeContexts()
    assert.ok(!all.some(({ id }) => id === context.id))
    assert.deepEqual(all.slice(0, 2).map(({ language }) => language), ['python', 'javascript'])
    await assert.rejects(box.runCode('1', { context }), NotFoundError)
  }],
  ['cwd.test.ts: cwd javascript', async (box) => {
    assert.equal((await box.runCode('process.cwd()', { language: 'js' })).text, '/home/user')
  }],
  ['data.test.ts: get data', async (box) => {
    const { results } = await box.runCode("import pandas\npandas.DataFrame({'n': [1, 2, 3]})")
    assert.deepEqual(results[0].data, { n: [1, 2, 3] })
  }],
  ['defaultKernels.test.ts: test esm imports', async (box) => {
    const { logs } = await box.runCode("import { sep } from 'path'\nconsole.log(sep)", { language: 'js' })
    assert.deepEqual(logs.stdout, ['/\n'])
  }],
  ['defaultKernels.test.ts: test top-level await and promise resolution', async (box) => {
    assert.equal((await box.runCode("await Promise.resolve('later')", { language: 'js' })).text, 'later')
  }],
  ['charts/log.test.ts: log', async (box) => {
    const { results: [{ png, text, chart, extra }] } = await box.runCode(draws)
    assert.ok(png && text)
    assert.deepEqual(extra, {})
    assert.deepEqual([chart.type, chart.x_unit, chart.x_scale, chart.y_scale], ['line', 's', 'linear', 'log'])
    assert.deepEqual(chart.elements, [{ label: 'p', points: [[1, 1], [2, 10], [3, 100]] }])
  }],
  ['env_vars: on the sandbox, per execution, and both', async (box) => {
    for (const [language, code] of [['python', 'import os; print(os.getenv("NAME"))'],
      ['js', 'console.log(process.env.NAME)'], ['bash', 'echo $NAME']]) {
      const printed = async (envs) => (await box.runCode(code, { language, envs })).logs.stdout.join('')
      assert.deepEqual([await printed({ NAME: 'inner' }), await printed()], ['inner\n', 'outer\n'])
    }
  }, { envs: { NAME: 'outer' } }],
  ['executionCount.test.ts: execution count', async (box) => {
    await box.runCode('1')
    assert.equal((await box.runCode('!true')).executionCount, 2)
  }, {}],
  ['interrupt.test.ts: subsequent execution works after client timeout', async (box) => {
    await box.runCode('kept = 7')
    await assert.rejects(box.runCode('import time; time.sleep(600)', { timeoutMs: 2000 }), TimeoutError)
    assert.equal((await box.runCode('kept')).text, '7')
  }],
  ['killedSandbox.test.ts: runCode throws a descriptive error when the sandbox is killed during execution', async (box) => {
    let running
    await new Promise((resolve) => {
      running = box.runCode("print('begun', flush=True); import time; time.sleep(600)",
        { onStdout: resolve, timeoutMs: 600_000 })
      running.catch(() => {}) // awaited below
    })
    await box.kill()
    await assert.rejects(running, /sandbox was killed while the request was in progress/)
  }, {}],
  ['statefulness.test.ts: statefulness', async (box) => {
    await box.runCode('total = 41')
    assert.equal((await box.runCode('total += 1; total')).text, '42')
  }],
  ['streaming.test.ts: streaming result', async (box) => {
    const seen = []
    await box.runCode(draws + '7', { onResult: (result) => seen.push(result.isMainResult) })
    assert.deepEqual(seen, [false, true])
  }],
]

// differs are tests that cannot pass, with the signal that a program sees instead.
const differs = [
  ['env_vars/r.test.ts', '400 Bad Request', (box) => box.runCode('1', { language: 'r' })],
  ['env_vars/java.test.ts', '400 Bad Request', (box) => box.runCode('1', { language: 'java' })],
  ['images/bar.test.ts: get image on save', '0 results', async (box) => {
    const { results } = await box.runCode("from PIL import Image\nImage.new('RGB', (9, 9)).save('saved.png')")
    return `${results.length} results`
  }],
]

const create = (options) => Sandbox.create({ timeoutMs: 300_000, ...options })
const shared = await create()
const failed = []
for (const [name, test, own, signal] of [...passes, ...differs.map(([name, signal, test]) => [name, test, null, signal])]) {
  const box = own ? await create(own) : shared
  try {
    const seen = await Promise.resolve(test(box)).catch((error) => {
      if (signal === undefined) {
        throw error
      }
      return error.message
    })
    assert.ok(signal === undefined || String(seen).includes(signal), `the signal was ${seen}, want ${signal}`)
  } catch (error) {
    failed.push(`${name}: ${error.stack}`)
  }
  if (own) {
    await box.kill()
  }
}
await shared.kill()
console.error(failed.join('\n'))
console.log(`${passes.length} tests pass and ${differs.length} differ as listed, but for ${failed.length}`)
process.exitCode = failed.length && 1
