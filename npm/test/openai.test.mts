// The example server, driven by OpenAI's official client: under Node on node:http, under Bun on Bun.serve.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { request as httpRequest } from 'node:http'
import test from 'node:test'
import { fileURLToPath } from 'node:url'

import OpenAI from 'openai'
import { Engine } from 'hob'
import type { EngineOptions } from 'hob'
import { count, held, liveHandles, openFakeEngine, script } from 'hob/testing'

import { serve } from '../examples/openai-server.mjs'
import type { ServerOptions } from '../examples/openai-server.mjs'
import { collected, hi as said, MODELS, real, run, tick } from './support.mjs'

const hi = said as { role: 'user'; content: string }[]

const call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
const template = '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if false %}<tool_call>{"arguments": 1}</tool_call><think></think>{% endif %}'
const EXTRA = [
  { name: 'caller', kind: 'chat' as const, bytes: 10, template, reply: `<think>\nHm.\n</think>\n\nAdding. ${call}` },
  { name: 'mirror', kind: 'chat' as const, bytes: 10, template, echo: true, context: 10_000 },
]
const names = [...MODELS, ...EXTRA].map(({ name }) => name)

/** An engine, its server and a client of it. */
async function start(options: EngineOptions = {}, server: ServerOptions = {}) {
  const engine = await openFakeEngine([...MODELS, ...EXTRA], { budgetBytes: 1000, ...options })
  const { url, close } = await serve(engine, Object.fromEntries(names.map((name) => [name, name])), { port: 0, ...server })
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 })
  const dispose = async () => {
    await close()
    await engine.close()
  }
  return { engine, url, client, [Symbol.asyncDispose]: dispose }
}

/** The error that the client makes of a response, by status. */
async function refused(promise: PromiseLike<unknown>, status: number, words?: RegExp): Promise<InstanceType<typeof OpenAI.APIError>> {
  const error = await promise.then(() => assert.fail(`it should have failed with ${status}`), (thrown: unknown) => thrown)
  assert.ok(error instanceof OpenAI.APIError, String(error))
  assert.equal(error.status, status, error.message)
  if (words !== undefined) assert.match(error.message, words)
  return error
}

async function idle(engine: Engine): Promise<void> {
  while (engine.requests > 0) await tick(1)
}

const post = (url: string, path: string, body?: string | Uint8Array<ArrayBuffer>, headers: Record<string, string> = {}) =>
  fetch(`${url}${path}`, { method: 'POST', headers, ...(body !== undefined && { body }) })

test('a chat: answer, usage, limits; the models', async () => {
  await using server = await start()
  const { client } = server
  const answer = await client.chat.completions.create({ model: 'chat', messages: hi, temperature: 0, seed: 7, stop: null })
  assert.equal(answer.object, 'chat.completion')
  assert.deepEqual(answer.choices[0]?.message.content, 'Hello, world!')
  assert.equal(answer.choices[0]?.finish_reason, 'stop')
  assert.equal(answer.usage?.completion_tokens, 13)
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 13)
  const short = await client.chat.completions.create({ model: 'chat', messages: hi, max_completion_tokens: 5 })
  assert.deepEqual([short.choices[0]?.message.content, short.choices[0]?.finish_reason], ['Hello', 'length'])
  const stopped = await client.chat.completions.create({ model: 'chat', messages: hi, stop: [', w'] })
  assert.deepEqual([stopped.choices[0]?.message.content, stopped.choices[0]?.finish_reason], ['Hello', 'stop'])
  const developer = await client.chat.completions.create({ model: 'mirror', messages: [{ role: 'developer', content: [{ type: 'text', text: 'Be brief.' }] }, ...hi] })
  assert.match(developer.choices[0]?.message.content ?? '', /<system>Be brief\.<user>hi/)
  const listed = await client.models.list()
  assert.deepEqual(listed.data.map(({ id }) => id), names)
  assert.equal((await client.models.retrieve('chat')).id, 'chat')
  await refused(client.models.retrieve('nobody'), 404)
})

test('a stream: pieces, one end, usage when asked for', async () => {
  await using server = await start()
  const request = { model: 'chat', messages: hi, stream: true as const }
  let text = ''
  const ends: unknown[] = []
  for await (const chunk of await server.client.chat.completions.create(request)) {
    assert.equal(chunk.object, 'chat.completion.chunk')
    assert.equal(chunk.usage, undefined)
    text += chunk.choices[0]?.delta.content ?? ''
    if (chunk.choices[0]?.finish_reason) ends.push(chunk.choices[0].finish_reason)
  }
  assert.equal(text, 'Hello, world!')
  assert.deepEqual(ends, ['stop'])
  let usage: OpenAI.CompletionUsage | null | undefined
  for await (const chunk of await server.client.chat.completions.create({ ...request, stream_options: { include_usage: true } })) {
    assert.equal(usage ?? null, null, 'usage comes last')
    usage = chunk.usage
  }
  assert.equal(usage?.completion_tokens, 13)
  // As it goes over the wire.
  const wire = await (await post(server.url, '/v1/chat/completions', JSON.stringify({ ...request, max_tokens: 1 }))).text()
  assert.match(wire, /^data: \{"id":"chatcmpl-[^\n]*"role":"assistant"[^\n]*\n\ndata: [^]*\n\ndata: \[DONE\]\n\n$/)
})

test('tools and reasoning, whole and streamed', async () => {
  await using server = await start()
  const { client } = server
  const tools = [{ type: 'function' as const, function: { name: 'add', description: 'Adds', parameters: { type: 'object' } } }]
  const { choices: [choice] } = await client.chat.completions.create({ model: 'caller', messages: hi, tools })
  assert.equal(choice?.finish_reason, 'tool_calls')
  assert.equal(choice.message.content?.trim(), 'Adding.')
  assert.equal((choice.message as { reasoning_content?: string }).reasoning_content, 'Hm.')
  const made = choice.message.tool_calls?.[0]
  assert.ok(made?.type === 'function' && made.function.name === 'add')
  assert.deepEqual(JSON.parse(made.function.arguments), { a: 1, b: 2 })
  // The client's own gathering of a stream comes to the same.
  const gathered = await client.chat.completions.stream({ model: 'caller', messages: hi, tools }).finalChatCompletion()
  const same = gathered.choices[0]?.message.tool_calls?.[0]
  assert.ok(same?.type === 'function')
  assert.deepEqual(JSON.parse(same.function.arguments), { a: 1, b: 2 })
  assert.equal(gathered.choices[0]?.finish_reason, 'tool_calls')
  // The result goes back as a message.
  const turn = [...hi, choice.message, { role: 'tool' as const, tool_call_id: made.id, content: '3' }]
  const told = await client.chat.completions.create({ model: 'mirror', messages: turn, tools, tool_choice: 'none' })
  assert.match(told.choices[0]?.message.content ?? '', /<tool>3/)
  assert.doesNotMatch(told.choices[0]?.message.content ?? '', /Adds/)
})

test('a client that goes ends its work: while it reads, and before the first token', async () => {
  await using server = await start()
  const { client, engine } = server
  // The device takes one step at a time, and the server has time to notice in between. How many it took until the request was over.
  const steps = async () => {
    const before = count(engine, 'step')
    while (engine.requests > 0) {
      script(engine, 'pass', 'step')
      await tick(1)
    }
    script(engine, 'release', 'step')
    return count(engine, 'step') - before
  }
  script(engine, 'hold', 'step')
  const begun = client.chat.completions.create({ model: 'long', messages: hi, stream: true })
  await held(engine, 'step')
  script(engine, 'pass', 'step')
  for await (const _ of await begun) break
  assert.ok((await steps()) < 1000)
  for (const stream of [false, true]) {
    script(engine, 'hold', 'prefill')
    script(engine, 'hold', 'step')
    const controller = new AbortController()
    const asked = client.chat.completions.create({ model: 'long', messages: hi, stream }, { signal: controller.signal })
    const ended = assert.rejects(Promise.resolve(asked), OpenAI.APIUserAbortError)
    await held(engine, 'prefill')
    controller.abort()
    await ended
    script(engine, 'release', 'prefill')
    assert.ok((await steps()) < 1000)
  }
  // Others are served on.
  assert.equal((await client.chat.completions.create({ model: 'chat', messages: hi })).choices[0]?.message.content, 'Hello, world!')
})

test('embeddings: base64, as the client asks by default, and numbers', async () => {
  await using server = await start()
  const { client, engine, url } = server
  const input = ['a', 'bb']
  const { embeddings } = await engine.embed({ model: 'embedder', texts: input })
  const wanted = embeddings.map((vector) => Array.from(vector))
  const packed = await client.embeddings.create({ model: 'embedder', input })
  assert.deepEqual(packed.data.map(({ embedding }) => Array.from(embedding)), wanted)
  const plain = await client.embeddings.create({ model: 'embedder', input, encoding_format: 'float' })
  assert.deepEqual(plain.data.map(({ embedding }) => embedding), wanted)
  assert.equal(plain.usage.prompt_tokens, 3)
  const wire = (await (await post(url, '/v1/embeddings', JSON.stringify({ model: 'embedder', input: 'a', encoding_format: 'base64' }))).json()) as
    { data: { embedding: string }[] }
  assert.equal(Buffer.from(wire.data[0]!.embedding, 'base64').length, 8 * 4)
  assert.equal((await client.embeddings.create({ model: 'embedder', input: 'a', dimensions: 3 })).data[0]?.embedding.length, 3)
})

test('rerank', async () => {
  await using server = await start()
  const body = { model: 'reranker', query: 'q', documents: ['x', { text: 'yy' }, 'zzz'], top_n: 2, return_documents: true }
  const { results, usage } = (await server.client.post('/rerank', { body })) as
    { results: { index: number; relevance_score: number; document: { text: string } }[]; usage: { total_tokens: number } }
  assert.equal(results.length, 2)
  assert.ok(results[0]!.relevance_score >= results[1]!.relevance_score)
  assert.equal(results[0]!.document.text, ['x', 'yy', 'zzz'][results[0]!.index])
  assert.ok(usage.total_tokens > 0)
})

test('errors have OpenAI\'s shape and the right status', async () => {
  await using server = await start({ capacity: 1, queue: 0 })
  const { client, engine } = server
  const chat = (body: object) => client.chat.completions.create({ model: 'chat', messages: hi, ...body })
  const unknown = await refused(chat({ model: 'nobody' }), 404)
  assert.ok(unknown instanceof OpenAI.NotFoundError && unknown.code === 'model_not_found' && unknown.param === 'model')
  for (const body of [
    { messages: [] }, { messages: 'hi' }, { messages: [null] }, { messages: [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'x' } }] }] },
    { model: 7 }, { temperature: 'hot' }, { temperature: -1 }, { max_tokens: 1.5 }, { tools: {} }, { stop: [1] }, { n: 2 },
    { messages: undefined }, { logprobs: true }, { response_format: { type: 'json_object' } }, { tool_choice: 'required' },
  ]) {
    const error = await refused(chat(body), 400)
    assert.equal(error.type, 'invalid_request_error', JSON.stringify(body))
    await refused(chat({ ...body, stream: true }), 400)
  }
  await refused(client.embeddings.create({ model: 'embedder', input: [[1, 2]] }), 400)
  await refused(client.embeddings.create({ model: 'chat', input: 'a' }), 400)
  await refused(client.post('/rerank', { body: { model: 'reranker', query: 'q', documents: [] } }), 400)
  await refused(client.post('/rerank', { body: { model: 'reranker', query: 'q', documents: [{}] } }), 400)
  script(engine, 'hold', 'step')
  const first = chat({})
  await held(engine, 'step')
  const busy = await refused(chat({}), 429)
  assert.ok(busy instanceof OpenAI.RateLimitError && busy.code === 'Busy')
  script(engine, 'release', 'step')
  await first
  // What goes wrong later is an event of the stream.
  script(engine, 'hold', 'step')
  const begun = client.chat.completions.create({ model: 'long', messages: hi, stream: true })
  await held(engine, 'step')
  script(engine, 'pass', 'step')
  const stream = await begun
  script(engine, 'fail', 'step')
  script(engine, 'release', 'step')
  const failed = (async () => {
    for await (const _ of stream);
  })()
  await assert.rejects(failed, OpenAI.APIError)
  script(engine, 'fail', 'prefill')
  assert.equal((await refused(chat({}), 500)).type, 'server_error')
  await engine.close()
  await refused(chat({}), 503)
})

test('bad bodies, bad addresses, strangers', async () => {
  await using server = await start({}, { maxBodyBytes: 1000 })
  const { url } = server
  const shape = async (response: Response, status: number) => {
    const { error } = (await response.json()) as { error: { message: string; type: string } }
    assert.equal(response.status, status, error.message)
    assert.ok(error.message !== '' && error.type !== '')
  }
  for (const body of ['', '{', '[]', 'null', '"x"', '7', new Uint8Array([0x22, 0xff, 0x22])]) {
    for (const path of ['/v1/chat/completions', '/v1/embeddings', '/v1/rerank']) await shape(await post(url, path, body), 400)
  }
  await shape(await post(url, '/v1/embeddings', JSON.stringify({ model: 'embedder', input: 'x'.repeat(2000) })), 413)
  // Without a length, it is found out while it is read.
  const endless = new ReadableStream({ pull: (controller) => controller.enqueue(new Uint8Array(500)) })
  const piped = await fetch(`${url}/v1/embeddings`, { method: 'POST', body: endless, duplex: 'half' } as RequestInit)
  assert.equal(piped.status, 413)
  await shape(await fetch(`${url}/nothing`), 404)
  await shape(await fetch(`${url}/v1/models/%E0%A4%A`), 404)
  await shape(await fetch(`${url}/v1/chat/completions`), 405)
  await shape(await post(url, '/x/models/unload', undefined, { origin: 'http://evil.example' }), 403)
  const rebound = await new Promise((resolve, reject) => {
    httpRequest(`${url}/x/status`, { headers: { host: 'evil.example' } }, (response) => resolve(response.resume().statusCode)).on('error', reject).end()
  })
  assert.equal(rebound, 403)
  const broken = await new Promise((resolve) => {
    httpRequest(`${url}/x/status`, { headers: { host: 'a b' } }, (response) => resolve(response.resume().statusCode)).on('error', resolve).end()
  })
  assert.notEqual(broken, 200)
  assert.equal((await fetch(`${url}/v1/models`)).status, 200)
})

test('status and the door to unload', async () => {
  await using server = await start()
  const { client, engine, url } = server
  const status = async () => (await (await fetch(`${url}/x/status`)).json()) as
    { chat: string | null; embedder: string | null; reranker: string | null; used_bytes: number; models: { model: string; state: string }[] }
  const unload = async (body?: string) => {
    const response = await post(url, '/x/models/unload', body)
    return [response.status, ((await response.json()) as { unloaded?: string | null }).unloaded]
  }
  assert.deepEqual(await unload(), [200, null])
  await client.embeddings.create({ model: 'embedder', input: 'a' })
  await client.post('/rerank', { body: { model: 'reranker', query: 'q', documents: ['x'] } })
  await client.chat.completions.create({ model: 'chat', messages: hi })
  const before = await status()
  assert.deepEqual([before.chat, before.embedder, before.reranker], ['chat', 'embedder', 'reranker'])
  // Not JSON: 400. Unknown, or not resident: 404, and what is resident stays.
  assert.equal((await unload('{'))[0], 400)
  assert.equal((await unload('{"model": 7}'))[0], 400)
  assert.equal((await unload('{"model": "nobody"}'))[0], 404)
  assert.equal((await unload('{"model": "other"}'))[0], 404)
  assert.equal((await status()).models.length, 3)
  // By its name, once.
  assert.deepEqual(await unload('{"model": "embedder"}'), [200, 'embedder'])
  assert.equal((await unload('{"model": "embedder"}'))[0], 404)
  assert.deepEqual(await unload('{"model": "reranker"}'), [200, 'reranker'])
  assert.deepEqual([(await status()).embedder, (await status()).reranker, (await status()).chat], [null, null, 'chat'])
  // In use it is refused; then null, or no body, means the chat model.
  script(engine, 'hold', 'step')
  const answer = client.chat.completions.create({ model: 'chat', messages: hi })
  await held(engine, 'step')
  assert.equal((await unload('{"model": null}'))[0], 409)
  script(engine, 'release', 'step')
  await answer
  assert.deepEqual(await unload('{"model": null}'), [200, 'chat'])
  await client.chat.completions.create({ model: 'other', messages: hi })
  assert.deepEqual(await unload(), [200, 'other'])
  assert.equal((await status()).used_bytes, 0)
})

test('nothing is left behind', async () => {
  // Bun runs all files in one process: what others have left to the garbage collector is not this one's.
  await collected(() => liveHandles() === 0, 5)
  // A leak would be one a round or more; the last ones may still be on a stack, where Bun's collector sees them.
  const before = liveHandles() + 2
  {
    await using server = await start()
    const { client, engine, url } = server
    for (let round = 0; round < 10; round++) {
      for await (const _ of await client.chat.completions.create({ model: 'long', messages: hi, stream: true })) break
      const controller = new AbortController()
      const asked = client.chat.completions.create({ model: 'long', messages: hi }, { signal: controller.signal }).catch(() => undefined)
      await tick(2)
      controller.abort()
      await asked
      await post(url, '/v1/chat/completions', '{')
      await refused(client.chat.completions.create({ model: 'chat', messages: [] }), 400)
    }
    await idle(engine)
  }
  assert.ok(await collected(() => liveHandles() <= before), `${liveHandles()} handles are alive, at most ${before} were to be`)
})

test('as a program', { skip: real.skip, timeout: 60_000 }, async () => {
  const program = fileURLToPath(new URL('../examples/openai-server.mjs', import.meta.url))
  const child = spawn(process.execPath, [program, '--port', '0', `minilm=${real.embedder}`], { stdio: ['ignore', 'pipe', 'inherit'] })
  const [line] = (await once(child.stdout.setEncoding('utf8'), 'data')) as [string]
  const url = /http:\/\/127\.0\.0\.1:\d+\/v1/.exec(line)?.[0]
  const client = new OpenAI({ baseURL: url ?? '', apiKey: 'none', maxRetries: 0 })
  assert.deepEqual((await client.models.list()).data.map(({ id }) => id), ['minilm'])
  const ended = once(child, 'exit')
  child.kill('SIGTERM')
  assert.deepEqual(await ended, [0, null])
  assert.match((await run(program, ['nonsense'])).stderr, /usage: openai-server/)
})

test('real models', { skip: real.skip, timeout: 300_000 }, async () => {
  await using engine = await Engine.open()
  const { url, close } = await serve(engine, { smol: real.chat, minilm: real.embedder }, { port: 0 })
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 })
  const messages = [{ role: 'user' as const, content: 'What is the capital of France? Answer in one word.' }]
  let text = ''
  for await (const chunk of await client.chat.completions.create({ model: 'smol', messages, max_tokens: 12, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? ''
  }
  assert.match(text, /Paris/)
  const { data } = await client.embeddings.create({ model: 'minilm', input: ['A cat.', 'A kitten.'] })
  assert.equal(data[1]?.embedding.length, 384)
  const { results } = (await client.post('/rerank', { body: { model: 'minilm', query: 'a small cat', documents: ['Stocks fell.', 'A kitten.'] } })) as
    { results: { index: number }[] }
  assert.equal(results[0]?.index, 1)
  await close()
})
