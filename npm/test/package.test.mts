// The package as it is installed: two module systems, one class; a loader that says what it tried; the doctor; the archives.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import test from 'node:test'

import * as esm from 'hob'

import { home, isBun, real, run } from './support.mjs'

const require = createRequire(import.meta.url)
const version = (JSON.parse(readFileSync(join(home, 'package.json'), 'utf8')) as { version: string }).version

function scratch(): string {
  return mkdtempSync(join(tmpdir(), 'hob-npm-'))
}

test('import and require give one implementation', () => {
  const cjs = require('hob') as typeof esm
  assert.equal(cjs.HobError, esm.HobError)
  assert.equal(cjs.Engine, esm.Engine)
  // The runtimes add names of their own, such as default and __esModule.
  assert.deepEqual(Object.keys(cjs).sort(), Object.keys(esm).filter((name) => /^[A-Z]/.test(name)).sort())
})

test('two copies of the package in one process share one addon, and so one device', async () => {
  const folder = scratch()
  const [program, copy] = [join(folder, 'main.cjs'), join(folder, 'hob')]
  cpSync(join(home, 'dist'), join(copy, 'dist'), { recursive: true })
  // Without an addon of its own, it can only be the other's.
  cpSync(join(home, 'package.json'), join(copy, 'package.json'))
  writeFileSync(program, `
    const copies = [${JSON.stringify(home)}, ${JSON.stringify(copy)}].map((at) => [require(at + '/dist/index.js'), require(at + '/dist/testing.js')])
    const model = { name: 'm', kind: 'embedder', bytes: 1 }
    Promise.all(copies.map(([, { openFakeEngine }]) => openFakeEngine([model], { budgetBytes: 10 }))).then(async (engines) => {
      const all = await Promise.all(engines.map((engine) => engine.embed({ model: 'm', texts: 'a' })))
      await Promise.all(engines.map((engine) => engine.close()))
      console.log(copies[0][0].Engine === copies[1][0].Engine, all[0].data.join() === all[1].data.join())
    })`)
  const { code, stdout, stderr } = await run(program)
  assert.deepEqual({ code, stdout, stderr }, { code: 0, stdout: 'false true\n', stderr: '' })
  rmSync(folder, { recursive: true })
})

test('importing loads no addon; a missing or wrong one is an error that lists what was tried', async () => {
  const folder = scratch()
  const bad = join(folder, 'bad.node')
  writeFileSync(bad, 'no library')
  const program = join(folder, 'main.cjs')
  writeFileSync(program, `
    const { Engine, HobError } = require(${JSON.stringify(join(home, 'dist/index.js'))})
    Engine.open().then(() => console.log('opened'), (error) =>
      console.log(JSON.stringify({ hob: error instanceof HobError, code: error.code, message: error.message })))`)
  for (const path of [bad, join(folder, 'absent.node')]) {
    const { code, stdout } = await run(program, [], { HOB_NATIVE: path })
    assert.equal(code, 0)
    const error = JSON.parse(stdout) as { hob: boolean; code: string; message: string }
    assert.ok(error.hob)
    assert.equal(error.code, 'NotFound')
    assert.ok(error.message.includes(path), error.message)
    assert.match(error.message, /Install the package hob-|Addons are built for/)
  }
  // A package without its platform's one: both places are named.
  const alone = join(folder, 'node_modules/hob')
  mkdirSync(alone, { recursive: true })
  cpSync(join(home, 'dist'), join(alone, 'dist'), { recursive: true })
  cpSync(join(home, 'package.json'), join(alone, 'package.json'))
  writeFileSync(program, readFileSync(program, 'utf8').replace(JSON.stringify(join(home, 'dist/index.js')), '"hob"'))
  const { stdout } = await run(program)
  assert.match(stdout, /native.hob\.[a-z0-9-]+\.node: there is no such file; hob-[a-z0-9-]+: /)
  // Another version's addon is no use.
  writeFileSync(join(alone, 'package.json'), readFileSync(join(alone, 'package.json'), 'utf8').replace(version, '9.9.9'))
  cpSync(join(home, 'native'), join(alone, 'native'), { recursive: true })
  assert.match((await run(program)).stdout, /its version is [0-9.]+, this package's is 9\.9\.9/)
  rmSync(folder, { recursive: true })
})

test('the doctor reports, also of an addon that is no use', { timeout: 60_000 }, async () => {
  const cli = join(home, 'dist/cli.js')
  const well = await run(cli, ['doctor', '--json'])
  const report = JSON.parse(well.stdout) as Record<string, unknown>
  assert.equal(well.code, 0)
  assert.equal(report['ok'], true)
  assert.equal(report['version'], version)
  assert.match(String((report['device'] as { version: string }).version), /^\d+\.\d+/)
  assert.match((await run(cli, ['doctor'])).stdout, /platform .*\nruntime .*\naddon .*\nversion .*\ndevice .*\nMLX .*\nkernels .*\nbudget .* GiB\n/)
  assert.deepEqual(await run(cli, ['--version']), { code: 0, signal: null, stdout: `${version}\n`, stderr: '' })
  const help = await run(cli, ['--help'])
  assert.deepEqual([help.code, help.stderr], [0, ''])
  const lost = await run(cli, ['docter'])
  assert.deepEqual([lost.code, lost.stdout, lost.stderr], [2, '', help.stdout])
  const ill = await run(cli, ['doctor'], { HOB_NATIVE: '/no/such.node' })
  assert.equal(ill.code, 1)
  assert.match(ill.stdout, /error .*\/no\/such\.node/)
  // One that crashes while it is loaded takes the child with it, not the report.
  const folder = scratch()
  const crash = join(folder, 'crash.js')
  writeFileSync(crash, 'process.kill(process.pid, "SIGSEGV"); for (;;);')
  const crashed = await run(cli, ['doctor'], { HOB_NATIVE: crash })
  assert.equal(crashed.code, 1)
  assert.match(crashed.stdout, /error .*SIGSEGV/)
  rmSync(folder, { recursive: true })
  assert.equal((await run(cli, ['nonsense'])).code, 2)
})

const dist = process.env['HOB_NPM_DIST'] ?? ''
const noDist = isBun || !existsSync(dist) ? 'the archives are made for the Node suite (cargo xtask test --suite node)' : false

test('the two archives, installed into an empty folder, work without a toolchain', { skip: noDist, timeout: 120_000 }, () => {
  const folder = scratch()
  const archives = readdirSync(dist).filter((name) => name.endsWith('.tgz')).map((name) => join(dist, name))
  assert.equal(archives.length, 2)
  writeFileSync(join(folder, 'package.json'), '{ "private": true }')
  execFileSync('npm', ['install', '--offline', '--ignore-scripts', '--no-audit', '--no-fund', ...archives], { cwd: folder, stdio: 'pipe' })
  assert.deepEqual(readdirSync(join(folder, 'node_modules')).filter((name) => !name.startsWith('.')).sort(), ['hob', 'hob-linux-x64-gnu'])
  writeFileSync(join(folder, 'main.mjs'), `
    import { readFileSync } from 'node:fs'
    import { Engine } from 'hob'
    await using engine = await Engine.open()
    const [model] = process.argv.slice(2)
    const dimensions = model && (await engine.embed({ model, texts: 'works' })).dimensions
    const maps = readFileSync('/proc/self/maps', 'utf8').split('\\n').map((line) => line.split(' ').at(-1))
    const libraries = [...new Set(maps.filter((path) => /mlx|blas|lapack|hob\\.node/.test(path)))]
    console.log(JSON.stringify({ device: engine.device, dimensions, libraries }))`.replace('await using', 'const'))
  const env = { PATH: '/nowhere', HOME: folder }
  const output = execFileSync(process.execPath, ['main.mjs', real.skip === false ? real.embedder : ''], { cwd: folder, env, encoding: 'utf8' })
  const { device, dimensions, libraries } = JSON.parse(output) as { device: { kind: string }; dimensions: number | ''; libraries: string[] }
  assert.ok(['cpu', 'gpu'].includes(device.kind))
  if (real.skip === false) assert.equal(dimensions, 384)
  assert.ok(libraries.some((path) => path.endsWith('libmlx.so')), String(libraries))
  assert.ok(libraries.every((path) => path.startsWith(folder)), String(libraries))
  const doctor = execFileSync(process.execPath, ['node_modules/hob/dist/cli.js', 'doctor'], { cwd: folder, env, encoding: 'utf8' })
  assert.match(doctor, /addon .*node_modules\/hob-linux-x64-gnu\/hob\.node/)
  // CommonJS, and types for both.
  execFileSync(process.execPath, ['-e', "if (typeof require('hob').Engine.open !== 'function') process.exit(1)"], { cwd: folder, env })
  // The AI SDK's provider needs nothing of the SDK to run.
  execFileSync(process.execPath, ['-e', "if (typeof require('hob/ai').createHob !== 'function') process.exit(1)"], { cwd: folder, env })
  for (const name of ['use.mts', 'use.cts']) {
    writeFileSync(join(folder, name), `import { Engine, HobError } from 'hob'
      import type { StreamEvent } from 'hob'
      export async function main(): Promise<string> {
        await using engine = await Engine.open({ budgetBytes: 1e9 })
        const events: AsyncIterable<StreamEvent> = engine.generate({ model: 'm', messages: [{ role: 'user', content: 'hi' }] })
        for await (const event of events) if (event.type === 'finished') return event.finish
        // @ts-expect-error: no such option
        engine.generate({ model: 'm', max_tokens: 5 })
        throw new HobError('Busy', 'x')
      }`)
  }
  const tsc = join(home, 'node_modules/typescript/bin/tsc')
  execFileSync(process.execPath, [tsc, '--strict', '--noEmit', '--module', 'nodenext', '--target', 'es2022', '--lib', 'es2024,esnext.disposable',
    '--types', 'node', '--typeRoots', join(home, 'node_modules/@types'), 'use.mts', 'use.cts'], { cwd: folder, stdio: 'inherit' })
  rmSync(folder, { recursive: true })
})
