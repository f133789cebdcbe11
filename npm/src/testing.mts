// One implementation, whichever way it is imported: `instanceof HobError` holds across both.
export * from './testing.js'
