// What the binding costs, on the scripted device, so that no model's time is in it:  cargo xtask npm bench
//
// "Over Rust" is the same call on the same scripted device through the Rust API (bindings/napi/examples/without_js.rs), in the same run: a fresh
// pair of processes measures everything in turns (one sleeps meanwhile), and what is printed are the medians over the pairs, with the middle half of
// the differences. Fresh ones, because two processes that do the same differ by more than a run of either: by where their memory and threads lie.
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
// Found on a two-core virtual machine (AMD EPYC; 2026-12-01, nothing else running), release; microseconds over Rust:
//                        Node 20, five runs     Bun 1.4, three runs    0de829a, Node
//   floor                5 7 4 7 4              3 6 5                  5
//   embed                17 15 12 22 21         1 0 4                  27
//   floor, each alone    27 25 25 28 25         19 20 19               26
//   token, each alone    36 36 39 40 40         27 26 27               40
//   token, in a burst    1 1 2 1 1              -1 -1 0                2
//   import, milliseconds 24 to 30, with the addon 32 to 40; Bun 16 to 17, with the addon 26 to 28
// Before that the two sides were one pair of long-lived processes, whose figures for the embed lay between 7 and 41 from run to run.
// Where the 20 go, by stamps along the way: 7 until the addon has read the request, 3 more than Rust to hand it over, 2 for the wake beyond a
// thread's, 7 from the letter to the awaiting function. All of it runs once after each sleep, with cold caches: in 0de829a TypeScript's part of
// reading the request took 4, and 0.7 warm, in a loop.
import { execFileSync, spawn } from 'node:child_process'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'

const [rust, floor] = process.argv.slice(2)
const PAIRS = 11

const MEASUREMENTS = [
  { name: 'floor: a thread and back', what: 'echo', rounds: 500 },
  { name: 'embed, one short text', what: 'embed', rounds: 500, goal: 30 },
  { name: 'floor, each alone', what: 'echo-alone', rounds: 100 },
  { name: 'streamed token, each alone', what: 'paced', rounds: 100, goal: 10 },
  { name: 'streamed token, in a burst', what: 'burst', rounds: 3, goal: 10 },
]

const sorted = (values) => [...values].sort((a, b) => a - b)
const median = (values) => sorted(values)[values.length >> 1]
const column = (value) => (typeof value === 'number' ? value.toFixed(1) : (value ?? '')).padStart(9)

/** A process that measures what it is asked for. */
function worker(command, ...parts) {
  const child = spawn(command, parts, { stdio: ['pipe', 'pipe', 'inherit'] })
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]()
  return {
    async measure(what, rounds) {
      child.stdin.write(`${what} ${rounds}\n`)
      const { value, done } = await lines.next()
      if (done) throw new Error(`${command} ended while it measured ${what}`)
      return JSON.parse(value)
    },
    end: () => child.stdin.end(),
  }
}

const all = MEASUREMENTS.map((measurement) => ({ ...measurement, js: [], plain: [], over: [], busy: [] }))
for (let pair = 0; pair < PAIRS; pair++) {
  const ours = worker(process.execPath, fileURLToPath(new URL('with_js.mjs', import.meta.url)), floor)
  const theirs = worker(rust)
  for (const { what, rounds, js, plain, over, busy } of all) {
    await theirs.measure(what, rounds)
    await ours.measure(what, 2 * rounds)
    // While one has its turn the other sleeps.
    const [times, plainTimes] = [[], []]
    for (let turn = 0; turn < 2; turn++) {
      plainTimes.push(...(await theirs.measure(what, rounds)))
      const measured = await ours.measure(what, rounds)
      times.push(...measured.times)
      if (measured.busy !== undefined) busy.push(measured.busy)
    }
    js.push(median(times))
    plain.push(median(plainTimes))
    over.push(median(times) - median(plainTimes))
  }
  ours.end()
  theirs.end()
}

const { bun } = process.versions
console.log(`${bun === undefined ? `Node ${process.version}` : `Bun ${bun}`}, microseconds, medians of ${PAIRS} pairs of processes`)
console.log(`${''.padEnd(26)}${['JS', 'Rust', 'over', 'from', 'to', 'busy', 'goal'].map(column).join('')}`)
for (const { name, js, plain, over, busy, goal } of all) {
  // The middle half of the pairs.
  const [from, to] = [sorted(over)[over.length >> 2], sorted(over)[(3 * over.length) >> 2]]
  const columns = [median(js), median(plain), median(over), from, to, busy.length > 0 ? median(busy) : undefined, goal]
  console.log(`${name.padEnd(26)}${columns.map(column).join('')}`)
}

const source = `const t = performance.now(); const { Engine, CancelToken } = await import('hob'); const i = performance.now() - t
new CancelToken(); console.log(JSON.stringify([i, performance.now() - t - i]))`
const imports = Array.from({ length: 11 }, () =>
  JSON.parse(execFileSync(process.execPath, bun ? ['-e', source] : ['--input-type=module', '-e', source], { encoding: 'utf8' })))
console.log('\nmilliseconds, medians of 11 processes; goal 60')
console.log(`import                    ${column(median(imports.map(([time]) => time)))}`)
console.log(`and load of the addon     ${column(median(imports.map(([time, load]) => time + load)))}`)
