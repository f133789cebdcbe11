import { theCalls } from './calls.js'

interface Waiting<T> {
  resolve: (value: T) => void
  reject: (error: unknown) => void
}

/**
 * Callers in line for what a stream or a subscription gives: each gets the next of it, in the order in which they came. `take` gives
 * it or undefined while there is none, and throws the stream's error. It is asked where the addon's letter is read, and the caller's
 * promise settled there: nothing is in between.
 */
export class Line<T> {
  readonly #id: number
  readonly #keepAlive: boolean
  readonly #take: () => T | undefined
  #waiting: Waiting<T>[] = []

  /** `id` is the number of its letters; `keepAlive` says whether the event loop lives while somebody waits. */
  constructor(id: number, keepAlive: boolean, take: () => T | undefined) {
    this.#id = id
    this.#keepAlive = keepAlive
    this.#take = take
  }

  next(): Promise<T> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ resolve, reject })
      if (this.#waiting.length === 1) this.#serve()
    })
  }

  /** Looks again, for something has come or ended. */
  look(): void {
    if (this.#waiting.length > 0) theCalls().wake(this.#id)
  }

  #serve(): void {
    for (let first = this.#waiting[0]; first !== undefined; first = this.#waiting[0]) {
      try {
        const value = this.#take()
        if (value === undefined) return theCalls().listen(this.#id, this.#keepAlive, () => this.#serve())
        first.resolve(value)
      } catch (error) {
        first.reject(error)
      }
      this.#waiting.shift()
    }
  }
}
