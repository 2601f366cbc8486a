//! What the saved states of real slots have in common.

use std::sync::Arc;

use super::reuse::text;
use super::*;
use crate::saved_state::SavedState;

/// Decodes a text in a slot, from a position on.
fn fill(model: &mut Embedded, slot: SlotId, from: u32, tokens: &[Token]) {
    for (index, part) in tokens.chunks(50).enumerate() {
        let batch = entries(slot, from + 50 * index as u32, part);
        model.decode(&batch, Time::ZERO).unwrap();
    }
}

/// What two slots have in common is in memory once, and each comes back as it was; where slots share cells, also if those of
/// one lie before those that it begins with.
#[test]
fn saved_slots_share_their_common_tokens() {
    for (cache_tokens, is_wrapped) in [(None, false), (Some(1024), false), (Some(1024), true)] {
        let options = LoadOptions {
            cache_tokens,
            ..options()
        };
        let bytes: &'static [u8] = written(&RandomModelShape::tiny()).leak();
        let source = ModelSource::Bytes(bytes);
        let mut model = load("m", &source, &options, &mut |_| true).unwrap();
        if is_wrapped {
            model.open(2, &opening());
            fill(&mut model, 2, 0, &text(3, 200));
        }
        model.open(0, &opening());
        fill(&mut model, 0, 0, &text(1, 150));
        model.release(2);
        model.open(1, &opening());
        model.fork(0, 1, 130);
        fill(&mut model, 1, 130, &text(2, 30));
        let finder = model.row_finder().unwrap();
        let mut saved: Vec<SavedState> = Vec::new();
        for (slot, tokens) in [(0, 150), (1, 160)] {
            let state = model.save(slot).unwrap();
            let like = saved.last().map(|like| (like, 130));
            let found = finder(&state, tokens).expect("rows of each token");
            let is_mixed = is_wrapped && slot == 1;
            assert_eq!(found.state == state, !is_mixed);
            let cut = SavedState::cut(&found.state, found.areas, tokens, like).unwrap();
            assert_eq!(cut.whole().unwrap(), found.state);
            saved.push(cut);
        }
        let [first, second] = [0, 1].map(|at| saved[at].blocks());
        let shared = first.iter().zip(second);
        let shared: Vec<_> = shared
            .map(|(left, right)| Arc::ptr_eq(left, right))
            .collect();
        assert_eq!(shared, [true, true], "{cache_tokens:?}");
        let expected = row(&mut model, &entries(1, 160, &[7]));
        model.release(1);
        model.open(1, &opening());
        assert!(model.restore(1, &saved[1].whole().unwrap(), 160));
        alike(&expected, &row(&mut model, &entries(1, 160, &[7])));
    }
}
