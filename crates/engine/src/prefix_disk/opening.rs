//! The start of a tier: the index is made of the files that are there, and the newest are read.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::threads::FoundFile;
use super::{AHEAD_BYTES_MAX, DiskPhase, DiskTier};
use crate::prefix_entry::EntryKind;
use crate::prefix_folder::FileId;

impl DiskTier {
    /// Makes the index of the files.
    pub(super) fn opened(&mut self, mut files: Vec<FoundFile>) {
        self.phase = DiskPhase::Open;
        files.sort_by_key(|found| found.listed);
        let next = files.iter().map(|it| it.listed.id.saturating_add(1)).max();
        self.next_file = next.unwrap_or(0);
        let ranks = files.iter().map(|it| it.listed.id).zip(0..).collect();
        let mut entries = 0;
        for FoundFile {
            listed,
            bytes,
            head,
        } in files
        {
            let file = listed.id;
            let usable = head.filter(|head| {
                let has_kind = head.kind == EntryKind::Prefix || self.terms.checkpoints;
                has_kind
                    && head.tokens.len() <= self.terms.tokens_max
                    && head.state <= self.terms.state_max
            });
            let Some(head) = usable else {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.index.add_useless(file, bytes);
                continue;
            };
            let state = self.terms.state_of(file, &head.tokens, head.state);
            let of_kind = self.index.of_mut(head.kind);
            match of_kind.insert(head.scope, &head.tokens, state) {
                true => entries += 1,
                false => self.index.remove_files([file]),
            }
        }
        self.index.make_room();
        let useless = self.index.useless();
        if entries > 0 || useless > 0 {
            tracing::info!(entries, useless, "cached prefixes were found on the disk");
        }
        self.plan_ahead(&ranks);
    }

    /// Chooses what is read before a prompt asks for it: the entries that were used last.
    fn plan_ahead(&mut self, ranks: &HashMap<FileId, usize>) {
        let of_kind = |kind: EntryKind| {
            let index = self.index.of(kind);
            index.ids_by_value().filter_map(move |id| {
                let state = index.state(id)?;
                Some((ranks.get(&state.file)?, state.state, (kind, id)))
            })
        };
        let mut entries: Vec<_> = EntryKind::ALL.into_iter().flat_map(of_kind).collect();
        entries.sort_unstable_by_key(|(rank, ..)| Reverse(*rank));
        let mut left = AHEAD_BYTES_MAX.min(self.terms.state_max / 2);
        let fitting = entries.into_iter().map_while(|(_, bytes, entry)| {
            left = left.checked_sub(bytes)?;
            Some(entry)
        });
        self.ahead = fitting.collect();
        self.ahead.reverse();
    }

    /// Reads the next entry that no prompt has asked for, while nothing else is read.
    pub(super) fn read_ahead(&mut self) {
        while self.reads.is_empty()
            && let Some((kind, id)) = self.ahead.pop()
        {
            self.read(kind, id);
        }
    }
}
