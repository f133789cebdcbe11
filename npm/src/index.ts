/**
 * Hob for Node, Bun and Electron: chat, embeddings and reranking in the host's own process.
 *
 * @module
 */

export { CancelToken } from './cancel.js'
export { Engine } from './engine.js'
export type { Answer, Availability, Decision, Device, Embeddings, Estimate, ModelInfo, Ranked, Ranking, Score } from './engine.js'
export { HobError } from './errors.js'
export type { ErrorCode } from './errors.js'
export { Charge, Lease, Pause, Pool, PoolEvents } from './pool.js'
export type {
  Admission, Admitted, Counters, EntryStatus, Evicted, Failure, Key, LoadContext, Memory, Plan, PoolEvent, PoolOptions, PoolStatus,
  Reclaimed, UnloadReason,
} from './pool.js'
export type {
  ContentPart, DecideRequest, EmbedRequest, EngineOptions, GenerateRequest, Idle, Limits, LoadOptions, Message, MessageToolCall,
  NoRoom, PromptOptions, RenderOptions, RequestOptions, RerankRequest, ScoreRequest, Tool,
} from './requests.js'
export { GenerateStream } from './stream.js'
export type {
  ChunkEvent, Generation, Provenance, RejectedCall, StreamEvent, Summary, Timings, TokenLogprob, ToolCall,
} from './stream.js'
