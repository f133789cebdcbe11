// Electron's utility process: owns the engine. A crash in here takes no window with it.
import { Engine } from 'hob'

const [model] = process.argv.slice(2)
const engine = await Engine.open()
const running = new Map()

process.parentPort.on('message', async ({ data: { id, messages, cancel } }) => {
  if (cancel) return running.get(id)?.stop()
  const stream = engine.generate({ model, messages, maxTokens: 512 })
  running.set(id, stream)
  try {
    for await (const text of stream.text()) process.parentPort.postMessage({ id, text })
    process.parentPort.postMessage({ id, done: true })
  } catch (error) {
    process.parentPort.postMessage({ id, error: { code: error.code, message: error.message } })
  } finally {
    running.delete(id)
  }
})
