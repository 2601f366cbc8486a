//! Memory that is freed for another model.

use super::super::moving::DiskMove;
use super::super::writes::ORDERS_MAX;
use super::*;
use crate::prefix_store::PrefixStore;

const UNTIL: Time = Time::new(Duration::from_secs(1));

/// The memory, whose last entry is the most valuable, and no checkpoints.
fn memory(entries: u32) -> [PrefixStore; 2] {
    let mut store = PrefixStore::new(1 << 20, true);
    for of in 0..entries {
        store.insert(0, &tokens(of), state(0, &tokens(of)));
    }
    [store, PrefixStore::new(0, false)]
}

impl Bench {
    fn begin_move(&mut self, [prefixes, checkpoints]: &mut [PrefixStore; 2]) -> DiskMove {
        DiskMove::begin([prefixes, checkpoints], &mut self.tier, UNTIL)
    }

    fn go_on(
        &mut self,
        moving: &mut DiskMove,
        [prefixes, checkpoints]: &mut [PrefixStore; 2],
        now: Time,
    ) -> bool {
        moving.advance([prefixes, checkpoints], &mut self.tier, now)
    }

    /// The first tokens of the entries, the most valuable last.
    fn order(&self) -> Vec<Token> {
        let order = self.tier.index.of(PREFIX).by_value();
        order.map(|(_, prefix)| prefix.tokens[0]).collect()
    }
}

/// What waits is bounded all the time, and what is valuable in memory is so on the disk, for this engine and the next.
#[test]
fn the_memory_becomes_free_as_it_is_written() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, wide());
    let entries = 3 * ORDERS_MAX as u32;
    let mut memory = memory(entries);
    let mut moving = bench.begin_move(&mut memory);
    disk.set(DiskFaults::HELD);
    for written in 1..=3 {
        let is_done = bench.go_on(&mut moving, &mut memory, Time::ZERO);
        assert_eq!(is_done, written == 3);
        assert_eq!(bench.tier.writes.entries(), ORDERS_MAX);
        assert_eq!(memory[0].len(), (3 - written) * ORDERS_MAX);
        let more = bench.go_on(&mut moving, &mut memory, Time::ZERO);
        assert_eq!(more, written == 3, "nothing has room");
        disk.set(DiskFaults::default());
        bench.settle();
        disk.set(DiskFaults::HELD);
    }
    disk.set(DiskFaults::default());
    let expected = in_order(entries as usize);
    assert_eq!(bench.order(), expected);
    drop(bench);
    assert_eq!(Bench::new(&disk, wide()).order(), expected);
}

/// There is no room for the others, which take memory for nothing.
#[test]
fn the_most_valuable_entries_that_fit_are_moved() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    for of in 900..920 {
        bench.offer(PREFIX, 0, &tokens(of));
        bench.settle();
    }
    let mut memory = memory(40);
    let mut moving = bench.begin_move(&mut memory);
    let fitting = memory[0].len();
    assert!((5..20).contains(&fitting), "{fitting}");
    assert!(bench.go_on(&mut moving, &mut memory, Time::ZERO));
    bench.settle();
    assert!(disk.bytes() <= LIMIT);
    let first = 40 - fitting as u32;
    let expected: Vec<Token> = (first..40).map(|of| of * 100).collect();
    assert!(bench.order().ends_with(&expected), "{:?}", bench.order());
}

#[test]
fn what_is_there_is_neither_kept_nor_written_again() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    for of in [2, 0] {
        bench.offer(PREFIX, 0, &tokens(of));
    }
    bench.settle();
    disk.set(DiskFaults::HELD);
    let mut memory = memory(3);
    let mut moving = bench.begin_move(&mut memory);
    assert_eq!(memory[0].len(), 1);
    assert!(bench.go_on(&mut moving, &mut memory, Time::ZERO));
    disk.set(DiskFaults::default());
    bench.settle();
    assert_eq!((disk.files(), bench.order()), (3, vec![0, 100, 200]));
}

/// The files are not listed in time, or the writing ends in the middle.
#[test]
fn what_cannot_be_written_is_dropped() {
    let disk = Arc::<VirtualDisk>::default();
    disk.set(DiskFaults::HELD);
    let mut bench = Bench {
        tier: DiskTier::start(Arc::clone(&disk) as _, terms(), Arc::new(|| {})).unwrap(),
        stats: EngineStats::default(),
    };
    let mut entries = memory(3);
    let mut moving = bench.begin_move(&mut entries);
    assert!(!bench.go_on(&mut moving, &mut entries, Time::ZERO));
    assert_eq!(entries[0].len(), 3, "they serve prompts meanwhile");
    assert!(bench.go_on(&mut moving, &mut entries, UNTIL));
    assert_eq!((entries[0].len(), bench.tier.queued_bytes()), (0, 0));
    disk.set(DiskFaults {
        room: Some(10),
        ..DiskFaults::default()
    });
    bench.settle();
    let mut bench = Bench::new(&disk, wide());
    let mut entries = memory(2 * ORDERS_MAX as u32);
    let mut moving = bench.begin_move(&mut entries);
    assert!(!bench.go_on(&mut moving, &mut entries, Time::ZERO));
    bench.settle();
    assert!(bench.go_on(&mut moving, &mut entries, Time::ZERO));
    assert_eq!((entries[0].len(), disk.files(), bench.entries()), (0, 0, 0));
}

/// A prompt has used what was to be moved: others took its place in memory, or it could not be restored.
#[test]
fn what_has_left_the_memory_meanwhile_is_passed_over() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    let mut entries = memory(4);
    let mut moving = bench.begin_move(&mut entries);
    let id = entries[0].find(0, &tokens(1)).unwrap().id;
    entries[0].remove(id);
    entries[0].insert(0, &tokens(7), state(0, &tokens(7)));
    assert!(bench.go_on(&mut moving, &mut entries, Time::ZERO));
    bench.settle();
    assert_eq!(bench.order(), [0, 200, 300]);
    assert_eq!(entries[0].len(), 1, "what comes later stays");
}

/// It was read from the disk long ago and was used in memory alone since then.
#[test]
fn what_is_there_is_not_removed_for_less_valuable_entries_of_the_move() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    for of in [0].into_iter().chain(901..910) {
        bench.offer(PREFIX, 0, &tokens(of));
        bench.settle();
    }
    assert!(bench.order().contains(&0));
    let mut memory = memory(0);
    for of in [1, 2, 3, 0] {
        memory[0].insert(0, &tokens(of), state(0, &tokens(of)));
    }
    let mut moving = bench.begin_move(&mut memory);
    assert!(bench.go_on(&mut moving, &mut memory, Time::ZERO));
    bench.settle();
    let order = bench.order();
    assert!(order.ends_with(&[100, 200, 300, 0]), "{order:?}");
}

/// A limit that has room for everything.
fn wide() -> DiskTerms {
    DiskTerms {
        limit: 1 << 30,
        ..terms()
    }
}

/// The order of so many entries of [`memory`].
fn in_order(entries: usize) -> Vec<Token> {
    (0..entries as u32).map(|of| of * 100).collect()
}

/// A move of which half is written.
fn half_moved(disk: &Arc<VirtualDisk>) -> (Bench, [PrefixStore; 2], DiskMove) {
    let mut bench = Bench::new(disk, wide());
    let mut memory = memory(2 * ORDERS_MAX as u32);
    let mut moving = bench.begin_move(&mut memory);
    assert!(!bench.go_on(&mut moving, &mut memory, Time::ZERO));
    bench.settle();
    (bench, memory, moving)
}

/// Two models need memory one after the other.
#[test]
fn a_move_that_begins_anew_keeps_the_order() {
    let disk = Arc::<VirtualDisk>::default();
    let (mut bench, mut memory, mut moving) = half_moved(&disk);
    let [prefixes, checkpoints] = &mut memory;
    moving.begin_again([prefixes, checkpoints], &mut bench.tier, UNTIL);
    assert!(bench.go_on(&mut moving, &mut memory, Time::ZERO));
    bench.settle();
    assert_eq!(bench.order(), in_order(2 * ORDERS_MAX));
    drop(bench);
    assert_eq!(Bench::new(&disk, wide()).order(), in_order(2 * ORDERS_MAX));
}

/// One that the disk has no room for at all is no reason to lose the others.
#[test]
fn an_entry_above_the_limit_is_left_out_alone() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    let mut memory = memory(3);
    // So many tokens make it the most valuable one.
    let long: Vec<Token> = (10_000..100_000).collect();
    let huge: Vec<u8> = vec![0; LIMIT + 1];
    memory[0].insert(0, &long, huge);
    let order: Vec<Token> = memory[0].by_value().map(|it| it.1.tokens[0]).collect();
    assert_eq!(order, [0, 100, 200, 10_000]);
    let mut moving = bench.begin_move(&mut memory);
    assert!(bench.go_on(&mut moving, &mut memory, Time::ZERO));
    bench.settle();
    assert_eq!(bench.order(), [0, 100, 200]);
}

/// The model is unloaded for the other one before all is written.
#[test]
fn the_end_of_an_engine_goes_on_with_a_move() {
    let disk = Arc::<VirtualDisk>::default();
    let (bench, memory, moving) = half_moved(&disk);
    let Bench { tier, stats } = bench;
    let [prefixes, checkpoints] = &memory;
    let long = Duration::from_secs(60);
    let written = tier.finish([prefixes, checkpoints], moving.used(), long, &stats);
    assert_eq!(written, ORDERS_MAX);
    assert_eq!(Bench::new(&disk, wide()).order(), in_order(2 * ORDERS_MAX));
}
