// Keeps a timer in a thread that Hob has nothing to do with.
import { parentPort } from 'node:worker_threads'

import { lateness } from '../support.mjs'

let stop = lateness()
parentPort?.on('message', (word: string) => {
  if (word === 'start') stop = lateness()
  else parentPort?.postMessage(stop())
})
