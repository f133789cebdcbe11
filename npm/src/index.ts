/**
 * Hob for Node, Bun and Electron: chat, embeddings and reranking in the host's own process.
 *
 * @module
 */

export { CancelToken } from './cancel.js'
export { Engine } from './engine.js'
export type { Answer, Availability, Closed, Decision, Device, Embeddings, Estimate, ModelInfo, Ranked, Ranking, Score } from './engine.js'
export { HobError } from './errors.js'
export type { ErrorCode } from './errors.js'
export { Charge, Lease, Pause, Pool, PoolEvents } from './pool.js'
export type {
  Admission, Admitted, BudgetEvent, Counters, EntryEvent, EntryStatus, Evicted, Failure, Key, LoadContext, LoadedEvent, LoadFailedEvent,
  LoadProgressEvent, LoadStartedEvent, Memory, MissedEvent, Plan, PoolEvent, PoolOptions, PoolStatus, Reclaimed, RefusedEvent,
  ReleaseFailedEvent, ResidentEvent, StateEvent, UnloadedEvent, UnloadReason, UnloadStartedEvent, WaitingEvent,
} from './pool.js'
export type {
  CalledFunction, ContentPart, DecideRequest, EmbedRequest, EngineOptions, GenerateRequest, Idle, Limits, LoadOptions, Message, MessageToolCall,
  NoRoom, PromptOptions, RenderOptions, RequestOptions, RerankRequest, ScoreRequest, Tool, ToolFunction,
} from './requests.js'
export { GenerateStream } from './stream.js'
export type {
  ChunkEvent, FinishedEvent, Generation, Provenance, RejectedCall, RejectedCallEvent, StreamEvent, Summary, Timings, TokenLogprob,
  ToolCall, ToolCallEvent,
} from './stream.js'
