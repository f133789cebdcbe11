// What the binding costs, on the scripted device, so that no model's time is in it:  cargo xtask npm bench
//
// "Over Rust" is the same call on the same scripted device through the Rust API (bindings/napi/examples/without_js.rs), in the same run:
// the two sides take turns in blocks, and what is printed is the difference of their medians.
//
// - embed: one short text, from the call to its vector. The device has nothing else to do.
// - token, each alone: from the moment the device may make a token until the reader has it, a millisecond after the one before: so
//   every thread has gone to sleep, and every token wakes the event loop, as with a real model.
// - token, in a burst: an answer's time by its tokens, the device being as fast as it can.
// - busy: processor time of JavaScript's thread (Linux only).
// - import: a fresh process's `import 'hob'`, and then the addon's first use.

//
// Found on a two-core virtual machine (AMD EPYC, 2.4 GHz; 2026-12-01, two runs beside other work), release:
//   embed                271 and 291 JS, 197 and 215 Rust: 74 and 76 over (goal 30). A profile says 36 of them are this thread's:
//                        22 to read the arguments and start, 9 to make the result. Before the core carried requests on the
//                        engine's thread, with less beside it: 24, 35, 34 over in three runs
//   token, each alone    83 JS, 30 Rust: 53 over (goal 10): the wake of a sleeping event loop, and code that runs cold; in a burst
//                        the same code takes 3 microseconds
//   token, in a burst    3.4 JS, 3.5 to 4.1 Rust: none over
//   import               25 ms, with the addon 32
import { execFileSync, spawn } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { performance } from 'node:perf_hooks'
import { createInterface } from 'node:readline'

import { held, openFakeEngine, script } from 'hob/testing'

const [worker, addon] = process.argv.slice(2)
const BLOCKS = 10

const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1]
const column = (value) => (value === undefined ? '' : value.toFixed(1)).padStart(9)

const engine = await openFakeEngine(
  [{ name: 'embedder', kind: 'embedder', bytes: 1 }, { name: 'long', kind: 'chat', bytes: 1, reply: 'x'.repeat(3000) }],
  { budgetBytes: 1000 },
)
// While Rust has its turn this thread sleeps, and the other way round.
const process_of_rust = spawn(worker, { stdio: ['pipe', 'pipe', 'inherit'] })
const lines = createInterface({ input: process_of_rust.stdout })[Symbol.asyncIterator]()
const rust = async (what, rounds) => {
  process_of_rust.stdin.write(`${what} ${rounds}\n`)
  return JSON.parse((await lines.next()).value)
}

const { bun } = process.versions
console.log(`${bun === undefined ? `Node ${process.version}` : `Bun ${bun}`}, microseconds, medians`)
console.log(`${''.padEnd(26)}${['JS', 'Rust', 'over', 'busy', 'goal'].map((name) => name.padStart(9)).join('')}`)

// The floor: a thread of another addon is woken, and wakes the loop.
const floor = { exports: {} }
process.dlopen(floor, addon)
let answered
const echo = new floor.exports.Echo(() => answered())
const ask = () => new Promise((resolve) => {
  answered = resolve
  echo.ask()
})
const echoes = (apart) => async (rounds) => {
  const times = []
  for (let round = 0; round < rounds; round++) {
    const began = performance.now()
    await ask()
    times.push((performance.now() - began) * 1000)
    if (apart) await new Promise((resolve) => setTimeout(resolve, 1))
  }
  return { times, calls: apart ? undefined : rounds }
}
await compare('floor: a thread and back', 'echo', 500, undefined, echoes(false))

await compare('embed, one short text', 'embed', 500, 30, async (rounds) => {
  const times = []
  for (let round = 0; round < rounds; round++) {
    const began = performance.now()
    await engine.embed({ model: 'embedder', texts: ['a'] })
    times.push((performance.now() - began) * 1000)
  }
  return { times, calls: rounds }
})

await compare('floor, each alone', 'echo-alone', 100, undefined, echoes(true))

await compare('streamed token, each alone', 'paced', 100, 10, async (rounds) => {
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
    times.push((performance.now() - began) * 1000)
    await held(engine, 'step')
    await new Promise((resolve) => setTimeout(resolve, 1))
  }
  stream.cancel()
  script(engine, 'release', 'step')
  await stream.return()
  // Busy would include the rest between them.
  return { times }
})

await compare('streamed token, in a burst', 'burst', 3, 10, async (rounds) => {
  const times = []
  let calls = 0
  for (let round = 0; round < rounds; round++) {
    const began = performance.now()
    let tokens = 0
    for await (const event of engine.generate({ model: 'long', prompt: 'x' })) if (event.type === 'chunk') tokens += event.tokenIds.length
    times.push(((performance.now() - began) * 1000) / tokens)
    calls += tokens
  }
  return { times, calls }
})

process_of_rust.stdin.end()
await engine.close()

const source = `const t = performance.now(); const { Engine, CancelToken } = await import('hob'); const i = performance.now() - t
new CancelToken(); console.log(JSON.stringify([i, performance.now() - t - i]))`
const imports = Array.from({ length: 11 }, () =>
  JSON.parse(execFileSync(process.execPath, process.versions.bun ? ['-e', source] : ['--input-type=module', '-e', source], { encoding: 'utf8' })))
console.log('\nmilliseconds, medians of 11 processes; goal 60')
console.log(`import                    ${column(median(imports.map(([time]) => time)))}`)
console.log(`and load of the addon     ${column(median(imports.map(([time, load]) => time + load)))}`)

/** Microseconds that the main thread has been on a processor. */
function spent() {
  try {
    return Number(readFileSync('/proc/self/schedstat', 'utf8').split(' ')[0]) / 1000
  } catch {
    return undefined
  }
}

/** Blocks of both sides in turn; the first of each warms up. */
async function compare(name, what, rounds, goal, javascript) {
  const mine = []
  const theirs = []
  const busy = []
  for (let block = 0; block <= BLOCKS; block++) {
    const other = await rust(what, rounds)
    const before = spent()
    const { times, calls } = await javascript(rounds)
    const after = spent()
    if (block === 0) continue
    theirs.push(...other)
    mine.push(...times)
    if (after !== undefined && calls !== undefined) busy.push((after - before) / calls)
  }
  const [js, plain] = [median(mine), median(theirs)]
  console.log(`${name.padEnd(26)}${[js, plain, js - plain, busy.length > 0 ? median(busy) : undefined, goal].map(column).join('')}`)
}
