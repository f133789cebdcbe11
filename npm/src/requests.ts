import { cancelToken } from './cancel.js'
import type { CancelToken } from './cancel.js'
import * as checks from './checks.js'
import { check } from './checks.js'
import { invalid } from './errors.js'
import type {
  NativeCancelToken, NativeDecide, NativeEmbed, NativeEngineOptions, NativeGenerate, NativePrompt, NativeRequest, NativeRerank, NativeScoreRequest,
} from './native.js'

/** How long something stays when it is idle: so many seconds (taken as 30 to 86,400; 0 is `'immediately'`), or a word. */
export type Idle = number | 'immediately' | 'never'

/** What to do without room: stand in line (the default), fail with `BudgetExceeded`, or load over the budget. */
export type NoRoom = 'wait' | 'refuse' | 'loadAnyway'

/** How much one request may bring; a request over a limit is an `InvalidArgument` error. Bytes are of UTF-8. */
export interface Limits {
  /** Of one prompt, and of one conversation with its tools and documents. Default 16 MiB. */
  promptBytes?: number
  /** Of one conversation. Default 10,000. */
  messages?: number
  /** Of one request. Default 1,000. */
  tools?: number
  /** Of each text to embed, of a query, and of each document to rank. Default 1 MiB. */
  textBytes?: number
  /** Texts, documents or answers of one request. Default 10,000. */
  texts?: number
  /** Of all of them together. Default 64 MiB. */
  totalBytes?: number
  /** Stop strings of one request. Default 64, which is also the most there can be. */
  stops?: number
  /** Of each stop string. Default 4,096, which is also the most there can be. */
  stopBytes?: number
  /** Of one pending call of a tool in an answer. Default 1 MiB. */
  callBytes?: number
}

/** How an engine is made. */
export interface EngineOptions {
  /** The pool's budget in bytes. Default: 70 % of what the device recommends, else of three quarters of the memory. */
  budgetBytes?: number
  /** How long models stay after their last use. Default 900 seconds. */
  idle?: Idle
  /** What a request does while there is no room for its model. Default `'wait'`. */
  noRoom?: NoRoom
  /** Generations of one model that run at once, in one batch. Default 8. */
  capacity?: number
  /** Requests of all kinds that may wait beyond `capacity`; one more is refused with `Busy`. Default 64. */
  queue?: number
  /** Bytes of computed prompts kept for later ones, within the budget; 0 keeps none. Default 512 MiB. */
  promptCacheBytes?: number
  /** How long the device may stay at one piece of given-up work before it counts as stuck. Default 30,000. */
  stuckAfterMs?: number
  /** How long `close` waits for running work. Default 120,000. */
  closeTimeoutMs?: number
  /** Give freed memory back to the system each time a model goes. Default true. */
  drainAfterRelease?: boolean
  /** How much one request may bring. */
  limits?: Limits
}

/** What every request may bring. */
export interface RequestOptions {
  /** Gives up when aborted, in any phase: waiting for room, loading, computing. The error's `cause` is the signal's reason. */
  signal?: AbortSignal
  /** As `signal`. */
  cancel?: CancelToken
  /** Gives up after so many milliseconds, with `Timeout`. */
  timeoutMs?: number
  /** How the model is loaded, if it is not resident. */
  load?: LoadOptions
  /** How long the model stays after this use, instead of its own policy or the pool's. */
  idle?: Idle
  /** The model's own policy from now on; the last one given wins. */
  modelIdle?: Idle
  /** Keep the model whatever happens, until it is unpinned or evicted, or the engine closes. */
  pinned?: boolean
}

/** How a model is loaded. */
export interface LoadOptions {
  /** What it is used as; its files say so by default. */
  kind?: 'chat' | 'embedder' | 'reranker'
  /** The number type to compute in; the files' own by default (on a CPU: float32). */
  float?: 'float32' | 'float16' | 'bfloat16'
  /** Expand quantised weights at load; by default on a CPU only. */
  dequantize?: boolean
  /** How an embedder pools; its files say so by default. */
  pooling?: 'cls' | 'max' | 'mean' | 'lastToken'
  /** What the model's files must be, checked before they are loaded: a manifest, as an object or its JSON. */
  manifest?: object | string
}

/** A part of a message, in the style of other APIs. */
export interface ContentPart {
  /** There are parts of text only. */
  type: 'text'
  /** The text. */
  text: string
}

/** A call that an assistant made, in OpenAI's shape. */
export interface MessageToolCall {
  /** Which call this is; the tool's message names it in `tool_call_id`. */
  id?: string
  /** There are calls of functions only. */
  type?: 'function'
  /** What was called. */
  function: CalledFunction
}

/** The name and the arguments of a call. */
export interface CalledFunction {
  /** The tool's name. */
  name: string
  /** The arguments: a JSON object, or its text. */
  arguments: string | object
}

/** A message of a conversation, in OpenAI's shape. Further fields are handed to the model's chat template. */
export interface Message {
  /** Who speaks. Templates know the four; some know others. */
  role: 'system' | 'user' | 'assistant' | 'tool' | (string & {})
  /** What is said; absent or null where calls of tools are all. */
  content?: string | ContentPart[] | null
  /** The speaker's name, for templates that print it. */
  name?: string
  /** The reasoning that came before an assistant's text. */
  reasoning_content?: string
  /** Calls that an assistant made. */
  tool_calls?: MessageToolCall[]
  /** The call that a tool's message answers. */
  tool_call_id?: string
  /** For the template. */
  [further: string]: unknown
}

/** A tool that a model may call, in OpenAI's shape. */
export interface Tool {
  /** There are functions only. */
  type: 'function'
  /** The function. */
  function: ToolFunction
}

/** What a model is told about a function. */
export interface ToolFunction {
  /** Its name. */
  name: string
  /** What it does, for the model. */
  description?: string
  /** Its arguments, as a JSON schema. */
  parameters?: object
  /** OpenAI's wish that arguments keep the schema. Nothing enforces it here. */
  strict?: boolean | null
}

/** What a model continues: exactly one of the three. */
export interface PromptOptions {
  /** A conversation, rendered by the model's chat template. */
  messages?: readonly Message[]
  /** Text as it is, without a template. */
  prompt?: string
  /** Token ids as they are. */
  promptTokens?: readonly number[] | Uint32Array
}

/** How a conversation is rendered. */
export interface RenderOptions {
  /** Tools that the model may call. */
  tools?: readonly Tool[]
  /** Documents, for templates with retrieval. */
  documents?: readonly unknown[]
  /** Switches reasoning on or off, where the template knows `enable_thinking`. */
  enableThinking?: boolean
  /** End with the opening of the assistant's turn. Default true. */
  addGenerationPrompt?: boolean
  /** Further variables of the template. */
  templateVariables?: Record<string, unknown>
}

/** A request to generate. */
export interface GenerateRequest extends PromptOptions, RenderOptions, RequestOptions {
  /** A directory, a `.gguf` file, or a hub id in the local Hugging Face cache. */
  model: string
  /** New tokens at most; by default the model's context is the end. */
  maxTokens?: number
  /** Strings that end the answer; none of their text is given out. */
  stop?: string | readonly string[]
  /** Softmax temperature, 0 to 100; 0 (the default) takes the likeliest token. */
  temperature?: number
  /** Keep only the most likely tokens; 0 (the default) keeps all. */
  topK?: number
  /** Keep the smallest set of tokens with this probability, in (0, 1]. Default 1. */
  topP?: number
  /** Keep tokens at least so many times as likely as the likeliest, in [0, 1]. Default 0. */
  minP?: number
  /** Divide the logits of tokens already seen, in (0, 10]; 1 (the default) is off. */
  repetitionPenalty?: number
  /** How many of the latest tokens the penalty looks at; 0 means all. Default 64. */
  repetitionWindow?: number
  /** Seed of the random numbers; drawn by default. The summary reports the one in use. */
  seed?: number
  /** Report each token's log-probability and this many likeliest alternatives (0 to 100). */
  logprobs?: number
  /** What happens to a prompt longer than the context: refused (the default), or cut at its end or start. */
  truncate?: 'error' | 'end' | 'start'
  /** Gather so many tokens into one chunk, or what comes within `coalesceMs`. By default each comes alone. */
  coalesceTokens?: number
  /** How many milliseconds the first token of a chunk may wait. */
  coalesceMs?: number
  /** Whether keys and values of earlier prompts may serve this one, and its own be kept. Default true. */
  promptCache?: boolean
  /** What a cancel or a timeout means: an error (the default), or the answer so far. */
  onCancel?: 'abort' | 'stop'
}

/** A request to embed. */
export interface EmbedRequest extends RequestOptions {
  /** A directory or a hub id. */
  model: string
  /** One text or several. */
  texts: string | readonly string[]
  /** Which of the model's prompts to put before each text, such as `query`. */
  promptName?: string
  /** Keep this many leading dimensions (Matryoshka). */
  dimensions?: number
  /** Scale vectors to unit length; by default as the model's files say. */
  normalize?: boolean
  /** What happens to a text longer than the model takes: refused (the default), or cut at its end. */
  truncate?: 'error' | 'end'
}

/** A request to rerank. */
export interface RerankRequest extends RequestOptions {
  /** A reranker, or an embedder (whose score is a cosine). */
  model: string
  /** What the documents should answer. */
  query: string
  /** At least one, none blank. */
  documents: readonly string[]
  /** An instruction, for models that take one. */
  instruct?: string
  /** Keep only the best so many. */
  topN?: number
  /** Leave the results in the order of the documents. */
  unsorted?: boolean
  /** What happens to a pair longer than the model takes: refused (the default), or cut. */
  truncate?: 'error' | 'end'
}

/** A request to score a completion. */
export interface ScoreRequest extends PromptOptions, RequestOptions {
  /** A chat model. */
  model: string
  /** The text whose likelihood is asked for; not empty. */
  completion: string
}

/** A request to decide. */
export interface DecideRequest extends PromptOptions, RenderOptions, RequestOptions {
  /** A chat model. */
  model: string
  /** The answers, as the model would write them: 1 to 256, none empty. */
  answers: readonly string[]
  /**
   * One of several things (`'choice'`, the default), levels of one thing with the lowest first (`'score'`: there is a value too),
   * or yes and no (`'predicate'`).
   */
  decision?: 'choice' | 'score' | 'predicate'
}

const { name, text, texts, textOrTexts, number, numbers, flag, list, object, oneOf } = checks

const LOAD = {
  kind: oneOf('chat', 'embedder', 'reranker'), float: oneOf('float32', 'float16', 'bfloat16'), dequantize: flag,
  pooling: oneOf('cls', 'max', 'mean', 'lastToken'), manifest: checks.either(object, text),
}

export const REQUEST = {
  signal: checks.signal, cancel: cancelToken, timeoutMs: number, load: object,
  idle: checks.idle, modelIdle: checks.idle, pinned: flag,
}

const PROMPT = { messages: list, prompt: text, promptTokens: numbers }

const RENDER = { tools: list, documents: list, enableThinking: flag, addGenerationPrompt: flag, templateVariables: object }

const GENERATE = {
  ...PROMPT, ...RENDER, ...REQUEST, model: name, maxTokens: number, stop: textOrTexts, temperature: number, topK: number,
  topP: number, minP: number, repetitionPenalty: number, repetitionWindow: number, seed: number, logprobs: number,
  truncate: oneOf('error', 'end', 'start'), coalesceTokens: number, coalesceMs: number, promptCache: flag,
  onCancel: oneOf('abort', 'stop'),
}

const EMBED = {
  ...REQUEST, model: name, texts: textOrTexts, promptName: name, dimensions: number, normalize: flag,
  truncate: oneOf('error', 'end'),
}

const RERANK = {
  ...REQUEST, model: name, query: text, documents: texts, instruct: text, topN: number, unsorted: flag,
  truncate: oneOf('error', 'end'),
}

const SCORE = { ...PROMPT, ...REQUEST, model: name, completion: text }

const DECIDE = {
  ...PROMPT, ...RENDER, ...REQUEST, model: name, answers: texts, decision: oneOf('choice', 'score', 'predicate'),
}

const ENGINE = {
  budgetBytes: number, idle: checks.idle, noRoom: oneOf('wait', 'refuse', 'loadAnyway'), capacity: number, queue: number,
  promptCacheBytes: number, stuckAfterMs: number, closeTimeoutMs: number, drainAfterRelease: flag, limits: object,
}

const LIMITS = {
  promptBytes: number, messages: number, tools: number, textBytes: number, texts: number, totalBytes: number, stops: number,
  stopBytes: number, callBytes: number,
}

/** The same fields without those that are undefined. */
type Given<T> = { [K in keyof T]: Exclude<T[K], undefined> }

/** Node-API reads an undefined field as an absent one, so it may stay; this only tells the compiler. */
function given<T>(fields: T): Given<T> {
  return fields as Given<T>
}

function json(what: string, value: unknown): string {
  try {
    return JSON.stringify(value)
  } catch {
    // A cycle, a bigint. The engine's words would repeat names out of the value.
    throw invalid(`${what} cannot be written as JSON`)
  }
}

export function readEngineOptions(options: EngineOptions): NativeEngineOptions {
  const { limits, ...rest } = check('Engine.open', options, ENGINE)
  if (limits === undefined) return rest
  const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)
  const entries = Object.entries(check('Engine.open: limits', limits, LIMITS))
  return { ...rest, limits: json('limits', Object.fromEntries(entries.map(([name, value]) => [snake(name), value]))) }
}

/** Undefined when there is nothing to say. */
export function readRequest(what: string, options: RequestOptions & { onCancel?: 'abort' | 'stop' }): NativeRequest | undefined {
  const { timeoutMs, onCancel, load, idle, modelIdle, pinned } = options
  if ((timeoutMs ?? onCancel ?? load ?? idle ?? modelIdle ?? pinned) === undefined) return undefined
  const common = given({ timeoutMs, onCancel, idle, modelIdle, pinned })
  if (load === undefined) return common as NativeRequest
  const { manifest, ...rest } = check(`${what}: load`, load, LOAD)
  const written = typeof manifest === 'object' ? json('the manifest', manifest) : manifest
  return given({ ...common, ...rest, manifest: written }) as NativeRequest
}

function readPrompt(what: string, options: PromptOptions & RenderOptions): NativePrompt {
  const { messages, prompt, promptTokens, tools, documents, enableThinking, addGenerationPrompt, templateVariables } = options
  const parts = [messages, prompt, promptTokens].filter((part) => part !== undefined)
  if (parts.length !== 1) throw invalid(`${what}: give exactly one of messages, prompt and promptTokens`)
  const render = given({
    tools, documents, enable_thinking: enableThinking, add_generation_prompt: addGenerationPrompt, extra: templateVariables,
  })
  const rendered = Object.values(render).some((value) => value !== undefined)
  return given({
    messages: messages && json('messages', messages),
    text: prompt,
    tokens: promptTokens && Array.from(promptTokens),
    render: rendered ? json('tools, documents or templateVariables', render) : undefined,
  }) as NativePrompt
}

/** What ends a request, as it goes to the call. */
interface Ends {
  signal: AbortSignal | undefined
  cancel: NativeCancelToken | undefined
}

export function readGenerate(request: GenerateRequest): Ends & { wanted: NativeGenerate; stops: boolean } {
  const checked = check('generate', request, GENERATE, ['model'])
  const {
    model, maxTokens, stop, temperature, topK, topP, minP, repetitionPenalty, repetitionWindow, seed, logprobs, truncate,
    coalesceTokens, coalesceMs, promptCache, signal, cancel, onCancel,
  } = checked
  const wanted = given({
    model, maxTokens, temperature, topK, topP, minP, repetitionPenalty, repetitionWindow, seed, logprobs, truncate,
    coalesceTokens, coalesceMs, promptCache,
    stop: typeof stop === 'string' ? [stop] : (stop as string[] | undefined),
    prompt: readPrompt('generate', checked),
    request: readRequest('generate', checked),
  }) as NativeGenerate
  return { wanted, signal, cancel: cancel?.native, stops: onCancel === 'stop' }
}

export function readEmbed(request: EmbedRequest): Ends & { model: string; list: string | string[]; options: NativeEmbed | undefined } {
  const checked = check('embed', request, EMBED, ['model', 'texts'])
  const { model, texts, promptName, dimensions, normalize, truncate, signal, cancel } = checked
  const common = readRequest('embed', checked)
  const plain = (promptName ?? dimensions ?? normalize ?? truncate ?? common) === undefined
  const options = plain ? undefined : (given({ promptName, dimensions, normalize, truncate, request: common }) as NativeEmbed)
  // One text alone is cheaper to hand over than a list of one.
  const list = texts.length === 1 ? texts[0]! : (texts as string | string[])
  return { model, list, options, signal, cancel: cancel?.native }
}

export function readRerank(request: RerankRequest): Ends & { wanted: NativeRerank } {
  const checked = check('rerank', request, RERANK, ['model', 'query', 'documents'])
  const { model, query, documents, instruct, topN, unsorted, truncate, signal, cancel } = checked
  const wanted = given({
    model, query, documents: documents as string[], instruct, topN, unsorted, truncate,
    request: readRequest('rerank', checked),
  }) as NativeRerank
  return { wanted, signal, cancel: cancel?.native }
}

export function readScore(request: ScoreRequest): Ends & { wanted: NativeScoreRequest } {
  const checked = check('score', request, SCORE, ['model', 'completion'])
  const { model, completion, signal, cancel } = checked
  const wanted = given({ model, completion, prompt: readPrompt('score', checked), request: readRequest('score', checked) })
  return { wanted: wanted as NativeScoreRequest, signal, cancel: cancel?.native }
}

export function readDecide(request: DecideRequest): Ends & { wanted: NativeDecide } {
  const checked = check('decide', request, DECIDE, ['model', 'answers'])
  const { model, answers, decision, signal, cancel } = checked
  const wanted = given({
    model, answers: answers as string[], decision,
    prompt: readPrompt('decide', checked),
    request: readRequest('decide', checked),
  }) as NativeDecide
  return { wanted, signal, cancel: cancel?.native }
}
