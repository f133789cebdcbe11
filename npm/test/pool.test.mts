// The pool: the account, leases, a host's own residents, events.
import assert from 'node:assert/strict'
import test from 'node:test'

import { HobError, Pool } from 'hob'
import type { PoolEvent } from 'hob'

import { hi, open, rejects, tick } from './support.mjs'

test('a host resident is loaded, counted, used, evicted', async () => {
  const pool = new Pool({ budgetBytes: 100 })
  const table = new Map<number, string>()
  const admission = {
    key: 'onnx:whisper' as const,
    cost: () => Promise.resolve(40),
    load: async ({ token, progress }: { token: number; progress: (fraction: number) => void }) => {
      await tick(1)
      progress(0.5)
      table.set(token, 'session')
      return 30
    },
    release: (token: number) => {
      table.delete(token)
    },
  }
  const { token, origin, lease } = await pool.admit({ ...admission, inUse: true })
  assert.equal(origin, 'loaded')
  assert.equal(table.get(token), 'session')
  assert.equal(lease?.token, token)
  assert.equal(pool.status().usedBytes, 30)
  assert.equal(pool.status().entries[0]?.estimatedBytes, 40)
  await rejects(pool.evict('onnx:whisper'), 'InUse')
  assert.ok(pool.endUse(lease!))
  assert.ok(!lease!.end())
  assert.equal((await pool.admit({ ...admission, load: () => assert.fail('it is resident') })).origin, 'hit')
  {
    using again = pool.beginUse('onnx:whisper')
    assert.equal(again?.token, token)
    assert.equal(pool.status().entries[0]?.uses, 1)
  }
  assert.equal(pool.status().entries[0]?.uses, 0)
  assert.deepEqual(await pool.evict('onnx:whisper'), { token, freedBytes: 30 })
  assert.equal(table.size, 0)
  assert.equal(pool.beginUse('onnx:whisper'), undefined)
  await rejects(pool.evict('onnx:whisper'), 'NotFound')
  await pool.close()
})

test('a newcomer waits for the release of its victim', async () => {
  const pool = new Pool({ budgetBytes: 100 })
  const order: string[] = []
  const admit = (name: string) =>
    pool.admit({
      key: `mine:${name}`,
      cost: 80,
      load: () => void order.push(`load ${name}`),
      release: async () => {
        await tick(5)
        order.push(`release ${name}`)
      },
    })
  await admit('a')
  assert.equal(pool.plan('mine:b', 80).verdict, 'evicts')
  assert.deepEqual(pool.plan('mine:b', 80).evict, ['mine:a'])
  await admit('b')
  assert.deepEqual(order, ['load a', 'release a', 'load b'])
  await pool.close()
  assert.deepEqual(order, ['load a', 'release a', 'load b', 'release b'])
})

test('models and a host resident share one account', async () => {
  await using engine = await open({ budgetBytes: 150 })
  const { pool } = engine
  await engine.generate({ model: 'chat', messages: hi }).result()
  let released = 0
  await pool.admit({ key: 'mine:big', cost: 120, load: () => {}, release: () => void released++ })
  assert.deepEqual(pool.status().entries.map((entry) => entry.key), ['mine:big'])
  await engine.generate({ model: 'chat', messages: hi }).result()
  assert.equal(released, 1)
  await rejects(pool.admit({ key: 'mine:big', cost: 120, load: () => {}, noRoom: 'refuse', pinned: true }).then(async () => {
    await engine.load('chat', {})
    return pool.admit({ key: 'mine:more', cost: 120, load: () => {}, noRoom: 'refuse' })
  }), 'BudgetExceeded')
})

test('callbacks that throw leave the pool usable and the account exact', async () => {
  const pool = new Pool({ budgetBytes: 100 })
  const thrown = new Error('no such session')
  const failing: (() => unknown)[] = [
    () => { throw thrown },
    () => Promise.reject(thrown),
    // eslint-disable-next-line @typescript-eslint/no-throw-literal
    () => { throw 'a text' },
    () => { throw undefined },
    () => { throw Object.create(null) },
    () => -5,
    () => 'many',
    () => NaN,
  ]
  for (const fail of failing) {
    const load = fail as () => number
    const error = await rejects(pool.admit({ key: 'mine:a', cost: 10, load }), 'Callback')
    if (fail === failing[0]) {
      assert.equal(error.cause, thrown)
      assert.match(error.message, /no such session/)
    }
    await rejects(pool.admit({ key: 'mine:b', cost: load, load: () => assert.fail('it loaded') }), 'Callback')
    assert.equal(pool.status().usedBytes, 0)
  }
  await rejects(pool.admit({ key: 'mine:c', cost: (() => {}) as () => number, load: () => {} }), 'InvalidArgument')
  await pool.admit({ key: 'mine:d', cost: 10, load: () => {}, release: () => { throw thrown } })
  const failed = await rejects(pool.evict('mine:d'), 'Callback')
  assert.match(failed.message, /no such session/)
  assert.equal(pool.status().usedBytes, 0)
  assert.equal(pool.status().counters.failedReleases, 1)
  await pool.admit({ key: 'mine:e', cost: 10, load: () => {} })
  await pool.close()
})

test('a progress function that throws stops the load', async () => {
  await using engine = await open()
  const thrown = new Error('no more')
  const onProgress = () => { throw thrown }
  const error = await rejects(engine.load('chat', { onProgress }), 'Callback')
  assert.equal(error.cause, thrown)
  assert.equal((await engine.load('chat')).id, 'chat')
})

test('a load that nobody waits for is told by its signal', async () => {
  const pool = new Pool({ budgetBytes: 100 })
  const controller = new AbortController()
  let told: unknown
  const admitted = pool.admit({
    key: 'mine:a',
    cost: 10,
    signal: controller.signal,
    load: ({ signal }) =>
      new Promise((_, reject) => {
        signal.addEventListener('abort', () => {
          told = signal.reason
          reject(new Error('stopped'))
        })
        controller.abort()
      }),
  })
  await rejects(admitted, 'Cancelled')
  while (pool.status().pendingBytes > 0) await tick(1)
  assert.ok(told instanceof HobError && told.code === 'Cancelled')
  await pool.admit({ key: 'mine:a', cost: 10, load: () => {} })
  await pool.close()
})

test('a callback may call the pool', async () => {
  const pool = new Pool({ budgetBytes: 100 })
  await pool.admit({
    key: 'mine:outer',
    cost: 50,
    load: async () => {
      await pool.admit({ key: 'mine:inner', cost: 40, load: () => void pool.status() })
    },
    release: () => void pool.status(),
  })
  assert.equal(pool.status().entries.length, 2)
  await pool.close()
})

test('events come in order, end with the pool, and a slow reader is told what it missed', async () => {
  const pool = new Pool({ budgetBytes: 100 })
  const all: PoolEvent[] = []
  const reading = (async () => {
    for await (const event of pool.events()) all.push(event)
  })()
  const slow = pool.events({ capacity: 1 })
  const { token } = await pool.admit({ key: 'mine:a', cost: 10, load: ({ progress }) => progress(0.5), release: () => {} })
  pool.setBudget(200)
  await pool.evict('mine:a')
  const first = await slow.next()
  assert.equal(first.value?.event, 'missed')
  await slow.return()
  assert.deepEqual(await slow.next(), { done: true, value: undefined })
  await pool.close()
  await reading
  const names = all.map((event) => event.event)
  assert.deepEqual(names.filter((name) => name !== 'loadProgress'),
    ['loadStarted', 'loaded', 'budgetChanged', 'unloadStarted', 'unloaded', 'closed'])
  const gone = all.find((event) => event.event === 'unloaded')
  assert.ok(gone?.event === 'unloaded')
  assert.deepEqual({ ...gone, ms: 0 }, { event: 'unloaded', key: 'mine:a', token, reason: 'requested', bytes: 10, ms: 0 })
})

test('waiting for events keeps nothing alive; return ends the wait', async () => {
  const pool = new Pool({ budgetBytes: 100 })
  const events = pool.events()
  const waiting = events.next()
  await events.return()
  assert.deepEqual(await waiting, { done: true, value: undefined })
  await pool.close()
})

test('pins, idleness, charges, trims, room', async () => {
  const pool = new Pool({ budgetBytes: 100, idle: 'never' })
  for (const name of ['a', 'b', 'c']) await pool.admit({ key: `mine:${name}`, cost: 30, load: () => {} })
  assert.ok(pool.pin('mine:a'))
  assert.ok(!pool.pin('mine:z'))
  const charge = pool.charge(30)
  assert.equal(pool.status().externalBytes, 30)
  const trimmed = await pool.trim()
  assert.deepEqual(trimmed.evicted, ['mine:b'])
  charge.set(0)
  assert.ok(charge.end())
  const room = await pool.makeRoom(70)
  assert.deepEqual(room, { evicted: ['mine:c'], freedBytes: 30, fits: true, errors: [] })
  assert.equal(pool.status().entries[0]?.idle, 'never')
  assert.ok(pool.setIdle('mine:a', 60))
  assert.equal(pool.status().entries[0]?.idle, 60)
  assert.equal(pool.status().entries[0]?.unloadInMs, undefined)
  assert.ok(pool.unpin('mine:a'))
  assert.ok((pool.status().entries[0]?.unloadInMs ?? 0) > 50_000)
  assert.equal(pool.accelerateIdle(0), 1)
  await tick(5)
  await pool.sweep()
  assert.equal(pool.peek('mine:a'), undefined)
  const { token } = await pool.admit({ key: 'mine:d', cost: 10, load: () => {} })
  assert.ok(pool.setMeasured(token, 20))
  assert.ok(pool.touch('mine:d'))
  assert.equal(pool.forget('mine:d'), 20)
  pool.setDefaultIdle('immediately')
  await pool.admit({ key: 'mine:e', cost: 10, load: () => {}, inUse: true }).then(({ lease }) => lease?.end())
  while (pool.status().entries.length > 0) await tick(1)
  await pool.close()
  assert.ok(pool.closed)
})
