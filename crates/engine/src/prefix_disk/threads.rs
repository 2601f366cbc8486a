//! [`DiskThreads`]: the thread that reads files and the one that writes them. They wait for the disk; nobody waits for them.

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use super::SavedEntry;
use super::reads::READS_MAX;
use super::replies::{is_useless, takes_no_more};
use super::writes::ORDERS_MAX;
use crate::prefix_entry::{EntryHead, EntryKind, around_state, damaged, read_head, read_state};
use crate::prefix_folder::{FileId, ListedFile, PrefixDisk};
use crate::prefix_store::SavedPrefix;

/// A file that was there at the start.
#[derive(Debug)]
pub(super) struct FoundFile {
    pub(super) listed: ListedFile,
    pub(super) bytes: u64,
    /// `None`: of another model, or of other settings.
    pub(super) head: Option<EntryHead>,
}

/// The contents of a file.
pub(super) type ReadFile = (EntryHead, Vec<u8>);

#[derive(Debug)]
pub(super) enum DiskReply {
    Opened(io::Result<Vec<FoundFile>>),
    Read {
        file: FileId,
        result: io::Result<ReadFile>,
        took: Duration,
    },
    /// The files of an order were removed, and one may have been written.
    Wrote {
        file: Option<FileId>,
        outcome: WriteOutcome,
    },
}

/// What became of an order.
#[derive(Debug)]
pub(super) struct WriteOutcome {
    pub(super) result: io::Result<()>,
    /// Files that are still there.
    pub(super) unremoved: Vec<FileId>,
    /// Files that were not replaced, and their bytes.
    pub(super) unreplaced: Vec<(FileId, usize)>,
}

/// Files to be removed, then one to be written, and one that was used at this time, which may be the same.
#[derive(Debug)]
pub(super) struct WriteOrder {
    pub(super) remove: Vec<FileId>,
    pub(super) write: Option<(FileId, QueuedEntry)>,
    /// Files whose prompts the written one serves, with their bytes.
    pub(super) replaces: Vec<(FileId, usize)>,
    pub(super) mark: Option<(FileId, SystemTime)>,
}

/// An entry to be written. The owner holds its state, and lets go of it where the disk does not answer.
#[derive(Debug)]
pub(super) struct QueuedEntry {
    kind: EntryKind,
    scope: u64,
    prefix: Weak<SavedPrefix>,
}

impl From<&SavedEntry> for QueuedEntry {
    fn from(entry: &SavedEntry) -> Self {
        Self {
            kind: entry.kind,
            scope: entry.scope,
            prefix: Arc::downgrade(&entry.prefix),
        }
    }
}

/// The owner's end of both threads, which are joined when it is dropped.
pub(super) struct DiskThreads {
    /// `None` while it is dropped.
    queues: Option<DiskQueues>,
    /// Ends both after what they do at present.
    stops: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

struct DiskQueues {
    reads: SyncSender<FileId>,
    writes: SyncSender<WriteOrder>,
    replies: Receiver<DiskReply>,
}

/// What both threads have.
#[derive(Clone)]
struct DiskThread {
    disk: Arc<dyn PrefixDisk>,
    identity: String,
    replies: SyncSender<DiskReply>,
    wake: Arc<dyn Fn() + Send + Sync>,
    stops: Arc<AtomicBool>,
}

/// How long the end waits for a thread that waits for the disk; then the thread is left to itself.
const JOIN_MAX: Duration = Duration::from_secs(1);

impl DiskThreads {
    pub(super) fn start(
        disk: Arc<dyn PrefixDisk>,
        identity: String,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> io::Result<Self> {
        let (reads, next_read) = sync_channel(READS_MAX);
        let (writes, next_write) = sync_channel(ORDERS_MAX);
        // Room for a reply to each read and order, and that of the start: the threads do not wait for the owner.
        let (sender, replies) = sync_channel(READS_MAX + ORDERS_MAX + 1);
        let stops = Arc::<AtomicBool>::default();
        let thread = DiskThread {
            stops: Arc::clone(&stops),
            disk,
            identity,
            replies: sender,
            wake,
        };
        // A tier whose second thread cannot be created drops this, which joins the first.
        let mut all = Self {
            queues: Some(DiskQueues {
                reads,
                writes,
                replies,
            }),
            stops,
            threads: Vec::new(),
        };
        let reader = thread.clone();
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(run)
        };
        let reader = spawn("prefix reads", Box::new(move || reader.read(&next_read)))?;
        all.threads.push(reader);
        let writer = spawn("prefix writes", Box::new(move || thread.write(&next_write)))?;
        all.threads.push(writer);
        Ok(all)
    }

    /// The owner has no more than [`READS_MAX`] reads in progress, so there is room.
    pub(super) fn read(&self, file: FileId) {
        if let Some(queues) = &self.queues {
            let _ = queues.reads.try_send(file);
        }
    }

    /// The owner has no more than [`ORDERS_MAX`] orders in progress, so there is room.
    pub(super) fn write(&self, order: WriteOrder) {
        if let Some(queues) = &self.queues {
            let _ = queues.writes.try_send(order);
        }
    }

    pub(super) fn try_reply(&self) -> Option<DiskReply> {
        self.queues.as_ref()?.replies.try_recv().ok()
    }

    /// Waits for a reply; `None` if none comes in time, or both threads have ended.
    pub(super) fn wait_reply(&self, until: Instant) -> Option<DiskReply> {
        let left = until.saturating_duration_since(Instant::now());
        self.queues.as_ref()?.replies.recv_timeout(left).ok()
    }
}

impl DiskThread {
    fn read(self, next: &Receiver<FileId>) {
        if !self.reply(DiskReply::Opened(self.open())) {
            return;
        }
        while let Ok(file) = next.recv()
            && !self.stops()
        {
            let began = Instant::now();
            let result = self.read_file(file);
            let took = began.elapsed();
            let is_read = result.is_ok();
            if !self.reply(DiskReply::Read { file, result, took }) {
                return;
            }
            // Afterwards, because a sequence waits for the reply.
            if is_read {
                self.disk.mark_used(file, SystemTime::now());
            }
        }
    }

    fn open(&self) -> io::Result<Vec<FoundFile>> {
        let mut found = Vec::new();
        for listed in self.disk.open()? {
            if self.stops() {
                break;
            }
            let head = self.disk.read(listed.id).and_then(|(mut input, bytes)| {
                let head = read_head(&mut input, bytes, &self.identity)?;
                Ok((bytes, head))
            });
            match head {
                Ok((bytes, head)) => found.push(FoundFile {
                    listed,
                    bytes,
                    head,
                }),
                Err(error) if !is_useless(&error) => {
                    let file = format!("{:016x}.prefix", listed.id);
                    tracing::warn!(file, %error, "a cached prefix cannot be read at present");
                    found.push(FoundFile {
                        listed,
                        bytes: listed.bytes,
                        head: None,
                    });
                }
                Err(error) => {
                    let file = format!("{:016x}.prefix", listed.id);
                    tracing::warn!(file, %error, "a cached prefix cannot be read, and is removed");
                    // Whoever cannot remove it cannot write either, which is then reported.
                    let _ = self.disk.remove(listed.id);
                }
            }
        }
        Ok(found)
    }

    fn read_file(&self, file: FileId) -> io::Result<ReadFile> {
        let (mut input, bytes) = self.disk.read(file)?;
        let head = read_head(&mut input, bytes, &self.identity)?;
        let head = head.ok_or_else(|| damaged("it is of another model"))?;
        let state = read_state(&mut input, &head)?;
        Ok((head, state))
    }

    fn write(self, next: &Receiver<WriteOrder>) {
        let mut is_full = false;
        while let Ok(order) = next.recv()
            && !self.stops()
        {
            let file = order.write.as_ref().map(|(file, _)| *file);
            let outcome = match is_full {
                // The owner gives no more orders once it knows.
                true => WriteOutcome {
                    result: Err(ErrorKind::StorageFull.into()),
                    unremoved: order.remove,
                    unreplaced: order.replaces,
                },
                false => self.carry_out(order),
            };
            is_full |= outcome.result.as_ref().is_err_and(takes_no_more);
            if !self.reply(DiskReply::Wrote { file, outcome }) {
                return;
            }
        }
    }

    /// What is replaced is removed after it is, unless there is no room for both.
    fn carry_out(&self, order: WriteOrder) -> WriteOutcome {
        let (removed, mut unremoved) = self.remove_files(order.remove);
        let mut unreplaced = order.replaces;
        let write = |()| self.write_file(order.write.as_ref());
        // Not where what should have made room is still there.
        let mut result = removed.and_then(write);
        let is_full = result.as_ref().is_err_and(takes_no_more) && unremoved.is_empty();
        if result.is_ok() || is_full {
            let replaced = std::mem::take(&mut unreplaced);
            let files = replaced.into_iter().map(|(file, _)| file).collect();
            let (removed, still_there) = self.remove_files(files);
            unremoved.extend(still_there);
            result = match is_full {
                true => removed.and_then(write),
                false => removed,
            };
        }
        // Afterwards: a file that was just written has the time of now.
        if let Some((file, used)) = order.mark
            && result.is_ok()
        {
            self.disk.mark_used(file, used);
        }
        WriteOutcome {
            result,
            unremoved,
            unreplaced,
        }
    }

    /// Removes all of them, whatever happens to one, and returns those that are still there.
    fn remove_files(&self, files: Vec<FileId>) -> (io::Result<()>, Vec<FileId>) {
        let mut result = Ok(());
        let mut unremoved = Vec::new();
        for file in files {
            if let Err(error) = self.disk.remove(file) {
                result = Err(error);
                unremoved.push(file);
            }
        }
        (result, unremoved)
    }

    fn write_file(&self, write: Option<&(FileId, QueuedEntry)>) -> io::Result<()> {
        let Some((file, entry)) = write else {
            return Ok(());
        };
        // The owner has given up the disk.
        let Some(prefix) = entry.prefix.upgrade() else {
            return Ok(());
        };
        let SavedPrefix { tokens, state } = &*prefix;
        // In pieces: the whole would take as much memory again, of which there may be little.
        let state = state.pieces();
        let (head, tail) = around_state(&self.identity, entry.kind, entry.scope, tokens, &state);
        let parts = [&[&*head], &*state, &[&tail]].concat();
        self.disk.write(*file, &parts)
    }

    fn stops(&self) -> bool {
        self.stops.load(Ordering::Relaxed)
    }

    /// Returns false if nobody listens any more.
    fn reply(&self, reply: DiskReply) -> bool {
        let sent = self.replies.send(reply).is_ok();
        (self.wake)();
        sent
    }
}

impl Drop for DiskThreads {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        let Some(queues) = self.queues.take() else {
            return;
        };
        // Ends both, unless they wait for the disk: they wait for their queues.
        drop((queues.reads, queues.writes));
        let until = Instant::now() + JOIN_MAX;
        let ended = loop {
            let left = until.saturating_duration_since(Instant::now());
            match queues.replies.recv_timeout(left) {
                Ok(_unwanted) => {}
                // Each thread that lives has a sender.
                Err(error) => break error == RecvTimeoutError::Disconnected,
            }
        };
        if !ended {
            tracing::warn!(
                "the disk with cached prefixes does not answer: its thread is left to itself"
            );
            return;
        }
        for thread in self.threads.drain(..) {
            // A panic of theirs has ended the tier already.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for DiskThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskThreads").finish_non_exhaustive()
    }
}
