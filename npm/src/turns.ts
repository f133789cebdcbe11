/** Callers in line: each gets its turn when all who came before have theirs. */
export class Turns {
  #last: Promise<unknown> | undefined

  /** What `now` gives, if nobody is in line and it gives anything; else what `wait` gives in its turn. */
  take<T>(now: () => T | undefined, wait: () => Promise<T>): Promise<T> {
    if (this.#last === undefined) {
      const value = now()
      if (value !== undefined) return Promise.resolve(value)
    }
    const result = this.#last === undefined ? wait() : this.#last.then(wait)
    const done = () => {
      if (this.#last === over) this.#last = undefined
    }
    const over = result.then(done, done)
    this.#last = over
    return result
  }
}
