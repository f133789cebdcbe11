//! The engine on a scripted device: requests, failures, cancels and the pool around them, without MLX and without sleeps.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use hob::chat_template::Message;
use hob::engine::{EmbedRequest, Engine, EngineOptions, Event, Finish, GenerateRequest, RequestOptions, RerankRequest, ScoreKind};
use hob::fake::{FakeDevice, FakeModel, Fault, Point};
use hob::model::ModelKind;
use hob::options::{SamplingOptions, Truncate};
use hob::{CancelToken, ErrorKind, Key, block_on};

const MB: u64 = 1 << 20;

fn device() -> FakeDevice {
    let mut long = FakeModel::new("long", ModelKind::Chat, 100 * MB);
    long.reply = "0123456789".repeat(100);
    let mut small = FakeModel::new("small-context", ModelKind::Chat, 10 * MB);
    small.context = 40;
    small.reply = "abcdefghijklmnopqrstuvwxyz".to_owned();
    let mut emoji = FakeModel::new("emoji", ModelKind::Chat, 10 * MB);
    emoji.reply = "a👩‍👩‍👧b日本語c".to_owned();
    FakeDevice::new(vec![
        FakeModel::new("chat", ModelKind::Chat, 100 * MB),
        FakeModel::new("other", ModelKind::Chat, 100 * MB),
        FakeModel::new("embed", ModelKind::Embedder, 50 * MB),
        FakeModel::new("rerank", ModelKind::Reranker, 50 * MB),
        long,
        small,
        emoji,
    ])
}

fn engine(device: &FakeDevice, budget: u64) -> Engine {
    Engine::open_fake(device.clone(), EngineOptions::with_budget(budget)).unwrap()
}

fn ask(model: &str) -> GenerateRequest {
    GenerateRequest::chat(model, vec![Message::user("hi")])
}

fn answer(engine: &Engine, request: GenerateRequest) -> hob::Result<hob::engine::Generation> {
    block_on(engine.generate(request)?.collect())
}

fn uses(engine: &Engine) -> u64 {
    engine.pool().status().entries.iter().map(|entry| entry.uses).sum()
}

#[test]
fn a_stream_yields_chunks_then_exactly_one_terminal_event() {
    let engine = engine(&device(), 1 << 30);
    let mut stream = engine.generate(ask("chat")).unwrap();
    let (mut text, mut ends) = (String::new(), 0);
    while let Some(event) = block_on(stream.next()) {
        match event.unwrap() {
            Event::Chunk(chunk) => {
                assert_eq!(ends, 0, "nothing may follow the terminal event");
                text.push_str(&chunk.text);
            }
            Event::Finished(summary) => {
                ends += 1;
                // Invariant 7: the use has ended before the event is seen.
                assert_eq!(uses(&engine), 0);
                assert_eq!((summary.finish, summary.completion_tokens), (Finish::Stop, 6));
                assert!(summary.timings.load_s.is_some());
            }
            other => panic!("{other:?} was not asked for"),
        }
    }
    assert_eq!((text.as_str(), ends), ("Hello!", 1));
    assert!(block_on(stream.next()).is_none());
}

#[test]
fn max_tokens_0_is_an_empty_result_with_reason_length() {
    let mut request = ask("chat");
    request.max_tokens = Some(0);
    let answer = answer(&engine(&device(), 1 << 30), request).unwrap();
    assert_eq!((answer.text.as_str(), answer.summary.finish), ("", Finish::Length));
    assert_eq!(answer.summary.timings.prefill_s, None, "not observed is None, never 0");
}

#[test]
fn max_tokens_beyond_any_number_of_tokens_are_no_limit() {
    let mut request = ask("chat");
    request.max_tokens = Some(usize::MAX);
    assert_eq!(answer(&engine(&device(), 1 << 30), request).unwrap().summary.finish, Finish::Stop);
}

#[test]
fn max_tokens_ends_with_reason_length() {
    let mut request = ask("chat");
    request.max_tokens = Some(4);
    let answer = answer(&engine(&device(), 1 << 30), request).unwrap();
    assert_eq!((answer.text.as_str(), answer.summary.finish, answer.token_ids.len()), ("Hell", Finish::Length, 4));
}

#[test]
fn generation_past_the_window_stops_with_reason_context() {
    // Hazard F1. "user: hi\n" and "assistant: " are 20 bytes of the 40.
    let answer = answer(&engine(&device(), 1 << 30), ask("small-context")).unwrap();
    assert_eq!((answer.summary.finish, answer.summary.prompt_tokens), (Finish::Context, 20));
    assert_eq!(answer.text, "abcdefghijklmnopqrst");
}

#[test]
fn a_prompt_over_the_context_is_refused_with_both_numbers_or_cut_when_asked() {
    // Hazard F2.
    let engine = engine(&device(), 1 << 30);
    let request = GenerateRequest::raw("small-context", "x".repeat(50));
    let error = answer(&engine, request.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("50") && error.message().contains("40"), "{error}");
    for truncate in [Truncate::Start, Truncate::End] {
        let cut = answer(&engine, GenerateRequest { truncate, max_tokens: Some(0), ..request.clone() }).unwrap();
        assert_eq!((cut.summary.dropped_tokens, cut.summary.prompt_tokens), (10, 40));
    }
}

#[test]
fn a_stop_string_across_tokens_leaks_nothing() {
    // Hazard E2: every token is one byte.
    let engine = engine(&device(), 1 << 30);
    let mut request = ask("small-context");
    request.stop = vec!["nothing".to_owned(), "hijk".to_owned()];
    let mut stream = engine.generate(request).unwrap();
    let mut seen = String::new();
    loop {
        match block_on(stream.next()).unwrap().unwrap() {
            Event::Chunk(chunk) => {
                seen.push_str(&chunk.text);
                assert!(!seen.contains('h'), "the stop string leaked: {seen}");
            }
            Event::Finished(summary) => {
                assert_eq!((summary.finish, summary.stop_index), (Finish::Stop, Some(1)));
                break;
            }
            other => panic!("{other:?} was not asked for"),
        }
    }
    assert_eq!(seen, "abcdefg");
}

#[test]
fn text_held_for_a_stop_string_comes_out_at_the_end() {
    let mut request = ask("chat");
    request.stop = vec!["!!".to_owned()];
    assert_eq!(answer(&engine(&device(), 1 << 30), request).unwrap().text, "Hello!");
}

#[test]
fn characters_of_many_tokens_arrive_whole() {
    // Hazard E1: tokens are bytes, so every chunk must still be whole UTF-8 (a String proves it) and nothing is lost.
    let engine = engine(&device(), 1 << 30);
    let answer = answer(&engine, ask("emoji")).unwrap();
    assert_eq!(answer.text, "a👩‍👩‍👧b日本語c");
    assert!(!answer.text.contains('\u{fffd}'));
}

#[test]
fn sampling_is_seeded_and_reports_its_seed() {
    let engine = engine(&device(), 1 << 30);
    let mut request = ask("chat");
    request.sampling = SamplingOptions { temperature: 1.0, ..SamplingOptions::default() };
    let first = answer(&engine, request.clone()).unwrap();
    request.sampling.seed = first.summary.seed;
    assert!(first.summary.seed.is_some());
    assert_eq!(answer(&engine, request).unwrap().token_ids, first.token_ids);
    assert_eq!(answer(&engine, ask("chat")).unwrap().summary.seed, None, "greedy draws nothing");
}

#[test]
fn every_token_has_a_logprob_when_asked() {
    // Hazard E12, also at temperature 0.
    let mut request = ask("chat");
    request.logprobs = Some(3);
    let answer = answer(&engine(&device(), 1 << 30), request).unwrap();
    assert_eq!((answer.logprobs.len(), answer.token_ids.len()), (6, 6));
    assert!(answer.logprobs.iter().all(|token| token.top.len() == 3 && token.logprob <= 0.0));
}

#[test]
fn bad_requests_are_refused_before_any_work() {
    let device = device();
    let engine = engine(&device, 1 << 30);
    let refused = |request: GenerateRequest| engine.generate(request).err().map(|error| error.kind());
    assert_eq!(refused(GenerateRequest::chat("chat", vec![])), Some(ErrorKind::InvalidArgument));
    assert_eq!(refused(GenerateRequest::raw("chat", "")), Some(ErrorKind::InvalidArgument));
    let hot = SamplingOptions { temperature: f32::NAN, ..SamplingOptions::default() };
    assert_eq!(refused(GenerateRequest { sampling: hot, ..ask("chat") }), Some(ErrorKind::InvalidArgument));
    assert_eq!(refused(GenerateRequest { stop: vec![String::new()], ..ask("chat") }), Some(ErrorKind::InvalidArgument));
    assert_eq!(refused(GenerateRequest { logprobs: Some(1000), ..ask("chat") }), Some(ErrorKind::InvalidArgument));
    let kind = |result: hob::Result<hob::engine::Embeddings>| result.unwrap_err().kind();
    assert_eq!(kind(block_on(engine.embed(EmbedRequest::new("embed", Vec::<String>::new())))), ErrorKind::InvalidArgument);
    let rerank = |query: &str, documents: &[&str]| {
        block_on(engine.rerank(RerankRequest::new("rerank", query, documents.to_vec()))).unwrap_err()
    };
    assert_eq!(rerank(" ", &["a"]).kind(), ErrorKind::InvalidArgument);
    assert_eq!(rerank("q", &[]).kind(), ErrorKind::InvalidArgument);
    assert!(rerank("q", &["a", "\t"]).message().contains("document 1"));
    assert_eq!(device.count(Point::Load), 0);
}

#[test]
fn unknown_sampling_options_are_refused_by_name() {
    // Hazard E13.
    let error = SamplingOptions::from_json(r#"{"temperature": 0.5, "mirostat": 2}"#).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("mirostat"), "{error}");
}

#[test]
fn a_model_of_another_kind_is_a_typed_refusal() {
    let engine = engine(&device(), 1 << 30);
    let kinds = [
        block_on(engine.embed(EmbedRequest::new("chat", ["a"]))).unwrap_err().kind(),
        block_on(engine.embed(EmbedRequest::new("rerank", ["a"]))).unwrap_err().kind(),
        block_on(engine.rerank(RerankRequest::new("chat", "q", ["a"]))).unwrap_err().kind(),
        answer(&engine, ask("embed")).unwrap_err().kind(),
    ];
    assert_eq!(kinds, [ErrorKind::Unsupported; 4]);
    assert_eq!(block_on(engine.embed(EmbedRequest::new("nowhere", ["a"]))).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(uses(&engine), 0);
    assert!(engine.pool().status().entries.is_empty(), "nothing was loaded to be refused");
}

#[test]
fn embeddings_keep_the_order_of_the_texts() {
    // Hazard I17: batches are sorted by length.
    let engine = engine(&device(), 1 << 30);
    let texts: Vec<String> = (0..60usize).map(|i| "ab".repeat(1 + i * 37 % 60)).collect();
    let together = block_on(engine.embed(EmbedRequest::new("embed", texts.clone()))).unwrap();
    for (text, row) in texts.iter().zip(together.rows()) {
        let alone = block_on(engine.embed(EmbedRequest::new("embed", [text.clone()]))).unwrap();
        assert_eq!(alone.data, row);
    }
    assert_eq!(together.prompt_tokens, texts.iter().map(String::len).sum::<usize>());
}

#[test]
fn dimensions_are_cut_and_scaled_again() {
    let engine = engine(&device(), 1 << 30);
    let mut request = EmbedRequest::new("embed", ["abcdefgh"]);
    request.dimensions = Some(3);
    request.normalize = hob::engine::Normalize::Yes;
    let short = block_on(engine.embed(request.clone())).unwrap();
    assert_eq!((short.dimensions, short.data.len()), (3, 3));
    assert!((short.data.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-6);
    request.dimensions = Some(9);
    let error = block_on(engine.embed(request)).unwrap_err();
    assert!(
        error.kind() == ErrorKind::InvalidArgument && error.message().contains('9') && error.message().contains('8'),
        "{error}"
    );
}

#[test]
fn a_text_over_the_limit_is_refused_by_index_or_cut_when_asked() {
    // Hazard I13.
    let engine = engine(&device(), 1 << 30);
    let mut request = EmbedRequest::new("embed", ["ok".to_owned(), "x".repeat(5000)]);
    let error = block_on(engine.embed(request.clone())).unwrap_err();
    assert!(error.message().contains("text 1") && error.message().contains("5000") && error.message().contains("4096"), "{error}");
    request.truncate = Truncate::End;
    let cut = block_on(engine.embed(request)).unwrap();
    assert_eq!((cut.dropped_tokens, cut.prompt_tokens), (904, 4098));
}

#[test]
fn a_ranking_says_what_its_scores_mean() {
    let engine = engine(&device(), 1 << 30);
    let documents = ["zzzz", "capital", "cap"];
    let ranking = block_on(engine.rerank(RerankRequest::new("rerank", "capital", documents))).unwrap();
    assert_eq!(ranking.score_kind, ScoreKind::Normalized);
    assert_eq!(ranking.results.iter().map(|r| r.index).collect::<Vec<_>>(), [1, 2, 0]);
    for ranked in &ranking.results {
        let logit = ranked.logit.unwrap();
        assert!((ranked.score - 1.0 / (1.0 + (-logit).exp())).abs() < 1e-6, "the score is the sigmoid of the logit");
    }
    let cosine = block_on(engine.rerank(RerankRequest::new("embed", "capital", documents))).unwrap();
    assert_eq!(cosine.score_kind, ScoreKind::Cosine);
    assert!(cosine.results.iter().all(|ranked| ranked.logit.is_none()));
    let instructed = RerankRequest { instruct: Some("do".into()), ..RerankRequest::new("rerank", "q", ["d"]) };
    assert_eq!(block_on(engine.rerank(instructed)).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_failed_load_leaves_nothing_and_the_next_one_works() {
    // Hazard A39.
    for fault in [Fault::Error(ErrorKind::OutOfMemory), Fault::Panic] {
        for point in [Point::Load, Point::LoadEnd] {
            let device = device();
            let engine = engine(&device, 1 << 30);
            device.fail_next(point, fault);
            let error = answer(&engine, ask("chat")).unwrap_err();
            let expected = if fault == Fault::Panic { ErrorKind::Internal } else { ErrorKind::OutOfMemory };
            assert_eq!(error.kind(), expected, "{error}");
            assert_eq!(engine.pool().status().used_bytes, 0);
            assert_eq!(answer(&engine, ask("chat")).unwrap().text, "Hello!");
        }
    }
}

#[test]
fn a_panic_in_a_step_is_that_requests_error_and_the_thread_lives_on() {
    // Hazard L9.
    let device = device();
    let engine = engine(&device, 1 << 30);
    for point in [Point::Step, Point::Embed, Point::Rerank] {
        device.fail_next(point, Fault::Panic);
    }
    assert_eq!(answer(&engine, ask("chat")).unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(block_on(engine.embed(EmbedRequest::new("embed", ["a"]))).unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(block_on(engine.rerank(RerankRequest::new("rerank", "q", ["a"]))).unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(uses(&engine), 0, "a use ends on failure too");
    assert_eq!(answer(&engine, ask("chat")).unwrap().text, "Hello!");
    assert_eq!(device.count(Point::Load), 3, "nothing was loaded twice");
}

#[test]
fn one_budget_swaps_models_and_gives_memory_back() {
    // Hazards A2, A10, A15: room for one of two, 30 times in turn.
    let device = device();
    let engine = engine(&device, 120 * MB);
    for _ in 0..15 {
        for model in ["chat", "other"] {
            assert_eq!(answer(&engine, ask(model)).unwrap().text, "Hello!");
        }
    }
    let memory = device.memory();
    assert_eq!(memory.peak, 100 * MB, "the two were never resident together");
    assert_eq!((memory.active, memory.cache), (100 * MB, 0));
    assert_eq!(device.count(Point::Load), 30);
    block_on(engine.pool().evict(&Key::chat("other"), false)).unwrap();
    assert_eq!(device.memory().active, 0);
}

#[test]
fn a_model_in_use_is_not_evicted() {
    // Hazard A6: the newcomer waits until the stream has ended.
    let device = device();
    let engine = engine(&device, 120 * MB);
    device.hold(Point::Step);
    let stream = engine.generate(ask("chat")).unwrap();
    device.wait_until_held(Point::Step);
    let mut waiting = engine.generate(ask("other")).unwrap();
    while engine.pool().status().waiting == 0 {
        std::thread::yield_now();
    }
    assert_eq!(device.count(Point::Load), 1);
    device.release(Point::Step);
    assert_eq!(block_on(stream.collect()).unwrap().text, "Hello!");
    assert!(block_on(waiting.next()).unwrap().is_ok());
}

#[test]
fn a_resident_model_that_was_not_checked_against_the_manifest_is_refused_by_every_verb() {
    let engine = engine(&device(), 1 << 30);
    let manifest = hob::model::Manifest::from_json(&format!(r#"{{"files": {{"x": "{}"}}}}"#, "0".repeat(64))).unwrap();
    let mut checked = RequestOptions::default();
    checked.load.manifest = Some(std::sync::Arc::new(manifest));
    block_on(engine.load("chat", RequestOptions::default())).unwrap();
    let refused = |error: hob::Error| assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    refused(block_on(engine.load("chat", checked.clone())).unwrap_err());
    refused(answer(&engine, GenerateRequest { options: checked.clone(), ..ask("chat") }).unwrap_err());
    block_on(engine.pool().evict(&Key::chat("chat"), false)).unwrap();
    block_on(engine.load("chat", checked.clone())).unwrap();
    answer(&engine, GenerateRequest { options: checked, ..ask("chat") }).unwrap();
}

#[test]
fn cold_callers_share_one_load() {
    // Hazard A41.
    let device = device();
    let engine = engine(&device, 1 << 30);
    let threads: Vec<_> = (0..16)
        .map(|_| {
            let engine = engine.clone();
            std::thread::spawn(move || answer(&engine, ask("chat")).unwrap().text)
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), "Hello!");
    }
    assert_eq!(device.count(Point::Load), 1);
}

#[test]
fn a_cancel_ends_a_request_in_every_phase() {
    let hour = Some(std::time::Duration::from_secs(3600));
    for (point, timeout) in [(Point::Load, None), (Point::Load, hour), (Point::Step, None), (Point::Step, hour)] {
        let device = device();
        let engine = engine(&device, 1 << 30);
        device.hold(point);
        let cancel = CancelToken::new();
        let mut request = ask("chat");
        // A child that only the request holds.
        request.options = RequestOptions { cancel: Some(cancel.child()), timeout, ..RequestOptions::default() };
        let stream = engine.generate(request).unwrap();
        device.wait_until_held(point);
        cancel.cancel();
        device.release(point);
        assert_eq!(block_on(stream.collect()).unwrap_err().kind(), ErrorKind::Cancelled, "{point:?}, {timeout:?}");
        assert_eq!(uses(&engine), 0);
        assert_eq!(answer(&engine, ask("chat")).unwrap().text, "Hello!");
    }
}

#[test]
fn a_cancel_while_waiting_for_room_ends_the_wait() {
    let device = device();
    let engine = engine(&device, 120 * MB);
    device.hold(Point::Step);
    let running = engine.generate(ask("chat")).unwrap();
    device.wait_until_held(Point::Step);
    let waiting = engine.generate(ask("other")).unwrap();
    while engine.pool().status().waiting == 0 {
        std::thread::yield_now();
    }
    waiting.cancel();
    assert_eq!(block_on(waiting.collect()).unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(engine.pool().status().waiting, 0);
    device.release(Point::Step);
    assert_eq!(block_on(running.collect()).unwrap().text, "Hello!");
}

#[test]
fn a_dropped_stream_ends_its_row_and_its_use() {
    // Hazards D1, D4: the abandoned stream does not block the next call.
    let device = device();
    let engine = engine(&device, 1 << 30);
    let mut stream = engine.generate(ask("long")).unwrap();
    block_on(stream.next()).unwrap().unwrap();
    drop(stream);
    while uses(&engine) > 0 {
        std::thread::yield_now();
    }
    assert_eq!(answer(&engine, ask("chat")).unwrap().text, "Hello!");
}

#[test]
fn a_stalled_reader_pauses_its_own_row_only_and_loses_nothing() {
    let device = device();
    let engine = engine(&device, 1 << 30);
    let stalled = engine.generate(ask("long")).unwrap();
    // Others run to their end while nobody reads the first.
    for _ in 0..3 {
        assert_eq!(answer(&engine, ask("chat")).unwrap().text, "Hello!");
    }
    assert_eq!(block_on(stalled.collect()).unwrap().text, "0123456789".repeat(100));
}

#[test]
fn streams_move_while_others_keep_the_device_busy() {
    // Invariant 8: a queue of jobs that never empties must not hold up a row or its cancel.
    let device = device();
    let engine = engine(&device, 1 << 30);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    block_on(engine.embed(EmbedRequest::new("embed", ["busy"]))).unwrap();
                }
            });
        }
        assert_eq!(answer(&engine, ask("long")).unwrap().text.len(), 1000);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn closing_ends_streams_with_closed_and_returns_the_memory() {
    closes(RequestOptions::default());
    // A token of the caller's own must not cut the request off from the engine's end.
    closes(RequestOptions {
        cancel: Some(CancelToken::new()),
        timeout: Some(std::time::Duration::from_secs(86_400)),
        ..RequestOptions::default()
    });
}

fn closes(options: RequestOptions) {
    let device = device();
    let engine = engine(&device, 1 << 30);
    let mut stream = engine.generate(GenerateRequest { options, ..ask("long") }).unwrap();
    block_on(stream.next()).unwrap().unwrap();
    block_on(engine.close()).unwrap();
    let error = loop {
        match block_on(stream.next()).unwrap() {
            Ok(Event::Chunk(_)) => {}
            Ok(other) => panic!("the stream must not end well: {other:?}"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert_eq!(engine.generate(ask("chat")).unwrap_err().kind(), ErrorKind::Closed);
    block_on(engine.close()).unwrap();
    while device.memory().active > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_forced_evict_lets_the_running_stream_finish() {
    // P10: the request keeps the model alive by its own reference.
    let device = device();
    let engine = engine(&device, 1 << 30);
    device.hold(Point::Step);
    let stream = engine.generate(ask("chat")).unwrap();
    device.wait_until_held(Point::Step);
    assert_eq!(block_on(engine.pool().evict(&Key::chat("chat"), false)).unwrap_err().kind(), ErrorKind::InUse);
    let pool = engine.pool().clone();
    let evicting = std::thread::spawn(move || block_on(pool.evict(&Key::chat("chat"), true)));
    while engine.pool().begin_use(&Key::chat("chat")).is_some() {
        std::thread::yield_now();
    }
    device.release(Point::Step);
    assert_eq!(block_on(stream.collect()).unwrap().text, "Hello!");
    evicting.join().unwrap().unwrap();
    // The last holder's drop has the device free it.
    while device.memory().active > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn errors_never_hold_a_users_text() {
    // Invariant 12.
    let engine = engine(&device(), 1 << 30);
    let secret = "s3cr3t".repeat(2000);
    let errors = [
        answer(&engine, GenerateRequest::raw("small-context", secret.clone())).unwrap_err(),
        block_on(engine.embed(EmbedRequest::new("embed", [secret.clone()]))).unwrap_err(),
        block_on(engine.rerank(RerankRequest::new("rerank", "q", [secret]))).unwrap_err(),
    ];
    for error in errors {
        assert!(!error.full_message().contains("s3cr3t"), "{error}");
    }
}
