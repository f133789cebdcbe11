"""mlx-lm as a worker of run.py: one JSON request a line on standard input, one JSON answer a line on standard output."""

import json
import sys
import time

from mlx_lm import load
from mlx_lm.generate import generate_step
import mlx.core as mx


def generate(model, ids: list[int], new_tokens: int) -> dict:
    start = time.perf_counter()
    first = last = start
    made = []
    # generate_step works greedily by default and knows no end token: each side makes the same number of tokens.
    for token, _ in generate_step(mx.array(ids), model, max_tokens=new_tokens):
        made.append(int(token))
        last = time.perf_counter()
        if len(made) == 1:
            first = last
    return {
        "prompt_tokens": len(ids),
        "prefill_seconds": first - start,
        "decode_tokens": len(made) - 1,
        "decode_seconds": last - first,
        "token_ids": made,
    }


def main() -> None:
    model, tokenizer = load(sys.argv[1])
    print(json.dumps({"ready": f"MLX {mx.__version__}, {mx.default_device()}"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = tokenizer.encode(request["prompt"], add_special_tokens=True)
        print(json.dumps(generate(model, ids, request["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
