#!/usr/bin/env python3
"""Writes tests/golden/text/*.json: what transformers makes of texts, pairs and conversations.

    python3 tests/golden/make_text.py PATH/TO/smollm2.gguf PATH/TO/all-MiniLM-L6-v2

Needs transformers and gguf. transformers rebuilds a GGUF file's tokenizer without the splitting of digits that SmolLM2's own
tokenizer.json does (`tokenizer.ggml.pre` is "smollm"); it is put back here. The templates are written for these tests, in the
style of the well-known families.
"""
import json
import pathlib
import random
import sys
import tempfile

from transformers import AutoTokenizer, PreTrainedTokenizerFast

OUT = pathlib.Path(__file__).parent / "text"

TEXTS = [
    "", " ", "Hello world", " hello", "Hello  world", "The capital of France is Paris.", "I'm you're they've WE'LL it'd 'S",
    "👨‍👩‍👧‍👦 family", "🇫🇷🇯🇵 flags", "👍🏽 skin", "日本語のテキスト。中文文本，한국어 텍스트", "مرحبا بالعالم", "שלום", "हिन्दी पाठ", "ไทย",
    "def f(x):\n    return x**2  # square\n\n\n\tif True:\n\t\tpass", "12345 67890 3.14159 1,000,000 ²³ ½ ٣٤ Ⅷ", "   leading",
    "trailing   ", "\n\n\n", "\t\t\t", "a\u00a0b\u3000c\u200bd", "<|im_start|>user\nhi<|im_end|>", "<|endoftext|>",
    "<s>[INST] x [/INST]</s>", "< |im_end| >", "<|im_end", "|im_end|>", "<think>x</think>", "[CLS] [SEP] [MASK]",
    "e\u0301 é ﬁ ＡＢＣ ①", "\ufeffbom", "a" * 100, " " * 100, "\n" * 60, "!?!?...---___///", "https://example.com/a?b=c&d=e#f",
    "camelCaseHTTPServer snake_case UPPER", "\r\n windows\r\n\r\n lines", "İstanbul ΣΑΣ ẞ", "Ünïcödé naïve café",
    "don't can't won't DON'T", "1st 2nd 3rd", "$100 €50 £20 ¥",
]
RANGES = [
    (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0x2000, 0x206F), (0x300, 0x36F), (9, 13), (32, 32),
]


def texts(count):
    rng = random.Random(20)
    out = list(TEXTS)
    while len(out) < count:
        ranges = rng.sample(RANGES, rng.randint(1, 4))
        length = rng.randint(1, 300) if rng.random() < 0.05 else rng.randint(1, 40)
        text = "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(length))
        if rng.random() < 0.2:
            at = rng.randint(0, len(text))
            text = text[:at] + rng.choice(TEXTS[22:30]) + text[at:]
        out.append(text)
    return out


TEMPLATES = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama3-like": """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral-like": """{{ bos_token }}{% set ns = namespace(turn=0) %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('Roles must alternate user and assistant') }}{% endif %}
    {%- set ns.turn = ns.turn + 1 %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.upper()[:40] + eos_token }}{% endif %}
{%- endfor %}""",
    "qwen3-like": """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "printing": """{{ true }} {{ none }} {{ 1.0 }} {{ 1e20 }} {{ 0.1 + 0.2 }} {{ [1, 'a', none, true] }} {{ {'k': "it's"} }}
{% for m in messages %}
  {% if loop.index0 > 5 %}{% break %}{% endif %}
  {{ m.content | length }} {{ m.content is string }} {{ m.content.startswith('a') }} {{ m.role | title }} {{ extra_list | join('-') }}
{% endfor %}
{% generation %}{{ extra_list | tojson }}{% endgeneration %}{{ {'b': [1, {}], 'a': 'é"\\n'} | tojson(sort_keys=true, indent=2) }}""",
}

TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a <city> & \"more\" é 日本",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3, "x": 1.5, "y": None}},
                   "required": ["city"]}}}]
CALL = {"id": "call12345", "type": "function", "function": {
    "name": "get_weather", "arguments": {"city": "Paris é", "days": 2, "deep": {"a": [1, {"b": None}], "f": 1e20, "g": 0.1}}}}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = [
    ([say("user", "Hello, who are you?")], {}),
    ([say("system", "You are helpful."), say("user", "  spaced  \n"), say("assistant", " answer\n\n"),
      say("user", "a < b > c [x] & 1234 é 👍🏽 日本")], {}),
    ([say("user", "hi"), say("assistant", "hello"), say("user", "more")], {"add_generation_prompt": False}),
    ([say("user", "weather?"), say("assistant", "", tool_calls=[CALL]), say("tool", '{"t": 20}', name="get_weather"),
      say("assistant", "It is 20."), say("user", "thanks")], {"tools": TOOLS}),
    ([say("user", "q"), say("assistant", "<think>\nreason\n</think>\n\nreply"), say("user", "q2")], {"enable_thinking": False}),
    ([say("user", "one"), say("user", "two")], {}),
]


def smollm2(path):
    gguf = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    raw = json.loads(gguf._tokenizer.to_str())
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, raw["pre_tokenizer"]]}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(raw))
        return PreTrainedTokenizerFast(
            tokenizer_file=str(file), bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>",
            pad_token="<|im_end|>", chat_template=gguf.chat_template)


def conversations(tokenizer):
    import time
    import transformers.utils.chat_template_utils as utils
    utils.datetime = type("fixed", (), {"now": staticmethod(lambda: __import__("datetime").datetime(2026, 11, 5, 13, 4, 5))})
    for name, template in {"own": tokenizer.chat_template, **TEMPLATES}.items():
        for messages, options in CONVERSATIONS:
            options = {"add_generation_prompt": True, **options, "extra_list": ["x", 1, None]}
            case = {"name": name, "template": None if name == "own" else template, "messages": messages, "options": options}
            try:
                case["text"] = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
                case["ids"] = tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=True, return_dict=False, **options)
            except Exception as error:  # a template's refusal
                case["refusal"] = str(error)
            yield case


def main():
    OUT.mkdir(exist_ok=True)
    tokenizer = smollm2(pathlib.Path(sys.argv[1]))
    encode = [{"text": text, "ids": (ids := tokenizer(text)["input_ids"]), "decoded": tokenizer._tokenizer.decode(ids, skip_special_tokens=False)}
              for text in texts(220)]
    (OUT / "smollm2.json").write_text(json.dumps({"encode": encode}, ensure_ascii=False, separators=(",", ":")))
    (OUT / "chat.json").write_text(json.dumps(list(conversations(tokenizer)), ensure_ascii=False, separators=(",", ":")))

    minilm = AutoTokenizer.from_pretrained(sys.argv[2])
    some = texts(150)
    encode = [{"text": text, "ids": (ids := minilm(text)["input_ids"]), "decoded": minilm._tokenizer.decode(ids, skip_special_tokens=True)}
              for text in some]
    rng = random.Random(5)
    plain = [text for text in some if "[" not in text]
    pairs = []
    for _ in range(80):
        first, second, limit = rng.choice(plain), rng.choice(plain) * rng.randint(1, 2), rng.choice([8, 16, 17, 33, 64])
        only_second = len(minilm(first, add_special_tokens=False)["input_ids"]) < limit - 3 and rng.random() < 0.5
        # In lists, as cross-encoders do: a single empty second text would count as none.
        result = minilm([first], [second], truncation="only_second" if only_second else "longest_first", max_length=limit)
        pairs.append({"first": first, "second": second, "limit": limit, "only_second": only_second,
                      "ids": result["input_ids"][0], "types": result["token_type_ids"][0]})
    (OUT / "minilm.json").write_text(json.dumps({"encode": encode, "pairs": pairs}, ensure_ascii=False, separators=(",", ":")))


main()
