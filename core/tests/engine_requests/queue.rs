//! The bounded queue: who is refused, with which words, and when a place is free again.

use hob::engine::{EmbedRequest, Finish, GenerateRequest, Prompt, RequestOptions, Stream};
use hob::fake::{Fault, Point};
use hob::options::Limits;
use hob::{CancelToken, ErrorKind, block_on};

use crate::support::*;

#[test]
fn one_request_more_than_capacity_and_queue_is_busy_at_once() {
    let h = Harness::with(models(), |options| (options.capacity, options.queue) = (2, 3));
    h.device.hold(Point::Step);
    let streams: Vec<_> = (0..5).map(|_| h.engine.generate(ask("chat")).unwrap()).collect();
    let error = h.engine.generate(ask("chat")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.message().contains('5') && error.message().contains("queue"), "value and knob: {error}");
    for verb in VERBS {
        assert_eq!(kind(call(&h.engine, verb, RequestOptions::default())), ErrorKind::Busy, "{verb:?}");
    }
    assert_eq!(h.engine.requests(), 5);
    h.device.release(Point::Step);
    for stream in streams {
        assert_eq!(block_on(stream.collect()).unwrap().text, "Hello!");
    }
    h.assert_at_rest();
    h.still_serves();
}

#[test]
fn the_capacity_is_rows_at_once_and_the_next_in_line_takes_a_free_one() {
    let h = Harness::with(models(), |options| options.capacity = 2);
    let mut streams = running(&h, 2);
    let mut next = (h.engine.generate(ask("endless")).unwrap(), Seen::default());
    let step = |streams: &mut Vec<(Stream, Seen)>, next: &mut (Stream, Seen)| {
        streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
        drain(&mut next.0, &mut next.1);
        h.device.pass(Point::Step);
        h.device.wait_until_held(Point::Step);
    };
    until("it has its model", || h.uses() == 3);
    for _ in 0..100 {
        step(&mut streams, &mut next);
    }
    assert_eq!((next.1.tokens, h.device.widest_batch()), (0, 2));
    streams.remove(0);
    until("the next one runs", || {
        step(&mut streams, &mut next);
        next.1.tokens > 1
    });
    assert_eq!(h.device.widest_batch(), 2);
    h.device.release(Point::Step);
    drop((streams, next));
    h.come_to_rest();
}

#[test]
fn a_place_is_free_again_when_a_request_ends_in_whatever_way() {
    // One place: if any of these kept it, the next would be refused.
    let h = Harness::with(models(), |options| (options.capacity, options.queue) = (1, 0));
    let engine = &h.engine;
    let ask_with = |options| GenerateRequest { options, ..ask("chat") };
    let fired = CancelToken::new();
    fired.cancel();
    type Way<'a> = (&'a str, Box<dyn Fn() + 'a>);
    let ways: Vec<Way<'_>> = vec![
        ("an answer", Box::new(|| assert_eq!(answer(engine, ask("chat")).unwrap().text, "Hello!"))),
        ("nothing to do", Box::new(|| drop(answer(engine, GenerateRequest { max_tokens: Some(0), ..ask("chat") }).unwrap()))),
        ("no such model", Box::new(|| assert_eq!(kind(answer(engine, ask("nowhere"))), ErrorKind::NotFound))),
        ("another kind", Box::new(|| assert_eq!(kind(answer(engine, ask("embed"))), ErrorKind::Unsupported))),
        ("too long", Box::new(|| assert_eq!(kind(answer(engine, raw("chat", "x".repeat(5000)))), ErrorKind::InvalidArgument))),
        (
            "a bad token",
            Box::new(|| {
                let request = GenerateRequest::new("chat", Prompt::Tokens(vec![1, 9999]));
                assert_eq!(kind(answer(engine, request)), ErrorKind::InvalidArgument);
            }),
        ),
        (
            "cancelled before",
            Box::new(|| {
                assert_eq!(kind(answer(engine, ask_with(cancelled_by(&fired)))), ErrorKind::Cancelled);
                for verb in VERBS {
                    assert_eq!(kind(call(engine, verb, cancelled_by(&fired))), ErrorKind::Cancelled, "{verb:?}");
                }
            }),
        ),
        (
            "a failing load",
            Box::new(|| {
                h.device.fail_next(Point::Load, Fault::Error(ErrorKind::OutOfMemory));
                assert_eq!(kind(answer(engine, ask("other"))), ErrorKind::OutOfMemory);
            }),
        ),
        (
            "a panicking step",
            Box::new(|| {
                h.device.fail_next(Point::Step, Fault::Panic);
                assert_eq!(kind(answer(engine, ask("chat"))), ErrorKind::Internal);
            }),
        ),
        (
            "failing units",
            Box::new(|| {
                for (point, verb) in [(Point::Embed, Verb::Embed), (Point::Rerank, Verb::Rerank), (Point::Score, Verb::Score)] {
                    h.device.fail_next(point, Fault::Error(ErrorKind::Backend));
                    assert_eq!(kind(call(engine, verb, RequestOptions::default())), ErrorKind::Backend, "{verb:?}");
                    h.assert_at_rest();
                }
            }),
        ),
        (
            "dimensions beyond the model's",
            Box::new(|| {
                let request = EmbedRequest { dimensions: Some(1000), ..EmbedRequest::new("embed", ["a"]) };
                assert_eq!(kind(block_on(engine.embed(request))), ErrorKind::InvalidArgument);
            }),
        ),
    ];
    for (way, run) in &ways {
        run();
        // Invariant 7: no waiting here. What the request held is back before its caller hears of the end.
        assert_eq!((engine.requests(), h.uses()), (0, 0), "{way}");
        assert_eq!(answer(engine, ask("chat")).unwrap().summary.finish, Finish::Stop, "{way}");
    }
    // Without a caller who hears of the end it comes soon.
    drop(engine.generate(ask("long")).unwrap());
    until("a dropped stream frees its place", || engine.requests() == 0);
    h.device.hold(Point::Embed);
    let before = h.device.count(Point::Embed);
    {
        let mut future = Box::pin(engine.embed(EmbedRequest::new("embed", texts())));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        while h.device.count(Point::Embed) == before {
            assert!(future.as_mut().poll(&mut context).is_pending());
            std::thread::yield_now();
        }
    }
    h.device.release(Point::Embed);
    until("a dropped future frees its place", || engine.requests() == 0);
    assert_eq!(h.device.count(Point::Embed), before + 1, "and its other batches are not computed");
    h.still_serves();
}

#[test]
fn limits_are_checked_before_anything_is_queued() {
    let limits = Limits { prompt_bytes: 10, text_bytes: 10, texts: 2, stops: 1, ..Limits::default() };
    let h = Harness::with(models(), |options| options.limits = limits);
    let refused = |request: GenerateRequest| {
        let error = h.engine.generate(request).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("Limits::"), "the knob is named: {error}");
    };
    refused(raw("chat", "longer than ten"));
    refused(GenerateRequest { stop: vec!["a".into(), "b".into()], ..raw("chat", "x") });
    refused(GenerateRequest { options: timeout(1_000_000), ..raw("chat", "x") });
    for verb in [Verb::Embed, Verb::Rerank, Verb::Score, Verb::Decide] {
        assert_eq!(kind(call(&h.engine, verb, RequestOptions::default())), ErrorKind::InvalidArgument, "{verb:?}");
    }
    assert_eq!(kind(call(&h.engine, Verb::Embed, timeout(1_000_000))), ErrorKind::InvalidArgument);
    assert_eq!((h.device.count(Point::Load), h.engine.requests()), (0, 0));
    assert!(answer(&h.engine, raw("chat", "short")).is_ok());
}
