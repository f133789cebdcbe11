import type { GenerateRequest, Message, MessageToolCall, RequestOptions, Tool } from '../requests.js'
import { unsupported } from './errors.js'
import type {
  LanguageModelV4CallOptions as CallOptions, LanguageModelV4Message, LanguageModelV4ToolResultOutput as Output,
  SharedV4ProviderOptions, SharedV4Warning as Warning,
} from './spec.js'

/** Hob's own options of a call: what `providerOptions.hob` may hold, and what a model is made with. */
export type HobOptions<Request extends RequestOptions> = Omit<
  Partial<Request>,
  'model' | 'messages' | 'prompt' | 'promptTokens' | 'tools' | 'texts' | 'query' | 'documents' | 'signal' | 'cancel' | 'onCancel'
>

/** The options for Hob among those for all providers. They are checked by name and type where the request is read. */
export function ownOptions(given: SharedV4ProviderOptions | undefined): object {
  return given?.['hob'] ?? {}
}

/** A call of the SDK as a request, and what of it could not be met. */
export function toRequest(
  model: string,
  settings: HobOptions<GenerateRequest>,
  options: CallOptions,
): { request: GenerateRequest; warnings: Warning[] } {
  const warnings: Warning[] = []
  const warn = (feature: string, details?: string) =>
    warnings.push({ type: 'unsupported', feature, ...(details !== undefined && { details }) })
  if (options.frequencyPenalty) warn('frequencyPenalty', 'providerOptions.hob.repetitionPenalty is a near one')
  if (options.presencePenalty) warn('presencePenalty', 'providerOptions.hob.repetitionPenalty is a near one')
  const messages = options.prompt.flatMap((message) => toMessages(message, warn))
  if (options.responseFormat?.type === 'json') {
    warnings.push({ type: 'compatibility', feature: 'responseFormat', details: 'the model is told to answer in JSON; nothing enforces it' })
    demandJson(messages, options.responseFormat.schema)
  }
  const wanted = {
    model, messages,
    maxTokens: options.maxOutputTokens,
    temperature: options.temperature,
    topP: options.topP,
    topK: options.topK,
    seed: options.seed,
    stop: options.stopSequences,
    tools: toTools(options, warn),
    enableThinking: thinking(options.reasoning, warnings),
    signal: options.abortSignal,
  }
  const given = Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== undefined))
  return { request: { ...settings, ...ownOptions(options.providerOptions), ...given } as GenerateRequest, warnings }
}

type Warn = (feature: string, details?: string) => void

function toTools({ tools, toolChoice }: CallOptions, warn: Warn): Tool[] | undefined {
  if (toolChoice?.type === 'required') warn('toolChoice', 'a call cannot be enforced; the model chooses')
  if (toolChoice?.type === 'tool') warn('toolChoice', 'a call cannot be enforced; the model is given this tool only')
  if (toolChoice?.type === 'none') return undefined
  const functions: Tool[] = []
  for (const tool of tools ?? []) {
    if (tool.type === 'provider') {
      warn(`provider-defined tool ${tool.id}`)
      continue
    }
    if (toolChoice?.type === 'tool' && tool.name !== toolChoice.toolName) continue
    const { name, description, inputSchema, strict } = tool
    functions.push({
      type: 'function',
      function: { name, parameters: inputSchema, ...(description !== undefined && { description }), ...(strict !== undefined && { strict }) },
    })
  }
  return functions.length === 0 ? undefined : functions
}

function thinking(reasoning: CallOptions['reasoning'], warnings: Warning[]): boolean | undefined {
  if (reasoning === undefined || reasoning === 'provider-default') return undefined
  if (reasoning === 'none') return false
  warnings.push({ type: 'compatibility', feature: 'reasoning', details: 'reasoning is switched on where the template knows it; there are no levels' })
  return true
}

function demandJson(messages: Message[], schema: object | undefined): void {
  const demand = schema === undefined ? 'Answer with JSON only.' : `Answer with JSON only. It must match this JSON schema:\n${JSON.stringify(schema)}`
  const first = messages[0]
  if (first?.role === 'system' && typeof first.content === 'string') first.content = `${first.content}\n\n${demand}`
  else messages.unshift({ role: 'system', content: demand })
}

function toMessages(message: LanguageModelV4Message, warn: Warn): Message[] {
  switch (message.role) {
    case 'system':
      return [{ role: 'system', content: message.content }]
    case 'user':
      return [{ role: 'user', content: message.content.map((part) => userText(part)).join('') }]
    case 'assistant':
      return assistant(message, warn)
    case 'tool':
      return message.content.flatMap((part) =>
        // An approval is the SDK's own affair; the result that follows it tells the model.
        part.type === 'tool-result' ? [toolResult(part.toolCallId, part.toolName, part.output, warn)] : [],
      )
  }
}

type UserPart = Extract<LanguageModelV4Message, { role: 'user' }>['content'][number]

function userText(part: UserPart): string {
  if (part.type === 'text') return part.text
  if (part.data.type === 'text') return part.data.text
  throw unsupported(`a file of type ${/^[\w.+*-]+(\/[\w.+*-]+)?$/.test(part.mediaType) ? part.mediaType : 'unknown'}`)
}

function assistant(message: Extract<LanguageModelV4Message, { role: 'assistant' }>, warn: Warn): Message[] {
  let text = ''
  let reasoning = ''
  const calls: MessageToolCall[] = []
  const results: Message[] = []
  for (const part of message.content) {
    switch (part.type) {
      case 'text':
        text += part.text
        break
      case 'reasoning':
        reasoning += part.text
        break
      case 'tool-call': {
        const input = typeof part.input === 'string' ? part.input : JSON.stringify(part.input ?? {})
        calls.push({ id: part.toolCallId, type: 'function', function: { name: part.toolName, arguments: input } })
        break
      }
      case 'tool-result':
        // Of a tool that another provider ran.
        results.push(toolResult(part.toolCallId, part.toolName, part.output, warn))
        break
      default:
        // The history may be another model's; what it showed cannot be shown here.
        warn(`${part.type} in an assistant's message`, 'it was left out')
    }
  }
  const spoken: Message = { role: 'assistant', content: text }
  if (reasoning !== '') spoken.reasoning_content = reasoning
  if (calls.length > 0) spoken.tool_calls = calls
  return [spoken, ...results]
}

function toolResult(id: string, name: string, output: Output, warn: Warn): Message {
  return { role: 'tool', tool_call_id: id, name, content: outputText(output, warn) }
}

function outputText(output: Output, warn: Warn): string {
  switch (output.type) {
    case 'text':
    case 'error-text':
      return output.value
    case 'json':
    case 'error-json':
      return JSON.stringify(output.value)
    case 'execution-denied':
      return output.reason ?? 'The call was not allowed.'
    case 'content':
      return output.value
        .map((part) => {
          if (part.type === 'text') return part.text
          if (part.type === 'file' && part.data.type === 'text') return part.data.text
          warn(`${part.type} in a tool's result`, 'it was left out')
          return ''
        })
        .join('')
  }
}
