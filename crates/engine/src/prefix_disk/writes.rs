//! [`PendingWrites`]: what waits to be written to the disk, of which the owner still has the states.

use std::collections::HashMap;

use std::time::Duration;

use super::SavedEntry;
use crate::prefix_folder::FileId;
use sapwood_proto::time::Time;

/// Orders that may wait to be written: more is dropped.
pub(super) const ORDERS_MAX: usize = 64;
/// Bytes that may wait to be written, except for a single state.
pub(super) const WRITING_BYTES_MAX: usize = 64 << 20;

/// A disk that has done no order for so long is given up, if it could have written the states at [`SPEED_MIN`] meanwhile.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes per second of the slowest disk that is of use.
const SPEED_MIN: usize = 4 << 20;

/// Orders to the writing thread whose reply has not come.
#[derive(Debug, Default)]
pub(super) struct PendingWrites {
    entries: HashMap<FileId, SavedEntry>,
    /// Those that write nothing included.
    orders: usize,
    /// Bytes of the states of `entries`.
    bytes: usize,
    /// Since when the present order is known to wait; `None` if that is not known yet, or no state waits.
    since: Option<Time>,
}

impl PendingWrites {
    /// Returns the entry that a file will have.
    pub(super) fn get(&self, file: FileId) -> Option<&SavedEntry> {
        self.entries.get(&file)
    }

    /// Returns the bytes of the states that wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of entries that wait.
    pub(super) fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether no order is left.
    pub(super) fn is_done(&self) -> bool {
        self.orders == 0
    }

    /// Returns whether another order may be given.
    pub(super) fn has_order(&self) -> bool {
        self.orders < ORDERS_MAX
    }

    /// Returns whether a state of so many bytes may wait to be written.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.has_order() && (self.bytes == 0 || self.bytes + bytes <= WRITING_BYTES_MAX)
    }

    /// Notes an order, of which the caller has checked that there is room for it.
    pub(super) fn begin(&mut self, write: Option<&(FileId, SavedEntry)>) {
        self.orders += 1;
        if let Some((file, entry)) = write {
            self.bytes += entry.prefix.state.len();
            self.entries.insert(*file, entry.clone());
        }
    }

    /// Returns whether an order has taken too long.
    pub(super) fn is_late(&mut self, now: Time) -> bool {
        if self.entries.is_empty() {
            self.since = None;
            return false;
        }
        let most = WRITE_TIMEOUT + Duration::from_secs((self.bytes / SPEED_MIN) as u64);
        now >= *self.since.get_or_insert(now) + most
    }

    /// Lets go of all states. Orders whose state is gone write nothing.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    /// Notes the reply to an order, and returns the entry that it wrote.
    pub(super) fn end(&mut self, file: Option<FileId>) -> Option<(FileId, SavedEntry)> {
        self.orders -= 1;
        self.since = None;
        let file = file?;
        let entry = self.entries.remove(&file)?;
        self.bytes -= entry.prefix.state.len();
        Some((file, entry))
    }
}
