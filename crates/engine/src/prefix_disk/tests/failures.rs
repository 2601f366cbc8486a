//! A disk that fails or hangs: what that costs, and what it does not.

use super::super::reads::MEASURED_BYTES_MIN;
use super::*;

#[test]
fn a_read_that_fails_costs_its_entry_and_nothing_else() {
    let reads_fail = DiskFaults {
        reads_fail: true,
        ..DiskFaults::default()
    };
    let cut = |at| DiskFaults {
        cut_at: Some(at),
        ..DiskFaults::default()
    };
    let vanish = |disk: &VirtualDisk| disk.remove_all();
    let flip = |disk: &VirtualDisk| {
        disk.each(|_, bytes| {
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
            }
        });
    };
    let faults: [&dyn Fn(&VirtualDisk); 6] = [
        &|disk| disk.set(reads_fail),
        &|disk| disk.set(cut(0)),
        &|disk| disk.set(cut(100)),
        &|disk| disk.set(cut(1000)),
        &vanish,
        &flip,
    ];
    for (number, go_wrong) in (1..).zip(faults) {
        let disk = Arc::<VirtualDisk>::default();
        let mut bench = Bench::new(&disk, terms());
        bench.offer(PREFIX, 0, &tokens(1));
        bench.settle();
        go_wrong(&disk);
        assert_eq!(bench.read(PREFIX, 0, &tokens(1)), None, "{number}");
        assert_eq!(
            (bench.entries(), bench.stats.prefix_disk_failures.get()),
            (0, 1)
        );
        disk.set(DiskFaults::default());
        bench.offer(PREFIX, 0, &tokens(1));
        bench.settle();
        assert!(bench.read(PREFIX, 0, &tokens(1)).is_some(), "{number}");
        // One that could not be read may be whole.
        let left = 1 + usize::from(number == 1);
        assert_eq!(disk.files(), left, "{number}");
    }
}

/// A file in the place of another one: of another scope, whose tokens are the same.
#[test]
fn a_file_with_another_prefix_is_not_used() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 1, &tokens(1));
    bench.offer(PREFIX, 2, &tokens(2));
    bench.settle();
    let mut files = Vec::new();
    disk.each(|_, bytes| files.push(bytes.clone()));
    disk.each(|_, bytes| *bytes = files.pop().unwrap());
    assert_eq!(bench.read(PREFIX, 1, &tokens(1)), None);
    assert_eq!(bench.read(PREFIX, 2, &tokens(2)), None);
    assert_eq!(bench.entries(), 0);
}

#[test]
fn a_full_disk_ends_the_writing_and_not_the_reading() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    bench.settle();
    disk.set(DiskFaults {
        room: Some(disk.bytes() + 10),
        ..DiskFaults::default()
    });
    bench.offer(PREFIX, 0, &tokens(2));
    bench.settle();
    assert_eq!(bench.entries(), 1);
    disk.set(DiskFaults::default());
    bench.offer(PREFIX, 0, &tokens(3));
    bench.settle();
    assert_eq!((bench.entries(), disk.files()), (1, 1));
    assert!(bench.read(PREFIX, 0, &tokens(1)).is_some());
    drop(bench);
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(3));
    bench.settle();
    assert_eq!(disk.files(), 2, "the next engine tries again");
}

#[test]
fn a_folder_that_cannot_be_opened_leaves_a_tier_that_does_nothing() {
    let disk = Arc::<VirtualDisk>::default();
    disk.set(DiskFaults {
        opens_fail: true,
        ..DiskFaults::default()
    });
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    bench.settle();
    assert_eq!((bench.entries(), disk.files()), (0, 0));
    assert!(!bench.tier.is_opening());
}

#[test]
fn a_slow_disk_is_known_after_one_read_and_tried_again_later() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    assert_eq!(bench.tier.time_to_read(&[]), Duration::ZERO);
    let head = crate::prefix_entry::EntryHead {
        kind: PREFIX,
        scope: 0,
        tokens: tokens(1).into(),
        state: MEASURED_BYTES_MIN,
    };
    bench.offer(PREFIX, 0, &tokens(1));
    bench.settle();
    let id = bench.tier.find(PREFIX, 0, &tokens(1)).unwrap().id;
    let file = bench.tier.read(PREFIX, id).unwrap();
    let result = Ok((head, vec![0; MEASURED_BYTES_MIN]));
    let took = Duration::from_secs(1);
    bench
        .tier
        .take(DiskReply::Read { file, result, took }, &bench.stats);
    let slow = bench.tier.time_to_read(&[(PREFIX, id)]);
    assert!(slow > Duration::from_millis(10), "{slow:?}");
    (0..200).for_each(|_| bench.tier.was_too_slow());
    assert!(bench.tier.time_to_read(&[(PREFIX, id)]) < slow / 100);
}

/// Nobody waits for it a second time.
#[test]
fn a_disk_that_answers_no_read_is_given_up() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    bench.settle();
    disk.set(DiskFaults::HELD);
    let id = bench.tier.find(PREFIX, 0, &tokens(1)).unwrap().id;
    let wait = DiskWait::Files([bench.tier.read(PREFIX, id), None]);
    for (seconds, waits) in [(0, true), (9, true), (10, false)] {
        let now = Time::ZERO + Duration::from_secs(seconds);
        bench.tier.poll(&bench.stats, now);
        let found = bench.tier.find(PREFIX, 0, &tokens(1)).is_some();
        assert_eq!((bench.tier.is_pending(wait), found), (waits, waits));
    }
    assert_eq!((bench.entries(), bench.tier.queued_bytes()), (0, 0));
    disk.set(DiskFaults::default());
    assert_eq!(bench.settle().len(), 0, "it comes too late");
}

/// A disk may take what is written, for a while, and read nothing.
#[test]
fn what_is_written_does_not_prolong_the_wait_for_what_is_read() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    bench.settle();
    disk.set(DiskFaults {
        reads_held: true,
        ..DiskFaults::default()
    });
    let id = bench.tier.find(PREFIX, 0, &tokens(1)).unwrap().id;
    let wait = DiskWait::Files([bench.tier.read(PREFIX, id), None]);
    for (number, (seconds, waits)) in (2..).zip([(0, true), (9, true), (10, false)]) {
        bench.offer(PREFIX, 0, &tokens(number));
        while disk.files() < number as usize {
            std::thread::yield_now();
        }
        let now = Time::ZERO + Duration::from_secs(seconds);
        bench.tier.poll(&bench.stats, now);
        assert_eq!(bench.tier.is_pending(wait), waits, "{seconds}");
    }
    disk.set(DiskFaults::default());
}

/// What waits for it would take memory that nothing could free.
#[test]
fn a_disk_that_takes_no_file_is_given_up_with_what_waits_for_it() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    disk.set(DiskFaults::HELD);
    let waiting: Vec<_> = (1..4).map(|of| entry(PREFIX, 0, &tokens(of))).collect();
    let held: Vec<_> = waiting
        .iter()
        .map(|it| Arc::downgrade(&it.prefix))
        .collect();
    for entry in waiting {
        bench.tier.offer(entry);
    }
    for (seconds, waits) in [(0, true), (59, true), (60, false)] {
        bench
            .tier
            .poll(&bench.stats, Time::ZERO + Duration::from_secs(seconds));
        let found = bench.tier.find(PREFIX, 0, &tokens(1)).is_some();
        assert_eq!((bench.tier.queued_bytes() > 0, found), (waits, waits));
    }
    assert_eq!(bench.stats.prefix_disk_failures.get(), 1);
    // The one that the disk has is not waiting.
    assert!(held[1..].iter().all(|state| state.upgrade().is_none()));
    disk.set(DiskFaults::default());
    bench.settle();
    assert!(disk.files() <= 1, "what was let go of is not written");
}

/// Until the longer one is there, the shorter one serves.
#[test]
fn a_file_is_removed_only_once_another_has_taken_its_place() {
    let longer = [tokens(1), tokens(2)].concat();
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    bench.settle();
    disk.set(DiskFaults {
        writes_fail: true,
        ..DiskFaults::default()
    });
    bench.offer(PREFIX, 0, &longer);
    bench.settle();
    assert_eq!((bench.entries(), disk.files()), (0, 1));
    drop(bench);
    disk.set(DiskFaults::default());
    let mut bench = Bench::new(&disk, terms());
    assert_eq!(bench.read(PREFIX, 0, &longer), Some(tokens(1)));
    // A disk without room for both has room for one.
    disk.set(DiskFaults {
        room: Some(2 * disk.bytes()),
        ..DiskFaults::default()
    });
    bench.offer(PREFIX, 0, &longer);
    bench.settle();
    assert_eq!(bench.read(PREFIX, 0, &longer), Some(longer));
    assert_eq!(disk.files(), 1);
}

/// Too many open files, for example.
#[test]
fn errors_that_may_pass_cost_no_files() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    for of in 1..3 {
        bench.offer(PREFIX, 0, &tokens(of));
    }
    bench.settle();
    let reads_fail = DiskFaults {
        reads_fail: true,
        ..DiskFaults::default()
    };
    disk.set(reads_fail);
    assert_eq!(bench.read(PREFIX, 0, &tokens(1)), None);
    drop(bench);
    // Nor at the start.
    drop(Bench::new(&disk, terms()));
    disk.set(DiskFaults::default());
    let mut bench = Bench::new(&disk, terms());
    assert_eq!(bench.read(PREFIX, 0, &tokens(1)), Some(tokens(1)));
    assert_eq!(bench.read(PREFIX, 0, &tokens(2)), Some(tokens(2)));
    // Several in a row end the writing.
    let writes_fail = DiskFaults {
        writes_fail: true,
        ..DiskFaults::default()
    };
    for (failures, goes_on) in [(2, true), (3, false)] {
        disk.set(writes_fail);
        for of in 0..failures {
            bench.offer(PREFIX, 0, &tokens(10 + of));
            bench.settle();
        }
        disk.set(DiskFaults::default());
        let files = disk.files();
        bench.offer(PREFIX, 0, &tokens(20 + failures));
        bench.settle();
        assert_eq!(disk.files() > files, goes_on);
    }
}
