//! Writes the generated part of the Swift package, read off a built library: `hob-uniffi-bindgen LIBRARY CONFIG SWIFT_FOLDER C_FOLDER`.
//! `cargo xtask swift` runs it; it belongs to this crate so that generator and scaffolding are of one version.

#![allow(clippy::print_stderr, reason = "a command-line tool")]

use std::process::ExitCode;

use uniffi::SwiftBindingsOptions;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [library, config, swift, c] = arguments.as_slice() else {
        eprintln!("usage: hob-uniffi-bindgen LIBRARY CONFIG SWIFT_FOLDER C_FOLDER");
        return ExitCode::FAILURE;
    };
    let write = |folder: &String, headers: bool| {
        uniffi::generate_swift_bindings(SwiftBindingsOptions {
            generate_swift_sources: !headers,
            generate_headers: headers,
            source: library.into(),
            out_dir: folder.into(),
            config: Some(config.into()),
            ..SwiftBindingsOptions::default()
        })
    };
    match write(swift, false).and_then(|()| write(c, true)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hob-uniffi-bindgen: {error:#}");
            ExitCode::FAILURE
        }
    }
}
