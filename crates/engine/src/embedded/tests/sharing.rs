//! What the saved states of real slots have in common.

use std::sync::Arc;

use super::reuse::text;
use super::*;
use crate::saved_state::SavedState;

/// What two slots have in common is in memory once, and each comes back as it was.
#[test]
fn saved_slots_share_their_common_tokens() {
    for cache_tokens in [None, Some(1024)] {
        let options = LoadOptions {
            cache_tokens,
            ..options()
        };
        let bytes: &'static [u8] = written(&RandomModelShape::tiny()).leak();
        let source = ModelSource::Bytes(bytes);
        let mut model = load("m", &source, &options, &mut |_| true).unwrap();
        model.open(0, &opening());
        for (index, part) in text(1, 150).chunks(50).enumerate() {
            let batch = entries(0, 50 * index as u32, part);
            model.decode(&batch, Time::ZERO).unwrap();
        }
        model.open(1, &opening());
        model.fork(0, 1, 130);
        let further = entries(1, 130, &text(2, 30));
        model.decode(&further, Time::ZERO).unwrap();
        let finder = model.row_finder().unwrap();
        let mut saved: Vec<SavedState> = Vec::new();
        for (slot, tokens) in [(0, 150), (1, 160)] {
            let state = model.save(slot).unwrap();
            let like = saved.last().map(|like| (like, 130));
            let areas = finder(&state, tokens).expect("rows of each token");
            let cut = SavedState::cut(&state, areas, tokens, like).unwrap();
            assert_eq!(*cut.whole().unwrap(), state);
            saved.push(cut);
        }
        let [first, second] = [0, 1].map(|at| saved[at].blocks());
        let shared = first
            .iter()
            .zip(second)
            .map(|(left, right)| Arc::ptr_eq(left, right));
        assert_eq!(shared.collect::<Vec<_>>(), [true, true], "{cache_tokens:?}");
        let expected = row(&mut model, &entries(1, 160, &[7]));
        model.release(1);
        model.open(1, &opening());
        assert!(model.restore(1, &saved[1].whole().unwrap(), 160));
        alike(&expected, &row(&mut model, &entries(1, 160, &[7])));
    }
}
