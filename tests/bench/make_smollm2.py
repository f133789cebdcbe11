"""Write a GGUF of a llama model as a Hugging Face checkpoint folder, so that stacks which read no GGUF run the same weights.

usage: make_smollm2.py GGUF OUT --dtype float32|bfloat16

The values are the GGUF's own, dequantised: not those of the model's original release.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

# GGUF's name of a tensor inside block N -> its name below model.layers.N; then whether its rows are rotary-interleaved.
BLOCK = {
    "attn_norm": ("input_layernorm", None),
    "attn_q": ("self_attn.q_proj", "heads"),
    "attn_k": ("self_attn.k_proj", "kv_heads"),
    "attn_v": ("self_attn.v_proj", None),
    "attn_output": ("self_attn.o_proj", None),
    "ffn_norm": ("post_attention_layernorm", None),
    "ffn_gate": ("mlp.gate_proj", None),
    "ffn_up": ("mlp.up_proj", None),
    "ffn_down": ("mlp.down_proj", None),
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Source:
    """A GGUF file of architecture llama."""

    def __init__(self, path: Path):
        self.reader = GGUFReader(str(path))
        architecture = self.value("general.architecture")
        if architecture != "llama":
            sys.exit(f"{path}: architecture {architecture}, this script knows llama")
        self.counts = {
            "heads": int(self.value("llama.attention.head_count")),
            "kv_heads": int(self.value("llama.attention.head_count_kv")),
        }

    def value(self, key: str):
        return self.reader.fields[key].contents()

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        result = {}
        for tensor in self.reader.tensors:
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
            name, rotary = self.rename(tensor.name)
            if rotary:
                weight = halves_apart(weight, self.counts[rotary])
            result[name] = weight.to(dtype).contiguous()
        return result

    @staticmethod
    def rename(name: str) -> tuple[str, str | None]:
        if name in TOP:
            return TOP[name], None
        block, number, part, suffix = name.split(".")
        if block != "blk":
            sys.exit(f"unknown tensor {name}")
        target, rotary = BLOCK[part]
        return f"model.layers.{number}.{target}.{suffix}", rotary


def halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps each head's rotary pairs side by side; Hugging Face keeps the first halves, then the second halves."""
    pairs = weight.shape[0] // heads // 2
    return weight.view(heads, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    args = parser.parse_args()

    # Whole or absent: made beside its place, then renamed.
    made = args.out.with_name(f"{args.out.name}.{os.getpid()}.tmp")
    made.mkdir(parents=True)
    source = Source(args.gguf)
    tensors = source.tensors(getattr(torch, args.dtype))
    save_file(tensors, str(made / "model.safetensors"), metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(args.gguf.parent), gguf_file=args.gguf.name)
    tokenizer.save_pretrained(str(made))
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(source.value("llama.embedding_length")),
        "intermediate_size": int(source.value("llama.feed_forward_length")),
        "num_hidden_layers": int(source.value("llama.block_count")),
        "num_attention_heads": source.counts["heads"],
        "num_key_value_heads": source.counts["kv_heads"],
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": int(source.value("llama.context_length")),
        "rms_norm_eps": float(source.value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(source.value("llama.rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": args.dtype,
        **ends,
    }
    (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (made / "generation_config.json").write_text(json.dumps(ends, indent=1) + "\n")
    shutil.rmtree(args.out, ignore_errors=True)
    made.rename(args.out)


if __name__ == "__main__":
    main()
