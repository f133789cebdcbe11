// Electron's main process: starts the model's utility process and passes a window's questions on. Not run on Electron here.
import { app, BrowserWindow, ipcMain, utilityProcess } from 'electron'
import { fileURLToPath } from 'node:url'

const file = (name) => fileURLToPath(new URL(name, import.meta.url))

await app.whenReady()
const models = utilityProcess.fork(file('utility.mjs'), [process.env.MODEL ?? 'models/chat.gguf'])
models.on('exit', (code) => console.error(`the model's process ended with ${code}; the windows live on`))

const window = new BrowserWindow({ webPreferences: { preload: file('preload.cjs') } })
ipcMain.on('ask', (_event, id, messages) => models.postMessage({ id, messages }))
ipcMain.on('cancel', (_event, id) => models.postMessage({ id, cancel: true }))
models.on('message', (message) => window.webContents.send('answer', message))
await window.loadFile(file('index.html'))

app.on('window-all-closed', () => app.quit())
app.on('will-quit', () => models.kill())
