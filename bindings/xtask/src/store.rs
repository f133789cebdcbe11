//! Files that are whole or absent: a lock, a scratch folder, and renames into place.

use std::{
    fs::{self, File, TryLockError},
    io::Write,
    path::{Path, PathBuf},
    process,
};

use crate::{
    error::{At, Error, Result},
    ui,
};

/// One holder at a time, across processes; the system drops it however the holder ends.
pub(crate) struct Lock(#[expect(dead_code, reason = "the open file is the lock")] File);

impl Lock {
    pub(crate) fn take(folder: &Path, verb: &str) -> Result<Self> {
        fs::create_dir_all(folder).at("create", folder)?;
        let path = folder.join(".lock");
        let file = File::options().create(true).append(true).open(&path).at("open", &path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                ui::line(&format!("another `cargo xtask {verb}` is at work here; waiting for it to end"));
                file.lock().at("lock", &path)?;
            }
            Err(TryLockError::Error(error)) => return Err(error).at("lock", &path),
        }
        Ok(Self(file))
    }
}

/// A scratch folder beside the results (so that a rename can move them), removed at the end. What a killed run left is
/// removed by the next one; the caller holds the lock.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let all = folder.join(".work");
        // A child of a killed run may still write there for a moment: what cannot be cleared now is cleared next time, and
        // each run has a folder of its own name.
        let _ = fs::remove_dir_all(&all);
        let path = all.join(process::id().to_string());
        if path.exists() {
            fs::remove_dir_all(&path).at("clear", &path)?;
        }
        fs::create_dir_all(&path).at("create", &path)?;
        Ok(Self(path))
    }

    /// An empty folder of that name.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        if path.exists() {
            fs::remove_dir_all(&path).at("clear", &path)?;
        }
        fs::create_dir_all(&path).at("create", &path)?;
        Ok(path)
    }

    /// Moves a finished file or folder to its place, and what was there out of the way first.
    pub(crate) fn place(&self, from: &Path, to: &Path) -> Result<()> {
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).at("create", parent)?;
        }
        if to.is_dir() {
            let old = self.folder("replaced")?;
            fs::remove_dir(&old).at("clear", &old)?;
            fs::rename(to, &old).at("move away", to)?;
        }
        fs::rename(from, to).at("move into place", to)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(all) = self.0.parent() {
            // Left-overs only cost room until the next run clears them.
            let _ = fs::remove_dir_all(all);
        }
    }
}

/// Writes a whole file or nothing.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().ok_or_else(|| Error::new(format!("{} has no folder", path.display())))?;
    fs::create_dir_all(folder).at("create", folder)?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", process::id()));
    let temporary = PathBuf::from(temporary);
    let mut file = File::create(&temporary).at("create", &temporary)?;
    file.write_all(bytes).at("write", &temporary)?;
    file.sync_all().at("write", &temporary)?;
    fs::rename(&temporary, path).at("move into place", path)
}

/// Removes a file if it is there.
pub(crate) fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).at("remove", path),
        _ => Ok(()),
    }
}

/// Bytes of all files below a folder; what vanishes meanwhile does not count.
pub(crate) fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => folder_bytes(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_replaces_a_folder_and_clears_the_scratch() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let dest = home.path().join("dest");
        for round in ["one", "two"] {
            let scratch = Scratch::new(home.path()).expect("scratch");
            let made = scratch.folder("made").expect("folder");
            fs::write(made.join(round), round).expect("write");
            scratch.place(&made, &dest).expect("place");
        }
        assert!(dest.join("two").exists() && !dest.join("one").exists());
        assert!(!home.path().join(".work").exists());
    }

    #[test]
    fn scratch_clears_what_a_killed_run_left() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let left = home.path().join(".work/1");
        fs::create_dir_all(&left).expect("create");
        let scratch = Scratch::new(home.path()).expect("scratch");
        assert!(!left.exists());
        drop(scratch);
    }

    #[test]
    fn a_lock_excludes_and_ends_with_its_holder() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let lock = Lock::take(home.path(), "setup").expect("free");
        let other = File::options().append(true).open(home.path().join(".lock")).expect("open");
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(lock);
        other.try_lock().expect("free again");
    }

    #[test]
    fn write_whole_replaces() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let path = home.path().join("a/b");
        write_whole(&path, b"1").expect("write");
        write_whole(&path, b"2").expect("write");
        assert_eq!(fs::read(&path).expect("read"), b"2");
        assert_eq!(fs::read_dir(home.path().join("a")).expect("list").count(), 1);
    }
}
