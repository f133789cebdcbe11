/**
 * Hob as a provider of the AI SDK (`ai` 7, specification version 4): `generateText`, `streamText`, `embedMany` and `rerank` against
 * an engine in this process.
 *
 * @module
 */
import { check, instance } from '../checks.js'
import { Engine } from '../engine.js'
import { HobError, invalid } from '../errors.js'
import type { EmbedRequest, GenerateRequest, RerankRequest } from '../requests.js'
import { noSuchModel } from './errors.js'
import { HobLanguageModel } from './language.js'
import type { HobOptions } from './prompt.js'
import { VERSION } from './spec.js'
import type { ProviderV4 } from './spec.js'
import { HobEmbeddingModel, HobRerankingModel } from './vectors.js'

export type { HobEmbeddingModel, HobLanguageModel, HobOptions, HobRerankingModel }

/**
 * Makes models for the SDK's functions. A model is named as everywhere in Hob; it is looked for when it is used. `settings` are
 * Hob's own options of each call, such as `enableThinking` or `modelIdle`; a call's own are `providerOptions.hob`.
 */
export interface HobProvider extends ProviderV4 {
  /** A chat model. */
  (modelId: string, settings?: HobOptions<GenerateRequest>): HobLanguageModel
  /** A chat model. */
  languageModel(modelId: string, settings?: HobOptions<GenerateRequest>): HobLanguageModel
  /** An embedder. */
  embeddingModel(modelId: string, settings?: HobOptions<EmbedRequest>): HobEmbeddingModel
  /** A reranker, or an embedder in its place. */
  rerankingModel(modelId: string, settings?: HobOptions<RerankRequest>): HobRerankingModel
  /** There are none: throws a `NoSuchModelError`. */
  imageModel(modelId: string): never
}

/**
 * A provider over an engine, which stays the caller's: to close, and to use besides.
 *
 * @example
 * ```ts
 * const hob = createHob(engine)
 * const { text } = await generateText({ model: hob('models/qwen3-0.6b'), prompt: 'Hello!' })
 * ```
 */
export function createHob(engine: Engine): HobProvider {
  check('createHob', { engine }, { engine: instance(Engine, 'Engine of the package hob') }, ['engine'])
  const languageModel = (modelId: string, settings: HobOptions<GenerateRequest> = {}) =>
    new HobLanguageModel(engine, named(modelId), settings)
  return Object.assign((modelId: string, settings?: HobOptions<GenerateRequest>) => languageModel(modelId, settings), {
    specificationVersion: VERSION,
    languageModel,
    embeddingModel: (modelId: string, settings: HobOptions<EmbedRequest> = {}) => new HobEmbeddingModel(engine, named(modelId), settings),
    rerankingModel: (modelId: string, settings: HobOptions<RerankRequest> = {}) => new HobRerankingModel(engine, named(modelId), settings),
    imageModel: (modelId: string): never => {
      throw noSuchModel(new HobError('Unsupported', 'Hob has no image models'), { id: modelId, type: 'imageModel' })
    },
  })
}

function named(modelId: unknown): string {
  if (typeof modelId !== 'string') throw invalid('a model is named by a string')
  return modelId
}
