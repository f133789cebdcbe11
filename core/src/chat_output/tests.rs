#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::chat_template::{ChatTemplate, Message};
use crate::error::ErrorKind;
use crate::tokenizer::testing::{byte_level_gguf, from_gguf};

fn tools() -> Value {
    json!([
        { "type": "function", "function": { "name": "get_weather", "parameters": { "type": "object", "properties": {
            "city": { "type": "string" }, "days": { "type": "integer" }, "deep": { "type": "object" }, "ok": { "type": "boolean" },
            "maybe": { "type": ["string", "null"] }, "any": {} } } } },
        { "name": "now" }
    ])
}

fn format(tools: ToolFormat) -> ChatFormat {
    ChatFormat { tools: Some(tools), reasoning: Some(ReasoningMarks::new("<think>", "</think>")) }
}

fn options() -> ParserOptions {
    ParserOptions { tools: Some(tools()), id_seed: Some(7), ..ParserOptions::default() }
}

/// Events with neighbours of one kind put together.
fn merged(events: Vec<ChatEvent>) -> Vec<ChatEvent> {
    let mut out: Vec<ChatEvent> = Vec::new();
    for event in events {
        match (out.last_mut(), event) {
            (Some(ChatEvent::Text(last)), ChatEvent::Text(more))
            | (Some(ChatEvent::Reasoning(last)), ChatEvent::Reasoning(more)) => {
                last.push_str(&more);
            }
            (_, event) => out.push(event),
        }
    }
    out
}

fn read_with(format: &ChatFormat, options: &ParserOptions, pieces: &[&str]) -> Vec<ChatEvent> {
    let mut parser = ChatParser::new(format, options).unwrap();
    let mut events: Vec<ChatEvent> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    assert_eq!(parser.accounted, pieces.concat(), "every character is accounted for, once and in order");
    assert!(!events.iter().any(|event| matches!(event, ChatEvent::Text(text) | ChatEvent::Reasoning(text) if text.is_empty())));
    merged(events)
}

/// The events of `text`, which are the same in one piece and letter by letter.
fn read(tools: ToolFormat, text: &str) -> Vec<ChatEvent> {
    let whole = read_with(&format(tools), &options(), &[text]);
    let letters: Vec<String> = text.chars().map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    assert_eq!(read_with(&format(tools), &options(), &letters), whole);
    whole
}

fn text(text: &str) -> ChatEvent {
    ChatEvent::Text(text.to_owned())
}

fn reasoning(text: &str) -> ChatEvent {
    ChatEvent::Reasoning(text.to_owned())
}

fn rejected(raw: &str, reason: RejectReason) -> ChatEvent {
    ChatEvent::RejectedToolCall { raw: raw.to_owned(), reason }
}

/// Events in short: calls without their ids.
fn short(events: &[ChatEvent]) -> Vec<String> {
    let line = |event: &ChatEvent| match event {
        ChatEvent::Text(text) => format!("text {text}"),
        ChatEvent::Reasoning(text) => format!("reasoning {text}"),
        ChatEvent::ToolCall(call) => format!("call {} {}", call.name, call.arguments),
        ChatEvent::RejectedToolCall { reason, .. } => format!("rejected {reason:?}"),
    };
    events.iter().map(line).collect()
}

use ToolFormat::{Hermes, Llama3, Mistral as MistralFormat};

#[test]
fn hermes_calls_are_read() {
    let one =
        "Let me look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris é\", \"n\": 1.0}}\n</tool_call>";
    assert_eq!(short(&read(Hermes, one)), ["text Let me look.", "call get_weather {\"city\": \"Paris é\", \"n\": 1.0}"]);
    let two = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"arguments\": {\"city\": \"a\"}, \"name\": \"get_weather\"}\n</tool_call>\n\nDone.";
    assert_eq!(short(&read(Hermes, two)), ["call now {}", "call get_weather {\"city\": \"a\"}", "text Done."]);
    // Brackets, quotes and the end tag itself may stand in a string.
    let odd = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "}</tool_call>\"{<tool_call>"}}</tool_call>"#;
    assert_eq!(short(&read(Hermes, odd)), [r#"call get_weather {"city": "}</tool_call>\"{<tool_call>"}"#]);
    // Arguments may be missing, null, or a text in JSON; a number keeps all its digits.
    for (given, arguments) in [
        (r#"{"name": "now"}"#, "{}"),
        (r#"{"name": "now", "arguments": null}"#, "{}"),
        (r#"{"name": "now", "arguments": ""}"#, "{}"),
        (r#"{"name": "now", "arguments": "{\"a\": 1}"}"#, r#"{"a": 1}"#),
        (r#"{"name": "now", "parameters": {"a": 123456789012345678901234567890}}"#, r#"{"a": 123456789012345678901234567890}"#),
        (r#"{"type": "function", "function": {"name": "now", "arguments": {"b": [1]}}}"#, r#"{"b": [1]}"#),
    ] {
        let answer = format!("<tool_call>{given}</tool_call>");
        assert_eq!(short(&read(Hermes, &answer)), [format!("call now {arguments}")], "{given}");
    }
    // A model may end its turn without the end tag.
    assert_eq!(short(&read(Hermes, "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n")), ["call now {}"]);
}

#[test]
fn qwen_coder_calls_are_read() {
    let answer = "I will.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{\"a\": [1, null]}\n</parameter>\n<parameter=ok>\nTrue\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n<parameter=any>\nline 1\n\nline </tool_call> 2\n\n</parameter>\n</function>\n</tool_call>\n";
    let call = r#"call get_weather {"city":"12","days":3,"deep":{"a":[1,null]},"ok":true,"maybe":"null","any":"line 1\n\nline </tool_call> 2\n"}"#;
    assert_eq!(short(&read(Hermes, answer)), ["text I will.", call]);
    assert_eq!(short(&read(Hermes, "<tool_call>\n<function=now>\n</function>\n</tool_call>")), ["call now {}"]);
    assert_eq!(short(&read(Hermes, "<tool_call>\n<function=now>\n</function>")), ["call now {}"]);
    for (bad, reason) in [
        ("<tool_call><function=kumquat></function></tool_call>", RejectReason::UnknownTool),
        ("<tool_call><function=now>junk</function></tool_call>", RejectReason::Malformed),
        ("<tool_call><function=now><parameter=a>1</parameter></tool_call>", RejectReason::Malformed),
        ("<tool_call><function=now><parameter=a>1</function></tool_call>", RejectReason::Incomplete),
        ("<tool_call><function=now><parameter=a>1</para", RejectReason::Incomplete),
        ("<tool_call><func", RejectReason::Incomplete),
    ] {
        assert_eq!(read(Hermes, bad), [rejected(bad, reason)], "{bad}");
    }
}

#[test]
fn llama_calls_are_read() {
    let call = r#"{"name": "get_weather", "parameters": {"city": "Paris"}}"#;
    for (answer, events) in [
        (call.to_owned(), vec!["call get_weather {\"city\": \"Paris\"}"]),
        (format!("\n\n{call}\n"), vec!["call get_weather {\"city\": \"Paris\"}"]),
        (format!("<|python_tag|>{call}"), vec!["call get_weather {\"city\": \"Paris\"}"]),
        (
            format!("{call}; {{\"name\": \"now\", \"parameters\": {{}}}}"),
            vec!["call get_weather {\"city\": \"Paris\"}", "call now {}"],
        ),
        (
            format!("<|python_tag|>{call};{call}"),
            vec!["call get_weather {\"city\": \"Paris\"}", "call get_weather {\"city\": \"Paris\"}"],
        ),
        (format!("Sure: <|python_tag|>{call}"), vec!["text Sure: ", "call get_weather {\"city\": \"Paris\"}"]),
        (r#"{"type": "function", "name": "now", "parameters": {}}"#.to_owned(), vec!["call now {}"]),
        (format!("{call}\nThat was it."), vec!["call get_weather {\"city\": \"Paris\"}", "text That was it."]),
        (format!("<think>hm</think>\n\n{call}"), vec!["reasoning hm", "call get_weather {\"city\": \"Paris\"}"]),
    ] {
        assert_eq!(short(&read(Llama3, &answer)), events, "{answer}");
    }
    // An answer in JSON is an answer, and so is an object inside a text.
    for answer in [
        r#"{"name": "Bob", "age": 5}"#,
        r#"{"name": "nobody", "parameters": {}}"#,
        r#"{ "city": "Paris" }"#,
        r#"{"type": "object", "properties": {}}"#,
        "{}",
        "{",
        "{\n",
        "{\"na",
        "{\"name\": \"get",
        "{\"type\": \"x\n\"}",
        "{5: 1}",
        "Look: {\"name\": \"now\", \"parameters\": {}}",
        "[{\"name\": \"now\", \"parameters\": {}}]",
    ] {
        assert_eq!(read(Llama3, answer), [text(answer)], "{answer}");
    }
    for (bad, reason) in [
        (r#"{"name": "get_weather", "parameters": {"city": "Par"#, RejectReason::Incomplete),
        (r#"{"name": "get_weather", "parameters": [1]}"#, RejectReason::BadArguments),
        (r#"{"name": "get_weather", "parameters": {"city": Paris}}"#, RejectReason::Malformed),
        ("<|python_tag|>get_weather.call(city=\"Paris\")", RejectReason::Malformed),
        (r#"<|python_tag|>{"name": "kumquat", "parameters": {}}"#, RejectReason::UnknownTool),
        (r#"<|python_tag|>{"parameters": {}}"#, RejectReason::NoName),
        ("<|python_tag|>", RejectReason::Incomplete),
    ] {
        assert_eq!(read(Llama3, bad), [rejected(bad, reason)], "{bad}");
    }
}

#[test]
fn json_answers_are_not_held_back() {
    let mut parser = ChatParser::new(&format(Llama3), &options()).unwrap();
    assert_eq!(parser.push("{\"name\": \"B"), [text("{\"name\": \"B")]);
    assert_eq!(parser.push("ob\", "), [text("ob\", ")]);
    let mut parser = ChatParser::new(&format(Llama3), &options()).unwrap();
    assert_eq!(parser.push("{\"answer\""), [text("{\"answer\"")]);
}

#[test]
fn mistral_calls_are_read() {
    let list = r#"[{"name": "get_weather", "arguments": {"city": "]"}, "id": "abc123XYZ"}, {"name": "now", "arguments": {}}]"#;
    let events = read(MistralFormat, &format!("One moment.[TOOL_CALLS] {list}\n"));
    assert_eq!(short(&events), ["text One moment.", "call get_weather {\"city\": \"]\"}", "call now {}"]);
    assert!(matches!(&events[1], ChatEvent::ToolCall(call) if call.id == "abc123XYZ"));
    for answer in [
        "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"x\"}[TOOL_CALLS]now[ARGS]{}",
        "[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS] {\"city\": \"x\"}\n[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}",
        "[TOOL_CALLS]get_weather{\"city\": \"x\"}[TOOL_CALLS]{\"name\": \"now\"}",
    ] {
        assert_eq!(short(&read(MistralFormat, answer)), ["call get_weather {\"city\": \"x\"}", "call now {}"], "{answer}");
    }
    for (bad, reason) in [
        ("[TOOL_CALLS]", RejectReason::Incomplete),
        ("[TOOL_CALLS][{\"name\": \"now\"", RejectReason::Incomplete),
        ("[TOOL_CALLS]now[ARGS]{\"a\": ", RejectReason::Incomplete),
        ("[TOOL_CALLS]now[ARGS]5", RejectReason::Malformed),
        ("[TOOL_CALLS]I cannot call it", RejectReason::Malformed),
        ("[TOOL_CALLS][oops]", RejectReason::Malformed),
        ("[TOOL_CALLS][]", RejectReason::NoName),
        ("[TOOL_CALLS]kumquat[ARGS]{}", RejectReason::UnknownTool),
    ] {
        assert_eq!(read(MistralFormat, bad), [rejected(bad, reason)], "{bad}");
    }
    // One bad item costs only itself, one bad call only what comes before the next.
    let events = read(MistralFormat, r#"[TOOL_CALLS][{"name": "now"}, {"nam": 1}, {"name": "now", "arguments": 5}]"#);
    assert_eq!(short(&events), ["call now {}", "rejected NoName", "rejected BadArguments"]);
    assert_eq!(events[1], rejected(r#"{"nam": 1}"#, RejectReason::NoName));
    let events = read(MistralFormat, "[TOOL_CALLS]now, now[TOOL_CALLS]now[ARGS]{}");
    assert_eq!(events[0], rejected("[TOOL_CALLS]now, now", RejectReason::Malformed));
    assert_eq!(short(&events[1..]), ["call now {}"]);
}

#[test]
fn g1_a_malformed_call_does_not_end_the_stream() {
    let good = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    for (bad, reason) in [
        ("<tool_call>{\"name\": \"now\", \"argum</tool_call>", RejectReason::Malformed),
        ("<tool_call>{\"name\": \"now\", }</tool_call>", RejectReason::Malformed),
        ("<tool_call>now()</tool_call>", RejectReason::Malformed),
        ("<tool_call></tool_call>", RejectReason::Malformed),
        ("<tool_call>{\"name\": \"now\"} and more</tool_call>", RejectReason::Malformed),
        ("<tool_call>{\"name\": 5}</tool_call>", RejectReason::NoName),
        ("<tool_call>{\"arguments\": {}}</tool_call>", RejectReason::NoName),
        ("<tool_call>{\"name\": \"kumquat\"}</tool_call>", RejectReason::UnknownTool),
        ("<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>", RejectReason::BadArguments),
        ("<tool_call>{\"name\": \"now\", \"arguments\": \"[1]\"}</tool_call>", RejectReason::BadArguments),
        ("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1e999}}</tool_call>", RejectReason::Malformed),
        ("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"\\ud800\"}}</tool_call>", RejectReason::Malformed),
        ("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"x\ny\"}}</tool_call>", RejectReason::Malformed),
    ] {
        let events = read(Hermes, &format!("a\n{bad}\n{good}\nb"));
        assert_eq!(events[..2], [text("a"), rejected(bad, reason)], "{bad}");
        assert_eq!(short(&events[2..]), ["call now {}", "text b"], "{bad}");
        assert!(!reason.to_string().contains("kumquat"));
    }
    for bad in ["<tool_call>", "<tool_call>{\"name\": \"now\"", "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"x"] {
        assert_eq!(read(Hermes, bad), [rejected(bad, RejectReason::Incomplete)]);
    }
    let deep =
        format!("<tool_call>{{\"name\": \"now\", \"arguments\": {}1{}}}</tool_call>", "{\"a\":".repeat(5000), "}".repeat(5000));
    assert_eq!(read(Hermes, &deep), [rejected(&deep, RejectReason::Malformed)]);
}

#[test]
fn calls_have_a_size() {
    let options = ParserOptions { max_call_bytes: 40, ..options() };
    let call = "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"aaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}}</tool_call>";
    let events = read_with(&format(Hermes), &options, &[call]);
    assert_eq!(events, [rejected(&call[..41], RejectReason::TooLarge), text(&call[41..])]);
    let call = "{\"name\": \"now\", \"parameters\": {\"a\": \"aaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}}";
    let events = read_with(&format(Llama3), &options, &[call]);
    assert_eq!(events, [rejected(&call[..41], RejectReason::TooLarge), text(&call[41..])]);
    let answer = "{\"type\": \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}";
    assert_eq!(read_with(&format(Llama3), &options, &[answer]), [text(answer)]);
}

#[test]
fn without_tools_calls_are_text() {
    let answer = "<tool_call>{\"name\": \"now\"}</tool_call>[TOOL_CALLS][]<|python_tag|>{}";
    for tools in [None, Some(json!([])), Some(Value::Null)] {
        let options = ParserOptions { tools, ..ParserOptions::default() };
        for tools in [Hermes, Llama3, MistralFormat] {
            assert_eq!(read_with(&format(tools), &options, &[answer]), [text(answer)]);
        }
    }
    assert_eq!(read_with(&ChatFormat::default(), &options(), &["<think>", answer]), [text(&format!("<think>{answer}"))]);
    // Nothing is held back then.
    let mut parser = ChatParser::new(&ChatFormat::default(), &options()).unwrap();
    assert_eq!(parser.push("\n<tool_call"), [text("\n<tool_call")]);
}

#[test]
fn reasoning_is_told_from_the_answer() {
    assert_eq!(read(Hermes, "<think>\na\n\nb\n</think>\n\nHello\n"), [reasoning("a\n\nb"), text("Hello\n")]);
    assert_eq!(read(Hermes, "<think>\n\n</think>\n\nHello"), [text("Hello")]);
    assert_eq!(read(Hermes, "\n<think>a</think>  b"), [reasoning("a"), text("  b")]);
    assert_eq!(read(Hermes, "<think>a"), [reasoning("a")]);
    // Only at the beginning: a tag that is talked about is text, and so is a call that is thought about.
    assert_eq!(read(Hermes, "The tag <think>x</think>"), [text("The tag <think>x</think>")]);
    assert_eq!(read(Hermes, "a</think>b"), [text("a</think>b")]);
    let call = "<tool_call>{\"name\": \"now\"}</tool_call>";
    assert_eq!(
        short(&read(Hermes, &format!("<think>not {call}</think>{call}"))),
        [&*format!("reasoning not {call}"), "call now {}"]
    );
    // The prompt has opened it.
    let format = ChatFormat { reasoning: Some(ReasoningMarks::new("[THINK]", "[/THINK]")), tools: None };
    let inside = ParserOptions { in_reasoning: true, ..options() };
    assert_eq!(read_with(&format, &inside, &["\na\n[/TH", "INK]b"]), [reasoning("a"), text("b")]);
    assert_eq!(read_with(&format, &inside, &["[THINK]\na [THINK]b[/THINK]c"]), [reasoning("a [THINK]b"), text("c")]);
    assert_eq!(read_with(&ChatFormat::default(), &inside, &["a[/THINK]b"]), [text("a[/THINK]b")]);
}

#[test]
fn text_is_held_back_only_while_it_may_become_a_mark() {
    let mut parser = ChatParser::new(&format(Hermes), &options()).unwrap();
    for (piece, given) in [
        ("a <", "a "),
        ("tool", ""),
        ("_cal", ""),
        ("x", "<tool_calx"),
        ("\n", ""),
        ("\n<", ""),
        ("<", "\n\n<"),
        ("b<to\n", "<b<to"),
        ("c ", "\nc "),
        ("<th", "<th"),
    ] {
        let events = parser.push(piece);
        assert_eq!(events, if given.is_empty() { vec![] } else { vec![text(given)] }, "{piece:?}");
    }
    assert_eq!(parser.push("<tool_call"), []);
    assert_eq!(parser.finish(), [text("<tool_call")]);
    // Many line breaks are not a mark's any more.
    let mut parser = ChatParser::new(&format(Hermes), &options()).unwrap();
    let given: usize = parser
        .push(&"\n".repeat(1000))
        .iter()
        .map(|event| matches!(event, ChatEvent::Text(text) if text.len() == 936))
        .map(usize::from)
        .sum();
    assert_eq!(given, 1);
}

#[test]
fn ids_are_new_and_please_every_template() {
    let answer = r#"[TOOL_CALLS][{"name": "now", "id": "a"}, {"name": "now", "id": "a"}, {"name": "now", "id": "<b>"}, {"name": "now", "id": 5}, {"name": "now"}]"#;
    let ids = |seed: Option<u64>| -> Vec<String> {
        let options = ParserOptions { id_seed: seed, ..options() };
        let calls = read_with(&format(MistralFormat), &options, &[answer]);
        calls.into_iter().map(|event| if let ChatEvent::ToolCall(call) = event { call.id } else { String::new() }).collect()
    };
    let first = ids(Some(1));
    assert_eq!(first[0], "a");
    assert!(first[1..].iter().all(|id| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())), "{first:?}");
    assert_eq!(first.iter().collect::<HashSet<_>>().len(), 5);
    assert_eq!(first, ids(Some(1)));
    assert_ne!(first, ids(Some(2)));
    assert_ne!(ids(None), ids(None));
}

#[test]
fn hostile_answers_cost_no_more_than_their_length() {
    let xml = "<tool_call><function=now><parameter=a>";
    for (tools, head, unit) in [
        (Hermes, "", "\n"),
        (Hermes, "", "<"),
        (Hermes, "", "<tool_call>"),
        (Hermes, "", "<tool_call>{\\\"</tool_call>"),
        (Hermes, "", "<tool_call>{}"),
        (Hermes, "<tool_call>", " "),
        (Hermes, "<tool_call>{}", " "),
        (Hermes, "<tool_call>{\"", "</tool_call>"),
        (Hermes, xml, "<parameter="),
        (Hermes, xml, "</tool_call>"),
        (Hermes, "<think>", "</think"),
        (Llama3, "", "{ "),
        (Llama3, "{", " "),
        (Llama3, "{\"type\":", "{"),
        (Llama3, "{\"name\": \"now\", \"parameters\": {}}", ";"),
        (Llama3, "", "<|python_tag|>"),
        (Llama3, "<|python_tag|>", " "),
        (MistralFormat, "", "[TOOL_CALLS]"),
        (MistralFormat, "", "[TOOL_CALLS]a["),
        (MistralFormat, "[TOOL_CALLS]", " "),
        (MistralFormat, "[TOOL_CALLS]", "a"),
        (MistralFormat, "[TOOL_CALLS]a[CALL_ID]", "a"),
        (MistralFormat, "[TOOL_CALLS]a[ARGS]", " "),
    ] {
        let start = std::time::Instant::now();
        let answer = format!("{head}{}", unit.repeat(300_000 / unit.len()));
        let mut parser = ChatParser::new(&format(tools), &options()).unwrap();
        parser.push(&answer);
        parser.finish();
        assert_eq!(parser.accounted.len(), answer.len());
        // It takes some 50 ms; work that grows with the square would take a minute on a quiet machine.
        assert!(start.elapsed().as_secs() < 20, "{unit}: {:?}", start.elapsed());
    }
}

const PIECES: [&str; 44] = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "_call>",
    "<think>",
    "</think>",
    "</",
    "think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[TOOL_",
    "CALLS]",
    "<|python_tag|>",
    "<|python",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    ";",
    ",",
    ":",
    "\n",
    "\n\n",
    " ",
    "a",
    "é",
    "👍🏽",
    "now",
    "get_weather",
    "\"name\": \"now\"",
    "\"parameters\": {}",
    "\"arguments\": {\"city\": \"x\"}",
    "{\"name\": \"now\", \"arguments\": {}}",
    "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"<think>\"}}",
    "<function=now>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "{\"type\": 1",
    "{\"name\": \"",
    "1",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
    /// However an answer is cut, its events are the same, and every character is accounted for.
    #[test]
    fn cuts_change_nothing(
        pieces in prop::collection::vec(0_usize..PIECES.len(), 0..24),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        which in 0_usize..4,
        with_tools in prop::bool::weighted(0.85),
        in_reasoning in prop::bool::weighted(0.2),
        max_call_bytes in prop_oneof![3 => Just(MAX_CALL_BYTES), 1 => 0_usize..60],
    ) {
        let answer: String = pieces.iter().map(|at| PIECES[*at]).collect();
        let format = [Hermes, Llama3, MistralFormat].get(which).map_or_else(ChatFormat::default, |tools| format(*tools));
        let options = ParserOptions {
            tools: with_tools.then(tools), in_reasoning, max_call_bytes, id_seed: Some(1),
        };
        let whole = read_with(&format, &options, &[&answer]);
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(answer.len() + 1)).filter(|at| answer.is_char_boundary(*at)).collect();
        at.sort_unstable();
        let mut parts = Vec::new();
        let mut from = 0;
        for to in at.into_iter().chain([answer.len()]) {
            parts.push(&answer[from..to]);
            from = to;
        }
        prop_assert_eq!(read_with(&format, &options, &parts), whole.clone());
        let letters: Vec<String> = answer.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        prop_assert_eq!(read_with(&format, &options, &letters), whole.clone());
        for event in &whole {
            if let ChatEvent::ToolCall(call) = event {
                prop_assert!(with_tools && call.parsed_arguments().is_ok(), "{}", call.arguments);
            }
        }
    }
}

#[test]
fn formats_are_detected() {
    let of = |source: &str| ChatFormat::detect(source);
    let hermes =
        of(r#"{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>" }} {% if '</think>' in c %}"#);
    assert_eq!(hermes, ChatFormat { tools: Some(Hermes), reasoning: Some(ReasoningMarks::new("<think>", "</think>")) });
    assert_eq!(of("<tool_call>\n<function=a>\n</function></tool_call>").tools, Some(Hermes));
    assert_eq!(
        of("<tool_call>name\n<arg_key>a</arg_key></tool_call> \"arguments\"").tools,
        None,
        "another format inside the same tags"
    );
    let llama = of(r#"<|start_header_id|> '{"name": "' + call.name + '", "parameters": '"#);
    assert_eq!(llama, ChatFormat { tools: Some(Llama3), reasoning: None });
    assert_eq!(of("{{- \"[TOOL_CALLS]\" }}[THINK][/THINK]").tools, Some(MistralFormat));
    assert_eq!(of("[THINK]{{ x }}[/THINK]").reasoning, Some(ReasoningMarks::new("[THINK]", "[/THINK]")));
    assert_eq!(of("<|im_start|>{{ m.content }}"), ChatFormat::default());
    assert!(hermes.opens_reasoning("<|im_start|>assistant\n<think>\n"));
    assert!(!hermes.opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(!llama.opens_reasoning("<think>"));
}

#[test]
fn bad_options_are_typed() {
    for tools in [
        json!({}),
        json!([1]),
        json!([{}]),
        json!([{ "type": "retrieval" }]),
        json!([{ "name": "a", "parameters": 5 }]),
        json!([{ "name": "" }]),
    ] {
        let options = ParserOptions { tools: Some(tools.clone()), ..ParserOptions::default() };
        let error = ChatParser::new(&format(Hermes), &options).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.message().starts_with("tools:"), "{tools}: {error}");
    }
    let empty = ChatFormat { reasoning: Some(ReasoningMarks::new("", "x")), tools: None };
    assert_eq!(ChatParser::new(&empty, &options()).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

/// From tokens to events and back into a conversation: the marks survive as special tokens, and the call is rendered again.
#[test]
fn special_marks_reach_the_parser_and_calls_the_next_prompt() {
    let file = byte_level_gguf();
    let tokenizer = from_gguf(&file);
    // A format whose marks are special tokens of this vocabulary.
    let template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id | length }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    let template = ChatTemplate::from_text(template, &tokenizer).unwrap();
    let format = ChatFormat { tools: Some(Hermes), reasoning: Some(ReasoningMarks::new("<|im_start|>", "<|im_end|>")) };
    let keep = format.kept_tokens(&tokenizer, true);
    assert_eq!(keep.len(), 2, "the tags of calls are no tokens here");
    let answer = "<|im_start|>why<|im_end|><tool_call>{\"name\": \"now\", \"arguments\": {\"b\": 1, \"a\": \"é\"}}</tool_call><s>";
    let ids = tokenizer.encode(answer, crate::tokenizer::EncodeOptions { add_special: false, parse_special: true }).unwrap().ids;
    let mut stream = tokenizer.stream_keeping(&keep);
    let mut parser = ChatParser::new(&format, &options()).unwrap();
    let mut events = Vec::new();
    for id in ids {
        events.extend(stream.push(id).unwrap().into_iter().flat_map(|text| parser.push(&text)));
    }
    events.extend(stream.finish().unwrap().into_iter().flat_map(|text| parser.push(&text)));
    events.extend(parser.finish());
    let events = merged(events);
    assert_eq!(short(&events), ["reasoning why", "call now {\"b\": 1, \"a\": \"é\"}"]);
    let ChatEvent::ToolCall(call) = events[1].clone() else { unreachable!("a call") };
    let prompt = template.render(&[Message::user("x"), Message::assistant_calls(vec![call])], &Default::default()).unwrap();
    assert_eq!(prompt, "9 now {\"b\": 1, \"a\": \"é\"}");
}
