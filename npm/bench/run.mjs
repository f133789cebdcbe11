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
// - floor: an addon that does nothing (bindings/napi/examples/floor.rs) asks a thread, which wakes the loop; beside it two Rust threads that
//   wake each other. What a call costs over Rust, less what the floor does, is Hob's own.
//
// Found on a two-core virtual machine (AMD EPYC, 2.4 GHz; 2026-12-01, beside other work), release; microseconds over Rust:
//                        Node 20, three runs    Bun 1.4, three runs    before, Node
//   floor                7 8 8                  -17 4 6                -2
//   embed                36 36 38               23 24 33               53 (74 and 76 in busier hours)
//   floor, each alone    24 24 25               16 17 17               18
//   token, each alone    27 28 32               20 22 23               51
//   token, in a burst    -1 0 0                 0 0 1                  0
//   import, milliseconds 20 20 25, with the addon 27 27 34; Bun 13 13 13, with the addon 21 21 22
// A fourth run under Node fell into a minute when Rust's embed took 476 instead of 180 to 200: 112 over, floor 21.
// Times vary with the host: this machine's idle processors take 30 to 80 microseconds to wake, when they sleep at all. A sleeping event
// loop takes longer than a sleeping thread by the floor's difference: epoll and the eventfd's read, libuv's phases, Node-API's dispatch
// with its scopes, and the microtasks. Of the rest of an embed, some 3 microseconds are calls of Node-API as they run warm, in a loop; here
// everything runs once, with cold caches, after each sleep. Before: 22 of its 36 went into reading the request's object, 9 into making the result.
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
