import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

import { HobError } from 'hob'
import type { Engine, EngineOptions, ErrorCode } from 'hob'
import { openFakeEngine } from 'hob/testing'

export const isBun = 'Bun' in globalThis

/** The package's folder. */
export const home = fileURLToPath(new URL('../../', import.meta.url))

export const MODELS = [
  { name: 'chat', kind: 'chat' as const, bytes: 100, reply: 'Hello, world!' },
  { name: 'other', kind: 'chat' as const, bytes: 100 },
  { name: 'echo', kind: 'chat' as const, bytes: 100, echo: true },
  { name: 'long', kind: 'chat' as const, bytes: 100, reply: 'x'.repeat(3000) },
  { name: 'embedder', kind: 'embedder' as const, bytes: 50 },
  { name: 'reranker', kind: 'reranker' as const, bytes: 50 },
]

export function open(options: EngineOptions = {}): Promise<Engine> {
  return openFakeEngine(MODELS, { budgetBytes: 1000, ...options })
}

export const hi = [{ role: 'user', content: 'hi' }]

/** Asserts that a promise rejects with a `HobError` of this code, and returns it. */
export async function rejects(promise: Promise<unknown>, code: ErrorCode, words?: RegExp): Promise<HobError> {
  const error = await promise.then(
    () => assert.fail(`it should have failed with ${code}`),
    (thrown: unknown) => thrown,
  )
  return asserted(error, code, words)
}

export function throws(act: () => unknown, code: ErrorCode, words?: RegExp): HobError {
  let thrown: unknown
  try {
    act()
  } catch (error) {
    thrown = error
  }
  return asserted(thrown, code, words)
}

function asserted(error: unknown, code: ErrorCode, words?: RegExp): HobError {
  assert.ok(error instanceof HobError, `no HobError: ${String(error)}`)
  assert.equal(error.code, code, error.message)
  assert.ok(!error.message.includes('\n'))
  if (words !== undefined) assert.match(error.message, words)
  return error
}

/** Collects garbage until `done`, or for so many rounds. */
export async function collected(done: () => boolean, rounds = 100): Promise<boolean> {
  for (let round = 0; round < rounds; round++) {
    if (done()) return true
    const bun = (globalThis as { Bun?: { gc(sync: boolean): void } }).Bun
    if (bun !== undefined) bun.gc(true)
    else (globalThis as { gc?: () => void }).gc?.()
    await tick(10)
  }
  return done()
}

export function tick(ms = 0): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms))
}

/** Milliseconds that the main thread has been ready to run while the system ran others; only Linux tells. */
function displaced(): number {
  try {
    return Number(readFileSync('/proc/self/schedstat', 'utf8').split(' ')[1]) / 1e6
  } catch {
    return 0
  }
}

/**
 * Starts a 10 ms timer; the answer stops it and is the 99th percentile of the milliseconds between its ticks. What the system gave to
 * other threads and processes meanwhile is taken off, for nobody in this thread could have prevented it: what is left has been spent
 * by code that ran here, or waited here.
 */
export function lateness(): () => number {
  const gaps: number[] = []
  let [last, without] = [performance.now(), displaced()]
  const look = () => {
    const [now, elsewhere] = [performance.now(), displaced()]
    gaps.push(now - last - (elsewhere - without))
    ;[last, without] = [now, elsewhere]
  }
  const timer = setInterval(look, 10)
  return () => {
    clearInterval(timer)
    gaps.sort((a, b) => a - b)
    return gaps[Math.floor(gaps.length * 0.99)] ?? Infinity
  }
}

/** Runs a program of this runtime and tells how it ended. */
export function run(
  file: string,
  args: string[] = [],
  env: Record<string, string> = {},
): Promise<{ code: number | null; signal: string | null; stdout: string; stderr: string }> {
  return new Promise((resolve) => {
    const child = execFile(process.execPath, [file, ...args], { env: { ...process.env, ...env } }, (_error, stdout, stderr) => {
      resolve({ code: child.exitCode, signal: child.signalCode, stdout, stderr })
    })
  })
}

export function runSource(source: string, env: Record<string, string> = {}) {
  return run('-e', [source], env)
}

const models = process.env['HOB_MODELS'] ?? `${home}../target/models`
const reranker = process.env['HOB_RERANKER'] ?? ''

/** Real small models, where `cargo xtask models` has put them. */
export const real = {
  chat: `${models}/smollm2-135m-instruct.gguf`,
  embedder: `${models}/all-minilm-l6-v2`,
  reranker,
  skip: existsSync(`${models}/smollm2-135m-instruct.gguf`) ? false : 'there are no models here (cargo xtask models)',
  skipReranker: existsSync(`${reranker}/config.json`) ? false : 'there is no reranker here (HOB_RERANKER names one)',
}
