//! A model's text side without its weights: tokens, and rendered conversations.

use std::sync::Arc;

use hob::chat_template::{ChatTemplate, Message};
use hob::model::Text;
use hob::pool::unblock;
use hob::tokenizer::EncodeOptions;

use crate::error::{Result, json, parse};
use crate::live::{Live, Type};

/// A tokenizer and a chat template. Depends on nothing: the engine may be gone.
#[derive(uniffi::Object)]
pub struct RawTokenizer {
    text: Text,
    _live: Live,
}

/// A rendered conversation.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawRendered {
    /// What the model reads.
    pub text: String,
    /// The same as tokens.
    pub token_ids: Vec<u32>,
}

impl RawTokenizer {
    pub(crate) fn give(text: Text) -> Arc<Self> {
        Arc::new(Self { text, _live: Live::new(Type::Tokenizer) })
    }
}

#[uniffi::export]
impl RawTokenizer {
    /// A text as tokens.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub async fn encode(&self, text: String, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        let tokenizer = self.text.tokenizer.clone();
        let options = EncodeOptions { add_special, parse_special };
        Ok(unblock(move || tokenizer.encode(&text, options)).await?.ids)
    }

    /// Tokens as a text; ids outside the vocabulary are left out.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub async fn decode(&self, ids: Vec<u32>, skip_special: bool) -> Result<String> {
        let tokenizer = self.text.tokenizer.clone();
        Ok(unblock(move || tokenizer.decode(&ids, skip_special)).await?)
    }

    /// A conversation as `generate` feeds it.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported` without a template, `BadModel`.
    pub async fn render(&self, messages_json: String, render_json: Option<String>) -> Result<RawRendered> {
        let template = self.text.template.clone();
        let prompt = unblock(move || {
            let template = template.ok_or_else(|| {
                let message = "the model has no chat template; put a chat_template.jinja beside its weights";
                hob::Error::new(hob::ErrorKind::Unsupported, message)
            })?;
            let options = parse("the template's options", render_json.as_deref())?.unwrap_or_default();
            template.encode(&Message::list_from_json(&messages_json)?, &options)
        })
        .await?;
        Ok(RawRendered { text: prompt.text, token_ids: prompt.encoding.ids })
    }

    /// What it says of itself, as JSON.
    ///
    /// # Errors
    /// None, as things are.
    pub fn info(&self) -> Result<String> {
        let (tokenizer, template) = (&self.text.tokenizer, self.text.template.as_ref());
        json(&serde_json::json!({
            "vocab_size": tokenizer.vocab_size(),
            "max_length": tokenizer.max_length(),
            "bos_id": tokenizer.bos_id(),
            "pad_id": tokenizer.pad_id(),
            "unk_id": tokenizer.unk_id(),
            "eos_ids": tokenizer.eos_ids(),
            "chat_template": template.map(ChatTemplate::text),
            "format": template.map(ChatTemplate::format),
        }))
    }
}
