#!/usr/bin/env node
// `hob doctor`: whether and how Hob runs here. The addon is only loaded in a child process, so that even one that crashes at once
// leaves a report.
import { spawn } from 'node:child_process'

import { Engine } from './engine.js'
import { load, platform, VERSION } from './loader.js'

const USAGE = `usage: hob doctor [--json] | hob --version | hob --help

  doctor   Tells the platform, the addon that was found, the device, MLX's version and the default budget.
           Ends with 1 when something is missing. --json prints one object instead.
`

/** What the child process found. */
interface Probe {
  addon: string
  version: string
  device: { kind: string; name: string; version: string }
  budgetBytes: number
}

interface Report extends Partial<Probe> {
  ok: boolean
  platform: string
  runtime: string
  error?: string
}

async function main(args: string[]): Promise<number> {
  const [verb, ...rest] = args
  if (verb === 'probe') return probe()
  if (verb === '--help' || verb === '--version') {
    process.stdout.write(verb === '--help' ? USAGE : `${VERSION}\n`)
    return 0
  }
  if (verb !== 'doctor' || rest.some((word) => word !== '--json')) {
    process.stderr.write(USAGE)
    return 2
  }
  const report = await doctor()
  process.stdout.write(rest.includes('--json') ? `${JSON.stringify(report)}\n` : written(report))
  return report.ok ? 0 : 1
}

async function probe(): Promise<number> {
  try {
    const { addon, path } = load()
    const engine = await Engine.open()
    const { kind, name, version } = engine.device
    const found: Probe = {
      addon: path, version: addon.version(), device: { kind, name, version }, budgetBytes: engine.pool.status().budgetBytes,
    }
    await engine.close()
    process.stdout.write(JSON.stringify(found))
    return 0
  } catch (error) {
    process.stdout.write(JSON.stringify({ error: error instanceof Error ? error.message : String(error) }))
    return 1
  }
}

function doctor(): Promise<Report> {
  const bun = process.versions['bun']
  const runtime = bun === undefined ? `Node ${process.versions.node}` : `Bun ${bun}`
  const known = { platform: platform(), runtime }
  return new Promise((resolve) => {
    // An Electron binary runs scripts only when told so.
    const env = { ...process.env, ELECTRON_RUN_AS_NODE: '1' }
    const child = spawn(process.execPath, [__filename, 'probe'], { env, stdio: ['ignore', 'pipe', 'inherit'] })
    let output = ''
    child.stdout.on('data', (piece: Buffer) => (output += piece.toString()))
    child.on('error', (error) => resolve({ ok: false, ...known, error: error.message }))
    child.on('close', (code, signal) => {
      let found: Partial<Report> = {}
      try {
        found = JSON.parse(output) as Partial<Report>
      } catch {
        const how = signal ?? `exit code ${code}`
        found = { error: `the process that loaded the addon ended by ${how} without a word` }
      }
      resolve({ ok: code === 0 && found.error === undefined, ...known, ...found })
    })
  })
}

function written(report: Report): string {
  const { device, budgetBytes } = report
  const lines: [string, string | undefined][] = [
    ['platform', report.platform],
    ['runtime', report.runtime],
    ['addon', report.addon],
    ['version', report.version],
    ['device', device && (device.name === '' ? device.kind : `${device.kind} (${device.name})`)],
    ['MLX', device?.version],
    ['kernels', device && `MLX's own, for the ${device.kind}`],
    ['budget', budgetBytes === undefined ? undefined : `${(budgetBytes / 2 ** 30).toFixed(1)} GiB`],
    ['error', report.error],
  ]
  return lines.map(([name, value]) => (value === undefined ? '' : `${name.padEnd(9)} ${value}\n`)).join('')
}

void main(process.argv.slice(2)).then((code) => {
  process.exitCode = code
})
