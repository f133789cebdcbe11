// A server that speaks OpenAI's protocol, on Bun.serve or node:http:  node openai-server.mjs [--port 8080] NAME=MODEL...
// Only the models named are served, and only to this machine. It needs nothing but Hob.
//   POST /v1/chat/completions (also as a stream)  /v1/embeddings  /v1/rerank  /x/models/unload    GET /v1/models  /x/status
import { randomUUID } from 'node:crypto'
import { once } from 'node:events'
import { createServer } from 'node:http'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { Readable } from 'node:stream'
import { pipeline } from 'node:stream/promises'
import { fileURLToPath } from 'node:url'

import { Engine, HobError } from 'hob'
import type { EmbedRequest, ErrorCode, GenerateRequest, Message, ModelInfo, RerankRequest, StreamEvent, Summary } from 'hob'

export interface ServerOptions {
  /** 0 takes a free one. Default 8080. */
  port?: number
  /** Default 127.0.0.1: this machine only. There is no authentication; think before you name another. */
  hostname?: string
  /** A larger body is refused with 413. Default 16 MiB. */
  maxBodyBytes?: number
}

/** Serves models by name until `close`. The engine stays the caller's. */
export async function serve(engine: Engine, models: Record<string, string>, options: ServerOptions = {}) {
  const { port = 8080, hostname = '127.0.0.1', maxBodyBytes = 16 * 2 ** 20 } = options
  const served = new Map<string, ModelInfo & { reference: string }>()
  for (const [name, reference] of Object.entries(models)) served.set(name, { ...(await engine.inspect(reference)), reference })
  const handler = createHandler(engine, served, { hostname, maxBodyBytes })
  const { Bun } = globalThis as { Bun?: BunRuntime }
  if (Bun !== undefined) {
    // idleTimeout: nothing is sent while a long prompt is computed.
    const server = Bun.serve({ port, hostname, idleTimeout: 0, maxRequestBodySize: Math.max(maxBodyBytes, 2 ** 27), fetch: handler })
    return { url: `http://${hostname}:${server.port}`, close: async () => void (await server.stop(true)) }
  }
  const server = createServer((incoming, outgoing) => void onNode(handler, incoming, outgoing))
  server.listen(port, hostname)
  await once(server, 'listening')
  const close = () =>
    new Promise<void>((resolve) => {
      server.close(() => resolve())
      server.closeAllConnections()
    })
  return { url: `http://${hostname}:${(server.address() as AddressInfo).port}`, close }
}

interface BunRuntime {
  serve(options: object): { port: number; stop(now: boolean): Promise<void> }
}

type Models = ReadonlyMap<string, ModelInfo & { reference: string }>
type Body = Record<string, unknown>

/** What a client did wrong. Everything else that can be wrong with a request is an error of Hob's. */
class ClientError extends Error {
  constructor(readonly status: number, message: string, readonly code: string | null = null, readonly param: string | null = null) {
    super(message)
  }
}

const STATUS: Partial<Record<ErrorCode, number>> = {
  InvalidArgument: 400, Unsupported: 400, NotFound: 404, InUse: 409, Busy: 429, Cancelled: 499, OutOfMemory: 503,
  BudgetExceeded: 503, Closed: 503, Timeout: 504,
}

/** An error in OpenAI's shape. */
function described(error: unknown): { status: number; body: { error: object } } {
  const { status, message, code, param = null } = error instanceof HobError
    ? { status: STATUS[error.code] ?? 500, message: error.message, code: error.code }
    : error instanceof ClientError ? error : { status: 500, message: 'the server failed', code: null }
  const type = status === 429 ? 'rate_limit_error' : status >= 500 ? 'server_error' : 'invalid_request_error'
  return { status, body: { error: { message, type, param, code } } }
}

/** The server as a function from request to response; the request's signal tells that the client has gone. */
export function createHandler(engine: Engine, models: Models, { hostname, maxBodyBytes }: Required<Omit<ServerOptions, 'port'>>) {
  const list = [...models.keys()].map((id) => ({ id, object: 'model', created: 0, owned_by: 'hob' }))
  const routes: Record<string, (body: Body, signal: AbortSignal) => object | Promise<object>> = {
    ...Object.fromEntries(list.map((model) => [`GET /v1/models/${encodeURIComponent(model.id)}`, () => model])),
    'GET /v1/models': () => ({ object: 'list', data: list }),
    'GET /x/status': () => status(engine, models),
    'POST /v1/chat/completions': (body, signal) => chat(engine, modelOf(models, body), body, signal),
    'POST /v1/embeddings': (body, signal) => embeddings(engine, modelOf(models, body), body, signal),
    'POST /v1/rerank': (body, signal) => rerank(engine, modelOf(models, body), body, signal),
    'POST /x/models/unload': (body) => unload(engine, models, body['model'] ?? null),
  }
  return async (request: Request): Promise<Response> => {
    try {
      const url = new URL(request.url)
      guard(url, request.headers.get('origin'), hostname)
      const route = routes[`${request.method} ${url.pathname}`]
      if (route === undefined) {
        if (Object.keys(routes).some((known) => known.endsWith(` ${url.pathname}`))) throw new ClientError(405, 'this address has another method')
        throw url.pathname.startsWith('/v1/models/') ? noModel() : new ClientError(404, 'there is nothing at this address')
      }
      const body = request.method === 'POST' ? await readBody(request, maxBodyBytes) : undefined
      // Only the unload door may be knocked at without a body.
      if (body === undefined && url.pathname.startsWith('/v1/') && request.method === 'POST') throw new ClientError(400, 'a JSON object is wanted')
      const answer = await route(body ?? {}, request.signal)
      return answer instanceof Response ? answer : Response.json(answer)
    } catch (error) {
      const { status, body } = described(error)
      return Response.json(body, { status, headers: status === 413 ? { connection: 'close' } : {} })
    }
  }
}

/** A web page elsewhere must not use the models: not by its own requests, nor by a name that it points at this machine. */
function guard(url: URL, origin: string | null, hostname: string): void {
  const local = ['localhost', '127.0.0.1', '[::1]']
  const strange = local.includes(hostname) && !local.includes(url.hostname)
  if (strange || (origin !== null && origin !== url.origin)) throw new ClientError(403, 'this server is for programs of this machine')
}

async function readBody(request: Request, limit: number): Promise<Body | undefined> {
  const tooLarge = () => new ClientError(413, `the body is larger than ${limit} bytes`)
  if (Number(request.headers.get('content-length')) > limit) throw tooLarge()
  const pieces: Uint8Array[] = []
  let size = 0
  // Not `for await`: leaving it would cancel the body, and with it the connection that the refusal is to go over.
  for (const reader = request.body?.getReader(); reader !== undefined; ) {
    const { done, value } = await reader.read()
    if (done) break
    if ((size += value.byteLength) > limit) throw tooLarge()
    pieces.push(value)
  }
  if (size === 0) return undefined
  let body: unknown
  try {
    body = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(Buffer.concat(pieces)))
  } catch {
    throw new ClientError(400, 'the body is not JSON')
  }
  if (typeof body !== 'object' || body === null || Array.isArray(body)) throw new ClientError(400, 'a JSON object is wanted')
  return body as Body
}

const noModel = () => new ClientError(404, 'there is no such model; GET /v1/models lists them', 'model_not_found', 'model')

function modelOf(models: Models, { model }: Body): string {
  if (typeof model !== 'string') throw new ClientError(400, 'model must be a string', null, 'model')
  const found = models.get(model)
  if (found === undefined) throw noModel()
  return found.reference
}

/** The fields that are there: clients send null for those they leave open. The engine checks what they hold. */
function given<T>(fields: Record<string, unknown>): T {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined && value !== null)) as T
}

/** What is asked for and cannot be done is refused rather than ignored. */
function refuse(body: Body, fields: Record<string, (value: unknown) => boolean>): void {
  for (const [name, fine] of Object.entries(fields)) {
    if (body[name] !== undefined && body[name] !== null && !fine(body[name])) {
      throw new ClientError(400, `this value of ${name} is not supported`, 'unsupported_value', name)
    }
  }
}

const zero = (value: unknown) => value === 0

async function chat(engine: Engine, model: string, body: Body, signal: AbortSignal): Promise<object> {
  refuse(body, {
    n: (n) => n === 1, logprobs: (wanted) => wanted === false, frequency_penalty: zero, presence_penalty: zero,
    tool_choice: (choice) => choice === 'auto' || choice === 'none',
    response_format: (format) => (format as { type?: unknown }).type === 'text',
  })
  const messages = Array.isArray(body['messages'])
    ? body['messages'].map((message: Message | null) => (message?.role === 'developer' ? { ...message, role: 'system' } : message))
    : (body['messages'] ?? [])
  const stream = engine.generate(given<GenerateRequest>({
    model, messages, signal,
    maxTokens: body['max_completion_tokens'] ?? body['max_tokens'], temperature: body['temperature'], topP: body['top_p'],
    seed: body['seed'], stop: body['stop'], tools: body['tool_choice'] === 'none' ? undefined : body['tools'],
  }))
  const head = { id: `chatcmpl-${randomUUID()}`, created: Math.floor(Date.now() / 1000), model: body['model'] }
  if (body['stream'] === true) {
    const { include_usage: withUsage = false } = (body['stream_options'] ?? {}) as { include_usage?: boolean }
    // What is wrong with the request shows at the first event, when there can still be a status.
    return events(stream, await stream.next(), { ...head, object: 'chat.completion.chunk' }, withUsage)
  }
  const answer = await stream.result()
  const text = answer.text + answer.rejectedCalls.map(({ raw }) => raw).join('')
  const message = given<object>({
    role: 'assistant',
    reasoning_content: answer.reasoning || undefined,
    tool_calls: answer.toolCalls.length > 0 ? answer.toolCalls.map(toolCall) : undefined,
  })
  const choice = { index: 0, message: { content: text || null, refusal: null, ...message }, logprobs: null, finish_reason: finish(answer, answer.toolCalls.length) }
  return { ...head, object: 'chat.completion', choices: [choice], usage: usage(answer) }
}

function toolCall({ id, name, arguments: args }: { id: string; name: string; arguments: string }) {
  return { id, type: 'function', function: { name, arguments: args } }
}

function finish({ finish }: Summary, calls: number): string {
  return finish === 'length' || finish === 'context' ? 'length' : calls > 0 ? 'tool_calls' : 'stop'
}

function usage({ promptTokens, completionTokens, cachedTokens }: Summary) {
  return {
    prompt_tokens: promptTokens, completion_tokens: completionTokens, total_tokens: promptTokens + completionTokens,
    prompt_tokens_details: { cached_tokens: cachedTokens },
  }
}

/** Server-sent events. They are made as they are read: a slow reader slows its own answer only, one that goes ends it. */
function events(stream: AsyncIterator<StreamEvent>, begun: IteratorResult<StreamEvent>, head: object, withUsage: boolean): Response {
  const encoder = new TextEncoder()
  let next: IteratorResult<StreamEvent> | undefined = begun
  let calls = 0
  const chunk = (delta: object, finish_reason: string | null = null) => ({
    ...head, choices: [{ index: 0, delta, logprobs: null, finish_reason }], ...(withUsage && { usage: null }),
  })
  function chunks(event: StreamEvent): object[] {
    switch (event.type) {
      case 'chunk':
        return [
          ...(event.reasoning === '' ? [] : [chunk({ reasoning_content: event.reasoning })]),
          ...(event.text === '' ? [] : [chunk({ content: event.text })]),
        ]
      case 'toolCall':
        return [chunk({ tool_calls: [{ index: calls++, ...toolCall(event) }] })]
      case 'rejectedCall':
        return [chunk({ content: event.raw })]
      case 'finished':
        return [chunk({}, finish(event, calls)), ...(withUsage ? [{ ...head, choices: [], usage: usage(event) }] : [])]
    }
  }
  const body = new ReadableStream<Uint8Array>({
    start: (controller) => controller.enqueue(encoder.encode(line(chunk({ role: 'assistant', content: '' })))),
    pull: async (controller) => {
      for (let text = ''; text === ''; ) {
        const { done, value } = next ?? (await stream.next().catch((error: unknown) => ({ done: true as const, value: error })))
        next = undefined
        // An error after the status has gone is an event of its own.
        if (done) text = value === undefined ? 'data: [DONE]\n\n' : line(described(value).body)
        else text = chunks(value).map(line).join('')
        if (text !== '') controller.enqueue(encoder.encode(text))
        if (done) controller.close()
      }
    },
    cancel: async () => {
      await stream.return?.()
    },
  })
  return new Response(body, { headers: { 'content-type': 'text/event-stream', 'cache-control': 'no-store' } })
}

const line = (value: object) => `data: ${JSON.stringify(value)}\n\n`

async function embeddings(engine: Engine, model: string, body: Body, signal: AbortSignal): Promise<object> {
  refuse(body, { encoding_format: (format) => format === 'float' || format === 'base64' })
  const result = await engine.embed(given<EmbedRequest>({ model, texts: body['input'], dimensions: body['dimensions'], signal }))
  // Little-endian float32, as the official client asks for by default.
  const written = (vector: Float32Array) => body['encoding_format'] === 'base64'
    ? Buffer.from(vector.buffer, vector.byteOffset, vector.byteLength).toString('base64')
    : Array.from(vector)
  const data = result.embeddings.map((vector, index) => ({ object: 'embedding', index, embedding: written(vector) }))
  const { promptTokens } = result
  return { object: 'list', data, model: body['model'], usage: { prompt_tokens: promptTokens, total_tokens: promptTokens } }
}

async function rerank(engine: Engine, model: string, body: Body, signal: AbortSignal): Promise<object> {
  const texts = Array.isArray(body['documents'])
    ? body['documents'].map((document: string | { text?: unknown } | null) => (typeof document === 'string' ? document : document?.text))
    : body['documents']
  const request = { model, query: body['query'], documents: texts, topN: body['top_n'], signal }
  const { results, promptTokens } = await engine.rerank(given<RerankRequest>(request))
  const shown = results.map(({ index, score }) => ({
    index, relevance_score: score,
    ...(body['return_documents'] === true && { document: { text: (texts as string[])[index] } }),
  }))
  return { model: body['model'], results: shown, usage: { prompt_tokens: promptTokens, total_tokens: promptTokens } }
}

/** What is resident, by name. A model that is not one of those served (the engine has other users) keeps its path to itself. */
function status(engine: Engine, models: Models): object {
  const { budgetBytes, usedBytes, freeBytes, waiting, entries } = engine.pool.status()
  const nameOf = (id: string) => [...models].find(([, info]) => info.id === id)?.[0] ?? null
  const shown = entries.map(({ kind, id, state, bytes, uses, pinned, idleMs, unloadInMs }) => ({
    kind, model: nameOf(id), state, bytes, uses, pinned, idle_ms: idleMs, unload_in_ms: unloadInMs ?? null,
  }))
  // The one used last, where there are several.
  const latest = (kind: string) =>
    shown.filter((one) => one.kind === kind && one.state === 'ready').sort((a, b) => a.idle_ms - b.idle_ms)[0]?.model ?? null
  return {
    availability: engine.availability, requests: engine.requests, device: engine.device.kind,
    budget_bytes: budgetBytes, used_bytes: usedBytes, free_bytes: freeBytes, waiting,
    chat: latest('chat'), embedder: latest('embedder'), reranker: latest('reranker'), models: shown,
  }
}

/** Unloads a resident model: by its name, or (no body, null) the chat model used last; then none is no error. */
async function unload(engine: Engine, models: Models, name: unknown): Promise<object> {
  if (name !== null && typeof name !== 'string') throw new ClientError(400, 'model must be a string or null', null, 'model')
  const ready = engine.pool.status().entries.filter(({ state }) => state === 'ready')
  const entry = name === null
    ? ready.filter(({ kind }) => kind === 'chat').sort((a, b) => a.idleMs - b.idleMs)[0]
    : ready.find(({ id, kind }) => id === models.get(name)?.id && kind === models.get(name)?.kind)
  if (entry === undefined) {
    if (name === null) return { unloaded: null, freed_bytes: 0 }
    throw new ClientError(404, 'this model is not resident', 'model_not_found', 'model')
  }
  const { freedBytes } = await engine.pool.evict(entry.key as `${string}:${string}`)
  return { unloaded: [...models].find(([, info]) => info.id === entry.id)?.[0] ?? null, freed_bytes: freedBytes }
}

/** Node's own request and response around the handler. */
async function onNode(handler: (request: Request) => Promise<Response>, incoming: IncomingMessage, outgoing: ServerResponse): Promise<void> {
  const gone = new AbortController()
  outgoing.on('close', () => gone.abort())
  try {
    const { method = 'GET', url = '/', headers } = incoming
    const fields = Object.entries(headers).flatMap(([name, value]) => (typeof value === 'string' ? [[name, value] as [string, string]] : []))
    const request = new Request(new URL(url, `http://${headers.host ?? 'localhost'}`), {
      method, headers: fields, signal: gone.signal, duplex: 'half',
      ...(method !== 'GET' && method !== 'HEAD' && { body: Readable.toWeb(incoming) }),
    } as unknown as RequestInit)
    const response = await handler(request)
    outgoing.writeHead(response.status, Object.fromEntries(response.headers))
    await pipeline((response.body ?? []) as AsyncIterable<Uint8Array>, outgoing)
  } catch {
    // The client has gone; or it sent what is no request, such as a broken Host.
    if (!outgoing.headersSent) outgoing.writeHead(400)
    outgoing.end()
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const args = process.argv.slice(2)
  const port = args[0] === '--port' ? Number(args.splice(0, 2)[1]) : 8080
  const models = Object.fromEntries(args.map((arg) => arg.split(/=(.*)/s).slice(0, 2) as [string, string]))
  if (args.length === 0 || !args.every((arg) => /^[^=]+=./.test(arg))) throw new Error('usage: openai-server [--port PORT] NAME=MODEL...')
  await using engine = await Engine.open()
  const { url, close } = await serve(engine, models, { port })
  console.log(`listening on ${url}/v1`)
  await Promise.race([once(process, 'SIGINT'), once(process, 'SIGTERM')])
  await close()
}
