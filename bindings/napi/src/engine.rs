//! Engines and cancel tokens.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use hob::engine::{Availability, Engine, RequestOptions};
use hob::fake::FakeDevice;
use hob::pool::{PoolEvent, Received, unblock};
use hob::{CancelReason, CancelToken, Key, Kind};
use napi::bindgen_prelude::Either;
use napi_derive::napi;

use crate::Live;
use crate::error::{Refusal, count, duration, enter, number, whole};
use crate::mailbox::{Letter, Mailbox, NativeMailbox};
use crate::pool::{NativePause, NativePool};
use crate::requests::{
    NativeDecide, NativeEmbed, NativeEngineOptions, NativeGenerate, NativeRequest, NativeRerank, NativeScoreRequest,
};
use crate::results::{NativeDevice, NativeEstimate, NativeModelInfo, Value};
use crate::stream::NativeStream;

/// What ends requests: cancelling one ends its children too. A mailbox makes them.
#[napi]
pub struct NativeCancelToken {
    pub(crate) token: CancelToken,
}

#[napi]
impl NativeCancelToken {
    /// A token that is cancelled when this one is, and can be cancelled alone.
    #[napi]
    pub fn child(&self) -> Self {
        Self { token: self.token.child() }
    }

    /// A child whose time is up after so many milliseconds.
    #[napi]
    pub fn with_deadline(&self, timeout_ms: f64) -> Result<Self, Refusal> {
        enter(|| {
            let at = std::time::Instant::now().checked_add(duration("timeoutMs", timeout_ms)?);
            Ok(Self { token: at.map_or_else(|| self.token.child(), |at| self.token.with_deadline(at)) })
        })
    }

    /// Cancels. Returns whether this call was the one that did.
    #[napi]
    pub fn cancel(&self) -> bool {
        self.token.cancel()
    }

    /// Why it is cancelled, if it is.
    #[napi(getter, ts_return_type = "'cancelled' | 'timeout' | null")]
    pub fn reason(&self) -> Option<&'static str> {
        self.token.reason().map(|reason| match reason {
            CancelReason::Timeout => "timeout",
            _ => "cancelled",
        })
    }
}

/// Opens an engine; it is what the call ends with.
#[napi]
pub fn open_engine(mailbox: &NativeMailbox, id: f64, options: NativeEngineOptions) -> Result<(), Refusal> {
    enter(|| {
        let (mailbox, options) = (Arc::clone(&mailbox.mailbox), options.read()?);
        let owner = Arc::clone(&mailbox);
        // MLX takes its time to start.
        let opened = unblock(move || Engine::open(options));
        let engine = async move { Ok(Value::Engine(Box::new(NativeEngine::new(opened.await?, None, owner)))) };
        mailbox.run(whole("id", id)?, engine)
    })
}

/// An engine. Its end by the garbage collector closes it in the background.
#[napi]
pub struct NativeEngine {
    pub(crate) engine: Engine,
    pub(crate) fake: Option<FakeDevice>,
    mailbox: Arc<Mailbox>,
    _live: Live,
}

impl NativeEngine {
    pub(crate) fn new(engine: Engine, fake: Option<FakeDevice>, mailbox: Arc<Mailbox>) -> Self {
        Self { engine, fake, mailbox, _live: Live::new() }
    }

    /// Starts a call whose request is read with its token. A `quick` one keeps what `task.rs` asks for.
    fn start<R, F>(
        &self,
        id: f64,
        cancel: Option<&NativeCancelToken>,
        quick: bool,
        read: impl FnOnce(CancelToken) -> hob::Result<R>,
        run: impl FnOnce(Engine, R) -> F,
    ) -> Result<(), Refusal>
    where
        F: Future<Output = hob::Result<Value>> + Send + 'static,
    {
        enter(|| {
            let request = read(self.mailbox.token(cancel))?;
            let (id, call) = (whole("id", id)?, run(self.engine.clone(), request));
            if quick {
                self.mailbox.run_here(id, call);
                return Ok(());
            }
            self.mailbox.run(id, call)
        })
    }

    /// Starts a call that reads files and computes nothing.
    fn look(
        &self,
        id: f64,
        request: &NativeRequest,
        look: impl FnOnce(&Engine, &hob::model::LoadOptions) -> hob::Result<Value> + Send + 'static,
    ) -> Result<(), Refusal> {
        enter(|| {
            let (engine, options) = (self.engine.clone(), request.load_options()?);
            self.mailbox.run(whole("id", id)?, unblock(move || look(&engine, &options)))
        })
    }
}

#[napi]
impl NativeEngine {
    /// The device that computes.
    #[napi(getter)]
    pub fn device(&self) -> NativeDevice {
        let device = self.engine.device();
        NativeDevice {
            kind: device.kind,
            name: device.name.clone(),
            version: device.version.clone(),
            recommended_bytes: device.recommended_bytes.map(number),
        }
    }

    /// Whether requests are served now.
    #[napi(getter, ts_return_type = "'ready' | 'working' | 'quarantined' | 'closed'")]
    pub fn availability(&self) -> &'static str {
        match self.engine.availability() {
            Availability::Ready => "ready",
            Availability::Working => "working",
            Availability::Quarantined => "quarantined",
            Availability::Closed => "closed",
        }
    }

    /// Requests taken on and not over.
    #[napi(getter)]
    pub fn requests(&self) -> f64 {
        count(self.engine.requests())
    }

    /// The engine's pool.
    #[napi]
    pub fn pool(&self) -> NativePool {
        NativePool::new(self.engine.pool().clone(), Some(self.engine.clone()), Arc::clone(&self.mailbox))
    }

    /// Reads a model's configuration and headers.
    #[napi]
    pub fn inspect(&self, id: f64, model: String, request: NativeRequest) -> Result<(), Refusal> {
        self.look(id, &request, move |engine, options| {
            engine.inspect(&model, options).map(|info| Value::Model(Box::new(NativeModelInfo::from(info))))
        })
    }

    /// What a model will take.
    #[napi]
    pub fn estimate(&self, id: f64, model: String, request: NativeRequest) -> Result<(), Refusal> {
        self.look(id, &request, move |engine, options| {
            engine.estimate(&model, options).map(|estimate| Value::Estimate(NativeEstimate::from(&estimate)))
        })
    }

    /// The verbs a model serves.
    #[napi]
    pub fn capabilities(&self, id: f64, model: String) -> Result<(), Refusal> {
        self.look(id, &NativeRequest::default(), move |engine, _| engine.capabilities(&model).map(Value::Strings))
    }

    /// Makes a model resident; `progress` asks for letters on the way.
    #[napi]
    pub fn load(
        &self,
        id: f64,
        model: String,
        request: NativeRequest,
        progress: bool,
        cancel: Option<&NativeCancelToken>,
    ) -> Result<(), Refusal> {
        let mailbox = Arc::clone(&self.mailbox);
        self.start(
            id,
            cancel,
            false,
            |token| Ok((whole("id", id)?, request.read(token)?)),
            move |engine, (id, options)| async move {
                let info = if progress {
                    load_telling(&engine, model, options, |fraction| {
                        mailbox.send(Letter::Progress(id, fraction));
                    })
                    .await?
                } else {
                    engine.load(&model, options).await?
                };
                Ok(Value::Model(Box::new(NativeModelInfo::from(info))))
            },
        )
    }

    /// Starts generating. `id` is the number of its `ready` letters.
    #[napi]
    pub fn generate(&self, id: f64, request: NativeGenerate, cancel: Option<&NativeCancelToken>) -> Result<NativeStream, Refusal> {
        enter(|| {
            let stream = self.engine.generate(request.read(self.mailbox.token(cancel))?)?;
            Ok(NativeStream::new(stream, self.engine.clone(), whole("id", id)?, Arc::clone(&self.mailbox)))
        })
    }

    /// Turns texts into vectors.
    #[napi]
    pub fn embed(
        &self,
        id: f64,
        model: String,
        texts: Either<String, Vec<String>>,
        options: Option<NativeEmbed>,
        cancel: Option<&NativeCancelToken>,
    ) -> Result<(), Refusal> {
        self.start(
            id,
            cancel,
            true,
            |token| NativeEmbed::read(options, model, texts, token),
            |engine, request| async move { engine.embed(request).await.map(|vectors| Value::Embeddings(vectors.into())) },
        )
    }

    /// Orders documents by a query.
    #[napi]
    pub fn rerank(&self, id: f64, request: NativeRerank, cancel: Option<&NativeCancelToken>) -> Result<(), Refusal> {
        self.start(
            id,
            cancel,
            true,
            |token| request.read(token),
            |engine, request| async move { engine.rerank(request).await.map(|ranking| Value::Ranking(ranking.into())) },
        )
    }

    /// How likely a completion is.
    #[napi]
    pub fn score(&self, id: f64, request: NativeScoreRequest, cancel: Option<&NativeCancelToken>) -> Result<(), Refusal> {
        self.start(
            id,
            cancel,
            true,
            |token| request.read(token),
            |engine, request| async move { engine.score(request).await.map(|score| Value::Score(score.into())) },
        )
    }

    /// Which answer is the likeliest.
    #[napi]
    pub fn decide(&self, id: f64, request: NativeDecide, cancel: Option<&NativeCancelToken>) -> Result<(), Refusal> {
        self.start(
            id,
            cancel,
            true,
            |token| request.read(token),
            |engine, request| async move { engine.decide(request).await.map(|decided| Value::Decision(decided.into())) },
        )
    }

    /// Holds back new loads.
    #[napi]
    pub fn pause(&self, id: f64) -> Result<(), Refusal> {
        self.start(
            id,
            None,
            false,
            |_| Ok(()),
            |engine, ()| async move { engine.pause().await.map(|paused| Value::Pause(NativePause::new(paused))) },
        )
    }

    /// Ends everything; the call ends with whether all had stopped by the engine's bound.
    #[napi]
    pub fn close(&self, id: f64) -> Result<(), Refusal> {
        self.start(
            id,
            None,
            false,
            |_| Ok(()),
            |engine, ()| async move { engine.close().await.map(|closed| Value::Bool(closed.stopped)) },
        )
    }
}

/// Loads and reports the percents that the pool tells of this model.
async fn load_telling(
    engine: &Engine,
    model: String,
    options: RequestOptions,
    tell: impl Fn(f64),
) -> hob::Result<hob::engine::ModelInfo> {
    let (looking, reference, load) = (engine.clone(), model.clone(), options.load.clone());
    let info = unblock(move || looking.inspect(&reference, &load)).await?;
    let key = Key::new(Kind::from_name(info.kind.name()), info.id.as_str());
    let mut events = engine.pool().events(256);
    let report = |event: Received| {
        if let Received::Event(PoolEvent::LoadProgress { key: of, percent, .. }) = event
            && of == key
        {
            tell(f64::from(percent) / 100.0);
        }
    };
    let loaded = {
        let mut loading = pin!(engine.load(&model, options));
        poll_fn(|context| {
            loop {
                let next = pin!(events.next());
                match next.poll(context) {
                    Poll::Ready(Some(event)) => report(event),
                    Poll::Ready(None) | Poll::Pending => break,
                }
            }
            loading.as_mut().poll(context)
        })
        .await
    };
    // What was told between the last look and the end.
    while let Some(event) = events.try_next() {
        report(event);
    }
    loaded
}
