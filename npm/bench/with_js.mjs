// The JavaScript side of run.mjs, a worker as bindings/napi/examples/without_js.rs is: each line of standard input names a measurement and its
// rounds; each line of standard output is, as JSON, the times in microseconds and what this thread was on a processor by call, if known.
import { readFileSync } from 'node:fs'
import { performance } from 'node:perf_hooks'
import { createInterface } from 'node:readline'

import { held, openFakeEngine, script } from 'hob/testing'

const engine = await openFakeEngine(
  [{ name: 'embedder', kind: 'embedder', bytes: 1 }, { name: 'long', kind: 'chat', bytes: 1, reply: 'x'.repeat(3000) }],
  { budgetBytes: 1000 },
)
const since = (began) => (performance.now() - began) * 1000
const rest = () => new Promise((resolve) => setTimeout(resolve, 1))

// The floor: a thread of another addon is woken, and wakes the loop.
const floor = { exports: {} }
process.dlopen(floor, process.argv[2])
let answered
const echo = new floor.exports.Echo(() => answered())
const ask = () => new Promise((resolve) => {
  answered = resolve
  echo.ask()
})

const measurements = {
  async echo(rounds) {
    const times = []
    for (let round = 0; round < rounds; round++) {
      const began = performance.now()
      await ask()
      times.push(since(began))
    }
    return { times, calls: rounds }
  },

  async 'echo-alone'(rounds) {
    const times = []
    for (let round = 0; round < rounds; round++) {
      const began = performance.now()
      await ask()
      times.push(since(began))
      await rest()
    }
    return { times }
  },

  async embed(rounds) {
    const times = []
    for (let round = 0; round < rounds; round++) {
      const began = performance.now()
      await engine.embed({ model: 'embedder', texts: ['a'] })
      times.push(since(began))
    }
    return { times, calls: rounds }
  },

  async paced(rounds) {
    script(engine, 'hold', 'step')
    const stream = engine.generate({ model: 'long', prompt: 'x' })
    // The first token comes with the prompt.
    await stream.next()
    await held(engine, 'step')
    const times = []
    for (let round = 0; round < rounds; round++) {
      // Somebody waits for it already: it comes by a wake of the event loop.
      const next = stream.next()
      const began = performance.now()
      script(engine, 'pass', 'step')
      await next
      times.push(since(began))
      await held(engine, 'step')
      await rest()
    }
    stream.cancel()
    script(engine, 'release', 'step')
    await stream.return()
    return { times }
  },

  async burst(rounds) {
    const times = []
    let calls = 0
    for (let round = 0; round < rounds; round++) {
      const began = performance.now()
      let tokens = 0
      for await (const event of engine.generate({ model: 'long', prompt: 'x' })) if (event.type === 'chunk') tokens += event.tokenIds.length
      times.push(since(began) / tokens)
      calls += tokens
    }
    return { times, calls }
  },
}

for await (const line of createInterface({ input: process.stdin })) {
  const [what, rounds] = line.split(' ')
  const before = spent()
  const { times, calls } = await measurements[what](Number(rounds))
  // Where there are rests between the calls they would count.
  const busy = before === undefined || calls === undefined ? undefined : (spent() - before) / calls
  console.log(JSON.stringify({ times, busy }))
}
await engine.close()

/** Microseconds that the main thread has been on a processor. */
function spent() {
  try {
    return Number(readFileSync('/proc/self/schedstat', 'utf8').split(' ')[0]) / 1000
  } catch {
    return undefined
  }
}
