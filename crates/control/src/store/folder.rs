//! [`Folder`]: files of one folder that is ours alone, each written so that a crash leaves the old or the new one.
//!
//! A write is: temporary file in the same folder, fsync, rename, fsync of the folder (AI-322). Files are mode 0600,
//! folders 0700 (AI-323).

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use super::StoreError;

/// A folder of this user.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// So many steps are made; then everything fails and nothing is cleaned up, as in a crash.
    #[cfg(test)]
    pub(super) steps_left: std::sync::Mutex<Option<usize>>,
    #[cfg(test)]
    pub(super) syncs: AtomicU64,
}

/// A file's place in the order of use, and its size.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileUse {
    pub(super) bytes: u64,
    pub(super) used: SystemTime,
}

/// Held while several files must change together; released when it is dropped, or the process ends.
#[must_use]
pub(super) struct FolderLock(#[expect(dead_code, reason = "its descriptor holds the lock")] File);

impl Folder {
    /// Opens a folder, and creates it if it is missing.
    pub(super) fn open(path: PathBuf) -> Result<Self, StoreError> {
        let opened = (|| {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)?;
            fs::metadata(&path)
        })();
        let metadata = opened.map_err(|source| StoreError::Io {
            action: "create",
            path: path.clone(),
            source,
        })?;
        let folder = Self {
            path,
            #[cfg(test)]
            steps_left: std::sync::Mutex::default(),
            #[cfg(test)]
            syncs: AtomicU64::new(0),
        };
        if !is_ours(&metadata) {
            return Err(StoreError::ForeignOwner(folder.path));
        }
        // One that an earlier program made may be open to others; whoever can write here can have code run.
        if metadata.mode() & OTHERS != 0 {
            fs::set_permissions(&folder.path, Permissions::from_mode(0o700))
                .map_err(|error| folder.error("protect", error))?;
        }
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn error(&self, action: &'static str, source: io::Error) -> StoreError {
        StoreError::Io {
            action,
            path: self.path.clone(),
            source,
        }
    }

    /// When a name in it changed last.
    pub(super) fn changed(&self) -> io::Result<SystemTime> {
        fs::metadata(&self.path)?.modified()
    }

    /// Replaces a file; `parts` follow each other in it.
    pub(super) fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        self.put(name, parts)?;
        self.sync()
    }

    /// The same, but [`Folder::sync`] makes its name last.
    pub(super) fn put(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        self.step()?;
        let (temporary, file) = self.create_temporary()?;
        let written = self.write_temporary(&temporary, file, name, parts);
        // A crash cannot clean up, so its test must not either.
        if written.as_ref().is_err_and(|error| !is_crash(error)) {
            // What matters is the first error.
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn write_temporary(
        &self,
        temporary: &Path,
        mut file: File,
        name: &str,
        parts: &[&[u8]],
    ) -> io::Result<()> {
        self.step()?;
        for part in parts {
            let (first, rest) = part.split_at(part.len() / 2);
            file.write_all(first)?;
            self.step()?;
            file.write_all(rest)?;
        }
        self.step()?;
        file.sync_all()?;
        self.step()?;
        fs::rename(temporary, self.path.join(name))
    }

    fn create_temporary(&self) -> io::Result<(PathBuf, File)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{TEMPORARY}{}-{number}", std::process::id());
            let path = self.path.join(name);
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o600);
            match options.open(&path) {
                Ok(file) => return Ok((path, file)),
                // A process with this number has crashed here before.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns a file's bytes; `None` if there is none, or it has more than `limit`.
    pub(super) fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let Some((file, metadata)) = self.open_file(name)? else {
            return Ok(None);
        };
        read_all(file, metadata.len(), limit)
    }

    /// As [`Folder::read`], but `None` too if another user could have written the file.
    pub(super) fn read_private(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        match self.open_file(name)? {
            Some((file, metadata)) if is_ours(&metadata) && metadata.mode() & OTHERS == 0 => {
                read_all(file, metadata.len(), limit)
            }
            _ => Ok(None),
        }
    }

    /// Opens a regular file; what it is is asked of the descriptor, so that nothing changes in between.
    fn open_file(&self, name: &str) -> io::Result<Option<(File, fs::Metadata)>> {
        // A link would lead out of the folder, and opening a pipe would wait for its writer.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits().cast_signed())
            .open(self.path.join(name));
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // What NOFOLLOW answers for a link.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        Ok(metadata.is_file().then_some((file, metadata)))
    }

    /// Returns a file's size and when it was used last.
    pub(super) fn file_use(&self, name: &str) -> io::Result<Option<FileUse>> {
        match fs::symlink_metadata(self.path.join(name)) {
            Ok(metadata) => file_use(&metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Notes that a file was used now. The time of change serves for it: nothing else is changed in place.
    pub(super) fn touch(&self, name: &str, now: SystemTime) -> io::Result<()> {
        File::open(self.path.join(name))?.set_modified(now)
    }

    /// Removes a file, if it is there. [`Folder::sync`] makes it last.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        self.step()?;
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the names in the folder last.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.step()?;
        #[cfg(test)]
        self.syncs.fetch_add(1, Ordering::Relaxed);
        File::open(&self.path)?.sync_all()
    }

    /// Calls `each` with each name. Faster than [`Folder::for_each`], which asks about each file.
    pub(super) fn for_each_name(&self, mut each: impl FnMut(&str)) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            if let Some(name) = entry?.file_name().to_str() {
                each(name);
            }
        }
        Ok(())
    }

    /// Calls `each` with the name and use of each regular file.
    pub(super) fn for_each(&self, mut each: impl FnMut(&str, FileUse)) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let found = match entry.metadata() {
                Ok(metadata) => file_use(&metadata)?,
                // Removed since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
            if let (Some(name), Some(found)) = (entry.file_name().to_str(), found) {
                each(name, found);
            }
        }
        Ok(())
    }

    /// Waits for other threads and processes that change several files, and keeps them out.
    pub(super) fn lock(&self) -> Result<FolderLock, StoreError> {
        let locked = (|| {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600);
            // Each has a descriptor of its own, so threads of one process exclude each other too.
            let file = options.open(self.path.join(LOCK))?;
            loop {
                match rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive) {
                    Ok(()) => return Ok(FolderLock(file)),
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        })();
        locked.map_err(|error| self.error("lock", error))
    }

    /// Removes the temporary files of processes that were killed. Under the lock, so nobody else is writing one.
    pub(super) fn remove_temporaries(&self) -> Result<(), StoreError> {
        let mut left = Vec::new();
        let listed = self.for_each_name(|name| {
            if name.starts_with(TEMPORARY) {
                left.push(name.to_owned());
            }
        });
        let removed = listed.and_then(|()| left.iter().try_for_each(|name| self.remove(name)));
        removed.map_err(|error| self.error("tidy", error))
    }

    /// A point at which the process could die.
    #[cfg(not(test))]
    #[expect(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "tests stop here"
    )]
    const fn step(&self) -> io::Result<()> {
        Ok(())
    }

    #[cfg(test)]
    fn step(&self) -> io::Result<()> {
        match &mut *self.steps_left.lock().unwrap() {
            Some(0) => return Err(io::Error::other(CRASH)),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(())
    }
}

fn read_all(file: File, length: u64, limit: u64) -> io::Result<Option<Vec<u8>>> {
    if length > limit {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn file_use(metadata: &fs::Metadata) -> io::Result<Option<FileUse>> {
    Ok(metadata.is_file().then_some(FileUse {
        bytes: metadata.len(),
        used: metadata.modified()?,
    }))
}

fn is_ours(metadata: &fs::Metadata) -> bool {
    metadata.uid() == rustix::process::geteuid().as_raw()
}

fn is_crash(error: &io::Error) -> bool {
    cfg!(test) && error.to_string() == CRASH
}

/// How names of temporary files begin.
const TEMPORARY: &str = ".tmp-";

const LOCK: &str = ".lock";

/// The mode bits of everybody but the owner.
const OTHERS: u32 = 0o077;

/// The error of a simulated crash.
const CRASH: &str = "crashed here";
