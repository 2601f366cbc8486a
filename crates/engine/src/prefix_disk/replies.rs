//! What a tier makes of the replies of its threads.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::threads::ReadFile;
use super::{DiskPhase, DiskState, DiskTier, SavedEntry};
use crate::prefix_entry::{EntryKind, damaged};
use crate::prefix_folder::FileId;
use crate::prefix_store::{SavedId, SavedPrefix};
use crate::stats::EngineStats;

/// So many failures, one after the other, end the writing. One may pass: too many files are open, or memory is short.
const FAILURES_MAX: u32 = 3;
/// Reads of fewer bytes say little about the speed.
pub(super) const MEASURED_BYTES_MIN: usize = 64 << 10;
/// The share of a new measurement.
const NEW_SHARE: f64 = 0.3;

impl DiskTier {
    pub(super) fn was_read(
        &mut self,
        file: FileId,
        result: io::Result<ReadFile>,
        took: Duration,
        stats: &EngineStats,
    ) {
        let Some(read) = self.reading.remove(&file) else {
            return;
        };
        self.reading_bytes -= read.bytes;
        let (kind, id) = (read.kind, read.id);
        // It may have been evicted meanwhile. What was read is right all the same.
        let expected = self.index(kind).tokens(id);
        match result {
            Ok((head, state))
                if expected.is_none_or(|it| *it == *head.tokens) && head.kind == kind =>
            {
                if state.len() >= MEASURED_BYTES_MIN {
                    #[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^52")]
                    let speed = state.len() as f64 / took.as_secs_f64().max(1e-6);
                    let average = |old: f64| old + (speed - old) * NEW_SHARE;
                    self.speed = Some(self.speed.map_or(speed, average));
                }
                stats.prefix_disk_read_bytes.add(state.len() as u64);
                let tokens = head.tokens;
                self.arrived.push(SavedEntry {
                    kind,
                    scope: head.scope,
                    prefix: Arc::new(SavedPrefix { tokens, state }),
                });
            }
            result => {
                let error = result
                    .err()
                    .unwrap_or_else(|| damaged("it has another prefix"));
                let is_useless = is_useless(&error);
                tracing::warn!(
                    file = format!("{file:016x}.prefix"),
                    %error,
                    "a cached prefix cannot be read, and is computed again"
                );
                stats.prefix_disk_failures.add(1);
                match is_useless {
                    true => self.remove(kind, id),
                    false => self.set_aside(kind, id),
                }
            }
        }
    }

    /// Takes an entry out of the index whose file cannot be read now, and perhaps later.
    fn set_aside(&mut self, kind: EntryKind, id: SavedId) {
        if let Some((_, prefix)) = self.index_mut(kind).remove(id) {
            let DiskState { file, charge, .. } = prefix.state;
            self.useless.push((file, charge));
            self.useless_bytes = self.useless_bytes.saturating_add(charge);
        }
    }

    pub(super) fn was_written(
        &mut self,
        file: Option<FileId>,
        result: io::Result<()>,
        unremoved: Vec<FileId>,
        stats: &EngineStats,
    ) {
        self.orders -= 1;
        // Before the next one is written; when nothing is, they may stay.
        self.removing.extend(unremoved);
        let order = file.and_then(|it| Some((it, self.writing.remove(&it)?)));
        let bytes = order
            .as_ref()
            .map_or(0, |(_, entry)| entry.prefix.state.len());
        self.writing_bytes -= bytes;
        let Err(error) = result else {
            self.failures = 0;
            stats.prefix_disk_written_bytes.add(bytes as u64);
            return;
        };
        stats.prefix_disk_failures.add(1);
        self.failures += 1;
        if self.phase == DiskPhase::Open {
            let ends = ends_writing(&error) || self.failures >= FAILURES_MAX;
            tracing::warn!(%error, until_loaded_again = ends, "a cached prefix cannot be written to the disk");
            if ends {
                self.phase = DiskPhase::ReadOnly;
            }
        }
        if let Some((file, entry)) = order {
            self.drop_unwritten(file, &entry);
        }
    }

    /// Takes an entry out of the index that has no file.
    fn drop_unwritten(&mut self, file: FileId, entry: &SavedEntry) {
        let index = self.index(entry.kind);
        let found = index.find(entry.scope, &entry.prefix.tokens);
        let is_it = |id| index.state(id).is_some_and(|state| state.file == file);
        if let Some(found) = found.filter(|found| is_it(found.id)) {
            self.index_mut(entry.kind).remove(found.id);
        }
    }
}

/// Returns whether a file is of no use for ever after this error. Others may pass, as where too many files are open.
pub(super) fn is_useless(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
    matches!(error.kind(), InvalidData | NotFound | UnexpectedEof)
}

/// Returns whether a disk with this error takes nothing more.
fn ends_writing(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(
        error.kind(),
        PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull
    )
}
