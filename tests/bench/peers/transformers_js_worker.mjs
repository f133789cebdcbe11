// @huggingface/transformers as a worker of run.py: one JSON request a line on standard input, one JSON answer a line on standard output.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { basename, dirname, join } from "node:path";
import { availableParallelism } from "node:os";

const [folder, model] = process.argv.slice(2);
const entry = createRequire(join(folder, "package.json")).resolve("@huggingface/transformers");
const { env, pipeline } = await import(pathToFileURL(entry).href);
env.allowRemoteModels = false;
env.localModelPath = dirname(model);
const threads = availableParallelism();
const embed = await pipeline("feature-extraction", basename(model), {
  device: "cpu",
  dtype: "fp32",
  session_options: { intraOpNumThreads: threads },
});
const answer = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
answer({ ready: `ONNX Runtime in float32, ${threads} threads, batches of 16 texts by length` });

for await (const line of createInterface({ input: process.stdin })) {
  const { texts } = JSON.parse(line);
  const start = performance.now();
  // It pads one call to its longest text: batches by length, as Hob and sentence-transformers make them themselves.
  const order = texts.map((_, index) => index).sort((a, b) => texts[a].length - texts[b].length);
  const vectors = Array(texts.length);
  for (let at = 0; at < order.length; at += 16) {
    const batch = order.slice(at, at + 16);
    const rows = await embed(batch.map((index) => texts[index]), { pooling: "mean", normalize: true });
    batch.forEach((index, row) => (vectors[index] = rows.data.slice(row * rows.dims[1], (row + 1) * rows.dims[1])));
  }
  answer({ texts: texts.length, seconds: (performance.now() - start) / 1000, first: [...vectors[0]] });
}
process.exit(0);
