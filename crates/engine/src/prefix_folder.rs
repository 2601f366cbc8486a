//! [`PrefixDisk`]: files of saved prefixes, each with a number; and [`PrefixFolder`], which has them in a folder.
//!
//! A file is written once and never changed, and no number is used twice: whoever has opened one reads what was written. The
//! contents are [`crate::prefix_entry`]'s. Nothing here is synced to the disk: what is lost by a failure of the machine is
//! computed again, and checksums tell.

use std::fs::{File, FileTimes, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

/// The number of a file.
pub(crate) type FileId = u64;

/// A file that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListedFile {
    /// When it was used for the last time.
    pub(crate) used: SystemTime,
    pub(crate) id: FileId,
    /// Its length.
    pub(crate) bytes: u64,
}

/// Where saved prefixes are. Called from threads that may wait.
pub(crate) trait PrefixDisk: Send + Sync {
    /// Takes possession, and returns the files that are there; called once, before anything else.
    ///
    /// # Errors
    /// If that is not possible, or another process has it.
    fn open(&self) -> io::Result<Vec<ListedFile>>;

    /// Opens a file, and returns its length.
    ///
    /// # Errors
    /// If it is not there or cannot be read.
    fn read(&self, file: FileId) -> io::Result<(Box<dyn Read>, u64)>;

    /// Writes a new file of these parts. It is there as a whole or not at all.
    ///
    /// # Errors
    /// If that fails, for example because the disk is full.
    fn write(&self, file: FileId, parts: &[&[u8]]) -> io::Result<()>;

    /// Removes a file. It is no error if it is gone.
    ///
    /// # Errors
    /// If it stays.
    fn remove(&self, file: FileId) -> io::Result<()>;

    /// Marks a file as used at this time.
    fn mark_used(&self, file: FileId, when: SystemTime);
}

/// A folder that belongs to one engine of one process at a time. The files hold the tokens of prompts, so only the owner can
/// read them.
#[derive(Debug)]
pub(crate) struct PrefixFolder {
    path: PathBuf,
    /// Locked as long as this value lives.
    lock: OnceLock<File>,
}

impl PrefixFolder {
    pub(crate) fn new(path: PathBuf) -> Self {
        let lock = OnceLock::new();
        Self { path, lock }
    }

    fn path(&self, file: FileId) -> PathBuf {
        self.path.join(format!("{file:016x}{ENDING}"))
    }

    /// Where a file is until it is complete.
    fn staging(&self, file: FileId) -> PathBuf {
        self.path.join(format!("{file:016x}{STAGED}"))
    }
}

const ENDING: &str = ".prefix";
const STAGED: &str = ".new";
const LOCK: &str = "lock";

impl PrefixDisk for PrefixFolder {
    fn open(&self) -> io::Result<Vec<ListedFile>> {
        create_private(&self.path)?;
        let lock = lock(&self.path.join(LOCK))?;
        self.lock.get_or_init(|| lock);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let Some((id, ending)) = entry.file_name().to_str().and_then(file_of) else {
                continue;
            };
            if ending == STAGED {
                // Only a process that was killed has left one behind. What cannot be removed is in nobody's way.
                let _ = std::fs::remove_file(entry.path());
                continue;
            }
            // It may have vanished.
            let found = entry.metadata();
            let listed = found.and_then(|found| {
                Ok(ListedFile {
                    used: found.modified()?,
                    id,
                    bytes: found.len(),
                })
            });
            files.extend(listed.ok());
        }
        Ok(files)
    }

    fn read(&self, file: FileId) -> io::Result<(Box<dyn Read>, u64)> {
        let path = self.path(file);
        // Before it is opened: opening a pipe waits for its writer. Links are not followed.
        if !std::fs::symlink_metadata(&path)?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        Ok((Box::new(BufReader::with_capacity(READ_BYTES, file)), length))
    }

    fn write(&self, file: FileId, parts: &[&[u8]]) -> io::Result<()> {
        let staging = self.staging(file);
        let mut options = OpenOptions::new();
        // Never a file that is there, which might be a link to another one.
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut out = options.open(&staging)?;
        let written = parts.iter().try_for_each(|part| out.write_all(part));
        drop(out);
        let placed = written.and_then(|()| std::fs::rename(&staging, self.path(file)));
        if placed.is_err() {
            // What is incomplete is of no use. The first error is the one to report.
            let _ = std::fs::remove_file(&staging);
        }
        placed
    }

    fn remove(&self, file: FileId) -> io::Result<()> {
        match std::fs::remove_file(self.path(file)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn mark_used(&self, file: FileId, when: SystemTime) {
        // Without it, the file is older than it could be after the next start.
        let times = FileTimes::new().set_modified(when);
        let file = OpenOptions::new().append(true).open(self.path(file));
        let _ = file.and_then(|file| file.set_times(times));
    }
}

/// The head of an entry is read in one call, and its state passes the buffer by.
const READ_BYTES: usize = 64 << 10;

/// Returns the number and the ending of a file of ours by its name, which is written in one way only.
fn file_of(name: &str) -> Option<(FileId, &'static str)> {
    let (number, ending) = name.split_at_checked(16)?;
    let ending = [ENDING, STAGED].into_iter().find(|it| *it == ending)?;
    // Far below those that would overflow.
    let id = FileId::from_str_radix(number, 16).ok();
    let id = id.filter(|id| *id < 1 << 62 && format!("{id:016x}") == number)?;
    Some((id, ending))
}

/// Creates a folder that only its owner can list. One that exists stays as it is, if nobody else could have put files into it.
fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)?;
    let found = std::fs::symlink_metadata(folder)?;
    if !found.is_dir() {
        return Err(io::Error::other("it is a link: name the folder itself"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other("it belongs to another user"));
        }
        // Its group may: that is how volumes are given to the only user of a container.
        if found.mode() & 0o002 != 0 {
            return Err(io::Error::other("others can write to it: chmod o-w"));
        }
    }
    Ok(())
}

/// Locks a file until it is closed, at the latest with its process.
fn lock(path: &Path) -> io::Result<File> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        found => {
            if !found?.is_file() {
                return Err(io::Error::other("its file `lock` is not a regular file"));
            }
        }
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(io::Error::other(
            "another process uses it: give each server a folder of its own",
        )),
        Err(std::fs::TryLockError::Error(error)) => Err(error),
    }
}
