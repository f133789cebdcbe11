import type { Engine } from '../engine.js'
import type { EmbedRequest, RerankRequest } from '../requests.js'
import { sdkError } from './errors.js'
import { ownOptions } from './prompt.js'
import type { HobOptions } from './prompt.js'
import { VERSION } from './spec.js'
import type { EmbeddingModelV4, EmbedOptions, EmbedResult, RerankingModelV4, RerankOptions, RerankResult, SharedV4Warning } from './spec.js'

/** An embedder for `embed` and `embedMany`. */
export class HobEmbeddingModel implements EmbeddingModelV4 {
  readonly specificationVersion = VERSION
  readonly provider = 'hob'
  readonly modelId: string
  /** Well within an engine's limits; the SDK makes several calls of more, and others get their turn in between. */
  readonly maxEmbeddingsPerCall = 1000
  /** There is one device: calls at the same time would only stand in line. */
  readonly supportsParallelCalls = false
  readonly #engine: Engine
  readonly #settings: HobOptions<EmbedRequest>

  /** @internal */
  constructor(engine: Engine, modelId: string, settings: HobOptions<EmbedRequest>) {
    this.#engine = engine
    this.modelId = modelId
    this.#settings = settings
  }

  /** One vector per value, in order. */
  async doEmbed(options: EmbedOptions): Promise<EmbedResult> {
    const { values, dimensions, abortSignal, providerOptions } = options
    try {
      const { embeddings, promptTokens } = await this.#engine.embed({
        ...this.#settings,
        ...ownOptions(providerOptions),
        ...(dimensions !== undefined && { dimensions }),
        ...(abortSignal !== undefined && { signal: abortSignal }),
        model: this.modelId,
        texts: values,
      })
      return { embeddings: embeddings.map((vector) => Array.from(vector)), usage: { tokens: promptTokens }, warnings: [] }
    } catch (error) {
      throw sdkError(error, { id: this.modelId, type: 'embeddingModel' }, abortSignal)
    }
  }
}

/** A reranker (or an embedder in its place) for `rerank`. */
export class HobRerankingModel implements RerankingModelV4 {
  readonly specificationVersion = VERSION
  readonly provider = 'hob'
  readonly modelId: string
  readonly #engine: Engine
  readonly #settings: HobOptions<RerankRequest>

  /** @internal */
  constructor(engine: Engine, modelId: string, settings: HobOptions<RerankRequest>) {
    this.#engine = engine
    this.modelId = modelId
    this.#settings = settings
  }

  /** The documents' indices, best first. */
  async doRerank(options: RerankOptions): Promise<RerankResult> {
    const { documents, query, topN, abortSignal, providerOptions } = options
    const warnings: SharedV4Warning[] = []
    if (documents.type === 'object') {
      warnings.push({ type: 'compatibility', feature: 'documents that are objects', details: 'the model reads them as JSON' })
    }
    const texts = documents.type === 'text' ? documents.values : documents.values.map((value) => JSON.stringify(value))
    try {
      const { results } = await this.#engine.rerank({
        ...this.#settings,
        ...ownOptions(providerOptions),
        ...(topN !== undefined && { topN }),
        ...(abortSignal !== undefined && { signal: abortSignal }),
        model: this.modelId,
        query,
        documents: texts,
      })
      const ranking = results.map(({ index, score }) => ({ index, relevanceScore: score }))
      return { ranking, warnings, response: { timestamp: new Date(), modelId: this.modelId } }
    } catch (error) {
      throw sdkError(error, { id: this.modelId, type: 'rerankingModel' }, abortSignal)
    }
  }
}
