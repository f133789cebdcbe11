// A resident of one's own beside a model, under one budget:  node pool.mjs MODEL
// Watch the events: the newcomer makes the idle one go, and its release runs first.
import { Engine } from 'hob'

const [model] = process.argv.slice(2)
if (model === undefined) throw new Error('usage: pool MODEL')

const { total } = await (async () => {
  await using engine = await Engine.open()
  return engine.estimate(model)
})()
// Room for the model, or for the other, and not for both.
await using engine = await Engine.open({ budgetBytes: total + 2 ** 20 })
const { pool } = engine
const watching = (async () => {
  for await (const event of pool.events()) {
    if (event.event !== 'loadProgress') console.log(event.event, 'key' in event ? event.key.split('/').at(-1) : '')
  }
})()

const buffers = new Map<number, ArrayBuffer>()
const index = {
  key: 'search:index' as const,
  cost: 8 * 2 ** 20,
  load: ({ token }: { token: number }) => void buffers.set(token, new ArrayBuffer(8 * 2 ** 20)),
  release: (token: number) => void buffers.delete(token),
}
const { lease } = await pool.admit({ ...index, inUse: true })
console.log(`the index is resident: ${buffers.size === 1}`)
lease?.end()
await engine.generate({ model, prompt: 'Hello', maxTokens: 4 }).result()
console.log(`the index is resident: ${buffers.size === 1}`)
await engine.close()
await watching
