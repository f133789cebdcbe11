//! The golden models of tests/golden through the MLX backend: numbers against transformers and sentence-transformers.
//! Tolerances come from the manifest and are never widened here.

#![allow(clippy::cast_possible_truncation)] // numbers of small fixtures

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use safetensors::SafeTensors;
use serde_json::Value;

use super::backend::{Advance, Chooser, Slot, TokenBatch};
use super::thread::DeviceThread;
use crate::error::Result;
use crate::model::{LoadOptions, ModelSpec};
use crate::weights::FloatType;

/// MLX belongs to one thread, in tests too.
fn device() -> &'static DeviceThread {
    static DEVICE: OnceLock<DeviceThread> = OnceLock::new();
    DEVICE.get_or_init(|| DeviceThread::mlx().unwrap())
}

fn run<T: Send + 'static>(job: impl FnOnce(&mut dyn super::backend::Backend) -> Result<T> + Send + 'static) -> Result<T> {
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

fn load(spec: ModelSpec) -> Result<Slot> {
    let spec = Arc::new(spec);
    run(move |backend| backend.load(&spec, &mut |_| Ok(()))).map(|loaded| loaded.slot)
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

fn greedy(slot: Slot, prompt: Vec<u32>, count: usize) -> Vec<u32> {
    run(move |backend| {
        let row = backend.begin(slot, prompt)?;
        let mut tokens = Vec::new();
        while tokens.len() < count {
            let mut chooser = Greedy { left: count - tokens.len() };
            if let Advance::Token(token) = backend.advance(row, &mut chooser)? {
                tokens.push(token);
            }
        }
        backend.end(row);
        Ok(tokens)
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
    let (all, from) = ([prompt.clone(), completion].concat(), prompt.len());
    let found = run(move |backend| backend.score(slot, &all, from, &mut || Ok(()))).unwrap();
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
            let slot = load(spec).unwrap_or_else(|error| panic!("{}: {}", case.name, error.full_message()));
            check_decoder(&case, slot, if dequantize { "dense" } else { "quantised" });
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
