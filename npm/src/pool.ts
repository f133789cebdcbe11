import { cancelToken } from './cancel.js'
import type { CancelToken } from './cancel.js'
import * as checks from './checks.js'
import { check } from './checks.js'
import { theCalls } from './calls.js'
import { attempt, guarded, invalid } from './errors.js'
import type { ErrorCode } from './errors.js'
import { Line } from './line.js'
import type {
  NativeCharge, NativeEvents, NativeEvicted, NativeLease, NativePause, NativePlan, NativePool, NativePoolEvent, NativePoolStatus,
  NativeReclaimed,
} from './native.js'
import type { Idle, NoRoom } from './requests.js'

export type {
  NativeCounters as Counters, NativeEntryStatus as EntryStatus, NativeEvicted as Evicted, NativeFailure as Failure,
  NativeMemory as Memory,
  NativePlan as Plan, NativePoolStatus as PoolStatus, NativeReclaimed as Reclaimed,
} from './native.js'

/** The name of an entry: `chat:…`, `embedder:…`, `reranker:…`, or a kind of the host's own. */
export type Key = `${string}:${string}`

/** What a host's load is given. */
export interface LoadContext {
  /** The admission's number: keep the resident under it. */
  token: number
  /** Aborted when nobody waits for the load any more; it should then end soon. Until it ends its bytes stay reserved. */
  signal: AbortSignal
  /** Reports how far the load is, 0 to 1. */
  progress(fraction: number): void
}

/** A request for residency. */
export interface Admission {
  /** The entry's name. */
  key: Key
  /** Bytes it will take, or a function that finds out; it is asked only when a load is needed. */
  cost: number | (() => number | Promise<number>)
  /**
   * Loads the resident, once there is room, and keeps it where its host keeps such things. Returns the bytes it really takes, or
   * nothing when the cost stands. When it throws it must have let go of everything.
   */
  load(context: LoadContext): number | undefined | void | Promise<number | undefined | void>
  /** Lets go of the resident that was loaded under the token. Called at most once; must not wait for an admission. */
  release?(token: number): void | Promise<void>
  /** The entry's own idle policy. */
  idle?: Idle
  /** The policy of the countdown after this use only; with `inUse`. */
  useIdle?: Idle
  /** Never evict or sweep it. */
  pinned?: boolean
  /** The entry is born in use: the answer has its lease. */
  inUse?: boolean
  /** Forget an existing entry of the key, without its release, and load anew. */
  replace?: boolean
  /** What to do without room, instead of the pool's default. */
  noRoom?: NoRoom
  /** Leave when aborted. The load itself is stopped when the last one who waits for it has left. */
  signal?: AbortSignal
  /** As `signal`. */
  cancel?: CancelToken
  /** Leave after so many milliseconds, with `Timeout`. */
  timeoutMs?: number
}

/** A successful admission. */
export interface Admitted {
  /** The entry's number, never used twice by a pool. */
  token: number
  /** The entry was resident, another's load was under way, or this admission loaded it. */
  origin: 'hit' | 'joined' | 'loaded'
  /** How long the load took, whoever ran it. */
  loadMs: number
  /** The use, with `inUse`. */
  lease?: Lease
}

/** How a pool of one's own is made. */
export interface PoolOptions {
  /** The one budget. */
  budgetBytes: number
  /** Bytes that are never exceeded, whatever the policy. */
  physicalLimitBytes?: number
  /** The idle policy of entries without one of their own. Default 900 seconds. */
  idle?: Idle
  /** What admissions do without room. Default `'wait'`. */
  noRoom?: NoRoom
  /** How many admissions may wait; one more is `Busy`. Default 65,536. */
  maxWaiting?: number
}

/** Why an entry goes. */
export type UnloadReason = 'evicted' | 'idle' | 'requested' | 'forgotten' | 'replaced' | 'closed'

/** What every event of an entry says. */
export interface EntryEvent {
  /** The entry's name. */
  key: Key
}

/** What every event of a load or an unload says. */
export interface ResidentEvent extends EntryEvent {
  /** The number under which its host keeps it. */
  token: number
}

/** An admission stands in line for room. */
export interface WaitingEvent extends EntryEvent {
  /** What happened. */
  event: 'waiting'
  /** What it will take. */
  bytes: number
  /** Admissions that are served before it. */
  ahead: number
}

/** An admission was refused. */
export interface RefusedEvent extends EntryEvent {
  /** What happened. */
  event: 'refused'
  /** What it would have taken. */
  bytes: number
  /** Why. */
  code: ErrorCode
}

/** A load begins: its bytes are on the account. */
export interface LoadStartedEvent extends ResidentEvent {
  /** What happened. */
  event: 'loadStarted'
  /** What it is expected to take. */
  bytes: number
}

/** How far a load is. */
export interface LoadProgressEvent extends ResidentEvent {
  /** What happened. */
  event: 'loadProgress'
  /** 0 to 100. */
  percent: number
}

/** The entry is resident. */
export interface LoadedEvent extends ResidentEvent {
  /** What happened. */
  event: 'loaded'
  /** What it takes. */
  bytes: number
  /** How long the load took, in milliseconds. */
  ms: number
}

/** A load failed; its bytes are off the account. */
export interface LoadFailedEvent extends ResidentEvent {
  /** What happened. */
  event: 'loadFailed'
  /** Why. */
  code: ErrorCode
  /** How long it took to fail, in milliseconds. */
  ms: number
}

/** An entry is let go of: nobody gets a use of it any more. */
export interface UnloadStartedEvent extends ResidentEvent {
  /** What happened. */
  event: 'unloadStarted'
  /** Why. */
  reason: UnloadReason
}

/** An entry is gone and its bytes are off the account. */
export interface UnloadedEvent extends ResidentEvent {
  /** What happened. */
  event: 'unloaded'
  /** Why. */
  reason: UnloadReason
  /** What it took. */
  bytes: number
  /** How long its release took, in milliseconds. */
  ms: number
}

/** A release failed. The entry is gone from the account all the same. */
export interface ReleaseFailedEvent extends ResidentEvent {
  /** What happened. */
  event: 'releaseFailed'
  /** Why. */
  code: ErrorCode
}

/** The budget was changed. */
export interface BudgetEvent {
  /** What happened. */
  event: 'budgetChanged'
  /** The budget now. */
  bytes: number
}

/** The pool was paused, resumed or closed; or something that this version of the package has no name for. */
export interface StateEvent {
  /** What happened. */
  event: 'paused' | 'resumed' | 'closed' | 'unknown'
}

/** The reader was too slow. */
export interface MissedEvent {
  /** What happened. */
  event: 'missed'
  /** How many of the oldest unread events were dropped. */
  missed: number
}

/** Something that happened in a pool. A later version may add events. */
export type PoolEvent =
  | WaitingEvent | RefusedEvent | LoadStartedEvent | LoadProgressEvent | LoadedEvent | LoadFailedEvent | UnloadStartedEvent
  | UnloadedEvent | ReleaseFailedEvent | BudgetEvent | StateEvent | MissedEvent

/** A use of a resident: while it lasts the entry is neither evicted nor swept. Made for `using`. */
export class Lease implements Disposable {
  readonly #native: NativeLease
  // Keeps an engine's pool open.
  readonly #pool: Pool

  /** @internal */
  constructor(native: NativeLease, pool: Pool) {
    this.#native = native
    this.#pool = pool
  }

  /** The entry's number. */
  get token(): number {
    return this.#native.token
  }

  /** Whether the pool has let the entry go (or the use has ended): work begun may finish, nothing new may begin. */
  get detached(): boolean {
    return this.#native.detached || this.#pool.closed
  }

  /** Ends the use. Returns whether this call did; a second one does nothing. */
  end(): boolean {
    return this.#native.end()
  }

  /** Ends the use, at the end of a `using` block. */
  [Symbol.dispose](): void {
    this.#native.end()
  }
}

/** While it lasts, no load starts. Made for `using`. */
export class Pause implements Disposable {
  readonly #native: NativePause

  /** @internal */
  constructor(native: NativePause) {
    this.#native = native
  }

  /** Lets loads go on. Returns whether this call did. */
  resume(): boolean {
    return this.#native.resume()
  }

  /** Ends the pause, at the end of a `using` block. */
  [Symbol.dispose](): void {
    this.#native.resume()
  }
}

/** Bytes of the host's own on a pool's account. Made for `using`. */
export class Charge implements Disposable {
  readonly #native: NativeCharge

  /** @internal */
  constructor(native: NativeCharge) {
    this.#native = native
  }

  /** Changes the charge. Does nothing after the end. */
  set(bytes: number): void {
    guarded(() => this.#native.set(amount('bytes', bytes)))
  }

  /** Takes the bytes off the account. Returns whether this call did. */
  end(): boolean {
    return this.#native.end()
  }

  /** Ends the charge, at the end of a `using` block. */
  [Symbol.dispose](): void {
    this.#native.end()
  }
}

/** What happens in a pool: an async iterator that ends with the pool. Waiting for it does not keep a process alive. */
export class PoolEvents implements AsyncIterableIterator<PoolEvent, undefined>, AsyncDisposable {
  #native: NativeEvents | undefined
  #events: NativePoolEvent[] = []
  readonly #line: Line<IteratorResult<PoolEvent, undefined>>

  /** @internal */
  constructor(native: NativeEvents, id: number) {
    this.#native = native
    this.#line = new Line(id, false, () => this.#take())
  }

  /** The next event. */
  next(): Promise<IteratorResult<PoolEvent, undefined>> {
    return this.#line.next()
  }

  #take(): IteratorResult<PoolEvent, undefined> | undefined {
    if (this.#events.length === 0 && this.#native !== undefined) {
      const events = this.#native.look()
      if (events?.length === 0) this.#native = undefined
      else this.#events = events ?? []
    }
    const event = this.#events.shift()
    if (event !== undefined) return { done: false, value: event as PoolEvent }
    return this.#native === undefined ? { done: true, value: undefined } : undefined
  }

  /** Ends the subscription. */
  return(): Promise<IteratorResult<PoolEvent, undefined>> {
    this.#native?.free()
    this.#native = undefined
    this.#events = []
    this.#line.look()
    return Promise.resolve({ done: true, value: undefined })
  }

  /** Itself: a subscription is read once. */
  [Symbol.asyncIterator](): this {
    return this
  }

  /** Ends the subscription, at the end of an `await using` block. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.return()
  }
}

const NO_ROOM = checks.oneOf('wait', 'refuse', 'loadAnyway')

const ADMISSION = {
  key: checks.name, cost: checks.either(checks.number, checks.callback), load: checks.callback, release: checks.callback,
  idle: checks.idle, useIdle: checks.idle, pinned: checks.flag, inUse: checks.flag, replace: checks.flag, noRoom: NO_ROOM,
  signal: checks.signal, cancel: cancelToken, timeoutMs: checks.number,
}

const POOL = {
  budgetBytes: checks.number, physicalLimitBytes: checks.number, idle: checks.idle, noRoom: NO_ROOM, maxWaiting: checks.number,
}

/** @internal An engine's pool, which its host did not make. */
export class Inner {
  readonly native: NativePool

  constructor(native: NativePool) {
    this.native = native
  }
}

/**
 * One memory budget for everything resident: models, and whatever a host wants counted. `engine.pool` is an engine's; a pool of
 * one's own is made with `new Pool`. Calls that change or look at once throw their `HobError`, the others reject with it.
 */
export class Pool implements AsyncDisposable {
  readonly #native: NativePool

  /** A pool without an engine. Throws a `HobError` for bad options. */
  constructor(options: PoolOptions)
  /** @internal */
  constructor(inner: Inner)
  constructor(options: PoolOptions | Inner) {
    if (options instanceof Inner) {
      this.#native = options.native
      return
    }
    const checked = check('new Pool', options as PoolOptions, POOL, ['budgetBytes'])
    const { addon, mailbox } = theCalls()
    this.#native = guarded(() => addon.NativePool.create(mailbox, checked))
  }

  /** Makes a key resident: a hit if it is already, a join if somebody is loading it, else a load once there is room. */
  admit(admission: Admission): Promise<Admitted> {
    return attempt(() => {
      const checked = check('admit', admission, ADMISSION, ['key', 'cost', 'load'])
      const { key, cost, load, release, signal, cancel, idle, useIdle, pinned, inUse, replace, noRoom, timeoutMs } = checked
      const native = {
        key, idle, useIdle, pinned, inUse, replace, noRoom, timeoutMs,
        releases: release !== undefined,
        cost: typeof cost === 'number' ? cost : undefined,
      } as Parameters<NativePool['admit']>[1]
      const functions = {
        estimate: typeof cost === 'function' ? cost : undefined,
        load: load.bind(admission),
        release: release?.bind(admission),
      }
      const shape = ({ lease, ...admitted }: Omit<Admitted, 'lease'> & { lease?: NativeLease }): Admitted =>
        lease === undefined ? admitted : { ...admitted, lease: new Lease(lease, this) }
      return theCalls().call((id, token) => this.#native.admit(id, native, token), { signal, cancel: cancel?.native, functions, shape })
    })
  }

  /** Begins a use of a resident entry; undefined when the pool does not hold it. Never waits, never loads. */
  beginUse(key: Key, options: { idle?: Idle } = {}): Lease | undefined {
    const { idle } = check('beginUse', options, { idle: checks.idle })
    const lease = guarded(() => this.#native.beginUse(named(key), idle))
    return lease === null ? undefined : new Lease(lease, this)
  }

  /** Ends a use, as `lease.end()` does. */
  endUse(lease: Lease): boolean {
    return guarded(() => {
      if (!(lease instanceof Lease)) throw invalid('endUse: a Lease is wanted, as beginUse and admit give it')
      return lease.end()
    })
  }

  /** The token of a resident entry, without a use and without touching its clock. */
  peek(key: Key): number | undefined {
    return guarded(() => this.#native.peek(named(key))) ?? undefined
  }

  /** Refreshes a resident entry's clock without a use. False when it is not resident. */
  touch(key: Key): boolean {
    return guarded(() => this.#native.touch(named(key)))
  }

  /** Drops an entry without its release: its owner has let go already. The bytes taken off the account, if it was resident. */
  forget(key: Key): number | undefined {
    return guarded(() => this.#native.forget(named(key))) ?? undefined
  }

  /**
   * Unloads an entry: detached at once, then released. An entry in use is refused with `InUse` unless `force`; `NotFound` when the
   * pool does not hold it.
   */
  evict(key: Key, options: { force?: boolean } = {}): Promise<NativeEvicted> {
    return attempt(() => {
      const { force = false } = check('evict', options, { force: checks.flag })
      const name = named(key)
      return theCalls().call((id) => this.#native.evict(id, name, force))
    })
  }

  /** Unloads idle entries, least recently used first, until the account is within the budget. */
  trim(): Promise<NativeReclaimed> {
    return attempt(() => theCalls().call((id) => this.#native.trim(id)))
  }

  /** Unloads idle entries, least recently used first, until so many bytes are free. Reserves nothing. */
  makeRoom(bytes: number, options: { signal?: AbortSignal } = {}): Promise<NativeReclaimed> {
    return attempt(() => {
      const { signal } = check('makeRoom', options, { signal: checks.signal })
      const wanted = amount('bytes', bytes)
      return theCalls().call((id, token) => this.#native.makeRoom(id, wanted, token), { signal })
    })
  }

  /** Unloads every entry past its idle time now. The pool does so by itself too. */
  sweep(): Promise<NativeReclaimed> {
    return attempt(() => theCalls().call((id) => this.#native.sweep(id)))
  }

  /** Pins an entry: never evicted, never swept; an explicit evict, forget or close still works. False when it is not known. */
  pin(key: Key): boolean {
    return guarded(() => this.#native.pin(named(key)))
  }

  /** Undoes a pin. */
  unpin(key: Key): boolean {
    return guarded(() => this.#native.unpin(named(key)))
  }

  /** Changes a resident entry's own idle policy; undefined is the pool's. False when it is not resident. */
  setIdle(key: Key, idle: Idle | undefined): boolean {
    return guarded(() => this.#native.setIdle(named(key), idle === undefined ? undefined : policy(idle)))
  }

  /** Changes the pool's idle policy, which rules entries without one of their own. */
  setDefaultIdle(idle: Idle): void {
    guarded(() => this.#native.setDefaultIdle(policy(idle)))
  }

  /** Brings running idle countdowns forward to end within this time: for memory pressure. How many were. */
  accelerateIdle(graceMs: number): number {
    return guarded(() => this.#native.accelerateIdle(amount('graceMs', graceMs)))
  }

  /** Changes the budget. Evicts nothing by itself. */
  setBudget(bytes: number): void {
    guarded(() => this.#native.setBudget(amount('bytes', bytes)))
  }

  /** Corrects a resident entry's charge to what was measured. False when the token is not resident. */
  setMeasured(token: number, bytes: number): boolean {
    return guarded(() => this.#native.setMeasured(amount('token', token), amount('bytes', bytes)))
  }

  /** Puts bytes of the host's own on the account until the charge ends. */
  charge(bytes: number): Charge {
    return new Charge(guarded(() => this.#native.charge(amount('bytes', bytes))))
  }

  /** What an admission would do now, changing nothing. */
  plan(key: Key, cost: number, options: { noRoom?: NoRoom } = {}): NativePlan {
    const { noRoom } = check('plan', options, { noRoom: NO_ROOM })
    return guarded(() => this.#native.plan(named(key), amount('cost', cost), noRoom))
  }

  /** A snapshot. Never loads, never waits for a device. */
  status(): NativePoolStatus {
    return guarded(() => this.#native.status())
  }

  /** Whether the pool is closed or closing. */
  get closed(): boolean {
    return this.#native.closed
  }

  /**
   * Subscribes to what happens from now on, holding at most `capacity` unread events (256 by default): a slow reader loses the
   * oldest and is told how many.
   */
  events(options: { capacity?: number } = {}): PoolEvents {
    const { capacity = 256 } = check('events', options, { capacity: checks.number })
    const id = theCalls().number()
    return new PoolEvents(guarded(() => this.#native.events(id, capacity)), id)
  }

  /** Holds back new loads until the pause ends, once loads and releases under way have. Residents stay usable. */
  pause(): Promise<Pause> {
    const shape = (native: NativePause) => new Pause(native)
    return attempt(() => theCalls().call((id) => this.#native.pause(id), { shape }))
  }

  /** Closes the pool: whoever waits gets `Closed`, and every entry is released. Idempotent. */
  close(): Promise<void> {
    return attempt(() => theCalls().call((id) => this.#native.close(id), { shape: () => undefined }))
  }

  /** Closes the pool, at the end of an `await using` block. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close()
  }
}

function named(key: unknown): string {
  const wrong = checks.name(key)
  if (wrong !== undefined) throw invalid(`the key ${wrong}`)
  return key as string
}

function amount(name: string, value: unknown): number {
  const wrong = checks.number(value)
  if (wrong !== undefined) throw invalid(`${name} ${wrong}`)
  return value as number
}

function policy(idle: unknown): Idle {
  const wrong = checks.idle(idle)
  if (wrong !== undefined) throw invalid(`idle ${wrong}`)
  return idle as Idle
}
