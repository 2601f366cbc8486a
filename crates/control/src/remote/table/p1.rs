//! The requests and the results of P1 (AI-401 to AI-412, AI-441).

use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use super::super::reply::CallResult;
use super::super::request::{MainRequest, MidOp, PostOp, PreOp};
use super::entry::{AskState, SequencePlace};
use super::{RemoteTable, STOP, Wakers, add_waker};
use crate::host::{CallFailure, Returned};

impl RemoteTable {
    /// The next request, and the ids that it frees. `frees`: those are reason enough for one.
    pub(super) fn next_p1(&mut self, frees: bool) -> Option<(MainRequest, Vec<u64>)> {
        // Clones first: the other op would change their parents.
        if let Some(ops) = self.p1_mids() {
            for op in &ops {
                if let Some(entry) = self.entries.get_mut(&op.id) {
                    entry.place = SequencePlace::Live;
                    entry.mid = AskState::Sent;
                    // Of the state before that, which is reported later.
                    entry.mid_is_stale = !entry.happened.is_empty();
                }
            }
            return Some((MainRequest::Mid { ops }, Vec::new()));
        }
        let pre_ops = self.p1_bindings();
        let asked = self.entries.values();
        let asked = asked
            .filter(|entry| entry.place == SequencePlace::Live && entry.pre == AskState::Ready);
        if asked.count() == 0 && pre_ops.is_empty() && !frees {
            return None;
        }
        let mut post_ops = Vec::new();
        for (id, entry) in &mut self.entries {
            if entry.place != SequencePlace::Live {
                continue;
            }
            if entry.pre == AskState::Ready {
                entry.pre = AskState::Sent;
            }
            if entry.happened.is_empty() || entry.dropped {
                continue;
            }
            let happened = std::mem::take(&mut entry.happened);
            post_ops.push(PostOp {
                id: *id,
                tokens: happened.tokens,
                // Here the sampled token, which a splice drops, is counted (AI-406).
                backtrack: match happened.backtrack {
                    0 => 0,
                    committed => committed.saturating_add(1),
                },
            });
        }
        for op in &pre_ops {
            if let Some(entry) = self.entries.get_mut(&op.id) {
                entry.place = SequencePlace::Live;
                entry.pre = match entry.pre {
                    AskState::Ready => AskState::Sent,
                    other => other,
                };
            }
        }
        let freed = std::mem::take(&mut self.freed);
        let request = MainRequest::PostPre {
            post_ops,
            pre_ops,
            freed: freed.clone(),
        };
        Some((request, freed))
    }

    /// The instances to bind: those that are asked for, and those whose clones are.
    fn p1_bindings(&self) -> Vec<PreOp> {
        let mut wanted = std::collections::BTreeSet::new();
        for (id, entry) in self.entries.iter().rev() {
            let asked =
                entry.pre == AskState::Ready || entry.mid == AskState::Ready || wanted.contains(id);
            match &entry.place {
                SequencePlace::Clone { parent, .. } if asked => {
                    wanted.insert(*parent);
                }
                SequencePlace::Pending(_) if asked => {
                    wanted.insert(*id);
                }
                _ => {}
            }
        }
        let pending = |id: &u64| match &self.entries.get(id)?.place {
            SequencePlace::Pending(request) => Some(PreOp {
                id: *id,
                req_id: request.clone(),
            }),
            _ => None,
        };
        wanted.iter().filter_map(pending).collect()
    }

    /// The sequences that are asked for masks, with the clones that must be made by now; `None`: there are none.
    fn p1_mids(&self) -> Option<Vec<MidOp>> {
        let waits = |id: u64| {
            self.entries
                .get(&id)
                .is_some_and(|parent| parent.place != SequencePlace::Live)
        };
        let mut ops: Vec<MidOp> = Vec::new();
        for (id, entry) in &self.entries {
            if let SequencePlace::Clone { parent, .. } = entry.place
                && (!waits(parent) || ops.iter().any(|op| op.id == parent))
            {
                ops.push(MidOp {
                    id: *id,
                    clone_id: Some(parent),
                });
            }
        }
        if ops.len() > self.ops_max {
            // Their parents come with the last of them.
            ops.truncate(self.ops_max);
            return Some(ops);
        }
        let parents: Vec<u64> = ops.iter().filter_map(|op| op.clone_id).collect();
        for (id, entry) in &self.entries {
            let asked = entry.mid == AskState::Ready;
            // Of one group with its clones, as far as nothing happened to it.
            let early = parents.contains(id) && entry.may_run_early() && entry.happened.is_empty();
            if entry.place == SequencePlace::Live && (asked || early) && ops.len() < self.ops_max {
                ops.push(MidOp {
                    id: *id,
                    clone_id: None,
                });
            }
        }
        if ops.is_empty() {
            return None;
        }
        ops.sort_by_key(|op| op.id);
        Some(ops)
    }

    /// The result of `post`: what matters of it is whether the sequence goes on.
    pub(super) fn take_post(&mut self, id: u64, result: CallResult, woken: &mut Wakers) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        match result {
            Ok(Returned::Post { stop: true }) => entry.pre_result = Some(Ok(STOP)),
            Ok(_) => {}
            Err(failure) => entry.fail(failure, woken),
        }
    }

    /// The result of `pre`; `None`: it is late, and asked for again in the next step.
    pub(super) fn take_pre(
        &mut self,
        id: u64,
        result: Option<CallResult>,
        now: Time,
        woken: &mut Wakers,
    ) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        let asked = std::mem::replace(&mut entry.pre, AskState::None);
        let asked = match asked {
            AskState::Sent => true,
            // Asked for after this request had been sent.
            other => {
                entry.pre = other;
                false
            }
        };
        // Its post has decided.
        if entry.pre_result.is_some() {
            entry.pre = AskState::None;
            return add_waker(woken, &entry.waker);
        }
        // Its runtime would have ended it by now: it only says so, and would never be suspended.
        let since = *entry.late_since.get_or_insert(now);
        match &result {
            Some(_) => entry.late_since = None,
            None if now.since(since) >= LATE_MAX => {
                let text = "the controller was late for too long";
                return entry.fail(CallFailure::new(ErrorReason::TIMEOUT, text), woken);
            }
            None => {}
        }
        match result {
            None if asked => {
                entry.pre = AskState::Queued;
                self.queued_since.get_or_insert(now);
            }
            None => {}
            Some(Err(failure)) => entry.fail(failure, woken),
            Some(Ok(returned)) => {
                let Returned::Pre {
                    num_forks,
                    suspend,
                    ff_tokens,
                    ..
                } = &returned
                else {
                    return;
                };
                if !ff_tokens.is_empty() {
                    // The controller knows them already, so what it said before is out of date.
                    entry.forget_mid();
                }
                // What changes nothing is asked for again when the engine wants to know.
                let trivial = ff_tokens.is_empty() && (*num_forks == 1 || *suspend);
                if asked || !trivial {
                    entry.pre = AskState::None;
                    entry.pre_result = Some(Ok(returned));
                    add_waker(woken, &entry.waker);
                }
            }
        }
    }
}

/// How long a callback may be late in a row: longer than the late steps of any runtime take.
const LATE_MAX: Duration = Duration::from_secs(60);
