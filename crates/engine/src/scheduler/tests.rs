use proptest::prelude::*;

use super::*;

/// The only connection of a caller.
fn of(caller: u64) -> SchedulerTurn {
    SchedulerTurn {
        caller,
        connection: 0,
    }
}

/// Admits all sequences in turn; each is removed at once.
fn order(scheduler: &mut Scheduler) -> Vec<SequenceKey> {
    let mut new_admitted = Vec::new();
    while let Some(key) = scheduler.next(|_| true) {
        scheduler.admit(key);
        scheduler.remove(key);
        new_admitted.push(key);
    }
    new_admitted
}

#[test]
fn the_order_is_priority_then_turns_of_callers_then_arrival() {
    let mut scheduler = Scheduler::new(1, 0);
    let arrivals = [
        (1, 0, 7),
        (2, 0, 7),
        (3, 0, 7),
        (4, 0, 8),
        (5, 3, 7),
        (6, -1, 9),
    ];
    for (key, priority, caller) in arrivals {
        scheduler.submit(key, priority, of(caller));
    }
    assert_eq!(order(&mut scheduler), [5, 4, 1, 2, 3, 6]);
    // A running sequence is not in the queue, and its caller comes after the others.
    for (key, priority, caller) in arrivals {
        scheduler.submit(key, priority, of(caller));
    }
    assert_eq!(scheduler.admission_order(), [5, 1, 2, 3, 4, 6]);
    scheduler.admit(5);
    assert_eq!(scheduler.admission_order(), [4, 1, 2, 3, 6]);
}

#[test]
fn d_54_connections_take_turns_within_their_callers() {
    let mut scheduler = Scheduler::new(1, 0);
    let from = |caller, connection| SchedulerTurn { caller, connection };
    // Ten connections of one caller, two requests each, and one connection of another with four.
    for key in 0..20 {
        scheduler.submit(key, 0, from(1, key as u64 / 2));
    }
    for key in 100..104 {
        scheduler.submit(key, 0, from(2, 7));
    }
    let first = [0, 100, 2, 101, 4, 102, 6, 103];
    let new_admitted = order(&mut scheduler);
    assert_eq!(new_admitted[..8], first, "callers take turns");
    let rest = [8, 10, 12, 14, 16, 18, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19];
    assert_eq!(
        new_admitted[8..],
        rest,
        "connections of one caller take turns"
    );
    assert!(scheduler.turns_of.is_empty());
}

#[test]
fn ageing_admits_the_priority_that_has_waited_longest() {
    for (ageing, expect) in [(0, None), (1, Some(0)), (4, Some(3))] {
        let mut scheduler = Scheduler::new(1, ageing);
        scheduler.submit(0, -5, of(9));
        scheduler.submit(1, 0, of(1));
        let mut new_admitted = Vec::new();
        // A sequence of higher priority waits at every turn.
        for newcomer in 10..30 {
            scheduler.submit(newcomer, 3, of(1));
            let key = scheduler.next(|_| true).unwrap();
            assert_eq!(
                scheduler.admission_order()[0],
                key,
                "admission_order agrees"
            );
            scheduler.admit(key);
            scheduler.remove(key);
            new_admitted.push(key);
        }
        let turn = |key| {
            new_admitted
                .iter()
                .position(|&new_admitted| new_admitted == key)
        };
        assert_eq!(turn(0), expect, "{ageing}");
        let second = expect.map(|first| first + ageing as usize);
        assert_eq!(turn(1), second, "{ageing}");
    }
    // Callers take turns among those of the aged priority as well.
    let mut scheduler = Scheduler::new(1, 1);
    for (key, priority, caller) in [(1, 0, 7), (2, 0, 7), (3, 0, 8), (4, 5, 8)] {
        scheduler.submit(key, priority, of(caller));
    }
    assert_eq!(order(&mut scheduler), [1, 3, 2, 4]);
}

#[test]
fn d_49_a_sequence_that_yields_its_slot_is_admitted_last() {
    let mut scheduler = Scheduler::new(1, 0);
    scheduler.submit(1, 5, of(0));
    scheduler.admit(1);
    assert_eq!(scheduler.missing_slots(|_| true), 0);
    scheduler.submit(2, 0, of(0));
    assert_eq!(scheduler.missing_slots(|_| true), 1);
    assert_eq!(scheduler.missing_slots(|key| key != 2), 0);
    scheduler.yield_slot(1);
    assert_eq!(scheduler.next(|_| true), Some(2));
    scheduler.admit(2);
    scheduler.remove(2);
    assert_eq!(scheduler.next(|_| true), Some(1));
}

/// Newcomers of any priority, one for each admission, with a yielded sequence among them.
#[test]
fn d_49_newcomers_do_not_keep_a_sequence_that_has_yielded_its_slot_waiting() {
    for (ageing, newcomer_priority, expect) in [(0, 0, Some(3)), (0, 5, None), (8, 5, Some(6))] {
        let mut scheduler = Scheduler::new(1, ageing);
        scheduler.submit(0, 0, of(0));
        scheduler.admit(0);
        for key in 1..4 {
            scheduler.submit(key, newcomer_priority, of(key as u64));
        }
        scheduler.yield_slot(0);
        let admitted = (10..40).position(|newcomer| {
            let key = scheduler.next(|_| true).unwrap();
            assert_eq!(scheduler.admission_order()[0], key);
            scheduler.admit(key);
            scheduler.remove(key);
            scheduler.submit(newcomer, newcomer_priority, of(newcomer as u64));
            key == 0
        });
        assert_eq!(admitted, expect, "{ageing} {newcomer_priority}");
    }
}

#[test]
fn a_new_caller_does_not_overtake_callers_that_take_turns() {
    let mut scheduler = Scheduler::new(1, 0);
    scheduler.submit(1, 0, of(1));
    scheduler.submit(2, 0, of(1));
    let mut new_admitted = Vec::new();
    for newcomer in 10..14 {
        let key = scheduler.next(|_| true).unwrap();
        scheduler.admit(key);
        scheduler.remove(key);
        new_admitted.push(key);
        scheduler.submit(newcomer, 0, of(newcomer as u64));
    }
    assert_eq!(new_admitted[..2], [1, 2]);
}

#[test]
fn preempted_and_unparked_sequences_are_admitted_first() {
    let mut scheduler = Scheduler::new(1, 0);
    scheduler.submit(1, 0, of(0));
    scheduler.submit(2, 0, of(0));
    scheduler.admit(1);
    assert_eq!(scheduler.next(|_| true), None, "no slot is left");
    scheduler.preempt(1);
    assert_eq!(scheduler.next(|_| true), Some(1));
    assert_eq!(scheduler.next(|_| true), Some(1), "asking changes nothing");
    scheduler.admit(1);
    scheduler.park(1);
    assert_eq!(
        scheduler.next(|_| true),
        Some(2),
        "a parked sequence is not counted as running"
    );
    scheduler.unpark(1);
    assert_eq!(scheduler.next(|_| true), Some(1));
    assert_eq!(
        scheduler.next(|key| key != 1),
        Some(2),
        "a sequence that is not eligible is passed over"
    );
}

#[test]
fn victims_are_parked_then_lowest_priority_then_youngest_and_never_the_last() {
    let mut scheduler = Scheduler::new(4, 0);
    for (key, priority) in [(1, 0), (2, 5), (3, 0), (4, 0)] {
        scheduler.submit(key, priority, of(0));
        scheduler.admit(key);
    }
    scheduler.park(1);
    let mut victims = Vec::new();
    let mut removed = Vec::new();
    while let Some(victim) = scheduler.victim(true, |key| !removed.contains(&key)) {
        victims.push(victim);
        removed.push(victim);
        scheduler.preempt(victim);
    }
    assert_eq!(victims, [1, 4, 3]);
    assert_eq!(scheduler.victim(false, |key| key == 2), None);
}

const BUDGET: StepBudget = StepBudget {
    batch: 512,
    prefill: 128,
    pass: 0,
    room: 10_000,
    oldest_first: false,
};

fn shares(work: &[(SequenceKey, usize)], budget: &StepBudget) -> (bool, Vec<(SequenceKey, usize)>) {
    let work: Vec<Runnable> = work
        .iter()
        .map(|&(key, pending)| Runnable { key, pending })
        .collect();
    let mut shares = Vec::new();
    let fits = plan(&work, budget, &mut shares);
    (
        fits,
        shares
            .iter()
            .map(|share| (share.key, share.tokens))
            .collect(),
    )
}

#[test]
fn decodes_are_planned_first_and_prefill_gets_the_rest() {
    let many: Vec<(SequenceKey, usize)> =
        (0..100).map(|key| (key, 1)).chain([(100, 900)]).collect();
    let tight = |room| StepBudget { room, ..BUDGET };
    let without_prefill = StepBudget {
        prefill: 0,
        ..BUDGET
    };
    let oldest_first = StepBudget {
        oldest_first: true,
        ..BUDGET
    };
    let cases = [
        (vec![(0, 1), (1, 1)], BUDGET, true, vec![(0, 1), (1, 1)]),
        (vec![(0, 900)], BUDGET, true, vec![(0, 128)]),
        (vec![(0, 1), (1, 900)], BUDGET, true, vec![(0, 1), (1, 128)]),
        (
            vec![(0, 900), (1, 20), (2, 500)],
            BUDGET,
            true,
            vec![(1, 20), (2, 108)],
        ),
        (
            vec![(0, 100), (1, 20), (2, 500)],
            oldest_first,
            true,
            vec![(0, 100), (1, 20), (2, 8)],
        ),
        (vec![(0, 900), (1, 20)], oldest_first, true, vec![(0, 128)]),
        (
            vec![(0, 1), (1, 50), (2, 20), (3, 90)],
            StepBudget { pass: 30, ..BUDGET },
            true,
            vec![(0, 1), (2, 20), (1, 50)],
        ),
        // It counts as time, and takes no entries.
        (
            vec![(0, 40), (1, 40), (2, 40)],
            StepBudget {
                pass: 200,
                prefill: 1_000,
                ..BUDGET
            },
            true,
            vec![(0, 40), (1, 40), (2, 40)],
        ),
        (vec![(0, 1), (1, 900)], tight(5), true, vec![(0, 1), (1, 4)]),
        (vec![(0, 1), (1, 900)], tight(1), false, vec![(0, 1)]),
        (vec![(0, 1), (1, 1)], tight(1), false, vec![(0, 1)]),
        (vec![], BUDGET, true, vec![]),
        // Without time for prompts: one advances by a token, and nothing has to be preempted.
        (
            vec![(0, 1), (1, 1), (2, 900)],
            without_prefill,
            true,
            vec![(0, 1), (1, 1), (2, 1)],
        ),
        (vec![(0, 900)], without_prefill, true, vec![(0, 1)]),
    ];
    for (work, budget, fits, expected) in cases {
        assert_eq!(shares(&work, &budget), (fits, expected), "{work:?}");
    }
    assert_eq!(
        shares(&many, &BUDGET).1.last(),
        Some(&(100, 128)),
        "prompts advance beside 100 decodes"
    );
}

proptest! {
    #[test]
    fn a_plan_keeps_its_limits_and_advances_a_prompt(
        pending in prop::collection::vec(prop_oneof![Just(1_usize), 2..600_usize], 0..40),
        batch in 40..600_usize, prefill in 0..600_usize, room in 0..800_usize,
        pass in 0..50_usize, oldest_first: bool,
    ) {
        let budget = StepBudget { batch, prefill, pass, room, oldest_first };
        let work: Vec<Runnable> = pending.iter().enumerate().map(|(key, &pending)| Runnable { key, pending }).collect();
        let mut shares = Vec::new();
        let fits = plan(&work, &budget, &mut shares);
        let total: usize = shares.iter().map(|share| share.tokens).sum();
        prop_assert!(total <= batch && total <= room);
        let mut keys: Vec<SequenceKey> = shares.iter().map(|share| share.key).collect();
        keys.sort_unstable();
        keys.dedup();
        prop_assert_eq!(keys.len(), shares.len(), "one share each");
        prop_assert!(shares.iter().all(|share| (1..=pending[share.key]).contains(&share.tokens)));
        if fits {
            let share = |key: SequenceKey| shares.iter().any(|share| share.key == key);
            prop_assert!(work.iter().filter(|work| work.pending == 1).all(|work| share(work.key)));
            let prompts = || work.iter().filter(|work| work.pending > 1);
            let full = work.iter().filter(|work| work.pending == 1).count() == batch;
            let oldest = prompts().next().is_none_or(|work| share(work.key));
            let shortest = prompts().min_by_key(|work| work.pending).is_none_or(|work| share(work.key));
            prop_assert!(full || if oldest_first { oldest } else { shortest }, "a prompt advances");
            let parts = prompts().filter(|work| shares.iter().any(|share| share.key == work.key && share.tokens < work.pending));
            prop_assert!(parts.count() <= 1, "at most one prompt is cut");
        }
    }

    /// Every waiting sequence is admitted eventually.
    #[test]
    fn every_waiting_sequence_is_admitted_eventually(arrivals in prop::collection::vec((0..4_u64, 0..3_u8), 1..60), seats in 1..4_usize) {
        let mut scheduler = Scheduler::new(seats, 0);
        let mut seen = Vec::new();
        let mut running: Vec<SequenceKey> = Vec::new();
        for (key, &(caller, what)) in arrivals.iter().enumerate() {
            scheduler.submit(key, 0, of(caller));
            while let Some(next) = scheduler.next(|_| true) {
                prop_assert!(!running.contains(&next), "no sequence is admitted twice");
                scheduler.admit(next);
                running.push(next);
            }
            prop_assert!(running.len() <= seats);
            prop_assert_eq!(scheduler.running_count(), running.len());
            match what {
                0 => { scheduler.preempt(running.remove(0)); }
                1 => { let done = running.remove(0); scheduler.remove(done); seen.push(done); }
                _ => { let slow = running.remove(0); scheduler.park(slow); scheduler.unpark(slow); }
            }
        }
        // From here on sequences only finish: each is admitted within as many turns as there are sequences.
        for _ in 0..=arrivals.len() {
            while let Some(next) = scheduler.next(|_| true) {
                scheduler.admit(next);
                running.push(next);
            }
            for done in running.drain(..) {
                scheduler.remove(done);
                seen.push(done);
            }
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..arrivals.len()).collect::<Vec<_>>());
        prop_assert!(scheduler.turns_of.is_empty(), "callers without sequences are removed");
    }
}
