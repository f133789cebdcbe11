import * as checks from './checks.js'
import { check } from './checks.js'
import { aborted, theCalls } from './calls.js'
import { asHobError, attempt, invalid } from './errors.js'
import type {
  NativeCancelToken, NativeDecision, NativeDevice, NativeEmbeddings, NativeEngine, NativeEstimate, NativeModelInfo, NativePause,
  NativeProvenance, NativeRanking, NativeScore,
} from './native.js'
import { Inner, Pause, Pool } from './pool.js'
import { readDecide, readEmbed, readEngineOptions, readGenerate, readRequest, readRerank, readScore, REQUEST } from './requests.js'
import type {
  DecideRequest, EmbedRequest, EngineOptions, GenerateRequest, LoadOptions, RequestOptions, RerankRequest, ScoreRequest,
} from './requests.js'
import { GenerateStream } from './stream.js'

export type {
  NativeAnswer as Answer, NativeDevice as Device, NativeEstimate as Estimate, NativeModelInfo as ModelInfo, NativeRanked as Ranked,
  NativeScore as Score,
} from './native.js'

/** What says where it comes from. The object is frozen: results share it. */
interface FromModel {
  /** Which model computed it. */
  provenance: Readonly<NativeProvenance>
}

/** Vectors, in the order of the texts. */
export interface Embeddings extends Omit<NativeEmbeddings, 'pooling' | 'provenance'>, FromModel {
  /** One vector per text: views of `data`, without a copy. */
  embeddings: Float32Array[]
  /** How token states were pooled. */
  pooling: string
}

/** Documents by score. */
export interface Ranking extends Omit<NativeRanking, 'provenance'>, FromModel {}

/** Answers by likelihood. */
export interface Decision extends Omit<NativeDecision, 'provenance'>, FromModel {}

/** How an engine closed. */
export interface Closed {
  /** Whether all running work had stopped by then. If not, the device still is at it, and memory comes back when it stops. */
  stopped: boolean
}

/** Whether an engine serves requests. `quarantined`: the device has not come back from given-up work; requests are `Busy`. */
export type Availability = 'ready' | 'working' | 'quarantined' | 'closed'

/**
 * A device, a pool of models on it, and the verbs. A model is a directory (Hugging Face or MLX layout), a `.gguf` file, or a hub
 * id in the local Hugging Face cache; it is loaded at its first use and stays until it is evicted, idle for too long, or the
 * engine closes. Nothing here blocks the event loop. Every error is a `HobError`.
 */
export class Engine implements AsyncDisposable {
  readonly #native: NativeEngine
  #pool: Pool | undefined

  /** @internal */
  constructor(native: NativeEngine) {
    this.#native = native
  }

  /** @internal For `hob/testing`. */
  get native(): NativeEngine {
    return this.#native
  }

  /** Opens an engine on MLX's default device. */
  static open(options: EngineOptions = {}): Promise<Engine> {
    return attempt(() => {
      const wanted = readEngineOptions(options)
      const calls = theCalls()
      const shape = (native: NativeEngine) => new Engine(native)
      return calls.call((id) => calls.addon.openEngine(calls.mailbox, id, wanted), { shape })
    })
  }

  /** The pool: its status, its events, and room for a host's own residents. */
  get pool(): Pool {
    return (this.#pool ??= new Pool(new Inner(this.#native.pool())))
  }

  /** The device that computes. */
  get device(): NativeDevice {
    return this.#native.device
  }

  /** Whether requests are served now: a snapshot, not a promise. */
  get availability(): Availability {
    return this.#native.availability
  }

  /** Requests taken on and not over. */
  get requests(): number {
    return this.#native.requests
  }

  /** What a model's files say. Reads headers, loads nothing. */
  inspect(model: string, options: LoadOptions = {}): Promise<NativeModelInfo> {
    return attempt(() => {
      const request = looked('inspect', model, options)
      return theCalls().call((id) => this.#native.inspect(id, model, request))
    })
  }

  /** What a model will take, by part, before it is loaded. */
  estimate(model: string, options: LoadOptions = {}): Promise<NativeEstimate> {
    return attempt(() => {
      const request = looked('estimate', model, options)
      return theCalls().call((id) => this.#native.estimate(id, model, request))
    })
  }

  /** The verbs a model serves: `generate`, `score`, `decide`, `embed`, `rerank`. */
  capabilities(model: string): Promise<string[]> {
    return attempt(() => {
      named(model)
      return theCalls().call((id) => this.#native.capabilities(id, model))
    })
  }

  /**
   * Makes a model resident without using it. `onProgress` hears how far it is, 0 to 1; when it throws, the load is stopped and
   * rejects with `Callback`.
   */
  load(model: string, options: RequestOptions & { onProgress?: (fraction: number) => void } = {}): Promise<NativeModelInfo> {
    return attempt(() => {
      const checked = check('load', options, { ...REQUEST, onProgress: checks.callback })
      named(model)
      const { onProgress, signal, cancel } = checked
      const request = readRequest('load', checked) ?? {}
      const start = (id: number, token?: NativeCancelToken) => this.#native.load(id, model, request, onProgress !== undefined, token)
      return theCalls().call(start, { signal, cancel: cancel?.native, onProgress })
    })
  }

  /**
   * Starts generating. Never throws: what is wrong, with the request or later, is the stream's error.
   *
   * @example
   * ```ts
   * for await (const piece of engine.generate({ model, messages }).text()) process.stdout.write(piece)
   * ```
   */
  generate(request: GenerateRequest): GenerateStream {
    try {
      const { wanted, signal, cancel, stops } = readGenerate(request)
      // With 'stop' an aborted request still gives its empty answer.
      if (signal?.aborted && !stops) throw aborted(signal)
      const id = theCalls().number()
      return new GenerateStream({ native: this.#native.generate(id, wanted, cancel), id, signal })
    } catch (error) {
      return new GenerateStream({ error: asHobError(error) })
    }
  }

  /** Turns texts into vectors, in the order given. */
  embed(request: EmbedRequest): Promise<Embeddings> {
    return attempt(() => {
      const { model, list, options, signal, cancel } = readEmbed(request)
      return theCalls().call((id, token) => this.#native.embed(id, model, list, options, token), { signal, cancel, shape: rows })
    })
  }

  /** Orders documents by how well they answer a query. */
  rerank(request: RerankRequest): Promise<Ranking> {
    return attempt(() => {
      const { wanted, signal, cancel } = readRerank(request)
      return theCalls().call((id, token) => this.#native.rerank(id, wanted, token), { signal, cancel, shape: sourced<NativeRanking> })
    })
  }

  /** Log-probabilities of a given completion. */
  score(request: ScoreRequest): Promise<NativeScore> {
    return attempt(() => {
      const { wanted, signal, cancel } = readScore(request)
      return theCalls().call((id, token) => this.#native.score(id, wanted, token), { signal, cancel })
    })
  }

  /** Which of some given answers a chat model holds most likely, without sampling. */
  decide(request: DecideRequest): Promise<Decision> {
    return attempt(() => {
      const { wanted, signal, cancel } = readDecide(request)
      return theCalls().call((id, token) => this.#native.decide(id, wanted, token), { signal, cancel, shape: sourced<NativeDecision> })
    })
  }

  /** Holds back new loads until the pause ends (`resume`, or the end of a `using` block). Resident work goes on. */
  pause(): Promise<Pause> {
    const shape = (native: NativePause) => new Pause(native)
    return attempt(() => theCalls().call((id) => this.#native.pause(id), { shape }))
  }

  /**
   * Ends every request with `Closed`, unloads every model and gives the memory back. Resolves after `closeTimeoutMs` at the latest
   * and says whether everything had stopped. Idempotent. An engine that is dropped without it closes in the background.
   */
  close(): Promise<Closed> {
    const shape = (stopped: boolean) => ({ stopped })
    return attempt(() => theCalls().call((id) => this.#native.close(id), { shape }))
  }

  /** Closes the engine, at the end of an `await using` block. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close()
  }
}

function named(model: unknown): void {
  const wrong = checks.name(model)
  if (wrong !== undefined) throw invalid(`model ${wrong}`)
}

function looked(what: string, model: unknown, options: LoadOptions) {
  named(model)
  return readRequest(what, { load: options }) ?? {}
}

function rows(vectors: NativeEmbeddings): Embeddings {
  const { data, dimensions, promptTokens, droppedTokens, timings } = vectors
  const embeddings: Float32Array[] = []
  if (data.length === dimensions) embeddings.push(data)
  else for (let at = 0; at < data.length; at += dimensions) embeddings.push(data.subarray(at, at + dimensions))
  const calls = theCalls()
  const [pooling, provenance] = [calls.pooling(vectors.pooling), calls.provenance(vectors.provenance)]
  return { embeddings, data, dimensions, pooling, promptTokens, droppedTokens, timings, provenance }
}

/** The result with its provenance in place of that one's number. */
function sourced<T extends { provenance: number }>(result: T): Omit<T, 'provenance'> & FromModel {
  const whole = result as Omit<T, 'provenance'> & { provenance: unknown }
  whole.provenance = theCalls().provenance(result.provenance)
  return whole as Omit<T, 'provenance'> & FromModel
}
