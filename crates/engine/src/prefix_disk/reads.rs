//! [`PendingReads`]: what is read from the disk at present, how fast, and since when.

use std::collections::HashMap;
use std::time::Duration;

use crate::prefix_entry::EntryKind;
use crate::prefix_folder::FileId;
use crate::prefix_store::SavedId;
use sapwood_proto::time::Time;

/// Files that may be read at a time.
pub(super) const READS_MAX: usize = 64;
/// Bytes that may be read at a time, except for a single state.
const READING_BYTES_MAX: usize = 256 << 20;
/// A disk that answers no read for so long is given up.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes per second before anything was read. Rather too many: a disk that is too slow for a prompt is known after that one, and
/// one that is never read would never be known.
const SPEED_UNMEASURED: f64 = 1e9;
/// How the speed grows with each prompt for which it was too low: the disk may have been busy.
const HOPE: f64 = 1.05;
/// Reads of fewer bytes say little about the speed.
pub(super) const MEASURED_BYTES_MIN: usize = 64 << 10;
/// The share of a new measurement.
const NEW_SHARE: f64 = 0.3;

/// Reads in progress. It is pure: it reads no clock.
#[derive(Debug)]
pub(super) struct PendingReads {
    files: HashMap<FileId, PendingRead>,
    bytes: usize,
    bytes_max: usize,
    /// How fast files are read, in bytes per second; `None` before the first was read.
    speed: Option<f64>,
    /// When the disk began what it has not answered yet; `None` if nothing is read.
    since: Option<Time>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRead {
    pub(super) kind: EntryKind,
    pub(super) id: SavedId,
    pub(super) bytes: usize,
}

impl PendingReads {
    /// `state_max`: bytes of a state for which there is memory.
    pub(super) fn new(state_max: usize) -> Self {
        Self {
            files: HashMap::new(),
            bytes: 0,
            bytes_max: READING_BYTES_MAX.min(state_max / 2),
            speed: None,
            since: None,
        }
    }

    pub(super) fn contains(&self, file: FileId) -> bool {
        self.files.contains_key(&file)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Returns the bytes of the states that are read.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether a state of so many bytes can be read now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.is_empty() || self.files.len() < READS_MAX && self.bytes + bytes <= self.bytes_max
    }

    pub(super) fn insert(&mut self, file: FileId, read: PendingRead) {
        self.bytes += read.bytes;
        self.files.insert(file, read);
    }

    pub(super) fn remove(&mut self, file: FileId) -> Option<PendingRead> {
        let read = self.files.remove(&file)?;
        self.bytes -= read.bytes;
        Some(read)
    }

    pub(super) fn clear(&mut self) {
        self.files.clear();
        self.bytes = 0;
    }

    /// Notes that the disk has answered.
    pub(super) fn answered(&mut self) {
        self.since = None;
    }

    /// Returns whether the disk has not answered for too long.
    pub(super) fn is_late(&mut self, now: Time) -> bool {
        if self.is_empty() {
            self.since = None;
            return false;
        }
        now >= *self.since.get_or_insert(now) + READ_TIMEOUT
    }

    /// Returns how long so many bytes take, behind what is read now.
    pub(super) fn time_for(&self, bytes: usize) -> Duration {
        let bytes = self.bytes + bytes;
        let speed = self.speed.unwrap_or(SPEED_UNMEASURED);
        #[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^52")]
        Duration::try_from_secs_f64(bytes as f64 / speed).unwrap_or(Duration::MAX)
    }

    /// Takes into account how long a state of so many bytes took.
    pub(super) fn measure(&mut self, bytes: usize, took: Duration) {
        if bytes < MEASURED_BYTES_MIN {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^52")]
        let speed = bytes as f64 / took.as_secs_f64().max(1e-6);
        let average = |old: f64| old + (speed - old) * NEW_SHARE;
        self.speed = Some(self.speed.map_or(speed, average));
    }

    /// Notes that reading would have taken too long.
    pub(super) fn was_too_slow(&mut self) {
        self.speed = self.speed.map(|speed| speed * HOPE);
    }
}
