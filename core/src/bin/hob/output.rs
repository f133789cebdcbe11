//! What the tool prints: stable JSON shapes, and text for people.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hob::engine::{Decided, Embeddings, Engine, Generation, ModelInfo, Ranking, Score, ScoreKind, Summary};
use hob::pool::{PoolEvent, Received};
use hob::{Error, block_on};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use serde_json::{Value, json};

pub(crate) fn error(error: &Error) -> Value {
    json!({ "error": { "kind": error.kind().name(), "code": error.kind().code(), "message": error.full_message() } })
}

pub(crate) fn generation(answer: &Generation) -> Value {
    let summary = &answer.summary;
    let logprobs: Vec<Value> = answer
        .token_ids
        .iter()
        .zip(&answer.logprobs)
        .map(|(id, token)| json!({ "id": id, "logprob": token.logprob, "top": token.top }))
        .collect();
    json!({
        "text": answer.text,
        "token_ids": answer.token_ids,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "completion_tokens": summary.completion_tokens,
        "dropped_tokens": summary.dropped_tokens,
        "finish": summary.finish,
        "stop_index": summary.stop_index,
        "seed": summary.seed,
        "logprobs": if answer.logprobs.is_empty() { Value::Null } else { Value::Array(logprobs) },
        "timings": summary.timings,
    })
}

pub(crate) fn summary_text(summary: &Summary) -> String {
    let timings = &summary.timings;
    #[allow(clippy::cast_precision_loss)] // rates for people
    let rate = |count: usize, seconds: Option<f64>| seconds.filter(|s| *s > 0.0).map(|s| count as f64 / s);
    let mut text = format!("[{} prompt + {} new tokens", summary.prompt_tokens, summary.completion_tokens);
    if let Some(load) = timings.load_s {
        let _ = write!(text, ", load {load:.2} s");
    }
    if let Some(rate) = rate(summary.prompt_tokens, timings.prefill_s) {
        let _ = write!(text, ", prefill {rate:.1} tok/s");
    }
    if let Some(rate) = rate(summary.completion_tokens.saturating_sub(1), timings.decode_s) {
        let _ = write!(text, ", decode {rate:.1} tok/s");
    }
    if let Some(seed) = summary.seed {
        let _ = write!(text, ", seed {seed}");
    }
    let _ = write!(text, ", finish {}]", json!(summary.finish).as_str().unwrap_or_default());
    text
}

pub(crate) fn decided(decided: &Decided) -> Value {
    json!({ "answers": decided.answers, "confidence": decided.confidence, "value": decided.value })
}

pub(crate) fn decided_text(decided: &Decided, answers: &[String]) -> String {
    let mut text = String::new();
    for answer in &decided.answers {
        let said = answers.get(answer.index).map_or("", String::as_str);
        let _ = writeln!(text, "{:>8.4}  {:>9.4}  {said}", answer.p, answer.mean_logprob);
    }
    match (decided.confidence, decided.value) {
        (Some(confidence), Some(value)) => _ = write!(text, "level {value:.2}, confidence {confidence:.2}"),
        (Some(confidence), None) => _ = write!(text, "confidence {confidence:.2}"),
        _ => {}
    }
    text
}

pub(crate) fn score(score: &Score) -> Value {
    json!(score)
}

pub(crate) fn score_text(score: &Score) -> String {
    let mut text = String::new();
    for (token, logprob) in score.tokens.iter().zip(&score.logprobs) {
        let _ = writeln!(text, "{token:>8}  {logprob:.4}");
    }
    let _ = write!(text, "mean negative log-likelihood {:.4}", score.mean_nll);
    text
}

pub(crate) fn embeddings(embeddings: &Embeddings) -> Value {
    let data: Vec<Value> = embeddings.rows().enumerate().map(|(index, row)| json!({ "index": index, "embedding": row })).collect();
    json!({
        "data": data,
        "dimensions": embeddings.dimensions,
        "pooling": embeddings.pooling,
        "usage": { "prompt_tokens": embeddings.prompt_tokens, "dropped_tokens": embeddings.dropped_tokens },
        "timings": embeddings.timings,
    })
}

pub(crate) fn embeddings_text(embeddings: &Embeddings) -> String {
    let mut text = String::new();
    for (index, row) in embeddings.rows().enumerate() {
        let head: Vec<String> = row.iter().take(6).map(|x| format!("{x:+.4}")).collect();
        let _ = writeln!(text, "{index:>4}  {}{}", head.join(" "), if row.len() > 6 { " …" } else { "" });
    }
    let _ =
        write!(text, "{} dimensions, {} pooling, {} tokens", embeddings.dimensions, embeddings.pooling, embeddings.prompt_tokens);
    text
}

pub(crate) fn ranking(ranking: &Ranking) -> Value {
    json!({
        "results": ranking.results,
        "score_kind": ranking.score_kind,
        "usage": { "prompt_tokens": ranking.prompt_tokens, "dropped_tokens": ranking.dropped_tokens },
        "timings": ranking.timings,
    })
}

pub(crate) fn ranking_text(ranking: &Ranking, documents: &[String]) -> String {
    let mut text = String::new();
    for ranked in &ranking.results {
        let document = documents.get(ranked.index).map_or("", String::as_str);
        let _ = writeln!(text, "{:>8.4}  {:>3}  {document}", ranked.score, ranked.index);
    }
    let kind = match ranking.score_kind {
        ScoreKind::Normalized => "probabilities, 0 to 1",
        ScoreKind::Cosine => "cosines of embeddings, -1 to 1",
    };
    let _ = write!(text, "scores are {kind}");
    text
}

pub(crate) fn inspect(info: &ModelInfo) -> Value {
    json!(info)
}

pub(crate) fn inspect_text(info: &ModelInfo) -> String {
    let mut text = format!("{}\n", info.id);
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<14}{value}");
    };
    line("kind", info.kind.name().to_owned());
    line("family", info.family.clone());
    line("quantization", info.quantization.clone().unwrap_or_else(|| "none".to_owned()));
    let float = info.float.map_or_else(|| "unknown".to_owned(), |float| json!(float).as_str().unwrap_or_default().to_owned());
    line(
        "computes in",
        if info.dequantized { format!("{float}, expanded at load (no fast quantised kernels on this device)") } else { float },
    );
    line("context", format!("{} tokens", info.context));
    if info.kind != hob::model::ModelKind::Chat {
        line("max input", format!("{} tokens", info.max_input));
    }
    line("verbs", info.capabilities.join(", "));
    if let Some(pooling) = &info.pooling {
        line("pooling", pooling.clone());
    }
    if !info.prompts.is_empty() {
        line("prompts", info.prompts.join(", "));
    }
    line("weights", HumanBytes(info.estimate.weights).to_string());
    line("kv cache", HumanBytes(info.estimate.kv_cache).to_string());
    line("working set", HumanBytes(info.estimate.working).to_string());
    line("estimate", HumanBytes(info.estimate_total).to_string());
    text
}

/// Platform, device, budget and what is missing.
pub(crate) fn doctor(engine: &Engine) -> Value {
    let mut missing = Vec::new();
    if cfg!(target_os = "linux") && engine.device().kind == "cpu" && !uses_openblas() {
        missing.push(json!({
            "what": "OpenBLAS",
            "costs": "matrix products run on reference BLAS, many times slower",
            "get": "apt-get install libopenblas0, then cargo xtask setup",
        }));
    }
    json!({
        "hob": env!("CARGO_PKG_VERSION"),
        "platform": format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH),
        "cores": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
        "device": engine.device(),
        "budget_bytes": engine.pool().budget(),
        "missing": missing,
    })
}

/// Whether MLX's BLAS in this process is OpenBLAS.
fn uses_openblas() -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("openblas"))
}

pub(crate) fn doctor_text(report: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let device = &report["device"];
    let mut text = format!(
        "hob {} on {}, {} cores\ndevice   {} ({}), MLX {}\nbudget   {}\n",
        word(&report["hob"]),
        word(&report["platform"]),
        report["cores"],
        word(&device["kind"]),
        word(&device["name"]),
        word(&device["version"]),
        HumanBytes(report["budget_bytes"].as_u64().unwrap_or(0)),
    );
    match report["missing"].as_array() {
        Some(missing) if !missing.is_empty() => {
            for one in missing {
                let _ =
                    writeln!(text, "missing  {}: {}. To get it: {}", word(&one["what"]), word(&one["costs"]), word(&one["get"]));
            }
        }
        _ => text.push_str("missing  nothing\n"),
    }
    text
}

/// A progress bar on standard error while a model loads; nothing with `--json`.
pub(crate) struct LoadBar {
    bar: ProgressBar,
    done: Arc<AtomicBool>,
}

impl LoadBar {
    pub(crate) fn watch(engine: &Engine, silent: bool) -> Self {
        let bar = if silent { ProgressBar::hidden() } else { ProgressBar::new(100) };
        if let Ok(style) = ProgressStyle::with_template("loading [{bar:40}] {percent}%") {
            bar.set_style(style);
        }
        let done = Arc::new(AtomicBool::new(false));
        let (shown, ended) = (bar.clone(), Arc::clone(&done));
        let mut events = engine.pool().events(256);
        // The events end with the pool, and with them this thread.
        std::thread::spawn(move || {
            while let Some(received) = block_on(events.next()) {
                match received {
                    Received::Event(PoolEvent::LoadProgress { percent, .. }) if !ended.load(Ordering::Relaxed) => {
                        shown.set_position(u64::from(percent));
                    }
                    Received::Event(PoolEvent::Loaded { .. } | PoolEvent::LoadFailed { .. }) => shown.finish_and_clear(),
                    _ => {}
                }
            }
        });
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, done }
    }

    pub(crate) fn clear(&self) {
        if !self.done.swap(true, Ordering::Relaxed) {
            self.bar.finish_and_clear();
        }
    }
}

impl Drop for LoadBar {
    fn drop(&mut self) {
        self.clear();
    }
}
