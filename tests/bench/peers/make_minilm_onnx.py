"""all-MiniLM-L6-v2's float32 ONNX graph out of its safetensors, for @huggingface/transformers: one file, the field's names."""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModel


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    (target / "onnx").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)
    model = AutoModel.from_pretrained(str(source), attn_implementation="eager").eval()
    # One tensor each: inputs that are one and the same tensor become one in the graph.
    inputs = {
        "input_ids": torch.arange(1000, 1016).reshape(2, 8),
        "attention_mask": torch.ones((2, 8), dtype=torch.int64),
        "token_type_ids": torch.zeros((2, 8), dtype=torch.int64),
    }
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=512)
    program = torch.onnx.export(
        model,
        kwargs=inputs,
        input_names=list(inputs),
        output_names=["last_hidden_state"],
        dynamic_shapes={name: {0: batch, 1: length} for name in inputs},
        dynamo=True,
        external_data=False,
    )
    # Written last: who finds it finds all of it.
    program.save(str(target / "onnx" / "model.onnx"), external_data=False)


if __name__ == "__main__":
    main()
