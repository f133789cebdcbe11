/** What went wrong, as far as a host would act differently. The same kinds as in Rust, C and Swift. */
export type ErrorCode =
  | 'InvalidArgument'
  | 'NotFound'
  | 'Io'
  | 'BadModel'
  | 'Unsupported'
  | 'OutOfMemory'
  | 'BudgetExceeded'
  | 'Busy'
  | 'Timeout'
  | 'Cancelled'
  | 'Callback'
  | 'BufferTooSmall'
  | 'Closed'
  | 'Backend'
  | 'Internal'
  | 'InUse'

const CODES: ReadonlySet<string> = new Set<ErrorCode>([
  'InvalidArgument', 'NotFound', 'Io', 'BadModel', 'Unsupported', 'OutOfMemory', 'BudgetExceeded', 'Busy', 'Timeout',
  'Cancelled', 'Callback', 'BufferTooSmall', 'Closed', 'Backend', 'Internal', 'InUse',
])

/**
 * The one error of Hob. Its message is one line that names the value, the limit and what would change the outcome; it never
 * holds a user's text.
 */
export class HobError extends Error {
  /** What went wrong. */
  readonly code: ErrorCode

  constructor(code: ErrorCode, message: string, options?: { cause?: unknown }) {
    super(message, options)
    this.code = code
  }

  static {
    this.prototype.name = 'HobError'
  }
}

/** A `HobError` of what a call into the addon threw. */
export function asHobError(thrown: unknown): HobError {
  if (thrown instanceof HobError) return thrown
  const { code, message } = Object(thrown) as { code?: unknown; message?: unknown }
  if (typeof code === 'string' && CODES.has(code)) return new HobError(code as ErrorCode, String(message))
  // The rest are the addon's own checks of types. Their words would repeat the value, which may be a user's text.
  return new HobError('InvalidArgument', 'an argument has the wrong type', { cause: thrown })
}

export function invalid(message: string, cause?: unknown): HobError {
  return new HobError('InvalidArgument', message, cause === undefined ? undefined : { cause })
}

/** Runs what starts a call: what it throws is its promise's `HobError`. */
export function attempt<T>(start: () => Promise<T>): Promise<T> {
  try {
    return start()
  } catch (error) {
    return Promise.reject(asHobError(error))
  }
}

/** Runs what answers at once; what it throws is a `HobError`. */
export function guarded<T>(act: () => T): T {
  try {
    return act()
  } catch (error) {
    throw asHobError(error)
  }
}
