// Every verb: on the scripted device for its shape, on small real models for its numbers.
import assert from 'node:assert/strict'
import test from 'node:test'

import { Engine } from 'hob'
import type { StreamEvent } from 'hob'
import { openFakeEngine } from 'hob/testing'

import { hi, open, real, rejects } from './support.mjs'

test('a stream yields chunks and then one finished', async () => {
  await using engine = await open()
  const events: StreamEvent[] = []
  for await (const event of engine.generate({ model: 'chat', messages: hi })) events.push(event)
  const chunks = events.filter((event) => event.type === 'chunk')
  assert.equal(chunks.map((chunk) => chunk.text).join(''), 'Hello, world!')
  assert.deepEqual(chunks.flatMap((chunk) => chunk.tokenIds), [...Buffer.from('Hello, world!')])
  assert.equal(events.filter((event) => event.type === 'finished').length, 1)
  const end = events.at(-1)
  assert.ok(end?.type === 'finished')
  assert.equal(end.finish, 'stop')
  assert.equal(end.completionTokens, 13)
  assert.ok(end.timings.totalMs >= 0 && end.timings.loadMs !== undefined)
  assert.equal(end.provenance?.family, 'fake')
})

test('the answer as one value, and its text piece by piece', async () => {
  await using engine = await open()
  const whole = await engine.generate({ model: 'chat', messages: hi, maxTokens: 5 }).result()
  assert.equal(whole.text, 'Hello')
  assert.equal(whole.finish, 'length')
  assert.equal(whole.tokenIds.length, 5)
  let text = ''
  for await (const piece of engine.generate({ model: 'chat', prompt: 'hi', stop: ['world'] }).text()) text += piece
  assert.equal(text, 'Hello, ')
  const stopped = await engine.generate({ model: 'chat', promptTokens: [1, 2], stop: 'world' }).result()
  assert.equal(stopped.stopIndex, 0)
  assert.equal(stopped.promptTokens, 2)
})

test('sampling reports a seed that can be given again, and log-probabilities', async () => {
  await using engine = await open()
  const request = { model: 'chat', messages: hi, temperature: 50, maxTokens: 12, logprobs: 2 }
  const first = await engine.generate(request).result()
  assert.ok(Number.isSafeInteger(first.seed))
  // So hot, the token that ends the turn may be drawn as well as any other.
  assert.ok(first.finish === 'stop' || first.tokenIds.length === 12, first.finish)
  assert.equal(first.logprobs.length, first.tokenIds.length)
  assert.ok(first.logprobs.every(({ top }) => top.length === 2))
  const again = await engine.generate({ ...request, seed: first.seed! }).result()
  assert.deepEqual(again.tokenIds, first.tokenIds)
})

test('chunks can be gathered', async () => {
  await using engine = await open()
  let events = 0
  for await (const _ of engine.generate({ model: 'long', messages: hi, coalesceTokens: 100 })) events++
  assert.ok(events < 40, `${events} events for 3,000 tokens`)
})

test('calls of tools are told apart from the text', async () => {
  // A template that marks calls, as Qwen's does.
  const template = '{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{"arguments": 1}</tool_call>{% endif %}'
  const reply = 'So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
  await using engine = await openFakeEngine([{ name: 'm', kind: 'chat', bytes: 1, reply, template }], { budgetBytes: 1000 })
  const tools = [{ type: 'function' as const, function: { name: 'add', parameters: { type: 'object' } } }]
  const answer = await engine.generate({ model: 'm', messages: hi, tools }).result()
  assert.equal(answer.toolCalls.length, 1)
  assert.equal(answer.toolCalls[0]?.name, 'add')
  assert.deepEqual(JSON.parse(answer.toolCalls[0]?.arguments ?? ''), { a: 1 })
  assert.equal(answer.rejectedCalls.length, 1)
  assert.match(answer.rejectedCalls[0]?.reason ?? '', /not among/)
})

test('embeddings are views of one array, in order', async () => {
  await using engine = await open()
  const { embeddings, data, dimensions, promptTokens } = await engine.embed({ model: 'embedder', texts: ['a', 'bb', 'a'] })
  assert.equal(dimensions, 8)
  assert.equal(promptTokens, 4)
  assert.equal(embeddings.length, 3)
  assert.ok(embeddings.every((vector) => vector instanceof Float32Array && vector.buffer === data.buffer && vector.length === 8))
  assert.deepEqual(embeddings[0], embeddings[2])
  assert.notDeepEqual(embeddings[0], embeddings[1])
  const one = await engine.embed({ model: 'embedder', texts: 'a', dimensions: 3, normalize: false })
  assert.equal(one.embeddings[0]?.length, 3)
})

test('rerank, score, decide', async () => {
  await using engine = await open()
  const ranking = await engine.rerank({ model: 'reranker', query: 'q', documents: ['x', 'yy', 'zzz'], topN: 2 })
  assert.equal(ranking.results.length, 2)
  assert.equal(ranking.scoreKind, 'normalized')
  const cosine = await engine.rerank({ model: 'embedder', query: 'q', documents: ['x', 'q'] })
  assert.equal(cosine.scoreKind, 'cosine')
  assert.equal(cosine.results[0]?.logit, undefined)
  const score = await engine.score({ model: 'chat', prompt: 'q', completion: 'abc' })
  assert.deepEqual([...score.tokens], [97, 98, 99])
  assert.equal(score.logprobs.length, 3)
  assert.ok(score.meanNll > 0)
  const decision = await engine.decide({ model: 'chat', messages: hi, answers: ['yes', 'no'], decision: 'score' })
  assert.equal(decision.answers.length, 2)
  assert.ok(Math.abs(decision.answers.reduce((sum, answer) => sum + answer.p, 0) - 1) < 1e-9)
  assert.ok(decision.value !== undefined && decision.confidence !== undefined)
})

test('looking at a model loads nothing; loading tells how far it is', async () => {
  await using engine = await open()
  const info = await engine.inspect('chat')
  assert.equal(info.kind, 'chat')
  assert.deepEqual(await engine.capabilities('embedder'), ['embed', 'rerank'])
  assert.equal((await engine.estimate('chat')).total, 100)
  assert.equal(engine.pool.status().entries.length, 0)
  const told: number[] = []
  await engine.load('chat', { onProgress: (fraction) => told.push(fraction) })
  assert.deepEqual(told, [...told].sort((a, b) => a - b))
  assert.equal(told.at(-1), 1)
  assert.equal(engine.pool.status().entries[0]?.state, 'ready')
  while (engine.availability === 'working') await new Promise((resolve) => setTimeout(resolve, 1))
  assert.equal(engine.availability, 'ready')
  assert.equal(engine.device.kind, 'fake')
})

test('a pause holds new loads back', async () => {
  await using engine = await open()
  const pause = await engine.pause()
  assert.ok(engine.pool.status().paused)
  const answer = engine.generate({ model: 'chat', messages: hi }).result()
  await rejects(engine.load('other', { timeoutMs: 30 }), 'Timeout')
  assert.ok(pause.resume())
  assert.ok(!pause.resume())
  assert.equal((await answer).text, 'Hello, world!')
})

test('two engines at once, each with its own models and account', async () => {
  await using first = await open()
  await using second = await open({ budgetBytes: 500 })
  const both = await Promise.all([first, second].map((engine) => engine.embed({ model: 'embedder', texts: 'a' })))
  assert.deepEqual(both[0]?.embeddings, both[1]?.embeddings)
  await first.close()
  assert.equal(first.availability, 'closed')
  assert.equal((await second.embed({ model: 'embedder', texts: 'a' })).dimensions, 8)
})

test('real models: chat, embeddings, rerank', { skip: real.skip }, async () => {
  await using engine = await Engine.open()
  assert.notEqual(engine.device.kind, 'fake')
  const info = await engine.inspect(real.chat)
  assert.equal(info.family, 'llama')
  const messages = [{ role: 'user', content: 'What is the capital of France? Answer in one word.' }]
  const answer = await engine.generate({ model: real.chat, messages, maxTokens: 12 }).result()
  assert.match(answer.text, /Paris/)
  const texts = ['A cat sits on the mat.', 'A kitten rests on a rug.', 'The stock market fell sharply.']
  const { embeddings, dimensions } = await engine.embed({ model: real.embedder, texts })
  assert.equal(dimensions, 384)
  const cosine = (a: number, b: number) => embeddings[a]!.reduce((sum, x, at) => sum + x * embeddings[b]![at]!, 0)
  assert.ok(Math.abs(cosine(0, 0) - 1) < 1e-4)
  assert.ok(cosine(0, 1) > cosine(0, 2) + 0.2)
  const ranking = await engine.rerank({ model: real.embedder, query: 'a small cat', documents: texts })
  assert.equal(ranking.results.at(-1)?.index, 2)
  const decided = await engine.decide({ model: real.chat, messages, answers: ['Paris', 'Berlin'] })
  assert.ok(decided.answers[0]!.p > decided.answers[1]!.p)
  await rejects(engine.embed({ model: real.chat, texts }), 'Unsupported')
})

test('a real reranker', { skip: real.skipReranker }, async () => {
  await using engine = await Engine.open()
  const documents = ['Berlin has about 3.5 million inhabitants.', 'Bread is made of flour.']
  const ranking = await engine.rerank({ model: real.reranker, query: 'How many people live in Berlin?', documents })
  assert.equal(ranking.results[0]?.index, 0)
  assert.ok(ranking.results[0]!.score > 0.5)
})
