//! Parallel requests on the tiny golden models: each gives what it gives alone (hazards H1, H4, I7), and decisions are what
//! independent forwards say (spec M60 to M62).

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::PathBuf;

use hob::block_on;
use hob::chat_template::Message;
use hob::engine::{
    DecideRequest, Decision, EmbedRequest, Engine, EngineOptions, Event, GenerateRequest, Generation, Prompt, RequestOptions,
    ScoreRequest,
};
use hob::model::{FloatType, LoadOptions};
use hob::options::SamplingOptions;
use hob::tokenizer::EncodeOptions;
use serde_json::Value;

fn model(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models").join(name).display().to_string()
}

fn engine() -> Engine {
    Engine::open(EngineOptions::with_budget(8 << 30)).unwrap()
}

fn float32() -> RequestOptions {
    RequestOptions { load: LoadOptions { float: Some(FloatType::Float32), ..LoadOptions::default() }, ..RequestOptions::default() }
}

const WORDS: [&str; 16] = [
    "lamp", "river", "clock", "bread", "ferry", "stone", "cloud", "iron", "paper", "glass", "salt", "wheel", "rope", "moss",
    "candle", "harbour",
];

/// A prompt with a secret word, and of its own length.
fn prompt(n: usize) -> String {
    format!("{}The secret word is {}. Say it.", "One more line of talk. ".repeat(n * 3 % 11), WORDS[n])
}

fn ask(path: &str, n: usize) -> GenerateRequest {
    GenerateRequest {
        max_tokens: Some(12 + n),
        prompt_cache: n.is_multiple_of(2),
        options: float32(),
        ..GenerateRequest::raw(path, prompt(n))
    }
}

/// All at once; each is read on a thread of its own.
fn together(engine: &Engine, requests: Vec<GenerateRequest>) -> Vec<Generation> {
    let streams: Vec<_> = requests.into_iter().map(|request| engine.generate(request).unwrap()).collect();
    let threads: Vec<_> = streams
        .into_iter()
        .map(|mut stream| {
            std::thread::spawn(move || {
                // Hazard E1: whole characters in each chunk is what a String is; nothing may be missing or doubled.
                let mut pieces = String::new();
                let mut ids = Vec::new();
                loop {
                    match block_on(stream.next()).unwrap().unwrap() {
                        Event::Chunk(chunk) => {
                            pieces.push_str(&chunk.text);
                            ids.extend(chunk.token_ids);
                        }
                        Event::Finished(summary) => return (pieces, ids, summary),
                        other => panic!("{other:?}"),
                    }
                }
            })
        })
        .collect();
    let whole = |(text, token_ids, summary)| Generation {
        text,
        token_ids,
        summary,
        reasoning: String::new(),
        tool_calls: Vec::new(),
        rejected_calls: Vec::new(),
        logprobs: Vec::new(),
    };
    threads.into_iter().map(|thread| whole(thread.join().unwrap())).collect()
}

#[test]
fn sixteen_prompts_with_a_secret_word_each_say_what_they_say_alone() {
    for name in ["llama-tied", "qwen3", "llama-q4", "gguf-llama-q8_0.gguf"] {
        let (path, engine) = (model(name), engine());
        let tokenizer = engine.text(&path).unwrap().tokenizer;
        let alone: Vec<_> = (0..16).map(|n| block_on(engine.generate(ask(&path, n)).unwrap().collect()).unwrap()).collect();
        for round in 0..2 {
            let found = together(&engine, (0..16).map(|n| ask(&path, n)).collect());
            for (n, (found, alone)) in found.iter().zip(&alone).enumerate() {
                assert_eq!(found.token_ids, alone.token_ids, "{name}, round {round}, prompt {n}");
                assert_eq!(found.text, alone.text, "{name}, round {round}, prompt {n}");
                assert_eq!(found.summary.finish, alone.summary.finish);
                assert_eq!(found.text, tokenizer.decode(&found.token_ids, true).unwrap(), "{name}, prompt {n}");
            }
        }
        assert_eq!(engine.requests(), 0);
    }
}

#[test]
fn sampled_and_greedy_rows_share_a_batch_and_keep_to_themselves() {
    let (path, engine) = (model("llama-tied"), engine());
    let request = |n: usize| {
        let mut request = GenerateRequest { max_tokens: Some(20), ..ask(&path, n) };
        if n.is_multiple_of(3) {
            request.sampling = SamplingOptions { temperature: 0.8, seed: Some(n as u64), ..SamplingOptions::default() };
        }
        request
    };
    let alone: Vec<_> = (0..8).map(|n| block_on(engine.generate(request(n)).unwrap().collect()).unwrap().token_ids).collect();
    let found = together(&engine, (0..8).map(request).collect());
    for (n, found) in found.into_iter().enumerate() {
        assert_eq!(found.token_ids, alone[n], "prompt {n}");
    }
}

#[test]
fn stop_strings_of_parallel_streams_end_each_where_it_ends_alone() {
    // Hazard E2: the stop string is cut out of what each row says by itself, wherever its tokens part it.
    let (path, engine) = (model("llama-tied"), engine());
    let alone: Vec<_> = (0..16).map(|n| block_on(engine.generate(ask(&path, n)).unwrap().collect()).unwrap().text).collect();
    let stop = |n: usize| {
        let characters: Vec<char> = alone[n].chars().collect();
        let middle = characters.len() / 2;
        characters[middle..(middle + 3).min(characters.len())].iter().collect::<String>()
    };
    let requests = (0..16).map(|n| GenerateRequest { stop: vec![stop(n)], ..ask(&path, n) }).collect();
    for (n, found) in together(&engine, requests).into_iter().enumerate() {
        let end = alone[n].find(&stop(n)).unwrap();
        assert_eq!(found.text, alone[n][..end], "prompt {n}");
        assert_eq!(found.summary.stop_index, Some(0));
    }
}

#[test]
fn a_vector_alone_and_in_a_batch_of_all_lengths_is_the_same() {
    for name in ["bert-mean", "bert-cls", "bert-max", "qwen3-embed"] {
        let (path, engine) = (model(name), engine());
        let texts: Vec<String> = (0..48).map(|n| "the river bends north ".repeat(1 + n * 5 % 13) + &"z".repeat(n % 5)).collect();
        let texts: Vec<String> = texts.into_iter().chain(["a".to_owned()]).collect();
        let request = |texts: Vec<String>| EmbedRequest {
            truncate: hob::options::Truncate::End,
            options: float32(),
            ..EmbedRequest::new(&path, texts)
        };
        // Several callers at once, so that their texts share batches too.
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (engine, request) = (engine.clone(), request(texts.clone()));
                std::thread::spawn(move || block_on(engine.embed(request)).unwrap())
            })
            .collect();
        let together: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for (n, text) in texts.iter().enumerate() {
            let alone = block_on(engine.embed(request(vec![text.clone()]))).unwrap().data;
            for vectors in &together {
                let cosine = cosine(vectors.rows().nth(n).unwrap(), &alone);
                assert!(cosine >= 0.99999, "{name}: text {n} has cosine {cosine}");
            }
        }
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The log-probability of `id` after `before`, from a forward of its own; `None` when it is not among the best hundred.
fn next(engine: &Engine, path: &str, before: Vec<u32>, id: u32) -> Option<f64> {
    let request = GenerateRequest {
        max_tokens: Some(1),
        logprobs: Some(100),
        prompt_cache: false,
        options: float32(),
        ..GenerateRequest::new(path, Prompt::Tokens(before))
    };
    let mut stream = engine.generate(request).unwrap();
    let mut found = None;
    while let Some(event) = block_on(stream.next()) {
        if let Event::Chunk(chunk) = event.unwrap() {
            found = chunk.logprobs.first().and_then(|token| token.top.iter().find(|top| top.0 == id).map(|top| f64::from(top.1)));
        }
    }
    found
}

#[test]
fn a_decision_equals_independent_forwards() {
    let mut compared = 0;
    for name in ["llama-tied", "qwen3", "llama-q4"] {
        let (path, engine) = (model(name), engine());
        let text = engine.text(&path).unwrap();
        let eos = text.tokenizer.eos_id().unwrap();
        let prompt = format!("{} Is it yes or no?", "A long preamble. ".repeat(12));
        let answers = ["yes", "no", "perhaps, but who can say", "y"];
        let request = |answers: &[&str], decision| DecideRequest {
            prompt: Prompt::Raw(prompt.clone()),
            decision,
            options: float32(),
            ..DecideRequest::choice(&path, "", answers.to_vec())
        };
        let decided = block_on(engine.decide(request(&answers, Decision::Choice))).unwrap();
        let prompt_ids = text.tokenizer.encode(&prompt, EncodeOptions { add_special: true, parse_special: true }).unwrap().ids;
        for (answer, found) in answers.iter().zip(&decided.answers) {
            // Alone: its own forward over prompt and answer.
            let alone = block_on(engine.decide(request(&[answer], Decision::Choice))).unwrap();
            let difference = (alone.answers[0].mean_logprob - found.mean_logprob).abs();
            assert!(difference <= 1e-4, "{name}: {answer:?} differs by {difference}");
            // By another path: the answer's tokens by `score`, its end as a token that could have been generated.
            let mut ids = prompt_ids.clone();
            let request = ScoreRequest { options: float32(), ..ScoreRequest::new(&path, Prompt::Tokens(ids.clone()), *answer) };
            let score = block_on(engine.score(request)).unwrap();
            ids.extend(&score.tokens);
            if let Some(end) = next(&engine, &path, ids, eos) {
                let sum = score.logprobs.iter().map(|&logprob| f64::from(logprob)).sum::<f64>() + end;
                let mean = sum / (score.tokens.len() + 1) as f64;
                assert!((mean - found.mean_logprob).abs() <= 1e-4, "{name}: {answer:?}: {mean} and {}", found.mean_logprob);
                compared += 1;
            }
        }
        // M60 and M61 over those means.
        let sum: f64 = decided.answers.iter().map(|answer| answer.mean_logprob.exp()).sum();
        for answer in &decided.answers {
            assert!((answer.p - answer.mean_logprob.exp() / sum).abs() < 1e-9);
        }
        let best = decided.answers.iter().map(|answer| answer.p).fold(0.0, f64::max);
        assert!((decided.confidence.unwrap() - ((best - 0.25) / 0.75).clamp(0.0, 1.0)).abs() < 1e-9);
        let levels = block_on(engine.decide(request(&answers, Decision::Score))).unwrap();
        let p: Vec<f64> = levels.answers.iter().map(|answer| answer.p).collect();
        let value: f64 = (0..4).map(|i| i as f64 * p[i]).sum();
        let likeliest = levels.best() as f64;
        let spread: f64 = (0..4).map(|i| p[i] * (i as f64 - likeliest).abs()).sum();
        assert!((levels.value.unwrap() - value).abs() < 1e-9);
        // Four levels lie 1.5, 0.5, 0.5 and 1.5 from their middle: 1 on average.
        assert!((levels.confidence.unwrap() - (1.0 - spread).max(0.0)).abs() < 1e-9);
    }
    assert!(compared >= 3, "only {compared} answers were compared by another path");
}

#[test]
fn decisions_are_those_of_transformers() {
    // Made by tests/golden/make_decide.py.
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/expected/decide.json");
    let expected: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    let answers: Vec<String> = expected["answers"].as_array().unwrap().iter().map(|x| x.as_str().unwrap().to_owned()).collect();
    let engine = engine();
    for case in expected["cases"].as_array().unwrap() {
        let name = case["model"].as_str().unwrap();
        let path = model(name);
        for way in ["raw", "chat"] {
            let case = &case[way];
            let prompt = match way {
                "raw" => Prompt::Raw(case["prompt"].as_str().unwrap().to_owned()),
                _ => Prompt::Chat(Message::list_from_json(&case["messages"].to_string()).unwrap()),
            };
            let tokens = case["prompt_ids"].as_array().unwrap().len();
            let all: usize = case["answer_ids"].as_array().unwrap().iter().map(|ids| ids.as_array().unwrap().len()).sum();
            for decision in [Decision::Choice, Decision::Score] {
                let request = DecideRequest {
                    prompt: prompt.clone(),
                    decision,
                    options: float32(),
                    ..DecideRequest::choice(&path, "", answers.clone())
                };
                let decided = block_on(engine.decide(request)).unwrap();
                assert_eq!(decided.prompt_tokens, tokens + all, "{name} {way}");
                for (found, mean) in decided.answers.iter().zip(numbers(&case["means"])) {
                    let difference = (found.mean_logprob - mean).abs();
                    assert!(difference <= 1e-4, "{name} {way}: answer {} differs by {difference}", found.index);
                }
                for (found, p) in decided.answers.iter().zip(numbers(&case["p"])) {
                    assert!((found.p - p).abs() <= 1e-4, "{name} {way}");
                }
                let weighed = &case[if decision == Decision::Choice { "choice" } else { "score" }];
                assert!((decided.confidence.unwrap() - weighed["confidence"].as_f64().unwrap()).abs() <= 2e-4, "{name} {way}");
                if let Some(value) = decided.value {
                    assert!((value - weighed["value"].as_f64().unwrap()).abs() <= 2e-4, "{name} {way}");
                }
            }
        }
    }
}
