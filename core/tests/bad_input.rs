//! Damaged, hostile and unusual model files: each gives a typed error that names file and field, or loads; and the engine
//! serves the next request.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use hob::block_on;
use hob::engine::{EmbedRequest, Engine, EngineOptions, GenerateRequest, Prompt};
use hob::model::{LoadOptions, ModelKind};
use hob::{Error, ErrorKind};
use serde_json::{Value, json};
use tempfile::TempDir;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models").join(name)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A copy of a golden model to spoil.
struct Spoiled {
    _dir: TempDir,
    path: PathBuf,
}

impl Spoiled {
    fn new(name: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("model");
        copy(&golden(name), &path);
        Self { _dir: dir, path }
    }

    fn config(self, change: impl FnOnce(&mut Value)) -> Self {
        let file = self.path.join("config.json");
        let mut config = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(file, config.to_string()).unwrap();
        self
    }

    fn weights(self, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        let file = self.path.join("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        change(&mut bytes);
        std::fs::write(file, bytes).unwrap();
        self
    }

    fn remove(self, name: &str) -> Self {
        std::fs::remove_file(self.path.join(name)).unwrap();
        self
    }
}

fn engine() -> Engine {
    Engine::open(EngineOptions::with_budget(4 << 30)).unwrap()
}

fn generate(engine: &Engine, path: &Path) -> Result<(), Error> {
    let mut request = GenerateRequest::raw(path.display().to_string(), "the rain");
    request.max_tokens = Some(2);
    block_on(engine.generate(request)?.collect()).map(drop)
}

/// The load fails with this kind, its message holds these words, and the engine goes on serving.
fn refused(model: &Spoiled, kind: ErrorKind, words: &[&str]) {
    refused_path(&model.path, kind, words);
}

fn refused_path(path: &Path, kind: ErrorKind, words: &[&str]) {
    let engine = engine();
    let error = generate(&engine, path).unwrap_err();
    assert_eq!(error.kind(), kind, "{}", error.full_message());
    for word in words {
        assert!(error.full_message().contains(word), "{word:?} is not in: {}", error.full_message());
    }
    assert_eq!(engine.pool().status().used_bytes, 0, "nothing stays on the account");
    generate(&engine, &golden("llama-tied")).unwrap();
}

#[test]
fn missing_paths_and_empty_folders() {
    refused_path(Path::new("/nowhere/at/all"), ErrorKind::NotFound, &["/nowhere/at/all"]);
    refused_path(Path::new("owner/name"), ErrorKind::NotFound, &["owner/name"]);
    refused_path(Path::new("../../etc/passwd@x"), ErrorKind::NotFound, &[]);
    let empty = TempDir::new().unwrap();
    refused_path(empty.path(), ErrorKind::BadModel, &["config.json"]);
    let file = empty.path().join("weights.bin");
    std::fs::write(&file, "x").unwrap();
    refused_path(&file, ErrorKind::InvalidArgument, &["weights.bin"]);
    assert_eq!(generate(&engine(), Path::new("")).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn directories_that_lack_a_file() {
    refused(&Spoiled::new("llama-tied").remove("config.json"), ErrorKind::BadModel, &["config.json"]);
    refused(&Spoiled::new("llama-tied").remove("model.safetensors"), ErrorKind::BadModel, &["model.safetensors"]);
    refused(&Spoiled::new("llama-tied").remove("tokenizer.json"), ErrorKind::NotFound, &["tokenizer.json"]);
}

#[test]
fn damaged_safetensors() {
    let cut = |keep: usize| move |bytes: &mut Vec<u8>| bytes.truncate(keep);
    for keep in [0, 7, 8, 100] {
        refused(&Spoiled::new("llama-tied").weights(cut(keep)), ErrorKind::BadModel, &["model.safetensors", "header"]);
    }
    refused(
        &Spoiled::new("llama-tied").weights(|bytes| bytes.truncate(bytes.len() - 1)),
        ErrorKind::BadModel,
        &["model.safetensors"],
    );
    for length in [1u64 << 63, u64::MAX, 1 << 40] {
        let spoiled = Spoiled::new("llama-tied").weights(|bytes| bytes[..8].copy_from_slice(&length.to_le_bytes()));
        refused(&spoiled, ErrorKind::BadModel, &["model.safetensors", "header"]);
    }
    refused(&Spoiled::new("llama-tied").weights(|bytes| bytes[8..40].fill(0xff)), ErrorKind::BadModel, &["model.safetensors"]);
    // A name with a NUL would reach MLX as the name before it, with another tensor's shape.
    let twin = Spoiled::new("llama-tied").weights(|bytes| {
        let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let end = bytes.len() - 8 - length;
        let name = "model.embed_tokens.weight\u{0}position_ids";
        header[name] = json!({"dtype": "F32", "shape": [1, 1], "data_offsets": [end, end + 4]});
        let header = header.to_string();
        let mut changed = (header.len() as u64).to_le_bytes().to_vec();
        changed.extend(header.as_bytes());
        changed.extend(&bytes[8 + length..]);
        changed.extend([0; 4]);
        *bytes = changed;
    });
    refused(&twin, ErrorKind::BadModel, &["model.safetensors", "control characters"]);
}

#[test]
fn weights_that_are_not_finite() {
    for value in [f32::NAN, f32::INFINITY] {
        let spoiled = Spoiled::new("llama-tied").weights(|bytes| {
            let end = bytes.len();
            bytes[end - 4..].copy_from_slice(&value.to_le_bytes());
        });
        refused(&spoiled, ErrorKind::BadModel, &["model.safetensors", "not finite"]);
    }
}

#[test]
fn configurations_that_ask_for_what_is_not_there() {
    let with = |key: &'static str, value: Value| Spoiled::new("llama-tied").config(move |config| config[key] = value);
    refused(&with("model_type", json!("mamba9")), ErrorKind::Unsupported, &["mamba9", "llama"]);
    refused(&with("model_type", json!(7)), ErrorKind::BadModel, &["model_type"]);
    refused(&with("hidden_act", json!("relu")), ErrorKind::Unsupported, &["relu"]);
    refused(&with("hidden_size", json!(-3)), ErrorKind::BadModel, &["hidden_size", "-3"]);
    refused(&with("hidden_size", json!(1u64 << 40)), ErrorKind::BadModel, &["hidden_size"]);
    refused(&with("num_attention_heads", json!(0)), ErrorKind::BadModel, &["num_attention_heads"]);
    refused(&with("num_key_value_heads", json!(3)), ErrorKind::BadModel, &["num_key_value_heads", "3"]);
    refused(&with("num_hidden_layers", json!(99)), ErrorKind::BadModel, &["layers", "missing"]);
    refused(&with("num_hidden_layers", json!(1)), ErrorKind::BadModel, &["layers.1", "not part"]);
    refused(&with("vocab_size", json!(1000)), ErrorKind::BadModel, &["embed_tokens", "shape"]);
    refused(&with("rms_norm_eps", json!("tiny")), ErrorKind::BadModel, &["rms_norm_eps"]);
    refused(&with("rope_scaling", json!({"rope_type": "longrope", "factor": 4.0})), ErrorKind::Unsupported, &["longrope", "yarn"]);
    refused(&with("rope_scaling", json!({"rope_type": "llama3", "factor": 4.0})), ErrorKind::BadModel, &["low_freq_factor"]);
    refused(&with("attention_bias", json!(true)), ErrorKind::BadModel, &["bias", "missing"]);
    refused(&with("tie_word_embeddings", json!("maybe")), ErrorKind::BadModel, &["tie_word_embeddings"]);
    let garbage = Spoiled::new("llama-tied");
    std::fs::write(garbage.path.join("config.json"), "{").unwrap();
    refused(&garbage, ErrorKind::BadModel, &["config.json"]);
}

#[test]
fn quantization_that_hob_does_not_know() {
    // Hazard K7.
    let with = |value: Value| {
        Spoiled::new("llama-q4").config(move |config| {
            config.as_object_mut().unwrap().remove("quantization_config");
            config["quantization"] = value;
        })
    };
    refused(&with(json!({"group_size": 64, "bits": 4, "mode": "mxfp4"})), ErrorKind::Unsupported, &["mxfp4", "affine"]);
    refused(&with(json!({"group_size": 64, "bits": 7})), ErrorKind::Unsupported, &["7"]);
    refused(&with(json!({"group_size": 48, "bits": 4})), ErrorKind::Unsupported, &["48"]);
    refused(&with(json!({"group_size": 64, "bits": 8})), ErrorKind::BadModel, &["shape"]);
    refused(&with(json!({"quant_method": "awq", "bits": 4})), ErrorKind::Unsupported, &["awq"]);
    refused(&with(json!(false)), ErrorKind::BadModel, &["quantization"]);
}

#[test]
fn shard_indexes() {
    // Hazard K1: no index, stale index, missing shard, extra shard.
    let engine = engine();
    let index = "model.safetensors.index.json";
    generate(&engine, &Spoiled::new("llama-sharded").remove(index).path).unwrap();

    let stale = Spoiled::new("llama-tied");
    std::fs::write(stale.path.join(index), json!({"weight_map": {"a": "gone.safetensors"}}).to_string()).unwrap();
    generate(&engine, &stale.path).unwrap();

    let shard = std::fs::read_dir(golden("llama-sharded"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .find(|name| name.starts_with("model-"))
        .unwrap();
    refused(&Spoiled::new("llama-sharded").remove(&shard), ErrorKind::BadModel, &[&shard]);
    refused(&Spoiled::new("llama-sharded").remove(index).remove(&shard), ErrorKind::BadModel, &["shards"]);

    let extra = Spoiled::new("llama-sharded");
    std::fs::copy(golden("llama-tied").join("model.safetensors"), extra.path.join("other.safetensors")).unwrap();
    generate(&engine, &extra.path).unwrap();

    let escaping = Spoiled::new("llama-sharded");
    std::fs::write(escaping.path.join(index), json!({"weight_map": {"a": "../model.safetensors"}}).to_string()).unwrap();
    refused(&escaping, ErrorKind::BadModel, &["weight_map", "same directory"]);
}

#[test]
#[cfg(target_os = "linux")]
fn special_files_do_not_hang_or_fill_memory() {
    for name in ["config.json", "model.safetensors"] {
        let spoiled = Spoiled::new("llama-tied").remove(name);
        std::os::unix::fs::symlink("/dev/zero", spoiled.path.join(name)).unwrap();
        refused(&spoiled, ErrorKind::BadModel, &["regular file"]);
    }
}

#[test]
fn dense_modules_must_fit_the_model() {
    let spoiled = Spoiled::new("bert-dense-tanh");
    let file = spoiled.path.join("2_Dense/config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["in_features"] = json!(31);
    std::fs::write(&file, config.to_string()).unwrap();
    let error = engine().inspect(&spoiled.path.display().to_string(), &LoadOptions::default()).unwrap_err();
    assert!(error.kind() == ErrorKind::BadModel && error.message().contains("in_features"), "{error}");
}

#[test]
fn unusual_places_load() {
    // Hazard K10: spaces and Unicode in the path, read-only files, a symlinked Hugging Face cache.
    let dir = TempDir::new().unwrap();
    let odd = dir.path().join("my models").join("模型 ü");
    copy(&golden("llama-tied"), &odd);
    let engine = engine();
    generate(&engine, &odd).unwrap();

    let blobs = dir.path().join("blobs");
    copy(&golden("llama-tied"), &blobs);
    let snapshot = dir.path().join("snapshots/abc");
    std::fs::create_dir_all(&snapshot).unwrap();
    for entry in std::fs::read_dir(&blobs).unwrap() {
        let entry = entry.unwrap();
        let mut rights = entry.metadata().unwrap().permissions();
        rights.set_readonly(true);
        std::fs::set_permissions(entry.path(), rights).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(entry.path(), snapshot.join(entry.file_name())).unwrap();
    }
    #[cfg(unix)]
    generate(&engine, &snapshot).unwrap();
}

#[test]
fn nested_and_flat_configurations_both_load() {
    // Hazard K3.
    let nested = Spoiled::new("llama-tied").config(|config| {
        let inner = config.clone();
        *config =
            json!({"model_type": "some_vision_model", "architectures": ["SomeForConditionalGeneration"], "text_config": inner});
    });
    generate(&engine(), &nested.path).unwrap();
}

#[test]
fn embedders_without_a_pooling_file() {
    // Hazard I12: BERT models differ, so nothing is guessed; stating the pooling is enough.
    let bare = Spoiled::new("bert-mean").remove("modules.json").remove("1_Pooling/config.json");
    let engine = engine();
    let mut request = EmbedRequest::new(bare.path.display().to_string(), ["the rain"]);
    let error = block_on(engine.embed(request.clone())).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("1_Pooling"), "{error}");
    request.options.load.pooling = Some(hob::model::PoolingMode::Mean);
    let stated = block_on(engine.embed(request)).unwrap();
    assert_eq!(stated.pooling, "mean");

    let odd = Spoiled::new("bert-mean");
    std::fs::write(odd.path.join("modules.json"), json!([{"idx": 0, "name": "0", "path": "", "type": "x.Transformer"}, {"idx": 1, "name": "1", "path": "1_WeightedLayer", "type": "x.WeightedLayerPooling"}]).to_string()).unwrap();
    let error = engine.inspect(&odd.path.display().to_string(), &LoadOptions::default()).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("WeightedLayerPooling"), "{error}");
}

#[test]
fn token_ids_outside_the_vocabulary_are_an_error_not_a_crash() {
    let engine = engine();
    let request = GenerateRequest::new(golden("llama-tied").display().to_string(), Prompt::Tokens(vec![1, 9_999]));
    let error = block_on(engine.generate(request).unwrap().collect()).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("9999"), "{error}");
    generate(&engine, &golden("llama-tied")).unwrap();
}

#[test]
fn a_stated_kind_must_be_possible() {
    let engine = engine();
    let stated = |kind| LoadOptions { kind: Some(kind), ..LoadOptions::default() };
    let path = golden("bert-mean").display().to_string();
    assert_eq!(engine.inspect(&path, &stated(ModelKind::Chat)).unwrap_err().kind(), ErrorKind::Unsupported);
    let decoder = golden("qwen3").display().to_string();
    assert_eq!(engine.inspect(&decoder, &stated(ModelKind::Embedder)).unwrap().kind, ModelKind::Embedder);
    assert_eq!(engine.inspect(&decoder, &LoadOptions::default()).unwrap().kind, ModelKind::Chat);
    let gguf = golden("gguf-qwen3.gguf").display().to_string();
    assert_eq!(engine.inspect(&gguf, &stated(ModelKind::Embedder)).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn estimates_equal_what_is_measured() {
    // Hazard A38: within 10 % for weights.
    let engine = engine();
    for name in ["llama-untied", "llama-q4", "llama-mixed", "gguf-llama-q4_1.gguf", "bert-mean", "bert-dense-tanh"] {
        let path = golden(name).display().to_string();
        let info = block_on(engine.load(&path, hob::engine::RequestOptions::default())).unwrap();
        let status = engine.pool().status();
        let entry = status.entries.iter().find(|entry| entry.id == info.id).unwrap();
        let measured = entry.measured_bytes.unwrap() - info.estimate.kv_cache - info.estimate.working;
        #[allow(clippy::cast_precision_loss)]
        let ratio = info.estimate.weights as f64 / measured as f64;
        assert!((0.9..=1.1).contains(&ratio), "{name}: estimated {} and measured {measured}", info.estimate.weights);
    }
}

#[test]
fn a_conversation_over_the_whole_budget_is_refused() {
    // Hazard A19.
    let engine = Engine::open(EngineOptions::with_budget(64 << 20)).unwrap();
    let mut request = GenerateRequest::raw(golden("llama-tied").display().to_string(), "the rain");
    request.max_tokens = Some(1 << 40);
    let error = block_on(engine.generate(request).unwrap().collect()).unwrap_err();
    assert!(error.kind() == ErrorKind::BudgetExceeded && error.message().contains("max_tokens"), "{error}");
}
