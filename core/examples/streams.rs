//! How much faster several streams are than one: `streams MODEL [STREAMS [TOKENS]]` prints the rate of one stream, of several at
//! once in one batch, and their ratio. Greedy, so that the device works ahead. It also says how many of the streams gave the same
//! tokens as they do alone.

#![allow(clippy::cast_precision_loss, reason = "counts of tokens")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it reports")]

use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Instant;

use futures_core::Stream as _;
use hob::block_on;
use hob::engine::{Engine, EngineOptions, Event, GenerateRequest, Prompt, Stream};

fn main() -> hob::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(model) = arguments.first() else {
        eprintln!("usage: streams MODEL [STREAMS [TOKENS]]");
        std::process::exit(2);
    };
    let number = |index: usize, default: usize| arguments.get(index).and_then(|text| text.parse().ok()).unwrap_or(default);
    let (streams, tokens) = (number(1, 8), number(2, 64));
    let engine = Engine::open(EngineOptions::default())?;
    println!("{} ({}), {tokens} tokens a stream", engine.device().name, engine.device().kind);
    // The first run loads the model and warms the device up.
    rate(&engine, model, streams, tokens)?;
    let one = rate(&engine, model, 1, tokens)?;
    let several = rate(&engine, model, streams, tokens)?;
    println!("1 stream {one:.1} tok/s, {streams} streams {several:.1} tok/s together, ratio {:.2}", several / one);
    let together = tokens_of(&engine, model, 0..streams, tokens)?;
    let mut same = 0;
    for (index, ids) in together.iter().enumerate() {
        same += usize::from(tokens_of(&engine, model, index..index + 1, tokens)?.first() == Some(ids));
    }
    println!("{same} of {streams} streams gave the same tokens as alone");
    block_on(engine.close())?;
    Ok(())
}

fn start(engine: &Engine, model: &str, index: usize, tokens: usize) -> hob::Result<Stream> {
    let ids = (0..16).map(|at| u32::try_from(100 + 37 * index + at).unwrap_or(1)).collect();
    let mut request = GenerateRequest::new(model, Prompt::Tokens(ids));
    request.max_tokens = Some(tokens);
    request.prompt_cache = false;
    engine.generate(request)
}

/// The tokens of the streams named, run together.
fn tokens_of(engine: &Engine, model: &str, indexes: Range<usize>, tokens: usize) -> hob::Result<Vec<Vec<u32>>> {
    let running = indexes.map(|index| start(engine, model, index, tokens)).collect::<hob::Result<Vec<Stream>>>()?;
    running.into_iter().map(|stream| Ok(block_on(stream.collect())?.token_ids)).collect()
}

/// Tokens a second of all streams together, from when the last one has its first token until the first one ends.
fn rate(engine: &Engine, model: &str, streams: usize, tokens: usize) -> hob::Result<f64> {
    let mut running = (0..streams).map(|index| start(engine, model, index, tokens)).collect::<hob::Result<Vec<Stream>>>()?;
    for stream in &mut running {
        count(stream)?;
    }
    // What the early ones said while the late ones began is not part of the time that is measured.
    let mut context = Context::from_waker(Waker::noop());
    for stream in &mut running {
        while Pin::new(&mut *stream).poll_next(&mut context).is_ready() {}
    }
    let began = Instant::now();
    let mut produced = 0;
    // Every stream makes one token per step, so reading them in turn keeps pace with all.
    loop {
        for stream in &mut running {
            match count(stream)? {
                Some(tokens) => produced += tokens,
                None => return Ok(produced as f64 / began.elapsed().as_secs_f64()),
            }
        }
    }
}

/// Tokens of the next chunk; `None` at the end.
fn count(stream: &mut Stream) -> hob::Result<Option<usize>> {
    match block_on(stream.next()).transpose()? {
        Some(Event::Chunk(chunk)) => Ok(Some(chunk.token_ids.len())),
        _ => Ok(None),
    }
}
