//! Child processes: captured with progress, or in the open.

use std::{
    collections::VecDeque,
    env,
    ffi::OsString,
    io::{self, BufRead, BufReader, Read},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use crate::error::{Error, Result, mend_for_output};

/// So many of a failing tool's last lines are repeated in the error.
const TAIL: usize = 15;

/// Runs a command without a terminal, calls `tick` for each line and about ten times a second, and returns all that it
/// printed. A non-zero exit becomes an error with the last lines and, where they tell, the remedy.
pub(crate) fn capture(command: &mut Command, mut tick: impl FnMut(Option<&str>)) -> Result<String> {
    let name = program(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| cannot_start(&name, &error))?;
    let (sender, receiver) = mpsc::channel();
    let pipes: [Option<Box<dyn Read + Send>>; 2] =
        [child.stdout.take().map(|pipe| Box::new(pipe) as _), child.stderr.take().map(|pipe| Box::new(pipe) as _)];
    for pipe in pipes.into_iter().flatten() {
        let sender = sender.clone();
        thread::spawn(move || forward(pipe, &sender));
    }
    drop(sender);
    let mut output = String::new();
    loop {
        match receiver.recv_timeout(Duration::from_millis(100)) {
            Ok(text) => {
                tick(Some(&text));
                output.push_str(&text);
                output.push('\n');
            }
            Err(RecvTimeoutError::Timeout) => tick(None),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.wait().map_err(|error| cannot_start(&name, &error))?;
    if status.success() {
        return Ok(output);
    }
    let error = Error::new(format!("`{}` {}", show(command), exit(status))).output(tail(&output));
    Err(match mend_for_output(&output) {
        Some(mend) => error.mend(mend),
        None => error,
    })
}

/// Runs a command whose output goes straight to the user.
pub(crate) fn open(command: &mut Command) -> Result<()> {
    talk(command.stdin(Stdio::null()))
}

/// Runs a command that the user talks to.
pub(crate) fn talk(command: &mut Command) -> Result<()> {
    let name = program(command);
    let status = command.status().map_err(|error| cannot_start(&name, &error))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::new(format!("`{}` {}", show(command), exit(status))))
}

/// Runs a command whose output goes to the user and, its standard output, to `line` too. Tells whether it succeeded.
pub(crate) fn watch(command: &mut Command, mut line: impl FnMut(&str)) -> Result<bool> {
    let name = program(command);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(|error| cannot_start(&name, &error))?;
    if let Some(pipe) = child.stdout.take() {
        let mut reader = BufReader::new(pipe);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(&bytes);
            print!("{text}");
            line(text.trim_end());
            bytes.clear();
        }
    }
    Ok(child.wait().map_err(|error| cannot_start(&name, &error))?.success())
}

/// The cargo that runs this xtask, without the variables that belong to xtask's own package.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    for (key, _) in env::vars_os() {
        let key_text = key.to_string_lossy();
        if key_text.starts_with("CARGO_PKG_") || key_text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&key);
        }
    }
    command.current_dir(crate::paths::root());
    command
}

/// A tool that an environment variable may name (`CXX="ccache g++"`), else `default`.
pub(crate) fn tool(variable: &str, default: &str) -> Command {
    let value = env::var(variable).ok().filter(|value| !value.trim().is_empty());
    let value = value.as_deref().unwrap_or(default);
    let mut words = value.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or(default));
    command.args(words);
    command
}

/// The first executable of that name on PATH.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn forward(pipe: impl Read, sender: &Sender<String>) {
    let mut reader = BufReader::new(pipe);
    let mut bytes = Vec::new();
    // Bytes, not `lines()`: a tool may print what is no UTF-8, and its pipe must be read to the end all the same.
    while reader.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
        let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        bytes.clear();
        if sender.send(text).is_err() {
            break;
        }
    }
}

fn cannot_start(name: &str, error: &io::Error) -> Error {
    let report = Error::new(format!("cannot run `{name}`: {error}"));
    if error.kind() != io::ErrorKind::NotFound {
        return report;
    }
    match name {
        "python3" => report.mend("install Python 3 with pip (Debian, Ubuntu: apt-get install python3 python3-pip)"),
        "cc" | "c++" | "ar" => report.mend("install a C++20 compiler (Debian, Ubuntu: apt-get install g++)"),
        _ => report.mend(format!("install `{name}` or put it on PATH")),
    }
}

fn program(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn show(command: &Command) -> String {
    let mut text = program(command);
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    // A compiler's line is long; its head tells which tool it was.
    shortened(&text, 160)
}

fn shortened(text: &str, length: usize) -> String {
    if text.chars().count() <= length { text.to_owned() } else { text.chars().take(length).chain(" ...".chars()).collect() }
}

fn exit(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("exited with {code}"),
        None => format!("was stopped ({status})"),
    }
}

fn tail(output: &str) -> Vec<String> {
    let mut lines = VecDeque::new();
    for line in output.lines().filter(|line| !line.trim().is_empty()) {
        if lines.len() == TAIL {
            lines.pop_front();
        }
        lines.push_back(shortened(line, 240));
    }
    lines.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capture_returns_both_streams() {
        let output = capture(Command::new("sh").args(["-c", "echo out; echo err >&2"]), |_| ()).expect("sh runs");
        assert!(output.contains("out\n") && output.contains("err\n"));
    }

    #[test]
    fn a_failure_carries_the_last_lines() {
        let error = capture(Command::new("sh").args(["-c", "for i in $(seq 40); do echo l$i; done; exit 3"]), |_| ())
            .expect_err("exit 3")
            .to_string();
        assert!(error.contains("exited with 3") && error.contains("| l40") && !error.contains("| l25\n"), "{error}");
    }

    #[test]
    fn a_missing_tool_says_what_to_install() {
        let error = capture(&mut Command::new("/no/such/tool"), |_| ()).expect_err("missing").to_string();
        assert!(error.contains("to mend it"), "{error}");
    }

    #[test]
    fn bytes_that_are_no_text_do_not_block() {
        let output = capture(Command::new("sh").args(["-c", r"printf '\377\376\nafter\n'"]), |_| ()).expect("runs");
        assert!(output.contains("after"));
    }
}
