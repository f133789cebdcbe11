//! A model's text side without its weights: tokens and rendered conversations.

use std::ffi::c_char;
use std::sync::Arc;

use hob::chat_output::ChatFormat;
use hob::chat_template::{ChatTemplate, Message};
use hob::model::Text;
use hob::tokenizer::EncodeOptions;
use hob::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::boundary::{done, enter_shared, out, quiet};
use crate::buffer::{self, hob_buffer};
use crate::engine::{EngineInner, hob_engine};
use crate::error::{hob_error, hob_status, nothing};
use crate::raw::{self, Counted, Held, castable};
use crate::request::model;
use crate::stream::render;

/// A model's tokenizer and chat template. Immutable; any thread, several at once. Shared: `hob_tokenizer_retain` and
/// `hob_tokenizer_release`. It depends on nothing: the engine may be gone.
pub struct hob_tokenizer {
    _opaque: [u8; 0],
}

castable!(hob_tokenizer => Text, Counted, crate::handle::HOB_HANDLE_TOKENIZER);

/// Reads a model's tokenizer and chat template; loads no weights. Keep it: reading a large vocabulary takes a while. The caller owns
/// one count of `*out_tokenizer`. Any thread. HOB_NOT_FOUND, HOB_BAD_MODEL, HOB_UNSUPPORTED, HOB_IO. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_tokenizer(
    engine: *const hob_engine,
    model_ref: *const c_char,
    model_len: usize,
    out_tokenizer: *mut *mut hob_tokenizer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_tokenizer, "out_tokenizer")?;
            let text = inner.engine.text(model(model_ref, model_len)?)?;
            done(out_tokenizer, raw::give_counted(Arc::new(Held::new(text))))
        })
    }
}

/// Turns a text into token ids. `add_special` 1 adds the special tokens that the tokenizer puts around a text; `parse_special` 1 takes
/// special tokens that are written in the text as such, which is wrong for text of users. The caller owns one count of `*out_ids`:
/// `hob_buffer_ids`. Any thread. HOB_INVALID_ARGUMENT. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_tokenizer_encode(
    tokenizer: *const hob_tokenizer,
    text: *const c_char,
    text_len: usize,
    add_special: i32,
    parse_special: i32,
    out_ids: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(tokenizer, "tokenizer", out_error, |inner: &Text| {
            out(out_ids, "out_ids")?;
            let options = EncodeOptions { add_special: add_special != 0, parse_special: parse_special != 0 };
            let encoding = inner.tokenizer.encode(raw::text(text, text_len, "text")?, options)?;
            done(out_ids, buffer::ids(encoding.ids))
        })
    }
}

/// Turns token ids into text; `skip_special` 1 leaves special tokens out. Ids outside the vocabulary are left out too. The text may hold
/// NULs: the view of the buffer tells its length. The caller owns one count of `*out_text`. Any thread. HOB_INVALID_ARGUMENT. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_tokenizer_decode(
    tokenizer: *const hob_tokenizer,
    ids: *const u32,
    id_count: usize,
    skip_special: i32,
    out_text: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(tokenizer, "tokenizer", out_error, |inner: &Text| {
            out(out_text, "out_text")?;
            let text = inner.tokenizer.decode(raw::slice(ids, id_count, "ids")?, skip_special != 0)?;
            done(out_text, buffer::text(text))
        })
    }
}

/// Renders a conversation by the model's chat template: `*out_text` gets the text, `*out_ids` the tokens as `hob_engine_generate` would
/// feed them (no text of a message becomes a special token there). Either may be NULL. `messages_json` and `render_json` are those of
/// `hob_generate_options`. The caller owns one count of each. Any thread. HOB_INVALID_ARGUMENT (also for a conversation that the template
/// refuses), HOB_UNSUPPORTED when the model has no template, HOB_BAD_MODEL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_tokenizer_render(
    tokenizer: *const hob_tokenizer,
    messages_json: *const c_char,
    messages_json_len: usize,
    render_json: *const c_char,
    render_json_len: usize,
    out_text: *mut *mut hob_buffer,
    out_ids: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(tokenizer, "tokenizer", out_error, |inner: &Text| {
            raw::write(out_text, nothing());
            raw::write(out_ids, nothing());
            let messages = Message::list_from_json(raw::text(messages_json, messages_json_len, "messages_json")?)?;
            let options = render(render_json, render_json_len)?;
            let prompt = template(inner)?.encode(&messages, &options)?;
            if !out_ids.is_null() {
                raw::write(out_ids, buffer::ids(prompt.encoding.ids));
            }
            if out_text.is_null() { Ok(crate::error::HOB_OK) } else { done(out_text, buffer::text(prompt.text)) }
        })
    }
}

fn template(text: &Text) -> Result<&ChatTemplate> {
    text.template.as_ref().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the model has no chat template; put a chat_template.jinja beside its weights")
    })
}

#[derive(Serialize)]
struct TokenizerJson<'a> {
    vocab_size: usize,
    max_length: Option<usize>,
    bos_id: Option<u32>,
    pad_id: Option<u32>,
    unk_id: Option<u32>,
    eos_ids: &'a [u32],
    chat_template: Option<&'a str>,
    format: Option<ChatFormat>,
}

/// What the tokenizer and the template say of themselves, as JSON: `vocab_size`, `max_length`, `bos_id`, `pad_id`, `unk_id`, `eos_ids`,
/// `chat_template` (its source), `format` (which marks of calls and reasoning it uses; see `hob_generate_options`). The caller owns one
/// count of `*out_info`. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_tokenizer_info(
    tokenizer: *const hob_tokenizer,
    out_info: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(tokenizer, "tokenizer", out_error, |inner: &Text| {
            out(out_info, "out_info")?;
            let (tokenizer, template) = (&inner.tokenizer, inner.template.as_ref());
            let info = TokenizerJson {
                vocab_size: tokenizer.vocab_size(),
                max_length: tokenizer.max_length(),
                bos_id: tokenizer.bos_id(),
                pad_id: tokenizer.pad_id(),
                unk_id: tokenizer.unk_id(),
                eos_ids: tokenizer.eos_ids(),
                chat_template: template.map(ChatTemplate::text),
                format: template.map(ChatTemplate::format),
            };
            done(out_info, buffer::json(&info)?)
        })
    }
}

/// One more count of the tokenizer; returns it. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_tokenizer_retain(tokenizer: *mut hob_tokenizer) -> *mut hob_tokenizer {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe { raw::share(tokenizer) }.map_or(nothing(), raw::give_counted))
}

/// Gives one count back. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_tokenizer_release(tokenizer: *mut hob_tokenizer) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_counted(tokenizer) }));
}
