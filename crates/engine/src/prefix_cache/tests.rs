//! The prefix cache compared with a naive one that records which slots hold each cell.

use proptest::prelude::*;

use super::*;

const SLOTS: u32 = 5;
const CELLS: u32 = 60;

fn cache(truncates: bool) -> PrefixCache {
    PrefixCache::new(
        Capacity {
            slots: SLOTS,
            cells: CELLS,
            batch_tokens: 8,
            rows: 8,
            computes_together: true,
        },
        truncates,
    )
}

/// A model that can continue after any number of tokens.
fn everywhere(_: SlotId, _: usize) -> bool {
    true
}

fn retain(cache: &mut PrefixCache, slot: SlotId, key: Option<u64>) -> Vec<SlotId> {
    let prompt = cache.len(slot);
    cache.retain(slot, prompt, key, everywhere)
}

fn evict(cache: &mut PrefixCache, spare: Option<SlotId>) -> Option<SlotId> {
    cache.evict(spare).map(|evicted| evicted.slot)
}

fn find(cache: &PrefixCache, scope: u64, prompt: &[Token]) -> Option<PrefixMatch> {
    cache.find(scope, prompt, 1, everywhere, |_, _| 0)
}

#[test]
fn the_longest_prefix_of_live_and_cached_slots_is_found() {
    let mut cache = cache(true);
    let live = cache.acquire(0).unwrap();
    cache.append(live, &[1, 2, 3, 4]);
    let cached = cache.acquire(0).unwrap();
    cache.append(cached, &[1, 2, 3, 4, 5, 6]);
    retain(&mut cache, cached, None);
    let found = |prompt: &[Token]| {
        find(&cache, 0, prompt).map(|found| (found.slot, found.tokens, found.cached, found.whole))
    };
    assert_eq!(found(&[1, 2, 3, 4, 5, 6, 7]), Some((cached, 6, true, true)));
    assert_eq!(found(&[1, 2, 9]), Some((live, 2, false, false)));
    assert_eq!(
        found(&[1, 2, 3, 4]),
        Some((live, 3, false, false)),
        "the last token is always computed"
    );
    assert_eq!((found(&[2]), found(&[1]), found(&[])), (None, None, None));
}

#[test]
fn a_model_that_cannot_truncate_resumes_only_at_the_end_of_a_slot() {
    let mut cache = cache(false);
    let cached = cache.acquire(0).unwrap();
    cache.append(cached, &[1, 2, 3]);
    retain(&mut cache, cached, None);
    assert_eq!(find(&cache, 0, &[1, 2, 9]), None);
    assert_eq!(
        find(&cache, 0, &[1, 2, 3]),
        None,
        "its last token would have to be computed again"
    );
    assert_eq!(
        find(&cache, 0, &[1, 2, 3, 4]).map(|found| found.tokens),
        Some(3)
    );
}

#[test]
fn the_least_recently_used_prefix_is_evicted_first_and_its_key_warms_it() {
    let mut cache = cache(true);
    let slots: Vec<SlotId> = (0..3).map(|_| cache.acquire(0).unwrap()).collect();
    for (&slot, key) in slots.iter().zip([Some(7), None, None]) {
        cache.append(slot, &[slot, 1]);
        retain(&mut cache, slot, key);
    }
    cache.warm(0, 7);
    assert_eq!(evict(&mut cache, Some(slots[1])), Some(slots[2]));
    assert_eq!(evict(&mut cache, None), Some(slots[1]));
    assert_eq!(evict(&mut cache, None), Some(slots[0]));
    assert_eq!((evict(&mut cache, None), cache.cells().used()), (None, 0));
}

#[test]
fn lm_609_a_prefix_is_found_only_in_its_scope() {
    let mut cache = cache(true);
    for (scope, tokens) in [(1, &[1, 2, 3, 4][..]), (2, &[1, 2, 9])] {
        let slot = cache.acquire(scope).unwrap();
        cache.append(slot, tokens);
        retain(&mut cache, slot, Some(7));
    }
    let common = |cache: &PrefixCache, scope| {
        let found = find(cache, scope, &[1, 2, 3, 4, 5]);
        found.map(|found| found.tokens)
    };
    let found = [1, 2, 3].map(|scope| common(&cache, scope));
    assert_eq!(found, [Some(4), Some(2), None]);
    // A request does not warm prefixes of another scope.
    cache.warm(1, 7);
    assert!(cache.evict(None).is_some());
    assert_eq!([1, 2].map(|scope| common(&cache, scope)), [Some(4), None]);
    // A slot belongs to the scope that took it last.
    let slot = cache.acquire(3).unwrap();
    cache.append(slot, &[1]);
    assert_eq!(common(&cache, 3), Some(1));
}

#[test]
fn duplicate_and_contained_prefixes_are_freed() {
    let cached = |truncates: bool, resumes: fn(SlotId, usize) -> bool, all: &[&[Token]]| {
        let mut cache = cache(truncates);
        let mut freed = Vec::new();
        for tokens in all {
            let slot = cache.acquire(0).unwrap();
            cache.append(slot, tokens);
            freed.push(cache.retain(slot, 1, None, resumes));
        }
        (freed, cache.cells().used())
    };
    let grown: &[&[Token]] = &[&[1, 2], &[1, 2, 3], &[1, 2], &[1, 4]];
    assert_eq!(
        cached(true, everywhere, grown),
        (vec![vec![], vec![0], vec![0], vec![]], 5)
    );
    // If the model can continue only at the end of a slot, shorter prefixes stay cached too.
    let per_slot = (vec![vec![], vec![], vec![2], vec![]], 7);
    assert_eq!(cached(false, everywhere, grown), per_slot);
    let ends = |_: SlotId, tokens: usize| tokens != 2;
    let (freed, _) = cached(true, ends, &grown[..2]);
    assert!(freed.iter().all(Vec::is_empty), "{freed:?}");
    // Not across scopes.
    let mut cache = cache(true);
    for scope in [1, 2] {
        let slot = cache.acquire(scope).unwrap();
        cache.append(slot, &[1, 2]);
        assert!(retain(&mut cache, slot, None).is_empty());
    }
}

#[test]
fn answers_to_one_prompt_are_evicted_before_another_conversation() {
    let mut cache = cache(true);
    let add = |cache: &mut PrefixCache, scope, prompt: Token, answer: Token| {
        let slot = cache.acquire(scope).unwrap();
        cache.append(slot, &[prompt, answer]);
        assert!(cache.retain(slot, 1, None, everywhere).is_empty());
        slot
    };
    let conversation = add(&mut cache, 0, 7, 1);
    let answers = [1, 2, 3].map(|answer| add(&mut cache, 0, 8, answer));
    let other = add(&mut cache, 1, 8, 4);
    assert_eq!(evict(&mut cache, None), Some(answers[0]));
    assert_eq!(evict(&mut cache, None), Some(answers[1]));
    assert_eq!(evict(&mut cache, None), Some(conversation));
    assert_eq!(evict(&mut cache, None), Some(answers[2]));
    assert_eq!(evict(&mut cache, None), Some(other));
}

#[test]
fn d_48_a_match_has_the_minimum_length_and_the_model_can_resume_from_it() {
    let mut cache = cache(true);
    for tokens in [&[1, 2, 3, 4, 5][..], &[1, 2, 3, 9]] {
        let slot = cache.acquire(0).unwrap();
        cache.append(slot, tokens);
        retain(&mut cache, slot, None);
    }
    let prompt = [1, 2, 3, 4, 6];
    let tokens = |min, resumes: fn(SlotId, usize) -> bool| {
        let found = cache.find(0, &prompt, min, resumes, |_, _| 0);
        found.map(|found| (found.slot, found.tokens))
    };
    assert_eq!(tokens(4, everywhere), Some((0, 4)));
    assert_eq!(tokens(5, everywhere), None);
    // The longest slot has advanced too far to be resumed, another one has not.
    assert_eq!(tokens(1, |slot, _| slot != 0), Some((1, 3)));
    assert_eq!(tokens(1, |_, _| false), None);
}

/// The naive model of a slot: its tokens as (token, id of the cell), and whether it is live.
type Naive = Vec<Option<(Vec<(Token, u64)>, bool)>>;

fn check(cache: &PrefixCache, naive: &Naive) {
    let all = |only_live: bool| {
        let cells = naive
            .iter()
            .flatten()
            .filter(|entry| entry.1 || !only_live)
            .flat_map(|entry| &entry.0);
        cells
            .map(|cell| cell.1)
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    };
    assert_eq!(cache.cells().used(), all(false), "cells in use");
    assert_eq!(
        cache.cells().room(),
        CELLS as usize - all(true),
        "room beside what is pinned"
    );
    for (slot, entry) in (0..).zip(naive) {
        let tokens: Vec<Token> = entry
            .iter()
            .flat_map(|entry| &entry.0)
            .map(|cell| cell.0)
            .collect();
        assert_eq!(cache.cached_slot(slot).tokens, tokens);
        assert_eq!(cache.cached_slot(slot).cells.len(), tokens.len());
        assert_eq!(
            cache.cached_slot(slot).usage == SlotUse::Free,
            entry.is_none()
        );
    }
    // No cell is both free and held, and each is counted once for each slot that holds it.
    let mut retained = vec![0; CELLS as usize];
    cache
        .slots
        .iter()
        .flat_map(|entry| &entry.cells)
        .for_each(|&cell| retained[cell as usize] += 1);
    cache.cells.assert_held(&retained);
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Take,
    Append(usize, usize),
    Fork(usize, usize),
    Truncate(usize, usize),
    Keep(usize),
    Release(usize),
    Evict,
    Shift(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let (slot, count) = (0..SLOTS as usize, 0..20_usize);
    prop_oneof![
        Just(Act::Take),
        (slot.clone(), count.clone()).prop_map(|(slot, count)| Act::Append(slot, count)),
        (slot.clone(), count.clone()).prop_map(|(slot, count)| Act::Fork(slot, count)),
        (slot.clone(), count).prop_map(|(slot, count)| Act::Truncate(slot, count)),
        slot.clone().prop_map(Act::Keep),
        slot.clone().prop_map(Act::Release),
        slot.prop_map(Act::Shift),
        Just(Act::Evict),
    ]
}

/// The tokens of a slot that was freed as a duplicate are the beginning of another cached slot.
fn assert_held(naive: &Naive, slot: usize) {
    let tokens = |entry: &(Vec<(Token, u64)>, bool)| -> Vec<Token> {
        entry.0.iter().map(|cell| cell.0).collect()
    };
    let removed = naive[slot].as_ref().unwrap();
    assert!(!removed.1, "a live slot is not freed");
    let others = naive.iter().enumerate().filter(|(index, _)| *index != slot);
    let mut cached = others.filter_map(|(_, entry)| entry.as_ref().filter(|entry| !entry.1));
    assert!(cached.any(|entry| tokens(entry).starts_with(&tokens(removed))));
}

fn play(cache: &mut PrefixCache, naive: &mut Naive, act: Act, cells: &mut u64) {
    let live = |naive: &Naive, slot: usize| naive[slot].as_ref().is_some_and(|entry| entry.1);
    match act {
        Act::Take => {
            let slot = cache.acquire(0);
            assert_eq!(slot.is_some(), naive.iter().any(Option::is_none));
            if let Some(slot) = slot {
                assert!(naive[slot as usize].is_none(), "no slot is acquired twice");
                naive[slot as usize] = Some((Vec::new(), true));
            }
        }
        Act::Append(slot, count) if live(naive, slot) && cache.cells().room() >= count => {
            while cache.cells().free() < count {
                let evicted = cache.evict(None).unwrap().slot;
                assert!(
                    !live(naive, evicted as usize),
                    "a live slot is never evicted"
                );
                naive[evicted as usize] = None;
            }
            let tokens: Vec<Token> = (0..count as u32).map(|token| token % 3).collect();
            cache.append(slot as u32, &tokens);
            let entry = naive[slot].as_mut().unwrap();
            for token in tokens {
                *cells += 1;
                entry.0.push((token, *cells));
            }
        }
        Act::Fork(from, count) => {
            let Some((retained, _)) = naive[from].clone() else {
                return;
            };
            let Some(to) = cache.acquire(0) else { return };
            let count = count.min(retained.len());
            cache.fork(from as u32, to, count);
            naive[to as usize] = Some((retained[..count].to_vec(), true));
        }
        Act::Truncate(slot, count) if live(naive, slot) => {
            cache.truncate(slot as u32, count);
            naive[slot].as_mut().unwrap().0.truncate(count);
        }
        Act::Keep(slot) if live(naive, slot) => {
            naive[slot].as_mut().unwrap().1 = false;
            for freed in retain(cache, slot as u32, None) {
                assert_held(naive, freed as usize);
                naive[freed as usize] = None;
            }
        }
        Act::Release(slot) if live(naive, slot) => {
            cache.release(slot as u32);
            naive[slot] = None;
        }
        Act::Evict => {
            if let Some(slot) = evict(cache, None) {
                assert!(!live(naive, slot as usize));
                naive[slot as usize] = None;
            }
        }
        Act::Shift(spare) => {
            if let Some((cached, free)) = cache.misplaced_prefix(Some(spare as u32)) {
                let is_live = |entry: &(_, bool)| entry.1;
                assert!(naive.iter().flatten().any(is_live));
                assert!(cached < free && cached as usize != spare);
                let entry = naive[cached as usize].take().unwrap();
                assert!(!entry.1, "a live slot is not moved");
                assert!(naive[free as usize].replace(entry).is_none());
                cache.swap_slots(cached, free);
            }
        }
        _ => {}
    }
}

#[test]
fn cached_slots_are_moved_behind_live_ones() {
    let mut cache = cache(true);
    let slots: Vec<SlotId> = (0..4).map(|_| cache.acquire(0).unwrap()).collect();
    for &slot in &slots {
        cache.append(slot, &[slot, 9]);
    }
    for slot in [1, 2] {
        retain(&mut cache, slot, None);
    }
    assert_eq!(cache.misplaced_prefix(None), Some((1, 4)));
    assert_eq!(cache.misplaced_prefix(Some(1)), Some((2, 4)));
    cache.swap_slots(1, 4);
    let found = find(&cache, 0, &[1, 9, 5]).unwrap();
    assert_eq!((found.slot, found.tokens, found.cached), (4, 2, true));
    assert_eq!(cache.acquire(0), Some(1));
    assert_eq!(cache.misplaced_prefix(None), None, "no slot is free");
    for slot in [0, 1, 3] {
        retain(&mut cache, slot, None);
    }
    assert!(cache.evict(None).is_some());
    assert_eq!(cache.misplaced_prefix(None), None, "no slot is live");
}

proptest! {
    #[test]
    fn references_balance_and_no_slot_is_acquired_twice(acts in prop::collection::vec(act(), 0..80)) {
        let (mut cache, mut naive, mut cells) = (cache(true), vec![None; SLOTS as usize], 0);
        for act in acts {
            play(&mut cache, &mut naive, act, &mut cells);
            check(&cache, &naive);
        }
    }
}
