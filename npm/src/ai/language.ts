import { randomUUID } from 'node:crypto'

import type { Engine } from '../engine.js'
import type { GenerateRequest } from '../requests.js'
import type { StreamEvent, Summary } from '../stream.js'
import { sdkError } from './errors.js'
import { toRequest } from './prompt.js'
import type { HobOptions } from './prompt.js'
import { VERSION } from './spec.js'
import type {
  LanguageModelV4, LanguageModelV4CallOptions as CallOptions, LanguageModelV4Content as Content,
  LanguageModelV4FinishReason as FinishReason, LanguageModelV4GenerateResult as GenerateResult,
  LanguageModelV4StreamPart as Part, LanguageModelV4StreamResult as StreamResult, LanguageModelV4Usage as Usage,
} from './spec.js'

/** A chat model for `generateText` and `streamText`. */
export class HobLanguageModel implements LanguageModelV4 {
  readonly specificationVersion = VERSION
  readonly provider = 'hob'
  /** No model here reads a file by its address. */
  readonly supportedUrls = {}
  readonly modelId: string
  readonly #engine: Engine
  readonly #settings: HobOptions<GenerateRequest>

  /** @internal */
  constructor(engine: Engine, modelId: string, settings: HobOptions<GenerateRequest>) {
    this.#engine = engine
    this.modelId = modelId
    this.#settings = settings
  }

  /** The whole answer. */
  async doGenerate(options: CallOptions): Promise<GenerateResult> {
    const { request, warnings } = toRequest(this.modelId, this.#settings, options)
    const parts = new Parts()
    const content: Content[] = []
    try {
      for await (const event of this.#engine.generate(request)) {
        for (const part of parts.take(event)) {
          if (part.type === 'finish') {
            const { type: _, ...end } = part
            return { content, ...end, warnings, request: {}, response: described(this.modelId) }
          }
          gather(content, part)
        }
      }
    } catch (error) {
      throw this.#error(error, options)
    }
    throw new Error('the stream ended without its last event; this is a fault in Hob')
  }

  /** The answer as it comes. It is computed no faster than it is read, and no further once nobody reads it. */
  async doStream(options: CallOptions): Promise<StreamResult> {
    const { request, warnings } = toRequest(this.modelId, this.#settings, options)
    const events = this.#engine.generate(request)
    // What is wrong with the request shows at its first event: the call then rejects, and the SDK may try again.
    let first: IteratorResult<StreamEvent> | undefined = await events.next().catch((error: unknown) => {
      throw this.#error(error, options)
    })
    const parts = new Parts()
    const stream = new ReadableStream<Part>({
      start: (controller) => {
        controller.enqueue({ type: 'stream-start', warnings })
        controller.enqueue({ type: 'response-metadata', ...described(this.modelId) })
      },
      pull: async (controller) => {
        try {
          // An event may bring no part; one part at least is what a pull is for.
          for (let given = false; !given; ) {
            const { done, value } = first ?? (await events.next())
            first = undefined
            if (done) return controller.close()
            if (options.includeRawChunks) controller.enqueue({ type: 'raw', rawValue: value })
            for (const part of parts.take(value)) {
              controller.enqueue(part)
              given = true
            }
          }
        } catch (thrown) {
          const error = this.#error(thrown, options)
          if (options.abortSignal?.aborted) return controller.error(error)
          for (const part of parts.failed(error)) controller.enqueue(part)
          controller.close()
        }
      },
      cancel: async () => {
        await events.return()
      },
    })
    return { stream, request: {} }
  }

  #error(thrown: unknown, { abortSignal }: CallOptions): unknown {
    return sdkError(thrown, { id: this.modelId, type: 'languageModel' }, abortSignal)
  }
}

function described(modelId: string) {
  return { id: `hob-${randomUUID()}`, timestamp: new Date(), modelId }
}

/** The parts of one answer: texts and reasoning in blocks, calls, the end. */
class Parts {
  #open: { kind: 'text' | 'reasoning'; id: string } | undefined
  #blocks = 0
  #called = false
  readonly #rejected: string[] = []

  #reason({ finish }: Summary): FinishReason {
    switch (finish) {
      case 'stop':
        return { unified: this.#called ? 'tool-calls' : 'stop', raw: finish }
      case 'length':
      case 'context':
        return { unified: 'length', raw: finish }
      default:
        return { unified: 'other', raw: finish }
    }
  }

  *take(event: StreamEvent): Generator<Part> {
    switch (event.type) {
      case 'chunk':
        yield* this.#more('reasoning', event.reasoning)
        yield* this.#more('text', event.text)
        break
      case 'toolCall': {
        yield* this.#close()
        const { id, name, arguments: input } = event
        this.#called = true
        yield { type: 'tool-input-start', id, toolName: name }
        yield { type: 'tool-input-delta', id, delta: input }
        yield { type: 'tool-input-end', id }
        yield { type: 'tool-call', toolCallId: id, toolName: name, input }
        break
      }
      case 'rejectedCall':
        // No call that anybody could answer: it is what the model said.
        this.#rejected.push(event.reason)
        yield* this.#more('text', event.raw)
        break
      case 'finished':
        yield* this.#close()
        yield { type: 'finish', finishReason: this.#reason(event), usage: usage(event), providerMetadata: { hob: this.#metadata(event) } }
    }
  }

  *failed(error: unknown): Generator<Part> {
    yield* this.#close()
    yield { type: 'error', error }
    yield { type: 'finish', finishReason: { unified: 'error', raw: (error as { code?: string }).code }, usage: usage() }
  }

  *#more(kind: 'text' | 'reasoning', delta: string): Generator<Part> {
    if (delta === '') return
    if (this.#open?.kind !== kind) {
      yield* this.#close()
      this.#open = { kind, id: String(this.#blocks++) }
      yield { type: `${kind}-start`, id: this.#open.id }
    }
    yield { type: `${kind}-delta`, id: this.#open.id, delta }
  }

  *#close(): Generator<Part> {
    if (this.#open === undefined) return
    const { kind, id } = this.#open
    this.#open = undefined
    yield { type: `${kind}-end`, id }
  }

  #metadata({ seed, stopIndex, droppedTokens, timings, provenance }: Summary) {
    return {
      droppedTokens,
      timings: { ...timings },
      ...(seed !== undefined && { seed }),
      ...(stopIndex !== undefined && { stopIndex }),
      ...(provenance !== undefined && { provenance: { ...provenance } }),
      ...(this.#rejected.length > 0 && { rejectedCalls: this.#rejected }),
    }
  }
}

/** Tokens; unknown ones for an answer that failed. How many of them were reasoning is not counted. */
function usage(summary?: Summary): Usage {
  const { promptTokens, cachedTokens, completionTokens } = summary ?? {}
  return {
    inputTokens: {
      total: promptTokens,
      noCache: promptTokens === undefined || cachedTokens === undefined ? undefined : promptTokens - cachedTokens,
      cacheRead: cachedTokens,
      cacheWrite: undefined,
    },
    outputTokens: { total: completionTokens, text: undefined, reasoning: undefined },
  }
}

function gather(content: Content[], part: Part): void {
  if (part.type === 'tool-call') content.push(part)
  else if (part.type === 'text-start') content.push({ type: 'text', text: '' })
  else if (part.type === 'reasoning-start') content.push({ type: 'reasoning', text: '' })
  else if (part.type === 'text-delta' || part.type === 'reasoning-delta') {
    const last = content.at(-1)
    if (last?.type === 'text' || last?.type === 'reasoning') last.text += part.delta
  }
}
