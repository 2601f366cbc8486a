//! The requests of P2 (AI-501, AI-503).

use std::collections::BTreeSet;

use super::super::request::{MainRequest, ProcessOp};
use super::RemoteTable;
use super::entry::{AskState, SequencePlace};

impl RemoteTable {
    /// The next request, and the ids that it frees. `frees`: those are reason enough for one.
    pub(super) fn next_p2(&mut self, frees: bool) -> Option<(MainRequest, Vec<u64>)> {
        let ids = self.p2_ids();
        if ids.is_empty() && !frees {
            return None;
        }
        let mut ops = Vec::with_capacity(ids.len());
        let mut last_clone = (0, 0);
        for id in ids {
            let Some(entry) = self.entries.get_mut(&id) else {
                continue;
            };
            let happened = std::mem::take(&mut entry.happened);
            let mut op = ProcessOp {
                id,
                req_id: None,
                clone_id: None,
                clone_idx: None,
                sampled: happened.sampled,
                tokens: happened.tokens,
                backtrack: happened.backtrack,
            };
            match std::mem::replace(&mut entry.place, SequencePlace::Live) {
                SequencePlace::Pending(request) => op.req_id = Some(request),
                SequencePlace::Clone { parent, index } => {
                    // Two forks of one parent may travel together, and an index may be used once.
                    let free = if last_clone.0 == parent {
                        last_clone.1 + 1
                    } else {
                        1
                    };
                    last_clone = (parent, index.max(free));
                    op.clone_id = Some(parent);
                    op.clone_idx = Some(last_clone.1);
                }
                SequencePlace::Live => {}
            }
            entry.mid = AskState::Sent;
            ops.push(op);
        }
        let freed = std::mem::take(&mut self.freed);
        let request = MainRequest::Process {
            ops,
            freed: freed.clone(),
        };
        Some((request, freed))
    }

    /// The sequences that were asked for, the clones that must not come later than their parents, and the parents
    /// without which there are no clones.
    fn p2_ids(&self) -> BTreeSet<u64> {
        let ready = self.entries.iter();
        let ready = ready.filter(|(_, entry)| entry.mid == AskState::Ready);
        let mut ids: BTreeSet<u64> = ready.map(|(id, _)| *id).collect();
        loop {
            let before = ids.len();
            for (id, entry) in &self.entries {
                let SequencePlace::Clone { parent, .. } = entry.place else {
                    continue;
                };
                if ids.contains(&parent) {
                    ids.insert(*id);
                } else if ids.contains(id)
                    && self
                        .entries
                        .get(&parent)
                        .is_some_and(|parent| parent.place != SequencePlace::Live)
                {
                    ids.insert(parent);
                }
            }
            if ids.len() == before {
                return ids;
            }
        }
    }
}
