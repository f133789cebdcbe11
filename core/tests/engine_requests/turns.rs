//! Who moves when: streams beside long prompts, batches and loads; several models; slow readers; gathered chunks.

use std::time::Duration;

use hob::block_on;
use hob::engine::{Coalesce, Event, GenerateRequest, RequestOptions, Stream};
use hob::fake::{FakeModel, Point};
use hob::model::ModelKind;

use crate::support::*;

/// A stream's row moves by one step and then the device comes to `bulk`, so often.
fn alternates(h: &Harness, bulk: Point, rounds: usize) {
    for round in 0..rounds {
        let steps = h.device.count(Point::Step);
        h.device.pass(Point::Step);
        h.device.wait_until_held(bulk);
        assert_eq!(h.device.count(Point::Step), steps, "round {round}");
        let bulks = h.device.count(bulk);
        h.device.pass(bulk);
        h.device.wait_until_held(Point::Step);
        assert_eq!(h.device.count(bulk), bulks, "round {round}: one unit between two tokens");
    }
}

/// Passes steps, and reads them, until the device comes to the bulk; then passes that too.
fn first_bulk(h: &Harness, bulk: Point, streams: &mut [(Stream, Seen)]) {
    until("the first unit of bulk", || {
        streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
        if h.device.is_held(Point::Step) {
            h.device.pass(Point::Step);
        }
        h.device.is_held(bulk)
    });
    streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
    h.device.pass(bulk);
    h.device.wait_until_held(Point::Step);
}

#[test]
fn a_long_prompt_delays_a_stream_by_one_chunk_at_a_time() {
    let h = Harness::new();
    let mut streams = running(&h, 1);
    h.device.hold(Point::Prefill);
    let prompt = h.engine.generate(GenerateRequest { max_tokens: Some(5), ..raw("endless", "x".repeat(3000)) }).unwrap();
    first_bulk(&h, Point::Prefill, &mut streams);
    alternates(&h, Point::Prefill, 15);
    let chunks = h.device.count(Point::Prefill);
    h.device.release(Point::Step);
    h.device.release(Point::Prefill);
    assert_eq!(block_on(prompt.collect()).unwrap().text, "xxxxx");
    // 3,000 tokens in chunks of 128 beside a stream; it pauses at some time, for nobody reads it.
    assert!(h.device.count(Point::Prefill) > chunks);
    drop(streams);
    h.come_to_rest();
}

#[test]
fn batches_and_scorings_go_between_the_tokens_of_a_stream() {
    for (verb, bulk) in [(Verb::Embed, Point::Embed), (Verb::Rerank, Point::Rerank), (Verb::Score, Point::Score)] {
        let h = Harness::new();
        call(&h.engine, verb, RequestOptions::default()).unwrap();
        let mut streams = running(&h, 1);
        h.device.hold(bulk);
        let engine = h.engine.clone();
        let caller = go(move || call(&engine, verb, RequestOptions::default()));
        first_bulk(&h, bulk, &mut streams);
        // Forty texts make three batches.
        alternates(&h, bulk, 2);
        drop(streams);
        h.device.release(Point::Step);
        h.device.release(bulk);
        caller.join().unwrap().unwrap();
        h.come_to_rest();
    }
}

#[test]
fn streams_of_two_models_take_turns() {
    let h = Harness::with(
        ["a", "b"].map(|name| FakeModel { reply: long_text(), ..FakeModel::new(name, ModelKind::Chat, MB) }).into(),
        |_| (),
    );
    for name in ["a", "b"] {
        block_on(h.engine.load(name, RequestOptions::default())).unwrap();
    }
    // Both prompts are through before the first step of either.
    h.device.hold(Point::Step);
    let mut streams = ["a", "b"].map(|name| (h.engine.generate(ask(name)).unwrap(), Seen::default()));
    until("both have begun", || {
        streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
        if streams.iter().any(|(_, seen)| seen.tokens == 0) && h.device.is_held(Point::Step) {
            h.device.pass(Point::Step);
        }
        streams.iter().all(|(_, seen)| seen.tokens > 0)
    });
    let mut steps = Vec::new();
    for _ in 0..40 {
        h.device.wait_until_held(Point::Step);
        streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
        let before = [streams[0].1.tokens, streams[1].1.tokens];
        h.device.pass(Point::Step);
        h.device.wait_until_held(Point::Step);
        streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
        steps.push([streams[0].1.tokens - before[0], streams[1].1.tokens - before[1]]);
    }
    assert!(steps.iter().all(|moved| moved[0] + moved[1] == 1), "a step belongs to one model: {steps:?}");
    // A round that had begun before the second model did goes to its end.
    assert!(steps[3..].windows(2).all(|pair| pair[0] != pair[1]), "and the next to the other: {steps:?}");
    h.device.release(Point::Step);
    for (stream, seen) in streams {
        let rest = block_on(stream.collect()).unwrap();
        assert_eq!(seen.text + &rest.text, long_text());
    }
    h.assert_at_rest();
}

#[test]
fn streams_go_on_while_another_model_loads() {
    let h = Harness::new();
    let (mut stream, mut seen) = running(&h, 1).remove(0);
    h.device.release(Point::Step);
    h.device.hold(Point::LoadStep);
    let engine = h.engine.clone();
    let load = go(move || block_on(engine.load("slow", RequestOptions::default())));
    h.device.wait_until_held(Point::LoadStep);
    // What its reader had room for is there; the load stands at its first part.
    drain(&mut stream, &mut seen);
    let before = seen.tokens;
    let mut late = h.engine.generate(GenerateRequest { max_tokens: Some(1), ..ask("endless") }).unwrap();
    until("the new request has its model", || h.uses() >= 2);
    let mut late_seen = Seen::default();
    let mut moves = 0;
    for _ in 0..10 {
        let moved = seen.tokens;
        h.device.pass(Point::LoadStep);
        h.device.wait_until_held(Point::LoadStep);
        drain(&mut stream, &mut seen);
        moves += usize::from(seen.tokens > moved);
    }
    // One unit of work at least goes between two parts, and the new request needs one for its prompt.
    assert!(moves >= 9, "a running stream moves between the parts of a load: {moves} of 10");
    assert!(seen.tokens > before);
    until("a request that comes meanwhile is served", || {
        if h.device.is_held(Point::LoadStep) {
            h.device.pass(Point::LoadStep);
        }
        drain(&mut late, &mut late_seen);
        late_seen.end.is_some()
    });
    assert!(!load.is_finished());
    h.device.release(Point::LoadStep);
    load.join().unwrap().unwrap();
    // How much of it is served before the load's end is a matter of time, which the load shares with all that runs.
    until("a request that came meanwhile is served", || {
        drain(&mut late, &mut late_seen);
        late_seen.end.is_some()
    });
    drop(stream);
    h.come_to_rest();
}

#[test]
fn a_stalled_reader_pauses_its_own_row_and_holds_a_bounded_number_of_events() {
    let h = Harness::new();
    let mut stalled = h.engine.generate(ask("long")).unwrap();
    assert!(matches!(block_on(stalled.next()), Some(Ok(Event::Chunk(_)))));
    // Rows of the same model, in the same batch, go on.
    for _ in 0..3 {
        assert_eq!(answer(&h.engine, ask("long")).unwrap().text, long_text());
    }
    let mut seen = Seen::default();
    let steps = h.device.count(Point::Step);
    h.device.hold(Point::Step);
    drain(&mut stalled, &mut seen);
    assert!((200..=300).contains(&seen.chunks), "{} chunks were held for it", seen.chunks);
    h.device.wait_until_held(Point::Step);
    assert_eq!(h.device.count(Point::Step), steps + 1, "reading wakes the row");
    h.device.release(Point::Step);
    let rest = block_on(stalled.collect()).unwrap();
    assert_eq!(seen.text + &rest.text, long_text()[1..], "nothing is lost");
}

#[test]
fn tokens_are_gathered_by_count_or_by_time_and_the_first_never_waits() {
    let h = Harness::new();
    let chunks = |coalesce: Coalesce| {
        let mut stream = h.engine.generate(GenerateRequest { coalesce, max_tokens: Some(20), ..ask("long") }).unwrap();
        let mut sizes = Vec::new();
        while let Some(event) = block_on(stream.next()) {
            if let Event::Chunk(chunk) = event.unwrap() {
                assert_eq!(chunk.text.len(), chunk.token_ids.len());
                sizes.push(chunk.token_ids.len());
            }
        }
        sizes
    };
    let hour = Duration::from_secs(3600);
    assert_eq!(chunks(Coalesce::default()), [1; 20]);
    assert_eq!(chunks(Coalesce { tokens: 8, interval: Duration::ZERO }), [1, 8, 8, 3]);
    assert_eq!(chunks(Coalesce { tokens: 8, interval: hour }), [1, 8, 8, 3]);
    assert_eq!(chunks(Coalesce { tokens: usize::MAX, interval: hour }), [1, 19], "the end is not held back");
    assert_eq!(chunks(Coalesce { tokens: usize::MAX, interval: Duration::from_nanos(1) }), [1; 20], "each has waited longer");
}

#[test]
fn parallel_streams_hold_whole_characters_and_leak_no_stop_text() {
    // Hazards E1 and E2, with each byte a token.
    let text = "a👩‍👩‍👧b日本語c ENDED e\u{301}";
    let model = FakeModel { reply: text.to_owned(), ..FakeModel::new("emoji", ModelKind::Chat, MB) };
    let h = Harness::with(vec![model], |_| ());
    let stops: [&[&str]; 4] = [&[], &["END"], &["👧"], &["語c", "zz"]];
    let expected = [text, "a👩‍👩‍👧b日本語c ", "a👩‍👩‍", "a👩‍👩‍👧b日本"];
    let callers: Vec<_> = (0..16)
        .map(|n| {
            let engine = h.engine.clone();
            go(move || {
                let stop = stops[n % 4].iter().map(|&stop| stop.to_owned()).collect();
                let answer = answer(&engine, GenerateRequest { stop, ..ask("emoji") }).unwrap();
                (n, answer)
            })
        })
        .collect();
    for caller in callers {
        let (n, answer) = caller.join().unwrap();
        assert_eq!(answer.text, expected[n % 4]);
        assert_eq!(answer.summary.stop_index, [None, Some(0), Some(0), Some(0)][n % 4]);
    }
    h.assert_at_rest();
}
