//! What sorting by length is worth: `lengths MODEL [TEXTS]` embeds texts of 6 to 144 words, half of them of at most 24, as one request,
//! whose batches Hob sorts by length, and sixteen at a time as they come. It prints both rates and their ratio.

#![allow(clippy::cast_precision_loss, reason = "counts of texts")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it reports")]

use std::time::Instant;

use hob::block_on;
use hob::engine::{EmbedRequest, Engine, EngineOptions};
use hob::options::Truncate;

fn main() -> hob::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(model) = arguments.first() else {
        eprintln!("usage: lengths MODEL [TEXTS]");
        std::process::exit(2);
    };
    let count = arguments.get(1).and_then(|text| text.parse().ok()).unwrap_or(1000);
    let engine = Engine::open(EngineOptions::default())?;
    let embed = |texts: &[String]| {
        let request = EmbedRequest { truncate: Truncate::End, ..EmbedRequest::new(model, texts.to_vec()) };
        block_on(engine.embed(request)).map(drop)
    };
    let texts: Vec<String> = (0..count).map(|n| "the ferry turned to sea again ".repeat(times(n))).collect();
    // Loads the model and warms the device up.
    embed(&texts[..texts.len().min(16)])?;
    let rate = |work: &dyn Fn() -> hob::Result<()>| {
        let began = Instant::now();
        work().map(|()| texts.len() as f64 / began.elapsed().as_secs_f64())
    };
    let sorted = rate(&|| embed(&texts))?;
    let as_they_come = rate(&|| texts.chunks(16).try_for_each(embed))?;
    println!("{} texts: sorted {sorted:.1}/s, as they come {as_they_come:.1}/s, ratio {:.2}", texts.len(), sorted / as_they_come);
    block_on(engine.close())?;
    Ok(())
}

/// How often a text repeats its six words.
fn times(n: u32) -> usize {
    let draw = n.wrapping_mul(2_654_435_761) >> 16;
    1 + (if draw & 1 == 0 { draw / 2 % 4 } else { draw / 2 % 24 }) as usize
}
