use proptest::prelude::*;

use super::*;

/// The only connection of a caller.
fn of(caller: u64) -> SchedulerTurn {
    from(caller, 0)
}

fn from(caller: u64, connection: u64) -> SchedulerTurn {
    SchedulerTurn { caller, connection }
}

/// Admits all sequences in turn; each is removed at once.
fn order(scheduler: &mut Scheduler) -> Vec<SequenceKey> {
    let mut new_admitted = Vec::new();
    while let Some(key) = scheduler.next() {
        scheduler.admit(key);
        scheduler.remove(key);
        new_admitted.push(key);
    }
    new_admitted
}

/// LM-962, D-54.
#[test]
fn the_order_is_turns_of_callers_then_priority_then_arrival() {
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
    let expected = [5, 4, 6, 1, 2, 3];
    assert_eq!(scheduler.admission_order(), expected);
    assert_eq!(order(&mut scheduler), expected);
    // A running sequence is not in the queue, and its caller comes after the others.
    for (key, priority, caller) in arrivals {
        scheduler.submit(key, priority, of(caller));
    }
    scheduler.admit(5);
    assert_eq!(scheduler.admission_order(), [4, 6, 1, 2, 3]);
}

/// One caller has requests of the highest priority in the queue at all times.
#[test]
fn lm_962_a_priority_delays_no_other_caller() {
    for ageing in [0, 8] {
        let mut scheduler = Scheduler::new(1, ageing);
        for key in 0..4 {
            scheduler.submit(key, i32::MAX, of(1));
        }
        for key in 100..120 {
            scheduler.submit(key, i32::MIN, of(2));
        }
        let mut theirs = 0;
        for newcomer in 10..30 {
            let key = scheduler.next().unwrap();
            scheduler.admit(key);
            scheduler.remove(key);
            scheduler.submit(newcomer, i32::MAX, of(1));
            theirs += usize::from(key >= 100);
        }
        assert_eq!(theirs, 10, "{ageing}");
    }
}

#[test]
fn d_54_connections_take_turns_within_their_callers() {
    let mut scheduler = Scheduler::new(1, 0);
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
    assert!(scheduler.waiting.is_unused());
}

#[test]
fn ageing_admits_the_priority_that_has_waited_longest() {
    for (ageing, expect) in [(0, None), (1, Some(0)), (4, Some(3))] {
        let mut scheduler = Scheduler::new(1, ageing);
        scheduler.submit(0, -5, of(1));
        scheduler.submit(1, 0, of(1));
        let mut admitted = Vec::new();
        // A sequence of higher priority waits at every turn.
        for newcomer in 10..30 {
            scheduler.submit(newcomer, 3, of(1));
            let key = scheduler.next().unwrap();
            let order = scheduler.admission_order();
            assert_eq!(order[0], key, "admission_order agrees");
            scheduler.admit(key);
            scheduler.remove(key);
            admitted.push(key);
        }
        let turn = |key| admitted.iter().position(|&admitted| admitted == key);
        assert_eq!(turn(0), expect, "{ageing}");
        let second = expect.map(|first| first + ageing as usize);
        assert_eq!(turn(1), second, "{ageing}");
    }
    // Connections take turns among those of the aged priority as well.
    let mut scheduler = Scheduler::new(1, 1);
    for (key, priority, connection) in [(1, 0, 7), (2, 0, 7), (3, 0, 8), (4, 5, 8)] {
        scheduler.submit(key, priority, from(1, connection));
    }
    assert_eq!(order(&mut scheduler), [1, 3, 2, 4]);
}

/// Of as many callers as ageing counts admissions: counted for all of them together, it would always be the same caller's turn.
#[test]
fn ageing_counts_the_admissions_of_each_caller() {
    let mut scheduler = Scheduler::new(1, 4);
    for caller in 0..4 {
        scheduler.submit(caller, -1, of(caller as u64));
        for key in 0..8 {
            scheduler.submit(100 + 10 * caller + key, 0, of(caller as u64));
        }
    }
    let admitted = order(&mut scheduler);
    assert_eq!(admitted[12..16], [0, 1, 2, 3]);
}

/// A stream in the middle of its answer, and newer requests of its caller of a higher priority without end.
#[test]
fn newer_requests_do_not_starve_a_stream_that_was_preempted_or_parked() {
    for parks in [false, true] {
        let mut scheduler = Scheduler::new(1, 4);
        scheduler.submit(0, 0, of(1));
        scheduler.admit(0);
        let mut newcomers = 1..;
        for key in newcomers.by_ref().take(3) {
            scheduler.submit(key, 5, of(1));
        }
        for _ in 0..5 {
            if parks {
                scheduler.park(0);
                scheduler.unpark(0);
            } else {
                scheduler.preempt(0);
            }
            let waits = newcomers.by_ref().take(20).position(|newcomer| {
                scheduler.submit(newcomer, 5, of(1));
                let key = scheduler.next().unwrap();
                scheduler.admit(key);
                if key > 0 {
                    scheduler.remove(key);
                }
                key == 0
            });
            assert!(waits.is_some_and(|waits| waits < 4), "{waits:?}");
        }
    }
}

/// A stream that ageing has admitted holds its cells as those do that it was preferred to.
#[test]
fn ageing_is_not_undone_by_a_preemption() {
    let mut scheduler = Scheduler::new(3, 2);
    for (key, priority) in [(0, 0), (1, 5), (2, 5)] {
        scheduler.submit(key, priority, of(1));
    }
    for expect in [1, 0] {
        assert_eq!(scheduler.next(), Some(expect));
        scheduler.admit(expect);
    }
    scheduler.admit(2);
    assert_eq!(scheduler.victim(true, |_| Some(10)), Some(2));
    scheduler.preempt(0);
    scheduler.preempt(2);
    assert_eq!(scheduler.next(), Some(0));
}

/// A caller with one stream, and others whose newer requests arrive without end.
#[test]
fn d_54_a_preempted_stream_comes_before_newer_requests_of_other_callers() {
    let mut scheduler = Scheduler::new(2, 0);
    scheduler.submit(0, 0, of(1));
    scheduler.admit(0);
    for key in 10..20 {
        scheduler.submit(key, 0, of(key as u64 % 3 + 2));
        scheduler.admit(key);
        scheduler.remove(key);
    }
    for key in 20..30 {
        scheduler.submit(key, 9, of(key as u64 % 3 + 2));
    }
    scheduler.preempt(0);
    assert_eq!(scheduler.next(), Some(0));
    // It had its turn now, and further streams of its caller have to wait for theirs.
    scheduler.admit(0);
    scheduler.submit(1, 9, of(1));
    assert_eq!(scheduler.next(), Some(20));
    assert_eq!(scheduler.admission_order()[..4], [20, 21, 22, 1]);
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
    assert_eq!(scheduler.next(), None);
    scheduler.yield_slot(1);
    assert_eq!(scheduler.next(), Some(2));
    scheduler.admit(2);
    scheduler.remove(2);
    assert_eq!(scheduler.next(), Some(1));
}

/// Newcomers of any priority, one for each admission, with a yielded sequence among them.
#[test]
fn d_49_newcomers_do_not_keep_a_sequence_that_has_yielded_its_slot_waiting() {
    for (ageing, newcomer_priority, expect) in [(0, 0, Some(3)), (0, 5, None), (8, 5, Some(6))] {
        let mut scheduler = Scheduler::new(1, ageing);
        scheduler.submit(0, 0, of(0));
        scheduler.admit(0);
        for key in 1..4 {
            scheduler.submit(key, newcomer_priority, from(0, key as u64));
        }
        scheduler.yield_slot(0);
        let admitted = (10..40).position(|newcomer| {
            let key = scheduler.next().unwrap();
            assert_eq!(scheduler.admission_order()[0], key);
            scheduler.admit(key);
            scheduler.remove(key);
            scheduler.submit(newcomer, newcomer_priority, from(0, newcomer as u64));
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
        let key = scheduler.next().unwrap();
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
    assert_eq!(scheduler.next(), None, "no slot is left");
    scheduler.preempt(1);
    assert_eq!(scheduler.next(), Some(1));
    assert_eq!(scheduler.next(), Some(1), "asking changes nothing");
    scheduler.admit(1);
    scheduler.park(1);
    assert_eq!(
        scheduler.next(),
        Some(2),
        "a parked sequence is not counted as running"
    );
    scheduler.unpark(1);
    assert_eq!(scheduler.next(), Some(1));
}

#[test]
fn sequences_that_are_passed_over_do_not_block_others_and_keep_the_turns() {
    let mut scheduler = Scheduler::new(2, 0);
    for (key, priority, caller) in [(1, 5, 1), (2, 0, 1), (3, 0, 2), (4, 0, 2)] {
        scheduler.submit(key, priority, of(caller));
    }
    let order = scheduler.admission_order();
    assert_eq!(order, [1, 3, 2, 4]);
    scheduler.set_aside(1);
    assert_eq!(scheduler.next(), Some(2), "of the same caller");
    scheduler.set_aside(2);
    scheduler.set_aside(2);
    assert_eq!(scheduler.next(), Some(3));
    scheduler.set_aside(3);
    scheduler.remove(3);
    assert_eq!(scheduler.aside().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(scheduler.admission_order(), [1, 4, 2]);
    scheduler.restore(1);
    scheduler.restore(1);
    scheduler.restore(4);
    assert_eq!(scheduler.next(), Some(1), "it is its caller's turn still");
    scheduler.admit(1);
    scheduler.admit(4);
    assert_eq!(scheduler.waiting(), 1);
    scheduler.remove(1);
    assert_eq!(scheduler.next(), None, "nothing is left to admit");
    // What has yielded and is passed over is last all the same.
    scheduler.yield_slot(4);
    scheduler.set_aside(4);
    scheduler.restore(4);
    scheduler.restore(2);
    assert_eq!(scheduler.next(), Some(2));
    for key in [2, 4] {
        scheduler.remove(key);
    }
    assert!(scheduler.waiting.is_unused());
}

#[test]
fn a_connection_keeps_its_turn_while_its_sequence_is_passed_over() {
    let mut scheduler = Scheduler::new(2, 0);
    for key in 1..=5 {
        scheduler.submit(key, 0, from(7, key as u64));
    }
    for key in [1, 3] {
        scheduler.set_aside(key);
    }
    assert_eq!(scheduler.next(), Some(2));
    scheduler.admit(2);
    for key in [3, 1] {
        scheduler.restore(key);
    }
    assert_eq!(scheduler.admission_order(), [1, 3, 4, 5]);
}

/// Preempts until nothing is left that can be; returns the victims. `tokens` is what each key holds.
fn victims(scheduler: &mut Scheduler, tokens: &[usize]) -> Vec<SequenceKey> {
    let mut victims = Vec::new();
    let holds = |victims: &[SequenceKey], key: SequenceKey| {
        (!victims.contains(&key)).then_some(*tokens.get(key).unwrap_or(&0))
    };
    while let Some(victim) = scheduler.victim(true, |key| holds(&victims, key)) {
        victims.push(victim);
        scheduler.preempt(victim);
    }
    victims
}

#[test]
fn victims_are_parked_then_lowest_priority_then_youngest_and_never_the_last() {
    let mut scheduler = Scheduler::new(4, 0);
    for (key, priority) in [(1, 0), (2, 5), (3, 0), (4, 0)] {
        scheduler.submit(key, priority, of(0));
        scheduler.admit(key);
    }
    scheduler.park(1);
    assert_eq!(victims(&mut scheduler, &[]), [1, 4, 3]);
    assert_eq!(scheduler.victim(false, |key| (key == 2).then_some(1)), None);
}

/// LM-962, D-54: a caller's priorities preempt nobody else's sequences.
#[test]
fn victims_are_of_the_caller_that_holds_the_most_whatever_the_priorities() {
    let running = |members: &[(SequenceKey, i32, u64)]| {
        let mut scheduler = Scheduler::new(8, 0);
        for &(key, priority, caller) in members {
            scheduler.submit(key, priority, of(caller));
            scheduler.admit(key);
        }
        scheduler
    };
    let two = [(0, 9, 1), (1, 9, 1), (2, -9, 2), (3, -8, 2)];
    // The first holds 60 and loses the younger one, the second then 50 and loses the lower priority. Then the younger one goes.
    assert_eq!(victims(&mut running(&two), &[10, 50, 20, 30]), [1, 2, 3]);
    assert_eq!(victims(&mut running(&two), &[10, 30, 20, 30]), [2, 1, 3]);
    // Equal holders: that of the youngest.
    assert_eq!(victims(&mut running(&two), &[20, 20, 20, 20]), [2, 1, 3]);
    // A caller's only sequence goes last, however large or low it is: those that come later would preempt it again and again.
    let one = [(0, -9, 1), (1, 9, 2), (2, 9, 3), (3, 9, 2)];
    assert_eq!(victims(&mut running(&one), &[90, 2, 1, 2]), [3, 2, 1]);
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
    fn every_waiting_sequence_is_admitted_eventually(
        arrivals in prop::collection::vec((0..4_u64, 0..2_u64, -2..3, 0..5_u8), 1..60),
        seats in 1..4_usize, ageing in 0..4_u32,
    ) {
        let mut scheduler = Scheduler::new(seats, ageing);
        let mut seen = Vec::new();
        let mut running: Vec<SequenceKey> = Vec::new();
        for (key, &(caller, connection, priority, what)) in arrivals.iter().enumerate() {
            scheduler.submit(key, priority, from(caller, connection));
            while let Some(next) = scheduler.next() {
                prop_assert!(scheduler.aside().next().is_some() || scheduler.admission_order()[0] == next);
                prop_assert!(!running.contains(&next), "no sequence is admitted twice");
                scheduler.admit(next);
                running.push(next);
            }
            prop_assert!(running.len() <= seats);
            prop_assert_eq!(scheduler.running_count(), running.len());
            // Without a sequence that runs, all of those that wait are passed over.
            let what = if running.is_empty() { 5 } else { what };
            match what {
                0 => { scheduler.preempt(running.remove(0)); }
                1 => { let done = running.remove(0); scheduler.remove(done); seen.push(done); }
                2 => { let slow = running.remove(0); scheduler.park(slow); scheduler.unpark(slow); }
                3 => { scheduler.yield_slot(running.remove(0)); }
                4 => { let done = running.remove(0); scheduler.remove(done); seen.push(done); scheduler.admission_order().into_iter().take(2).for_each(|key| scheduler.set_aside(key)); }
                _ => { scheduler.aside().collect::<Vec<_>>().into_iter().for_each(|key| scheduler.restore(key)); }
            }
            prop_assert_eq!(scheduler.admission_order().len(), scheduler.waiting());
            prop_assert_eq!(scheduler.waiting() + running.len() + seen.len(), key + 1);
        }
        scheduler.aside().collect::<Vec<_>>().into_iter().for_each(|key| scheduler.restore(key));
        // From here on sequences only finish: each is admitted within as many turns as there are sequences.
        for _ in 0..=arrivals.len() {
            while let Some(next) = scheduler.next() {
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
        prop_assert!(scheduler.waiting.is_unused(), "callers without sequences are removed");
    }

    /// Too few KV cells for all, and newer requests of a higher priority without end, of every caller and of others: each of the older
    /// ones is preempted and resumed until it ends.
    #[test]
    fn streams_without_enough_cells_all_end(
        requests in prop::collection::vec((0..3_u64, -2..3, 1..60_usize, 1..40_usize), 1..16),
        slots in 1..6_usize,
    ) {
        let mut streams = Streams::new(slots);
        for &(caller, priority, prompt, output) in &requests {
            streams.submit(priority, of(caller), prompt, output);
        }
        let mut steps = 0;
        while streams.ended.range(..requests.len()).count() < requests.len() {
            let newest = streams.tokens.len();
            if streams.scheduler.waiting() < 30 {
                streams.submit(9, of(newest as u64 % 5), 1 + newest % 50, 10);
            }
            streams.step(steps % 4 == 3);
            steps += 1;
            prop_assert!(steps < 10_000, "{:?} of {} have ended", streams.ended.range(..requests.len()), requests.len());
        }
    }
}

/// A caller's only stream that takes most of the cells, and newer small ones of others without end.
#[test]
fn a_large_stream_is_not_preempted_for_newer_ones_of_other_callers() {
    let mut streams = Streams::new(5);
    streams.submit(0, of(1), 60, 35);
    for step in 0..45 {
        while streams.scheduler.waiting() < 8 {
            streams.submit(9, of(2 + streams.tokens.len() as u64 % 2), 10, 20);
        }
        streams.step(step % 4 == 3);
    }
    assert!(streams.ended.contains(&0), "{} tokens", streams.tokens[0]);
}

/// Four streams, of which two fit: each is computed again a few times, and not in turn at every step.
#[test]
fn callers_do_not_preempt_each_other_in_turn() {
    let mut streams = Streams::new(4);
    for caller in [1, 2, 1, 2] {
        streams.submit(0, of(caller), 20, 30);
    }
    let steps = (0..400).find(|step| {
        streams.step(step % 4 == 3);
        streams.ended.len() == 4
    });
    assert!(steps.is_some_and(|steps| steps < 120), "{steps:?}");
    assert!(streams.preempted <= 6, "{}", streams.preempted);
}

/// Streams and the KV cells that they hold, as an owner steps them.
struct Streams {
    scheduler: Scheduler,
    /// The known tokens of each.
    tokens: Vec<usize>,
    /// How many of them are computed; `None`: it holds no cells.
    computed: Vec<Option<usize>>,
    /// How many tokens it ends with.
    ends: Vec<usize>,
    ended: std::collections::BTreeSet<SequenceKey>,
    preempted: usize,
}

impl Streams {
    /// Enough for any one.
    const CELLS: usize = 100;

    fn new(slots: usize) -> Self {
        Self {
            scheduler: Scheduler::new(slots, 4),
            tokens: Vec::new(),
            computed: Vec::new(),
            ends: Vec::new(),
            ended: std::collections::BTreeSet::new(),
            preempted: 0,
        }
    }

    fn submit(&mut self, priority: i32, turn: SchedulerTurn, prompt: usize, output: usize) {
        self.scheduler.submit(self.tokens.len(), priority, turn);
        self.tokens.push(prompt);
        self.computed.push(None);
        self.ends.push(prompt + output);
    }

    fn room(&self) -> usize {
        Self::CELLS - self.computed.iter().flatten().sum::<usize>()
    }

    fn step(&mut self, oldest_first: bool) {
        while let Some(key) = self.scheduler.next() {
            if self.room() < self.tokens[key] + self.scheduler.running_count() {
                break;
            }
            self.scheduler.admit(key);
            self.computed[key] = Some(0);
        }
        let pending =
            |streams: &Self, key: SequenceKey| streams.tokens[key] - streams.computed[key].unwrap();
        let mut shares = Vec::new();
        loop {
            let running = self.scheduler.running();
            let work = running.map(|key| Runnable {
                key,
                pending: pending(self, key),
            });
            let work: Vec<Runnable> = work.collect();
            let budget = StepBudget {
                batch: 64,
                prefill: 16,
                pass: 0,
                room: self.room(),
                oldest_first,
            };
            if plan(&work, &budget, &mut shares) {
                break;
            }
            let victim = self
                .scheduler
                .victim(true, |key| self.computed[key])
                .unwrap();
            self.computed[victim] = None;
            self.scheduler.preempt(victim);
            self.preempted += 1;
        }
        for share in &shares {
            let key = share.key;
            self.computed[key] = self.computed[key].map(|computed| computed + share.tokens);
            self.tokens[key] += usize::from(pending(self, key) == 0);
            if self.tokens[key] > self.ends[key] {
                self.computed[key] = None;
                self.scheduler.remove(key);
                self.ended.insert(key);
            }
        }
    }
}
