/**
 * For a host's own tests: engines on a scripted device, without MLX and without models.
 *
 * @module
 */
import * as checks from './checks.js'
import { check } from './checks.js'
import { theCalls } from './calls.js'
import { Engine } from './engine.js'
import { attempt, guarded, invalid } from './errors.js'
import type { NativeEngine, NativeFakeModel } from './native.js'
import { readEngineOptions } from './requests.js'
import type { EngineOptions } from './requests.js'

export type { NativeFakeModel as FakeModel } from './native.js'

/** Where a scripted device can be told to fail or to wait. */
export type FakePoint =
  | 'load' | 'loadEnd' | 'loadStep' | 'prefill' | 'step' | 'score' | 'embed' | 'rerank' | 'unload' | 'drain'

const MODEL = {
  name: checks.name, kind: checks.oneOf('chat', 'embedder', 'reranker'), bytes: checks.number, reply: checks.text,
  echo: checks.flag, context: checks.number, dimensions: checks.number, kvBytesPerToken: checks.number, template: checks.text,
}

/** Opens an engine on a scripted device that knows these models: requests name them by their names, and tokens are bytes. */
export function openFakeEngine(models: NativeFakeModel[], options: EngineOptions = {}): Promise<Engine> {
  return attempt(() => {
    if (!Array.isArray(models)) throw invalid('openFakeEngine: the models must be an array')
    const checked = models.map((model) => check('a fake model', model, MODEL, ['name', 'kind', 'bytes']))
    const wanted = readEngineOptions(options)
    const calls = theCalls()
    const shape = (native: NativeEngine) => new Engine(native)
    return calls.call((id) => calls.addon.openFakeEngine(calls.mailbox, id, checked, wanted), { shape })
  })
}

/** Makes the device wait at a point from now on (`hold`), go on (`release`, or `pass` for once), or fail at its next arrival. */
export function script(engine: Engine, action: 'hold' | 'release' | 'pass' | 'fail' | 'panic', point: FakePoint): void {
  guarded(() => theCalls().addon.fakeScript(engine.native, action, point))
}

/** Completes when the device waits at a held point. */
export function held(engine: Engine, point: FakePoint): Promise<void> {
  const calls = theCalls()
  return calls.call((id) => calls.addon.fakeHeld(calls.mailbox, id, engine.native, point), { shape: () => undefined })
}

/** How often the device came to a point. */
export function count(engine: Engine, point: FakePoint): number {
  return guarded(() => theCalls().addon.fakeCount(engine.native, point))
}

/** A panic in the addon: it must become an error of code `Internal`. */
export function panic(): void {
  guarded(() => theCalls().addon.fakePanic())
}

/** Native handles that are alive in this process, over all its threads. */
export function liveHandles(): number {
  return theCalls().addon.liveHandles()
}
