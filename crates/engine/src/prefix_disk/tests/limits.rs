//! What files, and what waits, take at most.

use super::super::writes::{ORDERS_MAX, WRITING_BYTES_MAX};
use super::*;

/// The limit holds for what is there, with the files of other settings, which go first; and after it was lowered.
#[test]
fn the_files_take_no_more_than_the_limit() {
    let disk = Arc::<VirtualDisk>::default();
    let other = DiskTerms {
        identity: "another".to_owned(),
        ..terms()
    };
    let mut bench = Bench::new(&disk, other);
    (0..5).for_each(|of| bench.offer(PREFIX, 0, &tokens(of)));
    bench.settle();
    drop(bench);
    let mut bench = Bench::new(&disk, terms());
    for of in 0..50 {
        bench.offer(PREFIX, 0, &tokens(of));
        bench.settle();
        assert!(disk.bytes() <= LIMIT);
    }
    let kept = bench.entries();
    assert!(disk.files() < kept + 5, "those of other settings go first");
    assert!(kept >= 5);
    let newest = bench.read(PREFIX, 0, &tokens(49));
    assert!(newest.is_some() && bench.read(PREFIX, 0, &tokens(1)).is_none());
    drop(bench);
    let less = DiskTerms {
        limit: LIMIT / 2,
        ..terms()
    };
    let mut bench = Bench::new(&disk, less);
    bench.settle();
    assert!(disk.bytes() <= LIMIT / 2 && disk.files() >= 2);
    assert!(
        bench.read(PREFIX, 0, &tokens(49)).is_some(),
        "the newest stay"
    );
}

/// While the disk hangs, what waits to be written is bounded, and what is more is dropped.
#[test]
fn what_waits_for_a_slow_disk_is_bounded() {
    let disk = Arc::<VirtualDisk>::default();
    let big = DiskTerms {
        limit: 1 << 30,
        ..terms()
    };
    let mut bench = Bench::new(&disk, big);
    let held = DiskFaults::HELD;
    disk.set(held);
    for of in 0..2 * ORDERS_MAX as u32 {
        bench.offer(PREFIX, 0, &tokens(of));
    }
    assert_eq!(
        (bench.entries(), bench.tier.writes.entries()),
        (ORDERS_MAX, ORDERS_MAX)
    );
    // It is in memory.
    assert!(bench.tier.find(PREFIX, 0, &tokens(3)).is_some());
    disk.set(DiskFaults::default());
    bench.settle();
    assert_eq!((disk.files(), bench.tier.queued_bytes()), (ORDERS_MAX, 0));
    let large = SavedEntry {
        kind: PREFIX,
        scope: 0,
        prefix: Arc::new(SavedPrefix {
            tokens: tokens(500).into(),
            state: vec![0; WRITING_BYTES_MAX].into(),
        }),
    };
    disk.set(held);
    bench.tier.offer(large);
    bench.offer(PREFIX, 0, &tokens(501));
    assert_eq!(bench.entries(), ORDERS_MAX + 1, "one alone may be larger");
    disk.set(DiskFaults::default());
    bench.settle();
}

/// At most so many files, and so many bytes, are read at a time; a file that two prompts want is read once.
#[test]
fn what_is_read_at_a_time_is_bounded() {
    let disk = Arc::<VirtualDisk>::default();
    let terms = DiskTerms {
        // Three states at a time.
        state_max: 6 * 20 * STATE,
        limit: 1 << 30,
        ..terms()
    };
    let mut bench = Bench::new(&disk, terms);
    for of in 0..8 {
        bench.offer(PREFIX, 0, &tokens(of));
    }
    bench.settle();
    disk.set(DiskFaults::HELD);
    let read = |bench: &mut Bench, of| {
        let found = bench.tier.find(PREFIX, 0, &tokens(of)).unwrap();
        bench.tier.read(PREFIX, found.id)
    };
    let files: Vec<_> = (0..8).map(|of| read(&mut bench, of)).collect();
    assert_eq!(files.iter().flatten().count(), 3);
    assert_eq!(read(&mut bench, 0), files[0]);
    let wait = DiskWait::Files([files[0], None]);
    assert!(bench.tier.is_pending(wait));
    disk.set(DiskFaults::default());
    assert_eq!(bench.settle().len(), 3);
    assert!(!bench.tier.is_pending(wait));
    assert_eq!(bench.tier.reads.bytes(), 0);
}
