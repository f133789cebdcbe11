//! Shared batches, numbers that are not finite, deciding, and answers read by their template's marks.

use hob::chat_output::RejectReason;
use hob::engine::{DecideRequest, EmbedRequest, Finish, GenerateRequest, Prompt, RequestOptions, RerankRequest, ScoreRequest};
use hob::fake::{FakeModel, Fault, Point};
use hob::model::ModelKind;
use hob::{ErrorKind, block_on};

use crate::support::*;

#[test]
fn callers_share_batches_and_get_what_they_would_get_alone() {
    let h = Harness::new();
    let alone: Vec<_> = (0..16).map(|n| block_on(h.engine.embed(EmbedRequest::new("embed", [text(n)]))).unwrap().data).collect();
    // Sixteen callers come while the device is at an earlier batch; whether all are there when it returns is up to the machine.
    let shared = (0..200).any(|_| {
        h.device.hold(Point::Embed);
        let before = h.device.count(Point::Embed);
        let embed = |text: String| {
            let engine = h.engine.clone();
            go(move || block_on(engine.embed(EmbedRequest::new("embed", [text]))).unwrap().data)
        };
        let first = embed(text(99));
        h.device.wait_until_held(Point::Embed);
        let callers: Vec<_> = (0..16).map(|n| embed(text(n))).collect();
        until("all have the model", || h.uses() == 17);
        h.device.release(Point::Embed);
        first.join().unwrap();
        for (n, caller) in callers.into_iter().enumerate() {
            assert_eq!(caller.join().unwrap(), alone[n], "caller {n}");
        }
        h.device.count(Point::Embed) - before <= 3
    });
    assert!(shared, "sixteen texts of sixteen callers never shared a batch");
    h.assert_at_rest();
}

/// As long as each other, so that any of them may go with any.
fn text(n: usize) -> String {
    format!("{n:02}{}", "ab".repeat(8))
}

#[test]
fn numbers_that_are_not_finite_name_the_input_and_spare_the_others() {
    let h = Harness::new();
    // The batch is sorted by length, so its first row is the longest text: input 2.
    let texts = ["a", "bb", "cccc", "ddd"];
    h.device.fail_next(Point::Embed, Fault::NotFinite(0));
    let error = block_on(h.engine.embed(EmbedRequest::new("embed", texts))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.message().contains("text 2"), "{error}");
    h.device.fail_next(Point::Rerank, Fault::NotFinite(3));
    let error = block_on(h.engine.rerank(RerankRequest::new("rerank", "q", texts))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.message().contains("document 0"), "{error}");
    // With an embedder the first text is the query.
    h.device.fail_next(Point::Embed, Fault::NotFinite(1));
    let error = block_on(h.engine.rerank(RerankRequest::new("embed", "query", texts))).unwrap_err();
    assert!(error.message().contains("document 2"), "{error}");
    h.device.fail_next(Point::Score, Fault::NotFinite(0));
    let error = block_on(h.engine.score(ScoreRequest::new("chat", Prompt::Raw("a".into()), "b"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    h.assert_at_rest();

    // A row of a batch of streams fails alone.
    let mut streams = running(&h, 3);
    h.device.fail_next(Point::Step, Fault::NotFinite(0));
    h.device.release(Point::Step);
    let mut failed = Vec::new();
    until("one fails and the others go on", || {
        streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
        failed = streams.iter().filter_map(|(_, seen)| seen.end.clone()).collect();
        !failed.is_empty() && streams.iter().all(|(_, seen)| seen.end.is_some() || seen.tokens > 500)
    });
    assert_eq!(failed.len(), 1);
    assert_eq!(failed.remove(0).unwrap_err().kind(), ErrorKind::Backend);
    for (stream, seen) in streams {
        if seen.end.is_none() {
            stream.stop();
            assert_eq!(block_on(stream.collect()).unwrap().summary.finish, Finish::Cancelled);
        }
    }
    h.assert_at_rest();
}

#[test]
fn a_failing_batch_fails_those_in_it_and_no_one_else() {
    let h = Harness::new();
    block_on(h.engine.embed(EmbedRequest::new("embed", ["warm"]))).unwrap();
    for fault in [Fault::Panic, Fault::Error(ErrorKind::OutOfMemory)] {
        h.device.fail_next(Point::Embed, fault);
        let failed = kind(call(&h.engine, Verb::Embed, RequestOptions::default()));
        assert!(matches!(failed, ErrorKind::Internal | ErrorKind::OutOfMemory));
        h.assert_at_rest();
        call(&h.engine, Verb::Embed, RequestOptions::default()).unwrap();
    }
    // A batch of several callers is computed again for each of them: who is not to blame is answered. Whether callers meet in the
    // batch that panics is up to the machine; where one is alone in it, it gets the panic's error itself.
    let shared = (0..200).any(|_| {
        h.device.hold(Point::Embed);
        let embed = |n: usize| {
            let engine = h.engine.clone();
            go(move || block_on(engine.embed(EmbedRequest::new("embed", [text(n)]))).map(|done| done.data.len()))
        };
        let first = embed(99);
        h.device.wait_until_held(Point::Embed);
        let callers: Vec<_> = (0..3).map(embed).collect();
        until("all have the model", || h.uses() == 4);
        h.device.pass(Point::Embed);
        h.device.wait_until_held(Point::Embed);
        h.device.fail_next(Point::Embed, Fault::Panic);
        h.device.fail_next(Point::Embed, Fault::Error(ErrorKind::OutOfMemory));
        h.device.release(Point::Embed);
        first.join().unwrap().unwrap();
        let failed: Vec<_> = callers.into_iter().filter_map(|caller| caller.join().unwrap().err()).collect();
        h.assert_at_rest();
        matches!(&failed[..], [error] if error.kind() == ErrorKind::OutOfMemory)
    });
    assert!(shared, "callers never shared a batch, or all of them failed with it");
}

#[test]
fn a_decision_weighs_the_means_of_its_answers_and_what_ends_the_turn() {
    // The fake's log-probability of a byte is -byte/256, of the end -1.
    let h = Harness::new();
    let request = DecideRequest { prompt: Prompt::Raw("q".into()), ..DecideRequest::choice("chat", "", ["a", "bbb", "Z"]) };
    let decided = block_on(h.engine.decide(request)).unwrap();
    let mean = |answer: &[u8]| -(answer.iter().map(|&b| f64::from(b) / 256.0).sum::<f64>() + 1.0) / (answer.len() + 1) as f64;
    let means = [mean(b"a"), mean(b"bbb"), mean(b"Z")];
    let sum: f64 = means.iter().map(|mean| mean.exp()).sum();
    for (answer, mean) in decided.answers.iter().zip(means) {
        assert!((answer.mean_logprob - mean).abs() < 1e-6, "{answer:?}");
        assert!((answer.p - mean.exp() / sum).abs() < 1e-6, "{answer:?}");
    }
    assert_eq!(decided.best(), 1, "the longer answer's end weighs less");
    let p = decided.answers[1].p;
    assert!((decided.confidence.unwrap() - (p - 1.0 / 3.0) / (1.0 - 1.0 / 3.0)).abs() < 1e-9);
    // The prompt once, and each answer with its end.
    assert_eq!(decided.prompt_tokens, 1 + 2 + 4 + 2);
    let predicate = block_on(h.engine.decide(DecideRequest::predicate("chat", "is it?"))).unwrap();
    assert_eq!((predicate.answers.len(), predicate.confidence, predicate.value), (2, None, None));
    let levels = block_on(h.engine.decide(DecideRequest::score("chat", "how much?", ["low", "mid", "high"]))).unwrap();
    let value: f64 = levels.answers.iter().map(|answer| answer.index as f64 * answer.p).sum();
    assert!((levels.value.unwrap() - value).abs() < 1e-9);
    h.assert_at_rest();
}

#[test]
fn decisions_that_cannot_be_made_are_refused_by_name() {
    let h = Harness::new();
    let refused = |request: DecideRequest, part: &str| {
        let error = block_on(h.engine.decide(request)).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains(part), "{error}");
    };
    refused(DecideRequest::choice("chat", "q", Vec::<String>::new()), "0 answers");
    refused(DecideRequest::choice("chat", "q", vec!["a"; 257]), "257 answers");
    refused(DecideRequest::choice("chat", "q", ["a", ""]), "answer 1");
    refused(DecideRequest::choice("chat", "q", ["a".repeat(5000)]), "4096");
    assert_eq!(h.device.count(Point::Score), 0);
    assert_eq!(kind(block_on(h.engine.decide(DecideRequest::predicate("embed", "q")))), ErrorKind::Unsupported);
    h.assert_at_rest();
}

/// A template that marks reasoning and calls, as Qwen's does.
const MARKED: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: \
    {# <think></think><tool_call>{\"name\": 1, \"arguments\": 2}</tool_call> #}";

fn marked(reply: &str) -> Harness {
    let (reply, template) = (reply.to_owned(), Some(MARKED.to_owned()));
    Harness::with(vec![FakeModel { reply, template, ..FakeModel::new("chat", ModelKind::Chat, MB) }], |_| ())
}

fn with_tools() -> GenerateRequest {
    let mut request = ask("chat");
    let tools = r#"[{"type": "function", "function": {"name": "look", "parameters": {}}}]"#;
    request.render.tools = Some(serde_json::from_str(tools).unwrap());
    request
}

#[test]
fn reasoning_and_calls_are_told_from_the_answer() {
    let call = r#"{"name": "look", "arguments": {"at": "日本 </tool"}}"#;
    let h = marked(&format!("<think>well,\nthen</think>I look.<tool_call>\n{call}\n</tool_call>"));
    let answer = answer(&h.engine, with_tools()).unwrap();
    assert_eq!((answer.reasoning.trim(), answer.text.trim()), ("well,\nthen", "I look."));
    assert_eq!(answer.tool_calls.len(), 1, "{answer:?}");
    assert_eq!(answer.tool_calls[0].name, "look");
    assert_eq!(answer.tool_calls[0].parsed_arguments().unwrap()["at"], "日本 </tool");
    assert!(answer.rejected_calls.is_empty());
    h.assert_at_rest();
}

#[test]
fn a_call_that_cannot_be_made_is_an_event_and_the_stream_goes_on() {
    for (call, reason) in [
        ("{\"name\": \"look\", \"arguments\": ", RejectReason::Malformed),
        ("{\"name\": \"unknown\", \"arguments\": {}}", RejectReason::UnknownTool),
        ("{\"arguments\": {}}", RejectReason::NoName),
    ] {
        let h = marked(&format!("a<tool_call>{call}</tool_call>b"));
        let answer = answer(&h.engine, with_tools()).unwrap();
        assert_eq!(answer.rejected_calls.len(), 1, "{answer:?}");
        assert_eq!(answer.rejected_calls[0].reason, reason);
        assert!(answer.text.starts_with('a') && answer.text.ends_with('b'), "{:?}", answer.text);
        assert!(answer.tool_calls.is_empty());
    }
    let h = marked("<tool_call>{\"name\": \"look\"");
    let answer = answer(&h.engine, with_tools()).unwrap();
    assert_eq!(answer.rejected_calls[0].reason, RejectReason::Incomplete);
}

#[test]
fn without_tools_or_without_marks_the_text_stays_as_it_is() {
    let reply = "<tool_call>{\"name\": \"look\", \"arguments\": {}}</tool_call>";
    let h = marked(reply);
    assert_eq!(answer(&h.engine, ask("chat")).unwrap().text, reply);
    assert_eq!(answer(&h.engine, raw("chat", "hi")).unwrap().text, reply, "a raw prompt has no format");
    let plain = FakeModel { reply: reply.to_owned(), ..FakeModel::new("chat", ModelKind::Chat, MB) };
    let h = Harness::with(vec![plain], |_| ());
    assert_eq!(answer(&h.engine, with_tools()).unwrap().text, reply, "its template marks nothing");
}
