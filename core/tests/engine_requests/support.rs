//! An engine on a fake device and a fake clock.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures_core::Stream as _;
use hob::chat_template::Message;
use hob::engine::{
    Availability, DecideRequest, EmbedRequest, Engine, EngineOptions, Event, GenerateRequest, Generation, Prompt, RequestOptions,
    RerankRequest, ScoreRequest, Stream, Summary,
};
use hob::fake::{FakeDevice, FakeModel, Point};
use hob::model::ModelKind;
use hob::{CancelToken, Clock, Error, ErrorKind, FakeClock, block_on};

pub(crate) const MB: u64 = 1 << 20;

/// What `long` answers.
pub(crate) fn long_text() -> String {
    "0123456789".repeat(100)
}

pub(crate) fn models() -> Vec<FakeModel> {
    let chat = |name: &str, reply: String| FakeModel { reply, ..FakeModel::new(name, ModelKind::Chat, 100 * MB) };
    vec![
        chat("chat", "Hello!".to_owned()),
        chat("other", "Hello!".to_owned()),
        FakeModel { load_parts: 60_000, ..chat("slow", "Hello!".to_owned()) },
        chat("long", long_text()),
        chat("long2", long_text()),
        FakeModel { echo: true, ..chat("echo", String::new()) },
        FakeModel { context: 10 << 20, ..chat("endless", "x".repeat(5 << 20)) },
        FakeModel::new("embed", ModelKind::Embedder, 50 * MB),
        FakeModel::new("rerank", ModelKind::Reranker, 50 * MB),
    ]
}

pub(crate) struct Harness {
    pub(crate) device: FakeDevice,
    pub(crate) clock: FakeClock,
    pub(crate) engine: Engine,
    /// The fake moment at which the harness was made.
    pub(crate) start: Instant,
}

impl Harness {
    pub(crate) fn new() -> Self {
        Self::with(models(), |_| ())
    }

    pub(crate) fn with(models: Vec<FakeModel>, change: impl FnOnce(&mut EngineOptions)) -> Self {
        let (device, clock) = (FakeDevice::new(models), FakeClock::new());
        let mut options = EngineOptions::with_budget(4 << 30);
        options.clock = Some(Arc::new(clock.clone()));
        change(&mut options);
        let engine = Engine::open_fake(device.clone(), options).unwrap();
        let start = clock.now();
        Self { device, clock, engine, start }
    }

    pub(crate) fn uses(&self) -> u64 {
        self.engine.pool().status().entries.iter().map(|entry| entry.uses).sum()
    }

    /// Nothing is held for any request: the promise at each terminal event.
    #[track_caller]
    pub(crate) fn assert_at_rest(&self) {
        assert_eq!((self.engine.requests(), self.uses()), (0, 0), "requests and uses");
        self.engine.pool().check_account().unwrap();
    }

    /// The same once the device has let go of what its callers left.
    #[track_caller]
    pub(crate) fn come_to_rest(&self) {
        until("requests end", || self.engine.requests() == 0 && self.uses() == 0);
        until("the device rests", || self.engine.availability() == Availability::Ready);
        self.engine.pool().check_account().unwrap();
    }

    #[track_caller]
    pub(crate) fn still_serves(&self) {
        assert_eq!(answer(&self.engine, ask("chat")).unwrap().text, "Hello!");
        self.come_to_rest();
    }

    /// Moves the clock from timer to timer until `done`, which must be so by `limit` after the start.
    #[track_caller]
    pub(crate) fn run_until(&self, limit: Duration, mut done: impl FnMut() -> bool) {
        let limit = self.start + limit;
        until("it comes to pass before its time is up", || {
            if done() {
                return true;
            }
            if let Some(at) = self.clock.next_deadline().filter(|&at| at <= limit && at > self.clock.now()) {
                self.clock.advance(at - self.clock.now());
            }
            false
        });
    }
}

/// Waits until `done`. The bound only turns a hang into a failure.
#[track_caller]
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "waited in vain until {what}");
        std::thread::yield_now();
    }
}

/// So many streams of `endless` that have all begun and run in one batch; the device is held before their next step.
pub(crate) fn running(h: &Harness, count: u64) -> Vec<(Stream, Seen)> {
    h.device.hold(Point::Step);
    let prompts = h.device.count(Point::Prefill);
    let mut streams: Vec<_> = (0..count).map(|_| (h.engine.generate(ask("endless")).unwrap(), Seen::default())).collect();
    until("all have begun", || {
        if h.device.is_held(Point::Step) && h.device.count(Point::Prefill) < prompts + count {
            h.device.pass(Point::Step);
        }
        streams.iter_mut().for_each(|(stream, seen)| drain(stream, seen));
        h.device.count(Point::Prefill) == prompts + count && streams.iter().all(|(_, seen)| seen.tokens > 0)
    });
    h.device.wait_until_held(Point::Step);
    streams
}

/// Runs on a thread of its own.
pub(crate) fn go<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::spawn(work)
}

pub(crate) fn ask(model: &str) -> GenerateRequest {
    GenerateRequest::chat(model, vec![Message::user("hi")])
}

pub(crate) fn raw(model: &str, prompt: impl Into<String>) -> GenerateRequest {
    GenerateRequest::raw(model, prompt)
}

pub(crate) fn answer(engine: &Engine, request: GenerateRequest) -> hob::Result<Generation> {
    block_on(engine.generate(request)?.collect())
}

pub(crate) fn cancelled_by(token: &CancelToken) -> RequestOptions {
    RequestOptions { cancel: Some(token.clone()), ..RequestOptions::default() }
}

pub(crate) fn timeout(seconds: u64) -> RequestOptions {
    RequestOptions { timeout: Some(Duration::from_secs(seconds)), ..RequestOptions::default() }
}

/// The verbs that have no stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Embed,
    Rerank,
    Score,
    Decide,
    Load,
}

pub(crate) const VERBS: [Verb; 5] = [Verb::Embed, Verb::Rerank, Verb::Score, Verb::Decide, Verb::Load];

/// Forty texts: three batches.
pub(crate) fn texts() -> Vec<String> {
    (0..40).map(|n| "text ".repeat(1 + n % 7)).collect()
}

/// One request of a verb, large enough for several units on the device.
pub(crate) fn call(engine: &Engine, verb: Verb, options: RequestOptions) -> hob::Result<()> {
    match verb {
        Verb::Embed => block_on(engine.embed(EmbedRequest { options, ..EmbedRequest::new("embed", texts()) })).map(drop),
        Verb::Rerank => {
            block_on(engine.rerank(RerankRequest { options, ..RerankRequest::new("rerank", "text", texts()) })).map(drop)
        }
        Verb::Score => {
            let request = ScoreRequest::new("chat", Prompt::Raw("how".into()), "x".repeat(1000));
            block_on(engine.score(ScoreRequest { options, ..request })).map(drop)
        }
        Verb::Decide => {
            let request = DecideRequest::choice("chat", "which?", ["a", "b", "c", "d"]);
            block_on(engine.decide(DecideRequest { options, ..request })).map(drop)
        }
        Verb::Load => block_on(engine.load("other", options)).map(drop),
    }
}

#[track_caller]
pub(crate) fn kind<T>(result: hob::Result<T>) -> ErrorKind {
    match result {
        Ok(_) => panic!("it should have failed"),
        Err(error) => error.kind(),
    }
}

/// What a stream has given so far.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) text: String,
    pub(crate) tokens: usize,
    pub(crate) chunks: usize,
    pub(crate) end: Option<Result<Summary, Error>>,
}

/// Reads what is there without waiting.
pub(crate) fn drain(stream: &mut Stream, seen: &mut Seen) {
    let mut context = Context::from_waker(Waker::noop());
    while let Poll::Ready(event) = Pin::new(&mut *stream).poll_next(&mut context) {
        match event {
            None => {
                assert!(seen.end.is_some(), "a stream ended without a terminal event");
                return;
            }
            Some(event) => {
                assert!(seen.end.is_none(), "an event after the terminal one: {event:?}");
                match event {
                    Ok(Event::Chunk(chunk)) => {
                        seen.text.push_str(&chunk.text);
                        seen.tokens += chunk.token_ids.len();
                        seen.chunks += 1;
                    }
                    Ok(Event::Finished(summary)) => seen.end = Some(Ok(summary)),
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => seen.end = Some(Err(error)),
                }
            }
        }
    }
}
