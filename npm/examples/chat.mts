// A chat in the terminal:  node chat.mjs MODEL
// Ctrl-C ends an answer; a second one, or an empty line, ends the chat.
import { createInterface } from 'node:readline/promises'

import { Engine, HobError } from 'hob'
import type { Message } from 'hob'

const [model] = process.argv.slice(2)
if (model === undefined) throw new Error('usage: chat MODEL')

await using engine = await Engine.open()
await engine.load(model, { onProgress: (fraction) => process.stderr.write(`\rloading ${Math.round(fraction * 100)} %`) })
process.stderr.write('\n')

const terminal = createInterface({ input: process.stdin, output: process.stdout })
const messages: Message[] = []
for (;;) {
  const said = await terminal.question('> ').catch(() => '')
  if (said.trim() === '') break
  messages.push({ role: 'user', content: said })
  const controller = new AbortController()
  const abort = () => controller.abort()
  terminal.once('SIGINT', abort)
  try {
    // 'stop': what was said until then stays in the conversation.
    const stream = engine.generate({ model, messages, maxTokens: 256, signal: controller.signal, onCancel: 'stop' })
    let answer = ''
    for await (const piece of stream.text()) {
      answer += piece
      process.stdout.write(piece)
    }
    messages.push({ role: 'assistant', content: answer })
    process.stdout.write('\n')
  } catch (error) {
    if (!(error instanceof HobError)) throw error
    console.error(`${error.code}: ${error.message}`)
    messages.pop()
  }
  terminal.off('SIGINT', abort)
}
terminal.close()
