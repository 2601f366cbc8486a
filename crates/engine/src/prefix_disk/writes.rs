//! [`PendingWrites`]: what waits to be written to the disk, of which the owner still has the states.

use std::collections::HashMap;

use super::SavedEntry;
use crate::prefix_folder::FileId;

/// Orders that may wait to be written: more is dropped.
pub(super) const ORDERS_MAX: usize = 64;
/// Bytes that may wait to be written, except for a single state.
pub(super) const WRITING_BYTES_MAX: usize = 64 << 20;

/// Orders to the writing thread whose reply has not come.
#[derive(Debug, Default)]
pub(super) struct PendingWrites {
    entries: HashMap<FileId, SavedEntry>,
    /// Those that write nothing included.
    orders: usize,
    /// Bytes of the states of `entries`.
    bytes: usize,
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

    /// Notes the reply to an order, and returns the entry that it wrote.
    pub(super) fn end(&mut self, file: Option<FileId>) -> Option<(FileId, SavedEntry)> {
        self.orders -= 1;
        let file = file?;
        let entry = self.entries.remove(&file)?;
        self.bytes -= entry.prefix.state.len();
        Some((file, entry))
    }
}
