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


# How the families offer tools, write calls and show their results. Written for these tests; only the structure is theirs.
TOOL_TEMPLATES = {
    "qwen2.5": """{%- set first = messages[0] %}
{%- if tools %}
    {{- '<|im_start|>system\\n' ~ (first.content if first.role == 'system' else 'Be helpful.') ~ '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer with\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif first['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + first['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + '<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set at = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = at %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set said = m.content %}{%- set thought = '' %}
        {%- if m.reasoning_content is defined and m.reasoning_content is not none %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in m.content %}
            {%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + m.role + '\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}
        {%- else %}
            {{- said }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- for call in m.tool_calls %}
                {%- if (loop.first and said) or not loop.first %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif m.role == 'user' or not loop.first or not tools %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}""",
    "qwen3-coder": """{%- macro more(fields, known) %}
    {%- if fields is mapping %}
        {%- for key in fields if key not in known %}
            {%- if fields[key] is mapping or (fields[key] is sequence and fields[key] is not string) %}
                {{- '\\n<' ~ key ~ '>' ~ (fields[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}
                {{- '\\n<' ~ key ~ '>' ~ (fields[key] | string) ~ '</' ~ key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools is iterable and tools | length > 0 %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
        {%- for key, field in tool.parameters.properties | items %}
            {{- '\\n<parameter><name>' ~ key ~ '</name>' ~ more(field, ['name', 'description']) ~ '</parameter>' }}
        {%- endfor %}
        {{- more(tool.parameters, ['type', 'properties']) ~ more(tool, ['name', 'parameters']) ~ '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=f>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is iterable and m.tool_calls | length > 0 %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content is defined and m.content is string and m.content | trim | length > 0 %}{{- '\\n' + m.content | trim + '\\n' }}{%- endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
                {{- '<parameter=' + key + '>\\n' }}{{- value }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
        {{- '<tool_response>\\n' ~ m.content ~ '\\n</tool_response>\\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "llama3": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = 'today' %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set told = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set told = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if builtin_tools is defined or tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{%- if builtin_tools is defined %}{{- 'Tools: ' + builtin_tools | reject('equalto', 'code_interpreter') | join(', ') + '\\n' }}{%- endif %}
{{- 'Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- told }}{{- '<|eot_id|>' }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set asked = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception('There is no user message to put the tools into!') }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- 'Answer with {"name": function, "parameters": object}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- asked + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n'+ m['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls|length == 1 %}{{- raise_exception('One call at a time!') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- '<|python_tag|>' + call.name + '.call(' }}
            {%- for key, value in call.arguments | items %}{{- key + '=' + value | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
            {{- ')' }}
        {%- else %}
            {{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
        {%- endif %}
        {{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "mistral-v3": """{%- if messages[0]['role'] == 'system' %}
    {%- set told = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace() %}{%- set ns.turn = 0 %}
{%- for m in rest %}
    {%- if not (m.role == 'tool' or m.role == 'tool_results' or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m['role'] == 'user') != (ns.turn % 2 == 0) %}{{- raise_exception('Roles must alternate: user, assistant, user') }}{%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m['role'] == 'user' %}
        {%- if tools is not none and (m == asked[-1]) %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}{%- else %}{{- '"' + key + '": ' + value|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{{- ', ' if not loop.last else ']' }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and told is defined %}{{- '[INST] ' + told + '\\n\\n' + m['content'] + '[/INST]' }}{%- else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function|tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id|length != 9 %}{{- raise_exception('A call needs an id of nine letters!') }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}
        {{- ' ' + m['content'] + eos_token }}
    {%- elif m['role'] == 'tool_results' or m['role'] == 'tool' %}
        {%- if m.content is defined and m.content.content is defined %}{%- set content = m.content.content %}{%- else %}{%- set content = m.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ', ' }}
        {%- if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}{{- raise_exception('A result needs an id of nine letters!') }}{%- endif %}
        {{- '"call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant, and one system message before them') }}
    {%- endif %}
{%- endfor %}""",
    "mistral-args": """{{- bos_token }}
{%- if tools is defined and tools is not none and tools|length > 0 %}{{- '[AVAILABLE_TOOLS]' + (tools|tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m['role'] == 'user' or m['role'] == 'system' %}
        {{- '[INST]' }}
        {%- if m['content'] is string %}{{- m['content'] }}{%- else %}{%- for block in m['content'] %}{{- block['text'] }}{%- endfor %}{%- endif %}
        {{- '[/INST]' }}
    {%- elif m['role'] == 'assistant' %}
        {%- if (m['content'] is none or m['content'] == '') and (m['tool_calls'] is not defined or m['tool_calls']|length == 0) %}
            {{- raise_exception('An assistant must say or call something.') }}
        {%- endif %}
        {%- if m.thinking is defined %}{{- '[THINK]' + m.thinking + '[/THINK]' }}{%- endif %}
        {%- if m['content'] is none %}{{- '(calls)' }}{%- else %}{{- m['content'] }}{%- endif %}
        {%- for call in m['tool_calls'] or [] %}
            {{- '[TOOL_CALLS]' + call['function']['name'] + '[CALL_ID]' + call['id'] + '[ARGS]' + call['function']['arguments']|tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + m['content']|string + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Unknown role: ' + m['role']) }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}{{- loop.index0 ~ document['title'] ~ ': ' ~ document.text }}{%- endfor %}""",
}

MORE_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "now", "description": "The time.",
                                                        "parameters": {"type": "object", "properties": {}}}}]
NOW = {"id": "call54321", "type": "function", "function": {"name": "now", "arguments": {}}}
RESULT = say("tool", '{"t": 20, "of": "<city>"}', name="get_weather", tool_call_id="call12345")
# With {"date_string": "1 May 2030"} these do not depend on the day.
TOOL_CONVERSATIONS = [
    ([say("system", "You are helpful."), say("user", " weather? ")], {"tools": MORE_TOOLS}),
    ([say("user", "weather?"), say("assistant", "", tool_calls=[CALL]), RESULT], {"tools": TOOLS}),
    ([say("user", "weather?"), say("assistant", None, tool_calls=[CALL]), RESULT], {"tools": TOOLS}),
    ([say("user", "weather?"), say("assistant", "I look.", tool_calls=[CALL]), RESULT, say("assistant", "It is 20."), say("user", "thanks")],
     {"tools": MORE_TOOLS}),
    ([say("user", "both?"), say("assistant", None, tool_calls=[CALL, NOW]), RESULT, say("tool", "noon", tool_call_id="call54321")],
     {"tools": MORE_TOOLS}),
    ([say("user", "q"), say("assistant", "I look.", reasoning_content="\nhm\n", tool_calls=[CALL]), RESULT], {"tools": TOOLS, "enable_thinking": True}),
    ([say("user", "q"), say("assistant", "a", reasoning_content="hm"), say("user", "q2")], {"enable_thinking": False}),
    ([say("user", "q"), say("assistant", "a", thinking="hm")], {"add_generation_prompt": False}),
    ([say("user", "q"), say("assistant", "a", reasoning="hm")], {"add_generation_prompt": False}),
    ([say("user", "q"), say("assistant", "<think>\nhm\n</think>\n\na")], {"add_generation_prompt": False}),
    ([say("user", "weather?"), say("assistant", "", tool_calls=[{**CALL, "id": "short"}]), RESULT], {"tools": TOOLS}),
    ([say("user", "weather?"), say("assistant", "", tool_calls=[CALL]), RESULT], {"tools": TOOLS, "builtin_tools": ["get_weather", "code_interpreter"]}),
    ([say("system", "sys"), say("user", "weather?")], {"tools": TOOLS, "tools_in_user_message": False}),
    ([say("system", "sys"), say("system", "again"), say("user", "x")], {}),
    ([say("user", "x"), say("user", "y")], {}),
    ([say("assistant", "x"), say("user", "y")], {}),
    ([say("narrator", "x")], {}),
    ([say("user", "x")], {"documents": [{"title": "T", "text": "a < b"}, {"title": "U", "text": "é"}], "tools": []}),
    ([say("system", "only")], {"tools": TOOLS}),
]


def tool_conversations(tokenizer):
    # This version hides a null from the template. Many templates ask for it, so Hob gives it, as older versions did.
    import transformers.tokenization_utils_base as base
    base._normalize_chat_messages = lambda messages: [dict(message) for message in messages]
    for name, template in TOOL_TEMPLATES.items():
        for messages, options in TOOL_CONVERSATIONS:
            options = {"add_generation_prompt": True, "date_string": "1 May 2030", **options}
            case = {"template": name, "messages": messages, "options": options}

            def render(messages):
                return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
            try:
                try:
                    text = render(messages)
                except TypeError:
                    text = "None"
                if "None" in text:
                    # A template that cannot do with a null, or prints it: Hob gives it an empty text.
                    messages = [{**message, "content": message["content"] or ""} for message in messages]
                    text = render(messages)
                case["text"] = text
            except Exception as error:  # a template's refusal
                case["refusal"] = str(error)
            yield case


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
    tools = {"templates": TOOL_TEMPLATES, "cases": list(tool_conversations(tokenizer))}
    (OUT / "chat_tools.json").write_text(json.dumps(tools, ensure_ascii=False, separators=(",", ":")))

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
