//! What a person sees: one line per step, with a moving bar on a terminal and plain lines elsewhere.

use std::{
    cell::RefCell,
    io::{IsTerminal, stderr},
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use crate::error::Result;

/// Where there is no terminal, a long step says that often that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// Runs one step: names it, shows its progress, and puts its name on its error.
pub(crate) fn step<T>(name: &str, work: impl FnOnce(&Step) -> Result<T>) -> Result<T> {
    let step = Step::new(name);
    let result = work(&step);
    step.finish(result.is_ok());
    result.map_err(|error| error.step(name))
}

/// A line that stays on the screen.
pub(crate) fn line(text: &str) {
    eprintln!("{text}");
}

/// Seconds as a person reads them.
pub(crate) fn seconds(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 60.0 { format!("{seconds:.1} s") } else { format!("{} min {:02} s", time.as_secs() / 60, time.as_secs() % 60) }
}

pub(crate) struct Step {
    name: String,
    start: Instant,
    /// None where standard error is no terminal.
    bar: Option<ProgressBar>,
    beat: RefCell<Instant>,
}

impl Step {
    fn new(name: &str) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner().with_style(style("  {spinner} {prefix} {wide_msg} {elapsed}"));
            bar.set_prefix(name.to_owned());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        if bar.is_none() {
            line(&format!("  {name} ..."));
        }
        Self { name: name.to_owned(), start: Instant::now(), bar, beat: RefCell::new(Instant::now()) }
    }

    /// What the step does just now.
    pub(crate) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => self.heartbeat(|| text.to_owned()),
        }
    }

    /// `done` of `total` pieces.
    pub(crate) fn pieces(&self, done: u64, total: u64, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_style(style("  {spinner} {prefix} [{bar:30}] {pos}/{len} {msg} {elapsed}"));
            bar.set_message(what.to_owned());
            bar.set_length(total);
            bar.set_position(done);
        } else {
            self.heartbeat(|| format!("{done}/{total} {what}"));
        }
    }

    /// `done` of `total` bytes.
    pub(crate) fn bytes(&self, done: u64, total: u64) {
        let done = done.min(total);
        if let Some(bar) = &self.bar {
            bar.set_style(style("  {spinner} {prefix} [{bar:30}] {bytes}/{total_bytes} {elapsed}"));
            bar.set_length(total);
            bar.set_position(done);
        } else {
            self.heartbeat(|| format!("{} of {}", HumanBytes(done), HumanBytes(total)));
        }
    }

    fn heartbeat(&self, text: impl FnOnce() -> String) {
        let mut beat = self.beat.borrow_mut();
        if beat.elapsed() >= HEARTBEAT {
            *beat = Instant::now();
            line(&format!("  {}: {} ({})", self.name, text(), seconds(self.start.elapsed())));
        }
    }

    fn finish(&self, ok: bool) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let state = if ok { "done" } else { "FAILED" };
        line(&format!("  {}: {state} in {}", self.name, seconds(self.start.elapsed())));
    }
}

fn style(template: &str) -> ProgressStyle {
    // A template that does not parse costs its look, never the work.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_well() {
        assert_eq!(seconds(Duration::from_millis(1234)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(61)), "1 min 01 s");
    }
}
