import { asHobError, HobError } from '../errors.js'
import type { ModelType } from './spec.js'

/** The SDK tells its errors by symbols and not by classes, so that an error of another library can be one of them. */
function marked(error: HobError, kind: string, fields: Record<string, unknown>): HobError {
  return Object.assign(error, {
    [Symbol.for('vercel.ai.error')]: true,
    [Symbol.for(`vercel.ai.error.AI_${kind}`)]: true,
    ...fields,
  })
}

/**
 * What a call of the SDK rejects with. It stays a `HobError` with its code; where the SDK acts on a kind of its own it is that one
 * too: `NotFound` is a `NoSuchModelError`, `Unsupported` an `UnsupportedFunctionalityError`, and `Busy` an `APICallError` that is
 * tried again (`maxRetries`). After an abort it is the signal's reason, as of `fetch`.
 */
export function sdkError(thrown: unknown, model: { id: string; type: ModelType }, signal: AbortSignal | undefined): unknown {
  const error = asHobError(thrown)
  if (signal?.aborted && (error.code === 'Cancelled' || error.code === 'Timeout')) return signal.reason
  switch (error.code) {
    case 'NotFound':
      return noSuchModel(error, model)
    case 'Unsupported':
      return marked(error, 'UnsupportedFunctionalityError', { functionality: model.type })
    case 'Busy':
      return marked(error, 'APICallError', { url: 'hob:', requestBodyValues: {}, statusCode: 429, isRetryable: true })
    default:
      return error
  }
}

export function noSuchModel(error: HobError, { id, type }: { id: string; type: ModelType }): HobError {
  return marked(error, 'NoSuchModelError', { modelId: id, modelType: type })
}

/** Something in a prompt that no model here can take. */
export function unsupported(functionality: string): HobError {
  const error = new HobError('Unsupported', `${functionality} cannot be given to a model of Hob, which reads text only`)
  return marked(error, 'UnsupportedFunctionalityError', { functionality })
}
