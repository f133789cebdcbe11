// Giving up is bounded in every phase (invariant 8), and leaves nothing behind.
import assert from 'node:assert/strict'
import test from 'node:test'

import { CancelToken } from 'hob'
import { count, held, script } from 'hob/testing'
import type { FakePoint } from 'hob/testing'

import { hi, open, rejects, tick } from './support.mjs'

test('a signal that is aborted already starts nothing', async () => {
  await using engine = await open()
  const reason = new Error('changed my mind')
  const signal = AbortSignal.abort(reason)
  const error = await rejects(engine.embed({ model: 'embedder', texts: 'a', signal }), 'Cancelled')
  assert.equal(error.cause, reason)
  await rejects(engine.generate({ model: 'chat', messages: hi, signal }).next(), 'Cancelled')
  await rejects(engine.load('chat', { signal }), 'Cancelled')
  await rejects(engine.pool.admit({ key: 'mine:a', cost: 1, load: () => assert.fail('it loaded'), signal }), 'Cancelled')
  assert.equal(engine.pool.status().entries.length, 0)
})

for (const point of ['load', 'loadStep', 'prefill', 'step'] as FakePoint[]) {
  test(`abort a generation at ${point}`, async () => {
    await using engine = await open()
    const controller = new AbortController()
    script(engine, 'hold', point)
    const result = engine.generate({ model: 'long', messages: hi, signal: controller.signal }).result()
    await held(engine, point)
    controller.abort()
    script(engine, 'release', point)
    const error = await rejects(result, 'Cancelled')
    assert.equal(error.cause, controller.signal.reason)
    assert.equal((await engine.generate({ model: 'chat', messages: hi }).result()).text, 'Hello, world!')
    assert.ok(engine.pool.status().entries.every((entry) => entry.uses === 0))
  })
}

for (const [verb, point] of [['embed', 'embed'], ['rerank', 'rerank'], ['score', 'score'], ['decide', 'score']] as const) {
  test(`abort ${verb} while it computes, and while it waits behind that`, async () => {
    await using engine = await open()
    const start = (signal: AbortSignal): Promise<unknown> => {
      if (verb === 'embed') return engine.embed({ model: 'embedder', texts: ['a'], signal })
      if (verb === 'rerank') return engine.rerank({ model: 'reranker', query: 'q', documents: ['a'], signal })
      if (verb === 'score') return engine.score({ model: 'chat', prompt: 'a', completion: 'b', signal })
      return engine.decide({ model: 'chat', prompt: 'a', answers: ['b', 'c'], signal })
    }
    const [first, second] = [new AbortController(), new AbortController()]
    script(engine, 'hold', point)
    const running = start(first.signal)
    await held(engine, point)
    const waiting = start(second.signal)
    second.abort()
    first.abort()
    script(engine, 'release', point)
    await Promise.all([rejects(running, 'Cancelled'), rejects(waiting, 'Cancelled')])
    await start(new AbortController().signal)
  })
}

test('abort while waiting for room', async () => {
  await using engine = await open({ budgetBytes: 150 })
  const { lease } = await engine.pool.admit({ key: 'mine:a', cost: 100, load: () => {}, inUse: true })
  const controller = new AbortController()
  const waiting = engine.load('chat', { signal: controller.signal })
  while (engine.pool.status().waiting === 0) await tick(1)
  controller.abort()
  await rejects(waiting, 'Cancelled')
  assert.equal(engine.pool.status().waiting, 0)
  lease?.end()
  await engine.load('chat')
})

test('abort while paused and while a load is awaited by others too', async () => {
  await using engine = await open()
  script(engine, 'hold', 'load')
  const controller = new AbortController()
  const leaves = engine.load('chat', { signal: controller.signal })
  await held(engine, 'load')
  const stays = engine.load('chat')
  while (engine.pool.status().entries[0]?.uses !== 2) await tick(1)
  controller.abort()
  await rejects(leaves, 'Cancelled')
  script(engine, 'release', 'load')
  assert.equal((await stays).id, 'chat')
})

test('a timeout and a timeout signal are Timeout', async () => {
  await using engine = await open()
  script(engine, 'hold', 'load')
  await rejects(engine.load('chat', { timeoutMs: 20 }), 'Timeout')
  await rejects(engine.embed({ model: 'embedder', texts: 'a', signal: AbortSignal.timeout(20) }), 'Timeout')
  const token = new CancelToken()
  const stream = engine.generate({ model: 'chat', messages: hi, cancel: token.withDeadline(20) })
  await rejects(stream.result(), 'Timeout')
  assert.equal(token.cancelled, false)
  script(engine, 'release', 'load')
})

test('a cancel token ends what was given it or its children', async () => {
  await using engine = await open()
  const token = new CancelToken()
  const child = token.child()
  script(engine, 'hold', 'load')
  const all = [
    engine.load('chat', { cancel: token }),
    engine.embed({ model: 'embedder', texts: 'a', cancel: child }),
    engine.generate({ model: 'other', messages: hi, cancel: child }).result(),
  ].map((promise) => rejects(promise, 'Cancelled'))
  assert.equal(token.reason, undefined)
  assert.ok(token.cancel())
  assert.ok(!token.cancel())
  assert.equal(child.reason, 'cancelled')
  script(engine, 'release', 'load')
  await Promise.all(all)
  await rejects(engine.embed({ model: 'embedder', texts: 'a', cancel: token }), 'Cancelled')
})

test('a cancel reaches a request that also has a timeout, and one below a token that nobody holds any more', async () => {
  await using engine = await open()
  const controller = new AbortController()
  const token = new CancelToken()
  script(engine, 'hold', 'load')
  const common = { model: 'embedder', texts: 'a', timeoutMs: 3_600_000 }
  const both = { ...common, signal: controller.signal }
  const all = [
    engine.embed({ ...common, cancel: token }),
    engine.embed({ ...common, cancel: token.child().withDeadline(3_600_000).child() }),
    engine.embed({ ...both, cancel: token.child() }),
    engine.rerank({ model: 'embedder', query: 'a', documents: ['b'], timeoutMs: 3_600_000, signal: controller.signal }),
  ].map((promise) => rejects(promise, 'Cancelled'))
  const aborted = rejects(engine.embed(both), 'Cancelled')
  await held(engine, 'load')
  globalThis.gc?.()
  token.cancel()
  controller.abort()
  script(engine, 'release', 'load')
  await Promise.all([...all, aborted])
})

test('cancel rejects, stop gives what there is (D3)', async () => {
  await using engine = await open()
  for (const how of ['cancel', 'stop', 'signal'] as const) {
    const controller = new AbortController()
    const onCancel = how === 'signal' ? 'stop' : 'abort'
    const stream = engine.generate({ model: 'long', messages: hi, onCancel, signal: controller.signal })
    const first = await stream.next()
    assert.equal(first.value?.type, 'chunk')
    if (how === 'signal') controller.abort()
    else stream[how]()
    if (how === 'cancel') await rejects(stream.result(), 'Cancelled')
    else {
      const rest = await stream.result()
      assert.equal(rest.finish, 'cancelled')
      assert.ok(rest.completionTokens < 3000)
    }
    assert.deepEqual(await stream.next(), { done: true, value: undefined })
  }
})

test('a stream that is left ends its generation, and the next one runs (D1, D4)', async () => {
  await using engine = await open({ capacity: 1 })
  for await (const _ of engine.generate({ model: 'long', messages: hi })) break
  assert.equal((await engine.generate({ model: 'chat', messages: hi }).result()).finish, 'stop')
  {
    await using stream = engine.generate({ model: 'long', messages: hi })
    await stream.next()
  }
  const steps = count(engine, 'step')
  await tick(50)
  assert.ok(count(engine, 'step') <= steps + 1, 'it still steps')
  assert.equal(engine.requests, 0)
})

test('a reader that stops reading pauses its own row only', async () => {
  await using engine = await open()
  const slow = engine.generate({ model: 'long', messages: hi })
  await slow.next()
  assert.equal((await engine.generate({ model: 'chat', messages: hi }).result()).text, 'Hello, world!')
  let text = 1
  for await (const event of slow) if (event.type === 'chunk') text += event.text.length
  assert.equal(text, 3000)
})

test('several who wait for one stream share its events', async () => {
  await using engine = await open()
  const stream = engine.generate({ model: 'chat', messages: hi })
  const all = await Promise.all(Array.from({ length: 20 }, () => stream.next()))
  assert.equal(all.filter((one) => one.done).length, 6)
  assert.equal(all.filter((one) => one.value?.type === 'finished').length, 1)
  assert.equal(all.map((one) => (one.value?.type === 'chunk' ? one.value.text : '')).join(''), 'Hello, world!')
})

test('listeners do not pile up on a signal that lives on', async () => {
  await using engine = await open()
  const { signal } = new AbortController()
  let listeners = 0
  const add = signal.addEventListener.bind(signal)
  const remove = signal.removeEventListener.bind(signal)
  signal.addEventListener = (...given: Parameters<typeof add>) => (listeners++, add(...given))
  signal.removeEventListener = (...given: Parameters<typeof remove>) => (listeners--, remove(...given))
  await engine.embed({ model: 'embedder', texts: 'a', signal })
  await engine.generate({ model: 'chat', messages: hi, signal }).result()
  await rejects(engine.embed({ model: 'nope', texts: 'a', signal }), 'NotFound')
  for await (const _ of engine.generate({ model: 'long', messages: hi, signal })) break
  assert.equal(listeners, 0)
})
