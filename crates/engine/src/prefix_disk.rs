//! [`DiskTier`]: the third tier of the prefix cache. What the memory evicts is written to a disk, is found by the same search,
//! and is read back to memory for a prompt that begins with it. It outlives the process.
//!
//! The owner has the index ([`DiskIndex`]), and decides; a thread reads and another one writes ([`DiskThreads`]). Between them are
//! bounded queues, whose contents are [`PendingReads`] and [`PendingWrites`], so that the owner never waits for a disk:
//!
//! ```text
//!   evicted from memory ── offer ──► write queue ──► written            too much waits: dropped
//!   memory is freed ── DiskMove ─────────┘                              too much waits: tried again in the next step
//!   prompt ── find, read ──► read queue ──► poll: back in memory        too slow, or failed: computed
//! ```
//!
//! Invariants:
//! - An entry of the index has a file, or is in the write queue; it is read from there.
//! - The files, and those that are about to be written, take no more than the limit: what makes room is removed before the
//!   next one is written, by the same thread.
//! - A read that fails takes its entry out of the index: each prompt tries a file at most once.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::prefix_entry::EntryKind;
use crate::prefix_folder::{FileId, PrefixDisk};
use crate::prefix_store::{SavedId, SavedMatch, SavedPrefix};
use crate::stats::EngineStats;
use index::{DiskIndex, DiskState};
pub(crate) use moving::DiskMove;
use reads::{PendingRead, PendingReads};
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use threads::{DiskReply, DiskThreads, QueuedEntry, WriteOrder};
use writes::PendingWrites;

mod ending;
mod index;
mod moving;
mod opening;
mod reads;
mod replies;
mod threads;
mod writes;

/// What the tier of a model is made of.
#[derive(Clone, Debug)]
pub(crate) struct DiskTerms {
    /// [`crate::model::Model::saved_identity`].
    pub(crate) identity: String,
    /// Bytes of all files.
    pub(crate) limit: usize,
    /// Whether a part of a prefix is of use ([`crate::prefix_store::PrefixStore::new`]).
    pub(crate) partial: bool,
    /// Whether there are checkpoints, which have half of the limit.
    pub(crate) checkpoints: bool,
    /// Longer entries are of no use.
    pub(crate) tokens_max: usize,
    /// Larger states have no room in memory.
    pub(crate) state_max: usize,
}

/// Saved prefixes and checkpoints on a disk.
#[derive(Debug)]
pub(crate) struct DiskTier {
    terms: DiskTerms,
    index: DiskIndex,
    phase: DiskPhase,
    next_file: FileId,
    reads: PendingReads,
    writes: PendingWrites,
    /// Newest entries that are read before a prompt asks for them.
    ahead: Vec<(EntryKind, SavedId)>,
    /// What was read.
    arrived: Vec<SavedEntry>,
    /// Orders that failed, one after the other.
    failures: u32,
    threads: DiskThreads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskPhase {
    /// The files are listed.
    Opening,
    Open,
    /// Nothing is written any more.
    ReadOnly,
    Off,
}

/// A prefix or checkpoint in memory.
#[derive(Clone, Debug)]
pub(crate) struct SavedEntry {
    pub(crate) kind: EntryKind,
    pub(crate) scope: u64,
    pub(crate) prefix: Arc<SavedPrefix>,
}

/// What a sequence waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskWait {
    /// The list of files.
    Opening,
    /// A file, and perhaps that of a checkpoint.
    Files([Option<FileId>; 2]),
}

/// Bytes that are read before a prompt asks for them.
const AHEAD_BYTES_MAX: usize = 256 << 20;
/// Bytes that the tokens of the index take in memory. Only where a state has the same size after any number of tokens are they
/// much.
const INDEX_BYTES_MAX: usize = 64 << 20;
/// How much older the file of an entry is than that of the next more valuable one, where several are written together.
const RANK_STEP: Duration = Duration::from_millis(1);
/// What a file takes beside its state and tokens: its identity, and a part of a block.
const FILE_BYTES: usize = 8 << 10;

impl DiskTier {
    /// Starts to list the files. `wake` is called when [`DiskTier::poll`] has something to do.
    ///
    /// # Errors
    /// If the operating system cannot create a thread.
    pub(crate) fn start(
        disk: Arc<dyn PrefixDisk>,
        terms: DiskTerms,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> io::Result<Self> {
        let threads = DiskThreads::start(disk, terms.identity.clone(), wake)?;
        Ok(Self {
            index: DiskIndex::new(&terms),
            phase: DiskPhase::Opening,
            next_file: 0,
            reads: PendingReads::new(terms.state_max),
            writes: PendingWrites::default(),
            ahead: Vec::new(),
            arrived: Vec::new(),
            failures: 0,
            threads,
            terms,
        })
    }

    /// Takes what the threads have done, and returns what was read, for the memory.
    pub(crate) fn poll(&mut self, stats: &EngineStats, now: Time) -> Vec<SavedEntry> {
        while let Some(reply) = self.threads.try_reply() {
            self.take(reply, stats);
        }
        self.watch(stats, now);
        self.read_ahead();
        self.flush_removed();
        stats.prefix_disk_bytes.set(self.index.bytes() as u64);
        self.take_arrived()
    }

    /// Gives up a disk that does not answer: each prompt that begins with a file would wait in vain, and what waits to be written
    /// takes memory.
    fn watch(&mut self, stats: &EngineStats, now: Time) {
        let reads = self.reads.is_late(now);
        if self.writes.is_late(now) || reads {
            tracing::warn!(
                reads,
                "the disk with cached prefixes does not answer: they are kept in memory alone until the model is loaded again"
            );
            stats.prefix_disk_failures.add(1);
            self.give_up();
        }
    }

    fn give_up(&mut self) {
        self.phase = DiskPhase::Off;
        self.reads.clear();
        self.writes.clear();
        self.ahead.clear();
        self.index.clear();
    }

    /// Returns the bytes of memory for states that wait to be written, or are read.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.writes.bytes() + self.reads.bytes()
    }

    /// Finds the entry of which a prompt begins with most tokens.
    pub(crate) fn find(&self, kind: EntryKind, scope: u64, tokens: &[Token]) -> Option<SavedMatch> {
        self.index.of(kind).find(scope, tokens)
    }

    /// Returns the tokens of an entry.
    pub(crate) fn tokens(&self, kind: EntryKind, id: SavedId) -> &[Token] {
        self.index.of(kind).tokens(id).unwrap_or_default()
    }

    /// Returns whether something is listed or read.
    pub(crate) fn is_reading(&self) -> bool {
        self.is_opening() || !self.reads.is_empty()
    }

    /// Returns whether the files are not listed yet.
    pub(crate) fn is_opening(&self) -> bool {
        self.phase == DiskPhase::Opening
    }

    /// Returns how long reading these entries takes, behind what is read now.
    pub(crate) fn time_to_read(&self, entries: &[(EntryKind, SavedId)]) -> Duration {
        let bytes = entries
            .iter()
            .map(|&(kind, id)| self.index.state_bytes(kind, id));
        self.reads.time_for(bytes.sum())
    }

    /// Notes that reading would have taken too long.
    pub(crate) fn was_too_slow(&mut self) {
        self.reads.was_too_slow();
    }

    /// Returns what was read since the last call.
    pub(crate) fn take_arrived(&mut self) -> Vec<SavedEntry> {
        std::mem::take(&mut self.arrived)
    }

    /// Starts to read an entry, which [`DiskTier::poll`] returns, or [`DiskTier::take_arrived`] at once if it is not written yet.
    /// Returns its file; `None` if so much is read already that it had to wait.
    pub(crate) fn read(&mut self, kind: EntryKind, id: SavedId) -> Option<FileId> {
        let DiskState { file, state, .. } = *self.index.of(kind).state(id)?;
        if self.reads.contains(file) {
            return Some(file);
        }
        self.index.of_mut(kind).get(id);
        if let Some(entry) = self.writes.get(file) {
            self.arrived.push(entry.clone());
            return Some(file);
        }
        if !self.reads.has_room(state) {
            return None;
        }
        self.threads.read(file);
        let bytes = state;
        self.reads.insert(file, PendingRead { kind, id, bytes });
        Some(file)
    }

    /// Returns whether it is still worth waiting.
    pub(crate) fn is_pending(&self, wait: DiskWait) -> bool {
        match wait {
            DiskWait::Opening => self.is_opening(),
            DiskWait::Files(files) => {
                let mut files = files.into_iter().flatten();
                files.any(|file| self.reads.contains(file))
            }
        }
    }

    /// Writes an entry that was evicted from memory, unless it is there, or too much waits to be written.
    pub(crate) fn offer(&mut self, entry: SavedEntry) {
        if self.has_room(entry.prefix.state.len()) {
            self.write(entry, None);
        }
    }

    /// Returns whether an entry of so many bytes would be written now.
    fn has_room(&self, bytes: usize) -> bool {
        self.phase == DiskPhase::Open && self.writes.has_room(bytes)
    }

    /// Writes an entry, unless it is there. The caller has checked that another order may be given, and that there is room.
    /// `used`: when it was used, if that was not now; a file that serves the same prompts gets this time.
    fn write(&mut self, entry: SavedEntry, used: Option<SystemTime>) {
        let (kind, scope) = (entry.kind, entry.scope);
        let file = self.next_file;
        let tokens = Arc::clone(&entry.prefix.tokens);
        let state = self.terms.state_of(file, &tokens, entry.prefix.state.len());
        let entries = self.index.of_mut(kind);
        let is_new = self.phase == DiskPhase::Open && entries.insert(scope, &tokens, state);
        let written = is_new.then_some((file, entry));
        if is_new {
            self.next_file += 1;
            self.index.make_room();
        }
        let file_for = || self.index.file_for(kind, scope, &tokens);
        let mark = used.and_then(|used| Some((file_for()?, used)));
        if written.is_some() || mark.is_some() {
            self.order(written, mark);
        }
    }

    /// Forgets an entry that cannot be used, if it is there.
    pub(crate) fn forget(&mut self, kind: EntryKind, scope: u64, tokens: &[Token]) {
        self.index.forget(kind, scope, tokens);
    }

    /// Reads nothing before a prompt asks for it.
    #[cfg(all(test, feature = "embedded"))]
    pub(crate) fn read_nothing_ahead(&mut self) {
        self.ahead.clear();
    }

    /// Waits until nothing is listed, read or written.
    #[cfg(test)]
    pub(crate) fn settle(&mut self, stats: &EngineStats) {
        let until = Instant::now() + Duration::from_secs(60);
        while (self.is_reading() || !self.writes.is_done()) && self.wait(until, stats) {}
    }

    /// Waits for a reply; returns false if none comes in time.
    fn wait(&mut self, until: Instant, stats: &EngineStats) -> bool {
        let reply = self.threads.wait_reply(until);
        let came = reply.is_some();
        if let Some(reply) = reply {
            self.take(reply, stats);
        }
        came
    }

    fn take(&mut self, reply: DiskReply, stats: &EngineStats) {
        match reply {
            DiskReply::Opened(Ok(files)) => self.opened(files),
            DiskReply::Opened(Err(error)) => {
                tracing::warn!(%error, "the folder of cached prefixes cannot be used: they are kept in memory alone");
                self.phase = DiskPhase::Off;
                stats.prefix_disk_failures.add(1);
            }
            DiskReply::Read { file, result, took } => {
                self.reads.answered();
                self.was_read(file, result, took, stats);
            }
            DiskReply::Wrote { file, outcome } => self.was_written(file, outcome, stats),
        }
    }

    fn flush_removed(&mut self) {
        let may_order = self.phase == DiskPhase::Open && self.writes.has_order();
        if may_order && self.index.has_removed() {
            self.order(None, None);
        }
    }

    /// The caller has checked that there is room for an order.
    fn order(&mut self, write: Option<(FileId, SavedEntry)>, mark: Option<(FileId, SystemTime)>) {
        self.writes.begin(write.as_ref());
        let (remove, replaces) = (self.index.take_removed(), self.index.take_replaced());
        let write = write.as_ref();
        let write = write.map(|(file, entry)| (*file, QueuedEntry::from(entry)));
        self.threads.write(WriteOrder {
            remove,
            write,
            replaces,
            mark,
        });
    }
}

impl DiskTerms {
    /// The bytes of prefixes and of checkpoints.
    fn limits(&self) -> [usize; 2] {
        match self.checkpoints {
            true => [self.limit - self.limit / 2, self.limit / 2],
            false => [self.limit, 0],
        }
    }

    fn state_of(&self, file: FileId, tokens: &[Token], state: usize) -> DiskState {
        let in_memory = (self.limit / INDEX_BYTES_MAX).saturating_mul(size_of_val(tokens));
        let charge = state + self.identity.len() + FILE_BYTES;
        DiskState {
            file,
            state,
            charge: charge.max(in_memory),
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod virtual_disk;
