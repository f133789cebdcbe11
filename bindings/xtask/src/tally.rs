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

#[cfg(test)]
mod tests {
    use super::*;

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
