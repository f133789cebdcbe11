//! A tokenizer from the files of a Hugging Face or MLX directory.

use std::path::Path;

use serde_json::Value;
use tokenizers::{AddedToken, ModelWrapper};

use super::{END_OF_TURN, Parts, Roles, bad, bos_eos_processor};
use crate::chat_template;
use crate::error::{Error, ErrorKind, Result};
use crate::model::config::read_capped;

/// Largest `tokenizer.json` that is read (the largest real ones are some 35 MB).
const MAX_TOKENIZER: u64 = 256 << 20;
/// Largest configuration file that is read.
const MAX_CONFIG: u64 = 16 << 20;

/// Reads a text file of at most `limit` bytes.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<String> {
    String::from_utf8(read_capped(path, limit)?).map_err(|_| Error::bad_model(path, "file", "not valid UTF-8"))
}

/// Reads a JSON object of at most `limit` bytes; `None` when the file does not exist.
pub(crate) fn read_json(path: &Path) -> Result<Option<serde_json::Map<String, Value>>> {
    let text = match read_text(path, MAX_CONFIG) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match serde_json::from_str(text.trim_start_matches('\u{feff}')) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(_) => Err(Error::bad_model(path, "file", "not a JSON object")),
        Err(error) => {
            let place = format!("malformed JSON at line {} column {}", error.line(), error.column());
            Err(Error::bad_model(path, "file", place).with_source(error))
        }
    }
}

type Json = serde_json::Map<String, Value>;

struct Files<'a> {
    dir: &'a Path,
    config: Json,
    tokenizer_config: Json,
    special_tokens_map: Json,
    generation_config: Json,
}

/// A token given as a string or as `{"content": …}`.
fn token_text<'a>(value: &'a Value, file: &Path, field: &str) -> Result<Option<&'a str>> {
    match value {
        Value::Null | Value::Bool(false) => Ok(None),
        Value::String(text) => Ok(Some(text)),
        Value::Object(token) => match token.get("content") {
            Some(Value::String(text)) => Ok(Some(text)),
            _ => Err(Error::bad_model(file, field, "a token without text content")),
        },
        _ => Err(Error::bad_model(file, field, "neither a string nor a token")),
    }
}

impl Files<'_> {
    /// The text of `eos_token` and the like: `tokenizer_config.json` first, then `special_tokens_map.json`.
    fn role(&self, name: &str) -> Result<Option<&str>> {
        let places = [("tokenizer_config.json", &self.tokenizer_config), ("special_tokens_map.json", &self.special_tokens_map)];
        for (file, json) in places {
            if let Some(value) = json.get(name)
                && let Some(text) = token_text(value, &self.dir.join(file), name)?
            {
                return Ok(Some(text));
            }
        }
        Ok(None)
    }

    /// `eos_token_id` and the like in `config.json` (also nested in `text_config`) and `generation_config.json`.
    fn ids(&self, name: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for (file, json) in [("generation_config.json", &self.generation_config), ("config.json", &self.config)] {
            let nested = json.get("text_config").and_then(Value::as_object).and_then(|config| config.get(name));
            for value in [json.get(name), nested].into_iter().flatten() {
                let path = self.dir.join(file);
                match value {
                    Value::Null => {}
                    Value::Array(values) => {
                        for value in values {
                            ids.extend(token_id(value, &path, name)?);
                        }
                    }
                    value => ids.extend(token_id(value, &path, name)?),
                }
            }
        }
        Ok(ids)
    }

    fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.tokenizer_config.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(Error::bad_model(self.dir.join("tokenizer_config.json"), name, "not true or false")),
        }
    }
}

/// An id; a negative one (some configurations say -1 for "none") counts as missing.
fn token_id(value: &Value, file: &Path, field: &str) -> Result<Option<u32>> {
    if value.as_i64().is_some_and(|id| id < 0) {
        return Ok(None);
    }
    match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
        Some(id) => Ok(Some(id)),
        None => Err(Error::bad_model(file, field, "not a token id (a whole number, a list of them, or null)")),
    }
}

pub(super) fn load(dir: &Path) -> Result<Parts> {
    let path = dir.join("tokenizer.json");
    let text = match read_text(&path, MAX_TOKENIZER) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let what = format!("{}: no tokenizer.json here; save the model's fast tokenizer beside its weights", dir.display());
            return Err(Error::new(ErrorKind::NotFound, what).with_source(error));
        }
        other => other?,
    };
    let mut inner: tokenizers::Tokenizer = text.parse().map_err(|error| bad(&path, "tokenizer", error))?;
    let unigram_unk = match inner.get_model() {
        ModelWrapper::Unigram(_) => unigram_unk(&text),
        _ => None,
    };
    drop(text);
    limit_cache(&mut inner);
    let file = |name: &str| read_json(&dir.join(name)).map(Option::unwrap_or_default);
    let files = Files {
        dir,
        config: file("config.json")?,
        tokenizer_config: file("tokenizer_config.json")?,
        special_tokens_map: file("special_tokens_map.json")?,
        generation_config: file("generation_config.json")?,
    };
    add_configured_tokens(&mut inner, &files)?;

    let mut role_texts = Vec::new();
    for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
        if let Some(text) = files.role(name)? {
            role_texts.push((name.to_owned(), text.to_owned()));
        }
    }
    let id_of = |name: &str| -> Result<Option<u32>> { Ok(files.role(name)?.and_then(|text| inner.token_to_id(text))) };
    let first_id = |name: &str| -> Result<Option<u32>> { Ok(files.ids(name)?.first().copied()) };
    let bos = id_of("bos_token")?.or(first_id("bos_token_id")?);
    let eos = id_of("eos_token")?.or(first_id("eos_token_id")?);
    let roles = Roles {
        bos,
        eos,
        pad: id_of("pad_token")?.or(first_id("pad_token_id")?),
        unk: id_of("unk_token")?.or_else(|| model_unk(inner.get_model())).or(unigram_unk),
    };
    let mut eos_ids: Vec<u32> = files.ids("eos_token_id")?;
    eos_ids.extend(id_of("eos_token")?);
    if let Some(template) = chat_template::source_of_dir(dir, &files.tokenizer_config)? {
        eos_ids.extend(end_of_turn_ids(&inner, &template));
    }

    if inner.get_post_processor().is_none() {
        let named = |wanted: bool, name: &str, id: Option<u32>| -> Result<Option<(String, u32)>> {
            Ok(if wanted { files.role(name)?.map(str::to_owned).zip(id) } else { None })
        };
        let bos = named(files.flag("add_bos_token")?.unwrap_or(false), "bos_token", bos)?;
        let eos = named(files.flag("add_eos_token")?.unwrap_or(false), "eos_token", eos)?;
        let borrow = |token: &Option<(String, u32)>| token.as_ref().map(|(text, id)| (text.clone(), *id));
        let (bos, eos) = (borrow(&bos), borrow(&eos));
        let processor = bos_eos_processor(
            bos.as_ref().map(|(text, id)| (text.as_str(), *id)),
            eos.as_ref().map(|(text, id)| (text.as_str(), *id)),
        );
        inner.with_post_processor(processor.map_err(|error| bad(&path, "post_processor", error))?);
    }
    let max_length = files.tokenizer_config.get("model_max_length").and_then(Value::as_u64);
    let max_length = max_length.filter(|length| (1..=1 << 30).contains(length)).and_then(|length| usize::try_from(length).ok());
    Ok(Parts { source: path, inner, roles, eos_ids, max_length, role_texts })
}

/// Well-known end-of-turn tokens that `template` writes.
pub(super) fn end_of_turn_ids(inner: &tokenizers::Tokenizer, template: &str) -> Vec<u32> {
    let added = inner.get_added_vocabulary().get_vocab();
    // In gpt-oss's format `<|end|>` ends a part of a turn; `<|return|>` ends the turn.
    let parts_of_turns = added.contains_key("<|return|>");
    END_OF_TURN
        .into_iter()
        .filter(|name| template.contains(name) && !(parts_of_turns && *name == "<|end|>"))
        .filter_map(|name| added.get(name).copied())
        .collect()
}

/// The id of a Unigram model's unknown piece, which the crate does not show.
fn unigram_unk(tokenizer: &str) -> Option<u32> {
    #[derive(serde::Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(serde::Deserialize)]
    struct Model {
        unk_id: Option<u32>,
    }
    serde_json::from_str::<File>(tokenizer).ok()?.model.unk_id
}

fn model_unk(model: &ModelWrapper) -> Option<u32> {
    use tokenizers::Model;
    match model {
        ModelWrapper::BPE(bpe) => bpe.get_unk_token().as_deref().and_then(|token| bpe.token_to_id(token)),
        ModelWrapper::WordPiece(model) => model.token_to_id(&model.unk_token),
        ModelWrapper::WordLevel(model) => model.token_to_id(&model.unk_token),
        ModelWrapper::Unigram(_) => None,
    }
}

/// The crate keeps a cache of words per thread for the life of the thread, even when the tokenizer is gone. In a process that
/// loads and drops models that is a leak, so it is switched off. Dropout, a training device, too.
pub(super) fn limit_cache(inner: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(bpe) = inner.get_model() {
        let mut bpe = bpe.clone();
        bpe.resize_cache(0);
        bpe.dropout = None;
        inner.with_model(ModelWrapper::BPE(bpe));
    }
}

/// Applies `added_tokens_decoder` and the named special tokens of `tokenizer_config.json` the way transformers does, but for
/// tokens that would need an id the vocabulary does not have.
fn add_configured_tokens(inner: &mut tokenizers::Tokenizer, files: &Files<'_>) -> Result<()> {
    let path = files.dir.join("tokenizer_config.json");
    let mut wanted: Vec<(u32, AddedToken)> = Vec::new();
    match files.tokenizer_config.get("added_tokens_decoder") {
        None | Some(Value::Null) => {}
        Some(Value::Object(entries)) => {
            for (id, entry) in entries {
                let field = format!("added_tokens_decoder.{id}");
                let number: u32 = id.parse().map_err(|_| Error::bad_model(&path, &field, "the key is not a token id"))?;
                wanted.push((number, configured_token(entry, &path, &field)?));
            }
        }
        Some(_) => return Err(Error::bad_model(&path, "added_tokens_decoder", "not an object")),
    }
    wanted.sort_by_key(|(id, _)| *id);
    let known = inner.get_added_tokens_decoder();
    let missing = wanted
        .into_iter()
        .filter(|(id, token)| {
            known.get(id).is_none_or(|old| !same_token(old, token)) && inner.token_to_id(&token.content) == Some(*id)
        })
        .map(|(_, token)| token)
        .collect::<Vec<_>>();
    inner.add_tokens(missing).map_err(|error| bad(&path, "added_tokens_decoder", error))?;

    let mut special = Vec::new();
    for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
        special.extend(files.role(name)?.map(str::to_owned));
    }
    for name in ["additional_special_tokens", "extra_special_tokens"] {
        if let Some(Value::Array(values)) = files.tokenizer_config.get(name) {
            for value in values {
                special.extend(token_text(value, &path, name)?.map(str::to_owned));
            }
        }
    }
    let added = inner.get_added_tokens_decoder();
    let special = special
        .into_iter()
        .filter(|text| inner.token_to_id(text).is_some_and(|id| !added.get(&id).is_some_and(|token| token.special)))
        .map(|text| match inner.token_to_id(&text).and_then(|id| added.get(&id)) {
            Some(token) => token.clone().special(true),
            None => AddedToken::from(text, true),
        })
        .collect::<Vec<_>>();
    inner.add_special_tokens(special).map_err(|error| bad(&path, "special tokens", error))?;
    Ok(())
}

fn same_token(old: &AddedToken, new: &AddedToken) -> bool {
    let flags = |token: &AddedToken| (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special);
    old.content == new.content && flags(old) == flags(new)
}

fn configured_token(entry: &Value, path: &Path, field: &str) -> Result<AddedToken> {
    let content = token_text(entry, path, field)?.ok_or_else(|| Error::bad_model(path, field, "a token without text content"))?;
    let flag = |name: &str, default: bool| entry.get(name).and_then(Value::as_bool).unwrap_or(default);
    let special = flag("special", false);
    Ok(AddedToken::from(content, special)
        .single_word(flag("single_word", false))
        .lstrip(flag("lstrip", false))
        .rstrip(flag("rstrip", false))
        .normalized(flag("normalized", !special)))
}
