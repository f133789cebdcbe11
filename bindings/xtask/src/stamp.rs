//! A stamp says: this step ran to its end with these inputs and left these files. It is written last, so a step that was
//! stopped has none; and it knows each file's content, so one that was damaged since is made again.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    error::{At, Result},
    store,
};

/// The key of a step: a hash over its inputs, each told apart from its neighbour.
pub(crate) fn key(inputs: &[&str]) -> String {
    let mut hash = Sha256::new();
    for input in inputs {
        hash.update((input.len() as u64).to_le_bytes());
        hash.update(input.as_bytes());
    }
    hex(&hash.finalize())
}

/// SHA-256 of a file, in hex; `tick` is told how many bytes are done.
pub(crate) fn file_sha256(path: &Path, mut tick: impl FnMut(u64)) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..count]);
        done += count as u64;
        tick(done);
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

/// Why a step must run again, or that it need not.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    Current,
    /// It never ran to its end.
    Never,
    /// An input is another one.
    Inputs,
    /// A file that it left is missing or changed.
    Damaged(PathBuf),
}

/// The stamps of one folder; the paths in them are relative to it.
pub(crate) struct Stamps {
    folder: PathBuf,
}

impl Stamps {
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    fn path(&self, step: &str) -> PathBuf {
        self.folder.join(".stamps").join(format!("{step}.json"))
    }

    pub(crate) fn state(&self, step: &str, key: &str) -> State {
        let Some(stamp) = fs::read(self.path(step)).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok()) else {
            return State::Never;
        };
        if stamp["key"] != key {
            return State::Inputs;
        }
        let Some(files) = stamp["files"].as_array() else { return State::Never };
        for file in files {
            let Some(name) = file["path"].as_str() else { return State::Never };
            let path = self.folder.join(name);
            if !matches(&path, file) {
                return State::Damaged(path);
            }
        }
        State::Current
    }

    /// Called before a step changes anything.
    pub(crate) fn remove(&self, step: &str) -> Result<()> {
        store::remove_if_there(&self.path(step))
    }

    /// Called when a step is done; `outputs` are files or folders, links in them excluded.
    pub(crate) fn write(&self, step: &str, key: &str, outputs: &[PathBuf]) -> Result<()> {
        let mut paths = Vec::new();
        for output in outputs {
            list(output, &mut paths).at("read", output)?;
        }
        let mut files = Vec::new();
        for path in paths {
            let meta = path.metadata().at("read", &path)?;
            let sha256 = file_sha256(&path, |_| ()).at("read", &path)?;
            let name = path.strip_prefix(&self.folder).unwrap_or(&path);
            files.push(json!({"path": name.to_string_lossy(), "size": meta.len(), "mtime": mtime(&meta), "sha256": sha256}));
        }
        let stamp = json!({"key": key, "files": files});
        store::write_whole(&self.path(step), format!("{stamp:#}\n").as_bytes())
    }
}

fn matches(path: &Path, record: &Value) -> bool {
    let Ok(meta) = path.metadata() else { return false };
    if record["size"] != meta.len() {
        return false;
    }
    // A copied or restored tree has other times: then the content decides.
    record["mtime"] == mtime(&meta).as_str() || file_sha256(path, |_| ()).is_ok_and(|sha256| record["sha256"] == sha256.as_str())
}

/// As text: nanoseconds since 1970 do not fit JSON's numbers.
fn mtime(meta: &fs::Metadata) -> String {
    let since = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or_else(String::new, |since| since.as_nanos().to_string())
}

fn list(path: &Path, into: &mut Vec<PathBuf>) -> io::Result<()> {
    let kind = fs::symlink_metadata(path)?.file_type();
    if kind.is_dir() {
        let mut entries = fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
        entries.sort();
        for entry in entries {
            list(&entry, into)?;
        }
    } else if kind.is_file() {
        into.push(path.to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamped() -> (tempfile::TempDir, Stamps) {
        let home = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(home.path().join("lib")).expect("create");
        fs::write(home.path().join("lib/a"), "abc").expect("write");
        let stamps = Stamps::new(home.path());
        stamps.write("one", "k", &[home.path().join("lib")]).expect("stamp");
        (home, stamps)
    }

    #[test]
    fn keys_tell_inputs_apart() {
        assert_eq!(key(&["a", "b"]), key(&["a", "b"]));
        assert_ne!(key(&["a", "b"]), key(&["ab", ""]));
        assert_ne!(key(&["a", "b"]), key(&["b", "a"]));
    }

    #[test]
    fn sha256_is_the_standard_one() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let path = home.path().join("abc");
        fs::write(&path, "abc").expect("write");
        let sha256 = file_sha256(&path, |_| ()).expect("read");
        assert_eq!(sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn current_until_an_input_changes() {
        let (_home, stamps) = stamped();
        assert_eq!(stamps.state("one", "k"), State::Current);
        assert_eq!(stamps.state("one", "other"), State::Inputs);
        assert_eq!(stamps.state("two", "k"), State::Never);
    }

    #[test]
    fn removed_or_torn_stamps_count_as_never() {
        let (home, stamps) = stamped();
        fs::write(home.path().join(".stamps/one.json"), "{\"key\": \"k\"").expect("write");
        assert_eq!(stamps.state("one", "k"), State::Never);
        stamps.remove("one").expect("remove");
        stamps.remove("one").expect("a second time");
        assert_eq!(stamps.state("one", "k"), State::Never);
    }

    #[test]
    fn damage_is_seen_and_a_mere_copy_is_not() {
        let (home, stamps) = stamped();
        let path = home.path().join("lib/a");
        fs::write(&path, "abc").expect("the same bytes at another time");
        assert_eq!(stamps.state("one", "k"), State::Current);
        fs::write(&path, "abd").expect("write");
        assert_eq!(stamps.state("one", "k"), State::Damaged(path.clone()));
        fs::remove_file(&path).expect("remove");
        assert_eq!(stamps.state("one", "k"), State::Damaged(path));
    }
}
