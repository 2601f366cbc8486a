//! [`DiskIndex`]: which entries are on the disk, in which files, and which files have to go.

use super::{DiskTerms, SavedEntry};
use crate::prefix_entry::EntryKind;
use crate::prefix_folder::FileId;
use crate::prefix_store::{PrefixState, PrefixStore, SavedId};
use sapwood_proto::steer::Token;

/// Where the state of an entry is.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskState {
    pub(super) file: FileId,
    /// Bytes of the state.
    pub(super) state: usize,
    /// What it counts for.
    pub(super) charge: usize,
}

impl PrefixState for DiskState {
    fn bytes(&self) -> usize {
        self.charge
    }
}

/// The entries of a disk with their files. It is pure: it does not call the disk.
#[derive(Debug)]
pub(super) struct DiskIndex {
    /// The maximum of [`DiskIndex::bytes`].
    limit: usize,
    prefixes: PrefixStore<DiskState>,
    checkpoints: PrefixStore<DiskState>,
    /// Files of no use at present, and their bytes: of other settings, or too long. They are removed before others.
    useless: Vec<(FileId, usize)>,
    useless_bytes: usize,
    /// Files to be removed before the next one is written.
    removing: Vec<FileId>,
    /// Files that the next one replaces, and their bytes.
    replaced: Vec<(FileId, usize)>,
}

impl DiskIndex {
    pub(super) fn new(terms: &DiskTerms) -> Self {
        let [prefixes, checkpoints] = terms.limits();
        Self {
            limit: terms.limit,
            prefixes: PrefixStore::new(prefixes, terms.partial),
            checkpoints: PrefixStore::new(checkpoints, false),
            useless: Vec::new(),
            useless_bytes: 0,
            removing: Vec::new(),
            replaced: Vec::new(),
        }
    }

    /// Returns the entries of a kind.
    pub(super) fn of(&self, kind: EntryKind) -> &PrefixStore<DiskState> {
        match kind {
            EntryKind::Prefix => &self.prefixes,
            EntryKind::Checkpoint => &self.checkpoints,
        }
    }

    pub(super) fn of_mut(&mut self, kind: EntryKind) -> &mut PrefixStore<DiskState> {
        match kind {
            EntryKind::Prefix => &mut self.prefixes,
            EntryKind::Checkpoint => &mut self.checkpoints,
        }
    }

    /// Returns what the files count for.
    pub(super) fn bytes(&self) -> usize {
        self.prefixes.bytes() + self.checkpoints.bytes() + self.useless_bytes
    }

    /// Returns the bytes of the state of an entry.
    pub(super) fn state_bytes(&self, kind: EntryKind, id: SavedId) -> usize {
        let state = self.of(kind).state(id);
        state.map_or(0, |state| state.state)
    }

    /// Returns the file that serves all prompts which these tokens could serve.
    pub(super) fn file_for(&self, kind: EntryKind, scope: u64, tokens: &[Token]) -> Option<FileId> {
        let entries = self.of(kind);
        let found = entries.find(scope, tokens)?;
        let state = entries.state(found.id)?;
        (found.tokens == tokens.len()).then_some(state.file)
    }

    /// Adds a file that is of no use at present.
    pub(super) fn add_useless(&mut self, file: FileId, bytes: usize) {
        self.useless.push((file, bytes));
        self.useless_bytes = self.useless_bytes.saturating_add(bytes);
    }

    /// Returns the number of files of no use.
    pub(super) fn useless(&self) -> usize {
        self.useless.len()
    }

    /// Removes an entry and its file.
    pub(super) fn remove(&mut self, kind: EntryKind, id: SavedId) {
        if let Some((_, prefix)) = self.of_mut(kind).remove(id) {
            self.removing.push(prefix.state.file);
        }
    }

    /// Removes the entry of exactly these tokens and its file, if it is there.
    pub(super) fn forget(&mut self, kind: EntryKind, scope: u64, tokens: &[Token]) {
        let found = self.of(kind).find(scope, tokens);
        if let Some(found) = found.filter(|it| it.saved == tokens.len() && it.tokens == it.saved) {
            self.remove(kind, found.id);
        }
    }

    /// Removes an entry whose file cannot be read now, and perhaps later.
    pub(super) fn set_aside(&mut self, kind: EntryKind, id: SavedId) {
        if let Some((_, prefix)) = self.of_mut(kind).remove(id) {
            self.add_useless(prefix.state.file, prefix.state.charge);
        }
    }

    /// Removes an entry that has no file.
    pub(super) fn drop_unwritten(&mut self, file: FileId, entry: &SavedEntry) {
        let entries = self.of(entry.kind);
        let found = entries.find(entry.scope, &entry.prefix.tokens);
        let is_it = |id| entries.state(id).is_some_and(|state| state.file == file);
        if let Some(found) = found.filter(|found| is_it(found.id)) {
            self.of_mut(entry.kind).remove(found.id);
        }
    }

    /// Chooses files to be removed until those that are left fit.
    pub(super) fn make_room(&mut self) {
        for kind in EntryKind::ALL {
            let evicted = self.of_mut(kind).take_evicted();
            for evicted in evicted {
                let DiskState { file, charge, .. } = evicted.prefix.state;
                match evicted.superseded {
                    true => self.replaced.push((file, charge)),
                    false => self.removing.push(file),
                }
            }
        }
        while self.bytes() > self.limit
            && let Some((file, bytes)) = self.useless.pop()
        {
            self.useless_bytes -= bytes;
            self.removing.push(file);
        }
    }

    /// Adds files to be removed.
    pub(super) fn remove_files(&mut self, files: impl IntoIterator<Item = FileId>) {
        self.removing.extend(files);
    }

    /// Returns whether there are files to be removed.
    pub(super) fn has_removed(&self) -> bool {
        !self.removing.is_empty() || !self.replaced.is_empty()
    }

    /// Takes the files that are to be removed.
    pub(super) fn take_removed(&mut self) -> Vec<FileId> {
        std::mem::take(&mut self.removing)
    }

    /// Takes the files that the next one replaces.
    pub(super) fn take_replaced(&mut self) -> Vec<(FileId, usize)> {
        std::mem::take(&mut self.replaced)
    }

    /// Drops all entries, and leaves their files.
    pub(super) fn clear(&mut self) {
        self.prefixes = self.prefixes.emptied();
        self.checkpoints = self.checkpoints.emptied();
    }
}
