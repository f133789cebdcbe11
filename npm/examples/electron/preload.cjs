// The renderer's only door: questions out, pieces of answers in.
const { contextBridge, ipcRenderer } = require('electron')

contextBridge.exposeInMainWorld('hob', {
  ask: (id, messages) => ipcRenderer.send('ask', id, messages),
  cancel: (id) => ipcRenderer.send('cancel', id),
  onAnswer: (listener) => ipcRenderer.on('answer', (_event, message) => listener(message)),
})
