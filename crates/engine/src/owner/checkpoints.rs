//! [`Checkpoints`]: what slots lose as they go on, saved at lengths to which later requests return.
//!
//! A sliding window or a recurrent state is small beside the KV cells of a long prompt, and it is all that a slot lacks at
//! one of its earlier lengths. A checkpoint is therefore of use only with a slot, or a saved prefix, that begins with its
//! tokens:
//!
//! ```text
//!   slot:         prompt │ answer            fork the slot, rewind the copy by the checkpoint: the prompt alone
//!   checkpoints:    ▲  ▲ └ the whole prompt: it is answered once more
//!                   └──┴── every so many tokens of a long one: it is edited
//! ```
//!
//! The second prompt with a common beginning leaves one where it departs from the first, for the third.
//!
//! A slot that another one takes over for a longer prompt leaves a checkpoint of its end, which is where a turn of a
//! conversation ends.

use std::sync::Arc;

use sapwood_proto::steer::Token;

use crate::model::CheckpointTerms;
use crate::prefix_store::{PrefixStore, SavedId, SavedPrefix, ScopedPrefix};

/// The least distance of checkpoints within a prompt.
const SPACING_MIN: usize = 2048;

/// The maximum of checkpoints within a prompt, in addition to that at its end.
const WITHIN_MAX: usize = 8;

/// The checkpoints of all slots.
#[derive(Debug)]
pub(super) struct Checkpoints {
    /// `None`: the model has none.
    terms: Option<CheckpointTerms>,
    /// Each serves only prompts that begin with all of its tokens.
    store: PrefixStore,
}

/// A checkpoint by which a slot is shortened.
#[derive(Debug)]
pub(super) struct Checkpoint {
    id: SavedId,
    /// Its number of tokens: as many as the slot keeps, or within [`CheckpointTerms::slack`].
    pub(super) tokens: usize,
    pub(super) prefix: Arc<SavedPrefix>,
}

/// The prompt that a sequence computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptSpan {
    /// Tokens of the prompt.
    pub(super) tokens: usize,
    /// Tokens of prompt and output at most.
    pub(super) tokens_max: usize,
    /// How many are computed.
    pub(super) computed: usize,
    pub(super) marks: PromptMarks,
}

/// Lengths of a prompt to which other prompts may return; 0 if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PromptMarks {
    /// The end of its last turn, before the beginning of the answer, which a template may write otherwise in the next prompt.
    pub(super) turn_end: usize,
    /// The end of what it has in common with an earlier prompt, where no checkpoint lets it begin there: a third one would, such as
    /// the next user's of a system prompt.
    pub(super) branch: usize,
}

impl PromptMarks {
    /// Those of a prompt that begins with so many tokens of an earlier one.
    pub(super) fn after(self, computed: usize) -> Self {
        let worth = self.branch >= computed + BRANCH_TOKENS_MIN;
        Self {
            branch: if worth { self.branch } else { 0 },
            ..self
        }
    }
}

/// Returns the end of a prompt's last turn, which one of the EOG tokens `ends` ends, if it is near the end of the prompt; else 0.
pub(super) fn turn_end(prompt: &[Token], ends: &[Token]) -> usize {
    let near = prompt.len().saturating_sub(TURN_HEAD_MAX);
    let last = prompt[near..]
        .iter()
        .rposition(|token| ends.contains(token));
    last.map_or(0, |last| near + last + 1)
}

/// The maximum of tokens with which a template begins an answer.
const TURN_HEAD_MAX: usize = 16;

/// The least number of tokens between two checkpoints of a prompt.
const DISTANCE_MIN: usize = 32;

/// The least number of tokens behind a branch: to compute fewer with the end takes no step of their own.
const BRANCH_DISTANCE_MIN: usize = 8;

/// A prompt stops at a branch if prompts that begin there compute so many tokens less. A checkpoint may take as much memory as some
/// hundreds of tokens, and the beginning that a template writes into every prompt is shorter.
pub(super) const BRANCH_TOKENS_MIN: usize = 256;

impl Checkpoints {
    /// `limit`: bytes of all checkpoints.
    pub(super) fn new(terms: Option<CheckpointTerms>, limit: usize) -> Self {
        Self {
            terms: terms.filter(|_| limit > 0),
            store: PrefixStore::new(limit, false),
        }
    }

    /// Returns whether any are made.
    pub(super) fn is_on(&self) -> bool {
        self.terms.is_some()
    }

    pub(super) fn bytes(&self) -> usize {
        self.store.bytes()
    }

    /// Returns all checkpoints, to be written to a disk.
    pub(super) fn store(&self) -> &PrefixStore {
        &self.store
    }

    /// Returns all checkpoints, to which those of a disk are added.
    pub(super) fn store_mut(&mut self) -> &mut PrefixStore {
        &mut self.store
    }

    pub(super) fn clear(&mut self) {
        self.store = self.store.emptied();
    }

    /// Returns whether a slot that will hold so many tokens needs checkpoints to return from there.
    pub(super) fn are_needed(&self, tokens_max: usize) -> bool {
        self.terms
            .is_some_and(|terms| tokens_max > terms.kept_tokens as usize)
    }

    /// Returns the next length at which a prompt's prefill stops for a checkpoint.
    pub(super) fn next_stop(&self, span: PromptSpan) -> Option<usize> {
        let terms = self.terms.filter(|_| self.are_needed(span.tokens_max))?;
        let end = match span.marks.turn_end {
            // To compute the few tokens behind it takes as long as to compute one.
            turn_end @ 1.. if turn_end < span.tokens => turn_end,
            _ => (span.tokens + terms.slack as usize).checked_sub(1)?,
        };
        // Doubled, so that prompts of different lengths with a common beginning stop at the same places.
        let mut spacing = SPACING_MIN;
        while end / spacing > WITHIN_MAX {
            spacing *= 2;
        }
        let within = (span.computed / spacing + 1) * spacing;
        let branch = span.marks.branch;
        let branches = branch > span.computed
            && branch + BRANCH_DISTANCE_MIN <= end
            && self.has_room_for_branches();
        let branch = Some(branch).filter(|_| branches);
        // One so close to another would save next to nothing.
        let within = Some(within).filter(|within| {
            let far = |stop: usize| stop.abs_diff(*within) >= DISTANCE_MIN;
            *within < end && far(end) && branch.is_none_or(far)
        });
        let next = within.into_iter().chain(branch).fold(end, usize::min);
        (next > span.computed).then_some(next)
    }

    /// Returns whether a checkpoint at a branch would stay: where fewer than three have room, that at the end of each prompt takes its
    /// place before another prompt comes.
    fn has_room_for_branches(&self) -> bool {
        let each = self.store.bytes() / self.store.len().max(1);
        each <= self.store.limit() / 3
    }

    /// Returns how many of a slot's first `common` tokens it can be rewound to; 0 if none. `tokens` are those of the slot.
    pub(super) fn reach(&self, scope: u64, tokens: &[Token], common: usize) -> usize {
        let found = self.find(scope, tokens, common);
        found.map_or(0, |(_, checkpoint)| checkpoint.min(common))
    }

    /// Returns the checkpoint by which a slot with these tokens is shortened to `common` of them.
    pub(super) fn get(
        &mut self,
        scope: u64,
        tokens: &[Token],
        common: usize,
    ) -> Option<Checkpoint> {
        let (id, tokens) = self.find(scope, tokens, common)?;
        let prefix = self.store.get(id).filter(|_| tokens >= common)?;
        Some(Checkpoint { id, tokens, prefix })
    }

    /// Removes a checkpoint that does not serve.
    pub(super) fn remove(&mut self, checkpoint: &Checkpoint) -> Option<ScopedPrefix> {
        self.store.remove(checkpoint.id)
    }

    fn find(&self, scope: u64, tokens: &[Token], common: usize) -> Option<(u64, usize)> {
        let until = self.until(common)?;
        let found = self.store.find(scope, &tokens[..until.min(tokens.len())])?;
        Some((found.id, found.tokens))
    }

    /// Returns how many tokens a checkpoint may have that serves for so many common ones; `None` if there are none.
    pub(super) fn until(&self, common: usize) -> Option<usize> {
        self.terms.map(|terms| common + terms.slack as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoints(slack: u32) -> Checkpoints {
        let terms = CheckpointTerms {
            kept_tokens: 100,
            slack,
        };
        Checkpoints::new(Some(terms), 1 << 20)
    }

    fn stops(checkpoints: &Checkpoints, tokens: usize) -> Vec<usize> {
        let mut stops = Vec::new();
        let mut span = PromptSpan {
            tokens,
            tokens_max: tokens + 500,
            computed: 0,
            marks: PromptMarks::default(),
        };
        while let Some(stop) = checkpoints.next_stop(span) {
            stops.push(stop);
            span.computed = stop;
        }
        stops
    }

    #[test]
    fn prefill_stops_at_the_end_and_at_few_places_within() {
        let recurrent = checkpoints(0);
        assert!(stops(&recurrent, 1).is_empty());
        assert_eq!(stops(&recurrent, 700), [699]);
        assert_eq!(stops(&recurrent, 8000), [2048, 4096, 6144, 7999]);
        // A window lets the last token be computed once more.
        assert_eq!(stops(&checkpoints(1), 700), [700]);
        assert_eq!(stops(&checkpoints(1), 2080), [2048, 2080]);
        assert_eq!(stops(&checkpoints(1), 2079), [2079]);
        for tokens in (1000..100_000).step_by(777) {
            let stops = stops(&recurrent, tokens);
            assert!(stops.len() <= WITHIN_MAX + 1, "{tokens}: {stops:?}");
            assert_eq!(stops.last(), Some(&(tokens - 1)));
        }
        let short = PromptSpan {
            tokens: 60,
            tokens_max: 100,
            computed: 0,
            marks: PromptMarks::default(),
        };
        assert_eq!(recurrent.next_stop(short), None, "its window never moves");
    }

    #[test]
    fn prefill_stops_where_a_turn_ends() {
        let recurrent = checkpoints(0);
        let next = |computed, turn_end| {
            recurrent.next_stop(PromptSpan {
                tokens: 1000,
                tokens_max: 2000,
                computed,
                marks: PromptMarks {
                    turn_end,
                    branch: 0,
                },
            })
        };
        assert_eq!([next(0, 994), next(994, 994)], [Some(994), None]);
        let ends = |prompt: &[Token]| turn_end(prompt, &[8, 9]);
        assert_eq!(ends(&[1, 9, 2, 9, 3, 3]), 4);
        assert_eq!([ends(&[]), ends(&[1, 2])], [0; 2]);
        let far = [&[9], &[1; TURN_HEAD_MAX][..]].concat();
        assert_eq!([ends(&far), ends(&far[..TURN_HEAD_MAX])], [0, 1]);
    }

    #[test]
    fn prefill_stops_where_a_prompt_departs_from_an_earlier_one() {
        let recurrent = checkpoints(0);
        let next = |computed, branch| {
            recurrent.next_stop(PromptSpan {
                tokens: 3000,
                tokens_max: 4000,
                computed,
                marks: PromptMarks {
                    turn_end: 0,
                    branch,
                },
            })
        };
        assert_eq!([next(0, 1000), next(1000, 1000)], [Some(1000), Some(2048)]);
        assert_eq!([next(0, 2500), next(2048, 2500)], [Some(2048), Some(2500)]);
        assert_eq!([next(2500, 2500), next(2990, 2990)], [Some(2999); 2]);
        assert_eq!([next(2048, 2990), next(0, 3500)], [Some(2990), Some(2048)]);
        assert_eq!(
            [next(0, 2050), next(2050, 2050), next(2048, 2993)],
            [Some(2050), Some(2999), Some(2999)]
        );
    }

    #[test]
    fn the_longest_checkpoint_that_a_slot_begins_with_is_used() {
        let mut all = checkpoints(1);
        let tokens: Vec<Token> = (0..100).collect();
        for length in [20, 50, 80] {
            let store = all.store_mut();
            assert!(store.insert(7, &tokens[..length], vec![0; 8]));
            assert!(store.covers(7, &tokens[..length]), "it is there");
        }
        let reach = |common| all.reach(7, &tokens, common);
        assert_eq!(
            [18, 19, 20, 49, 60, 79, 100].map(reach),
            [0, 19, 20, 49, 50, 79, 80]
        );
        assert_eq!(all.reach(8, &tokens, 100), 0, "another scope");
        let other = [&tokens[..70], &[999; 30]].concat();
        assert_eq!(all.reach(7, &other, 100), 50);
        let found = |all: &mut Checkpoints, common| all.get(7, &tokens, common).map(|it| it.tokens);
        assert_eq!(
            [49, 50, 51].map(|common| found(&mut all, common)),
            [Some(50), Some(50), None]
        );
        all.clear();
        assert_eq!((all.reach(7, &tokens, 100), all.bytes()), (0, 0));
    }
}
