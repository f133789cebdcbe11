// hob/ai under the AI SDK's own functions: texts, reasoning, calls, aborts, usage, errors, vectors, rankings.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import test from 'node:test'

import {
  APICallError, embed, embedMany, generateText, isStepCount, jsonSchema, NoSuchModelError, Output, rerank, streamText, tool,
  UnsupportedFunctionalityError,
} from 'ai'
import { Engine, HobError } from 'hob'
import type { EngineOptions } from 'hob'
import * as esm from 'hob/ai'
import { count, held, liveHandles, openFakeEngine, script } from 'hob/testing'

import { collected, MODELS, open, real, rejects, throws, tick } from './support.mjs'

const { createHob } = esm
;(globalThis as { AI_SDK_LOG_WARNINGS?: boolean }).AI_SDK_LOG_WARNINGS = false

// A template that marks reasoning and calls, as Qwen's does, and shows everything that it is given.
const template = `{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}thinking {{ enable_thinking }}{% endif %}
{%- if false %}<think></think>{% endif %}`
const call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
const EXTRA = [
  { name: 'thinker', kind: 'chat' as const, bytes: 10, template, reply: '<think>\nLet me see.\n</think>\n\nIt is 3.' },
  { name: 'caller', kind: 'chat' as const, bytes: 10, template, reply: `Adding. ${call}` },
  { name: 'mirror', kind: 'chat' as const, bytes: 10, template, echo: true, context: 10_000 },
]

const extra = (options: EngineOptions = {}) => openFakeEngine([...MODELS, ...EXTRA], { budgetBytes: 1000, ...options })

const add = (run: (input: { a: number; b: number }) => number) =>
  tool({
    description: 'Adds two numbers',
    inputSchema: jsonSchema<{ a: number; b: number }>({
      type: 'object', properties: { a: { type: 'number' }, b: { type: 'number' } }, required: ['a', 'b'],
    }),
    execute: run,
  })

async function thrown(promise: PromiseLike<unknown>): Promise<unknown> {
  return promise.then(() => assert.fail('it should have failed'), (error: unknown) => error)
}

test('one implementation for import and require; an engine is wanted', () => {
  const cjs = createRequire(import.meta.url)('hob/ai') as typeof esm
  assert.equal(cjs.createHob, createHob)
  throws(() => createHob({} as Engine), 'InvalidArgument', /Engine/)
})

test('generateText: the text, its usage, its end', async () => {
  await using engine = await open()
  const hob = createHob(engine)
  const whole = await generateText({ model: hob('chat'), prompt: 'hi' })
  assert.equal(whole.text, 'Hello, world!')
  assert.equal(whole.finishReason, 'stop')
  assert.equal(whole.usage.outputTokens, 13)
  assert.ok(whole.usage.inputTokens! > 0)
  assert.equal(whole.response.modelId, 'chat')
  assert.equal((whole.providerMetadata?.['hob']?.['provenance'] as { family: string }).family, 'fake')
  const short = await generateText({ model: hob.languageModel('chat'), prompt: 'hi', maxOutputTokens: 5 })
  assert.deepEqual([short.text, short.finishReason, short.rawFinishReason], ['Hello', 'length', 'length'])
  const stopped = await generateText({ model: hob('chat'), prompt: 'hi', stopSequences: [', '], seed: 7, temperature: 0 })
  assert.deepEqual([stopped.text, stopped.finishReason, stopped.warnings], ['Hello', 'stop', []])
})

test('settings reach the engine, those it has not are warnings', async () => {
  await using engine = await extra()
  const hob = createHob(engine)
  const { text, warnings } = await generateText({
    model: hob('mirror', { enableThinking: false }), instructions: 'Be brief.', prompt: 'Q',
    frequencyPenalty: 1, presencePenalty: 1, providerOptions: { hob: { repetitionPenalty: 1.0 } },
  })
  assert.match(text, /<system>Be brief\.<user>Q.*thinking False/i)
  assert.deepEqual(warnings?.map((warning) => 'feature' in warning && warning.feature).sort(), ['frequencyPenalty', 'presencePenalty'])
  const thinking = await generateText({ model: hob('mirror', { enableThinking: false }), prompt: 'Q', reasoning: 'high' })
  assert.match(thinking.text, /thinking True/i)
  // What Hob does not know either is an error that names it.
  const error = await thrown(generateText({ model: hob('mirror'), prompt: 'Q', providerOptions: { hob: { repetition_penalty: 2 } } }))
  assert.ok(error instanceof HobError && error.code === 'InvalidArgument')
  assert.match(error.message, /did you mean repetitionPenalty/)
})

test('JSON is asked for, and told to be a request only', async () => {
  await using engine = await extra()
  const schema = jsonSchema<{ colour: string }>({ type: 'object', properties: { colour: { type: 'string' } } })
  const model = createHob(engine)('mirror')
  // The mirror answers with its prompt, which is no JSON: the SDK says so and keeps the text.
  const error = (await thrown(generateText({ model, prompt: 'Q', output: Output.object({ schema }) }))) as { text: string }
  assert.match(error.text, /<system>Answer with JSON only\. .*"colour".*<user>Q/s)
  await using json = await openFakeEngine([{ name: 'm', kind: 'chat', bytes: 1, reply: '{"colour": "red"}' }], { budgetBytes: 1000 })
  const { output, warnings: told } = await generateText({ model: createHob(json)('m'), prompt: 'Q', output: Output.object({ schema }) })
  assert.deepEqual(output, { colour: 'red' })
  assert.equal(told?.[0]?.type, 'compatibility')
})

test('streamText: text in pieces, reasoning apart, one end', async () => {
  await using engine = await extra()
  const result = streamText({ model: createHob(engine)('thinker'), prompt: 'What is 1 + 2?' })
  const kinds: string[] = []
  let text = ''
  for await (const part of result.stream) {
    if (kinds.at(-1) !== part.type) kinds.push(part.type)
    if (part.type === 'text-delta') text += part.text
  }
  assert.equal(text, 'It is 3.')
  assert.equal(await result.reasoningText, 'Let me see.')
  assert.equal(await result.finishReason, 'stop')
  assert.ok((await result.usage).outputTokens! > 10)
  const blocks = kinds.filter((kind) => /^(text|reasoning)-/.test(kind))
  assert.deepEqual(blocks, ['reasoning-start', 'reasoning-delta', 'reasoning-end', 'text-start', 'text-delta', 'text-end'])
  const { reasoningText, text: same } = await generateText({ model: createHob(engine)('thinker'), prompt: 'What is 1 + 2?' })
  assert.deepEqual([reasoningText, same], ['Let me see.', 'It is 3.'])
})

test('calls of tools are run by the SDK and their results read by the model', async () => {
  await using engine = await extra()
  const hob = createHob(engine)
  const inputs: unknown[] = []
  const tools = { add: add((input) => (inputs.push(input), input.a + input.b)) }
  const once = await generateText({ model: hob('caller'), prompt: 'Add 1 and 2.', tools })
  assert.equal(once.finishReason, 'tool-calls')
  assert.equal(once.text.trim(), 'Adding.')
  assert.equal(once.toolCalls[0]?.toolName, 'add')
  assert.equal(once.toolResults[0]?.output, 3)
  // A second step: the conversation with the call and its result is a prompt again. This model calls again.
  const twice = streamText({ model: hob('caller'), prompt: 'Add 1 and 2.', tools, stopWhen: isStepCount(2) })
  await twice.consumeStream()
  assert.equal((await twice.steps).length, 2)
  assert.deepEqual(inputs, Array.from({ length: 3 }, () => ({ a: 1, b: 2 })))
  // How it is told to the model.
  const { messages } = once.response
  const told = await generateText({ model: hob('mirror'), messages: [{ role: 'user', content: 'Q' }, ...messages] })
  assert.match(told.text, /<assistant>Adding\..*<tool_call>\{"name": "add".*<tool>3/s)
  // Choices that cannot be enforced are warnings; 'none' gives no tools.
  const chosen = await generateText({ model: hob('caller'), prompt: 'Q', tools, toolChoice: { type: 'tool', toolName: 'add' } })
  assert.match(JSON.stringify(chosen.warnings), /toolChoice/)
  const auto = await generateText({ model: hob('mirror'), prompt: 'Q', tools })
  const none = await generateText({ model: hob('mirror'), prompt: 'Q', tools, toolChoice: 'none' })
  assert.ok(auto.text.includes('Adds two numbers') && !none.text.includes('Adds two numbers'))
})

test('a call that cannot be read is text', async () => {
  const reply = 'So: <tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
  await using engine = await openFakeEngine([{ name: 'm', kind: 'chat', bytes: 1, template, reply }], { budgetBytes: 1000 })
  const answer = await generateText({ model: createHob(engine)('m'), prompt: 'Q', tools: { add: add(() => 0) } })
  assert.match(answer.text, /So: .*nope/s)
  assert.deepEqual([answer.toolCalls.length, answer.finishReason], [0, 'stop'])
  assert.match(JSON.stringify(answer.providerMetadata?.['hob']?.['rejectedCalls']), /not among/)
})

test('an abort ends the generation, before it starts and while it runs', async () => {
  await using engine = await open()
  const model = createHob(engine)('long')
  const reason = await thrown(generateText({ model, prompt: 'hi', abortSignal: AbortSignal.abort() }))
  assert.equal((reason as Error).name, 'AbortError')
  script(engine, 'hold', 'step')
  const controller = new AbortController()
  const whole = thrown(generateText({ model, prompt: 'hi', abortSignal: controller.signal }))
  await held(engine, 'step')
  controller.abort()
  script(engine, 'release', 'step')
  assert.equal(((await whole) as Error).name, 'AbortError')
  // A stream tells its abort as a part.
  const second = new AbortController()
  const kinds: string[] = []
  for await (const part of streamText({ model, prompt: 'hi', abortSignal: second.signal }).stream) {
    kinds.push(part.type)
    if (part.type === 'text-delta') second.abort()
  }
  assert.equal(kinds.at(-1), 'abort')
  // Beneath the SDK, as of fetch: the stream fails with the signal's reason.
  const prompt = [{ role: 'user' as const, content: [{ type: 'text' as const, text: 'hi' }] }]
  const third = new AbortController()
  const cut = (await model.doStream({ prompt, abortSignal: third.signal })).stream.getReader()
  third.abort(new Error('mine'))
  await assert.rejects(async () => {
    while (!(await cut.read()).done);
  }, /mine/)
  // And one that is no longer read stops by itself: the device takes one step at a time, and few of 3,000.
  while (engine.requests > 0) await tick(1)
  const before = count(engine, 'step')
  script(engine, 'hold', 'step')
  const asked = model.doStream({ prompt })
  await held(engine, 'step')
  script(engine, 'pass', 'step')
  await (await asked).stream.cancel()
  for (let rounds = 0; engine.requests > 0 && rounds < 1000; rounds++) {
    script(engine, 'pass', 'step')
    await tick(1)
  }
  assert.equal(engine.requests, 0)
  assert.ok(count(engine, 'step') - before < 50, `${count(engine, 'step') - before} steps`)
})

test('failures have the SDK\'s kinds and stay HobErrors', async () => {
  await using engine = await open({ capacity: 1, queue: 0 })
  const hob = createHob(engine)
  const unknown = await thrown(generateText({ model: hob('nobody'), prompt: 'hi' }))
  assert.ok(NoSuchModelError.isInstance(unknown) && unknown instanceof HobError && unknown.code === 'NotFound')
  const wrong = await thrown(embedMany({ model: hob.embeddingModel('chat'), values: ['a'] }))
  assert.ok(UnsupportedFunctionalityError.isInstance(wrong) && wrong instanceof HobError)
  const image = { role: 'user' as const, content: [{ type: 'file' as const, data: new Uint8Array([1]), mediaType: 'image/png' }] }
  const file = await thrown(generateText({ model: hob('chat'), messages: [image] }))
  assert.ok(UnsupportedFunctionalityError.isInstance(file) && /image\/png/.test(file.message))
  throws(() => hob.imageModel('x'), 'Unsupported')
  // Busy is of the kind that the SDK tries again, where it may.
  script(engine, 'hold', 'step')
  const first = generateText({ model: hob('chat'), prompt: 'hi' })
  await held(engine, 'step')
  const busy = await thrown(generateText({ model: hob('chat'), prompt: 'hi', maxRetries: 0 }))
  assert.ok(APICallError.isInstance(busy) && busy.isRetryable && busy instanceof HobError && busy.code === 'Busy')
  script(engine, 'release', 'step')
  assert.equal((await first).text, 'Hello, world!')
  // A failure on the way is an error part, and the text until then is there.
  let failed: unknown
  const result = streamText({ model: hob('long'), prompt: 'hi', streamRetries: 0, onError: ({ error }) => void (failed = error) })
  for await (const part of result.stream) if (part.type === 'text-delta') script(engine, 'fail', 'step')
  assert.ok(failed instanceof HobError, String(failed))
  assert.equal(await result.finishReason, 'error')
})

test('embed and embedMany', async () => {
  await using engine = await open()
  const model = createHob(engine).embeddingModel('embedder')
  const values = Array.from({ length: 1500 }, (_, index) => `text ${index}`)
  const { embeddings, usage } = await embedMany({ model, values })
  assert.equal(embeddings.length, 1500)
  assert.ok(usage.tokens >= 1500)
  const one = await embed({ model, value: 'text 1499', providerOptions: { hob: { dimensions: 3 } } })
  assert.equal(one.embedding.length, 3)
  const whole = await embed({ model, value: 'text 1499' })
  assert.deepEqual(whole.embedding, embeddings[1499])
  assert.ok(Array.isArray(whole.embedding))
  const aborted = await thrown(embedMany({ model, values, abortSignal: AbortSignal.abort() }))
  assert.equal((aborted as Error).name, 'AbortError')
})

test('rerank, of texts and of objects', async () => {
  await using engine = await open()
  const model = createHob(engine).rerankingModel('reranker')
  const documents = ['x', 'yy', 'zzz']
  const { ranking, rerankedDocuments } = await rerank({ model, query: 'q', documents, topN: 2 })
  assert.equal(ranking.length, 2)
  assert.ok(ranking[0]!.score >= ranking[1]!.score)
  assert.equal(rerankedDocuments[0], documents[ranking[0]!.originalIndex])
  const objects = await rerank({ model, query: 'q', documents: [{ id: 1 }, { id: 2 }] })
  assert.equal(objects.ranking.length, 2)
})

test('nothing is left behind', async () => {
  {
    await using engine = await extra()
    const hob = createHob(engine)
    for (let round = 0; round < 20; round++) {
      const controller = new AbortController()
      const result = streamText({ model: hob('long'), prompt: 'hi', abortSignal: controller.signal })
      for await (const _ of result.textStream) {
        controller.abort()
        break
      }
      await thrown(generateText({ model: hob('nobody'), prompt: 'hi' }))
    }
    while (engine.requests > 0) await tick(1)
    assert.ok(count(engine, 'step') < 20 * 1000, 'the aborted ones were not computed to their ends')
  }
  assert.ok(await collected(() => liveHandles() <= 2), `${liveHandles()} handles are alive`)
})

test('real models', { skip: real.skip, timeout: 300_000 }, async () => {
  await using engine = await Engine.open()
  const hob = createHob(engine)
  const prompt = 'What is the capital of France? Answer in one word.'
  const whole = await generateText({ model: hob(real.chat), prompt, maxOutputTokens: 12 })
  assert.match(whole.text, /Paris/)
  const result = streamText({ model: hob(real.chat), prompt, maxOutputTokens: 12 })
  let text = ''
  for await (const piece of result.textStream) text += piece
  assert.equal(text, whole.text)
  assert.ok((await result.usage).inputTokenDetails.cacheReadTokens! > 0, 'the prompt was computed before')
  const documents = ['A cat sits on the mat.', 'The stock market fell sharply.']
  const { embeddings } = await embedMany({ model: hob.embeddingModel(real.embedder), values: documents })
  assert.equal(embeddings[0]?.length, 384)
  const { ranking } = await rerank({ model: hob.rerankingModel(real.embedder), query: 'a small cat', documents })
  assert.equal(ranking[0]?.originalIndex, 0)
  await rejects(generateText({ model: hob(real.embedder), prompt }), 'Unsupported')
})
