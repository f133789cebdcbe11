//! The one thing that a laid-out library needs changed: where it looks for its neighbours.

use std::{fs, path::Path};

use crate::error::{At, Error, Result};

const DYNAMIC: u32 = 2;
const LOAD: u32 = 1;
const RPATH: u64 = 15;
const RUNPATH: u64 = 29;
const STRTAB: u64 = 5;

/// Replaces the run path of a 64-bit little-endian ELF file, in place; the new one must not be longer. A file without one is left.
pub(crate) fn set_run_path(file: &Path, to: &str) -> Result<()> {
    let mut bytes = fs::read(file).at("read", file)?;
    let broken = || Error::new(format!("{} is no ELF library as expected", file.display()));
    for at in run_paths(&bytes).ok_or_else(broken)? {
        let length = bytes[at..].iter().position(|&byte| byte == 0).ok_or_else(broken)?;
        if to.len() > length {
            return Err(Error::new(format!("the run path of {} has no room for {to}", file.display())));
        }
        bytes[at..at + length].fill(0);
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    fs::write(file, bytes).at("write", file)
}

/// The offsets of the file's run paths, as texts that end with a NUL.
fn run_paths(bytes: &[u8]) -> Option<Vec<usize>> {
    if bytes.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, size, count) = (number::<8>(bytes, 32)?, number::<2>(bytes, 54)?, number::<2>(bytes, 56)?);
    let segments: Vec<usize> = (0..count).map(|index| usize::try_from(table + index * size).ok()).collect::<Option<_>>()?;
    let kind = |at: usize| number::<4>(bytes, at);
    let to_offset = |address: u64| {
        segments.iter().find_map(|&at| {
            let (offset, start, length) = (number::<8>(bytes, at + 8)?, number::<8>(bytes, at + 16)?, number::<8>(bytes, at + 32)?);
            (kind(at)? == u64::from(LOAD) && (start..start + length).contains(&address)).then(|| offset + address - start)
        })
    };
    let dynamic = segments.iter().copied().find(|&at| kind(at) == Some(u64::from(DYNAMIC)))?;
    let (offset, length) = (usize::try_from(number::<8>(bytes, dynamic + 8)?).ok()?, number::<8>(bytes, dynamic + 32)?);
    let entries: Vec<(u64, u64)> = (0..usize::try_from(length).ok()? / 16)
        .map(|index| Some((number::<8>(bytes, offset + index * 16)?, number::<8>(bytes, offset + index * 16 + 8)?)))
        .collect::<Option<_>>()?;
    let strings = to_offset(entries.iter().find(|(tag, _)| *tag == STRTAB)?.1)?;
    let wanted = entries.iter().filter(|(tag, _)| *tag == RPATH || *tag == RUNPATH);
    wanted.map(|(_, value)| usize::try_from(strings + value).ok().filter(|&at| at < bytes.len())).collect()
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    Some(bytes.get(at..at.checked_add(N)?)?.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::proc::capture;

    #[test]
    fn a_run_path_is_replaced_and_the_library_still_loads() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let (source, library) = (home.path().join("a.c"), home.path().join("liba.so"));
        fs::write(&source, "int a(void) { return 1; }\n").expect("write");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-Wl,-rpath,/some/where/long"]).arg(&source).arg("-o").arg(&library);
        capture(&mut cc, |_| ()).expect("cc runs");
        set_run_path(&library, "$ORIGIN").expect("there is room");
        let bytes = fs::read(&library).expect("read");
        let places = run_paths(&bytes).expect("ELF");
        assert!(!places.is_empty() && bytes[places[0]..].starts_with(b"$ORIGIN\0"));
        let main = home.path().join("main.c");
        fs::write(&main, "int a(void); int main(void) { return a() - 1; }\n").expect("write");
        let program = home.path().join("main");
        let mut cc = Command::new("cc");
        cc.arg(&main).arg(&library).arg("-o").arg(&program);
        capture(&mut cc, |_| ()).expect("it links");
        capture(&mut Command::new(&program), |_| ()).expect("it runs");
        set_run_path(&library, "/much/longer/than/before").expect_err("no room");
        set_run_path(&source, "x").expect_err("no ELF");
    }
}
