// The README's examples and those of examples/ are compiled strictly and run, on real models.
import assert from 'node:assert/strict'
import { execFile, execFileSync } from 'node:child_process'
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import test from 'node:test'

import { home, isBun, real } from './support.mjs'

const tsc = join(home, 'node_modules/typescript/bin/tsc')
const compiled = join(home, `build/${isBun ? 'bun' : 'node'}-examples`)

/** Compiles for Node: this runtime or not, the compiler is one. */
function compile(project: string): void {
  execFileSync('node', [tsc, '--project', project, '--outDir', compiled], { cwd: home, stdio: 'inherit' })
}

/** Runs an example in a folder with the models in `models/`. */
function example(file: string, args: string[] = [], input = ''): Promise<string> {
  const folder = mkdtempSync(join(tmpdir(), 'hob-example-'))
  symlinkSync(dirname(real.chat), join(folder, 'models'))
  return new Promise((resolve, reject) => {
    const child = execFile(process.execPath, [file, ...args], { cwd: folder }, (error, stdout, stderr) => {
      rmSync(folder, { recursive: true })
      if (error !== null || stderr.includes('Error')) reject(new Error(`${file}: ${error?.message ?? ''}\n${stdout}\n${stderr}`))
      else resolve(stdout)
    })
    child.stdin?.end(input)
  })
}

test('the README\'s examples compile and run', { skip: real.skip, timeout: 300_000 }, async () => {
  const sources = join(home, 'build/readme')
  mkdirSync(sources, { recursive: true })
  const blocks = [...readFileSync(join(home, 'README.md'), 'utf8').matchAll(/^```ts\n(.*?)^```$/gms)].map((match) => match[1]!)
  blocks.forEach((block, index) => writeFileSync(join(sources, `readme-${index}.mts`), block))
  const project = join(sources, 'tsconfig.json')
  // skipLibCheck: see test/tsconfig.json.
  const options = { rootDir: home, declaration: false, skipLibCheck: true, types: ['node'], typeRoots: [join(home, 'node_modules/@types')] }
  writeFileSync(project, JSON.stringify({ extends: '../../tsconfig.json', compilerOptions: options, include: ['*.mts'] }))
  compile(project)
  const printed: string[] = []
  for (const index of blocks.keys()) printed.push(await example(join(compiled, `build/readme/readme-${index}.mjs`)))
  const expected = [
    /Paris/, /(stop|length) \d+ [\d.]+\n.+/s, /^2 384\n0 0\.\d+\n$/, /^Timeout .*\ncancelled\ncancelled\n$/,
    /^true 157286400\ntrue\n0\n$/, /^.*Paris.* \d+\n.+2 0\n$/s,
    /^HobError Hello!\n$/,
  ]
  assert.equal(printed.length, expected.length)
  expected.forEach((words, index) => assert.match(printed[index]!, words))
})

test('the examples run', { skip: real.skip, timeout: 300_000 }, async () => {
  compile(join(home, 'examples/tsconfig.json'))
  const at = (name: string) => join(compiled, `examples/${name}.mjs`)
  const chat = await example(at('chat'), [real.chat], 'What is the capital of France? One word.\n\n')
  assert.match(chat, /Paris/)
  const lines = 'The cat sleeps on the sofa.\nThe shares of the bank fell.\n\nBread is baked in an oven.\n'
  const search = await example(at('search'), [real.embedder, real.embedder, 'a sleeping kitten'], lines)
  assert.match(search.split('\n')[0]!, /^0\.\d+ The cat sleeps/)
  const pool = await example(at('pool'), [real.chat])
  assert.match(pool, /resident: true[^]*unloadStarted search:index[^]*loaded smollm2[^]*resident: false[^]*closed/)
})
