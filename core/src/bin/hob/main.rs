//! `hob`: one verb, one model, one answer. Exit codes: 0 done, 1 error, 2 wrong usage.

mod args;
mod output;

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;

use args::{Cli, Common, Verb};
use clap::Parser;
use hob::chat_output::ChatFormat;
use hob::chat_template::{Message, RenderOptions};
use hob::engine::{
    DecideRequest, Decision, EmbedRequest, Engine, EngineOptions, Event, GenerateRequest, Normalize, Prompt, RequestOptions,
    RerankRequest, ScoreRequest,
};
use hob::model::{FloatType, LoadOptions, PoolingMode};
use hob::options::{SamplingOptions, Truncate};
use hob::tokenizer::EncodeOptions;
use hob::{Error, ErrorKind, Result, block_on};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = match &cli.verb {
        Verb::Generate(args) => args.common.json,
        Verb::Score(args) => args.common.json,
        Verb::Decide(args) => args.common.json,
        Verb::Embed(args) => args.common.json,
        Verb::Rerank(args) => args.common.json,
        Verb::Tokenize(args) => args.common.json,
        Verb::Render(args) => args.common.json,
        Verb::Inspect(args) => args.common.json,
        Verb::Doctor(args) => args.json,
    };
    match run(cli.verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if json {
                let _ = writeln!(std::io::stdout(), "{}", output::error(&error));
            } else {
                let _ = writeln!(std::io::stderr(), "hob: {}: {}", error.kind(), error.full_message());
            }
            ExitCode::from(1)
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    match verb {
        Verb::Generate(args) => generate(args),
        Verb::Score(args) => score(args),
        Verb::Decide(args) => decide(args),
        Verb::Embed(args) => embed(args),
        Verb::Rerank(args) => rerank(args),
        Verb::Tokenize(args) => tokenize(&args),
        Verb::Render(args) => render(&args),
        Verb::Inspect(args) => {
            let info = open()?.inspect(&args.common.model, &load_options(&args.common))?;
            print(args.common.json, &output::inspect(&info), || output::inspect_text(&info))
        }
        Verb::Doctor(args) => {
            let engine = open()?;
            let report = output::doctor(&engine);
            print(args.json, &report, || output::doctor_text(&report))
        }
    }
}

fn open() -> Result<Engine> {
    Engine::open(EngineOptions::default())
}

fn load_options(common: &Common) -> LoadOptions {
    LoadOptions {
        float: common.float.map(|float| match float {
            args::Float::Float32 => FloatType::Float32,
            args::Float::Float16 => FloatType::Float16,
            args::Float::Bfloat16 => FloatType::BFloat16,
        }),
        dequantize: common.dequantize.map(|choice| matches!(choice, args::YesNo::Yes)),
        ..LoadOptions::default()
    }
}

fn request_options(common: &Common) -> RequestOptions {
    RequestOptions { load: load_options(common), ..RequestOptions::default() }
}

/// One JSON object, or text for people.
fn print(json: bool, value: &serde_json::Value, text: impl FnOnce() -> String) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = if json { writeln!(out, "{value}") } else { writeln!(out, "{}", text().trim_end()) };
    written.and_then(|()| out.flush()).map_err(|error| Error::new(ErrorKind::Io, "cannot write the result").with_source(error))
}

fn read_messages(file: &Path) -> Result<Vec<Message>> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let kind = if error.kind() == std::io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Io };
        Error::new(kind, format!("cannot read {}", file.display())).with_source(error)
    })?;
    Message::list_from_json(&text)
}

/// The arguments, or one per non-empty line of standard input.
fn lines_or(given: Vec<String>) -> Result<Vec<String>> {
    if !given.is_empty() {
        return Ok(given);
    }
    let failed = |error| Error::new(ErrorKind::Io, "cannot read standard input").with_source(error);
    let lines: std::io::Result<Vec<String>> = std::io::stdin().lock().lines().collect();
    Ok(lines.map_err(failed)?.into_iter().filter(|line| !line.trim().is_empty()).collect())
}

/// A conversation of one message, or the text as it is.
fn prompt_of(prompt: String, raw: bool) -> Prompt {
    if raw { Prompt::Raw(prompt) } else { Prompt::Chat(vec![Message::user(prompt)]) }
}

fn generate(args: args::Generate) -> Result<()> {
    let prompt = match (args.source.prompt, &args.source.messages) {
        (Some(prompt), _) => prompt_of(prompt, args.raw),
        (None, Some(file)) => Prompt::Chat(read_messages(file)?),
        (None, None) => return Err(Error::new(ErrorKind::InvalidArgument, "give --prompt or --messages")),
    };
    let mut request = GenerateRequest::new(&args.common.model, prompt);
    // A reference gives the text whole, reasoning and all.
    request.format = Some(ChatFormat::default());
    request.max_tokens = args.max_tokens;
    request.sampling = SamplingOptions {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
        ..SamplingOptions::default()
    };
    request.stop = args.stop;
    request.logprobs = args.logprobs;
    request.truncate = match args.truncate {
        args::Cut::Error => Truncate::Error,
        args::Cut::End => Truncate::End,
        args::Cut::Start => Truncate::Start,
    };
    request.options = request_options(&args.common);
    let engine = open()?;
    let bar = output::LoadBar::watch(&engine, args.common.json);
    let mut stream = engine.generate(request)?;
    if args.common.json {
        let answer = block_on(stream.collect())?;
        return print(true, &output::generation(&answer), String::new);
    }
    let mut out = std::io::stdout().lock();
    let failed = |error| Error::new(ErrorKind::Io, "cannot write the answer").with_source(error);
    while let Some(event) = block_on(stream.next()) {
        match event? {
            Event::Chunk(chunk) => {
                bar.clear();
                out.write_all(chunk.text.as_bytes()).and_then(|()| out.flush()).map_err(failed)?;
            }
            // Nothing is looked for in the text: it is shown as the model wrote it.
            Event::ToolCall(_) | Event::RejectedCall(_) => {}
            Event::Finished(summary) => {
                bar.clear();
                writeln!(out).map_err(failed)?;
                let _ = writeln!(std::io::stderr(), "{}", output::summary_text(&summary));
            }
        }
    }
    Ok(())
}

fn score(args: args::Score) -> Result<()> {
    let mut request = ScoreRequest::new(&args.common.model, prompt_of(args.prompt, args.raw), args.completion);
    request.options = request_options(&args.common);
    let engine = open()?;
    let _bar = output::LoadBar::watch(&engine, args.common.json);
    let score = block_on(engine.score(request))?;
    print(args.common.json, &output::score(&score), || output::score_text(&score))
}

fn decide(args: args::Decide) -> Result<()> {
    let answers = args.answer.clone();
    let request = DecideRequest {
        prompt: prompt_of(args.prompt, args.raw),
        decision: match args.kind {
            args::Kind::Choice => Decision::Choice,
            args::Kind::Score => Decision::Score,
            args::Kind::Predicate => Decision::Predicate,
        },
        options: request_options(&args.common),
        ..DecideRequest::choice(&args.common.model, "", args.answer)
    };
    let engine = open()?;
    let _bar = output::LoadBar::watch(&engine, args.common.json);
    let decided = block_on(engine.decide(request))?;
    print(args.common.json, &output::decided(&decided), || output::decided_text(&decided, &answers))
}

fn embed(args: args::Embed) -> Result<()> {
    let mut request = EmbedRequest::new(&args.common.model, lines_or(args.text)?);
    request.prompt_name = args.prompt_name;
    request.dimensions = args.dimensions;
    request.normalize = match args.normalize {
        args::Scale::Auto => Normalize::Auto,
        args::Scale::Yes => Normalize::Yes,
        args::Scale::No => Normalize::No,
    };
    request.truncate = end_cut(args.truncate);
    request.options = request_options(&args.common);
    request.options.load.pooling = args.pooling.map(|pooling| match pooling {
        args::Pool::Cls => PoolingMode::Cls,
        args::Pool::Max => PoolingMode::Max,
        args::Pool::Mean => PoolingMode::Mean,
        args::Pool::Lasttoken => PoolingMode::LastToken,
    });
    let engine = open()?;
    let _bar = output::LoadBar::watch(&engine, args.common.json);
    let embeddings = block_on(engine.embed(request))?;
    print(args.common.json, &output::embeddings(&embeddings), || output::embeddings_text(&embeddings))
}

fn end_cut(cut: args::EndCut) -> Truncate {
    match cut {
        args::EndCut::Error => Truncate::Error,
        args::EndCut::End => Truncate::End,
    }
}

fn rerank(args: args::Rerank) -> Result<()> {
    let documents = lines_or(args.document)?;
    let mut request = RerankRequest::new(&args.common.model, args.query, documents.clone());
    request.instruct = args.instruct;
    request.top_n = args.top;
    request.unsorted = args.unsorted;
    request.truncate = end_cut(args.truncate);
    request.options = request_options(&args.common);
    let engine = open()?;
    let _bar = output::LoadBar::watch(&engine, args.common.json);
    let ranking = block_on(engine.rerank(request))?;
    print(args.common.json, &output::ranking(&ranking), || output::ranking_text(&ranking, &documents))
}

fn tokenize(args: &args::Tokenize) -> Result<()> {
    let text = open()?.text(&args.common.model)?;
    let options = EncodeOptions { add_special: args.special, parse_special: args.special };
    let ids = text.tokenizer.encode(&args.text, options)?.ids;
    let tokens: Vec<String> = ids.iter().map(|&id| text.tokenizer.id_to_token(id).unwrap_or_default()).collect();
    print(args.common.json, &serde_json::json!({ "ids": ids, "tokens": tokens }), || {
        ids.iter().zip(&tokens).map(|(id, token)| format!("{id:>8}  {token}\n")).collect()
    })
}

fn render(args: &args::Render) -> Result<()> {
    let messages = read_messages(&args.messages)?;
    let text = open()?.text(&args.common.model)?;
    let options = RenderOptions { add_generation_prompt: !args.no_generation_prompt, ..RenderOptions::default() };
    let Some(template) = &text.template else {
        return Err(Error::new(ErrorKind::Unsupported, "the model has no chat template"));
    };
    let rendered = template.render(&messages, &options)?;
    print(args.common.json, &serde_json::json!({ "text": rendered }), || rendered.clone())
}
