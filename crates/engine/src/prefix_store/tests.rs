//! The store compared with a list that is searched from end to end.

use proptest::prelude::*;

use super::*;
use crate::model::RowArea;

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
    let (bytes, scopes, _) = store.held.parts();
    assert_eq!((bytes, scopes), (store.bytes(), 2));
}

/// What all entries need, with each block once.
fn bytes_by_hand(store: &PrefixStore) -> usize {
    let entries = store.entries.values();
    let blocks: HashMap<usize, usize> = entries
        .flat_map(|it| it.prefix.state.blocks())
        .map(|block| (held_bytes::address(block), block.len()))
        .collect();
    let own = |it: &StoredPrefix<SavedState>| {
        bytes_of(it.prefix.tokens.len(), it.prefix.state.own_bytes())
    };
    let own: usize = store.entries.values().map(own).sum();
    own + blocks.values().sum::<usize>()
}

/// Bytes of a row of the states that are cut.
const ROW: usize = 16;

/// Inserts an entry as it is made of a slot: it shares what it has in common with the nearest one.
fn insert_cut(store: &mut PrefixStore, scope: u64, tokens: &[Token]) -> bool {
    let rows = tokens.iter().flat_map(|token| [*token as u8; ROW]);
    let rows: Vec<u8> = rows.collect();
    let area = RowArea {
        start: 0,
        row_bytes: ROW,
    };
    store.make_room(scope, tokens, rows.len());
    let near = store.nearest(scope, tokens);
    let near = near.and_then(|near| Some((store.state(near.id)?, near.tokens)));
    let state = SavedState::cut(&rows, vec![area], tokens.len(), near).unwrap();
    assert_eq!(*state.whole().unwrap(), rows);
    let inserted = store.insert(scope, tokens, state);
    store.take_evicted();
    inserted
}

/// One system prompt, and a question of each user.
#[test]
fn a_common_beginning_is_held_once() {
    let mut store = PrefixStore::new(1 << 20, true);
    let system: Vec<Token> = (0..1024).collect();
    let asked = |user: Token| [&system[..], &[5000 + user; 10]].concat();
    insert_cut(&mut store, 0, &asked(0));
    let first = store.bytes();
    for user in 1..16 {
        insert_cut(&mut store, 0, &asked(user));
    }
    let of_each = (store.bytes() - first) / 15;
    // Its tokens, its last rows, and what an entry needs.
    assert!(
        of_each < 1034 * 4 + 10 * ROW + ENTRY_BYTES + 400,
        "{of_each}"
    );
    assert_eq!((store.len(), bytes_by_hand(&store)), (16, store.bytes()));
    // Another caller's is not compared: how much memory it takes would tell what others asked.
    let before = store.bytes();
    insert_cut(&mut store, 1, &asked(0));
    assert!(store.bytes() - before > 1024 * ROW);
    // What all have in common stays until the last of them goes.
    while let Some(id) = { store.ids_by_value().next() } {
        let (_, prefix) = store.remove(id).unwrap();
        let rows = prefix.tokens.iter().flat_map(|token| [*token as u8; ROW]);
        assert!(prefix.state.whole().unwrap().iter().copied().eq(rows));
        assert_eq!(bytes_by_hand(&store), store.bytes());
    }
    assert_eq!((store.bytes(), store.held.parts()), (0, (0, 0, 0)));
}

/// Room is made for what an entry adds, not for what it has in common with another.
#[test]
fn an_entry_that_adds_little_evicts_nobody() {
    let long: Vec<Token> = (0..640).collect();
    let other: Vec<Token> = (10_000..10_640).collect();
    let mut store = PrefixStore::new(2 * (640 * (ROW + 4) + ENTRY_BYTES + 400) + 4000, true);
    insert_cut(&mut store, 0, &other);
    insert_cut(&mut store, 0, &[&long[..], &[1]].concat());
    insert_cut(&mut store, 0, &[&long[..], &[2]].concat());
    assert_eq!(store.len(), 3);
    let bytes = store.bytes();
    assert!(bytes <= store.limit(), "{bytes}");
}

proptest! {
    /// Whatever is shared, evicted and superseded: the bytes are those of each block once, and the limit holds.
    #[test]
    fn shared_blocks_are_counted_once(
        limit in 3_000_usize..40_000,
        partial in any::<bool>(),
        texts in prop::collection::vec((0_u64..2, 0_u32..3, 0_usize..4, 0_u32..3, 1_usize..150), 1..40),
    ) {
        let mut store = PrefixStore::new(limit, partial);
        for (scope, system, blocks, question, length) in texts {
            let system = vec![system; blocks * BLOCK_TOKENS + 20];
            let tokens = [&system[..], &vec![question; length.max(BLOCK_TOKENS)]].concat();
            insert_cut(&mut store, scope, &tokens);
            prop_assert!(store.bytes() <= limit);
            prop_assert_eq!(bytes_by_hand(&store), store.bytes());
            prop_assert_eq!(store.held.parts().0, store.bytes());
        }
        let held = store.held.block_uses();
        let blocks = store.entries.values().map(|it| it.prefix.state.blocks().len());
        prop_assert_eq!(blocks.sum::<usize>(), held);
    }

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
        prop_assert_eq!(bytes_by_hand(&store), store.bytes());
        prop_assert_eq!(store.held.parts().0, store.bytes());
        prop_assert_eq!(store.entries.len(), store.by_value.len());
        let indexed: usize = store.scopes.values().map(|it| it.by_tokens.len()).sum();
        prop_assert_eq!(store.entries.len(), indexed);
        for (scope, of_scope) in &store.scopes {
            let is_own = |&(_, id): &(EntryValue, SavedId)| store.entries[&id].scope == *scope;
            let own: BTreeSet<_> = store.by_value.iter().copied().filter(is_own).collect();
            prop_assert_eq!(&own, &of_scope.by_value);
            prop_assert!(!own.is_empty());
        }
        for (scope, prompt) in &prompts {
            let of_scope = store.entries.values().filter(|it| it.scope == *scope);
            let lengths = of_scope.map(|it| (common_prefix(&it.prefix.tokens, prompt), it.prefix.tokens.len()));
            let usable = lengths.filter(|&(common, saved)| common > 0 && (partial || common == saved));
            let best = usable.map(|(common, _)| common).max();
            prop_assert_eq!(store.find(*scope, prompt).map(|it| it.tokens), best);
        }
    }
}
