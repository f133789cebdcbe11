//! Hob in one screen: three real models, one budget that holds one or two of them.
//!
//! Run by `cargo xtask demo`, which fetches the models first.

#![allow(clippy::print_stdout)] // a demo prints

use std::io::Write;

use hob::block_on;
use hob::chat_template::Message;
use hob::engine::{EmbedRequest, Engine, EngineOptions, Event, GenerateRequest, RerankRequest, ScoreKind};
use hob::model::LoadOptions;
use hob::pool::{EventStream, PoolEvent, Received};

const SENTENCES: [&str; 6] = [
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "Stock markets fell sharply on Monday.",
    "Shares dropped at the start of the week.",
    "She repairs old bicycles at weekends.",
    "Fixing bikes is what she does on Sundays.",
];

const DOCUMENTS: [&str; 4] = [
    "Bread is made of flour, water, salt and yeast.",
    "Paris is the capital and largest city of France.",
    "Berlin is the capital and largest city of Germany.",
    "The Seine flows through the north of France.",
];

const QUESTION: &str = "What is the capital of France?";

struct Demo {
    engine: Engine,
    events: EventStream,
}

fn main() -> hob::Result<()> {
    let [chat, embedder, reranker] = arguments()?;
    let (Some(chat), Some(embedder)) = (chat, embedder) else {
        return Err(hob::Error::new(
            hob::ErrorKind::InvalidArgument,
            "usage: demo --chat MODEL --embedder MODEL [--reranker MODEL]",
        ));
    };

    // Sizes are read from headers, before anything is loaded.
    let sizes = Engine::open(EngineOptions::default())?;
    let size = |model: &str| sizes.inspect(model, &LoadOptions::default()).map(|info| info.estimate_total);
    let small = size(&embedder)? + reranker.as_deref().map_or(Ok(0), size)?;
    let budget = size(&chat)?.max(small);
    let engine = Engine::open(EngineOptions::with_budget(budget))?;
    let demo = Demo { events: engine.pool().events(1024), engine };
    println!("device {} ({}), MLX {}", demo.engine.device().kind, demo.engine.device().name, demo.engine.device().version);
    println!("budget {}: room for the chat model, or for the two small ones, not for all three", mb(budget));

    demo.run(&chat, &embedder, reranker.as_deref())
}

impl Demo {
    fn run(mut self, chat: &str, embedder: &str, reranker: Option<&str>) -> hob::Result<()> {
        println!("\n1. Embed six sentences: similarity of each pair");
        let vectors = block_on(self.engine.embed(EmbedRequest::new(embedder, SENTENCES)))?;
        for (sentence, row) in SENTENCES.iter().zip(vectors.rows()) {
            let line: Vec<String> =
                vectors.rows().map(|other| format!("{:5.2}", row.iter().zip(other).map(|(a, b)| a * b).sum::<f32>())).collect();
            println!("   {}   {sentence}", line.join(" "));
        }
        self.table();

        println!("\n2. Rerank four documents for: {QUESTION}");
        let ranking = block_on(self.engine.rerank(RerankRequest::new(reranker.unwrap_or(embedder), QUESTION, DOCUMENTS)))?;
        for ranked in &ranking.results {
            println!("   {:6.3}   {}", ranked.score, DOCUMENTS[ranked.index]);
        }
        println!(
            "   ({})",
            if ranking.score_kind == ScoreKind::Cosine { "cosines of the embedder" } else { "probabilities of the cross-encoder" }
        );
        self.table();

        println!("\n3. Chat: the model needs the room the others hold");
        self.chat(chat)?;
        self.table();

        println!("\n4. Embed once more: now the chat model has to go");
        block_on(self.engine.embed(EmbedRequest::new(embedder, ["back again"])))?;
        self.table();

        println!("\n5. Close: everything goes back");
        block_on(self.engine.close())?;
        self.table();
        Ok(())
    }

    fn chat(&self, model: &str) -> hob::Result<()> {
        print!("   you: {QUESTION}\n   model: ");
        let mut request = GenerateRequest::chat(model, vec![Message::user(QUESTION)]);
        request.max_tokens = Some(48);
        let mut stream = self.engine.generate(request)?;
        while let Some(event) = block_on(stream.next()) {
            match event? {
                Event::Chunk(chunk) => {
                    print!("{}", chunk.text);
                    let _ = std::io::stdout().flush();
                }
                Event::Finished(summary) => {
                    let load = summary.timings.load_s.unwrap_or(0.0);
                    println!("\n   ({} new tokens, loaded in {load:.1} s)", summary.completion_tokens);
                }
            }
        }
        Ok(())
    }

    /// What happened since the last table, and who is resident now.
    fn table(&mut self) {
        while let Some(received) = self.events.try_next() {
            if let Received::Event(PoolEvent::Unloaded { key, reason, bytes, .. }) = received {
                println!("   pool: {} went ({reason:?}), {} off the account", short(key.id()), mb(bytes));
            }
        }
        let status = self.engine.pool().status();
        println!(
            "   pool: {} of {} used; this process holds {} of memory",
            mb(status.used_bytes),
            mb(status.budget_bytes),
            resident_memory()
        );
        for entry in &status.entries {
            println!("         {:<9} {:<32} {:>9}  {:?}", entry.kind, short(&entry.id), mb(entry.bytes), entry.state);
        }
    }
}

/// The values of --chat, --embedder and --reranker.
fn arguments() -> hob::Result<[Option<String>; 3]> {
    let mut values = [None, None, None];
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let place = match name.as_str() {
            "--chat" => 0,
            "--embedder" => 1,
            "--reranker" => 2,
            other => return Err(hob::Error::new(hob::ErrorKind::InvalidArgument, format!("unknown argument {other}"))),
        };
        values[place] = arguments.next();
    }
    Ok(values)
}

fn short(id: &str) -> &str {
    id.rsplit('/').next().unwrap_or(id)
}

#[allow(clippy::cast_precision_loss)] // for people
fn mb(bytes: u64) -> String {
    format!("{:.0} MB", bytes as f64 / 1e6)
}

/// Resident memory of this process as the system counts it.
fn resident_memory() -> String {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    match statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()) {
        Some(pages) => mb(pages * 4096),
        None => "an unknown amount".to_owned(),
    }
}
