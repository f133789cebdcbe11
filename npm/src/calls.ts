import { asHobError, HobError, invalid } from './errors.js'
import type { ErrorCode } from './errors.js'
import { load } from './loader.js'
import type { Addon } from './loader.js'
import type {
  NativeCancelToken, NativeEmbeddings, NativeFailure, NativeLetter, NativeMailbox, NativeProvenance, NativeTimings,
} from './native.js'

/** What a host gives with an admission. */
export interface Functions {
  estimate?: (() => number | Promise<number>) | undefined
  load: (context: { token: number; signal: AbortSignal; progress: (fraction: number) => void }) => unknown
  release?: ((token: number) => unknown) | undefined
}

interface Pending {
  resolve: (value: unknown) => void
  reject: (error: HobError) => void
  signal?: AbortSignal | undefined
  onAbort?: () => void
  /** Cancels this call alone. */
  token?: NativeCancelToken | undefined
  onProgress?: ((fraction: number) => void) | undefined
  shape?: ((value: never) => unknown) | undefined
  /** An error that the host's own function threw, and whether the call was cancelled because of it. */
  thrown?: { error: unknown; stopped: boolean }
}

/** How a call is made. */
export interface CallOptions {
  signal?: AbortSignal | undefined
  cancel?: NativeCancelToken | undefined
  onProgress?: ((fraction: number) => void) | undefined
  functions?: Functions
  /** Makes what the host gets of what the addon gave. Must not throw. */
  shape?: (value: never) => unknown
}

// As bindings/napi/src/results.rs numbers them.
const READY = 1
const EMBEDDINGS = 2

const SOON = Promise.resolve()

/** What `mailbox.take` writes: how many numbers are used, whether more is to come, and then records, each with its kind first. */
const page = new Float64Array(8192)
const floats = new Float32Array(page.buffer)

/** What a stream's `look` writes. Read it before the next look. */
export const scratch = new Float64Array(1024)

/**
 * All calls of this thread into the addon: who waits for which answer. The addon rings once for many answers; while somebody
 * waits the event loop is kept alive.
 */
class Calls {
  readonly addon: Addon
  readonly mailbox: NativeMailbox
  #pending = new Map<number, Pending>()
  #waiting = new Map<number, { keepAlive: boolean; ready: () => void }>()
  #functions = new Map<number, Functions>()
  #runs = new Map<number, AbortController>()
  #provenances = new Map<number, Readonly<NativeProvenance>>()
  #poolings = new Map<number, string>()
  #last = 0
  #alive = 0
  #held = false

  constructor() {
    this.addon = load().addon
    this.mailbox = new this.addon.NativeMailbox((letters) => this.#deliver(letters), page)
  }

  /** A number for a call, a stream or a subscription. */
  number(): number {
    return ++this.#last
  }

  /** Starts a call by its number, with what cancels it, and waits for its end. Never throws: what goes wrong is the promise's. */
  call<T>(start: (id: number, cancel: NativeCancelToken | undefined) => void, options: CallOptions = {}): Promise<T> {
    const { signal, cancel, onProgress, functions, shape } = options
    return new Promise<T>((resolve, reject) => {
      const id = this.number()
      let token: NativeCancelToken | undefined
      try {
        if (signal?.aborted) throw aborted(signal)
        if (signal !== undefined || onProgress !== undefined) token = this.mailbox.token(cancel)
        // First: the rest is done while others work already. No letter is read before this returns.
        start(id, token ?? cancel)
        const pending: Pending = { resolve: resolve as (value: unknown) => void, reject, signal, token, onProgress, shape }
        if (signal !== undefined) {
          pending.onAbort = () => void token?.cancel()
          signal.addEventListener('abort', pending.onAbort, { once: true })
        }
        this.#pending.set(id, pending)
        if (functions !== undefined) this.#functions.set(id, functions)
        this.keepAlive(1)
      } catch (error) {
        // With a signal that is none, nobody waits for what has begun.
        token?.cancel()
        reject(asHobError(error))
      }
    })
  }

  /** Runs `ready` once when the stream or subscription of this number has something to look at. */
  listen(id: number, keepAlive: boolean, ready: () => void): void {
    if (keepAlive) this.keepAlive(1)
    this.#waiting.set(id, { keepAlive, ready })
  }

  /** Runs what waits for that number. */
  wake(id: number): void {
    const waiting = this.#waiting.get(id)
    if (waiting === undefined) return
    this.#waiting.delete(id)
    waiting.ready()
    if (waiting.keepAlive) this.keepAlive(-1)
  }

  /** Where a result with this number comes from. Results share the object. */
  provenance(number: number): Readonly<NativeProvenance> {
    let known = this.#provenances.get(number)
    if (known === undefined) this.#provenances.set(number, (known = Object.freeze(this.addon.provenance(number))))
    return known
  }

  /** How vectors with this number were pooled. */
  pooling(number: number): string {
    let known = this.#poolings.get(number)
    if (known === undefined) this.#poolings.set(number, (known = this.addon.pooling(number)))
    return known
  }

  /** Counts who waits; while anybody does, the event loop lives. */
  keepAlive(change: 1 | -1): void {
    this.#alive += change
    if (this.#alive > 0 && !this.#held) {
      this.#held = true
      this.mailbox.ref()
    } else if (this.#alive === 0) void SOON.then(() => this.#rest(3))
  }

  /** Lets the loop end if nobody waits any more, after some turns: who has an answer often asks again at once. */
  #rest(turns: number): void {
    if (this.#alive > 0 || !this.#held) return
    if (turns > 0) return void SOON.then(() => this.#rest(turns - 1))
    this.#held = false
    this.mailbox.unref()
  }

  #deliver(letters: NativeLetter[] | null | undefined): void {
    // Not at once: timers and sockets want their turn too.
    if (page[1] === 1) setImmediate(() => this.#deliver(this.mailbox.take(page)))
    let other = 0
    for (let at = 2; at < page[0]!;) {
      const kind = page[at++]
      if (kind === EMBEDDINGS) at = this.#embedded(at)
      else if (kind === READY) this.wake(page[at++]!)
      else this.#read(letters![other++]!)
    }
  }

  /** Reads a record of vectors; returns where it ends. */
  #embedded(at: number): number {
    const length = page[at + 1]!
    const first = 2 * (at + 12)
    const end = at + 12 + Math.ceil(length / 2)
    const timings: NativeTimings = { queueMs: page[at + 7]!, totalMs: page[at + 11]! }
    const [loadMs, prefillMs, decodeMs] = [page[at + 8]!, page[at + 9]!, page[at + 10]!]
    if (!Number.isNaN(loadMs)) timings.loadMs = loadMs
    if (!Number.isNaN(prefillMs)) timings.prefillMs = prefillMs
    if (!Number.isNaN(decodeMs)) timings.decodeMs = decodeMs
    const vectors: NativeEmbeddings = {
      data: floats.slice(first, first + length),
      dimensions: page[at + 2]!,
      pooling: page[at + 3]!,
      promptTokens: page[at + 4]!,
      droppedTokens: page[at + 5]!,
      provenance: page[at + 6]!,
      timings,
    }
    this.#settle(page[at]!, vectors)
    return end
  }

  #read(letter: NativeLetter): void {
    switch (letter.kind) {
      case 'settled':
        this.#settle(letter.id, letter.value, letter.error)
        break
      case 'progress':
        this.#progress(letter)
        break
      case 'abort':
        this.#runs.get(letter.call ?? 0)?.abort(new HobError('Cancelled', 'nobody waits for this load any more'))
        break
      case 'forget':
        this.#functions.delete(letter.id)
        break
      default:
        void this.#run(letter, letter.kind)
    }
  }

  #settle(id: number, value: unknown, failure?: NativeFailure): void {
    const pending = this.#pending.get(id)
    if (pending === undefined) return
    this.#pending.delete(id)
    // First: who waits goes on before what is due when this returns.
    settle(pending, value, failure)
    if (pending.onAbort !== undefined) unlisten(pending.signal, pending.onAbort)
    this.keepAlive(-1)
  }

  #progress(letter: NativeLetter): void {
    const pending = this.#pending.get(letter.id)
    if (pending?.onProgress === undefined || pending.thrown !== undefined) return
    try {
      pending.onProgress(letter.fraction ?? 0)
    } catch (error) {
      // As in C: a progress callback that fails stops the load.
      pending.thrown = { error, stopped: true }
      pending.token?.cancel()
    }
  }

  /** Runs a host's function and says how it went. */
  async #run(letter: NativeLetter, what: 'estimate' | 'load' | 'release'): Promise<void> {
    const { id, call = 0, token = 0 } = letter
    const functions = this.#functions.get(id)
    try {
      let bytes: unknown
      if (what === 'load') {
        const run = new AbortController()
        this.#runs.set(call, run)
        const progress = (fraction: number) => this.mailbox.report(call, Number(fraction))
        bytes = await functions?.load({ token, signal: run.signal, progress })
      } else if (what === 'estimate') bytes = await functions?.estimate?.()
      else await functions?.release?.(token)
      if (bytes !== undefined && (typeof bytes !== 'number' || !Number.isSafeInteger(bytes) || bytes < 0)) {
        throw invalid(`the ${what} function gave something else than a whole number of bytes`)
      }
      this.mailbox.answer(call, undefined, bytes)
    } catch (error) {
      const pending = what === 'release' ? undefined : this.#pending.get(id)
      if (pending !== undefined) pending.thrown = { error, stopped: false }
      this.mailbox.answer(call, describe(error))
    } finally {
      this.#runs.delete(call)
    }
  }
}

/** Settles a call's promise. */
function settle({ resolve, reject, thrown, signal, shape }: Pending, value: unknown, failure: NativeFailure | undefined): void {
  if (thrown?.stopped) {
    // Also when the load was so near its end that it succeeded all the same.
    return reject(new HobError('Callback', 'the progress function threw; the load was stopped', { cause: thrown.error }))
  }
  if (failure === undefined) return resolve(shape === undefined ? value : shape(value as never))
  const { code, message } = failure as { code: ErrorCode; message: string }
  if (code === 'Cancelled' && isAborted(signal)) reject(aborted(signal))
  else if (code === 'Callback' && thrown !== undefined) reject(new HobError(code, message, { cause: thrown.error }))
  else reject(new HobError(code, message))
}

/** Stops listening to a host's signal, which may be anything that looks like one: what it throws must not keep others from their answers. */
export function unlisten(signal: AbortSignal | undefined, listener: () => void): void {
  try {
    signal?.removeEventListener('abort', listener)
  } catch {
    // It is called in vain then.
  }
}

export function isAborted(signal: AbortSignal | undefined): signal is AbortSignal {
  try {
    return signal?.aborted === true
  } catch {
    return false
  }
}

function describe(error: unknown): string {
  try {
    return String(error instanceof Error ? error.message : error)
  } catch {
    return 'it threw something that cannot be shown'
  }
}

/** The error of a request whose signal was aborted. */
export function aborted(signal: AbortSignal): HobError {
  let cause: unknown
  let late = false
  try {
    cause = signal.reason
    late = cause instanceof Error && cause.name === 'TimeoutError'
  } catch {
    // A reason that cannot be looked at is handed on all the same.
  }
  return late
    ? new HobError('Timeout', "the signal's time was up", { cause })
    : new HobError('Cancelled', 'cancelled by its signal', { cause })
}

let calls: Calls | undefined

/** This thread's calls. The addon is loaded at the first use, so that importing the package costs and risks nothing. */
export function theCalls(): Calls {
  return (calls ??= new Calls())
}

export type { Calls }
