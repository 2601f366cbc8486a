//! Slots with a scripted model: what is shared, saved and restored.

use std::sync::Arc;
use std::time::Duration;

use super::slot_model::length;
use super::*;
use crate::model::BatchEntry;
use crate::owner::tests::hooked_model::{HookedModel, ModelHooks};
use crate::prefix_disk::SavedEntry;
use crate::prefix_disk::virtual_disk::{DiskFaults, VirtualDisk};
use crate::prefix_store::SavedPrefix;
use crate::scripted::{Config as Script, Scripted};
use crate::stats::Counter;

fn slots(truncates: bool) -> KvSlots {
    let script = Script {
        truncates,
        ..Script::default()
    };
    slots_of(script)
}

fn slots_of(script: Script) -> KvSlots {
    let config = Config {
        prefix_tokens_min: 4,
        ..Config::default()
    };
    KvSlots::new(Box::new(Scripted::new(script).unwrap()), &config)
}

/// A prompt whose tokens differ from those of every other one.
fn text(of: u32, tokens: u32) -> Vec<Token> {
    (0..tokens).map(|token| (of * 31 + token) % 256).collect()
}

/// Computes a prompt from what is found of it, and keeps it; returns how many tokens were there.
fn prefill(slots: &mut KvSlots, prompt: &[Token]) -> usize {
    let found = slots.find(0, prompt);
    assert!(slots.fits(prompt.len(), found));
    let (slot, computed) = slots.acquire(0, found, &PURPOSE).unwrap();
    slots.evict_for(prompt.len() - computed);
    fill_from(slots, slot, computed, &prompt[computed..]);
    slots.retain(slot, prompt.len(), None);
    computed
}

#[test]
fn a_prefix_that_lost_its_cells_is_restored() {
    for truncates in [true, false] {
        let mut slots = slots_of(Script {
            truncates,
            saves: true,
            context_tokens: 256,
            cells: Some(256),
            kept_prefixes: 2,
            ..Script::default()
        });
        for of in 0..6 {
            assert_eq!(prefill(&mut slots, &text(of, 100)), 0);
            assert!(
                slots.cells().used() <= 200,
                "one that runs, and one that ran last"
            );
        }
        for of in 0..5 {
            let longer = [text(of, 100), vec![300; 5]].concat();
            assert_eq!(prefill(&mut slots, &longer), 100, "{of} {truncates}");
        }
        // From within, if the model can.
        let other = [text(0, 80), vec![301; 5]].concat();
        let expected = if truncates { 80 } else { 0 };
        assert_eq!(prefill(&mut slots, &other), expected);
        assert!(slots.tiers.bytes() > 5 * 800);
    }
}

/// Users of one system prompt do not leave a copy of it each, on the way over the disk neither.
#[test]
fn saved_prefixes_have_their_common_beginning_once() {
    const USERS: u32 = 6;
    let mut slots = slots_of(Script {
        saves: true,
        context_tokens: 2048,
        cells: Some(2048),
        ..Script::default()
    });
    let system = text(0, 1000);
    let asked = |user: u32| [&system[..], &[300 + user; 20]].concat();
    let bytes_of_one = size_of::<u64>() * 1020;
    let mut whole = Vec::new();
    for user in 0..USERS {
        slots.begin_step();
        prefill(&mut slots, &asked(user));
        let found = slots.find(0, &asked(user));
        let Some(FoundPrefix::Slot(found)) = found else {
            panic!("it is in a slot");
        };
        whole.push(slots.model.calls().save(found.slot).unwrap());
        slots.evict_all();
    }
    // One that nothing else begins like is not cut, and a longer one in its place neither.
    for prompt in [text(5, 200), [&text(5, 200)[..], &[400; 100]].concat()] {
        prefill(&mut slots, &prompt);
        slots.evict_all();
        let found = slots.tiers.find(0, &prompt).unwrap();
        let state = slots.tiers.store.state(found.id).unwrap();
        assert!(found.saved == prompt.len() && state.as_uncut().is_some());
    }
    let own = slots.tiers.find(0, &text(5, 200)).unwrap();
    slots.tiers.forget_prefix(own.id);
    let saved = slots.tiers.bytes();
    assert!(
        saved < 2 * bytes_of_one + USERS as usize * 4500,
        "{saved} bytes"
    );
    let entries: Vec<_> = (0..USERS)
        .map(|user| slots.tiers.find(0, &asked(user)).unwrap())
        .collect();
    for (found, whole) in entries.iter().zip(&whole) {
        let state = slots.tiers.store.state(found.id).unwrap();
        assert_eq!((found.tokens, &*state.whole().unwrap()), (1020, &**whole));
    }
    // Read from a disk, they are whole.
    let from_disk = entries.iter().map(|found| {
        let (scope, prefix) = slots.tiers.store.entry(found.id).unwrap();
        let state = prefix.state.whole().unwrap().into_owned().into();
        let tokens = Arc::clone(&prefix.tokens);
        let prefix = Arc::new(SavedPrefix { tokens, state });
        SavedEntry {
            kind: EntryKind::Prefix,
            scope,
            prefix,
        }
    });
    let from_disk = from_disk.collect();
    slots.tiers.clear();
    slots.tiers.keep(from_disk);
    assert_eq!((slots.tiers.store.len(), slots.tiers.bytes()), (6, saved));
}

/// What loses its cells or its slot is copied while no prompt waits for its first token.
#[test]
fn what_is_evicted_is_saved_behind_the_first_token_of_the_next_prompt() {
    let mut slots = slots_of(Script {
        saves: true,
        ..Script::default()
    });
    for of in 0..5 {
        slots.begin_step();
        assert_eq!(prefill(&mut slots, &text(of, 100)), 0);
        assert_eq!(slots.copies.saved, 0, "{of}");
        slots.finish_admissions();
        assert!(slots.copies.saved > 0);
    }
    slots.begin_step();
    assert_eq!(
        prefill(&mut slots, &[text(0, 100), vec![300; 5]].concat()),
        100
    );
    assert_eq!(slots.copies.saved, 0);
    // If there is no such time, the next prompt does it.
    assert_eq!(prefill(&mut slots, &text(7, 100)), 0);
    assert!(slots.copies.saved > 0);
    // Two slots, one of them with a prefix that may stay in its cells.
    let mut slots = slots_of(Script {
        saves: true,
        parallel: 2,
        kept_prefixes: 0,
        ..Script::default()
    });
    assert_eq!(prefill(&mut slots, &text(0, 32)), 0);
    slots.finish_admissions();
    let (_running, _) = slots.acquire(9, None, &PURPOSE).unwrap();
    assert_eq!((slots.copies.saved, slots.cells().used()), (0, 32));
    slots.finish_admissions();
    let saved = slots.copies.saved;
    assert!(saved > 0);
    assert_eq!(prefill(&mut slots, &text(1, 40)), 0);
    assert_eq!(slots.copies.saved, saved, "it was saved before");
    assert_eq!(
        prefill(&mut slots, &[text(0, 32), vec![300; 5]].concat()),
        32
    );
}

/// The only slot that could be given to a sequence is the one with its prefix.
#[test]
fn the_last_free_slot_may_hold_the_wanted_prefix() {
    for truncates in [true, false] {
        let mut slots = slots_of(Script {
            truncates,
            saves: true,
            parallel: 2,
            kept_prefixes: 0,
            ..Script::default()
        });
        let _running = slots.acquire(9, None, &PURPOSE).unwrap();
        assert_eq!(prefill(&mut slots, &text(0, 100)), 0);
        for turn in 1..4 {
            let longer = [text(0, 100), vec![300; 5 * turn]].concat();
            let expected = 100 + 5 * (turn - 1);
            assert_eq!(prefill(&mut slots, &longer), expected, "{truncates}");
        }
    }
}

/// Each choice holds the whole prompt, and would save it once more.
#[test]
fn one_of_many_answers_to_a_prompt_is_saved() {
    let mut slots = slots_of(Script {
        saves: true,
        ..Script::default()
    });
    let prompt = text(0, 100);
    let opened = [(); 8].map(|()| slots.acquire(0, None, &PURPOSE).unwrap().0);
    for (answer, slot) in (1..).zip(opened) {
        let tokens = [prompt.clone(), text(answer, 60)].concat();
        fill(&mut slots, slot, &tokens);
    }
    for slot in opened {
        slots.retain(slot, prompt.len(), None);
    }
    assert!(slots.evict_all());
    let one = 160 * (8 + 4) + 1024;
    assert!(slots.tiers.bytes() <= one, "{}", slots.tiers.bytes());
}

#[test]
fn a_saved_prefix_with_too_little_in_common_is_not_copied() {
    let mut slots = slots_of(Script {
        saves: true,
        context_tokens: 4096,
        cells: Some(4096),
        ..Script::default()
    });
    prefill(&mut slots, &text(0, 2000));
    prefill(&mut slots, &text(1, 2000));
    let shares = |tokens| [text(0, tokens), vec![300; 5]].concat();
    for (tokens, found) in [(30, false), (249, false), (250, true)] {
        let is_saved = matches!(
            slots.find(0, &shares(tokens)),
            Some(FoundPrefix::Saved(saved)) if saved.tokens == tokens as usize
        );
        assert_eq!(is_saved, found, "{tokens}");
    }
}

/// A prompt token that takes next to no time is not waited for, and what is not worth reading is not read.
#[test]
fn a_prefix_is_read_from_the_disk_only_where_that_is_quicker() {
    let disk = Arc::<VirtualDisk>::default();
    let stats = EngineStats::default();
    let slots = || {
        let mut slots = slots_of(Script {
            saves: true,
            ..Script::default()
        });
        let disk = Arc::clone(&disk);
        slots.start_disk(disk, 1 << 30, Arc::default());
        slots.tiers.settle_disk(&stats);
        slots
    };
    let mut first = slots();
    prefill(&mut first, &text(0, 200));
    first.close_disk(&stats);
    let reads = |slots: &mut KvSlots, prompt: &[Token], token: Option<Duration>| {
        slots.tiers.poll_disk(&stats, token, Time::ZERO);
        slots.read_from_disk(0, prompt, Time::ZERO, None).is_some()
    };
    let longer = |tokens| [text(0, tokens), vec![300; 5]].concat();
    // What it takes before the speed was measured: 200 tokens of 8 bytes.
    let fast = Some(Duration::from_nanos(5));
    for (prompt, token, expected) in [
        (longer(200), None, true),
        (longer(200), fast, false),
        (longer(200), Some(Duration::from_nanos(50)), true),
        (longer(30), None, false),
        (longer(40), None, true),
        (text(7, 200), None, false),
    ] {
        let mut slots = slots();
        // Nothing is read but what is asked for.
        disk.set(DiskFaults::HELD);
        let read = reads(&mut slots, &prompt, token);
        disk.set(DiskFaults::default());
        assert_eq!(read, expected, "{} {token:?}", prompt.len());
    }
    let mut slots = slots();
    let wait = |slots: &mut KvSlots, token| {
        slots
            .tiers
            .poll_disk(&stats, Some(Duration::from_millis(token)), Time::ZERO);
        let read = slots.read_from_disk(0, &longer(200), Time::ZERO, None);
        read.map(|read| read.until.since_origin())
    };
    disk.set(DiskFaults::HELD);
    // As long as computing would take.
    let times = [2, 20, 200].map(|token| wait(&mut slots, token));
    disk.set(DiskFaults::default());
    assert_eq!(
        times,
        [400, 4_000, 5_000].map(|ms| Some(Duration::from_millis(ms)))
    );
}

const PURPOSE: SlotPurpose<'static> = SlotPurpose {
    prompt: &[],
    seed: 0,
    choice: 0,
    max_tokens: None,
};

fn fill(slots: &mut KvSlots, slot: SlotId, tokens: &[Token]) {
    fill_from(slots, slot, 0, tokens);
}

fn fill_from(slots: &mut KvSlots, slot: SlotId, from: usize, tokens: &[Token]) {
    let batch: Vec<BatchEntry> = (length(from)..)
        .zip(tokens)
        .map(|(position, &token)| BatchEntry {
            slot,
            position,
            token,
            row: false,
        })
        .collect();
    let decoded = slots
        .model
        .decode(&batch, None, Time::ZERO, &Counter::default());
    assert_eq!(decoded, Ok(()));
    slots.append(slot, tokens);
}

#[test]
fn a_retained_prompt_is_shared_with_the_next_sequence_of_its_scope() {
    let mut slots = slots(true);
    let (first, shared) = slots.acquire(7, None, &PURPOSE).unwrap();
    assert_eq!(shared, 0);
    fill(&mut slots, first, &[1, 2, 3, 4, 5]);
    slots.retain(first, 5, None);
    assert!(
        slots.find(8, &[1, 2, 3, 4, 5, 6]).is_none(),
        "another scope"
    );
    let found = slots.find(7, &[1, 2, 3, 4, 9]);
    let (_, shared) = slots.acquire(7, found, &PURPOSE).unwrap();
    assert_eq!(shared, 4);
}

#[test]
fn a_prefix_below_the_minimum_is_released_at_once() {
    let mut slots = slots(true);
    let (first, _) = slots.acquire(7, None, &PURPOSE).unwrap();
    fill(&mut slots, first, &[1, 2, 3]);
    slots.retain(first, 3, None);
    assert_eq!(slots.cells().used(), 0);
    assert!(!slots.evict_all());
}

#[test]
fn a_model_that_cannot_shorten_a_slot_is_not_asked_to() {
    for truncates in [true, false] {
        let mut slots = slots(truncates);
        let (first, _) = slots.acquire(0, None, &PURPOSE).unwrap();
        fill(&mut slots, first, &[1, 2, 3]);
        assert_eq!(slots.truncate(first, 2), truncates);
        assert_eq!(slots.cells().used(), if truncates { 2 } else { 3 });
    }
}

#[test]
fn eviction_frees_as_many_cells_as_a_batch_needs() {
    let mut slots = slots(true);
    let (first, _) = slots.acquire(0, None, &PURPOSE).unwrap();
    fill(&mut slots, first, &[1, 2, 3, 4, 5]);
    slots.retain(first, 5, None);
    let all = slots.cells().room();
    slots.evict_for(all);
    assert_eq!((slots.cells().used(), slots.cells().room()), (0, all));
}

/// Whether some calls succeed; nothing is saved.
struct Unlucky {
    forks: bool,
    rewinds: bool,
}

impl ModelHooks for Unlucky {
    fn finish_fork(&mut self, _: &mut Scripted, _: SlotId, _: u32) -> bool {
        self.forks
    }

    fn fork_bytes(&self, _: &Scripted, _: SlotId) -> usize {
        COPIED_BYTES_STEP
    }

    fn idle_cells_max(&self, _: &Scripted) -> usize {
        usize::MAX
    }

    fn saved_size(&mut self, _: &mut Scripted, _: SlotId) -> usize {
        0
    }

    fn rewind(
        &mut self,
        model: &mut Scripted,
        slot: SlotId,
        checkpoint: &[u8],
        tokens: u32,
    ) -> bool {
        self.rewinds && model.rewind(slot, checkpoint, tokens)
    }
}

/// Slots of a model with a window, of which one holds 100 tokens of a prompt, with a checkpoint there, and 60 of an answer.
fn unlucky(forks: bool, rewinds: bool) -> KvSlots {
    let script = Script {
        window_tokens: 8,
        saves: true,
        ..Script::default()
    };
    let model = HookedModel::new(script, Unlucky { forks, rewinds });
    let mut slots = KvSlots::new(Box::new(model), &Config::default());
    let (slot, _) = slots.acquire(0, None, &PURPOSE).unwrap();
    fill(&mut slots, slot, &text(0, 100));
    slots.checkpoint(slot);
    fill_from(&mut slots, slot, 100, &text(1, 60));
    slots.retain(slot, 100, None);
    slots
}

#[test]
fn a_checkpoint_that_does_not_serve_is_not_chosen_again() {
    for (rewinds, computed) in [(true, 99), (false, 0)] {
        let mut slots = unlucky(true, rewinds);
        let found = slots.find(0, &text(0, 100));
        assert!(matches!(found, Some(FoundPrefix::Slot(found)) if found.rewinds));
        let (slot, shared) = slots.acquire(0, found, &PURPOSE).unwrap();
        assert_eq!(shared, computed);
        fill_from(&mut slots, slot, shared, &text(0, 100)[shared..]);
        slots.release(slot);
        assert_eq!(slots.find(0, &text(0, 100)).is_some(), rewinds);
    }
}

#[test]
fn a_slot_that_cannot_be_copied_is_computed_anew() {
    for (forks, computed) in [(true, 160), (false, 0)] {
        let mut slots = unlucky(forks, true);
        let longer = [text(0, 100), text(1, 60), vec![300; 5]].concat();
        let found = slots.find(0, &longer);
        let (slot, shared) = slots.acquire(0, found, &PURPOSE).unwrap();
        assert_eq!((shared, slots.len(slot)), (computed, computed));
        fill_from(&mut slots, slot, shared, &longer[shared..]);
    }
}

#[test]
fn a_step_copies_no_more_once_it_has_copied_much() {
    let mut slots = unlucky(true, true);
    let found = slots.find(0, &text(0, 100));
    assert!(slots.may_copy(found));
    slots.acquire(0, found, &PURPOSE).unwrap();
    let again = slots.find(0, &text(0, 100));
    // The prefix would be moved for a sequence without one.
    assert_eq!(
        [again, None].map(|found| slots.may_copy(found)),
        [false, false]
    );
    slots.begin_step();
    assert_eq!(
        [again, None].map(|found| slots.may_copy(found)),
        [true, true]
    );
    // What was saved counts too.
    slots.copies.saved = COPIED_BYTES_STEP;
    assert!(!slots.may_copy(again));

    let mut slots = slots_of(Script::default());
    slots.copies.copied = COPIED_BYTES_STEP;
    while slots.cache.has_free_slot() {
        assert!(slots.may_copy(None));
        slots.acquire(0, None, &PURPOSE).unwrap();
    }
    // What the slot holds that it would take has to be saved first.
    assert!(!slots.may_copy(None));
}

/// For example one that another layout of the KV cache has left in a file.
#[test]
fn a_saved_prefix_that_cannot_be_restored_goes() {
    let mut slots = slots_of(Script {
        saves: true,
        ..Script::default()
    });
    slots.tiers.store.insert(0, &text(0, 100), vec![1; 5]);
    let longer = [text(0, 100), vec![300; 5]].concat();
    let found = slots.find(0, &longer);
    assert!(matches!(found, Some(FoundPrefix::Saved(_))));
    let (slot, shared) = slots.acquire(0, found, &PURPOSE).unwrap();
    assert_eq!((shared, slots.find(0, &longer)), (0, None));
    fill(&mut slots, slot, &longer);
}

/// The next decode call makes the forks, and copies from these slots or to them.
struct ForksLater(Vec<SlotId>);

impl ModelHooks for ForksLater {
    fn forks_later(&self, _: &Scripted) -> bool {
        true
    }

    fn is_copied_later(&self, _: &Scripted, slot: SlotId) -> bool {
        self.0.contains(&slot)
    }
}

/// Slots of a model that forks later, with a saved state of 100 tokens.
fn forks_later(copied_later: Vec<SlotId>, state: Vec<u8>) -> KvSlots {
    let script = Script {
        saves: true,
        ..Script::default()
    };
    let model = HookedModel::new(script, ForksLater(copied_later));
    let mut slots = KvSlots::new(Box::new(model), &Config::default());
    slots.tiers.store.insert(0, &text(0, 100), state);
    slots
}

/// A request before this one may have forked what the slot held. The state is no worse for that.
#[test]
fn a_saved_prefix_whose_slot_waits_for_a_copy_stays() {
    let longer = [text(0, 100), vec![300; 5]].concat();
    for (copied_later, stays) in [(vec![0], true), (vec![1], false)] {
        // The model refuses a state of five bytes, and one that comes too early.
        let mut slots = forks_later(copied_later, vec![1; 5]);
        let found = slots.find(0, &longer);
        let (_, shared) = slots.acquire(0, found, &PURPOSE).unwrap();
        assert_eq!((shared, slots.find(0, &longer).is_some()), (0, stays));
    }
}

/// A move would leave its slot waiting for the copy.
#[test]
fn nothing_is_moved_out_of_the_way_of_a_saved_prefix_where_forks_are_made_later() {
    let longer = [text(0, 100), vec![300; 5]].concat();
    for (saved, expected) in [(true, 2), (false, 0)] {
        let mut slots = forks_later(Vec::new(), vec![1; 800]);
        let cached = slots.acquire(0, None, &PURPOSE).unwrap().0;
        let live = slots.acquire(0, None, &PURPOSE).unwrap().0;
        fill(&mut slots, cached, &text(1, 60));
        fill(&mut slots, live, &text(2, 60));
        slots.retain(cached, 60, None);
        let found = slots.find(0, &longer).filter(|_| saved);
        let (slot, shared) = slots.acquire(0, found, &PURPOSE).unwrap();
        assert_eq!((slot, shared), (expected, if saved { 100 } else { 0 }));
    }
}
