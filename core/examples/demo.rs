//! Hob in one screen: three real models, one budget that holds one or two of them.
//!
//! Run by `cargo xtask demo`, which fetches the models first.

#![allow(clippy::print_stdout)] // a demo prints

use std::io::Write;
use std::time::Instant;

use hob::block_on;
use hob::chat_template::Message;
use hob::engine::{EmbedRequest, Engine, EngineOptions, Event, GenerateRequest, RequestOptions, RerankRequest, ScoreKind};
use hob::model::LoadOptions;
use hob::pool::{EventStream, IdlePolicy, PoolEvent, Received, UnloadReason};

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

const LONGER: &str = "Tell me something about Paris.";

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
        self.chat(chat, QUESTION, || ())?;
        self.table();

        println!("\n4. Embed while the model answers: a model in use stays, so the embedding waits for the answer's end");
        let mut embedding = None;
        self.chat(chat, LONGER, || {
            let engine = self.engine.clone();
            let request = EmbedRequest::new(embedder, ["asked at the first word"]);
            let asked = Instant::now();
            embedding = Some(std::thread::spawn(move || block_on(engine.embed(request)).map(|_| asked.elapsed())));
        })?;
        let ended = Instant::now();
        if let Some(embedding) = embedding {
            let took = embedding.join().map_err(|_| hob::Error::new(hob::ErrorKind::Internal, "the embedding panicked"))??;
            let after = ended.elapsed();
            println!(
                "   embedding: asked for at the first word, there after {:.1} s, {:.1} s after the last word",
                took.as_secs_f64(),
                after.as_secs_f64()
            );
        }
        self.table();

        println!("\n5. Embed with the idle policy `immediately`: the model goes when its use ends");
        let before = resident_memory();
        let options = RequestOptions { idle: Some(IdlePolicy::Immediately), ..RequestOptions::default() };
        block_on(self.engine.embed(EmbedRequest { options, ..EmbedRequest::new(embedder, ["once only"]) }))?;
        self.until_idle();
        if let (Some(before), Some(after)) = (before, resident_memory()) {
            println!("   {} of this process's memory came back", mb(before.saturating_sub(after)));
        }
        self.table();

        println!("\n6. Close");
        block_on(self.engine.close())?;
        self.table();
        Ok(())
    }

    /// Prints an answer as it comes; `at_first` is called at its first word.
    fn chat(&self, model: &str, question: &str, at_first: impl FnOnce()) -> hob::Result<()> {
        print!("   you: {question}\n   model: ");
        let mut request = GenerateRequest::chat(model, vec![Message::user(question)]);
        request.max_tokens = Some(48);
        let mut stream = self.engine.generate(request)?;
        let mut at_first = Some(at_first);
        while let Some(event) = block_on(stream.next()) {
            match event? {
                Event::Chunk(chunk) => {
                    if let Some(call) = at_first.take() {
                        call();
                    }
                    print!("{}", chunk.text.replace('\n', "\n          "));
                    let _ = std::io::stdout().flush();
                }
                Event::Finished(summary) => {
                    let load =
                        summary.timings.load_s.map_or("resident already".to_owned(), |load| format!("loaded in {load:.1} s"));
                    println!("\n   ({} new tokens, {load})", summary.completion_tokens);
                }
                Event::ToolCall(_) | Event::RejectedCall(_) => {}
            }
        }
        Ok(())
    }

    /// Reads events until a model has gone for being idle.
    fn until_idle(&mut self) {
        while let Some(received) = block_on(self.events.next()) {
            let idle = matches!(&received, Received::Event(PoolEvent::Unloaded { reason: UnloadReason::Idle, .. }));
            tell(&received);
            if idle {
                return;
            }
        }
    }

    /// What happened since the last table, and who is resident now.
    fn table(&mut self) {
        while let Some(received) = self.events.try_next() {
            tell(&received);
        }
        let status = self.engine.pool().status();
        println!(
            "   pool: {} of {} used; this process holds {} of memory",
            mb(status.used_bytes),
            mb(status.budget_bytes),
            resident_memory().map_or("an unknown amount".to_owned(), mb)
        );
        for entry in &status.entries {
            println!("         {:<9} {:<32} {:>9}  {:?}", entry.kind, short(&entry.id), mb(entry.bytes), entry.state);
        }
    }
}

/// A line for the events that a person would ask about.
fn tell(received: &Received) {
    match received {
        Received::Event(PoolEvent::Waiting { key, bytes, .. }) => {
            println!("   pool: {} had to wait: {} are not free while others are in use", short(key.id()), mb(*bytes));
        }
        Received::Event(PoolEvent::Unloaded { key, reason, bytes, .. }) => {
            println!("   pool: {} went ({reason:?}), {} off the account", short(key.id()), mb(*bytes));
        }
        _ => {}
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
fn resident_memory() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    statm.split(' ').nth(1)?.parse::<u64>().ok().map(|pages| pages * 4096)
}
