//! The golden models of tests/golden through the MLX backend: numbers against transformers and sentence-transformers.
//! Tolerances come from the manifest and are never widened here.

#![allow(clippy::cast_possible_truncation)] // numbers of small fixtures

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use safetensors::SafeTensors;
use serde_json::Value;

use super::backend::{Backend, Chooser, Prefill, Row, SCORE_CHUNK, Slot, Stepping, Tenant, TokenBatch};
use super::thread::{Bench, DeviceThread};
use crate::error::Result;
use crate::model::{LoadOptions, ModelSpec};
use crate::weights::FloatType;

/// MLX belongs to one thread, in tests too.
fn device() -> &'static DeviceThread {
    static DEVICE: OnceLock<DeviceThread> = OnceLock::new();
    DEVICE.get_or_init(|| DeviceThread::mlx().unwrap())
}

fn run<T: Send + 'static>(job: impl FnOnce(&mut Bench<'_>) -> Result<T> + Send + 'static) -> Result<T> {
    pollster::block_on(device().call("a test", job))
}

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

struct Case {
    name: String,
    path: String,
    expected: Value,
    arrays: Vec<u8>,
    unsupported: Option<String>,
}

impl Case {
    fn array(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let file = SafeTensors::deserialize(&self.arrays).unwrap();
        let tensor = file.tensor(name).unwrap();
        (tensor.shape().to_vec(), tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }
}

fn manifest() -> Value {
    serde_json::from_slice(&std::fs::read(golden().join("manifest.json")).unwrap()).unwrap()
}

fn tolerance(name: &str) -> f32 {
    manifest()["tolerance"][name].as_f64().unwrap() as f32
}

fn cases(kind: &str) -> Vec<Case> {
    let list = manifest()["cases"].as_array().unwrap().clone();
    let cases: Vec<Case> = list
        .iter()
        .filter(|case| case["kind"] == kind)
        .map(|case| Case {
            name: case["name"].as_str().unwrap().to_owned(),
            path: golden().join(case["path"].as_str().unwrap()).display().to_string(),
            expected: serde_json::from_slice(&std::fs::read(golden().join(case["expected"].as_str().unwrap())).unwrap()).unwrap(),
            arrays: std::fs::read(golden().join(case["arrays"].as_str().unwrap())).unwrap(),
            unsupported: case["unsupported"].as_str().map(str::to_owned),
        })
        .collect();
    assert!(!cases.is_empty(), "the manifest lists no {kind}");
    cases
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

const TENANT: Tenant = Tenant { id: 0, capacity: 8, prompt_cache: 64 << 20, drain: true };

fn load(spec: ModelSpec) -> Result<Slot> {
    let spec = Arc::new(spec);
    run(move |backend| backend.load(&spec, &TENANT, &mut |_| Ok(()))).map(|loaded| loaded.slot)
}

fn unload(slot: Slot) {
    run(move |backend| {
        backend.unload(slot);
        backend.drain()
    })
    .unwrap();
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

struct Greedy {
    left: usize,
}

impl Chooser for Greedy {
    fn is_greedy(&self) -> bool {
        true
    }
    fn is_last(&self) -> bool {
        self.left == 1
    }
    fn choose(&mut self, _: &[f32]) -> Result<u32> {
        unreachable!("greedy rows choose on the device")
    }
}

/// A row and the tokens it has given.
struct Running {
    row: Row,
    tokens: Vec<u32>,
    wanted: usize,
}

/// Feeds a prompt by chunks and takes the first token.
fn start(
    backend: &mut dyn Backend,
    slot: Slot,
    prompt: &[u32],
    wanted: usize,
    chunk: usize,
    reuse: bool,
) -> Result<(Running, usize)> {
    let (row, cached) = backend.begin(slot, prompt.to_vec(), reuse)?;
    let mut running = Running { row, tokens: Vec::new(), wanted };
    feed(backend, &mut running, chunk)?;
    Ok((running, cached))
}

/// Feeds what a row has to feed and takes the next token.
fn feed(backend: &mut dyn Backend, running: &mut Running, chunk: usize) -> Result<()> {
    loop {
        let left = running.wanted - running.tokens.len();
        if let Prefill::Token(token) = backend.prefill(running.row, chunk, &mut Greedy { left })? {
            running.tokens.push(token);
            return Ok(());
        }
    }
}

/// One step of the rows that want more tokens.
fn step(backend: &mut dyn Backend, slot: Slot, rows: &mut [&mut Running]) -> Result<()> {
    let mut choosers: Vec<Greedy> = rows.iter().map(|row| Greedy { left: row.wanted - row.tokens.len() }).collect();
    let mut stepping: Vec<Stepping<'_>> =
        rows.iter().zip(&mut choosers).map(|(row, chooser)| Stepping { row: row.row, chooser, token: None }).collect();
    backend.decode(slot, &mut stepping)?;
    let tokens: Vec<_> = stepping.into_iter().map(|step| step.token).collect();
    for (row, token) in rows.iter_mut().zip(tokens) {
        row.tokens.extend(token.transpose()?);
    }
    Ok(())
}

fn solo(backend: &mut dyn Backend, slot: Slot, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
    let (mut running, _) = start(backend, slot, prompt, count, 512, false)?;
    while running.tokens.len() < count {
        step(backend, slot, &mut [&mut running])?;
    }
    backend.end(running.row, false);
    Ok(running.tokens)
}

fn greedy(slot: Slot, prompt: Vec<u32>, count: usize) -> Vec<u32> {
    run(move |backend| solo(&mut **backend, slot, &prompt, count)).unwrap()
}

/// Rows of many lengths that come and go: each must say what it says alone.
fn check_batch(name: &str, slot: Slot, vocabulary: u32) {
    // Hazards H1 and H4: lengths 1, 7 and 300 among 16 prompts, each with content of its own.
    let lengths = [1, 7, 300, 2, 64, 3, 255, 256, 257, 5, 31, 90, 8, 4, 20, 6];
    let prompt = move |index: usize| -> Vec<u32> {
        let length = lengths[index];
        (0..length).map(|at| (((at * 7 + index * 13 + 3) as u32).wrapping_mul(2_654_435_761) >> 7) % vocabulary).collect()
    };
    let wanted = |index: usize| 3 + index % 7;
    let (together, alone) = run(move |backend| {
        let backend: &mut dyn Backend = &mut **backend;
        let mut rows: Vec<(usize, Running)> = Vec::new();
        let mut done: Vec<(usize, Vec<u32>)> = Vec::new();
        let mut next = 0;
        let mut turn = 0;
        while done.len() < lengths.len() {
            // A row joins every other step, up to eight at once.
            if next < lengths.len() && rows.len() < 8 && turn % 2 == 0 {
                rows.push((next, start(backend, slot, &prompt(next), wanted(next), 100, false)?.0));
                next += 1;
            }
            turn += 1;
            // Now and then the youngest is set back, and computes its tokens again.
            if turn % 4 == 0
                && let Some((_, row)) = rows.last_mut()
            {
                backend.set_back(row.row)?;
                feed(backend, row, 100)?;
            }
            // Now and then one row sits a step out, as one whose reader is slow.
            let skipped = if turn % 5 == 0 { turn / 5 % rows.len().max(1) } else { usize::MAX };
            let mut stepping: Vec<&mut Running> = rows
                .iter_mut()
                .enumerate()
                .filter(|(at, (_, row))| *at != skipped && row.tokens.len() < row.wanted)
                .map(|(_, (_, row))| row)
                .collect();
            if !stepping.is_empty() {
                step(backend, slot, &mut stepping)?;
            }
            let mut at = 0;
            while at < rows.len() {
                if rows[at].1.tokens.len() >= rows[at].1.wanted {
                    let (index, row) = rows.remove(at);
                    backend.end(row.row, false);
                    done.push((index, row.tokens));
                } else {
                    at += 1;
                }
            }
        }
        assert_eq!(backend.cache_bytes(slot).total(), 0, "all rows are gone, and so are their keys and values");
        done.sort();
        let alone: Vec<_> = (0..lengths.len())
            .map(|index| Ok((index, solo(backend, slot, &prompt(index), wanted(index))?)))
            .collect::<Result<_>>()?;
        Ok((done, alone))
    })
    .unwrap();
    assert_eq!(together, alone, "{name}: rows of a batch against each alone");
}

/// A prompt whose beginning is kept says what it says without, and computes only the rest.
fn check_kept_prompt(name: &str, slot: Slot, vocabulary: u32) {
    let prompt: Vec<u32> = (0..90u32).map(|at| (at * 31 + 5) % vocabulary).collect();
    run(move |backend| {
        let backend: &mut dyn Backend = &mut **backend;
        let mut longer = prompt.clone();
        longer.extend([1, 2, 3]);
        let cold = [solo(backend, slot, &prompt, 8)?, solo(backend, slot, &longer, 8)?];
        let (mut first, cached) = start(backend, slot, &prompt, 8, 40, true)?;
        assert_eq!(cached, 0, "nothing was kept yet");
        while first.tokens.len() < 8 {
            step(backend, slot, &mut [&mut first])?;
        }
        assert_eq!(first.tokens, cold[0]);
        backend.end(first.row, true);
        // Hazards H3, H7 and H9; the second use shows that the first wrote into its own copy (spec C10).
        for (prompt, cold, kept) in [(&longer, &cold[1], 90), (&prompt, &cold[0], 89), (&longer, &cold[1], 90)] {
            let (mut warm, cached) = start(backend, slot, prompt, 8, 40, true)?;
            assert_eq!(cached, kept);
            while warm.tokens.len() < 8 {
                step(backend, slot, &mut [&mut warm])?;
            }
            backend.end(warm.row, false);
            assert_eq!(&warm.tokens, cold);
        }
        assert!(backend.cache_bytes(slot).kept > 0);
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{name}: {error}"));
}

/// Log-probabilities of `completion` after `prompt`, in steps.
fn scored(slot: Slot, prompt: Vec<u32>, completion: Vec<u32>) -> Vec<f32> {
    run(move |backend| {
        let (row, _) = backend.begin(slot, prompt.clone(), false)?;
        for ids in prompt[..prompt.len() - 1].chunks(SCORE_CHUNK) {
            backend.extend(row, ids)?;
        }
        let branch = backend.fork(row)?;
        let mut ids = vec![prompt[prompt.len() - 1]];
        ids.extend(&completion);
        let scores = backend.score(branch, &ids)?;
        backend.end(branch, false);
        // The fork left the row as it was.
        let again = backend.fork(row)?;
        assert_eq!(backend.score(again, &ids)?, scores);
        backend.end(again, false);
        backend.end(row, false);
        Ok(scores)
    })
    .unwrap()
}

fn check_decoder(case: &Case, slot: Slot, how: &str) {
    let limit = tolerance("logits");
    for prompt in case.expected["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap().to_owned();
        let (shape, expected) = case.array(&name);
        let prompt = match prompt["unit"].as_array() {
            // Long prompts are written as a piece to repeat.
            Some(_) => ids(&prompt["unit"]).into_iter().cycle().take(prompt["length"].as_u64().unwrap() as usize).collect(),
            None => ids(&prompt["ids"]),
        };
        let from = if shape.len() == 2 { 0 } else { prompt.len() - 1 };
        let found = run(move |backend| backend.logits(slot, &prompt, from)).unwrap().concat();
        let difference = largest_difference(&found, &expected);
        assert!(difference <= limit, "{} ({how}), prompt {name}: logits differ by {difference}, allowed {limit}", case.name);
    }
    let expected = ids(&case.expected["greedy"]["tokens"]);
    let prompts = case.expected["prompts"].as_array().unwrap();
    let prompt = prompts.iter().find(|prompt| prompt["name"] == case.expected["greedy"]["prompt"]).unwrap();
    assert_eq!(greedy(slot, ids(&prompt["ids"]), expected.len()), expected, "{} ({how}): greedy tokens", case.name);

    let score = &case.expected["score"];
    let (prompt, completion) = (ids(&score["prompt_ids"]), ids(&score["completion_ids"]));
    let found = scored(slot, prompt, completion);
    let expected: Vec<f32> = score["logprobs"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
    let difference = largest_difference(&found, &expected);
    assert!(difference <= tolerance("logprobs"), "{} ({how}): scores differ by {difference}", case.name);
}

#[test]
fn decoders_equal_transformers() {
    for case in cases("decoder") {
        for dequantize in [true, false] {
            let options = LoadOptions { float: Some(FloatType::Float32), dequantize: Some(dequantize), ..LoadOptions::default() };
            let spec = ModelSpec::read(&case.path, &options, true);
            if let Some(kind) = &case.unsupported {
                let error = spec.err().unwrap_or_else(|| panic!("{}: must be refused", case.name));
                assert!(
                    error.kind() == crate::ErrorKind::Unsupported && error.message().contains(kind.as_str()),
                    "{}: {error}",
                    case.name
                );
                continue;
            }
            if case.name == "llama-rope-dynamic" {
                assert_eq!(spec.unwrap_err().kind(), crate::ErrorKind::Unsupported);
                continue;
            }
            let spec = spec.unwrap_or_else(|error| panic!("{}: {}", case.name, error.full_message()));
            if !dequantize && spec.quantization.is_none() {
                continue;
            }
            let vocabulary = u32::try_from(spec.vocabulary).unwrap();
            let slot = load(spec).unwrap_or_else(|error| panic!("{}: {}", case.name, error.full_message()));
            check_decoder(&case, slot, if dequantize { "dense" } else { "quantised" });
            check_batch(&case.name, slot, vocabulary);
            check_kept_prompt(&case.name, slot, vocabulary);
            unload(slot);
        }
    }
}

#[test]
fn embedders_equal_sentence_transformers() {
    for case in cases("embedder") {
        let spec =
            ModelSpec::read(&case.path, &LoadOptions::default(), true).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        let normalize = spec.normalizes();
        let slot = load(spec).unwrap_or_else(|error| panic!("{}: {}", case.name, error.full_message()));
        for set in case.expected["sets"].as_array().unwrap() {
            let (shape, expected) = case.array(set["vectors"].as_str().unwrap());
            let batch = TokenBatch { ids: set["input_ids"].as_array().unwrap().iter().map(ids).collect(), types: Vec::new() };
            let mut found = run(move |backend| backend.embed(slot, &batch)).unwrap();
            if normalize {
                found.iter_mut().for_each(|vector| super::embed::normalize(vector));
            }
            for (index, (found, expected)) in found.iter().zip(expected.chunks_exact(shape[1])).enumerate() {
                let difference = largest_difference(found, expected);
                assert!(difference <= tolerance("vectors"), "{}: vector {index} differs by {difference}", case.name);
            }
        }
        unload(slot);
    }
}

#[test]
fn rerankers_equal_transformers() {
    for case in cases("reranker") {
        let spec =
            ModelSpec::read(&case.path, &LoadOptions::default(), true).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        let slot = load(spec).unwrap_or_else(|error| panic!("{}: {}", case.name, error.full_message()));
        let pairs = case.expected["pairs"].as_array().unwrap();
        let batch = TokenBatch {
            ids: pairs.iter().map(|pair| ids(&pair["input_ids"])).collect(),
            types: pairs.iter().map(|pair| ids(&pair["token_type_ids"])).collect(),
        };
        let found = run(move |backend| backend.classify(slot, &batch)).unwrap().concat();
        let difference = largest_difference(&found, &case.array("logits").1);
        assert!(difference <= tolerance("logits"), "{}: logits differ by {difference}", case.name);
        unload(slot);
    }
}
