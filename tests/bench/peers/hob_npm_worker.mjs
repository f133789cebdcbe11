// Hob through its npm package as a worker of run.py: one JSON request a line on standard input, one JSON answer a line on standard
// output. Times are what JavaScript sees, from the call, tokenising and the binding included.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const [folder, model] = process.argv.slice(2);
const { Engine } = await import(pathToFileURL(join(folder, "dist/index.mjs")).href);
const engine = await Engine.open();
await engine.load(model);
const answer = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
answer({ ready: `hob through npm, MLX ${engine.device.version}, Node ${process.version}` });

for await (const line of createInterface({ input: process.stdin })) {
  const { prompt, new_tokens: maxTokens, texts } = JSON.parse(line);
  const start = performance.now();
  if (texts !== undefined) {
    const { embeddings } = await engine.embed({ model, texts });
    answer({ texts: texts.length, seconds: (performance.now() - start) / 1000, first: [...embeddings[0]] });
    continue;
  }
  let first = start;
  let last = start;
  let summary;
  const made = [];
  // Kept prompts would spare Hob the prefill that the other side computes.
  for await (const event of engine.generate({ model, prompt, maxTokens, promptCache: false })) {
    if (event.type === "finished") summary = event;
    if (event.type !== "chunk" || event.tokenIds.length === 0) continue;
    last = performance.now();
    if (made.length === 0) first = last;
    made.push(...event.tokenIds);
  }
  answer({
    prompt_tokens: summary.promptTokens,
    prefill_seconds: (first - start) / 1000,
    decode_tokens: made.length - 1,
    decode_seconds: (last - first) / 1000,
    token_ids: made,
  });
}
await engine.close();
