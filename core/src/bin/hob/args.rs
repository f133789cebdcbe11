//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Try a model, script it, or hold it against a reference. Reads no network.
#[derive(Debug, Parser)]
#[command(name = "hob", version, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Continue a prompt, or answer a conversation
    Generate(Generate),
    /// Log-probabilities of a given completion
    Score(Score),
    /// Weigh given answers, without sampling
    Decide(Decide),
    /// Turn texts into vectors
    Embed(Embed),
    /// Order documents by how well they answer a query
    Rerank(Rerank),
    /// Show a text's tokens
    Tokenize(Tokenize),
    /// Show a conversation as the model's chat template renders it
    Render(Render),
    /// Show what a model is and what it will take, without loading it
    Inspect(Inspect),
    /// Show the platform, the device, the budget, and what is missing
    Doctor(Doctor),
}

#[derive(Debug, Args)]
pub(crate) struct Common {
    /// A model directory, a .gguf file, or a hub id (owner/name) in the local Hugging Face cache
    #[arg(long)]
    pub(crate) model: String,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Number type to compute in; default: the model's own, and float32 on a CPU
    #[arg(long, value_enum)]
    pub(crate) float: Option<Float>,
    /// Keep quantised weights as they are, or expand them at load; default: expand on a CPU only
    #[arg(long, value_enum)]
    pub(crate) dequantize: Option<YesNo>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Float {
    Float32,
    Float16,
    Bfloat16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum YesNo {
    Yes,
    No,
}

#[derive(Debug, Args)]
#[group(id = "what", required = true, multiple = false)]
pub(crate) struct Source {
    /// The user's message (with --raw: text to continue verbatim)
    #[arg(long)]
    pub(crate) prompt: Option<String>,
    /// A JSON list of {role, content}
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Generate {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) source: Source,
    /// Feed the prompt verbatim: no chat template, the tokenizer's own special tokens
    #[arg(long, conflicts_with = "messages")]
    pub(crate) raw: bool,
    /// New tokens at most; default: until the context is full
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<usize>,
    /// 0 is greedy
    #[arg(long, value_name = "F", default_value_t = 0.0)]
    pub(crate) temperature: f32,
    /// Keep the smallest set of tokens with this probability
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    pub(crate) top_p: f32,
    /// Keep this many tokens; 0 keeps all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) top_k: u32,
    /// Keep tokens this likely relative to the likeliest
    #[arg(long, value_name = "F", default_value_t = 0.0)]
    pub(crate) min_p: f32,
    /// Lower the odds of tokens already seen; 1 is off
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    pub(crate) repetition_penalty: f32,
    /// Seed of the random numbers
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// A string that ends the answer; may be given several times
    #[arg(long, value_name = "S")]
    pub(crate) stop: Vec<String>,
    /// Report each token's log-probability and this many alternatives
    #[arg(long, value_name = "K")]
    pub(crate) logprobs: Option<usize>,
    /// What happens to a prompt longer than the context
    #[arg(long, value_enum, default_value_t = Cut::Error)]
    pub(crate) truncate: Cut,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Cut {
    Error,
    End,
    Start,
}

#[derive(Debug, Args)]
pub(crate) struct Decide {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The question, as a conversation of one message
    #[arg(long)]
    pub(crate) prompt: String,
    /// An answer; give several
    #[arg(long, required = true)]
    pub(crate) answer: Vec<String>,
    /// Feed the prompt as it is, without a chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// How the answers relate: things to choose from, levels from low to high, or yes and no
    #[arg(long, value_enum, default_value_t = Kind::Choice)]
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Kind {
    Choice,
    Score,
    Predicate,
}

#[derive(Debug, Args)]
pub(crate) struct Score {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The user's message (with --raw: text verbatim)
    #[arg(long)]
    pub(crate) prompt: String,
    /// The text whose likelihood is asked for
    #[arg(long)]
    pub(crate) completion: String,
    /// Feed the prompt verbatim
    #[arg(long)]
    pub(crate) raw: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Embed {
    #[command(flatten)]
    pub(crate) common: Common,
    /// A text; may be given several times. Without it, one per non-empty line of standard input
    #[arg(long)]
    pub(crate) text: Vec<String>,
    /// Which of the model's prompts to put before each text
    #[arg(long, value_name = "NAME")]
    pub(crate) prompt_name: Option<String>,
    /// Keep this many leading dimensions
    #[arg(long, value_name = "N")]
    pub(crate) dimensions: Option<usize>,
    /// Scale vectors to unit length; auto: as the model says
    #[arg(long, value_enum, default_value_t = Scale::Auto)]
    pub(crate) normalize: Scale,
    /// What happens to a text longer than the model takes
    #[arg(long, value_enum, default_value_t = EndCut::Error)]
    pub(crate) truncate: EndCut,
    /// How token states are pooled; default: as the model's files say
    #[arg(long, value_enum)]
    pub(crate) pooling: Option<Pool>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Scale {
    Auto,
    Yes,
    No,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EndCut {
    Error,
    End,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Pool {
    Cls,
    Max,
    Mean,
    Lasttoken,
}

#[derive(Debug, Args)]
pub(crate) struct Rerank {
    #[command(flatten)]
    pub(crate) common: Common,
    /// What the documents should answer
    #[arg(long)]
    pub(crate) query: String,
    /// A document; may be given several times. Without it, one per non-empty line of standard input
    #[arg(long)]
    pub(crate) document: Vec<String>,
    /// An instruction, for rerankers that take one
    #[arg(long)]
    pub(crate) instruct: Option<String>,
    /// Keep only the best so many
    #[arg(long, value_name = "N")]
    pub(crate) top: Option<usize>,
    /// Keep the documents' order
    #[arg(long)]
    pub(crate) unsorted: bool,
    /// What happens to a pair longer than the model takes
    #[arg(long, value_enum, default_value_t = EndCut::Error)]
    pub(crate) truncate: EndCut,
}

#[derive(Debug, Args)]
pub(crate) struct Tokenize {
    #[command(flatten)]
    pub(crate) common: Common,
    #[arg(long)]
    pub(crate) text: String,
    /// Add the tokenizer's special tokens and recognise those spelled in the text
    #[arg(long)]
    pub(crate) special: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Render {
    #[command(flatten)]
    pub(crate) common: Common,
    /// A JSON list of {role, content}
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: PathBuf,
    /// Leave out the opening of the assistant's turn
    #[arg(long)]
    pub(crate) no_generation_prompt: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
