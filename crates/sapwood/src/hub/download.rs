//! Receives one file as a part: resumed after interruptions, and verified. [`placement`](super::placement) moves it to
//! its place.
//!
//! ```text
//!   identify ─► lock the part ─► hash what is there ─► receive ─► verify
//!                                     ▲                  │
//!                                     └── wait, resume ──┘ lost connection, stall, 429, 5xx
//! ```

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use sapwood_net::hub::{FileContent, HubClient, HubError, Missing};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio::time::sleep;
use url::Url;

use super::folder::{FileLock, FileRecord, NoLock, part_path, parts_of};
use crate::progress::DownloadBar;

/// How often and when a transfer is tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetryPolicy {
    /// Attempts in a row that receive next to nothing.
    pub(super) retries: u32,
    /// The wait before the first one; doubled for each further one.
    pub(super) wait: Duration,
}

/// A file that is wanted.
#[derive(Debug)]
pub(super) struct WantedFile {
    pub(super) url: Url,
    /// Where it belongs.
    pub(super) path: PathBuf,
    /// What the list of a repository says of it.
    pub(super) listed: Option<FileRecord>,
}

/// A file whose version is known.
pub(super) struct IdentifiedFile<'a> {
    pub(super) file: &'a WantedFile,
    pub(super) version: FileRecord,
    /// Its content, if it had to be opened to learn the version.
    pub(super) opened: Option<FileContent>,
}

/// A part that is being completed.
pub(super) struct Part {
    lock: FileLock,
    path: PathBuf,
    hash: Sha256,
    bytes: u64,
}

/// Why a file was not downloaded.
#[derive(Debug, thiserror::Error)]
pub(super) enum DownloadError {
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error("{0}")]
    Refused(String),
    #[error("cannot write {}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
}

/// Learns which version of a file there is to download.
///
/// # Errors
/// [`DownloadError`].
pub(super) async fn identify<'a>(
    client: &HubClient,
    policy: RetryPolicy,
    file: &'a WantedFile,
) -> Result<IdentifiedFile<'a>, DownloadError> {
    if let Some(listed) = &file.listed {
        return Ok(IdentifiedFile {
            file,
            version: listed.clone(),
            opened: None,
        });
    }
    // Only the file's own server knows how large it is.
    let content = retried(policy, || client.open(&file.url, Missing::default())).await?;
    Ok(IdentifiedFile {
        file,
        version: version(&content)?,
        opened: Some(content),
    })
}

/// Receives a file unless the same version of it is in its place: then `None`.
///
/// # Errors
/// [`DownloadError`]. What was received stays as a part, unless it is wrong.
pub(super) async fn receive(
    client: &HubClient,
    policy: RetryPolicy,
    identified: &mut IdentifiedFile<'_>,
    bar: &DownloadBar,
) -> Result<Option<Part>, DownloadError> {
    let mut retry = Retry::new(policy);
    let (file, version) = (identified.file, &identified.version);
    bar.set_bytes(version.bytes);
    if is_there(&file.path, version) {
        return Ok(None);
    }
    let Some(lock) = lock_part(file, version).await? else {
        // Another process has completed it meanwhile.
        return Ok(None);
    };
    let part = Part::open(lock, &file.path, version, bar).await;
    let mut part = part.map_err(|error| DownloadError::at(&file.path, error))?;
    let mut furthest = part.bytes;
    while part.bytes < version.bytes {
        let received = part.receive(client, file, version, identified.opened.take(), bar);
        match received.await {
            Ok(()) => {}
            Err(DownloadError::Hub(error)) => {
                // By how far it came, and not by what it received: a server without ranges begins again each time.
                if part.bytes >= furthest.saturating_add(PROGRESS_BYTES) {
                    furthest = part.bytes;
                    retry = Retry::new(policy);
                }
                retry.after(error).await?;
            }
            Err(error) => return Err(error),
        }
    }
    part.verify(version).await?;
    Ok(Some(part))
}

/// Repeats a request as `policy` says.
///
/// # Errors
/// The error of the last attempt.
pub(super) async fn retried<T, F: Future<Output = Result<T, HubError>>>(
    policy: RetryPolicy,
    request: impl Fn() -> F,
) -> Result<T, HubError> {
    let mut retry = Retry::new(policy);
    loop {
        match request().await {
            Ok(answer) => return Ok(answer),
            Err(error) => retry.after(error).await?,
        }
    }
}

/// Whether this version of a file is complete.
pub(super) fn is_there(path: &Path, version: &FileRecord) -> bool {
    let Some(there) = FileRecord::read(path) else {
        return false;
    };
    let is_same = match &version.sha256 {
        Some(_) => there.sha256 == version.sha256,
        None => {
            there.sha256.is_none()
                && there.bytes == version.bytes
                && there.validator == version.validator
                && version.validator.is_some()
        }
    };
    is_same && there.fits(path)
}

/// Whether a server says that what it sends belongs to another version of a file. What is proven by a checksum need not match.
fn is_of_another_version(content: &FileContent, version: &FileRecord) -> bool {
    match (&content.validator, &version.validator, &version.sha256) {
        // An `etag` and a date say nothing of each other.
        (Some(it), Some(known), None) if it.starts_with('"') == known.starts_with('"') => {
            it != known
        }
        _ => false,
    }
}

/// What a server says of the file that it sends.
fn version(content: &FileContent) -> Result<FileRecord, DownloadError> {
    let unknown = || DownloadError::Refused("the server does not say how large the file is".into());
    Ok(FileRecord {
        bytes: content.bytes.ok_or_else(unknown)?,
        sha256: content.sha256.clone(),
        validator: content.validator.clone(),
        commit: None,
    })
}

/// Locks the complete file that is about to be replaced, if there is one.
pub(super) fn replaceable(path: &Path) -> Result<Option<FileLock>, DownloadError> {
    match FileLock::exclusive(path) {
        Ok(lock) => Ok(Some(lock)),
        Err(NoLock::Gone) => Ok(None),
        Err(NoLock::Held) => Err(DownloadError::Refused(format!(
            "there is a newer version, but {} is in use: stop the process that has it loaded, and try again",
            path.display()
        ))),
        Err(NoLock::Io(error)) => Err(DownloadError::at(path, error)),
    }
}

/// Waits until no other process downloads the same version; `None` if one has completed it.
async fn lock_part(
    file: &WantedFile,
    version: &FileRecord,
) -> Result<Option<FileLock>, DownloadError> {
    let path = part_path(&file.path, &id(file, version));
    let mut is_reported = false;
    loop {
        // Each time: a process that removes a model removes folders that are empty.
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)
                .map_err(|error| DownloadError::at(&file.path, error))?;
        }
        match FileLock::part(&path) {
            // The other process may have completed it between the check and the lock.
            Ok(_) if is_there(&file.path, version) => {
                let _ = std::fs::remove_file(&path);
                return Ok(None);
            }
            Ok(lock) => return Ok(Some(lock)),
            // It was renamed: there is a complete file now, or a new part to lock.
            Err(NoLock::Gone) => {}
            Err(NoLock::Held) => {
                if !is_reported {
                    tracing::info!(file = %file.path.display(), "another process downloads it; waiting");
                    is_reported = true;
                }
                sleep(LOCK_POLL).await;
            }
            Err(NoLock::Io(error)) => return Err(DownloadError::Io { path, error }),
        }
        if is_there(&file.path, version) {
            return Ok(None);
        }
    }
}

/// Tells versions of a file apart in the names of their parts, so that a part is only continued with its own version.
pub(super) fn id(file: &WantedFile, version: &FileRecord) -> String {
    if let Some(sum) = &version.sha256 {
        return sum[..ID_DIGITS].to_owned();
    }
    let mut hash = Sha256::new();
    hash.update(version.bytes.to_le_bytes());
    hash.update(version.validator.as_deref().unwrap_or_default());
    // Its commit is in the URL of a listed file.
    hash.update(file.url.path());
    let sum = hexadecimal(hash);
    sum[..ID_DIGITS].to_owned()
}

/// How many of a part's bytes can be used.
pub(super) fn usable(bytes: u64, version: &FileRecord) -> u64 {
    // Without anything that tells versions apart, the rest could be that of another one.
    let is_known = version.sha256.is_some() || version.validator.is_some();
    if bytes <= version.bytes && is_known {
        bytes
    } else {
        0
    }
}

impl DownloadError {
    pub(super) fn at(path: &Path, error: io::Error) -> Self {
        let path = path.to_owned();
        Self::Io { path, error }
    }
}

impl Part {
    /// Reads what is there already.
    async fn open(
        lock: FileLock,
        path: &Path,
        version: &FileRecord,
        bar: &DownloadBar,
    ) -> io::Result<Self> {
        let there = usable(lock.file.metadata()?.len(), version);
        lock.file.set_len(there)?;
        let mut part = Self {
            lock,
            path: path.to_owned(),
            hash: Sha256::new(),
            bytes: there,
        };
        if there > 0 {
            let mut file = part.lock.file.try_clone()?;
            let hashing = tokio::task::spawn_blocking(move || {
                file.seek(SeekFrom::Start(0))?;
                let mut hash = HashWriter(Sha256::new());
                io::copy(&mut file.take(there), &mut hash)?;
                Ok::<_, io::Error>(hash.0)
            });
            part.hash = hashing.await.map_err(io::Error::other)??;
        }
        bar.begin_at(there);
        Ok(part)
    }

    /// Receives the rest, or as much of it as comes.
    async fn receive(
        &mut self,
        client: &HubClient,
        file: &WantedFile,
        version: &FileRecord,
        opened: Option<FileContent>,
        bar: &DownloadBar,
    ) -> Result<(), DownloadError> {
        let missing = Missing {
            from: self.bytes,
            // The checksum is for the whole file, and content networks have validators of their own.
            validator: version
                .validator
                .as_deref()
                .filter(|_| version.sha256.is_none()),
        };
        let content = match opened.filter(|_| self.bytes == 0) {
            Some(content) => Ok(content),
            None => client.open(&file.url, missing).await,
        };
        let mut content = match content {
            Ok(content) => content,
            Err(HubError::RangeRefused) => {
                self.restart()?;
                return Err(HubError::Cut.into());
            }
            Err(error) => return Err(error.into()),
        };
        if content.bytes.is_some_and(|bytes| bytes != version.bytes) {
            let bytes = content.bytes.unwrap_or_default();
            let what = format!(
                "the server has {bytes} bytes of it, and {} were announced",
                version.bytes
            );
            // Some page in its place, such as that of a network's login, says nothing about what was received before.
            if self.bytes > 0 && content.offset == 0 {
                let what = format!("{what}; what was received before stays, try again later");
                return Err(DownloadError::Refused(what));
            }
            return Err(self.discard(&what));
        }
        if content.offset > 0 && is_of_another_version(&content, version) {
            // A server that takes no notice of `if-range`: the rest of another version would be appended.
            self.restart()?;
            return Err(HubError::Cut.into());
        }
        let begin = match content.offset {
            0 => self.begin(&mut content).await?,
            _ => Bytes::new(),
        };
        if content.offset != self.bytes {
            self.restart()?;
        }
        bar.set(self.bytes);
        self.write(begin, &mut content, version, bar).await
    }

    /// Receives the first bytes of a whole file, before they replace what was received before: a body without a length may be
    /// any page.
    async fn begin(&self, content: &mut FileContent) -> Result<Bytes, DownloadError> {
        let mut begin = Bytes::new();
        while begin.len() < MAGIC.len() {
            let Some(chunk) = content.next().await? else {
                break;
            };
            begin = match begin.is_empty() {
                true => chunk,
                false => [begin, chunk].concat().into(),
            };
        }
        match begin.starts_with(MAGIC) {
            true => Ok(begin),
            // Too few bytes to know.
            false if MAGIC.starts_with(&begin) => Err(HubError::Cut.into()),
            false if self.bytes > 0 => Err(DownloadError::Refused(format!(
                "{NO_GGUF}; what was received before stays, try again later"
            ))),
            false => Err(self.discard(NO_GGUF)),
        }
    }

    /// Writes `begin` and the rest of the content.
    async fn write(
        &mut self,
        begin: Bytes,
        content: &mut FileContent,
        version: &FileRecord,
        bar: &DownloadBar,
    ) -> Result<(), DownloadError> {
        let io = DownloadError::at;
        let mut output = self
            .lock
            .file
            .try_clone()
            .map_err(|error| io(&self.path, error))?;
        let (hash, offset) = (self.hash.clone(), self.bytes);
        // Hashing and writing are as slow as the network, and beside it: a full queue stops the reading.
        let (tx, mut rx) = mpsc::channel::<Bytes>(CHUNKS_QUEUED);
        let writing = tokio::task::spawn_blocking(move || {
            let mut hash = HashWriter(hash);
            let mut bytes = offset;
            let written = output.seek(SeekFrom::Start(offset)).and_then(|_| {
                while let Some(chunk) = rx.blocking_recv() {
                    output.write_all(&chunk)?;
                    hash.write_all(&chunk)?;
                    bytes += chunk.len() as u64;
                }
                Ok(())
            });
            (hash.0, bytes, written)
        });
        let mut begin = Some(begin).filter(|begin| !begin.is_empty());
        let mut received = offset;
        let ended = loop {
            if received == version.bytes {
                // Not a byte more is read, whatever else the server sends.
                break Ok(());
            }
            let next = match begin.take() {
                Some(begin) => Ok(Some(begin)),
                None => content.next().await,
            };
            match next {
                Ok(Some(chunk)) => {
                    received += chunk.len() as u64;
                    // A closed queue: the writer has failed, and says so below.
                    if received > version.bytes || tx.send(chunk).await.is_err() {
                        break Ok(());
                    }
                    bar.set(received);
                }
                Ok(None) => break Err(HubError::Cut),
                Err(error) => break Err(error),
            }
        };
        drop(tx);
        let written = writing.await;
        let (hash, bytes, written) =
            written.map_err(|error| io(&self.path, io::Error::other(error)))?;
        (self.hash, self.bytes) = (hash, bytes);
        written.map_err(|error| io(&self.path, error))?;
        if received > version.bytes {
            let what = format!(
                "the server sends more than the {} bytes announced",
                version.bytes
            );
            return Err(self.discard(&what));
        }
        Ok(ended?)
    }

    fn restart(&mut self) -> Result<(), DownloadError> {
        let emptied = self.lock.file.set_len(0);
        emptied.map_err(|error| DownloadError::at(&self.path, error))?;
        self.bytes = 0;
        self.hash = Sha256::new();
        Ok(())
    }

    /// Verifies the part, and has it written to the disk.
    async fn verify(&self, version: &FileRecord) -> Result<(), DownloadError> {
        let sum = hexadecimal(self.hash.clone());
        if let Some(expect) = &version.sha256
            && sum != *expect
        {
            let what = format!("its SHA-256 is {sum}, and {expect} was announced");
            return Err(self.discard(&what));
        }
        let io = |error| DownloadError::at(&self.path, error);
        let mut file = self.lock.file.try_clone().map_err(io)?;
        // Writing gigabytes out takes its time.
        let checking = tokio::task::spawn_blocking(move || {
            let mut magic = [0; MAGIC.len()];
            file.seek(SeekFrom::Start(0))?;
            let is_gguf = file.read_exact(&mut magic).is_ok() && magic == *MAGIC;
            if is_gguf {
                file.sync_all()?;
            }
            Ok(is_gguf)
        });
        let checked = checking.await.map_err(io::Error::other);
        if checked.and_then(|checked| checked).map_err(io)? {
            Ok(())
        } else {
            Err(self.discard(NO_GGUF))
        }
    }

    /// Removes what was received, because it is wrong.
    fn discard(&self, what: &str) -> DownloadError {
        // By all its names: the lock keeps others from it, and its version is wrong.
        for part in parts_of(&self.path) {
            if self.is_at(&part) {
                let _ = std::fs::remove_file(part);
            }
        }
        DownloadError::Refused(format!(
            "{what}; what was received is removed. Try again, and if it stays so, ask who keeps the file"
        ))
    }

    fn is_at(&self, path: &Path) -> bool {
        use std::os::unix::fs::MetadataExt;
        let mine = self.lock.file.metadata().map(|it| (it.dev(), it.ino()));
        let there = std::fs::metadata(path).map(|it| (it.dev(), it.ino()));
        matches!((mine, there), (Ok(mine), Ok(there)) if mine == there)
    }
}

/// Counts attempts in a row that receive next to nothing.
struct Retry {
    policy: RetryPolicy,
    tried: u32,
}

impl Retry {
    const fn new(policy: RetryPolicy) -> Self {
        Self { policy, tried: 0 }
    }

    /// Waits until the next attempt.
    ///
    /// # Errors
    /// The error, if another attempt would not help, or there were enough.
    async fn after(&mut self, error: HubError) -> Result<(), HubError> {
        if !error.is_transient() || self.tried >= self.policy.retries {
            return Err(error);
        }
        let wait = self.policy.wait.saturating_mul(1 << self.tried.min(16));
        let wait = wait.min(WAIT_MAX);
        let wait = error.retry_after().map_or(wait, |asked| asked.max(wait));
        self.tried += 1;
        // A server that wants to be left alone for hours is not waited for.
        if wait > WAIT_MAX {
            return Err(error);
        }
        tracing::warn!(%error, seconds = wait.as_secs_f32(), "a download is tried again");
        sleep(wait).await;
        Ok(())
    }
}

/// Hashes what is written to it.
struct HashWriter(Sha256);

impl Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hexadecimal(hash: Sha256) -> String {
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// A number of bytes for people.
pub(crate) fn shown_bytes(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

const MAGIC: &[u8; 4] = b"GGUF";
const NO_GGUF: &str = "it is not a GGUF file";
/// Chunks between the network and the disk.
const CHUNKS_QUEUED: usize = 16;
/// How often a part that another process writes is looked at.
const LOCK_POLL: Duration = Duration::from_millis(250);
/// The longest wait before a transfer is tried again.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// An attempt that comes so many bytes further has not failed for nothing. One byte at a time would keep a process busy for
/// ever.
const PROGRESS_BYTES: u64 = 1 << 20;
/// Digits of the id of a version.
const ID_DIGITS: usize = 16;
