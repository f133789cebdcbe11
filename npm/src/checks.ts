import { HobError, invalid } from './errors.js'

/** What is wrong with a value, if anything is. */
export type Check = (value: unknown) => string | undefined

const noText = 'must be a string'
const broken = 'has a lone surrogate, which is no Unicode text'

export const text: Check = (value) =>
  typeof value !== 'string' ? noText : value.isWellFormed() ? undefined : broken

/** A model's reference or an entry's key: errors name it, and no path is longer. */
export const name: Check = (value) =>
  typeof value === 'string' && value.length > 4096 ? 'must have 4,096 characters at most' : text(value)

export const texts: Check = (value) => {
  if (!Array.isArray(value)) return 'must be an array of strings'
  for (let index = 0; index < value.length; index++) {
    const wrong = text(value[index])
    if (wrong !== undefined) return `${wrong} at index ${index}`
  }
  return undefined
}

export const textOrTexts: Check = (value) => (typeof value === 'string' ? text(value) : texts(value))

export const number: Check = (value) =>
  Number.isFinite(value) ? undefined : 'must be a finite number'

export const numbers: Check = (value) =>
  (Array.isArray(value) && value.every((item) => number(item) === undefined)) || value instanceof Uint32Array
    ? undefined
    : 'must be an array of numbers'

export const flag: Check = (value) => (typeof value === 'boolean' ? undefined : 'must be true or false')

export const list: Check = (value) => (Array.isArray(value) ? undefined : 'must be an array')

export const object: Check = (value) =>
  typeof value === 'object' && value !== null && !Array.isArray(value) ? undefined : 'must be an object'

export const callback: Check = (value) => (typeof value === 'function' ? undefined : 'must be a function')

export const idle: Check = (value) =>
  (typeof value === 'number' && value >= 0) || value === 'immediately' || value === 'never'
    ? undefined
    : "must be a number of seconds, 'immediately' or 'never'"

/** By its shape: test environments and other realms have AbortSignals of their own. */
export const signal: Check = (value) => {
  const { aborted, addEventListener } = Object(value) as Partial<AbortSignal>
  return typeof aborted === 'boolean' && typeof addEventListener === 'function' ? undefined : 'must be an AbortSignal'
}

export const oneOf = (...words: string[]): Check => (value) =>
  words.includes(value as string) ? undefined : `must be one of ${words.map((word) => `'${word}'`).join(', ')}`

export const either = (first: Check, second: Check): Check => (value) =>
  first(value) === undefined || second(value) === undefined ? undefined : first(value)

export const instance = (type: abstract new (...given: never[]) => object, name: string): Check => (value) =>
  value instanceof type ? undefined : `must be a ${name}`

/**
 * Checks an object of options: no field unknown, each of its type, none of `required` missing. A field that is undefined counts
 * as absent. Errors name the field, never its value. Returns a copy, so that what was checked is what is used: each field is read
 * once, and one that cannot be read (a getter or a proxy that throws) is an error like others.
 */
export function check<T extends object>(what: string, options: T, fields: Record<string, Check>, required: readonly string[] = []): T {
  const copy: Record<string, unknown> = {}
  let at: string | undefined
  try {
    const wrong = object(options)
    if (wrong !== undefined) throw invalid(`${what}: the options ${wrong}`)
    for (const name in options) {
      at = name
      const value: unknown = options[name]
      if (value === undefined) continue
      const field = Object.hasOwn(fields, name) ? fields[name] : undefined
      if (field === undefined) throw invalid(`${what}: there is no option ${shown(name)}; ${near(name, Object.keys(fields))}`)
      const problem = field(value)
      if (problem !== undefined) throw invalid(`${what}: ${name} ${problem}`)
      copy[name] = value
    }
  } catch (error) {
    throw error instanceof HobError ? error : invalid(`${what}: ${at === undefined ? 'the options' : shown(at)} cannot be read`, error)
  }
  for (const name of required) if (copy[name] === undefined) throw invalid(`${what}: ${name} is missing`)
  return copy as T
}

function shown(name: string): string {
  return JSON.stringify(name.length > 40 ? `${name.slice(0, 40)}…` : name)
}

function near(name: string, known: string[]): string {
  const plain = (word: string) => word.toLowerCase().replaceAll('_', '')
  const same = known.find((word) => plain(word) === plain(name))
  return same === undefined ? `it is one of ${known.join(', ')}` : `did you mean ${same}`
}
