// One implementation, whichever way it is imported.
export * from './index.js'
