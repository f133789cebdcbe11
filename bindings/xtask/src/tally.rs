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
