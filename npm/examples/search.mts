// Semantic search with a second look:  node search.mjs EMBEDDER RERANKER QUERY < LINES
// Vectors find the candidates, a reranker puts them in order. An embedder may stand in for the reranker.
import { Engine } from 'hob'

const [embedder, reranker, query] = process.argv.slice(2)
if (embedder === undefined || reranker === undefined || query === undefined) throw new Error('usage: search EMBEDDER RERANKER QUERY')

let input = ''
for await (const piece of process.stdin) input += String(piece)
const documents = input.split('\n').map((line) => line.trim()).filter((line) => line !== '')

await using engine = await Engine.open()
const { embeddings } = await engine.embed({ model: embedder, texts: [query, ...documents], truncate: 'end' })
const [wanted, ...vectors] = embeddings
const dot = (a: Float32Array, b: Float32Array) => a.reduce((sum, x, at) => sum + x * b[at]!, 0)
const near = vectors
  .map((vector, index) => ({ index, similarity: dot(wanted!, vector) }))
  .sort((a, b) => b.similarity - a.similarity)
  .slice(0, 20)
const candidates = near.map(({ index }) => documents[index]!)
const { results } = await engine.rerank({ model: reranker, query, documents: candidates, topN: 3, truncate: 'end' })
for (const { index, score } of results) console.log(score.toFixed(3), candidates[index])
