// Every option of every verb, with values that no type allows and some that are alive: what comes is a result or a HobError, at once or
// in time, and the engine works on (hazards L5 to L10, and the list of bad input).
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import test from 'node:test'
import { MessageChannel, receiveMessageOnPort } from 'node:worker_threads'

import { CancelToken, Engine, HobError, Pool } from 'hob'
import { held, openFakeEngine, script } from 'hob/testing'

import { hi, isBun, MODELS, open, rejects, throws, tick } from './support.mjs'

// biome-ignore lint: wrong on purpose
type Any = any
const wrong = (value: unknown): Any => value

const thrown = () => {
  throw new Error('plum')
}

/** A proxy on whose every access something is thrown. */
function grumpy(target: object): object {
  const trap = () => thrown
  return new Proxy(target, new Proxy({}, { get: trap }))
}

function revoked(target: object): object {
  const { proxy, revoke } = Proxy.revocable(target, {})
  revoke()
  return proxy
}

function detached(): Float32Array {
  const array = new Float32Array(4)
  structuredClone(array.buffer, { transfer: [array.buffer] })
  return array
}

function shrunk(): Uint32Array {
  const buffer = new (ArrayBuffer as Any)(16, { maxByteLength: 64 })
  const array = new Uint32Array(buffer)
  buffer.resize?.(0)
  return array
}

const VALUES: [string, () => unknown][] = [
  ['null', () => null],
  ['NaN', () => NaN],
  ['-1', () => -1],
  ['-0', () => -0],
  ['1.5', () => 1.5],
  ['2**53', () => 2 ** 53],
  ['-Infinity', () => -Infinity],
  ['MAX_VALUE', () => Number.MAX_VALUE],
  ['a bigint', () => 1n],
  ['true', () => true],
  ['empty', () => ''],
  ['a megabyte', () => 'kumquat '.repeat(1 << 17)],
  ['a zero byte', () => 'a\0b'],
  ['a lone surrogate', () => 'a\udc00'],
  ['a symbol', () => Symbol('kumquat')],
  ['a function', () => thrown],
  ['a class', () => class Kumquat {}],
  ['a list', () => []],
  ['a list of everything', () => [undefined, null, 1n, Symbol('a'), thrown, {}, '\ud800']],
  ['a sparse list', () => new Array(1e6)],
  ['a frozen list', () => Object.freeze(['a'])],
  ['a proxy of a list', () => new Proxy(['a'], {})],
  ['an object', () => ({})],
  ['no prototype', () => Object.create(null)],
  ['a date', () => new Date(NaN)],
  ['a map', () => new Map([['a', 1]])],
  ['a boxed string', () => new String('a')],
  ['a boxed number', () => new Number(1)],
  ['it contains itself', () => { const list: unknown[] = []; list.push(list); return list }],
  ['toString and valueOf throw', () => ({ toString: thrown, valueOf: thrown, [Symbol.toPrimitive]: thrown, toJSON: thrown })],
  ['a getter throws', () => ({ get aborted() { return thrown() }, get role() { return thrown() }, addEventListener: thrown })],
  ['an item throws', () => Object.defineProperty(['a'], 0, { get: thrown })],
  ['a proxy throws', () => grumpy({})],
  ['a list by a proxy that throws', () => grumpy([])],
  ['a function by a proxy that throws', () => grumpy(() => {})],
  ['revoked', () => revoked({})],
  ['a revoked list', () => revoked([])],
  ['a promise', () => Promise.resolve(1)],
  ['a thenable that throws', () => ({ then: thrown })],
  ['detached', detached],
  ['shrunk', shrunk],
  ['shared', () => new Float32Array(new SharedArrayBuffer(16))],
  ['numbers', () => new Uint32Array([1, 2, 3])],
  ['floats', () => new Float64Array([0.5, NaN])],
  ['looks like a signal', () => ({ aborted: false, addEventListener: thrown, removeEventListener: thrown })],
  ['looks like an aborted signal', () => ({ aborted: true, get reason() { return thrown() }, addEventListener: thrown })],
  ['looks like a token', () => Object.create(CancelToken.prototype)],
]

const COMMON = ['model', 'signal', 'cancel', 'timeoutMs', 'load', 'idle', 'modelIdle', 'pinned', 'unknown', '__proto__']
const PROMPT = ['messages', 'prompt', 'promptTokens']
const RENDER = ['tools', 'documents', 'enableThinking', 'addGenerationPrompt', 'templateVariables']

/** Each verb: a request that works, and the names of its options. */
const VERBS: Record<string, [Record<string, unknown>, string[]]> = {
  embed: [{ model: 'embedder', texts: ['a'] }, [...COMMON, 'texts', 'promptName', 'dimensions', 'normalize', 'truncate']],
  rerank: [
    { model: 'reranker', query: 'a', documents: ['b'] },
    [...COMMON, 'query', 'documents', 'instruct', 'topN', 'unsorted', 'truncate'],
  ],
  score: [{ model: 'chat', prompt: 'a', completion: 'b' }, [...COMMON, ...PROMPT, 'completion']],
  decide: [{ model: 'chat', prompt: 'a', answers: ['b', 'c'] }, [...COMMON, ...PROMPT, ...RENDER, 'answers', 'decision']],
  generate: [
    { model: 'chat', prompt: 'a', maxTokens: 2 },
    [
      ...COMMON, ...PROMPT, ...RENDER, 'maxTokens', 'stop', 'temperature', 'topK', 'topP', 'minP', 'repetitionPenalty',
      'repetitionWindow', 'seed', 'logprobs', 'truncate', 'coalesceTokens', 'coalesceMs', 'promptCache', 'onCancel',
    ],
  ],
}

/** What it ends with is a value or a HobError without a user's word in it. */
async function tame(what: string, start: () => unknown): Promise<void> {
  let promise: unknown
  try {
    promise = start()
  } catch (error) {
    assert.fail(`${what} threw ${String(error)} instead of rejecting`)
  }
  const late = new Promise<never>((_, reject) => { setTimeout(() => reject(new Error('it never ended')), 30_000).unref() })
  try {
    await Promise.race([promise, late])
  } catch (error) {
    known(what, error)
  }
}

function known(what: string, error: unknown): void {
  assert.ok(error instanceof HobError, `${what} gave ${String((error as Error)?.stack ?? error).slice(0, 500)}`)
  assert.ok(!error.message.includes('kumquat'), `${what}: ${error.message.slice(0, 300)}`)
  assert.ok(error.code !== 'Internal', `${what}: ${error.message}`)
}

for (const [verb, [request, names]] of Object.entries(VERBS)) {
  test(`${verb}: every option with every wrong value is a result or a HobError`, { timeout: 120_000 }, async () => {
    await using engine = await open({ budgetBytes: 10_000 })
    const run = (wanted: unknown): unknown => verb === 'generate' ? engine.generate(wrong(wanted)).result() : wrong(engine)[verb](wanted)
    for (const [name, make] of VALUES) {
      await tame(`${verb}(${name})`, () => run(make()))
      for (const option of names) {
        await tame(`${verb}: ${option} is ${name}`, () => run({ ...request, [option]: make() }))
        const living = Object.defineProperty({ ...request }, option, { enumerable: true, configurable: true, get: thrown })
        if (name === 'null') await tame(`${verb}: reading ${option} throws`, () => run(living))
      }
    }
    for (const load of ['kind', 'float', 'dequantize', 'pooling', 'manifest']) {
      for (const [name, make] of VALUES) await tame(`${verb}: load.${load} is ${name}`, () => run({ ...request, load: { [load]: make() } }))
    }
    await tame('a proxy of a good request', () => run(new Proxy(request, {})))
    assert.ok(await run(request))
    assert.equal(engine.requests, 0)
  })
}

test('every other call with every wrong value is a result or a HobError', { timeout: 120_000 }, async () => {
  await using engine = await open({ budgetBytes: 10_000 })
  const pool = new Pool({ budgetBytes: 1000 })
  const options = {
    open: ['budgetBytes', 'idle', 'noRoom', 'capacity', 'queue', 'promptCacheBytes', 'stuckAfterMs', 'closeTimeoutMs', 'drainAfterRelease', 'limits'],
    pool: ['budgetBytes', 'physicalLimitBytes', 'idle', 'noRoom', 'maxWaiting'],
    admit: ['key', 'cost', 'load', 'release', 'idle', 'useIdle', 'pinned', 'inUse', 'replace', 'noRoom', 'signal', 'cancel', 'timeoutMs'],
  }
  let number = 0
  for (const [name, make] of VALUES) {
    for (const verb of ['load', 'inspect', 'estimate', 'capabilities']) {
      await tame(`${verb}(${name})`, () => wrong(engine)[verb](make()))
      await tame(`${verb}(model, ${name})`, () => wrong(engine)[verb]('chat', make()))
    }
    for (const option of [...COMMON, 'onProgress']) await tame(`load: ${option} is ${name}`, () => engine.load('chat', wrong({ [option]: make() })))
    for (const option of options.open) {
      await tame(`open: ${option} is ${name}`, async () => (await openFakeEngine(MODELS, wrong({ [option]: make() }))).close())
    }
    await tame(`openFakeEngine(${name})`, async () => (await openFakeEngine(wrong(make()))).close())
    for (const option of options.admit) {
      const key = `mine:${number++}`
      const admission = { key, cost: 1, load: () => {}, [option]: make() }
      await tame(`admit: ${option} is ${name}`, () => pool.admit(wrong(admission)).then(({ lease }) => lease?.end()))
    }
    for (const gives of ['cost', 'load', 'release']) {
      const key = `mine:${number++}` as const
      await tame(`${gives} gives ${name}`, () => pool.admit(wrong({ key, cost: 1, load: () => {}, [gives]: () => make() })))
      await pool.evict(key).catch(() => {})
    }
    await tame(`evict(${name})`, () => pool.evict(wrong(make())))
    await tame(`makeRoom(${name})`, () => pool.makeRoom(wrong(make())))
    const direct: [string, (value: unknown) => unknown][] = [
      ...options.pool.map((option): [string, (value: Any) => unknown] => [`new Pool: ${option}`, (value) => new Pool(wrong({ budgetBytes: 1, [option]: value }))]),
      ...['beginUse', 'peek', 'touch', 'forget', 'pin', 'unpin', 'setDefaultIdle', 'accelerateIdle', 'setBudget', 'charge', 'endUse', 'events']
        .map((verb): [string, (value: Any) => unknown] => [verb, (value) => wrong(pool)[verb](value)]),
      ['setIdle', (value: Any) => pool.setIdle('mine:a', value)],
      ['setMeasured', (value: Any) => pool.setMeasured(1, value)],
      ['setMeasured of', (value: Any) => pool.setMeasured(value, 1)],
      ['plan', (value: Any) => pool.plan('mine:a', value)],
      ['plan of', (value: Any) => pool.plan(value, 1)],
      ['withDeadline', (value: Any) => new CancelToken().withDeadline(value)],
      ['script', (value: Any) => script(engine, value, value)],
      ['script of', (value: Any) => script(value, 'release', 'step')],
    ]
    for (const [what, act] of direct) {
      try {
        act(make())
      } catch (error) {
        known(`${what}(${name})`, error)
      }
    }
    pool.setBudget(1000)
  }
  assert.ok((await engine.embed({ model: 'embedder', texts: 'a' })).data.length > 0)
  // Releases that failed are told of.
  await rejects(pool.close(), 'Callback', /releases failed/)
})

test('what a callback does wrong is its own admission\'s fault only', { timeout: 60_000 }, async () => {
  const pool = new Pool({ budgetBytes: 100 })
  for (const bad of [thrown, () => Promise.reject(wrong(undefined)), () => ({ then: thrown }), () => { throw wrong({ message: {} }) },
    () => { throw Object.assign(new Error(), { message: Symbol('x') }) }, () => { throw grumpy(new Error()) }, () => -1, () => 2 ** 60]) {
    const error = await rejects(pool.admit({ key: 'mine:a', cost: 1, load: wrong(bad) }), 'Callback')
    assert.ok(!error.message.includes('\n'))
    await rejects(pool.admit({ key: 'mine:a', cost: wrong(bad), load: () => {} }), 'Callback')
    assert.equal(pool.status().usedBytes, 0)
  }
  // One that never settles holds its bytes, and nobody else.
  const signal = AbortSignal.timeout(20)
  await rejects(pool.admit({ key: 'mine:stuck', cost: 1, load: () => new Promise(() => {}), signal }), 'Timeout')
  assert.equal((await pool.admit({ key: 'mine:b', cost: 1, load: () => {} })).origin, 'loaded')
})

test('a callback may end the very thing that calls it', { timeout: 60_000 }, async () => {
  const engine = await open()
  const closing: Promise<unknown>[] = []
  const key = 'mine:a'
  const load = () => { closing.push(engine.close(), engine.close(), engine.pool.close()) }
  const ended = await engine.pool.admit({ key, cost: 1, load, release: () => { closing.push(engine.close()) } }).catch((error: HobError) => error.code)
  assert.ok(ended === 'Closed' || typeof ended === 'object', String(ended))
  assert.deepEqual((await Promise.all(closing))[0], { stopped: true })
  const other = await open()
  await rejects(other.load('chat', { onProgress: () => { void other.close() } }).then(() => other.embed({ model: 'embedder', texts: 'a' })), 'Closed')
})

test('signals of every kind: aborted, any, timed, aborted with odd reasons', async () => {
  await using engine = await open()
  const reasons = [undefined, null, 0, 'why', Symbol('why'), grumpy(new Error())]
  for (const reason of reasons) {
    const signal = AbortSignal.abort(reason)
    const error = await rejects(engine.embed({ model: 'embedder', texts: 'a', signal }), 'Cancelled')
    if (reason !== undefined) assert.ok(Object.is(error.cause, reason))
    await rejects(engine.generate({ model: 'chat', messages: hi, signal }).result(), 'Cancelled')
  }
  const controller = new AbortController()
  const any = AbortSignal.any([AbortSignal.timeout(60_000), controller.signal])
  script(engine, 'hold', 'embed')
  const pending = engine.embed({ model: 'embedder', texts: 'a', signal: any })
  await held(engine, 'embed')
  controller.abort()
  script(engine, 'release', 'embed')
  await rejects(pending, 'Cancelled')
})

test('a stream is read once, whoever reads and however it ends', async () => {
  await using engine = await open()
  const stream = engine.generate({ model: 'chat', messages: hi })
  let text = ''
  for await (const piece of stream.text()) text += piece
  assert.equal(text, 'Hello, world!')
  for await (const _ of stream) assert.fail('it was read already')
  await rejects(stream.result(), 'Closed')
  assert.deepEqual(await stream.return(), { done: true, value: undefined })
  await stream[Symbol.asyncDispose]()

  // Left before its first event, during a wait, and twice.
  const left = engine.generate({ model: 'long', messages: hi })
  assert.deepEqual(await left.return(), { done: true, value: undefined })
  assert.deepEqual(await left.next(), { done: true, value: undefined })
  script(engine, 'hold', 'prefill')
  const waited = engine.generate({ model: 'long', messages: hi })
  const next = [waited.next(), waited.next()]
  await held(engine, 'prefill')
  await waited.return()
  assert.deepEqual(await Promise.all(next), [{ done: true, value: undefined }, { done: true, value: undefined }])
  waited.cancel()
  waited.stop()
  script(engine, 'release', 'prefill')

  // What a reader throws passes through, and ends the generation.
  const reader = async () => {
    for await (const _ of engine.generate({ model: 'long', messages: hi })) thrown()
  }
  await assert.rejects(reader(), { message: 'plum' })
  while (engine.requests > 0) await tick(1)
})

test('results are plain values: cloned, and moved to another thread', async () => {
  await using engine = await open()
  const vectors = await engine.embed({ model: 'embedder', texts: ['a', 'b'] })
  assert.deepEqual(structuredClone(vectors), vectors)
  const { port1, port2 } = new MessageChannel()
  const before = vectors.embeddings[1]![0]
  port1.postMessage(vectors.data, [vectors.data.buffer as ArrayBuffer])
  const { message } = receiveMessageOnPort(port2) as { message: Float32Array }
  assert.equal(message[vectors.dimensions], before)
  assert.equal(vectors.data.length, 0)
  port1.close()
  // Large vectors are the addon's memory where the runtime lends it.
  await using big = await openFakeEngine([{ name: 'big', kind: 'embedder', bytes: 1, dimensions: 3000 }], { budgetBytes: 10 })
  const large = await big.embed({ model: 'big', texts: ['a', 'b'] })
  assert.deepEqual(structuredClone(large), large)
  // Bun does not let go of memory that it was lent.
  const move = () => structuredClone(large.data, { transfer: [large.data.buffer as ArrayBuffer] })
  if (isBun) assert.throws(move, { name: 'DataCloneError' })
  else assert.equal(move().length, 6000)
  for (const value of [await engine.rerank({ model: 'reranker', query: 'a', documents: ['b'] }), engine.pool.status(),
    await engine.generate({ model: 'chat', messages: hi, temperature: 1, logprobs: 1 }).result()]) assert.deepEqual(structuredClone(value), value)
})

test('disposing twice, in any order, and using what is disposed of', async () => {
  const engine = await open()
  const { pool } = engine
  const lease = (await pool.admit({ key: 'mine:a', cost: 1, load: () => {}, inUse: true })).lease!
  const charge = pool.charge(1)
  const pause = await pool.pause()
  await Promise.all([engine[Symbol.asyncDispose](), engine[Symbol.asyncDispose](), pool[Symbol.asyncDispose](), engine.close()])
  for (const thing of [lease, charge, pause, lease, charge, pause]) thing[Symbol.dispose]()
  assert.equal(lease.end(), false)
  assert.ok(lease.detached)
  await rejects(engine.inspect('nope').then(() => engine.load('chat')), 'NotFound')
  throws(() => charge.set(wrong('x')), 'InvalidArgument')
})

test('the package is one, imported or required, and nothing of it can be made by hand', async () => {
  const required = createRequire(import.meta.url)('hob') as typeof import('hob')
  assert.equal(required.Engine, Engine)
  assert.equal(required.HobError, HobError)
  const fake = Object.create(Engine.prototype) as Engine
  await rejects(fake.embed({ model: 'embedder', texts: 'a' }), 'InvalidArgument')
  await rejects(new (wrong(Engine))({}).close(), 'InvalidArgument')
})
