//! What a tier makes of the replies of its threads.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::threads::{ReadFile, WriteOutcome};
use super::{DiskPhase, DiskTier, SavedEntry};
use crate::prefix_entry::damaged;
use crate::prefix_folder::FileId;
use crate::prefix_store::SavedPrefix;
use crate::stats::EngineStats;

/// So many failures, one after the other, end the writing. One may pass: too many files are open, or memory is short.
const FAILURES_MAX: u32 = 3;

impl DiskTier {
    pub(super) fn was_read(
        &mut self,
        file: FileId,
        result: io::Result<ReadFile>,
        took: Duration,
        stats: &EngineStats,
    ) {
        let Some(read) = self.reads.remove(file) else {
            return;
        };
        let (kind, id) = (read.kind, read.id);
        // It may have been evicted meanwhile. What was read is right all the same.
        let expected = self.index.of(kind).tokens(id);
        match result {
            Ok((head, state))
                if expected.is_none_or(|it| *it == *head.tokens) && head.kind == kind =>
            {
                self.reads.measure(state.len(), took);
                stats.prefix_disk_read_bytes.add(state.len() as u64);
                let tokens = head.tokens;
                self.arrived.push(SavedEntry {
                    kind,
                    scope: head.scope,
                    prefix: Arc::new(SavedPrefix {
                        tokens,
                        state: state.into(),
                    }),
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
                    true => self.index.remove(kind, id),
                    false => self.index.set_aside(kind, id),
                }
            }
        }
    }

    pub(super) fn was_written(
        &mut self,
        file: Option<FileId>,
        outcome: WriteOutcome,
        stats: &EngineStats,
    ) {
        let WriteOutcome {
            result,
            unremoved,
            unreplaced,
        } = outcome;
        // Before the next one is written; when nothing is, they may stay.
        self.index.remove_files(unremoved);
        // The next start finds them.
        for (file, bytes) in unreplaced {
            self.index.add_useless(file, bytes);
        }
        let written = self.writes.end(file);
        let bytes = written.as_ref().map(|(_, entry)| entry.prefix.state.len());
        let Err(error) = result else {
            self.failures = 0;
            stats
                .prefix_disk_written_bytes
                .add(bytes.unwrap_or(0) as u64);
            return;
        };
        stats.prefix_disk_failures.add(1);
        self.failures += 1;
        if self.phase == DiskPhase::Open {
            let ends = takes_no_more(&error) || self.failures >= FAILURES_MAX;
            tracing::warn!(%error, until_loaded_again = ends, "a cached prefix cannot be written to the disk");
            if ends {
                self.phase = DiskPhase::ReadOnly;
            }
        }
        if let Some((file, entry)) = written {
            self.index.drop_unwritten(file, &entry);
        }
    }
}

/// Returns whether a file is of no use for ever after this error. Others may pass, as where too many files are open.
pub(super) fn is_useless(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
    matches!(error.kind(), InvalidData | NotFound | UnexpectedEof)
}

/// Returns whether a disk with this error takes nothing more.
pub(super) fn takes_no_more(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(
        error.kind(),
        PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull
    )
}
