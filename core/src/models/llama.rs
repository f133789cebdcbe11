//! llama (`LlamaForCausalLM`): pre-norm decoder with rotary positions, grouped-query attention and a gated SiLU MLP.
//!
//! qwen2 and qwen3 are the same graph with other switches, so they build it too.

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;

use super::Decoder;
use crate::error::{Error, Result};
use crate::kv_cache::{KvCache, LayerCache, Pass};
use crate::model::config::{DecoderConfig, DecoderDefaults, RopeScaling};
use crate::nn::{Embedding, Heads, Linear, RmsNorm, Rope, attend, gated, has_kernels, join_heads, projections, split_heads};
use crate::weights::Weights;

/// What transformers' `LlamaConfig` assumes when config.json is silent.
pub(crate) const DEFAULTS: DecoderDefaults = DecoderDefaults { qkv_bias: None, qk_norm: false, rms_eps: 1e-6, head_dim: None };

struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    scale: f32,
}

impl Attention {
    fn load(weights: &mut Weights<'_>, path: &str, config: &DecoderConfig) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        let (wide, narrow) = (config.heads * head_dim, config.kv_heads * head_dim);
        let mut norm = |name: &str| -> Result<Option<RmsNorm>> {
            if config.qk_norm { weights.rms_norm(&format!("{path}.{name}"), head_dim, config.rms_eps).map(Some) } else { Ok(None) }
        };
        let (q_norm, k_norm) = (norm("q_norm")?, norm("k_norm")?);
        #[allow(clippy::cast_precision_loss)] // a head is far narrower than 2^24
        let scale = (head_dim as f32).sqrt().recip();
        Ok(Self {
            q: weights.linear(&format!("{path}.q_proj"), wide, hidden, config.qkv_bias)?,
            k: weights.linear(&format!("{path}.k_proj"), narrow, hidden, config.qkv_bias)?,
            v: weights.linear(&format!("{path}.v_proj"), narrow, hidden, config.qkv_bias)?,
            o: weights.linear(&format!("{path}.o_proj"), hidden, wide, config.output_bias)?,
            q_norm,
            k_norm,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim,
            scale,
        })
    }

    /// `x` `[B, L, E]` plus what its positions see, looked at after `norm`; `last_only`: `[B, 1, E]`, the last position alone.
    fn forward(
        &self,
        norm: &RmsNorm,
        x: &Array,
        last_only: bool,
        rope: &Rope,
        cache: &mut LayerCache,
        pass: &Pass,
    ) -> Result<Array> {
        let (onto, projected) = if last_only {
            let seen = norm.forward(x)?;
            (last_position(x)?, [self.q.forward(&last_position(&seen)?)?, self.k.forward(&seen)?, self.v.forward(&seen)?])
        } else {
            (x.clone(), projections(norm, x, [&self.q, &self.k, &self.v])?)
        };
        let (q_norm, k_norm) = (self.q_norm.as_ref(), self.k_norm.as_ref());
        let heads = Heads { rope, q_norm, k_norm, count: self.heads, scale: self.scale };
        if let Some(y) = cache.step(&projected, [self.kv_heads, self.head_dim], &heads, pass)? {
            return self.o.forward_onto(&y, &onto);
        }
        let normed = |norm: Option<&RmsNorm>, heads: Array| match norm {
            Some(norm) => norm.forward(&heads),
            None => Ok(heads),
        };
        let [q, k, v] = projected;
        let q = normed(q_norm, split_heads(&q, self.heads)?)?;
        let k = normed(k_norm, split_heads(&k, self.kv_heads)?)?;
        let v = split_heads(&v, self.kv_heads)?;
        let q = rope.forward(&q, pass.offset(x.dim(1) - q.dim(2)))?;
        let (k, v) = cache.append(&rope.forward(&k, pass.offset(0))?, &v, pass)?;
        self.o.forward_onto(&join_heads(&attend(&q, &k, &v, self.scale, pass.mask())?)?, &onto)
    }
}

struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn load(weights: &mut Weights<'_>, path: &str, config: &DecoderConfig) -> Result<Self> {
        let (hidden, inner, bias) = (config.hidden, config.intermediate, config.mlp_bias);
        Ok(Self {
            gate: weights.linear(&format!("{path}.gate_proj"), inner, hidden, bias)?,
            up: weights.linear(&format!("{path}.up_proj"), inner, hidden, bias)?,
            down: weights.linear(&format!("{path}.down_proj"), hidden, inner, bias)?,
        })
    }

    /// `x` plus what is made of it after `norm`.
    fn forward(&self, norm: &RmsNorm, x: &Array) -> Result<Array> {
        self.down.forward_onto(&gated(norm, x, &self.gate, &self.up)?, x)
    }
}

struct Layer {
    attention: Attention,
    mlp: Mlp,
    before_attention: RmsNorm,
    before_mlp: RmsNorm,
}

/// The decoder of llama, qwen2 and qwen3.
pub(crate) struct Llama {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// `None`: the embedding table serves.
    head: Option<Linear>,
    rope: Rope,
}

impl Llama {
    /// Takes every tensor it needs. `interleaved`: the file pairs neighbouring rotary dimensions, as llama.cpp's converter
    /// stores llama's queries and keys. `with_head` is false for embedders, whose files may lack an output projection.
    pub(crate) fn load(mut weights: Weights<'_>, config: &DecoderConfig, interleaved: bool, with_head: bool) -> Result<Self> {
        weights.set_prefix(&["model.", "language_model.model.", "model.language_model.", ""], "embed_tokens.weight")?;
        let embedding = weights.embedding("embed_tokens", config.vocabulary, config.hidden)?;
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            let path = format!("layers.{index}");
            layers.push(Layer {
                attention: Attention::load(&mut weights, &format!("{path}.self_attn"), config)?,
                mlp: Mlp::load(&mut weights, &format!("{path}.mlp"), config)?,
                before_attention: weights.rms_norm(&format!("{path}.input_layernorm"), config.hidden, config.rms_eps)?,
                before_mlp: weights.rms_norm(&format!("{path}.post_attention_layernorm"), config.hidden, config.rms_eps)?,
            });
        }
        let norm = weights.rms_norm("norm", config.hidden, config.rms_eps)?;
        let divisors = weights.host_vector("rope_freqs.weight", config.head_dim / 2)?;
        let prefix = weights.clear_prefix();
        // `language_model.lm_head` where the body is `language_model.model`.
        let outer = prefix.strip_suffix("model.").unwrap_or_default().to_owned();
        weights.restore_prefix(outer);
        let head = if config.tied || !with_head {
            None
        } else {
            Some(weights.linear("lm_head", config.vocabulary, config.hidden, false)?)
        };
        // A tied checkpoint may still carry a copy of the table as lm_head.
        weights.finish_model(if config.tied || !with_head { &["lm_head.", "language_model.lm_head."] } else { &[] })?;
        let scaling = divisors.map_or_else(|| config.rope_scaling.clone(), RopeScaling::Divisors);
        Ok(Self { embedding, layers, norm, head, rope: rope(config, &scaling, interleaved)? })
    }
}

impl Llama {
    /// Final states of every position, or of the last one only.
    fn run(&self, ids: &Array, cache: &mut KvCache, last_only: bool) -> Result<Array> {
        let mut x = self.embedding.forward(ids)?;
        let mut pass = cache.pass(ids.dim(1))?;
        if ids.dim(1) == 1 && has_kernels() {
            pass.turn = Some(self.rope.turn(pass.lens())?);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let last_only = last_only && index + 1 == self.layers.len() && x.dim(1) > 1;
            x = layer.attention.forward(&layer.before_attention, &x, last_only, &self.rope, cache.layer(index), &pass)?;
            x = layer.mlp.forward(&layer.before_mlp, &x)?;
        }
        cache.advance(&pass);
        self.norm.forward(&x)
    }
}

/// `[B, L, E]` -> `[B, 1, E]`.
fn last_position(x: &Array) -> Result<Array> {
    let last = x.dim(1) - 1;
    Ok(x.try_index((.., last.., ..))?)
}

impl Decoder for Llama {
    fn hidden(&self, ids: &Array, cache: &mut KvCache) -> Result<Array> {
        self.run(ids, cache, false)
    }

    fn last_hidden(&self, ids: &Array, cache: &mut KvCache) -> Result<Array> {
        self.run(ids, cache, true)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.head.as_ref().map_or_else(|| self.embedding.as_linear(hidden), |head| head.forward(hidden))
    }

    fn new_cache(&self, rows: usize) -> KvCache {
        KvCache::new(self.layers.len(), rows)
    }
}

/// The rotary embedding of `config`, as wavelengths where a scaling changes single dimensions.
#[allow(clippy::cast_precision_loss)] // dimensions and positions are far below 2^24
fn rope(config: &DecoderConfig, scaling: &RopeScaling, interleaved: bool) -> Result<Rope> {
    let dims = config.head_dim;
    let half = usize::try_from(dims / 2).unwrap_or(0);
    let base = config.rope_theta;
    let wavelength = |i: usize| f64::from(base).powf(2.0 * i as f64 / f64::from(dims));
    #[allow(clippy::cast_possible_truncation)] // computed in f64, used in f32
    let with = |freqs: Vec<f64>, magnitude: f32| -> Result<Rope> {
        let freqs: Vec<f32> = freqs.into_iter().map(|freq| freq as f32).collect();
        if freqs.iter().any(|freq| !freq.is_finite() || *freq <= 0.0) {
            return Err(Error::unsupported("rope scaling yields frequencies out of range; check the model's rope parameters"));
        }
        Rope::new(dims, base, 1.0, Some(&freqs), magnitude, interleaved)
    };
    match scaling {
        RopeScaling::None => Rope::new(dims, base, 1.0, None, 1.0, interleaved),
        RopeScaling::Linear { factor } => Rope::new(dims, base, factor.recip(), None, 1.0, interleaved),
        RopeScaling::Divisors(divisors) => with((0..half).map(|i| wavelength(i) * f64::from(divisors[i])).collect(), 1.0),
        // Llama 3.1 (Meta 2024): long wavelengths are stretched, short ones kept, those between blended.
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            let (factor, low, high, original) =
                (f64::from(*factor), f64::from(*low_freq_factor), f64::from(*high_freq_factor), f64::from(*original));
            let scaled = |i: usize| {
                let freq = wavelength(i);
                let turns = original / (2.0 * std::f64::consts::PI * freq);
                if turns > high {
                    freq
                } else if turns < low {
                    freq * factor
                } else {
                    let smooth = (turns - low) / (high - low);
                    freq / ((1.0 - smooth) / factor + smooth)
                }
            };
            with((0..half).map(scaled).collect(), 1.0)
        }
        // YaRN (Peng et al. 2023), equations 23 to 25: a ramp between interpolated and untouched dimensions.
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original, attention_factor, truncate } => {
            let dimension = |turns: f32| {
                f64::from(dims) * (f64::from(*original) / (f64::from(turns) * 2.0 * std::f64::consts::PI)).ln()
                    / (2.0 * f64::from(base).ln())
            };
            let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, high) = (low.max(0.0), high.min(f64::from(dims) - 1.0));
            let high = if (high - low).abs() < f64::EPSILON { high + 0.001 } else { high };
            let scaled = |i: usize| {
                let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let inverse = wavelength(i).recip();
                (inverse / f64::from(*factor) * interpolated + inverse * (1.0 - interpolated)).recip()
            };
            with((0..half).map(scaled).collect(), *attention_factor)
        }
    }
}
