"""Expected values of `decide` (spec M60, M61): what transformers says of given answers, each by a forward of its own.

Writes expected/decide.json; `--check` compares instead. Needs the packages that make.py names.
"""
import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
MODELS = ["llama-tied", "llama-untied", "qwen2", "qwen3", "llama-rope-llama3"]
RAW = "When the rain stops, the children"
MESSAGES = [{"role": "user", "content": "What is the capital?"}]
ANSWERS = ["Paris", "the town by the sea", "no", "true"]


def mean(model, prompt, answer):
    """The mean log-probability of the answer's tokens, in float64 from float32 logits."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    rows = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return sum(float(logprobs[row, token]) for row, token in zip(rows, answer)) / len(answer)


def weigh(means):
    weights = [math.exp(m - max(means)) for m in means]
    p = [w / sum(weights) for w in weights]
    k, best = len(p), p.index(max(p))
    spread = sum(p[i] * abs(i - best) for i in range(k))
    even = sum(abs(i - (k - 1) / 2) for i in range(k)) / k
    return {
        "p": p,
        "choice": {"confidence": min(1.0, max(0.0, (max(p) - 1 / k) / (1 - 1 / k)))},
        "score": {"value": sum(i * p[i] for i in range(k)), "confidence": max(0.0, 1 - spread / even)},
    }


def case(name):
    path = HERE / "models" / name
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    stops = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *([stops] if isinstance(stops, int) else stops or [])}
    # The template ends each turn with this, whether or not a configuration lists it.
    stops.add(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    found = {"model": name}

    raw = tokenizer.encode(RAW)
    answers = [tokenizer.encode(a, add_special_tokens=False) + [tokenizer.eos_token_id] for a in ANSWERS]
    means = [mean(model, raw, a) for a in answers]
    found["raw"] = {"prompt": RAW, "prompt_ids": raw, "answer_ids": answers, "means": means, **weigh(means)}

    def rendered(messages, **more):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **more)
        return tokenizer.encode(text, add_special_tokens=False)

    prompt = rendered(MESSAGES, add_generation_prompt=True)
    answers = []
    for answer in ANSWERS:
        whole = rendered([*MESSAGES, {"role": "assistant", "content": answer}])
        assert whole[: len(prompt)] == prompt, name
        turn = whole[len(prompt):]
        end = next(at for at, token in enumerate(turn) if token in stops)
        answers.append(turn[: end + 1])
    means = [mean(model, prompt, a) for a in answers]
    found["chat"] = {"messages": MESSAGES, "prompt_ids": prompt, "answer_ids": answers, "means": means, **weigh(means)}
    return found


def rounded(value):
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main():
    torch.set_num_threads(1)
    cases = ",\n".join(json.dumps(rounded(case(name))) for name in MODELS)
    text = f'{{"answers": {json.dumps(ANSWERS)}, "cases": [\n{cases}\n]}}\n'
    path = HERE / "expected" / "decide.json"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if path.read_text() == text else f"{path} differs")
    path.write_text(text)


if __name__ == "__main__":
    main()
