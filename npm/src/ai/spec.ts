/**
 * The specification that the models of `hob/ai` follow: version 4, of `ai` 7. Types only: at run time nothing of the SDK is needed.
 */
import type {
  EmbeddingModelV4, LanguageModelV4, ProviderV4, RerankingModelV4,
} from '@ai-sdk/provider' with { 'resolution-mode': 'import' }

export type {
  EmbeddingModelV4, LanguageModelV4, LanguageModelV4CallOptions, LanguageModelV4Content, LanguageModelV4FinishReason,
  LanguageModelV4GenerateResult, LanguageModelV4Message, LanguageModelV4StreamPart, LanguageModelV4StreamResult,
  LanguageModelV4ToolResultOutput, LanguageModelV4Usage, ProviderV4, RerankingModelV4, SharedV4ProviderOptions, SharedV4Warning,
} from '@ai-sdk/provider' with { 'resolution-mode': 'import' }

export type EmbedOptions = Parameters<EmbeddingModelV4['doEmbed']>[0]
export type EmbedResult = Awaited<ReturnType<EmbeddingModelV4['doEmbed']>>
export type RerankOptions = Parameters<RerankingModelV4['doRerank']>[0]
export type RerankResult = Awaited<ReturnType<RerankingModelV4['doRerank']>>

/** What a provider of the SDK is called by. */
export type ModelType = 'languageModel' | 'embeddingModel' | 'rerankingModel' | 'imageModel'

/** Which of the specification's versions this is. */
export const VERSION: (LanguageModelV4 | ProviderV4)['specificationVersion'] = 'v4'
