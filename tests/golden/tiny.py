"""Tiny models for the golden fixtures: vocabularies, random weights, and the files a checkpoint is made of.

Everything is a function of a seed and of the text below. No file is read and nothing depends on a hash order.
"""
import json
import pathlib
import re
import zlib
from collections import Counter

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Vocabularies are learned from this, and prompts are cut from it.
CORPUS = """\
The kettle hums while the river bends around the old stone mill. A baker counts seven loaves, two rolls and one tired cat.
When the rain stops, the children run to the bridge and throw paper boats into the brown water. Nobody keeps the time there.
In the evening a train from the north passes without stopping; its windows are yellow squares on the dark field.
My neighbour repairs clocks. She says that a clock which stands still is right twice a day, and that this is more than most of us.
There are 12 apples in the bowl, 365 days in a year, and 1024 ways to be late. It's raining again, isn't it?
Write a short list: bread, salt, candles, a new rope for the well, and something warm for the dog.
The teacher asked what the capital of the country was; the answer came from the back of the room, quietly and correctly.
Under the snow the garden waits. In March the first green points come up between the stones, and the birds return to the roof.
"""

# The splitting rules that Llama 3 and Qwen 2 checkpoints publish in tokenizer.json.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_SPLIT = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN_SPLIT = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL

LLAMA_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

MERGES = 28
BPE_VOCAB = 256 + MERGES + len(LLAMA_SPECIALS)  # 288


def rng_for(name, attempt=0):
    """A generator that belongs to one model; `attempt` counts the re-seedings that a too narrow margin asked for."""
    return np.random.default_rng([zlib.crc32(name.encode()), attempt])


def dump(path, value):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1, ensure_ascii=False)
    # A list of numbers on one line, so that a person can read around it.
    text = re.sub(r"\[\s+([-+.e\d,\s]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
    path.write_text(text + "\n", encoding="utf-8")


def save_tensors(path, tensors):
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


# ---------------------------------------------------------------------------------------------- byte-level BPE

def byte_alphabet():
    """The 256 printable stand-ins of byte-level BPE, in the order of the bytes they stand for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def learn_merges(split, count):
    """Plain BPE training: join the most frequent neighbouring pair, ties by spelling, `count` times."""
    cutter = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    words = Counter(word for word, _ in cutter.pre_tokenize_str(CORPUS))
    words = [(list(word), n) for word, n in sorted(words.items())]
    merges = []
    while len(merges) < count:
        pairs = Counter()
        for symbols, n in words:
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] += n
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        for symbols, _ in words:
            i = 0
            while i + 1 < len(symbols):
                if (symbols[i], symbols[i + 1]) == best:
                    symbols[i:i + 2] = ["".join(best)]
                i += 1
    return merges


def bpe_tokenizer(family, append_eos=False):
    """A byte-level BPE in the manner of Llama 3 (adds a begin token) or of Qwen 2 and 3 (adds none)."""
    llama = family == "llama"
    split, specials = (LLAMA_SPLIT, LLAMA_SPECIALS) if llama else (QWEN_SPLIT, QWEN_SPECIALS)
    merges = learn_merges(split, MERGES)
    entries = byte_alphabet() + ["".join(m) for m in merges]
    assert len(set(entries)) == len(entries)
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(entries)}, merges=merges))
    if not llama:
        tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    byte_level = processors.ByteLevel(trim_offsets=False)
    bos = [(LLAMA_SPECIALS[0], tok.token_to_id(LLAMA_SPECIALS[0]))] if llama else []
    eos = [(QWEN_SPECIALS[0], tok.token_to_id(QWEN_SPECIALS[0]))] if append_eos else []
    if bos:
        tok.post_processor = processors.Sequence([byte_level, processors.TemplateProcessing(
            single=f"{bos[0][0]} $A", pair=f"{bos[0][0]} $A {bos[0][0]}:1 $B:1", special_tokens=bos)])
    elif eos:
        tok.post_processor = processors.Sequence([byte_level, processors.TemplateProcessing(
            single=f"$A {eos[0][0]}", pair=f"$A {eos[0][0]} $B:1 {eos[0][0]}:1", special_tokens=eos)])
    else:
        tok.post_processor = byte_level
    return tok


def write_bpe(out, family, append_eos=False, model_max_length=1 << 17):
    tok = bpe_tokenizer(family, append_eos)
    tok.save(str(out / "tokenizer.json"), pretty=False)
    llama = family == "llama"
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=LLAMA_SPECIALS[0] if llama else None,
        eos_token="<|end_of_text|>" if llama else ("<|endoftext|>" if append_eos else "<|im_end|>"),
        pad_token=None if llama else "<|endoftext|>",
        chat_template=LLAMA_TEMPLATE if llama else QWEN_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )
    if append_eos:
        config["padding_side"] = "left"
    dump(out / "tokenizer_config.json", config)
    return tok


# -------------------------------------------------------------------------------------------------- WordPiece

def wordpiece_vocab():
    letters = "abcdefghijklmnopqrstuvwxyz"
    digits = "0123456789"
    words = Counter(w for w in "".join(c if c.isalpha() else " " for c in CORPUS.lower()).split() if len(w) > 1)
    endings = Counter(w[i:] for w in words for i in (-2, -3) if len(w) > 3)
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries += list(letters + digits + ".,;:!?'\"-()") + ["日", "本", "語"]
    entries += ["##" + c for c in letters + digits]
    entries += [w for w, _ in sorted(words.items(), key=lambda e: (-e[1], e[0]))[:96]]
    entries += ["##" + e for e, _ in sorted(endings.items(), key=lambda e: (-e[1], e[0]))[:24]]
    return entries


def write_wordpiece(out, max_length, baked=None):
    """`baked`: cut and pad to this length inside tokenizer.json, as all-MiniLM-L6-v2's file does. Loaders must not heed it."""
    entries = wordpiece_vocab()
    assert len(set(entries)) == len(entries)
    tok = Tokenizer(models.WordPiece(vocab={t: i for i, t in enumerate(entries)}, unk_token="[UNK]",
                                     max_input_chars_per_word=100))
    tok.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece(prefix="##")
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in entries[:5]])
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    if baked:
        tok.enable_truncation(baked)
        tok.enable_padding(length=baked, pad_id=0, pad_token="[PAD]")
    tok.save(str(out / "tokenizer.json"), pretty=False)
    (out / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")
    dump(out / "tokenizer_config.json", dict(
        tokenizer_class="BertTokenizer", do_lower_case=True, tokenize_chinese_chars=True, strip_accents=None,
        cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]",
        model_max_length=max_length))
    return tok


# ---------------------------------------------------------------------------------------------------- weights

class Draw:
    """Random tensors whose scale makes every part of a model count."""

    def __init__(self, rng):
        self.rng = rng

    def linear(self, rows, cols, gain=1.2):
        return (self.rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    def table(self, rows, cols, std=0.3):
        return (self.rng.standard_normal((rows, cols)) * std).astype(np.float32)

    def norm(self, size):
        return (1.0 + 0.3 * self.rng.standard_normal(size)).astype(np.float32)

    def bias(self, size):
        return (0.3 * self.rng.standard_normal(size)).astype(np.float32)


def decoder_weights(cfg, draw):
    """The tensors of a llama, qwen2 or qwen3 checkpoint, under Hugging Face's names."""
    h, ffn, heads = cfg["hidden_size"], cfg["intermediate_size"], cfg["num_attention_heads"]
    kv, hd = cfg["num_key_value_heads"], cfg.get("head_dim") or h // heads
    kind = cfg["model_type"]
    qkv_bias = cfg.get("attention_bias", False) or kind == "qwen2"
    out = {"model.embed_tokens.weight": draw.table(cfg["vocab_size"], h)}
    for i in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = draw.norm(h)
        out[p + "post_attention_layernorm.weight"] = draw.norm(h)
        for part, rows, cols, biased in (
            ("self_attn.q_proj", heads * hd, h, qkv_bias),
            ("self_attn.k_proj", kv * hd, h, qkv_bias),
            ("self_attn.v_proj", kv * hd, h, qkv_bias),
            ("self_attn.o_proj", h, heads * hd, cfg.get("attention_bias", False)),
            ("mlp.gate_proj", ffn, h, cfg.get("mlp_bias", False)),
            ("mlp.up_proj", ffn, h, cfg.get("mlp_bias", False)),
            ("mlp.down_proj", h, ffn, cfg.get("mlp_bias", False)),
        ):
            out[p + part + ".weight"] = draw.linear(rows, cols)
            if biased:
                out[p + part + ".bias"] = draw.bias(rows)
        if kind == "qwen3":
            out[p + "self_attn.q_norm.weight"] = draw.norm(hd)
            out[p + "self_attn.k_norm.weight"] = draw.norm(hd)
    out["model.norm.weight"] = draw.norm(h)
    if not cfg.get("tie_word_embeddings"):
        out["lm_head.weight"] = draw.table(cfg["vocab_size"], h)
    return out


def bert_weights(cfg, draw, prefix="", labels=0):
    """The tensors of a BertModel, or with `labels` of a BertForSequenceClassification."""
    h, ffn = cfg["hidden_size"], cfg["intermediate_size"]
    out = {
        "embeddings.word_embeddings.weight": draw.table(cfg["vocab_size"], h),
        "embeddings.position_embeddings.weight": draw.table(cfg["max_position_embeddings"], h, 0.2),
        "embeddings.token_type_embeddings.weight": draw.table(cfg["type_vocab_size"], h, 0.2),
    }

    def dense(name, rows, cols):
        out[name + ".weight"], out[name + ".bias"] = draw.linear(rows, cols), draw.bias(rows)

    def layer_norm(name):
        out[name + ".weight"], out[name + ".bias"] = draw.norm(h), draw.bias(h)

    layer_norm("embeddings.LayerNorm")
    for i in range(cfg["num_hidden_layers"]):
        p = f"encoder.layer.{i}."
        for part in ("query", "key", "value"):
            dense(p + "attention.self." + part, h, h)
        dense(p + "attention.output.dense", h, h)
        layer_norm(p + "attention.output.LayerNorm")
        dense(p + "intermediate.dense", ffn, h)
        dense(p + "output.dense", h, ffn)
        layer_norm(p + "output.LayerNorm")
    dense("pooler.dense", h, h)
    out = {prefix + k: v for k, v in out.items()}
    if labels:
        out["classifier.weight"], out["classifier.bias"] = draw.linear(labels, h, 4.0), draw.bias(labels)
    return out


def save_weights(out, weights, dtype=torch.float32, shards=1):
    """model.safetensors, or shards with their index. Integer tensors (packed quants) keep their type."""
    def tensor(value):
        t = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        return t.to(dtype).contiguous() if t.dtype == torch.float32 else t.contiguous()

    tensors = {k: tensor(v) for k, v in sorted(weights.items())}
    if shards == 1:
        save_tensors(out / "model.safetensors", tensors)
        return
    names = list(tensors)
    files = {}
    for s in range(shards):
        # Dealt like cards, so that every layer is spread over all shards.
        part = names[s::shards]
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        save_tensors(out / file, {k: tensors[k] for k in part})
        files.update({k: file for k in part})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    dump(out / "model.safetensors.index.json", dict(metadata=dict(total_size=size), weight_map=dict(sorted(files.items()))))


# ------------------------------------------------------------------------------------------------------- GGUF

GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    """blk.0.attn_q.weight for model.layers.0.self_attn.q_proj.weight, and so on."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"


def rotary_pairs_adjacent(w, heads):
    """llama.cpp's llama turns neighbouring rows of a head together, Hugging Face's rows half a head apart.
    Its converter therefore reorders q and k: first of the lower half, first of the upper half, second of the lower..."""
    half = w.shape[0] // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half) for side in (0, 1)]
    return w[order]


def llama3_factors(cfg):
    """What llama.cpp stores as rope_freqs.weight: by how much to divide each frequency."""
    s, dim = cfg["rope_scaling"], cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
    factors = []
    for i in range(0, dim, 2):
        turns = s["original_max_position_embeddings"] / (2 * np.pi * cfg["rope_theta"] ** (i / dim))
        if turns >= s["high_freq_factor"]:
            factors.append(1.0)
        elif turns <= s["low_freq_factor"]:
            factors.append(s["factor"])
        else:
            share = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
            factors.append(1 / ((1 - share) / s["factor"] + share))
    return np.array(factors, dtype=np.float32)


def q6_k_blocks(rng, rows, cols):
    """Valid random Q6_K data (256 weights in 210 bytes: low nibbles, high pairs of bits, 16 scales, one half float)."""
    n = rows * cols // 256
    bits = rng.integers(0, 256, (n, 192), dtype=np.uint8)
    scales = rng.integers(-31, 32, (n, 16)).astype(np.int8).view(np.uint8)
    unit = np.full((n, 1), 4e-4, dtype=np.float16).view(np.uint8)
    return np.concatenate([bits, scales, unit], axis=1).reshape(rows, -1)


def write_gguf(path, cfg, weights, kind, family, q6_k=(), rng=None):
    """One GGUF file with matrices of the quantisation `kind` and float32 vectors, as llama.cpp's converter lays it out.

    Returns the weights that the file really holds, under Hugging Face's names and in its order of rows.
    """
    import gguf
    types = gguf.GGMLQuantizationType
    arch = cfg["model_type"]
    heads, kv = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    hd = cfg.get("head_dim") or cfg["hidden_size"] // heads
    path.parent.mkdir(parents=True, exist_ok=True)
    w = gguf.GGUFWriter(str(path), arch)
    w.add_name(path.stem)
    w.add_file_type(int({"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}[kind]))
    w.add_quantization_version(2)
    w.add_context_length(cfg["max_position_embeddings"])
    w.add_embedding_length(cfg["hidden_size"])
    w.add_block_count(cfg["num_hidden_layers"])
    w.add_feed_forward_length(cfg["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    w.add_rope_freq_base(cfg["rope_theta"])
    if arch == "llama":
        w.add_vocab_size(cfg["vocab_size"])
        w.add_rope_dimension_count(hd)
    if cfg.get("head_dim"):
        w.add_key_length(hd)
        w.add_value_length(hd)

    tok = bpe_tokenizer(family)
    state = json.loads(tok.to_str())
    specials = {t["id"] for t in state["added_tokens"]}
    tokens = [tok.id_to_token(i) for i in range(tok.get_vocab_size())]
    kinds = [gguf.TokenType.CONTROL if i in specials else gguf.TokenType.NORMAL for i in range(len(tokens))]
    for i in range(len(tokens), cfg["vocab_size"]):
        tokens.append(f"[PAD{i}]")
        kinds.append(gguf.TokenType.UNUSED)
    llama = family == "llama"
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama-bpe" if llama else "qwen2")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([" ".join(m) for m in learn_merges(LLAMA_SPLIT if llama else QWEN_SPLIT, MERGES)])
    if llama:
        w.add_bos_token_id(tok.token_to_id("<|begin_of_text|>"))
        w.add_eos_token_id(tok.token_to_id("<|end_of_text|>"))
        w.add_eot_token_id(tok.token_to_id("<|im_end|>"))
    else:
        w.add_bos_token_id(tok.token_to_id("<|endoftext|>"))
        w.add_eos_token_id(tok.token_to_id("<|im_end|>"))
        w.add_pad_token_id(tok.token_to_id("<|endoftext|>"))
    w.add_add_bos_token(llama)
    w.add_chat_template(LLAMA_TEMPLATE if llama else QWEN_TEMPLATE)

    held = {}
    for name, value in weights.items():
        part = name.rsplit(".", 2)[-2]
        n = {"q_proj": heads, "k_proj": kv}.get(part) if arch == "llama" else None
        rows = rotary_pairs_adjacent(np.arange(value.shape[0]), n) if n else np.arange(value.shape[0])
        laid = np.ascontiguousarray(value[rows])
        if any(q in name for q in q6_k):
            packed, type_ = q6_k_blocks(rng, *value.shape), types.Q6_K
        elif value.ndim == 1 or kind == "F32":
            packed, type_ = laid, types.F32
        elif kind == "F16":
            packed, type_ = laid.astype(np.float16), types.F16
        else:
            type_ = types[kind]
            packed = gguf.quants.quantize(laid, type_)
        w.add_tensor(gguf_name(name), packed, raw_dtype=type_)
        read = packed.astype(np.float32) if packed.dtype != np.uint8 else gguf.quants.dequantize(packed, type_)
        held[name] = np.empty_like(value)
        held[name][rows] = read
    if cfg.get("rope_scaling"):
        w.add_tensor("rope_freqs.weight", llama3_factors(cfg))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return held
