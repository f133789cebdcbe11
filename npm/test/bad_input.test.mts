// What is wrong is a rejected promise (or the stream's error) with a HobError that names the option, never a crash.
import assert from 'node:assert/strict'
import test from 'node:test'

import { Engine, HobError, Pool } from 'hob'
import { openFakeEngine, panic } from 'hob/testing'

import { hi, open, rejects, throws } from './support.mjs'

// biome-ignore lint: wrong on purpose
const wrong = (value: unknown): any => value

test('requests of the wrong shape are refused by name, before anything runs', async () => {
  await using engine = await open()
  const bad: [string, unknown, RegExp][] = [
    ['embed', undefined, /must be an object/],
    ['embed', null, /must be an object/],
    ['embed', 'text', /must be an object/],
    ['embed', {}, /model is missing/],
    ['embed', { model: 'embedder' }, /texts is missing/],
    ['embed', { model: 5, texts: ['a'] }, /model must be a string/],
    ['embed', { model: 'embedder', texts: [] }, /texts is empty/],
    ['embed', { model: 'embedder', texts: 7 }, /texts must be an array of strings/],
    ['embed', { model: 'embedder', texts: ['a', 7] }, /index 1/],
    ['embed', { model: 'embedder', texts: ['a', 'b\ud800'] }, /lone surrogate.* index 1/],
    ['embed', { model: 'embedder', texts: 'a', dimensions: NaN }, /dimensions must be a finite number/],
    ['embed', { model: 'embedder', texts: 'a', dimensions: -1 }, /dimensions is -1/],
    ['embed', { model: 'embedder', texts: 'a', dimensions: 1.5 }, /dimensions is 1.5/],
    ['embed', { model: 'embedder', texts: 'a', truncate: 'middle' }, /truncate must be one of/],
    ['embed', { model: 'embedder', texts: 'a', timeoutMs: 0 }, /timeout/],
    ['embed', { model: 'embedder', texts: 'a', timeoutMs: -5 }, /timeoutMs is -5/],
    ['embed', { model: 'embedder', texts: 'a', prompt_name: 'query' }, /did you mean promptName/],
    ['embed', { model: 'embedder', texts: 'a', signal: {} }, /AbortSignal/],
    ['embed', { model: 'embedder', texts: 'a', cancel: {} }, /CancelToken/],
    ['embed', { model: 'embedder', texts: 'a', idle: 'soon' }, /idle must be/],
    ['embed', { model: 'embedder', texts: 'a', load: { kind: 'cat' } }, /load: kind must be one of/],
    ['embed', { model: 'embedder', texts: 'a', load: { manifest: '{' } }, /manifest/],
    ['rerank', { model: 'reranker', query: ' ', documents: ['a'] }, /query is blank/],
    ['rerank', { model: 'reranker', query: 'q', documents: [] }, /documents is empty/],
    ['rerank', { model: 'reranker', query: 'q', documents: ['a'], topN: 0 }, /top_n is 0/],
    ['score', { model: 'chat', prompt: 'a', completion: '' }, /completion is empty/],
    ['decide', { model: 'chat', prompt: 'a', answers: [] }, /0 answers/],
    ['decide', { model: 'chat', prompt: 'a', answers: ['a'], decision: 'predicate' }, /give two/],
    ['load', 5, /model must be a string/],
    ['inspect', undefined, /model must be a string/],
  ]
  for (const [verb, argument, words] of bad) await rejects(wrong(engine)[verb](argument), 'InvalidArgument', words)
  assert.equal(engine.pool.status().entries.length, 0)
  assert.equal(engine.requests, 0)
  await rejects(engine.embed({ model: 'embedder', texts: 'a', dimensions: 9 }), 'InvalidArgument', /dimensions is 9/)
})

test('generate never throws: its stream fails once, then is done', async () => {
  await using engine = await open()
  const bad: [unknown, RegExp][] = [
    [undefined, /must be an object/],
    [{ model: 'chat' }, /exactly one of/],
    [{ model: 'chat', messages: hi, prompt: 'x' }, /exactly one of/],
    [{ model: 'chat', messages: [] }, /no messages/],
    [{ model: 'chat', messages: 'hi' }, /messages must be an array/],
    [{ model: 'chat', messages: [{ content: 'hi' }] }, /messages: not a JSON list/],
    [{ model: 'chat', messages: [{ role: 'user', content: '\udc00' }] }, /messages/],
    [{ model: 'chat', messages: [{ role: 'user', content: 1n }] }, /cannot be written as JSON/],
    [{ model: 'chat', prompt: '' }, /prompt is empty/],
    [{ model: 'chat', promptTokens: [1, -1] }, /prompt token is -1/],
    [{ model: 'chat', promptTokens: [1e9] }, /vocabulary/],
    [{ model: 'chat', prompt: 'a', maxTokens: NaN }, /maxTokens must be a finite number/],
    [{ model: 'chat', prompt: 'a', maxTokens: Infinity }, /maxTokens must be a finite number/],
    [{ model: 'chat', prompt: 'a', temperature: -1 }, /temperature is -1/],
    [{ model: 'chat', prompt: 'a', topP: 2 }, /top_p is 2/],
    [{ model: 'chat', prompt: 'a', seed: 2 ** 60 }, /seed/],
    [{ model: 'chat', prompt: 'a', logprobs: 1000 }, /logprobs is 1000/],
    [{ model: 'chat', prompt: 'a', stop: Array(100).fill('x') }, /stop strings/],
    [{ model: 'chat', prompt: 'a', max_tokens: 5 }, /did you mean maxTokens/],
  ]
  for (const [request, words] of bad) {
    const stream = engine.generate(wrong(request))
    await rejects(stream.next(), 'InvalidArgument', words)
    assert.deepEqual(await stream.next(), { done: true, value: undefined })
  }
  await rejects(engine.generate({ model: 'nope', messages: hi }).result(), 'NotFound')
  await rejects(engine.generate({ model: 'embedder', messages: hi }).result(), 'Unsupported')
  await rejects(engine.embed({ model: 'chat', texts: 'a' }), 'Unsupported')
})

test('an error message never holds a text', async () => {
  await using engine = await open({ limits: { textBytes: 8 } })
  const secret = 'kumquat kumquat'
  for (const start of [
    () => engine.embed({ model: 'embedder', texts: secret }),
    () => engine.embed({ model: 'embedder', texts: wrong({ [secret]: secret }) }),
    () => engine.embed({ model: 'embedder', texts: 'a', promptName: wrong([secret]) }),
    () => engine.generate({ model: 'chat', messages: wrong([secret]) }).result(),
    () => engine.generate({ model: 'chat', messages: [{ role: secret, content: 'x' }] }).result(),
  ]) {
    const error = await rejects(start(), 'InvalidArgument')
    assert.ok(!error.message.includes('kumquat'), error.message)
  }
})

test('bad options of engines and pools', async () => {
  for (const options of [{ budgetBytes: 0 }, { budgetBytes: NaN }, { budgetBytes: -1 }, { capacity: 0 }, { idle: 'later' }, 5,
    { budget: 5 }, { limits: { text: 1 } }, { limits: { textBytes: -1 } }]) {
    await rejects(openFakeEngine([], wrong(options)), 'InvalidArgument')
    await rejects(Engine.open(wrong(options)), 'InvalidArgument')
  }
  throws(() => new Pool(wrong({})), 'InvalidArgument', /budgetBytes is missing/)
  throws(() => new Pool({ budgetBytes: 0 }), 'InvalidArgument')
  const pool = new Pool({ budgetBytes: 100 })
  for (const key of ['', 'x', ':', 'a:', ':b', 5, undefined, 'a:\ud800']) {
    throws(() => pool.pin(wrong(key)), 'InvalidArgument')
    await rejects(pool.evict(wrong(key)), 'InvalidArgument')
  }
  throws(() => pool.setBudget(NaN), 'InvalidArgument')
  throws(() => pool.setBudget(wrong('5')), 'InvalidArgument')
  throws(() => pool.plan('a:b', -1), 'InvalidArgument')
  throws(() => pool.endUse(wrong({})), 'InvalidArgument')
  await rejects(pool.admit(wrong({ key: 'a:b', cost: 5 })), 'InvalidArgument', /load is missing/)
  await rejects(pool.admit({ key: 'chat:', cost: 5, load: () => {} }), 'InvalidArgument')
  await pool.close()
})

test('a closed engine refuses everything with Closed', async () => {
  const engine = await open()
  const stream = engine.generate({ model: 'long', messages: hi })
  await stream.next()
  await engine.close()
  await rejects(stream.result(), 'Closed')
  await rejects(engine.embed({ model: 'embedder', texts: 'a' }), 'Closed')
  await rejects(engine.generate({ model: 'chat', messages: hi }).result(), 'Closed')
  await rejects(engine.load('chat'), 'Closed')
  await rejects(engine.pause(), 'Closed')
  await rejects(engine.pool.evict('chat:chat'), 'Closed')
  assert.equal(engine.availability, 'closed')
  assert.deepEqual(await engine.close(), { stopped: true })
})

test('a panic in the addon is an error, and the addon goes on', async () => {
  throws(panic, 'Internal')
  await using engine = await open()
  assert.equal((await engine.embed({ model: 'embedder', texts: 'a' })).dimensions, 8)
})

test('an error is an Error with name, code, message and cause', () => {
  const error = new HobError('Busy', 'later', { cause: 5 })
  assert.ok(error instanceof Error)
  assert.equal(String(error), 'HobError: later')
  assert.equal(error.code, 'Busy')
  assert.equal(error.cause, 5)
})
