//! The store compared with a list that is searched from end to end.

use proptest::prelude::*;

use super::*;

const LIMIT: usize = 8 * (ENTRY_BYTES + 100);

fn insert(store: &mut PrefixStore, scope: u64, tokens: &[Token]) {
    let state = vec![0; tokens.len() * 4];
    store.insert(scope, tokens, state);
    store.take_evicted();
}

fn found(store: &PrefixStore, scope: u64, tokens: &[Token]) -> Option<(usize, usize)> {
    let found = store.find(scope, tokens)?;
    Some((found.tokens, found.saved))
}

#[test]
fn the_entry_with_the_longest_common_prefix_of_its_scope_is_found() {
    let mut store = PrefixStore::new(LIMIT, true);
    insert(&mut store, 0, &[1, 2, 3, 4]);
    insert(&mut store, 0, &[1, 2, 9]);
    insert(&mut store, 1, &[1, 2, 3, 4, 5, 6]);
    assert_eq!(found(&store, 0, &[1, 2, 3, 7]), Some((3, 4)));
    assert_eq!(found(&store, 0, &[1, 2, 9, 9, 9]), Some((3, 3)));
    assert_eq!(
        found(&store, 0, &[1, 2, 5]),
        Some((2, 3)),
        "the shorter of two"
    );
    assert_eq!(found(&store, 0, &[2]), None);
    assert_eq!(found(&store, 2, &[1, 2]), None, "another scope");
}

#[test]
fn where_a_part_is_of_no_use_the_longest_whole_entry_is_found() {
    let mut store = PrefixStore::new(LIMIT, false);
    for tokens in [&[1, 2][..], &[1, 2, 3, 4], &[1, 2, 3, 9], &[1, 2, 3, 4, 5]] {
        insert(&mut store, 0, tokens);
    }
    assert_eq!(found(&store, 0, &[1, 2, 3, 4, 7]), Some((4, 4)));
    assert_eq!(found(&store, 0, &[1, 2, 3, 7]), Some((2, 2)));
    assert_eq!(found(&store, 0, &[1]), None);
}

#[test]
fn an_entry_that_another_one_contains_is_not_stored_twice() {
    let mut store = PrefixStore::new(LIMIT, true);
    insert(&mut store, 0, &[1, 2]);
    insert(&mut store, 0, &[1, 2, 3]);
    assert_eq!(store.entries.len(), 1);
    insert(&mut store, 0, &[1]);
    insert(&mut store, 0, &[1, 2, 3]);
    assert_eq!(
        (store.entries.len(), found(&store, 0, &[1])),
        (1, Some((1, 3)))
    );
}

#[test]
fn the_least_recently_used_entry_is_evicted_and_an_entry_that_never_fits_is_not_stored() {
    let mut store = PrefixStore::new(3 * (ENTRY_BYTES + 8), true);
    for token in [1, 2, 3] {
        insert(&mut store, 0, &[token]);
    }
    let first = store.find(0, &[1]).unwrap();
    assert!(store.get(first.id).is_some());
    insert(&mut store, 0, &[4]);
    let left = [1, 2, 3, 4].map(|token| store.find(0, &[token]).is_some());
    assert_eq!(left, [true, false, true, true]);
    store.insert(0, &[5], vec![0; 3 * ENTRY_BYTES]);
    assert_eq!(store.entries.len(), 3);
}

/// The state of a recurrent model has the same size after any number of tokens.
#[test]
fn of_equal_sizes_the_one_that_saves_more_tokens_stays() {
    let state = 1000;
    let long: Vec<Token> = (0..200).collect();
    let mut store = PrefixStore::new(3 * (state + ENTRY_BYTES) + 4 * 250, false);
    store.insert(0, &long, vec![0; state]);
    for token in 1000..1010 {
        store.insert(0, &[token, 1, 2], vec![0; state]);
    }
    assert_eq!(found(&store, 0, &long), Some((200, 200)));
    // Not for ever.
    for token in 1000..201_000 {
        store.insert(0, &[token, 2], vec![0; state]);
        if store.find(0, &long).is_none() {
            return;
        }
    }
    panic!("an entry that nobody uses stays");
}

/// A caller with many conversations has half of the memory at most beside others, and all of it alone.
#[test]
fn one_scope_does_not_evict_all_others() {
    let mut store = PrefixStore::new(10 * (ENTRY_BYTES + 8), true);
    let count = |store: &PrefixStore, scope| {
        store
            .entries
            .values()
            .filter(|it| it.scope == scope)
            .count()
    };
    for token in 0..100 {
        insert(&mut store, 7, &[token]);
    }
    assert_eq!(count(&store, 7), 10);
    for token in 0..4 {
        insert(&mut store, 8, &[token]);
    }
    for token in 100..200 {
        insert(&mut store, 7, &[token]);
        for used in 0..4 {
            store.covers(8, &[used]);
        }
    }
    assert_eq!([7, 8].map(|scope| count(&store, scope)), [6, 4]);
    // Of a caller that has gone.
    let mut left = PrefixStore::new(10 * (ENTRY_BYTES + 8), true);
    for token in 0..5 {
        insert(&mut left, 8, &[token]);
    }
    for token in 0..20 {
        insert(&mut left, 7, &[token]);
    }
    assert_eq!([7, 8].map(|scope| count(&left, scope)), [10, 0]);
    for token in 4..100 {
        insert(&mut store, 8, &[token]);
        insert(&mut store, 9, &[token]);
    }
    assert!(
        count(&store, 7) == 0,
        "what nobody uses is evicted by others"
    );
    assert!(count(&store, 8) >= 4 && count(&store, 9) >= 4);
    let bytes = store.scope_bytes.values().sum::<usize>();
    assert_eq!((bytes, store.scope_bytes.len()), (store.bytes(), 2));
}

/// A prefix that takes more than the share of one caller is saved where it evicts no prefix of another.
#[test]
fn an_entry_above_the_share_of_a_scope_evicts_no_other_scope() {
    let limit = 10 * (ENTRY_BYTES + 8);
    let large = vec![0; limit * 6 / 10 - ENTRY_BYTES - size_of::<Token>()];
    let mut store = PrefixStore::new(limit, true);
    let insert_large = |store: &mut PrefixStore, token| {
        let has_room = store.make_room(7, 1, large.len());
        assert_eq!(store.insert(7, &[token], large.clone()), has_room);
        has_room
    };
    for token in 0..4 {
        insert(&mut store, 8, &[token]);
    }
    let count = |store: &PrefixStore| {
        let others = (0..6).filter(|token| found(store, 8, &[*token]).is_some());
        others.count()
    };
    // Beside these there is room for one, which makes room for the next one.
    assert!(insert_large(&mut store, 1) && insert_large(&mut store, 2));
    assert_eq!(
        [1, 2].map(|token| found(&store, 7, &[token]).is_some()),
        [false, true]
    );
    assert_eq!(count(&store), 4);
    for token in 0..6 {
        insert(&mut store, 8, &[token]);
        store.covers(8, &[token]);
    }
    let before = count(&store);
    assert!(before > 4 && found(&store, 7, &[2]).is_none());
    assert!(!insert_large(&mut store, 3));
    assert_eq!(count(&store), before);
    // Alone it may take all.
    let mut alone = PrefixStore::new(limit, true);
    insert(&mut alone, 7, &[5]);
    assert!(insert_large(&mut alone, 1) && insert_large(&mut alone, 2));
}

proptest! {
    /// Whatever was stored and evicted: the best of all entries is found, the bytes are counted, and the limit holds.
    #[test]
    fn a_store_finds_what_a_search_of_all_entries_finds(
        partial in any::<bool>(),
        texts in prop::collection::vec((0_u64..2, prop::collection::vec(0_u32..3, 1..8)), 1..60),
        prompts in prop::collection::vec((0_u64..2, prop::collection::vec(0_u32..3, 0..9)), 1..20),
    ) {
        let mut store = PrefixStore::new(LIMIT, partial);
        for (scope, tokens) in &texts {
            insert(&mut store, *scope, tokens);
            prop_assert!(store.bytes() <= LIMIT);
            prop_assert!(store.covers(*scope, tokens), "the last one is there");
        }
        let bytes = store.entries.values().map(StoredPrefix::bytes);
        prop_assert_eq!(bytes.sum::<usize>(), store.bytes());
        prop_assert_eq!(store.scope_bytes.values().sum::<usize>(), store.bytes());
        prop_assert_eq!(store.entries.len(), store.by_value.len());
        let indexed: usize = store.by_tokens.values().map(BTreeMap::len).sum();
        prop_assert_eq!(store.entries.len(), indexed);
        for (scope, prompt) in &prompts {
            let of_scope = store.entries.values().filter(|it| it.scope == *scope);
            let lengths = of_scope.map(|it| (common_prefix(&it.prefix.tokens, prompt), it.prefix.tokens.len()));
            let usable = lengths.filter(|&(common, saved)| common > 0 && (partial || common == saved));
            let best = usable.map(|(common, _)| common).max();
            prop_assert_eq!(store.find(*scope, prompt).map(|it| it.tokens), best);
        }
    }
}
