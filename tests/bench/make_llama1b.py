#!/usr/bin/env python3
"""Makes a Llama of 1B with random weights in bfloat16, for timing on a GPU (random weights take as long as trained ones).

    tests/bench/make_llama1b.py FOLDER TOKENIZER_FOLDER

TOKENIZER_FOLDER holds the files of any tokenizer of at most 128,256 tokens. Needs torch and safetensors, and 3 GB of disk.
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, INNER, HEADS, KV_HEADS, VOCABULARY = 2048, 16, 8192, 32, 8, 128256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape):
    return (torch.randn(*shape, device=DEVICE) * 0.02).to(torch.bfloat16).cpu()


def main():
    folder, tokenizer = map(pathlib.Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    kv = KV_HEADS * HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "model.norm.weight": ones.clone()}
    for layer in range(LAYERS):
        path = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            weights[f"{path}{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{path}{name}.weight"] = ones.clone()
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    main()
