// Written by `cargo xtask npm` from bindings/napi; do not edit.

/** A request for residency. */
export interface NativeAdmission {
  key: string
  /** Bytes it will take; without it the `estimate` function is asked. */
  cost?: number
  idle?: number | 'immediately' | 'never'
  useIdle?: number | 'immediately' | 'never'
  pinned?: boolean
  inUse?: boolean
  replace?: boolean
  noRoom?: 'wait' | 'refuse' | 'loadAnyway'
  timeoutMs?: number
  /** There is a `release` function. */
  releases: boolean
}

/** A successful admission. */
export interface NativeAdmitted {
  /** The entry's number, never used twice by a pool. */
  token: number
  /** The entry was resident, another's load was under way, or this admission loaded it. */
  origin: 'hit' | 'joined' | 'loaded'
  /** How long the load took, whoever ran it. */
  loadMs: number
  /** The use, for an admission in use. */
  lease?: NativeLease
}

/** One answer's likelihood. */
export interface NativeAnswer {
  /** Which answer. */
  index: number
  /** The mean of its tokens' log-probabilities, what ends the turn included. */
  meanLogprob: number
  /** Its probability among the answers given. */
  p: number
}

/** What ends requests: cancelling one ends its children too. A mailbox makes them. */
export declare class NativeCancelToken {
  /** A token that is cancelled when this one is, and can be cancelled alone. */
  child(): NativeCancelToken
  /** A child whose time is up after so many milliseconds. */
  withDeadline(timeoutMs: number): NativeCancelToken
  /** Cancels. Returns whether this call was the one that did. */
  cancel(): boolean
  /** Why it is cancelled, if it is. */
  get reason(): 'cancelled' | 'timeout' | null
}

/** Bytes of the host's own on the account. */
export declare class NativeCharge {
  /** Changes the charge; nothing after its end. */
  set(bytes: number): void
  /** Takes it off the account. Whether this call did. */
  end(): boolean
}

/** Counters since the pool was made. */
export interface NativeCounters {
  /** Uses and admissions answered by a resident entry. */
  hits: number
  /** Admissions that joined another's load. */
  joins: number
  /** Loads that succeeded. */
  loads: number
  /** Loads that failed or were cancelled. */
  failedLoads: number
  /** Entries unloaded for room. */
  evictions: number
  /** Entries unloaded for idleness. */
  idleUnloads: number
  /** Releases that failed. */
  failedReleases: number
  /** Admissions that had to stand in line. */
  waits: number
  /** Admissions refused. */
  refusals: number
  /** Callers who left before their answer. */
  left: number
  /** Ends of a use that was not open. */
  unbalancedEnds: number
}

/** A request to decide. */
export interface NativeDecide {
  model: string
  prompt: NativePrompt
  answers: Array<string>
  decision?: 'choice' | 'score' | 'predicate'
  request?: NativeRequest
}

/** Answers by likelihood. */
export interface NativeDecision {
  /** In the order of the request. */
  answers: Array<NativeAnswer>
  /** 0 to 1; absent for a predicate. */
  confidence?: number
  /** The expected level, for levels of one thing. */
  value?: number
  /** Tokens computed. */
  promptTokens: number
  /** Time by phase. */
  timings: NativeTimings
  /** Which model answered: the number to ask `provenance` for. */
  provenance: number
}

/** The device that computes. */
export interface NativeDevice {
  /** `cpu`, `gpu` (Metal or CUDA) or `fake`. */
  kind: string
  /** The device's own name, where it says one. */
  name: string
  /** MLX's version. */
  version: string
  /** Bytes that the device recommends to stay within, when it says. */
  recommendedBytes?: number
}

/**
 * What a request to embed may bring besides its model and texts. Absent when it brings none of it: reading an object's fields is most
 * of what a short call costs.
 */
export interface NativeEmbed {
  promptName?: string
  dimensions?: number
  normalize?: boolean
  truncate?: 'error' | 'end'
  request?: NativeRequest
}

/** Vectors, in the order of the texts. */
export interface NativeEmbeddings {
  /** All rows after one another. */
  data: Float32Array
  /** Numbers per row. */
  dimensions: number
  /** How token states were pooled: the number to ask `pooling` for. */
  pooling: number
  /** Tokens computed, special ones included. */
  promptTokens: number
  /** Tokens cut off, with truncation. */
  droppedTokens: number
  /** Time by phase. */
  timings: NativeTimings
  /** Which model computed it: the number to ask `provenance` for. */
  provenance: number
}

/** An engine. Its end by the garbage collector closes it in the background. */
export declare class NativeEngine {
  /** The device that computes. */
  get device(): NativeDevice
  /** Whether requests are served now. */
  get availability(): 'ready' | 'working' | 'quarantined' | 'closed'
  /** Requests taken on and not over. */
  get requests(): number
  /** The engine's pool. */
  pool(): NativePool
  /** Reads a model's configuration and headers. */
  inspect(id: number, model: string, request: NativeRequest): void
  /** What a model will take. */
  estimate(id: number, model: string, request: NativeRequest): void
  /** The verbs a model serves. */
  capabilities(id: number, model: string): void
  /** Makes a model resident; `progress` asks for letters on the way. */
  load(id: number, model: string, request: NativeRequest, progress: boolean, cancel?: NativeCancelToken | undefined | null): void
  /** Starts generating. `id` is the number of its `ready` letters. */
  generate(id: number, request: NativeGenerate, cancel?: NativeCancelToken | undefined | null): NativeStream
  /** Turns texts into vectors. */
  embed(id: number, model: string, texts: string | Array<string>, options?: NativeEmbed | undefined | null, cancel?: NativeCancelToken | undefined | null): void
  /** Orders documents by a query. */
  rerank(id: number, request: NativeRerank, cancel?: NativeCancelToken | undefined | null): void
  /** How likely a completion is. */
  score(id: number, request: NativeScoreRequest, cancel?: NativeCancelToken | undefined | null): void
  /** Which answer is the likeliest. */
  decide(id: number, request: NativeDecide, cancel?: NativeCancelToken | undefined | null): void
  /** Holds back new loads. */
  pause(id: number): void
  /** Ends everything; the call ends with whether all had stopped by the engine's bound. */
  close(id: number): void
}

/** How an engine is made. */
export interface NativeEngineOptions {
  budgetBytes?: number
  idle?: number | 'immediately' | 'never'
  noRoom?: 'wait' | 'refuse' | 'loadAnyway'
  capacity?: number
  queue?: number
  promptCacheBytes?: number
  stuckAfterMs?: number
  closeTimeoutMs?: number
  drainAfterRelease?: boolean
  /** The core's limits, as JSON. */
  limits?: string
}

/** One entry of a pool. */
export interface NativeEntryStatus {
  /** `kind:id`. */
  key: string
  /** The kind's name. */
  kind: string
  /** The name within the kind. */
  id: string
  /** The admission's number. */
  token: number
  /** Where it is in its life. */
  state: 'waiting' | 'loading' | 'ready' | 'draining'
  /** Bytes on the account for it now. */
  bytes: number
  /** Bytes estimated before the load; absent while that is still being found out. */
  estimatedBytes?: number
  /** Bytes measured after it. */
  measuredBytes?: number
  /** Never evicted nor swept. */
  pinned: boolean
  /** Leases now (for a load: callers waiting for it). */
  uses: number
  /** Milliseconds since its last use ended (or since its load); 0 while it is in use. */
  idleMs: number
  /** The idle policy that rules now: seconds, or a word. */
  idle: number | 'immediately' | 'never'
  /** Milliseconds until it is unloaded for idleness; absent while no countdown runs. */
  unloadInMs?: number
  /** How far the load is, 0 to 1. */
  progress?: number
  /** Loads of this key so far. */
  loads: number
  /** Unloads of this key so far. */
  unloads: number
  /** How long the last load took. */
  lastLoadMs?: number
}

/** What a model will take, in bytes, before it is loaded. */
export interface NativeEstimate {
  /** The weights as they will lie in memory. */
  weights: number
  /** Keys and values of one conversation of min(8192, context) tokens. */
  kvCache: number
  /** Temporaries of the largest step. */
  working: number
  /** The sum: what the pool charges. */
  total: number
}

/** An event of a stream. */
export interface NativeEvent {
  /** What it is. */
  kind: 'chunk' | 'toolCall' | 'rejectedCall' | 'finished'
  /** More of the answer. */
  text?: string
  /** More of the reasoning. */
  reasoning?: string
  /** The tokens that the piece comes from. */
  tokenIds?: Array<number>
  /** One per token, when asked for. */
  logprobs?: Array<NativeTokenLogprob>
  /** A call of one of the request's tools. */
  call?: NativeToolCall
  /** A call that could not be read. */
  rejected?: NativeRejectedCall
  /** The end. */
  summary?: NativeSummary
}

/** A subscription. */
export declare class NativeEvents {
  /** The events that have come, or null: then a `ready` letter says when to look again. After the last one an empty list. */
  look(): Array<NativePoolEvent> | null
  /** Ends the subscription. */
  free(): void
}

/** What an explicit evict did. */
export interface NativeEvicted {
  /** The token of the entry that went; absent when another call was already unloading it, or a load was stopped. */
  token?: number
  /** Bytes given back; 0 while leases still hold the model. */
  freedBytes: number
}

/** An error as the TypeScript half makes a `HobError` of it. */
export interface NativeFailure {
  /** The kind's stable name, such as `NotFound`. */
  code: string
  /** One line, with the causes. */
  message: string
}

/** A model of a scripted device. Tokens are bytes. */
export interface NativeFakeModel {
  /** By which requests name it. */
  name: string
  /** What it is for. */
  kind: 'chat' | 'embedder' | 'reranker'
  /** Bytes it takes. */
  bytes: number
  /** What a chat model answers; `Hello!` by default. */
  reply?: string
  /** A chat model answers with its rendered prompt. */
  echo?: boolean
  /** Tokens it can attend to. */
  context?: number
  /** Numbers per vector of an embedder; 8 by default. */
  dimensions?: number
  /** Bytes of keys and values per token of a conversation. */
  kvBytesPerToken?: number
  /** The chat template, by whose marks answers are read. */
  template?: string
}

/** A request to generate. */
export interface NativeGenerate {
  model: string
  prompt: NativePrompt
  maxTokens?: number
  stop?: Array<string>
  temperature?: number
  topK?: number
  topP?: number
  minP?: number
  repetitionPenalty?: number
  repetitionWindow?: number
  seed?: number
  logprobs?: number
  truncate?: 'error' | 'end' | 'start'
  coalesceTokens?: number
  coalesceMs?: number
  promptCache?: boolean
  request?: NativeRequest
}

/** A use of a resident. Its end by the garbage collector ends the use. */
export declare class NativeLease {
  /** The entry's token. */
  get token(): number
  /** Whether the pool has let the entry go. True also after the end. */
  get detached(): boolean
  /** Ends the use. Whether this call did. */
  end(): boolean
}

/** A letter of the mailbox. */
export interface NativeLetter {
  /** What it is about. */
  kind: 'settled' | 'progress' | 'estimate' | 'load' | 'release' | 'abort' | 'forget'
  /** Whose: a call's or an admission's number. */
  id: number
  /** How a call ended. */
  value?: unknown
  /** Why a call failed. */
  error?: NativeFailure
  /** Which run of a host's function. */
  call?: number
  /** The admission's token. */
  token?: number
  /** How far a load is. */
  fraction?: number
}

/** The mailbox of this environment. The package makes one. */
export declare class NativeMailbox {
  /**
   * `bell` is called in the event loop when letters have come, with what `take` gives. It does not keep the loop alive until `ref` is
   * called.
   */
  constructor(bell: (arg0?: Array<NativeLetter> | undefined | null) => void, page: Float64Array)
  /**
   * The letters that have come, oldest first: as numbers on the page where they consist of nothing else, the others as values. The
   * page says whether there are more: then the bell does not ring, and JavaScript takes them when the event loop has had a turn.
   */
  take(page: Float64Array): Array<NativeLetter> | null
  /** Keeps the event loop alive, until `unref`. */
  ref(): void
  /** Lets the event loop end. */
  unref(): void
  /** A token: cancelled with the one given, and always at the environment's end. */
  token(parent?: NativeCancelToken | undefined | null): NativeCancelToken
  /** What a host's function said: `error` when it failed, else the bytes it gave, if any. */
  answer(call: number, error?: string | undefined | null, bytes?: number | undefined | null): void
  /** How far a host's load is, 0 to 1. */
  report(call: number, fraction: number): void
}

/** Real bytes of the process on the device. */
export interface NativeMemory {
  /** Bytes that live arrays hold. */
  active: number
  /** Bytes freed by arrays but not yet given back to the system. */
  cache: number
  /** The highest `active` so far. */
  peak: number
  /** Bytes that the system could still give, when it says. */
  available?: number
}

/** What a model's files say. */
export interface NativeModelInfo {
  /** The canonical path. */
  id: string
  /** What it is for. */
  kind: 'chat' | 'embedder' | 'reranker'
  /** `model_type` of its configuration. */
  family: string
  /** The stored quantisation, if any. */
  quantization?: string
  /** Whether quantised weights will be expanded when loaded here. */
  dequantized: boolean
  /** The number type it will compute in here. */
  float?: 'float32' | 'float16' | 'bfloat16'
  /** Tokens it can attend to. */
  context: number
  /** Tokens one input of an embedder or reranker may have. */
  maxInput: number
  /** The verbs it serves: `generate`, `score`, `decide`, `embed`, `rerank`. */
  capabilities: Array<string>
  /** How an embedder pools. */
  pooling?: string
  /** Names of an embedder's prompts. */
  prompts: Array<string>
  /** Bytes by part. */
  estimate: NativeEstimate
}

/** While it lives, no load starts. */
export declare class NativePause {
  /** Lets loads go on. Whether this call did. */
  resume(): boolean
}

/** What an admission would do. */
export interface NativePlan {
  /** What would happen. */
  verdict: 'resident' | 'loading' | 'fits' | 'evicts' | 'alone' | 'waits' | 'refused'
  /** Whether it could load now within the budget. */
  fits: boolean
  /** Bytes that would be charged; 0 for a resident or loading key. */
  requiredBytes: number
  /** Bytes free now. */
  freeBytes: number
  /** Who would go, least recently used first. */
  evict: Array<string>
}

/** A pool. Its end by the garbage collector lets go of one handle. */
export declare class NativePool {
  /** A pool without an engine. */
  static create(mailbox: NativeMailbox, options: NativePoolOptions): NativePool
  /** Makes a key resident. `id` is also the number of the letters that call the host's functions. */
  admit(id: number, admission: NativeAdmission, cancel?: NativeCancelToken | undefined | null): void
  /** Begins a use of a resident entry; null when the pool does not hold it. */
  beginUse(key: string, idle?: number | 'immediately' | 'never'): NativeLease | null
  /** The token of a resident entry. */
  peek(key: string): number | null
  /** Refreshes a resident entry's clock. */
  touch(key: string): boolean
  /** Drops an entry without its release; the bytes taken off the account, or null. */
  forget(key: string): number | null
  /** Unloads an entry. */
  evict(id: number, key: string, force: boolean): void
  /** Unloads idle entries until the account is within the budget. */
  trim(id: number): void
  /** Unloads idle entries until so many bytes are free. */
  makeRoom(id: number, bytes: number, cancel?: NativeCancelToken | undefined | null): void
  /** Unloads every entry that is past its idle time. */
  sweep(id: number): void
  /** Pins an entry. */
  pin(key: string): boolean
  /** Undoes a pin. */
  unpin(key: string): boolean
  /** Changes an entry's own idle policy; none is the pool's. */
  setIdle(key: string, idle?: number | 'immediately' | 'never'): boolean
  /** Changes the pool's idle policy. */
  setDefaultIdle(idle: number | 'immediately' | 'never'): void
  /** Brings running idle countdowns forward; how many. */
  accelerateIdle(graceMs: number): number
  /** Changes the budget. */
  setBudget(bytes: number): void
  /** Corrects a resident entry's charge. */
  setMeasured(token: number, bytes: number): boolean
  /** Puts bytes of the host's own on the account. */
  charge(bytes: number): NativeCharge
  /** What an admission would do now. */
  plan(key: string, cost: number, noRoom?: 'wait' | 'refuse' | 'loadAnyway'): NativePlan
  /** A snapshot. */
  status(): NativePoolStatus
  /** Whether the pool is closed or closing. */
  get closed(): boolean
  /** Subscribes to what happens from now on. `id` is the number of its `ready` letters. */
  events(id: number, capacity: number): NativeEvents
  /** Holds back new loads. */
  pause(id: number): void
  /** Closes the pool. */
  close(id: number): void
}

/** Something that happened in a pool; which fields are there depends on `event`. */
export interface NativePoolEvent {
  /** What happened. */
  event: string
  /** Whose. */
  key?: string
  /** Its admission. */
  token?: number
  /** Bytes needed, reserved, charged or given back; the new budget. */
  bytes?: number
  /** Admissions before it. */
  ahead?: number
  /** 0 to 100. */
  percent?: number
  /** Milliseconds. */
  ms?: number
  /** Why an entry goes. */
  reason?: string
  /** The kind of an error. */
  code?: string
  /** Events that were lost because nobody read them. */
  missed?: number
}

/** How a pool of one's own is made. */
export interface NativePoolOptions {
  budgetBytes: number
  physicalLimitBytes?: number
  idle?: number | 'immediately' | 'never'
  noRoom?: 'wait' | 'refuse' | 'loadAnyway'
  maxWaiting?: number
}

/** A snapshot of a pool. */
export interface NativePoolStatus {
  /** The budget. */
  budgetBytes: number
  /** Bytes that are never exceeded. */
  physicalLimitBytes?: number
  /** Bytes of resident entries. */
  residentBytes: number
  /** Bytes reserved by loads under way. */
  pendingBytes: number
  /** Bytes of detached entries that are not back yet. */
  releasingBytes: number
  /** Bytes charged by the host. */
  externalBytes: number
  /** The sum of the four. */
  usedBytes: number
  /** The highest sum so far. */
  peakUsedBytes: number
  /** What an admission could take without evicting anything. */
  freeBytes: number
  /** Admissions standing in line. */
  waiting: number
  /** Whether new loads are held back. */
  paused: boolean
  /** Whether the pool is closed or closing. */
  closed: boolean
  /** Every entry, sorted by key. */
  entries: Array<NativeEntryStatus>
  /** Counters. */
  counters: NativeCounters
  /** Real memory, when the pool can measure it. */
  memory?: NativeMemory
}

/** What a model continues: exactly one of the three. */
export interface NativePrompt {
  /** A conversation, as JSON. */
  messages?: string
  text?: string
  tokens?: Array<number>
  /** How a conversation is rendered, as JSON. */
  render?: string
}

/** Where a result comes from. */
export interface NativeProvenance {
  /** The model's canonical path. */
  model: string
  /** `model_type` of its configuration. */
  family: string
  /** The stored quantisation, if any. */
  quantization?: string
  /** The digest of the manifest that the files were checked against, if they were. */
  manifest?: string
  /** Hob's version, the device's kind and its runtime's version. */
  runtime: string
}

/** One document's place. */
export interface NativeRanked {
  /** Which document. */
  index: number
  /** The classifier's raw output; absent for a cosine. */
  logit?: number
  /** Higher is better. */
  score: number
}

/** Documents by score. */
export interface NativeRanking {
  /** Best first, ties by index, unless the request asked for the input's order. */
  results: Array<NativeRanked>
  /** What the scores mean: a probability, 0 to 1, or a cosine, -1 to 1 (an approximation by an embedder). */
  scoreKind: 'normalized' | 'cosine'
  /** Tokens computed. */
  promptTokens: number
  /** Tokens cut off, with truncation. */
  droppedTokens: number
  /** Time by phase. */
  timings: NativeTimings
  /** Which model computed it: the number to ask `provenance` for. */
  provenance: number
}

/** What `trim`, `makeRoom` and `sweep` did. */
export interface NativeReclaimed {
  /** The keys that went, in order. */
  evicted: Array<string>
  /** Bytes given back. */
  freedBytes: number
  /** Whether the goal was reached (for `sweep`: always). */
  fits: boolean
  /** Releases that failed. Their entries are gone all the same. */
  errors: Array<NativeFailure>
}

/** What began as a call of a tool and is none. */
export interface NativeRejectedCall {
  /** The model's text, marks included. */
  raw: string
  /** What is wrong with it. */
  reason: string
}

/** What every request may bring. */
export interface NativeRequest {
  timeoutMs?: number
  onCancel?: 'abort' | 'stop'
  kind?: 'chat' | 'embedder' | 'reranker'
  float?: 'float32' | 'float16' | 'bfloat16'
  dequantize?: boolean
  pooling?: 'cls' | 'max' | 'mean' | 'lastToken'
  /** The manifest, as JSON. */
  manifest?: string
  idle?: number | 'immediately' | 'never'
  modelIdle?: number | 'immediately' | 'never'
  pinned?: boolean
}

/** A request to rerank. */
export interface NativeRerank {
  model: string
  query: string
  documents: Array<string>
  instruct?: string
  topN?: number
  unsorted?: boolean
  truncate?: 'error' | 'end'
  request?: NativeRequest
}

/** Log-probabilities of a completion's tokens. */
export interface NativeScore {
  /** The completion's token ids. */
  tokens: Uint32Array
  /** The natural logarithm of each token's probability, given all before it. */
  logprobs: Float32Array
  /** Minus the mean of `logprobs`. */
  meanNll: number
}

/** A request to score a completion. */
export interface NativeScoreRequest {
  model: string
  prompt: NativePrompt
  completion: string
  request?: NativeRequest
}

/** A stream of events. Its end by the garbage collector cancels the generation. */
export declare class NativeStream {
  /**
   * The events that have come, or null: then a `ready` letter says when to look again. After the last event an empty list. A text
   * is one chunk of nothing else, and its tokens are in `ids`, behind their count.
   */
  look(ids: Float64Array): string | Array<NativeEvent> | null
  /** Ends the generation with an error of kind `Cancelled`. */
  cancel(): void
  /** Ends the generation with what there is. */
  stop(): void
  /** Cancels what still runs and lets go of it. */
  free(): void
}

/** The end of an answer. */
export interface NativeSummary {
  /**
   * Why it ended: the model's turn or a stop string; `maxTokens`; the context is full; stopped by the caller, who wanted what
   * there is; the time was up.
   */
  finish: 'stop' | 'length' | 'context' | 'cancelled' | 'timeout'
  /** Which stop string was found. */
  stopIndex?: number
  /** Tokens of the prompt as the model saw it. */
  promptTokens: number
  /** Tokens of the prompt that were cut off. */
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

/** Milliseconds spent in each phase; what did not happen is left out. */
export interface NativeTimings {
  /** From the call until work on the device began, without the load. */
  queueMs: number
  /** The model's load, when this request caused or joined one. */
  loadMs?: number
  /** From the first prompt token to the first new token; all computation of embed and rerank. */
  prefillMs?: number
  /** From the first new token to the last. */
  decodeMs?: number
  /** From the call to the end. */
  totalMs: number
}

/** A token's log-probability and the likeliest ones. */
export interface NativeTokenLogprob {
  /** The natural logarithm of the chosen token's probability, by the model itself. */
  logprob: number
  /** The likeliest tokens, as `[id, logprob]`, likeliest first. */
  top: Array<[number, number]>
}

/** A call of a tool. */
export interface NativeToolCall {
  /** Which call this is. */
  id: string
  /** The tool's name. */
  name: string
  /** The arguments: the text of a JSON object. */
  arguments: string
}

/** How often the scripted device came to a point. */
export declare function fakeCount(engine: NativeEngine, point: string): number

/** Ends when the scripted device waits at a held point. */
export declare function fakeHeld(mailbox: NativeMailbox, id: number, engine: NativeEngine, point: string): void

/** For tests: a panic in an export. */
export declare function fakePanic(): void

/** Scripts what a scripted device does at a point: `hold`, `release`, `pass` (go on once), `fail` or `panic` (the next arrival). */
export declare function fakeScript(engine: NativeEngine, action: 'hold' | 'release' | 'pass' | 'fail' | 'panic', point: string): void

/** For tests: native handles that are alive in this process, over all its threads. */
export declare function liveHandles(): number

/** Opens an engine; it is what the call ends with. */
export declare function openEngine(mailbox: NativeMailbox, id: number, options: NativeEngineOptions): void

/** Opens an engine on a scripted device that knows these models; it is what the call ends with. */
export declare function openFakeEngine(mailbox: NativeMailbox, id: number, models: Array<NativeFakeModel>, options: NativeEngineOptions): void

/** How vectors with this number were pooled. */
export declare function pooling(number: number): string

/** Where a result with this number comes from. */
export declare function provenance(number: number): NativeProvenance

/** This addon's version; the package refuses another one's. */
export declare function version(): string
