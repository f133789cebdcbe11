import { aborted, isAborted, scratch, unlisten } from './calls.js'
import { asHobError, HobError } from './errors.js'
import type { NativeEvent, NativeProvenance, NativeStream, NativeTimings, NativeTokenLogprob } from './native.js'
import { Line } from './line.js'

export type { NativeProvenance as Provenance, NativeTimings as Timings, NativeTokenLogprob as TokenLogprob } from './native.js'

/** More of the answer. */
export interface ChunkEvent {
  /** What it is. */
  type: 'chunk'
  /** Whole characters, possibly none (a token may not complete one yet). */
  text: string
  /** Reasoning, where the model's template marks it; it comes before the text. */
  reasoning: string
  /** The tokens that the piece comes from. */
  tokenIds: number[]
  /** One per token, when asked for. */
  logprobs?: NativeTokenLogprob[]
}

/** A call of one of the request's tools, complete. */
export interface ToolCall {
  /** Which call this is; the tool's message names it in `tool_call_id`. */
  id: string
  /** The tool's name. */
  name: string
  /** The text of a JSON object. */
  arguments: string
}

/** A call that could not be read. The stream goes on. */
export interface RejectedCall {
  /** The model's text, marks included. */
  raw: string
  /** What is wrong with it. */
  reason: string
}

/** How an answer ended. */
export interface Summary {
  /**
   * The model's turn ended or a stop string appeared (`stop`), `maxTokens` were produced, the context is full, the caller stopped it
   * and wanted what there is (`cancelled`), or the time was up (`timeout`).
   */
  finish: 'stop' | 'length' | 'context' | 'cancelled' | 'timeout'
  /** Which stop string was found. */
  stopIndex?: number
  /** Tokens of the prompt as the model saw it. */
  promptTokens: number
  /** Tokens of the prompt that were cut off, with `truncate`. */
  droppedTokens: number
  /** Prompt tokens that did not have to be computed. */
  cachedTokens: number
  /** New tokens, without the one that ends a turn. */
  completionTokens: number
  /** The seed in use, when tokens were drawn. */
  seed?: number
  /** Time by phase. */
  timings: NativeTimings
  /** Which model answered; absent when the request ended before it had one. */
  provenance?: NativeProvenance
}

/** A complete call of a tool. */
export interface ToolCallEvent extends ToolCall {
  /** What it is. */
  type: 'toolCall'
}

/** A call that could not be read. */
export interface RejectedCallEvent extends RejectedCall {
  /** What it is. */
  type: 'rejectedCall'
}

/** The end of an answer. */
export interface FinishedEvent extends Summary {
  /** What it is. */
  type: 'finished'
}

/** What a stream yields: chunks and calls, then exactly one `finished`, unless it ends in an error. */
export type StreamEvent = ChunkEvent | ToolCallEvent | RejectedCallEvent | FinishedEvent

/** A whole answer. */
export interface Generation extends Summary {
  /** The text, without the stop string that ended it. */
  text: string
  /** The reasoning, where the model's template marks it. */
  reasoning: string
  /** Calls of the request's tools, in order. */
  toolCalls: ToolCall[]
  /** Calls that could not be read. */
  rejectedCalls: RejectedCall[]
  /** Its tokens. With a stop string, those that spelled it are included. */
  tokenIds: number[]
  /** One per token, when asked for. */
  logprobs: NativeTokenLogprob[]
}

type Next = IteratorResult<StreamEvent, undefined>

type Started = { native: NativeStream; id: number; signal: AbortSignal | undefined } | { error: HobError }

/**
 * One generation: an async iterator of its events. Leaving the loop early, `cancel`, the end of an `await using` block and the
 * garbage collector all end it. A stream that is read too slowly pauses itself, never others.
 */
export class GenerateStream implements AsyncIterableIterator<StreamEvent, undefined>, AsyncDisposable {
  readonly #signal: AbortSignal | undefined
  #native: NativeStream | undefined
  #events: NativeEvent[] = []
  #at = 0
  #error: HobError | undefined
  readonly #line: Line<Next>
  #unlisten: (() => void) | undefined

  /** @internal */
  constructor(started: Started) {
    this.#line = new Line('error' in started ? 0 : started.id, true, () => this.#take())
    if ('error' in started) {
      this.#error = started.error
      return
    }
    const { native, signal } = started
    this.#native = native
    this.#signal = signal
    if (signal === undefined) return
    // Weak: a signal that lives on must not keep a stream that everybody else has dropped.
    const weak = new WeakRef(native)
    const listener = () => weak.deref()?.cancel()
    try {
      if (signal.aborted) listener()
      else signal.addEventListener('abort', listener, { once: true })
      this.#unlisten = () => unlisten(signal, listener)
    } catch (error) {
      // It only looked like a signal.
      native.free()
      throw error
    }
  }

  /** The next event. Rejects once with the stream's error, a `HobError`; after the end it is done. */
  next(): Promise<IteratorResult<StreamEvent, undefined>> {
    return this.#line.next()
  }

  /** The next event, if it is there, or the end. Throws the error. */
  #take(): Next | undefined {
    const value = this.#event()
    if (value !== undefined) return { done: false, value }
    if (this.#native !== undefined) return undefined
    const error = this.#error
    this.#error = undefined
    if (error !== undefined) throw error
    return { done: true, value: undefined }
  }

  /** Fetches what has come, if all fetched before is given out. */
  #event(): StreamEvent | undefined {
    if (this.#at < this.#events.length) return shaped(this.#events[this.#at++]!)
    if (this.#native === undefined) return undefined
    try {
      const events = this.#native.look(scratch)
      if (events === null) return undefined
      if (typeof events === 'string') {
        const tokenIds: number[] = []
        for (let at = 1; at <= scratch[0]!; at++) tokenIds.push(scratch[at]!)
        return { type: 'chunk', text: events, reasoning: '', tokenIds }
      }
      this.#events = events
      this.#at = 0
      if (events.length === 0 || events[events.length - 1]!.kind === 'finished') this.#end()
      return events.length === 0 ? undefined : shaped(events[this.#at++]!)
    } catch (error) {
      const failed = asHobError(error)
      const signal = this.#signal
      this.#error = failed.code === 'Cancelled' && isAborted(signal) ? aborted(signal) : failed
      this.#end()
      return undefined
    }
  }

  #end(): void {
    this.#native = undefined
    this.#unlisten?.()
    this.#unlisten = undefined
  }

  /** Itself: a stream is read once. */
  [Symbol.asyncIterator](): this {
    return this
  }

  /** Ends the generation and gives nothing more out; what `break` in a `for await` loop does. */
  return(): Promise<IteratorResult<StreamEvent, undefined>> {
    this.#native?.free()
    this.#events = []
    this.#at = 0
    this.#error = undefined
    this.#end()
    // Who waits for a letter need not any more.
    this.#line.look()
    return Promise.resolve({ done: true, value: undefined })
  }

  /** Ends the generation at its next step. The stream then ends with an error of code `Cancelled`. */
  cancel(): void {
    this.#native?.cancel()
  }

  /** Ends the generation at its next step with what there is; its `finish` is `cancelled`. */
  stop(): void {
    this.#native?.stop()
  }

  /** The rest of the answer as one value. */
  async result(): Promise<Generation> {
    let text = ''
    let reasoning = ''
    const toolCalls: ToolCall[] = []
    const rejectedCalls: RejectedCall[] = []
    const tokenIds: number[] = []
    const logprobs: NativeTokenLogprob[] = []
    for (;;) {
      const { done, value } = await this.next()
      if (done) throw new HobError('Closed', 'the stream has ended already; its answer was read before')
      switch (value.type) {
        case 'chunk':
          text += value.text
          reasoning += value.reasoning
          for (const id of value.tokenIds) tokenIds.push(id)
          if (value.logprobs !== undefined) logprobs.push(...value.logprobs)
          break
        case 'toolCall': {
          const { type: _, ...call } = value
          toolCalls.push(call)
          break
        }
        case 'rejectedCall': {
          const { type: _, ...call } = value
          rejectedCalls.push(call)
          break
        }
        case 'finished': {
          const { type: _, ...summary } = value
          return { text, reasoning, toolCalls, rejectedCalls, tokenIds, logprobs, ...summary }
        }
      }
    }
  }

  /** The rest of the answer's text, piece by piece; empty pieces are left out. */
  async *text(): AsyncGenerator<string, void, undefined> {
    for await (const event of this) if (event.type === 'chunk' && event.text !== '') yield event.text
  }

  /** Ends the generation, at the end of an `await using` block. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.return()
  }
}

function shaped(event: NativeEvent): StreamEvent {
  const { kind, call, rejected, summary } = event
  if (kind === 'chunk') {
    const { text = '', reasoning = '', tokenIds = [], logprobs } = event
    return logprobs === undefined ? { type: kind, text, reasoning, tokenIds } : { type: kind, text, reasoning, tokenIds, logprobs }
  }
  if (kind === 'toolCall' && call !== undefined) return { type: kind, ...call }
  if (kind === 'rejectedCall' && rejected !== undefined) return { type: kind, ...rejected }
  if (kind === 'finished' && summary !== undefined) return { type: kind, ...summary }
  throw new HobError('Internal', 'the addon gave an event that is none; this is a fault in Hob')
}
