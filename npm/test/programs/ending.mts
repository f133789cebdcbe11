// Ends in the way that its argument says, with live handles and work under way.
import { CancelToken, Engine, Pool } from 'hob'
import { held, script } from 'hob/testing'

import { hi, open } from '../support.mjs'

const [how = '', model = ''] = process.argv.slice(2)
const kept: unknown[] = [new Pool({ budgetBytes: 10 }), new CancelToken().withDeadline(1e6)]

if (how === 'quiet') {
  const engine = await open()
  await engine.embed({ model: 'embedder', texts: 'a' })
  const stream = engine.generate({ model: 'long', messages: hi })
  await stream.next()
  void engine.pool.events().next()
  kept.push(engine, stream)
  console.log('done')
} else if (how.startsWith('real')) {
  const engine = await Engine.open()
  await engine.embed({ model, texts: 'warm' })
  kept.push(engine, engine.embed({ model, texts: Array.from({ length: 200 }, (_, at) => `text number ${at} of many`) }).catch(() => {}))
  if (how === 'real-exit') process.exit(7)
  kept.push(engine.close())
} else {
  const engine = await open()
  await engine.load('chat')
  const stream = engine.generate({ model: 'long', messages: hi })
  await stream.next()
  kept.push(engine, stream, engine.pool, engine.pool.beginUse('chat:chat'), engine.pool.events(), engine.pool.charge(1))
  if (how === 'exit') {
    script(engine, 'hold', 'embed')
    kept.push(engine.embed({ model: 'embedder', texts: 'a' }))
    await held(engine, 'embed')
    process.exit(7)
  }
  if (how === 'exit-in-callback') {
    await engine.pool.admit({ key: 'mine:a', cost: 1, load: () => process.exit(7) })
  }
}
