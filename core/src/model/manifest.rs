//! Artifact identity: a list of files with their SHA-256, checked before a model is loaded (spec C16).
//!
//! A manifest says that the files are the ones somebody looked at. It says nothing about who made them.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind, Result};

/// Bytes of a manifest at most.
const MAX_BYTES: usize = 64 << 10;
/// Files are hashed in pieces of this size.
const PIECE: usize = 1 << 20;
/// What Hob may read of a model's directory.
const READ: [&str; 6] = ["json", "safetensors", "gguf", "txt", "model", "jinja"];
/// Directories below a model's own that are looked at: sentence-transformers' modules lie one below it.
const DEPTH: usize = 2;

/// The files of a model and what they must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    files: BTreeMap<String, String>,
    digest: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    files: BTreeMap<String, String>,
}

impl Manifest {
    /// Reads `{"files": {"model.safetensors": "<64 hex digits>", ...}}`. Names are relative to the model's directory; of a `.gguf`
    /// file it is the file's own name.
    ///
    /// # Errors
    /// `InvalidArgument` for other keys, no files, a name that leads out of the directory, a digest that is none, or over 64 KiB.
    pub fn from_json(text: &str) -> Result<Self> {
        if text.len() > MAX_BYTES {
            return Err(Error::invalid(format!("the manifest has {} bytes; the limit is {MAX_BYTES}", text.len())));
        }
        let written: Written =
            serde_json::from_str(text).map_err(|error| Error::invalid(format!("the manifest is not valid: {error}")))?;
        if written.files.is_empty() {
            return Err(Error::invalid("the manifest lists no files"));
        }
        let mut files = BTreeMap::new();
        for (name, digest) in written.files {
            let plain = Path::new(&name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
            if name.is_empty() || !plain {
                return Err(Error::invalid(format!(
                    "the manifest names {name:?}, which is not a file below the model's directory"
                )));
            }
            if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(Error::invalid(format!("the manifest's digest of {name:?} is not 64 hexadecimal digits")));
            }
            files.insert(name, digest.to_ascii_lowercase());
        }
        // The same for the same files, however the text was laid out.
        let mut hash = Sha256::new();
        for (name, digest) in &files {
            hash.update(name.as_bytes());
            hash.update([0]);
            hash.update(digest.as_bytes());
            hash.update([0]);
        }
        Ok(Self { files, digest: hex(&hash.finalize()) })
    }

    /// SHA-256 over the names and digests, in order: what results are marked with.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Checks a model's directory or file: all that is listed is there and equal, and all that Hob may read is listed. Reads
    /// everything, once; a file that has not changed since (device, inode, size and times) is not read again.
    pub(crate) fn check(&self, location: &Path, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let (root, found) = if location.is_dir() {
            let mut found = Vec::new();
            list(location, location, DEPTH, &mut found)?;
            (location, found)
        } else {
            let name = location.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            (location.parent().unwrap_or(Path::new("")), vec![name])
        };
        if let Some(name) = found.iter().find(|name| !self.files.contains_key(*name)) {
            return Err(Error::bad_model(root.join(name), "manifest", "the manifest does not list this file"));
        }
        for (name, wanted) in &self.files {
            let path = root.join(name);
            let is = digest_of(&path, check)?;
            if is != *wanted {
                return Err(Error::bad_model(&path, "manifest", format!("its SHA-256 is {is}, the manifest says {wanted}")));
            }
        }
        Ok(())
    }
}

fn list(root: &Path, dir: &Path, depth: usize, found: &mut Vec<String>) -> Result<()> {
    let entries = std::fs::read_dir(dir).map_err(|error| Error::io(dir, error))?;
    for entry in entries {
        let path = entry.map_err(|error| Error::io(dir, error))?.path();
        if path.is_dir() {
            if depth > 1 {
                list(root, &path, depth - 1, found)?;
            }
        } else if path.extension().is_some_and(|extension| READ.iter().any(|known| extension == *known))
            && let Ok(name) = path.strip_prefix(root)
        {
            found.push(name.to_string_lossy().into_owned());
        }
    }
    Ok(())
}

/// What tells one state of a file from another.
#[derive(Clone, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// Digests of files seen in this process; a host has a handful of models.
static KNOWN: Mutex<Option<HashMap<PathBuf, (Identity, String)>>> = Mutex::new(None);
const MAX_KNOWN: usize = 4096;

fn digest_of(path: &Path, check: &mut dyn FnMut() -> Result<()>) -> Result<String> {
    let failed = |error: std::io::Error| {
        if error.kind() == std::io::ErrorKind::NotFound {
            return Error::new(ErrorKind::NotFound, format!("{}: the manifest lists it and it is not there", path.display()));
        }
        Error::io(path, error)
    };
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(Error::bad_model(path, "manifest", "is not a regular file"));
    }
    let before = Identity::of(&metadata);
    if let Some((identity, digest)) = KNOWN.lock().get_or_insert_default().get(path)
        && *identity == before
    {
        return Ok(digest.clone());
    }
    let (mut hash, mut piece) = (Sha256::new(), vec![0; PIECE]);
    loop {
        check()?;
        match file.read(&mut piece).map_err(failed)? {
            0 => break,
            read => hash.update(&piece[..read]),
        }
    }
    if Identity::of(&file.metadata().map_err(failed)?) != before {
        return Err(Error::bad_model(path, "manifest", "changed while it was read"));
    }
    let digest = hex(&hash.finalize());
    let mut known = KNOWN.lock();
    let known = known.get_or_insert_default();
    if known.len() >= MAX_KNOWN {
        known.clear();
    }
    known.insert(path.to_owned(), (before, digest.clone()));
    Ok(digest)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> (tempfile::TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        std::fs::write(dir.path().join("README.md"), "not read").unwrap();
        std::fs::create_dir(dir.path().join("1_Pooling")).unwrap();
        std::fs::write(dir.path().join("1_Pooling/config.json"), "abc").unwrap();
        // Of "{}" and "abc".
        let text = r#"{"files": {
            "config.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
            "1_Pooling/config.json": "BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD"}}"#;
        (dir, text.to_owned())
    }

    fn check(manifest: &Manifest, dir: &Path) -> Result<()> {
        manifest.check(dir, &mut || Ok(()))
    }

    #[test]
    fn equal_files_pass_and_any_change_is_named() {
        let (dir, text) = model();
        let manifest = Manifest::from_json(&text).unwrap();
        check(&manifest, dir.path()).unwrap();
        check(&manifest, dir.path()).unwrap();
        std::fs::write(dir.path().join("config.json"), "{ }").unwrap();
        let error = check(&manifest, dir.path()).unwrap_err();
        assert!(error.kind() == ErrorKind::BadModel && error.message().contains("config.json"), "{error}");
        std::fs::remove_file(dir.path().join("config.json")).unwrap();
        assert_eq!(check(&manifest, dir.path()).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_file_that_could_be_read_and_is_not_listed_is_refused() {
        let (dir, text) = model();
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let error = check(&Manifest::from_json(&text).unwrap(), dir.path()).unwrap_err();
        assert!(error.kind() == ErrorKind::BadModel && error.message().contains("tokenizer.json"), "{error}");
    }

    #[test]
    fn the_digest_is_that_of_the_content_not_of_the_layout() {
        let (_dir, text) = model();
        let one = Manifest::from_json(&text).unwrap();
        let other = Manifest::from_json(&text.replace('\n', " ").to_lowercase().replace("1_pooling", "1_Pooling")).unwrap();
        assert_eq!(one.digest(), other.digest());
        assert_eq!(one.digest().len(), 64);
    }

    #[test]
    fn bad_manifests_are_refused() {
        let digest = "0".repeat(64);
        for text in [
            "{}".to_owned(),
            r#"{"files": {}}"#.to_owned(),
            format!(r#"{{"files": {{"../x": "{digest}"}}}}"#),
            format!(r#"{{"files": {{"/x": "{digest}"}}}}"#),
            r#"{"files": {"x": "12"}}"#.to_owned(),
            format!(r#"{{"files": {{"x": "{digest}"}}, "more": 1}}"#),
            " ".repeat(MAX_BYTES + 1),
        ] {
            assert_eq!(Manifest::from_json(&text).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn hashing_can_be_stopped() {
        let (dir, text) = model();
        let manifest = Manifest::from_json(&text).unwrap();
        let stopped = manifest.check(dir.path(), &mut || Err(Error::new(ErrorKind::Cancelled, "stop")));
        assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Cancelled);
    }
}
