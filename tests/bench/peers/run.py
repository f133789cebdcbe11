"""Hob beside other stacks, in one run: see ../README.md for what is measured. `cargo xtask bench` calls it."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = (512, 64)  # prompt tokens, new tokens
# MLX's 16-bit products on a CPU take seconds a token in mlx-lm: a full run would last an hour.
SLOW_SIZES = (32, 4)
TEXTS = 64
# No peer looks for anything outside this machine.
QUIET = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
CASES = ["float32", "bfloat16", "gguf", "embed", "npm-chat", "npm-embed"]


class Worker:
    """A peer that stays loaded between the rounds and sleeps while others run."""

    def __init__(self, command: list[str]):
        self.name = Path(command[1]).stem
        self.log = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=QUIET
        )
        self.about = self.read()["ready"]

    def ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict:
        # Libraries may print to standard output: only a JSON object is an answer.
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.log.seek(0)
        sys.exit(f"{self.name} ended without an answer:\n{self.log.read()[-2000:]}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


@dataclass
class Row:
    """One quantity of one case beside one peer; rates in tokens or texts per second."""

    case: str
    peer: str
    unit: str
    hob: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [hob / other for hob, other in zip(self.hob, self.other)]

    def show(self) -> str:
        ratios = self.ratios()
        return (
            f"{self.case:<28} {self.peer:<22} {statistics.median(self.hob):>9.1f} {statistics.median(self.other):>9.1f}"
            f" {self.unit:<8} {statistics.median(ratios):>6.2f}  ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def hob(args: argparse.Namespace, *arguments: str, stdin: str | None = None) -> dict:
    done = subprocess.run([str(args.hob), *arguments, "--json"], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"`hob {arguments[0]}` exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return json.loads(done.stdout)


def prompt(tokenizer_folder: Path, tokens: int) -> str:
    """A text of exactly so many tokens for SmolLM2, varied enough to be no repetition."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    words = "river stone lamp winter market engine garden letter mountain bridge orange window sailor music table".split()
    text = "\n".join(f"{n}. The {words[n % 15]} and the {words[n * 7 % 13]} met at the {words[n * 4 % 11]}." for n in range(1, 80))
    count = lambda text: len(tokenizer.encode(text))
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(text[:middle]) <= tokens else (low, middle - 1)
    if count(text[:low]) != tokens:
        sys.exit(f"no prefix of the text has {tokens} tokens; change the text")
    return text[:low]


def texts() -> list[str]:
    """Texts of mixed lengths, from one sentence to a paragraph."""
    sentence = "The harbour lights went out one after the other while the last ferry turned towards the open sea."
    return [" ".join([f"Note {n}."] + [sentence] * (1 + n % 5)) for n in range(TEXTS)]


def alternate(number: int, first, second) -> None:
    """Runs both, in the other order every other round: whoever runs second finds a warmer machine."""
    for run in (first, second) if number % 2 == 0 else (second, first):
        run()


def generate_case(args: argparse.Namespace, case: str, peer: str, model: Path, command: list[str], text: str, sizes: tuple[int, int]) -> list[Row]:
    prompt_tokens, new_tokens = sizes
    rows = [Row(f"{case} prefill {prompt_tokens}", peer, "tokens/s"), Row(f"{case} decode {new_tokens}", peer, "tokens/s")]
    worker = Worker(command)
    answers = {}

    def run_hob() -> None:
        answer = hob(
            args, "generate", "--model", str(model), "--raw", "--prompt", text, "--max-tokens", str(new_tokens)
        )
        answers["hob"] = answer
        timings = answer["timings"]
        keep(
            {
                "prompt_tokens": answer["prompt_tokens"],
                "prefill_seconds": timings["prefill_s"],
                "decode_tokens": answer["completion_tokens"] - 1,
                "decode_seconds": timings["decode_s"],
            },
            [row.hob for row in rows],
        )

    def run_peer() -> None:
        answers["peer"] = worker.ask({"prompt": text, "new_tokens": new_tokens})
        keep(answers["peer"], [row.other for row in rows])

    run_hob()
    run_peer()
    for row in rows:  # The first run of each side warms the machine up and does not count.
        row.hob.clear()
        row.other.clear()
    for number in range(args.rounds):
        print(f"  {case}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        alternate(number, run_hob, run_peer)
    worker.close()
    mine, theirs = answers["hob"]["token_ids"], answers["peer"]["token_ids"]
    same = next((n for n, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
    counts = f"{answers['hob']['prompt_tokens']} and {answers['peer']['prompt_tokens']} prompt tokens"
    print(f"{case}: {peer} is {worker.about}; {counts}; the first {same} of {len(mine)} new tokens agree", flush=True)
    return rows


def keep(timings: dict, lists: list[list[float]]) -> None:
    lists[0].append(timings["prompt_tokens"] / timings["prefill_seconds"])
    # Where a side made one token only (an early end), there is no decode rate.
    lists[1].append(timings["decode_tokens"] / timings["decode_seconds"] if timings["decode_tokens"] else float("nan"))


def npm_case(args: argparse.Namespace, case: str, peer: str, mine: list[str], theirs: list[str], request: dict, read: list) -> list[Row]:
    """Hob through its npm package beside a package of npm: both are workers, both stay loaded. `read` has a unit and a rate for each row."""
    rows = [Row(f"npm {case} {name}", peer, unit) for name, unit, _ in read]
    workers = [Worker(mine), Worker(theirs)]
    answers = [worker.ask(request) for worker in workers]  # Warms up.

    def run(side: int) -> None:
        answers[side] = workers[side].ask(request)
        for row, (_, _, rate) in zip(rows, read):
            (row.hob if side == 0 else row.other).append(rate(answers[side]))

    for number in range(args.rounds):
        print(f"  npm {case}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        alternate(number, lambda: run(0), lambda: run(1))
    for worker in workers:
        worker.close()
    if "token_ids" in answers[0]:
        ours, others = answers[0]["token_ids"], answers[1]["token_ids"]
        same = next((n for n, (a, b) in enumerate(zip(ours, others)) if a != b), min(len(ours), len(others)))
        agree = f"the first {same} of {len(ours)} new tokens agree"
    else:
        ours, others = answers[0]["first"], answers[1]["first"]
        norms = sum(a * a for a in ours) ** 0.5 * sum(b * b for b in others) ** 0.5
        cosine = sum(a * b for a, b in zip(ours, others)) / norms
        if cosine < 0.999:
            sys.exit(f"npm {case}: the two sides compute different vectors (cosine {cosine:.6f}): a rate of one says nothing of the other")
        agree = f"cosine of the first vectors {cosine:.6f}"
    print(f"npm {case}: {workers[0].about}; {peer} is {workers[1].about}; {agree}", flush=True)
    return rows


def embed_case(args: argparse.Namespace, model: Path, command: list[str]) -> list[Row]:
    row = Row(f"MiniLM embed {TEXTS}", "sentence-transformers", "texts/s")
    worker = Worker(command)
    items = texts()
    answers = {}

    def run_hob() -> None:
        answer = hob(args, "embed", "--model", str(model), stdin="\n".join(items) + "\n")
        answers["hob"] = answer
        row.hob.append(len(items) / answer["timings"]["prefill_s"])

    def run_peer() -> None:
        answers["peer"] = worker.ask({"texts": items})
        row.other.append(len(items) / answers["peer"]["seconds"])

    run_hob()
    run_peer()
    row.hob.clear()
    row.other.clear()
    for number in range(args.rounds):
        print(f"  {row.case}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        alternate(number, run_hob, run_peer)
    worker.close()
    mine, theirs = answers["hob"]["data"][0]["embedding"], answers["peer"]["first"]
    dot = sum(a * b for a, b in zip(mine, theirs))
    norms = sum(a * a for a in mine) ** 0.5 * sum(b * b for b in theirs) ** 0.5
    print(f"{row.case}: {row.peer} is {worker.about}; cosine of the first vectors {dot / norms:.6f}", flush=True)
    return [row]


def same_blas(native: Path) -> str:
    """Links the BLAS files that Hob uses into this environment's MLX, and says which they are."""
    import mlx.core

    libs = Path(mlx.core.__file__).parent.parent / "mlx_cpu.libs"
    if not native.is_dir() or not libs.is_dir():
        return "each side's own"
    names = []
    for mine in sorted(native.glob("lib*")):
        theirs = libs / mine.name
        if mine.is_symlink() and theirs.name.startswith(("libblas-", "liblapack-")):
            temporary = theirs.with_name(theirs.name + ".tmp")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(mine.resolve())
            temporary.replace(theirs)
            names.append(mine.resolve().name)
    return f"{', '.join(dict.fromkeys(names))} on both sides"


def onnx(args: argparse.Namespace) -> Path:
    folder = args.work / "minilm-onnx"
    if not (folder / "onnx" / "model.onnx").exists():
        print(f"  making {folder.name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, str(HERE / "make_minilm_onnx.py"), str(args.embedder), str(folder)], check=True, env=QUIET)
    return folder


def checkpoint(args: argparse.Namespace, dtype: str) -> Path:
    folder = args.work / f"smollm2-135m-{dtype}"
    if not (folder / "config.json").exists():
        print(f"  making {folder.name}", file=sys.stderr, flush=True)
        script = HERE.parent / "make_smollm2.py"
        subprocess.run([sys.executable, str(script), str(args.chat), str(folder), "--dtype", dtype], check=True)
    return folder


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hob", type=Path, required=True, help="the command-line tool, built in release")
    parser.add_argument("--chat", type=Path, required=True, help="SmolLM2's GGUF")
    parser.add_argument("--embedder", type=Path, required=True, help="MiniLM's folder")
    parser.add_argument("--native", type=Path, required=True, help="target/native/mlx_cpu.libs")
    parser.add_argument("--node", type=Path, required=True, help="the folder where node-llama-cpp is installed")
    parser.add_argument("--npm", type=Path, required=True, help="Hob's npm package, built with the addon in release")
    parser.add_argument("--work", type=Path, required=True, help="where checkpoints and results go")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, help="default: all")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    cases = args.cases or CASES

    python = sys.executable
    print(f"machine: {processor()}, {os.cpu_count()} cores; BLAS: {same_blas(args.native)}", flush=True)
    knobs = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(("OPENBLAS_", "OMP_", "MKL_"))]
    print(f"environment: {' '.join(knobs) or 'no OPENBLAS_, OMP_ or MKL_ variable'}", flush=True)
    tokenizer = checkpoint(args, "float32")
    text = prompt(tokenizer, SIZES[0])
    rows = []
    for dtype in ("float32", "bfloat16"):
        if dtype in cases:
            folder = checkpoint(args, dtype)
            command = [python, str(HERE / "mlx_lm_worker.py"), str(folder)]
            sizes = SIZES if dtype == "float32" else SLOW_SIZES
            rows += generate_case(args, f"SmolLM2 {dtype}", "mlx-lm", folder, command, prompt(tokenizer, sizes[0]), sizes)
    if "gguf" in cases:
        command = ["node", str(HERE / "llama_cpp_worker.mjs"), str(args.node), str(args.chat)]
        rows += generate_case(args, "SmolLM2 GGUF", "node-llama-cpp", args.chat, command, text, SIZES)
    if "embed" in cases:
        command = [python, str(HERE / "sentence_transformers_worker.py"), str(args.embedder)]
        rows += embed_case(args, args.embedder, command)
    node = lambda name, *rest: ["node", str(HERE / f"{name}_worker.mjs"), *map(str, rest)]
    if "npm-chat" in cases:
        read = [
            (f"first token, {SIZES[0]}", "1/s", lambda answer: 1 / answer["prefill_seconds"]),
            (f"decode {SIZES[1]}", "tokens/s", lambda answer: answer["decode_tokens"] / answer["decode_seconds"]),
        ]
        mine, theirs = node("hob_npm", args.npm, args.chat), node("llama_cpp", args.node, args.chat)
        rows += npm_case(args, "GGUF", "node-llama-cpp", mine, theirs, {"prompt": text, "new_tokens": SIZES[1]}, read)
    if "npm-embed" in cases:
        read = [(f"MiniLM {TEXTS}", "texts/s", lambda answer: answer["texts"] / answer["seconds"])]
        mine, theirs = node("hob_npm", args.npm, args.embedder), node("transformers_js", args.node, onnx(args))
        rows += npm_case(args, "embed", "transformers.js", mine, theirs, {"texts": texts()}, read)

    print(f"\n{'':<28} {'peer':<22} {'Hob':>9} {'peer':>9} {'':<8} {'ratio':>6}  (rounds)")
    for row in rows:
        print(row.show())
    print("ratio: Hob's rate over the peer's, median of the rounds; above 1 Hob is faster")
    result = [{**vars(row), "ratio": statistics.median(row.ratios())} for row in rows]
    (args.work / "peers.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
