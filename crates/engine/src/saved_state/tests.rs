//! States that are cut, compared with the bytes that they were made of.

use proptest::prelude::*;

use super::*;

/// A state of `tokens` tokens: areas with rows of these sizes, with something before, between and behind them. Rows of
/// the same token are equal in all states up to `differs`.
fn state(row_bytes: &[usize], tokens: usize, differs: usize) -> (Vec<u8>, Vec<RowArea>) {
    let mut state = format!("head of {tokens}").into_bytes();
    let mut areas = Vec::new();
    for (layer, &row_bytes) in row_bytes.iter().enumerate() {
        state.extend_from_slice(&tokens.to_le_bytes());
        areas.push(RowArea {
            start: state.len(),
            row_bytes,
        });
        for token in 0..tokens {
            let salt = if token >= differs { tokens } else { 0 };
            let byte = |at: usize| (token * 31 + layer * 7 + at + salt) as u8;
            state.extend((0..row_bytes).map(byte));
        }
    }
    state.extend_from_slice(b"end");
    (state, areas)
}

fn cut(state: &(Vec<u8>, Vec<RowArea>), tokens: usize, like: Option<&SavedState>) -> SavedState {
    let like = like.map(|like| (like, usize::MAX));
    SavedState::cut(&state.0, state.1.clone(), tokens, like).unwrap()
}

fn shared(left: &SavedState, right: &SavedState) -> Vec<bool> {
    let blocks = left.blocks.iter().zip(&right.blocks);
    blocks
        .map(|(left, right)| Arc::ptr_eq(left, right))
        .collect()
}

#[test]
fn states_share_the_blocks_of_their_common_tokens() {
    let sizes = [16, 8, 8];
    let (first, second) = (state(&sizes, 200, 150), state(&sizes, 300, 150));
    let held = cut(&first, 200, None);
    let added = cut(&second, 300, Some(&held));
    // Block 2 has tokens 128 to 191, of which those from 150 on differ.
    assert_eq!(shared(&held, &added), [true, true, false]);
    assert_eq!(held.whole().unwrap(), first.0);
    assert_eq!(added.whole().unwrap(), second.0);
    // Equal bytes of tokens that are not the same are no common prefix.
    let (near, common) = (&held, 127);
    let other = SavedState::cut(&second.0, second.1.clone(), 300, Some((near, common))).unwrap();
    assert_eq!(shared(&held, &other), [true, false, false]);
}

#[test]
fn states_with_other_rows_share_nothing() {
    let (first, second) = (state(&[8, 8], 64, 64), state(&[16], 64, 64));
    let held = cut(&first, 64, None);
    let added = cut(&second, 64, Some(&held));
    assert_eq!(shared(&held, &added), [false]);
    assert_eq!(added.whole().unwrap(), second.0);
}

#[test]
fn what_cannot_be_cut_stays_whole() {
    let (bytes, areas) = state(&[8, 4], 100, 100);
    assert!(SavedState::cut(&bytes, areas.clone(), 63, None).is_none());
    assert!(SavedState::cut(&bytes, Vec::new(), 100, None).is_none());
    // The areas are not in these bytes.
    assert!(SavedState::cut(&bytes[..900], areas.clone(), 100, None).is_none());
    let turned = areas.into_iter().rev().collect();
    assert!(SavedState::cut(&bytes, turned, 100, None).is_none());
    let whole = SavedState::from(bytes.clone());
    assert_eq!(
        (whole.len(), whole.as_uncut()),
        (bytes.len(), Some(&*bytes))
    );
    assert_eq!(whole.whole().unwrap(), bytes);
}

proptest! {
    #[test]
    fn a_state_is_restored_as_it_was_saved(
        row_bytes in prop::collection::vec(4_usize..40, 1..6),
        lengths in prop::collection::vec((64_usize..400, 0_usize..400), 1..8),
    ) {
        let mut last: Option<SavedState> = None;
        for (tokens, differs) in lengths {
            let given = state(&row_bytes, tokens, differs);
            let saved = cut(&given, tokens, last.as_ref());
            let blocks: usize = saved.blocks().iter().map(|block| block.len()).sum();
            prop_assert_eq!(blocks + saved.rest.len(), given.0.len());
            prop_assert_eq!(saved.len(), given.0.len());
            prop_assert_eq!(&*saved.whole().unwrap(), &*given.0);
            last = Some(saved);
        }
    }
}
