//! Counts of tests, read off the lines that the test runners close with.

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: Option<Self>) {
        let other = other.unwrap_or_default();
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// cargo's: `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`
pub(crate) fn cargo(line: &str) -> Option<Tally> {
    let (_, counts) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what: &str| {
        counts.split(';').find_map(|part| {
            let (number, name) = part.trim().split_once(' ')?;
            if name == what { number.parse().ok() } else { None }
        })
    };
    Some(Tally { passed: count("passed")?, failed: count("failed")?, skipped: count("ignored")? })
}

/// Swift Testing's, one line for each test: `✔ Test f() passed after 0.1 seconds.`, `✘ Test "A name" failed after ...`, `➜ Test f() skipped`
pub(crate) fn swift(line: &str) -> Option<Tally> {
    let (mark, rest) = line.trim().split_once(' ')?;
    let test =
        rest.trim_start().strip_prefix("Test ").filter(|test| !test.starts_with("run with ") && !test.starts_with("case "))?;
    let mut tally = Tally::default();
    match mark {
        "\u{2714}" if test.contains(" passed after ") => tally.passed = 1,
        "\u{2718}" if test.contains(" failed after ") => tally.failed = 1,
        // Some versions mark it as a failure.
        "\u{279c}" | "\u{2718}" if test.contains(" skipped") => tally.skipped = 1,
        _ => return None,
    }
    Some(tally)
}

/// Node's, one line for each count: `ℹ pass 5`
pub(crate) fn node(line: &str) -> Option<Tally> {
    let (name, count) = line.trim().strip_prefix('ℹ')?.trim().split_once(' ')?;
    one(name, count)
}

/// Bun's, one line for each count: ` 5 pass`
pub(crate) fn bun(line: &str) -> Option<Tally> {
    let (count, name) = line.strip_prefix(' ')?.trim().split_once(' ')?;
    one(name, count)
}

fn one(name: &str, count: &str) -> Option<Tally> {
    let (mut tally, count) = (Tally::default(), count.parse().ok()?);
    match name {
        "pass" => tally.passed = count,
        // A test that was cancelled did not pass.
        "fail" | "cancelled" => tally.failed = count,
        "skip" | "skipped" => tally.skipped = count,
        _ => return None,
    }
    Some(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swift_lines_are_read() {
        let passed = Tally { passed: 1, ..Tally::default() };
        assert_eq!(swift("✔ Test f() passed after 0.001 seconds."), Some(passed));
        assert_eq!(swift("✔ Test \"a name\" passed after 1.2 seconds."), Some(passed));
        assert_eq!(swift("✘ Test f() failed after 0.1 seconds with 1 issue."), Some(Tally { failed: 1, ..Tally::default() }));
        for line in ["➜ Test f() skipped: \"no model\"", "✘ Test f() skipped: \"no model\""] {
            assert_eq!(swift(line), Some(Tally { skipped: 1, ..Tally::default() }), "{line}");
        }
        for line in [
            "✔ Test run with 57 tests passed after 28.8 seconds.",
            "✔ Suite Values passed after 0.1 seconds.",
            "◇ Test f() started.",
            "✘ Test f() recorded an issue at A.swift:1:1: Expectation failed",
            "",
        ] {
            assert_eq!(swift(line), None, "{line}");
        }
    }

    #[test]
    fn lines_of_node_and_bun_are_read() {
        assert_eq!(node("ℹ pass 12"), Some(Tally { passed: 12, ..Tally::default() }));
        assert_eq!(node("ℹ cancelled 1"), Some(Tally { failed: 1, ..Tally::default() }));
        assert_eq!(bun(" 2 skip"), Some(Tally { skipped: 2, ..Tally::default() }));
        assert_eq!(bun(" 0 fail"), Some(Tally::default()));
        for line in ["ℹ tests 12", "ℹ duration_ms 5.5", "pass 5", " 40 expect() calls", "(pass) 5 pass", ""] {
            assert_eq!(node(line).or(bun(line)), None, "{line}");
        }
    }

    #[test]
    fn cargo_lines_are_read() {
        let line = "test result: FAILED. 5 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s";
        assert_eq!(cargo(line), Some(Tally { passed: 5, failed: 2, skipped: 1 }));
        for line in ["", "test a ... ok", "running 3 tests", "test result: ok.", "test result: ok. x passed; 0 failed; 0 ignored"] {
            assert_eq!(cargo(line), None, "{line}");
        }
    }

    #[test]
    fn tallies_add_up() {
        let mut total = Tally::default();
        total.add(Some(Tally { passed: 1, failed: 0, skipped: 2 }));
        total.add(None);
        total.add(Some(Tally { passed: 3, failed: 1, skipped: 0 }));
        assert_eq!(total, Tally { passed: 4, failed: 1, skipped: 2 });
    }
}
