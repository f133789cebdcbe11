"""sentence-transformers as a worker of run.py: one JSON request a line on standard input, one JSON answer a line out."""

import json
import sys
import time

import torch
from sentence_transformers import SentenceTransformer


def main() -> None:
    model = SentenceTransformer(sys.argv[1], device="cpu")
    print(json.dumps({"ready": f"torch {torch.__version__}, {torch.get_num_threads()} threads"}), flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        start = time.perf_counter()
        vectors = model.encode(texts)
        seconds = time.perf_counter() - start
        print(json.dumps({"texts": len(texts), "seconds": seconds, "first": vectors[0].tolist()}), flush=True)


if __name__ == "__main__":
    main()
