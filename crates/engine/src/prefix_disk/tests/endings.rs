//! The end of a tier: what is written then, and how long it takes.

use super::*;
use crate::prefix_store::PrefixStore;

/// At the end of the engine: what fits, the most valuable first, and what is there already is not written again.
#[test]
fn the_memory_is_written_at_the_end() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    let mut memory = PrefixStore::new(1 << 20, true);
    for of in 1..40 {
        memory.insert(0, &tokens(of), state(0, &tokens(of)));
    }
    let none = PrefixStore::new(0, false);
    let Bench { tier, stats } = bench;
    let written = tier.finish([&memory, &none], SystemTime::now(), LONG, &stats);
    assert!(
        disk.bytes() <= LIMIT && (5..20).contains(&written),
        "{written}"
    );
    let mut bench = Bench::new(&disk, terms());
    let order = bench.tier.index.of(PREFIX).by_value();
    let order: Vec<Token> = order.map(|(_, prefix)| prefix.tokens[0]).collect();
    assert!(
        order.is_sorted() && order.last() == Some(&3900),
        "{order:?}"
    );
    assert!(bench.read(PREFIX, 0, &tokens(39)).is_some());
    bench.tier.offer(entry(PREFIX, 0, &tokens(39)));
    let Bench { tier, stats } = bench;
    assert_eq!(
        tier.finish(
            [&PrefixStore::new(0, true), &none],
            SystemTime::now(),
            LONG,
            &stats
        ),
        0
    );
}

/// What is on the disk already is as new as its value in memory after the next start.
#[test]
fn the_end_marks_what_was_used() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    let mut memory = PrefixStore::new(1 << 20, true);
    for of in 1..4 {
        bench.offer(PREFIX, 0, &tokens(of));
        bench.settle();
    }
    for of in [2, 3, 1] {
        memory.insert(0, &tokens(of), state(0, &tokens(of)));
    }
    let Bench { tier, stats } = bench;
    let written = tier.finish(
        [&memory, &PrefixStore::new(0, false)],
        SystemTime::now(),
        LONG,
        &stats,
    );
    assert_eq!((written, disk.files()), (0, 3));
    let mut bench = Bench::new(&disk, terms());
    let arrived: Vec<Token> = (0..4)
        .flat_map(|_| bench.settle())
        .map(|entry| entry.prefix.tokens[0])
        .collect();
    assert_eq!(arrived, [100, 300, 200]);
}

/// The end of a disk that hangs, in the middle of its work or at its start, with files to be written or not.
#[test]
fn the_end_does_not_wait_for_ever() {
    for opened in [true, false] {
        for finishes in [true, false] {
            let disk = Arc::<VirtualDisk>::default();
            let mut bench = Bench::new(&disk, terms());
            if !opened {
                disk.set(DiskFaults::HELD);
                bench.tier =
                    DiskTier::start(Arc::clone(&disk) as _, terms(), Arc::new(|| {})).unwrap();
            }
            disk.set(DiskFaults::HELD);
            let mut memory = PrefixStore::new(1 << 20, true);
            for of in 0..3 {
                bench.offer(PREFIX, 0, &tokens(of));
                memory.insert(0, &tokens(of + 10), state(0, &tokens(of + 10)));
            }
            let began = Instant::now();
            let Bench { tier, stats } = bench;
            if finishes {
                let none = PrefixStore::new(0, false);
                let time = Duration::from_millis(20);
                assert_eq!(
                    tier.finish([&memory, &none], SystemTime::now(), time, &stats),
                    0
                );
            } else {
                drop(tier);
            }
            assert!(began.elapsed() < LONG / 2);
            disk.set(DiskFaults::default());
        }
    }
}
