//! [`DiskTier`]: the third tier of the prefix cache. What the memory evicts is written to a disk, is found by the same search,
//! and is read back to memory for a prompt that begins with it. It outlives the process.
//!
//! The owner has the index, and decides; a thread reads and another one writes ([`DiskThreads`]). Between them are bounded
//! queues, so that the owner never waits for a disk:
//!
//! ```text
//!   evicted from memory ── offer ──► write queue ──► written            too much waits: dropped
//!   prompt ── find, read ──► read queue ──► poll: back in memory        too slow, or failed: computed
//! ```
//!
//! Invariants:
//! - An entry of the index has a file, or waits in the write queue and is in `writing`; it is read from there.
//! - The files, and those that are about to be written, take no more than the limit: what makes room is removed before the
//!   next one is written, by the same thread.
//! - A read that fails takes its entry out of the index: each prompt tries a file at most once.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::prefix_entry::EntryKind;
use crate::prefix_folder::{FileId, PrefixDisk};
use crate::prefix_store::{PrefixState, PrefixStore, SavedId, SavedMatch, SavedPrefix};
use crate::stats::EngineStats;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use threads::{DiskReply, DiskThreads, WriteOrder};

mod ending;
mod opening;
mod replies;
mod threads;

/// What the tier of a model is made of.
#[derive(Clone, Debug)]
pub(crate) struct DiskTerms {
    /// [`crate::model::Model::saved_identity`].
    pub(crate) identity: String,
    /// Bytes of all files.
    pub(crate) limit: usize,
    /// Whether a part of a prefix is of use ([`PrefixStore::new`]).
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
    prefixes: PrefixStore<DiskState>,
    checkpoints: PrefixStore<DiskState>,
    phase: DiskPhase,
    /// Files of no use at present, and their bytes: of other settings, or too long. They are removed before others.
    useless: Vec<(FileId, usize)>,
    useless_bytes: usize,
    /// Files to be removed before the next one is written.
    removing: Vec<FileId>,
    next_file: FileId,
    reading: HashMap<FileId, PendingRead>,
    writing: HashMap<FileId, SavedEntry>,
    /// Orders whose reply has not come.
    orders: usize,
    /// Bytes of states in memory that wait to be written.
    writing_bytes: usize,
    /// Bytes that are read at present.
    reading_bytes: usize,
    /// Newest entries that are read before a prompt asks for them.
    ahead: Vec<(EntryKind, SavedId)>,
    /// What was read.
    arrived: Vec<SavedEntry>,
    /// How fast files are read, in bytes per second; `None` before the first was read.
    speed: Option<f64>,
    /// When the disk began what it has not answered yet; `None` if nothing is read.
    reading_since: Option<Time>,
    /// Orders that failed, one after the other.
    failures: u32,
    threads: DiskThreads,
}

/// Where the state of an entry is.
#[derive(Clone, Copy, Debug)]
struct DiskState {
    file: FileId,
    /// Bytes of the state.
    state: usize,
    /// What it counts for.
    charge: usize,
}

impl PrefixState for DiskState {
    fn bytes(&self) -> usize {
        self.charge
    }
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

#[derive(Clone, Copy, Debug)]
struct PendingRead {
    kind: EntryKind,
    id: SavedId,
    bytes: usize,
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

/// Orders that may wait to be written: more is dropped.
const ORDERS_MAX: usize = 64;
/// Bytes that may wait to be written, except for a single state.
const WRITING_BYTES_MAX: usize = 64 << 20;
/// Files that may be read at a time.
const READS_MAX: usize = 64;
/// Bytes that may be read at a time, except for a single state.
const READING_BYTES_MAX: usize = 256 << 20;
/// A disk that answers no read for so long is given up.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that are read before a prompt asks for them.
const AHEAD_BYTES_MAX: usize = 256 << 20;
/// Bytes that the tokens of the index take in memory. Only where a state has the same size after any number of tokens are they
/// much.
const INDEX_BYTES_MAX: usize = 64 << 20;
/// What a file takes beside its state and tokens: its identity, and a part of a block.
const FILE_BYTES: usize = 8 << 10;
/// Bytes per second before anything was read. Rather too many: a disk that is too slow for a prompt is known after that one, and
/// one that is never read would never be known.
const SPEED_UNMEASURED: f64 = 1e9;
/// How the speed grows with each prompt for which it was too low: the disk may have been busy.
const HOPE: f64 = 1.05;

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
        let [prefixes, checkpoints] = terms.limits();
        Ok(Self {
            prefixes: PrefixStore::new(prefixes, terms.partial),
            checkpoints: PrefixStore::new(checkpoints, false),
            phase: DiskPhase::Opening,
            useless: Vec::new(),
            useless_bytes: 0,
            removing: Vec::new(),
            next_file: 0,
            reading: HashMap::new(),
            writing: HashMap::new(),
            orders: 0,
            writing_bytes: 0,
            reading_bytes: 0,
            ahead: Vec::new(),
            arrived: Vec::new(),
            speed: None,
            reading_since: None,
            failures: 0,
            threads,
            terms,
        })
    }

    /// Takes what the threads have done, and returns what was read, for the memory.
    pub(crate) fn poll(&mut self, stats: &EngineStats, now: Time) -> Vec<SavedEntry> {
        while let Some(reply) = self.threads.try_reply() {
            self.reading_since = None;
            self.take(reply, stats);
        }
        self.watch(stats, now);
        self.read_ahead();
        self.flush_removed();
        stats.prefix_disk_bytes.set(self.bytes() as u64);
        self.take_arrived()
    }

    /// Gives up a disk that does not answer: each prompt that begins with a file would wait in vain.
    fn watch(&mut self, stats: &EngineStats, now: Time) {
        if self.reading.is_empty() {
            self.reading_since = None;
            return;
        }
        let since = *self.reading_since.get_or_insert(now);
        if now >= since + READ_TIMEOUT {
            tracing::warn!(limit = ?READ_TIMEOUT, "the disk with cached prefixes does not answer: they are kept in memory alone until the model is loaded again");
            stats.prefix_disk_failures.add(1);
            self.give_up();
        }
    }

    fn give_up(&mut self) {
        self.phase = DiskPhase::Off;
        self.reading.clear();
        self.reading_bytes = 0;
        self.ahead.clear();
        self.prefixes = self.prefixes.emptied();
        self.checkpoints = self.checkpoints.emptied();
    }

    /// Returns what the files count for.
    fn bytes(&self) -> usize {
        self.prefixes.bytes() + self.checkpoints.bytes() + self.useless_bytes
    }

    /// Returns the bytes of memory for states that wait to be written, or are read.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.writing_bytes + self.reading_bytes
    }

    /// Reads nothing more that no prompt asks for.
    pub(crate) fn stop_reading_ahead(&mut self) {
        self.ahead.clear();
    }

    /// Finds the entry of which a prompt begins with most tokens.
    pub(crate) fn find(&self, kind: EntryKind, scope: u64, tokens: &[Token]) -> Option<SavedMatch> {
        self.index(kind).find(scope, tokens)
    }

    /// Returns the tokens of an entry.
    pub(crate) fn tokens(&self, kind: EntryKind, id: SavedId) -> &[Token] {
        self.index(kind).tokens(id).unwrap_or_default()
    }

    /// Returns whether something is listed or read.
    pub(crate) fn is_reading(&self) -> bool {
        self.is_opening() || !self.reading.is_empty()
    }

    /// Returns whether the files are not listed yet.
    pub(crate) fn is_opening(&self) -> bool {
        self.phase == DiskPhase::Opening
    }

    /// Returns how long reading these entries takes, behind what is read now.
    pub(crate) fn time_to_read(&self, entries: &[(EntryKind, SavedId)]) -> Duration {
        let bytes = entries.iter().map(|&(kind, id)| self.state_bytes(kind, id));
        let bytes = self.reading_bytes + bytes.sum::<usize>();
        let speed = self.speed.unwrap_or(SPEED_UNMEASURED);
        #[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^52")]
        Duration::try_from_secs_f64(bytes as f64 / speed).unwrap_or(Duration::MAX)
    }

    /// Notes that reading would have taken too long.
    pub(crate) fn was_too_slow(&mut self) {
        self.speed = self.speed.map(|speed| speed * HOPE);
    }

    fn state_bytes(&self, kind: EntryKind, id: SavedId) -> usize {
        let state = self.index(kind).state(id);
        state.map_or(0, |state| state.state)
    }

    /// Returns what was read since the last call.
    pub(crate) fn take_arrived(&mut self) -> Vec<SavedEntry> {
        std::mem::take(&mut self.arrived)
    }

    /// Starts to read an entry, which [`DiskTier::poll`] returns, or [`DiskTier::take_arrived`] at once if it is not written yet.
    /// Returns its file; `None` if so much is read already that it had to wait.
    pub(crate) fn read(&mut self, kind: EntryKind, id: SavedId) -> Option<FileId> {
        let DiskState { file, state, .. } = *self.index(kind).state(id)?;
        if self.reading.contains_key(&file) {
            return Some(file);
        }
        self.index_mut(kind).get(id);
        if let Some(entry) = self.writing.get(&file) {
            self.arrived.push(entry.clone());
            return Some(file);
        }
        let is_idle = self.reading.is_empty();
        let most = READING_BYTES_MAX.min(self.terms.state_max / 2);
        if !is_idle && (self.reading.len() >= READS_MAX || self.reading_bytes + state > most) {
            return None;
        }
        self.threads.read(file);
        let bytes = state;
        self.reading_bytes += bytes;
        self.reading.insert(file, PendingRead { kind, id, bytes });
        Some(file)
    }

    /// Returns whether it is still worth waiting.
    pub(crate) fn is_pending(&self, wait: DiskWait) -> bool {
        match wait {
            DiskWait::Opening => self.is_opening(),
            DiskWait::Files(files) => {
                let mut files = files.into_iter().flatten();
                files.any(|file| self.reading.contains_key(&file))
            }
        }
    }

    /// Writes an entry that was evicted from memory, unless it is there, or too much waits to be written.
    pub(crate) fn offer(&mut self, entry: SavedEntry) {
        let bytes = entry.prefix.state.len();
        let is_full = self.orders >= ORDERS_MAX
            || self.writing_bytes > 0 && self.writing_bytes + bytes > WRITING_BYTES_MAX;
        if self.phase != DiskPhase::Open || is_full {
            return;
        }
        let file = self.next_file;
        let state = self.terms.state_of(file, &entry.prefix.tokens, bytes);
        let tokens = &entry.prefix.tokens;
        if !self
            .index_mut(entry.kind)
            .insert(entry.scope, tokens, state)
        {
            return;
        }
        self.next_file += 1;
        self.make_room();
        self.writing_bytes += bytes;
        self.writing.insert(file, entry.clone());
        self.order(Some((file, entry)), None);
    }

    /// Forgets an entry that cannot be used, if it is there.
    pub(crate) fn forget(&mut self, kind: EntryKind, scope: u64, tokens: &[Token]) {
        let index = self.index_mut(kind);
        let found = index.find(scope, tokens);
        if let Some(found) = found.filter(|it| it.saved == tokens.len() && it.tokens == it.saved) {
            self.remove(kind, found.id);
        }
    }

    /// Counts all reads as quicker than computing, which tests of tiny models cannot rely on.
    #[cfg(all(test, feature = "embedded"))]
    pub(crate) fn hasten(&mut self) {
        self.speed = Some(1e300);
        self.ahead.clear();
    }

    /// Waits until nothing is listed, read or written.
    #[cfg(test)]
    pub(crate) fn settle(&mut self, stats: &EngineStats) {
        let until = Instant::now() + Duration::from_secs(60);
        while (self.is_reading() || self.orders > 0) && self.wait(until, stats) {}
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
            DiskReply::Read { file, result, took } => self.was_read(file, result, took, stats),
            DiskReply::Wrote {
                file,
                result,
                unremoved,
            } => self.was_written(file, result, unremoved, stats),
        }
    }

    fn remove(&mut self, kind: EntryKind, id: SavedId) {
        if let Some((_, prefix)) = self.index_mut(kind).remove(id) {
            self.removing.push(prefix.state.file);
        }
    }

    /// Removes files until those that are left fit.
    fn make_room(&mut self) {
        for kind in EntryKind::ALL {
            let evicted = self.index_mut(kind).take_evicted();
            let files = evicted.into_iter().map(|it| it.prefix.state.file);
            self.removing.extend(files);
        }
        while self.bytes() > self.terms.limit
            && let Some((file, bytes)) = self.useless.pop()
        {
            self.useless_bytes -= bytes;
            self.removing.push(file);
        }
    }

    fn flush_removed(&mut self) {
        let may_order = self.phase == DiskPhase::Open && self.orders < ORDERS_MAX;
        if may_order && !self.removing.is_empty() {
            self.order(None, None);
        }
    }

    /// The caller has checked [`ORDERS_MAX`].
    fn order(&mut self, write: Option<(FileId, SavedEntry)>, mark: Option<(FileId, SystemTime)>) {
        self.orders += 1;
        let remove = std::mem::take(&mut self.removing);
        self.threads.write(WriteOrder {
            remove,
            write,
            mark,
        });
    }

    fn index(&self, kind: EntryKind) -> &PrefixStore<DiskState> {
        match kind {
            EntryKind::Prefix => &self.prefixes,
            EntryKind::Checkpoint => &self.checkpoints,
        }
    }

    fn index_mut(&mut self, kind: EntryKind) -> &mut PrefixStore<DiskState> {
        match kind {
            EntryKind::Prefix => &mut self.prefixes,
            EntryKind::Checkpoint => &mut self.checkpoints,
        }
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
