import { theCalls } from './calls.js'
import { asHobError, HobError } from './errors.js'
import type { Check } from './checks.js'
import type { NativeCancelToken } from './native.js'

/**
 * Ends requests: give it to any number of them and cancel them together. `child` narrows it, `withDeadline` bounds it in time.
 * An `AbortSignal` does the same for one's own code; a token costs less and makes families.
 */
export class CancelToken {
  /** @internal */
  readonly native: NativeCancelToken

  constructor()
  /** @internal */
  constructor(native: NativeCancelToken)
  constructor(native?: NativeCancelToken) {
    this.native = native ?? theCalls().mailbox.token()
  }

  /** Cancels this token and all its descendants. Returns whether this call was the one that did. */
  cancel(): boolean {
    return this.native.cancel()
  }

  /** A token that is cancelled when this one is, and can be cancelled alone. */
  child(): CancelToken {
    return new CancelToken(this.native.child())
  }

  /** A child that is also cancelled, with reason `timeout`, after so many milliseconds. Throws a `HobError` for a bad number. */
  withDeadline(timeoutMs: number): CancelToken {
    if (typeof timeoutMs !== 'number') throw new HobError('InvalidArgument', 'timeoutMs must be a number')
    try {
      return new CancelToken(this.native.withDeadline(timeoutMs))
    } catch (error) {
      throw asHobError(error)
    }
  }

  /** Why it is cancelled; undefined while it is not. */
  get reason(): 'cancelled' | 'timeout' | undefined {
    return this.native.reason ?? undefined
  }

  /** Whether it is cancelled. */
  get cancelled(): boolean {
    return this.native.reason !== null
  }
}

/** A token as its class makes it, not something with its prototype. */
export const cancelToken: Check = (value) =>
  value instanceof CancelToken && value.native !== undefined ? undefined : 'must be a CancelToken'
