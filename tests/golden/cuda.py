#!/usr/bin/env python3
"""Holds Hob's CUDA kernels against transformers, on a machine with an NVIDIA GPU, torch, transformers and accelerate.

    tests/golden/cuda.py --hob target/release/hob --tokenizer FOLDER --work /tmp/cuda

The golden models are too narrow for the kernels' heads, so it makes random ones of the served widths, and has Hob continue two prompts
with each, in three types. Every token's log-probability is compared with one forward of transformers in float32 over the prompt and
Hob's tokens, and the token must be the likeliest there, within the tolerance. FOLDER holds a tokenizer of at most 49,152 tokens (that of
SmolLM2, for one). The libmlx.so of the mlx-cuda wheel and CUDA's libraries must be first on LD_LIBRARY_PATH.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

BASE = {
    "vocab_size": 49152,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
MODELS = {
    "heads of 64": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "heads of 96": (LlamaForCausalLM, LlamaConfig, {"hidden_size": 384}),
    "llama3 scaling": (LlamaForCausalLM, LlamaConfig, {"rope_scaling": {**LLAMA3, "rope_theta": 500000.0}}),
    "yarn scaling": (LlamaForCausalLM, LlamaConfig, {"rope_scaling": {**YARN, "rope_theta": 10000.0}}),
    "qwen2, biases": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3, norms, heads of 128": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 128, "tie_word_embeddings": True}),
    "heads of 80: served in part": (LlamaForCausalLM, LlamaConfig, {"hidden_size": 320, "intermediate_size": 520}),
}
# The second is longer than one block of keys of the attention kernel.
PROMPTS = [("The ferry turned", 40), (" ".join(f"the ferry number {n} turned to sea" for n in range(160)), 12)]
TOLERANCES = {torch.float32: 2e-4, torch.float16: 0.05, torch.bfloat16: 0.15}


def random_model(cls, config):
    torch.manual_seed(1)
    model = cls(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            if name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def continuation(hob, folder, prompt, tokens, dtype):
    command = [hob, "generate", "--model", folder, "--prompt", prompt, "--raw", "--max-tokens", str(tokens), "--logprobs", "1", "--json"]
    if dtype == torch.float32:
        command += ["--float", "float32"]
    # Else MLX rounds float32 products to 19 bits.
    output = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MLX_ENABLE_TF32": "0"}, check=False)
    if output.returncode:
        sys.exit(f"hob: {output.returncode}\n{output.stdout}{output.stderr}")
    return json.loads(output.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hob", required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    options = parser.parse_args()
    failed = 0
    for name, (cls, config, changes) in MODELS.items():
        model = random_model(cls, config(**{**BASE, **changes}))
        for dtype, tolerance in TOLERANCES.items():
            folder = options.work / "model"
            model.to(dtype).save_pretrained(folder)
            for file in options.tokenizer.glob("*token*"):
                shutil.copy(file, folder)
            reference = cls.from_pretrained(folder, dtype=torch.float32).cuda().eval()
            for prompt, tokens in PROMPTS:
                found = continuation(options.hob, str(folder), prompt, tokens, dtype)
                ids, chosen = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"], found["token_ids"]
                with torch.no_grad():
                    logits = reference(torch.tensor([ids + chosen]).cuda()).logits[0, len(ids) - 1 : -1]
                wanted = logits.float().log_softmax(-1).cpu()
                of_chosen = wanted[range(len(chosen)), chosen]
                error = (torch.tensor([token["logprob"] for token in found["logprobs"]]) - of_chosen).abs().max().item()
                behind = (wanted.max(-1).values - of_chosen).max().item()
                good = error < tolerance and behind < tolerance and len(ids) == found["prompt_tokens"]
                failed += not good
                print("ok  " if good else "BAD ", f"{name}, {str(dtype)[6:]}, {len(ids)} + {len(chosen)} tokens: {error:.1e}, {behind:.1e}")
            shutil.rmtree(folder)
    sys.exit(f"{failed} failed" if failed else 0)


if __name__ == "__main__":
    main()
