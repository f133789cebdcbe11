import { existsSync } from 'node:fs'
import { join } from 'node:path'

import { HobError } from './errors.js'
import type * as native from './native.js'

/** The addon's exports. */
export type Addon = typeof native

/** This package's version, which its addon must have too. */
export const VERSION: string = (require('../package.json') as { version: string }).version

/** Which build of the addon this machine needs, such as `linux-x64-gnu`. */
export function platform(): string {
  const libc = process.platform === 'linux' ? '-gnu' : ''
  return `${process.platform}-${process.arch}${libc}`
}

/** The platforms that addons are built for. */
const BUILT = ['linux-x64-gnu', 'darwin-arm64']

/** Where the addon is looked for, in this order. */
function candidates(): string[] {
  const named = process.env['HOB_NATIVE']
  if (named !== undefined && named !== '') return [named]
  return [join(__dirname, '..', 'native', `hob.${platform()}.node`), `hob-${platform()}`]
}

interface Loaded {
  addon: Addon
  path: string
}

/** Where a thread's copies of this version find each other's addon: two of them in a process would be two threads in MLX. */
const SHARED = Symbol.for(`hob.addon ${VERSION}`)

/** The addon and where it was found. Throws a `HobError` that lists what was tried. */
export function load(): Loaded {
  const shared = globalThis as { [SHARED]?: Loaded }
  return (shared[SHARED] ??= find())
}

function find(): Loaded {
  const tried: string[] = []
  for (const candidate of candidates()) {
    // An Electron app's addon lies beside the archive: nothing can be loaded out of it.
    const path = candidate.replace(/\bapp\.asar\b(?!\.unpacked)/, 'app.asar.unpacked')
    try {
      const file = /^hob-/.test(path) ? require.resolve(path) : path
      const real = file.replace(/\bapp\.asar\b(?!\.unpacked)/, 'app.asar.unpacked')
      if (real.endsWith('.node') && !existsSync(real)) throw new Error('there is no such file')
      const addon = require(real) as Addon
      if (typeof addon.version !== 'function') throw new Error('this is no addon of Hob')
      if (addon.version() !== VERSION) throw new Error(`its version is ${addon.version()}, this package's is ${VERSION}`)
      return { addon, path: real }
    } catch (error) {
      tried.push(`${path}: ${reason(error)}`)
    }
  }
  throw new HobError('NotFound', `Hob's addon could not be loaded on ${platform()}; tried ${tried.join('; ')}. ${advice()}`)
}

function reason(error: unknown): string {
  const message = error instanceof Error ? error.message : String(error)
  return message.split('\n')[0] ?? ''
}

function advice(): string {
  if (!BUILT.includes(platform())) return `Addons are built for ${BUILT.join(' and ')} only.`
  const musl = process.platform === 'linux' && existsSync('/etc/alpine-release')
  if (musl) return 'The addon needs glibc; this system is built on musl.'
  return `Install the package hob-${platform()} (an install with --omit=optional leaves it out).`
}
