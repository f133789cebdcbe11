// A worker with one of everything under way.
import { parentPort, workerData } from 'node:worker_threads'

import { CancelToken } from 'hob'
import { held, script } from 'hob/testing'

import { hi, open } from '../support.mjs'

const engine = await open()
script(engine, 'hold', 'embed')
const pending = engine.embed({ model: 'embedder', texts: ['a'], ...(workerData.index % 2 === 1 && { cancel: new CancelToken().child() }) })
await held(engine, 'embed')
void engine.pool.admit({ key: 'mine:a', cost: 1, load: () => new Promise(() => {}), release: () => {} })
void engine.pool.events().next()
parentPort?.postMessage('working')
await new Promise((resolve) => parentPort?.once('message', resolve))
script(engine, 'release', 'embed')
await pending
parentPort?.postMessage((await engine.generate({ model: 'chat', messages: hi }).result()).text)
