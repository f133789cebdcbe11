//! `cargo xtask VERB`: the one door to Hob's repository, for people and for CI.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

mod bench;
mod c;
mod check;
mod demo;
mod dist;
mod elf;
mod error;
mod header;
mod models;
mod mutants;
mod npm;
mod paths;
mod proc;
mod setup;
mod stamp;
mod store;
mod suites;
mod swift;
mod tally;
mod ui;
mod wheel;
mod workspace;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::error::Result;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "The one door to Hob's repository, for people and for CI",
    max_term_width = 110
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Bring the native parts that cargo needs, into target/native (Linux); check for the tools (macOS)
    Setup,
    /// Bring two small real models into target/models
    Models {
        /// Folder of a reranker, used in place [default: $HOB_RERANKER, else ../shared/models/reranker-minilm-debian]
        #[arg(long)]
        reranker: Option<PathBuf>,
    },
    /// Set everything up, then run Hob's main job on the real models
    Demo {
        /// Folder of a reranker [default: as for `models`]
        #[arg(long)]
        reranker: Option<PathBuf>,
        /// Handed to the demo program
        #[arg(last = true)]
        extra: Vec<String>,
    },
    /// Set everything up, then run every test suite
    Test {
        /// Only this suite
        #[arg(long)]
        suite: Option<String>,
        /// Handed to the suite's command (for cargo: options, or part of a test's name)
        #[arg(last = true)]
        extra: Vec<String>,
    },
    /// Format, lints, documentation, file lengths, generated files: fail on any difference
    Check,
    /// Lay out what C programs link: headers, libraries, pkg-config and CMake files
    Dist {
        /// Where to [default: dist in the target folder]
        folder: Option<PathBuf>,
    },
    /// One suite of `test`: the C programs
    #[command(hide = true)]
    C {
        #[arg(long)]
        sanitize: Option<c::Sanitizer>,
    },
    /// One suite of `test`: any content for the C ABI, under AddressSanitizer
    Fuzz {
        /// Inputs to try; more find more
        #[arg(long, default_value_t = 2000)]
        runs: u32,
    },
    /// Write include/hob.h and the list of exported functions anew
    Header,
    /// Write the generated part of the Swift package anew; build its library, run its tests, lay out a release
    Swift {
        #[command(subcommand)]
        verb: Option<swift::Verb>,
    },
    /// Build the package `hob` for Node and Bun: the addon (npm/native), its types, the JavaScript (npm/dist)
    Npm {
        #[command(subcommand)]
        step: Option<npm::Step>,
    },
    /// Measure: core's own benchmarks, then Hob beside other stacks, printed as ratios
    Bench {
        /// Only this one: criterion, c or peers
        #[arg(long)]
        only: Option<String>,
        /// Rounds of the comparison with peers
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Handed to the one named by --only
        #[arg(last = true, requires = "only")]
        extra: Vec<String>,
    },
    /// Break the pool and the owner protocol on purpose, and see that a test notices each change (takes long)
    Mutants {
        /// Only the scripted changes of tests/mutants, the seeds' thirty-eight among them
        #[arg(long, alias = "seeds")]
        scripted: bool,
        /// Only those that cargo-mutants makes
        #[arg(long)]
        generated: bool,
        /// Only scripted changes with this in their name or their file's path
        #[arg(long, requires = "scripted")]
        only: Option<String>,
        /// A part of cargo-mutants' work, as in 0/4
        #[arg(long)]
        shard: Option<String>,
        /// Handed to cargo-mutants
        #[arg(last = true)]
        extra: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    match verb {
        Verb::Setup => setup::ensure(),
        Verb::Demo { reranker, extra } => demo::run(reranker.as_deref(), &extra),
        Verb::Test { suite, extra } => suites::run(suite.as_deref(), &extra),
        Verb::Check => check::run(),
        Verb::Header => header::run(),
        Verb::Dist { folder } => dist::run(folder.as_deref()),
        Verb::Swift { verb } => swift::run(verb),
        Verb::C { sanitize } => c::run(sanitize),
        Verb::Fuzz { runs } => c::fuzz(runs),
        Verb::Npm { step } => npm::run(step.as_ref()),
        Verb::Bench { only, rounds, extra } => bench::run(&bench::Options { only, rounds, extra }),
        Verb::Mutants { scripted, generated, only, shard, extra } => {
            mutants::run(&mutants::Options { scripted, generated, only, shard, extra })
        }
        Verb::Models { reranker } => {
            let places = models::ensure(reranker.as_deref())?;
            println!("chat      {}", places.chat.display());
            println!("embedder  {}", places.embedder.display());
            match places.reranker {
                Some(path) => println!("reranker  {}", path.display()),
                None => println!("reranker  none (--reranker or HOB_RERANKER names one)"),
            }
            Ok(())
        }
    }
}
