//! The folder of downloaded models (`docs/models.md`).
//!
//! ```text
//!   DIR/hf/OWNER/REPO/REVISION/listing.json     the hub's list of files, when it was asked last
//!                              FILE.gguf        a complete, verified file
//!                              FILE.gguf.json   its size, checksum, validator and commit
//!                              FILE.gguf.used   modified when the file was last used
//!                              FILE.gguf.ID.part  what was received of a version of the file
//!   DIR/web/SCHEME/HOST/PATH.gguf               the same for URLs
//!   DIR/web/SCHEME/HOST/?ID/PATH.gguf           and for those with a query
//! ```
//!
//! Locks are on the files themselves: shared while a process has a model loaded, exclusive while it is replaced or
//! removed, and on a `.part` while it is written. A lock is worth nothing if the path names another file by then, so that
//! is checked after each.

use std::fs::{File, TryLockError};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::io::Errno;
use sapwood_net::hub::{HubFile, HubListing};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use url::Url;

use super::selection::SplitName;
use super::source::{HubSource, host, is_gguf};

/// The folder.
#[derive(Clone, Debug)]
pub(super) struct ModelFolder(pub(super) PathBuf);

/// What is known of a complete file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileRecord {
    pub(super) bytes: u64,
    pub(super) sha256: Option<String>,
    pub(super) validator: Option<String>,
    /// The commit that it was listed with: parts of a split model with different ones do not belong together.
    #[serde(default)]
    pub(super) commit: Option<String>,
}

/// A file in the folder, complete or not.
#[derive(Clone, Debug)]
pub(super) struct CachedFile {
    /// Where it is when it is complete.
    pub(super) path: PathBuf,
    /// The bytes that it takes.
    pub(super) bytes: u64,
    pub(super) is_complete: bool,
    /// When it was last used or written.
    pub(super) used: SystemTime,
}

/// A lock of a file; released when dropped.
#[derive(Debug)]
pub(super) struct FileLock {
    pub(super) file: File,
}

/// Why there is no lock.
#[derive(Debug)]
pub(super) enum NoLock {
    /// Another process has one.
    Held,
    /// The file has been removed or replaced meanwhile.
    Gone,
    Io(io::Error),
}

#[derive(Serialize, Deserialize)]
struct StoredListing {
    commit: String,
    /// The first file of what the repository's name without a choice stands for.
    #[serde(default)]
    usual: Option<String>,
    files: Vec<StoredFile>,
}

#[derive(Serialize, Deserialize)]
struct StoredFile {
    path: String,
    bytes: Option<u64>,
    sha256: Option<String>,
}

impl ModelFolder {
    /// The folder of a repository at a revision.
    pub(super) fn of_repo(&self, source: &HubSource) -> PathBuf {
        // Neither part has a character that the other replaces, so no two revisions have one folder.
        let revision = source.revision.replace('/', "%2F");
        self.0.join(HUB).join(&source.repo).join(revision)
    }

    /// The file of a URL.
    pub(super) fn of_url(&self, url: &Url) -> PathBuf {
        let host = host(url).replace(':', "%3A");
        let folder = self.0.join(WEB).join(url.scheme()).join(host);
        // No path of a URL has a question mark.
        let folder = match url.query().unwrap_or_default() {
            "" => folder,
            query => folder.join(format!("?{}", query_id(query))),
        };
        folder.join(url.path().trim_start_matches('/'))
    }

    /// The name of a model by its first file: what `sapwood models rm` takes.
    pub(super) fn name(&self, path: &Path) -> String {
        let relative = path.strip_prefix(&self.0).unwrap_or(path);
        let text = relative.to_string_lossy();
        let mut parts = text.splitn(5, '/');
        let mut next = || parts.next().unwrap_or_default();
        match next() {
            HUB => {
                let (owner, repo, revision, file) = (next(), next(), next(), next());
                let revision = match revision {
                    super::source::MAIN => String::new(),
                    revision => format!("@{}", revision.replace("%2F", "/")),
                };
                format!("{HUB}:{owner}/{repo}{revision}:{file}")
            }
            WEB => {
                let rest = text.split_once('/').map_or("", |(_, rest)| rest);
                let (scheme, rest) = rest.split_once('/').unwrap_or((rest, ""));
                let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
                let id = path.strip_prefix('?').and_then(|path| path.split_once('/'));
                let (path, query) = match id {
                    Some((id, path)) => (path, format!("?{QUERY_ID}{id}")),
                    None => (path, String::new()),
                };
                format!("{scheme}://{}/{path}{query}", host.replace("%3A", ":"))
            }
            _ => text.into_owned(),
        }
    }

    /// All files below `folder`, in the order of their paths.
    ///
    /// # Errors
    /// A folder cannot be read. One that does not exist is empty.
    pub(super) fn files(folder: &Path) -> io::Result<Vec<CachedFile>> {
        let mut files: Vec<CachedFile> = Vec::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = match std::fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            for entry in entries {
                let path = entry?.path();
                // Links are not followed: the folder has none of its own.
                let metadata = std::fs::symlink_metadata(&path)?;
                if metadata.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = path.to_string_lossy();
                let part = part_of(&text).map(PathBuf::from);
                if part.is_none() && !is_gguf(&text) {
                    continue;
                }
                let modified = |metadata: std::fs::Metadata| metadata.modified().ok();
                let used = std::fs::symlink_metadata(used_path(&path)).ok();
                let used = used.and_then(modified);
                files.push(CachedFile {
                    is_complete: part.is_none(),
                    bytes: metadata.len(),
                    used: used
                        .max(modified(metadata))
                        .unwrap_or(SystemTime::UNIX_EPOCH),
                    path: part.unwrap_or(path),
                });
            }
        }
        files.sort_by(|a, b| (&a.path, b.is_complete).cmp(&(&b.path, a.is_complete)));
        // A part beside a complete file is one of another version, and goes with it.
        files.dedup_by(|next, first| {
            let same = next.path == first.path;
            if same {
                first.bytes += next.bytes;
            }
            same
        });
        Ok(files)
    }

    /// The file that a repository's name without a choice stood for when it was last pulled.
    pub(super) fn usual(&self, source: &HubSource) -> Option<String> {
        let stored: StoredListing = read_json(&self.of_repo(source).join(LISTING))?;
        // Somebody may have edited the file since.
        stored
            .usual
            .filter(|path| sapwood_net::hub::is_safe_path(path) && is_gguf(path))
    }

    /// The stored list of a repository's files.
    pub(super) fn listing(&self, source: &HubSource) -> Option<HubListing> {
        let stored: StoredListing = read_json(&self.of_repo(source).join(LISTING))?;
        let files = stored.files.into_iter().map(|file| HubFile {
            path: file.path,
            bytes: file.bytes,
            sha256: file.sha256,
        });
        // What a hub lists was checked; somebody may have edited the file since.
        let files = files.filter(|file| sapwood_net::hub::is_safe_path(&file.path));
        Some(HubListing {
            commit: stored.commit,
            files: files.collect(),
        })
    }

    /// Stores the list of a repository's files; of those alone that may be models. `usual`: see [`Self::usual`].
    pub(super) fn store_listing(
        &self,
        source: &HubSource,
        listing: &HubListing,
        usual: Option<String>,
    ) -> io::Result<()> {
        let files = listing.files.iter().filter(|file| is_gguf(&file.path));
        let stored = StoredListing {
            commit: listing.commit.clone(),
            usual,
            files: files
                .map(|file| StoredFile {
                    path: file.path.clone(),
                    bytes: file.bytes,
                    sha256: file.sha256.clone(),
                })
                .collect(),
        };
        let folder = self.of_repo(source);
        std::fs::create_dir_all(&folder)?;
        write_json(&folder.join(LISTING), &stored)
    }

    /// Removes folders without models, from `folder` upwards.
    pub(super) fn prune(&self, folder: &Path) {
        for folder in folder.ancestors() {
            if folder == self.0 || !folder.starts_with(&self.0) {
                return;
            }
            if Self::files(folder).is_ok_and(|files| files.is_empty()) {
                remove_notes(folder);
            }
            // Fails where there is anything else.
            if std::fs::remove_dir(folder).is_err() {
                return;
            }
        }
    }
}

impl FileRecord {
    pub(super) fn read(path: &Path) -> Option<Self> {
        read_json(&beside(path, ".json"))
    }

    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        write_json(&beside(path, ".json"), self)
    }

    /// The record of a file that is being replaced: it fits none.
    pub(super) fn replacing() -> Self {
        Self {
            bytes: u64::MAX,
            ..Self::default()
        }
    }

    /// Whether the file has the recorded length.
    pub(super) fn fits(&self, path: &Path) -> bool {
        let there = std::fs::metadata(path);
        there.is_ok_and(|there| there.is_file() && there.len() == self.bytes)
    }
}

impl FileLock {
    /// Locks a complete file for reading it, and notes that it is used now.
    ///
    /// # Errors
    /// [`NoLock`].
    pub(super) fn shared(path: &Path) -> Result<Self, NoLock> {
        let file = File::open(path).map_err(NoLock::of)?;
        let lock = Self::checked(path, file, File::try_lock_shared)?;
        // Beside the model: in a layer of a container image, a change of its own time would copy all of it. Errors are
        // ignored: the folder may be read-only, and then nothing is ever removed from it.
        let _ = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(used_path(path))
            .and_then(|used| used.set_modified(SystemTime::now()));
        Ok(lock)
    }

    /// Locks a complete file for replacing or removing it.
    ///
    /// # Errors
    /// [`NoLock`].
    pub(super) fn exclusive(path: &Path) -> Result<Self, NoLock> {
        let file = File::open(path).map_err(NoLock::of)?;
        let locked = Self::checked(path, file, File::try_lock);
        match locked {
            // NFS locks as POSIX does: whoever writes. Not from the start, because opening a file of a container image's
            // layer for writing copies it.
            Err(NoLock::Io(error)) if is(&error, Errno::BADF) => {
                let file = File::options().read(true).write(true).open(path);
                Self::checked(path, file.map_err(NoLock::of)?, File::try_lock)
            }
            locked => locked,
        }
    }

    /// Locks a part for writing it, and creates it if it does not exist.
    ///
    /// # Errors
    /// [`NoLock`].
    pub(super) fn part(path: &Path) -> Result<Self, NoLock> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        Self::checked(path, file.map_err(NoLock::Io)?, File::try_lock)
    }

    fn checked(
        path: &Path,
        file: File,
        lock: impl FnOnce(&File) -> Result<(), TryLockError>,
    ) -> Result<Self, NoLock> {
        match lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(NoLock::Held),
            // Some network file systems have no locks; a model there can be loaded as any other file.
            Err(TryLockError::Error(error)) if has_no_locks(&error) => {}
            Err(TryLockError::Error(error)) => return Err(NoLock::Io(error)),
        }
        let mine = file.metadata().map_err(NoLock::Io)?;
        let there = std::fs::metadata(path).map_err(NoLock::of)?;
        if (mine.dev(), mine.ino()) != (there.dev(), there.ino()) {
            return Err(NoLock::Gone);
        }
        Ok(Self { file })
    }
}

/// Whether a file system says that it has no locks.
fn has_no_locks(error: &io::Error) -> bool {
    // NFS without its lock service says `NOLCK`.
    error.kind() == io::ErrorKind::Unsupported || is(error, Errno::NOLCK)
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

impl NoLock {
    fn of(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Gone,
            _ => Self::Io(error),
        }
    }
}

/// What stands for a query in the folder. The query itself may have a key in it.
fn query_id(query: &str) -> String {
    // The name in the list of downloaded models names the file again.
    if let Some(id) = query.strip_prefix(QUERY_ID)
        && id.len() == QUERY_ID_DIGITS
        && id.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return id.to_owned();
    }
    let sum = Sha256::digest(query);
    let digits = sum.iter().map(|byte| format!("{byte:02x}"));
    digits.take(QUERY_ID_DIGITS / 2).collect()
}

/// The path of the part of `path` for the version of the file with this id.
pub(super) fn part_path(path: &Path, id: &str) -> PathBuf {
    beside(path, &format!(".{id}{PART}"))
}

/// The parts of `path`, of all versions.
pub(super) fn parts_of(path: &Path) -> Vec<PathBuf> {
    let entries = path
        .parent()
        .and_then(|folder| std::fs::read_dir(folder).ok());
    let paths = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    paths
        .filter(|part| part_of(&part.to_string_lossy()).is_some_and(|of| Path::new(of) == path))
        .collect()
}

/// The files that belong to one model with `path`: all parts of a split file, in order.
pub(super) fn siblings(path: &str) -> Vec<String> {
    match SplitName::read(path) {
        Some(split) => split.parts().collect(),
        None => vec![path.to_owned()],
    }
}

/// The record of a complete file.
pub(super) fn record_path(path: &Path) -> PathBuf {
    beside(path, ".json")
}

/// The file whose time is that of the last use of a complete file.
pub(super) fn used_path(path: &Path) -> PathBuf {
    beside(path, ".used")
}

/// Whether these files are there, whole, and of one version.
pub(super) fn are_whole(files: &[PathBuf]) -> bool {
    let mut commits = files.iter().map(|path| match FileRecord::read(path) {
        Some(record) => record.fits(path).then_some(record.commit),
        // It was copied here.
        None => path.is_file().then_some(None),
    });
    match commits.next() {
        Some(Some(first)) => commits.all(|commit| commit.as_ref() == Some(&first)),
        _ => false,
    }
}

/// Removes what is noted of files in a folder that has none any more.
fn remove_notes(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        let text = path.to_string_lossy();
        let of = text
            .strip_suffix(".json")
            .or_else(|| text.strip_suffix(".used"));
        if path.ends_with(LISTING) || of.is_some_and(is_gguf) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Bytes that this user may still write in a folder's file system; `None` if it does not say.
pub(super) fn free_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// `PATH.gguf` for `PATH.gguf.ID.part`.
fn part_of(path: &str) -> Option<&str> {
    let (file, _) = path.strip_suffix(PART)?.rsplit_once('.')?;
    is_gguf(file).then_some(file)
}

fn beside(path: &Path, end: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(end);
    path.into()
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    // A file that cannot be read counts as missing: it is fetched again.
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Replaces a file as a whole: whoever reads it meanwhile gets the old or the new one.
fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    // Random: processes of several machines or containers may share the folder, with the same ids.
    let number = RandomState::new().build_hasher().finish();
    let temporary = beside(path, &format!(".{number:016x}.new"));
    let text = serde_json::to_vec(value).map_err(io::Error::other)?;
    let written = File::create_new(&temporary)
        .and_then(|mut file| file.write_all(&text))
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// The folder of repositories, and the scheme of their names.
const HUB: &str = "hf";
/// The folder of URLs.
const WEB: &str = "web";
const LISTING: &str = "listing.json";
const PART: &str = ".part";
/// Stands in for the query in the name of a downloaded model.
const QUERY_ID: &str = "query-id=";
const QUERY_ID_DIGITS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_locks_is_known_by_its_errors() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(has_no_locks(&error(Errno::NOLCK)) && has_no_locks(&error(Errno::OPNOTSUPP)));
        assert!(!has_no_locks(&error(Errno::IO)) && !has_no_locks(&error(Errno::BADF)));
    }
}
