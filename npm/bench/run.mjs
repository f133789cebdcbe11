// What the binding costs, on the scripted device, so that no model's time is in it:  cargo xtask npm bench
//
// - embed: a call's time as JavaScript sees it, less the time that the core itself reports for it.
// - token: what JavaScript's thread is busy for with each token of a stream (the device makes them as fast as it can).
// - import: a fresh process's `import 'hob'`, and then the addon's first use.
import { execFileSync } from 'node:child_process'
import { performance } from 'node:perf_hooks'

import { openFakeEngine } from 'hob/testing'

const median = (values) => values.sort((a, b) => a - b)[values.length >> 1]
const row = (name, value, unit, goal) => console.log(`${name.padEnd(34)} ${value.toFixed(1).padStart(8)} ${unit}   goal ${goal} ${unit}`)

await using_engine(async (engine) => {
  const texts = ['a']
  const embed = async () => {
    const began = performance.now()
    const { timings } = await engine.embed({ model: 'embedder', texts })
    return (performance.now() - began - timings.totalMs) * 1000
  }
  for (let round = 0; round < 2000; round++) await embed()
  const overheads = []
  for (let round = 0; round < 5000; round++) overheads.push(await embed())
  row('embed, over the core, median', median(overheads), 'µs', 30)

  const perToken = []
  for (let round = 0; round < 20; round++) {
    const before = performance.eventLoopUtilization()
    const began = performance.now()
    let tokens = 0
    for await (const event of engine.generate({ model: 'long', prompt: 'x' })) if (event.type === 'chunk') tokens += event.tokenIds.length
    // Bun measures no loop: there the whole time counts.
    const { active } = performance.eventLoopUtilization(before)
    const busy = active > 0 ? active : performance.now() - began
    if (round >= 5) perToken.push((busy * 1000) / tokens)
  }
  row('streamed token, JavaScript busy', median(perToken), 'µs', 10)
})

const source = `const t = performance.now(); const { Engine, CancelToken } = await import('hob'); const i = performance.now() - t
new CancelToken(); console.log(JSON.stringify([i, performance.now() - t - i]))`
const imports = Array.from({ length: 11 }, () =>
  JSON.parse(execFileSync(process.execPath, process.versions.bun ? ['-e', source] : ['--input-type=module', '-e', source], { encoding: 'utf8' })))
row('import', median(imports.map(([time]) => time)), 'ms', 60)
row('import and load of the addon', median(imports.map(([time, load]) => time + load)), 'ms', 60)

async function using_engine(work) {
  const engine = await openFakeEngine(
    [{ name: 'embedder', kind: 'embedder', bytes: 1 }, { name: 'long', kind: 'chat', bytes: 1, reply: 'x'.repeat(3000) }],
    { budgetBytes: 1000 },
  )
  await work(engine)
  await engine.close()
}
