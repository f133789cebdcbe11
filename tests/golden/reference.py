"""Expected values: what transformers and sentence-transformers say about a fixture, in float32 on the CPU.

Each function loads the fixture from the files just written, so what is stored is the reference's reading of those very bytes.
"""
import json
import math
import warnings

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import tiny

warnings.filterwarnings("ignore")
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)

GREEDY_STEPS = 24
MARGIN = 5e-3      # every greedy step is decided by at least this
NOISE = 5e-5       # float32 may differ from float64 by this much at most, so that 2e-4 is a fair demand
VISIBLE = 1e-2     # a mistake must change some logit by more than this
LENGTHS = [1, 7, 33, 64, 65, 300]
SHORT = 12
LONG = 8200
CHAT = [{"role": "user", "content": "What is the capital?"}]


class Reseed(Exception):
    """The random model is unsuitable (a greedy step is a near tie, say). Try the next seed."""


# --------------------------------------------------------------------------------------------------- decoders

class Decoder:
    """A causal model in float32, asked afresh for every prompt (dynamic rope keeps state between calls)."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights
        self._model = self._build(torch.float32)

    @classmethod
    def from_dir(cls, path):
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        return cls(model.config, {k: v.clone() for k, v in model.state_dict().items()})

    @classmethod
    def from_parts(cls, config, weights):
        """From a config.json's content and weights under Hugging Face's names."""
        return cls(AutoConfig.for_model(**{k: v for k, v in config.items() if v is not None}), weights)

    def _build(self, dtype):
        model = AutoModelForCausalLM.from_config(self.config, attn_implementation="sdpa", dtype=torch.float32).eval()
        missing, unexpected = model.load_state_dict(self.weights, strict=False)
        assert not unexpected and all(m == "lm_head.weight" for m in missing), (missing, unexpected)
        model.tie_weights()
        model = model.to(dtype)
        # The table of frequencies stays what float32 makes it: it is a part of the definition.
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()
        return model

    @torch.no_grad()
    def logits(self, ids, last=False, dtype=torch.float32):
        model = self._model
        if dtype != torch.float32 or "dynamic" in model.model.rotary_emb.rope_type:
            model = self._build(dtype)
        out = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1 if last else 0).logits[0]
        return out[-1] if last else out

    def changed(self, config=None, weights=None):
        """The same model with a mistake in it."""
        cfg = self.config
        if config:
            raw = {**cfg.to_dict(), **config}
            cfg = type(cfg).from_dict(raw)
        return Decoder(cfg, {**self.weights, **(weights or {})})


def cut(tok, count, start=0):
    """A piece of the corpus, from `start` on, that is exactly `count` tokens, special ones included."""
    text = (tiny.CORPUS * 2)[start:]
    end = 1
    while True:
        n = len(tok.encode(text[:end]).ids)
        if n == count:
            return text[:end]
        assert n < count + 3 and end < len(text), (count, start)
        end += 1


def long_ids(prompt):
    """The unit, over and over, cut at the length."""
    return (prompt["unit"] * (prompt["length"] // len(prompt["unit"]) + 1))[:prompt["length"]]


def greedy(model, ids, vocab):
    """The argmax continuation without a cache. Refuses near ties and dull loops."""
    ids, out, margins = list(ids), [], []
    for _ in range(GREEDY_STEPS):
        top = torch.topk(model.logits(ids, last=True), 2)
        margins.append(float(top.values[0] - top.values[1]))
        out.append(int(top.indices[0]))
        ids.append(out[-1])
    if min(margins) < MARGIN:
        raise Reseed(f"margin {min(margins):.1e}")
    if len(set(out)) < 8 or max(out) >= vocab:
        raise Reseed(f"dull continuation {out}")
    return out


def decoder(model_dir, out_prefix, model=None, eos=(), stop_step=None, long=False, lean=False, tokenizer_dir=None):
    """Write OUT.json and OUT.safetensors for a decoder and return notes on its numerical behaviour.

    `lean` is for one more way of storing an architecture that another case covers: only last positions, and no trial of mistakes.
    """
    tokenizer_dir = tokenizer_dir or model_dir
    tok = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    vocab = tok.get_vocab_size()
    model = model or Decoder.from_dir(model_dir)
    has_bos = bool(tok.encode("").ids)
    arrays, prompts = {}, []

    def add(name, text, ids, full=False):
        assert text is None or tok.encode(text).ids == ids
        got = model.logits(ids, last=not full)
        exact = model.logits(ids, last=not full, dtype=torch.float64)
        noise[name] = float((got.double() - exact).abs().max())
        arrays[name] = got
        prompts.append({"name": name, "text": text, "ids": ids, "positions": "all" if full else "last"})

    noise = {}
    # The short prompt is also the one that greedy decoding continues: take the first that leaves no doubt.
    refused = None
    for start in (0, 124, 240, 356, 470, 610):
        text = cut(tok, SHORT, start)
        ids = tok.encode(text).ids
        try:
            tokens = greedy(model, ids, vocab)
            if stop_step is not None and tokens[stop_step] in tokens[:stop_step]:
                raise Reseed("the stop token comes too early")
            if set(eos) & set(tokens):
                raise Reseed("reaches an end token")
            break
        except Reseed as reason:
            refused = reason
    else:
        raise refused
    add("short", text, ids, full=not lean)
    for n in LENGTHS:
        if n == 1 and has_bos:
            add("len1", None, [tok.token_to_id("K")])
        else:
            t = cut(tok, n, 2 * n)
            add(f"len{n}", t, tok.encode(t).ids)
    if long:
        unit = tok.encode(tiny.CORPUS, add_special_tokens=False).ids[:97]
        ids = long_ids({"unit": unit, "length": LONG})
        got = model.logits(ids, last=True)
        noise["long"] = float((got.double() - model.logits(ids, last=True, dtype=torch.float64)).abs().max())
        arrays["long"] = got
        prompts.append({"name": "long", "unit": unit, "length": LONG, "positions": "last"})

    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    rendered = hf.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    chat_ids = tok.encode(rendered, add_special_tokens=False).ids
    arrays["chat"] = model.logits(chat_ids, last=True)

    scored = "When the rain stops, the children"
    completion = " run to the bridge and throw paper boats"
    head, tail = tok.encode(scored).ids, tok.encode(completion, add_special_tokens=False).ids
    assert tok.encode(scored + completion).ids == head + tail
    table = torch.log_softmax(model.logits(head + tail).double(), -1)
    logprobs = [float(table[len(head) + i - 1, t]) for i, t in enumerate(tail)]

    expected = {
        "kind": "decoder",
        "vocab_size": int(model.config.vocab_size),
        "prompts": prompts,
        "greedy": {"prompt": "short", "tokens": tokens, "text": tok.decode(tokens, skip_special_tokens=False)},
        "eos_token_ids": sorted(eos),
        "stops_after": None,
        "chat": {"messages": CHAT, "text": rendered, "ids": chat_ids},
        "score": {"prompt": scored, "completion": completion, "prompt_ids": head, "completion_ids": tail,
                  "logprobs": [round(x, 6) for x in logprobs], "mean_nll": round(-sum(logprobs) / len(logprobs), 6)},
    }
    if stop_step is not None:
        # The caller makes this token an end token: generation yields the tokens before it and stops.
        expected["eos_token_ids"] = sorted({*eos, tokens[stop_step]})
        expected["stops_after"] = stop_step
    worst = max(v for k, v in noise.items() if k != "long")
    if worst > NOISE:
        raise Reseed(f"float32 noise {worst:.1e}")
    report = {"noise": worst, "noise_long": noise.get("long"), "spread": float(arrays["short"].std())}
    if not lean:
        report["mistakes"] = decoder_mistakes(model, prompts, arrays)
    write(out_prefix, expected, arrays)
    return expected, report


def decoder_mistakes(model, prompts, arrays):
    """Make the usual mistakes and see that each one shows in the last logits of the 33-token prompt."""
    cfg, w = model.config, model.weights
    ids = next(p["ids"] for p in prompts if p["name"] == "len33")
    heads, kv = cfg.num_attention_heads, cfg.num_key_value_heads
    hd = cfg.head_dim if getattr(cfg, "head_dim", None) else cfg.hidden_size // heads
    rope = dict(cfg.rope_parameters)

    def each(test, change):
        return {k: change(v) for k, v in w.items() if test(k)}

    def interleave(v, n):
        return v.reshape(n, 2, hd // 2, *v.shape[1:]).transpose(1, 2).reshape(v.shape)

    square = [k for k in w if k.endswith("o_proj.weight") and w[k].shape[0] == w[k].shape[1]]
    tries = {
        "eps": dict(config={"rms_norm_eps": 1e-5 if cfg.rms_norm_eps != 1e-5 else 1e-6}),
        "theta": dict(config={"rope_parameters": {**rope, "rope_theta": 10000.0 if rope["rope_theta"] != 10000.0 else 5e5}}),
        "input norms are ones": dict(weights=each(lambda k: "input_layernorm" in k, torch.ones_like)),
        "post norms are ones": dict(weights=each(lambda k: "post_attention" in k, torch.ones_like)),
        "final norm is ones": dict(weights={"model.norm.weight": torch.ones_like(w["model.norm.weight"])}),
        "rotary halves interleaved": dict(weights={
            **each(lambda k: "q_proj" in k, lambda v: interleave(v, heads)),
            **each(lambda k: "k_proj" in k, lambda v: interleave(v, kv))}),
        "gate and up swapped": dict(weights={
            k: w[k.replace("gate_proj", "#").replace("up_proj", "gate_proj").replace("#", "up_proj")]
            for k in w if "gate_proj" in k or "up_proj" in k}),
    }
    if square:
        tries["o_proj transposed"] = dict(weights={k: w[k].T.contiguous() for k in square})
    if rope.get("rope_type", "default") not in ("default", "dynamic"):
        tries["rope scaling ignored"] = dict(config={"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}})
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        biases = each(lambda k: k.endswith(part + ".bias"), torch.zeros_like)
        if biases:
            tries[f"{part} bias ignored"] = dict(weights=biases)
    for part in ("q_norm", "k_norm"):
        norms = each(lambda k: part in k, torch.ones_like)
        if norms:
            tries[f"{part} is ones"] = dict(weights=norms)
    seen = {}
    if "long" in arrays:
        p = next(p for p in prompts if p["name"] == "long")
        plain = model.changed(**tries["rope scaling ignored"]).logits(long_ids(p), last=True)
        seen["rope scaling ignored, 8200 tokens"] = float((plain - arrays["long"]).abs().max())
        assert seen["rope scaling ignored, 8200 tokens"] > VISIBLE, seen
    for name, change in tries.items():
        seen[name] = float((model.changed(**change).logits(ids, last=True) - arrays["len33"]).abs().max())
        if seen[name] < VISIBLE:
            raise Reseed(f"mistake not visible: {name} {seen[name]:.1e}")
    if rope.get("rope_type") == "dynamic":
        plain = model.changed(config={"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}})
        ids = next(p["ids"] for p in prompts if p["name"] == "len300")
        seen["rope scaling ignored, 300 tokens"] = float((plain.logits(ids, last=True) - arrays["len300"]).abs().max())
        assert seen["rope scaling ignored, 300 tokens"] > VISIBLE
    return seen


def write(out_prefix, expected, arrays):
    tiny.dump(out_prefix.with_name(out_prefix.name + ".json"), expected)
    tiny.save_tensors(out_prefix.with_name(out_prefix.name + ".safetensors"),
                      {k: v.float().contiguous() for k, v in sorted(arrays.items())})


def against_mlx_lm(model_dir, out_prefix):
    """The largest difference between the stored logits and mlx-lm's on the same directory (CPU, float32)."""
    import mlx.core as mx
    from mlx_lm.utils import load_model
    from safetensors.numpy import load_file
    mx.set_default_device(mx.cpu)
    model, _ = load_model(model_dir, lazy=False)
    model.set_dtype(mx.float32)
    prefix = str(out_prefix)
    expected, arrays = json.load(open(prefix + ".json")), load_file(prefix + ".safetensors")
    worst = {}
    for p in expected["prompts"]:
        ids = p.get("ids") or long_ids(p)
        got = np.array(model(mx.array([ids]))[0])
        if p["positions"] == "last":
            got = got[-1]
        key = "long" if p["name"] == "long" else "short"
        worst[key] = max(worst.get(key, 0.0), float(np.abs(got - arrays[p["name"]]).max()))
    return worst


def against_gguf_reader(path, out_prefix, config):
    """The largest difference between the stored logits and those of transformers reading the GGUF by itself.

    transformers 5.24 overlooks two things in a GGUF, which are told to it here: attention.key_length of qwen3 (it assumes
    128) and rope_freqs.weight (it leaves the scaling out).
    """
    from safetensors.torch import load_file
    own_config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if config.get("head_dim"):
        own_config.head_dim = config["head_dim"]
    if config.get("rope_scaling"):
        own_config.rope_parameters = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=own_config, dtype=torch.float32)
    own = Decoder(model.config, model.state_dict())
    expected, arrays = json.load(open(f"{out_prefix}.json")), load_file(f"{out_prefix}.safetensors")
    return max(float((own.logits(p["ids"], last=p["positions"] == "last") - arrays[p["name"]]).abs().max())
               for p in expected["prompts"])


# -------------------------------------------------------------------------------------------------- embedders

TEXTS = [
    "The kettle hums while the river bends around the old stone mill.",
    "a",
    "Café Ünïcödé, naïve façade",
    "日本語 and 東京",
    "rain 😀 again",
    "A clock which stands still is right twice a day!",
    tiny.CORPUS.replace("\n", " "),
    "UPPER CASE, lower case; 365 days - (1024 ways)",
    "bread, salt, candles",
    "  two   spaces\tand a tab\n",
    "".join(tiny.CORPUS.splitlines()[4:6]),
    "?",
]


def bert_mistakes(bert, run, visible, subtle):
    """Make the usual mistakes in a BERT and see that each one shows in run()'s result by more than `visible`."""
    right = run()
    seen = {}

    def tried(name, change, undo, least=visible):
        change()
        seen[name] = float((run() - right).abs().max())
        undo()
        if seen[name] < least:
            raise Reseed(f"mistake not visible: {name} {seen[name]:.1e}")

    def parameter(name, test, change):
        hit = [(v, v.data.clone()) for k, v in bert.named_parameters() if test(k)]
        if hit:
            tried(name, lambda: [v.data.copy_(change(old)) for v, old in hit], lambda: [v.data.copy_(old) for v, old in hit])

    norms = [m for m in bert.modules() if isinstance(m, torch.nn.LayerNorm)]
    eps = norms[0].eps
    tried("eps", lambda: [setattr(m, "eps", 1e-5) for m in norms], lambda: [setattr(m, "eps", eps) for m in norms])
    layers = [layer.intermediate for layer in bert.encoder.layer]
    act = layers[0].intermediate_act_fn
    tried("gelu by tanh", lambda: [setattr(m, "intermediate_act_fn", torch.nn.GELU(approximate="tanh")) for m in layers],
          lambda: [setattr(m, "intermediate_act_fn", act) for m in layers], subtle)
    parameter("positions off by one", lambda k: "position_embeddings" in k, lambda v: v.roll(1, 0))
    parameter("no token types", lambda k: "token_type" in k, torch.zeros_like)
    parameter("query transposed", lambda k: "self.query.weight" in k, lambda v: v.T)
    for part in ("self.query", "self.value", "attention.output.dense", "intermediate.dense", "LayerNorm"):
        parameter(part + " bias ignored", lambda k: k.endswith(part + ".bias"), torch.zeros_like)
    parameter("norms are ones", lambda k: k.endswith("LayerNorm.weight"), torch.ones_like)
    return seen


def embedder(model_dir, out_prefix, prompt_names=(None,)):
    """Write vectors of TEXTS, for each prompt name, as sentence-transformers' encode() gives them."""
    from sentence_transformers import SentenceTransformer
    st = SentenceTransformer(str(model_dir), device="cpu", local_files_only=True)
    tok = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tok.no_truncation()
    tok.no_padding()
    limit = int(st.max_seq_length)
    arrays, sets = {}, []
    for name in prompt_names:
        key = "default" if name is None else "prompt_" + name
        got = st.encode(TEXTS, prompt_name=name, batch_size=32, convert_to_numpy=True)
        alone = np.stack([st.encode([t], prompt_name=name, convert_to_numpy=True)[0] for t in TEXTS])
        assert np.abs(got - alone).max() < 2e-5, np.abs(got - alone).max()
        prompt = st.prompts.get(name or st.default_prompt_name or "", "") or ""
        ids = []
        for t in TEXTS:
            feats = st.preprocess([prompt + t])
            ids.append([int(x) for x in feats["input_ids"][0]])
        full = [len(tok.encode(prompt + t).ids) for t in TEXTS]
        for row, n in zip(ids, full):
            assert len(row) == min(n, limit), (len(row), n, limit)
        arrays[key] = torch.from_numpy(got)
        sets.append({"prompt_name": name, "prompt": prompt, "vectors": key, "input_ids": ids,
                     "tokens": [len(r) for r in ids], "untruncated_tokens": full})
    other = arrays["default"]
    assert torch.pdist(other).min() > 1e-2  # no two texts may be confused
    expected = {"kind": "embedder", "texts": TEXTS, "dimensions": int(got.shape[1]), "max_seq_length": limit, "sets": sets}
    write(out_prefix, expected, arrays)
    norms = np.linalg.norm(got, axis=1)
    report = {"norms": (float(norms.min()), float(norms.max())), "cut": sum(n > limit for n in full)}
    bert = next(m for m in st.modules() if type(m).__name__ in ("BertModel", "Qwen3Model"))
    if type(bert).__name__ == "BertModel":
        report["mistakes"] = bert_mistakes(
            bert, lambda: torch.from_numpy(st.encode([TEXTS[0], TEXTS[7]], convert_to_numpy=True)), 2e-3,
            # The two forms of GELU differ too little to be told apart in a vector of length one.
            1e-4 if norms.min() > 2 else 0.0)
    return report


# -------------------------------------------------------------------------------------------------- rerankers

_LINES = tiny.CORPUS.splitlines()
PAIRS = [
    ("who repairs clocks?", _LINES[3]),
    ("who repairs clocks?", _LINES[1]),
    ("capital of the country", "The teacher asked."),
    ("a", "?"),
    ("Ünïcödé 日本", "Café 😀 naïve"),
    # Too long together, in each of the ways that longest_first tells apart.
    ("garden in the snow", " ".join(_LINES)),
    (" ".join(_LINES), "garden in the snow"),
    (" ".join(_LINES[:4]), " ".join(_LINES[4:])),
    # Equally long, 34 tokens each: the odd one of the 61 goes to the document.
    (_LINES[0], _LINES[7]),
]
POSITIVE = {"entailment", "label1", "positive", "relevant", "relevance", "true", "yes"}


def reranker(model_dir, out_prefix):
    model, info = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    model.eval()
    hf = AutoTokenizer.from_pretrained(model_dir)
    tok = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    limit = model.config.max_position_embeddings
    args = dict(truncation="longest_first", max_length=limit)
    queries, documents = [list(x) for x in zip(*PAIRS)]
    with torch.no_grad():
        batch = hf(queries, documents, padding=True, return_tensors="pt", **args)
        logits = model(**batch).logits
        single = torch.cat([model(**hf(q, d, return_tensors="pt", **args)).logits for q, d in PAIRS])
        exact = torch.cat([model.double()(**hf(q, d, return_tensors="pt", **args)).logits for q, d in PAIRS])
    assert (logits - single).abs().max() < NOISE and (single - exact).abs().max() < NOISE
    if torch.pdist(logits.reshape(len(PAIRS), -1)).min() < 1e-3 or logits.min() > -1 or logits.max() < 1:
        raise Reseed(f"dull logits {logits.flatten().tolist()}")
    model.float()

    @torch.no_grad()
    def two():
        return torch.cat([model(**hf(q, d, return_tensors="pt", **args)).logits for q, d in PAIRS[:2]])

    mistakes = bert_mistakes(model.bert, two, VISIBLE, 1e-3)
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    rows = []
    for i, (q, d) in enumerate(PAIRS):
        enc = hf(q, d, **args)
        full = len(tok.encode(q, d).ids)
        assert len(enc["input_ids"]) == min(full, limit)
        if len(labels) == 1:
            score = 1 / (1 + math.exp(-float(logits[i, 0])))
        else:
            at = next(j for j, l in enumerate(labels) if l.lower() in POSITIVE)
            score = float(torch.softmax(logits[i].double(), -1)[at])
        rows.append({"query": q, "document": d, "input_ids": enc["input_ids"], "token_type_ids": enc["token_type_ids"],
                     "untruncated_tokens": full, "logits": [round(float(x), 7) for x in logits[i]], "score": round(score, 7)})
    expected = {"kind": "reranker", "labels": labels, "max_length": limit, "truncation": "longest_first", "pairs": rows}
    write(out_prefix, expected, {"logits": logits})
    return {"logits": (float(logits.min()), float(logits.max())), "cut": sum(r["untruncated_tokens"] > limit for r in rows),
            "mistakes": mistakes}
