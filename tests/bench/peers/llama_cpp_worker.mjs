// node-llama-cpp as a worker of run.py: one JSON request a line on standard input, one JSON answer a line on standard output.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { join } from "node:path";
import { availableParallelism } from "node:os";

// The package lies in target/bench-node, this file in the repository: it is looked up from there.
const [folder, modelPath] = process.argv.slice(2);
const entry = createRequire(join(folder, "package.json")).resolve("node-llama-cpp");
const { getLlama } = await import(pathToFileURL(entry).href);

// Its own choice is at least four threads; on fewer cores they wait for one another, and it would look worse than it is.
const threads = availableParallelism();
const llama = await getLlama({ gpu: false, build: "never", progressLogs: false, maxThreads: threads });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({ contextSize: 1024, sequences: 1, threads });
const sequence = context.getSequence();
const answer = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
answer({ ready: `llama.cpp, ${context.currentThreads} threads` });

for await (const line of createInterface({ input: process.stdin })) {
  const { prompt, new_tokens: newTokens } = JSON.parse(line);
  const ids = model.tokenize(prompt, true);
  await sequence.clearHistory();
  const start = performance.now();
  let first = start;
  let last = start;
  const made = [];
  for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
    made.push(token);
    last = performance.now();
    if (made.length === 1) first = last;
    if (made.length === newTokens) break;
  }
  answer({
    prompt_tokens: ids.length,
    prefill_seconds: (first - start) / 1000,
    decode_tokens: made.length - 1,
    decode_seconds: (last - first) / 1000,
    token_ids: made,
  });
}
process.exit(0);
