//! bert (`BertModel`, `BertForSequenceClassification`): post-norm bidirectional encoder with learned positions.

use mlx_rs::fast::scaled_dot_product_attention;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, Dtype, ops};

use super::Encoder;
use crate::error::{Error, Result};
use crate::model::config::BertConfig;
use crate::nn::{Embedding, LayerNorm, Linear, gelu, join_heads, scalar, split_heads};
use crate::weights::Weights;

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    after_attention: LayerNorm,
    up: Linear,
    down: Linear,
    after_mlp: LayerNorm,
}

/// Pooler and output layer of a sequence classifier.
struct Classifier {
    pooler: Linear,
    output: Linear,
}

/// A BERT encoder, with its classifier when the checkpoint is a sequence classifier.
pub(crate) struct Bert {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
    heads: i32,
    scale: f32,
    classifier: Option<Classifier>,
}

impl Bert {
    /// `labels`: outputs of the classifier, or `None` for a bare encoder.
    pub(crate) fn load(mut weights: Weights<'_>, config: &BertConfig, labels: Option<i32>) -> Result<Self> {
        weights.set_prefix(&["bert.", ""], "embeddings.word_embeddings.weight")?;
        let (hidden, eps) = (config.hidden, config.layer_norm_eps);
        let words = weights.embedding("embeddings.word_embeddings", config.vocabulary, hidden)?;
        let positions = weights.embedding("embeddings.position_embeddings", config.context, hidden)?;
        let types = weights.embedding("embeddings.token_type_embeddings", config.types, hidden)?;
        let norm = weights.layer_norm("embeddings.LayerNorm", hidden, eps)?;
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            let path = format!("encoder.layer.{index}");
            layers.push(Layer {
                query: weights.linear(&format!("{path}.attention.self.query"), hidden, hidden, true)?,
                key: weights.linear(&format!("{path}.attention.self.key"), hidden, hidden, true)?,
                value: weights.linear(&format!("{path}.attention.self.value"), hidden, hidden, true)?,
                output: weights.linear(&format!("{path}.attention.output.dense"), hidden, hidden, true)?,
                after_attention: weights.layer_norm(&format!("{path}.attention.output.LayerNorm"), hidden, eps)?,
                up: weights.linear(&format!("{path}.intermediate.dense"), config.intermediate, hidden, true)?,
                down: weights.linear(&format!("{path}.output.dense"), hidden, config.intermediate, true)?,
                after_mlp: weights.layer_norm(&format!("{path}.output.LayerNorm"), hidden, eps)?,
            });
        }
        let classifier = match labels {
            None => None,
            Some(labels) => {
                let pooler = weights.linear("pooler.dense", hidden, hidden, true)?;
                weights.clear_prefix();
                Some(Classifier { pooler, output: weights.linear("classifier", labels, hidden, true)? })
            }
        };
        // A bare encoder's checkpoint may bring the heads it was trained with; sentence-transformers does not use them.
        weights.finish_model(if classifier.is_some() { &[] } else { &["pooler.", "bert.pooler.", "cls."] })?;
        #[allow(clippy::cast_precision_loss)] // a head is far narrower than 2^24
        let scale = ((hidden / config.heads) as f32).sqrt().recip();
        Ok(Self { words, positions, types, norm, layers, heads: config.heads, scale, classifier })
    }
}

impl Encoder for Bert {
    fn hidden(&self, ids: &Array, types: &Array, mask: &Array) -> Result<Array> {
        let len = ids.dim(1);
        let positions = self.positions.forward(&Array::from_iter(0..len, &[1, len]))?;
        let x = ops::add(self.words.forward(ids)?, self.types.forward(types)?)?;
        let mut x = self.norm.forward(&ops::add(x, positions)?)?;
        // Padding gets a weight that underflows to exactly zero, so a row does not depend on its batch mates.
        let hidden = ops::subtract(scalar(1.0, Dtype::Float32)?, mask.as_dtype(Dtype::Float32)?)?;
        let penalty = ops::multiply(hidden, scalar(-1e9, Dtype::Float32)?)?;
        let penalty = if x.dtype() == Dtype::Float16 { ops::maximum(penalty, scalar(-6e4, Dtype::Float32)?)? } else { penalty };
        let bias = ops::expand_dims_axes(penalty.as_dtype(x.dtype())?, &[1, 2])?;
        for layer in &self.layers {
            let q = split_heads(&layer.query.forward(&x)?, self.heads)?;
            let k = split_heads(&layer.key.forward(&x)?, self.heads)?;
            let v = split_heads(&layer.value.forward(&x)?, self.heads)?;
            let attended = scaled_dot_product_attention(&q, &k, &v, self.scale, &bias, None)?;
            let attended = layer.output.forward(&join_heads(&attended)?)?;
            x = layer.after_attention.forward(&ops::add(&x, attended)?)?;
            let inner = gelu(&layer.up.forward(&x)?)?;
            x = layer.after_mlp.forward(&ops::add(&x, layer.down.forward(&inner)?)?)?;
        }
        Ok(x)
    }

    fn classify(&self, hidden: &Array) -> Result<Array> {
        let Some(classifier) = &self.classifier else { return Err(Error::unsupported("this encoder has no classifier")) };
        let first = hidden.try_index((.., 0, ..))?;
        classifier.output.forward(&ops::tanh(classifier.pooler.forward(&first)?)?)
    }
}
