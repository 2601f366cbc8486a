//! The tier over a disk in memory with faults, and over a folder.

use proptest::prelude::*;

use super::reads::MEASURED_BYTES_MIN;
use super::virtual_disk::{DiskFaults, VirtualDisk};
use super::writes::{ORDERS_MAX, WRITING_BYTES_MAX};
use super::*;
use crate::prefix_folder::PrefixFolder;
use crate::prefix_store::PrefixStore;

const LIMIT: usize = 100_000;
const LONG: Duration = Duration::from_secs(60);
/// Bytes of a state for each token.
const STATE: usize = 50;

fn terms() -> DiskTerms {
    DiskTerms {
        identity: "a model".to_owned(),
        limit: LIMIT,
        partial: true,
        checkpoints: false,
        tokens_max: 100,
        state_max: 1 << 20,
    }
}

/// A tier whose files are listed.
struct Bench {
    tier: DiskTier,
    stats: EngineStats,
}

impl Bench {
    fn new(disk: &Arc<VirtualDisk>, terms: DiskTerms) -> Self {
        Self::over(Arc::clone(disk) as Arc<dyn PrefixDisk>, terms)
    }

    fn over(disk: Arc<dyn PrefixDisk>, terms: DiskTerms) -> Self {
        let mut bench = Self {
            tier: DiskTier::start(disk, terms, Arc::new(|| {})).unwrap(),
            stats: EngineStats::default(),
        };
        bench.tier.settle(&bench.stats);
        bench
    }

    fn offer(&mut self, kind: EntryKind, scope: u64, tokens: &[Token]) {
        self.tier.offer(entry(kind, scope, tokens));
    }

    /// Reads what a prompt begins with; returns the tokens of the entry.
    fn read(&mut self, kind: EntryKind, scope: u64, tokens: &[Token]) -> Option<Vec<Token>> {
        // What is read without being asked for does not count.
        self.tier.ahead.clear();
        self.settle();
        let found = self.tier.find(kind, scope, tokens)?;
        self.tier.read(kind, found.id)?;
        let arrived = self.settle();
        let [SavedEntry { prefix, scope, .. }] = &arrived[..] else {
            assert!(arrived.is_empty());
            return None;
        };
        assert_eq!(prefix.state, state(*scope, &prefix.tokens));
        Some(prefix.tokens.to_vec())
    }

    fn settle(&mut self) -> Vec<SavedEntry> {
        self.tier.settle(&self.stats);
        let arrived = self.tier.poll(&self.stats, Time::ZERO);
        self.tier.settle(&self.stats);
        arrived
    }

    /// All that a search finds.
    fn entries(&self) -> usize {
        EntryKind::ALL
            .into_iter()
            .map(|kind| self.tier.index.of(kind).ids_by_value().count())
            .sum()
    }
}

fn entry(kind: EntryKind, scope: u64, tokens: &[Token]) -> SavedEntry {
    let prefix = SavedPrefix {
        tokens: tokens.into(),
        state: state(scope, tokens),
    };
    let prefix = Arc::new(prefix);
    SavedEntry {
        kind,
        scope,
        prefix,
    }
}

/// Another state for each scope and tokens.
fn state(scope: u64, tokens: &[Token]) -> Vec<u8> {
    let text = format!("{scope} {tokens:?} ");
    text.bytes().cycle().take(tokens.len() * STATE).collect()
}

/// Tokens that differ from those of every other number.
fn tokens(of: u32) -> Vec<Token> {
    (0..20).map(|at| of * 100 + at).collect()
}

const PREFIX: EntryKind = EntryKind::Prefix;

#[test]
fn what_was_written_is_found_and_read_by_this_engine_and_by_the_next() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 7, &tokens(1));
    // Before it is written, and afterwards.
    for _ in 0..2 {
        let prompt = [tokens(1), tokens(2)].concat();
        assert_eq!(bench.read(PREFIX, 7, &prompt), Some(tokens(1)));
        assert_eq!(bench.read(PREFIX, 8, &prompt), None, "another scope");
        assert_eq!(bench.read(PREFIX, 7, &tokens(2)), None);
    }
    drop(bench);
    let mut bench = Bench::new(&disk, terms());
    assert_eq!(bench.read(PREFIX, 7, &tokens(1)), Some(tokens(1)));
    drop(bench);
    let other = DiskTerms {
        identity: "another".to_owned(),
        ..terms()
    };
    let mut bench = Bench::new(&disk, other);
    assert_eq!(bench.read(PREFIX, 7, &tokens(1)), None);
    assert_eq!(disk.files(), 1, "there is room for both");
}

#[test]
fn a_longer_entry_takes_the_place_of_its_beginning() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    let longer = [tokens(1), tokens(2)].concat();
    for prompt in [&tokens(1), &longer, &tokens(1)] {
        bench.offer(PREFIX, 7, prompt);
        bench.settle();
    }
    assert_eq!(disk.files(), 1);
    assert_eq!(bench.read(PREFIX, 7, &tokens(1)), Some(longer));
}

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

#[test]
fn what_was_used_last_stays_over_a_restart() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    for of in 0..3 {
        bench.offer(PREFIX, 0, &tokens(of));
        bench.settle();
    }
    assert!(bench.read(PREFIX, 0, &tokens(0)).is_some());
    drop(bench);
    let bench = Bench::new(&disk, terms());
    let order = bench.tier.index.of(PREFIX).by_value();
    let order: Vec<Token> = order.map(|(_, prefix)| prefix.tokens[0]).collect();
    assert_eq!(order, [100, 200, 0]);
}

/// An entry with a state for which there is no memory, or with more tokens than the context has, is of use after the next
/// change of the settings.
#[test]
fn what_is_too_long_at_present_is_passed_over_and_stays() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    bench.offer(EntryKind::Prefix, 0, &tokens(2)[..10]);
    bench.settle();
    drop(bench);
    let less = [
        DiskTerms {
            tokens_max: 19,
            ..terms()
        },
        DiskTerms {
            state_max: 20 * STATE - 1,
            ..terms()
        },
    ];
    for terms in less {
        let mut bench = Bench::new(&disk, terms);
        assert_eq!(bench.read(PREFIX, 0, &tokens(1)), None);
        assert!(bench.read(PREFIX, 0, &tokens(2)).is_some());
        assert_eq!(disk.files(), 2);
    }
    let mut bench = Bench::new(&disk, terms());
    assert!(bench.read(PREFIX, 0, &tokens(1)).is_some());
}

#[test]
fn checkpoints_have_half_of_the_limit_and_are_found_whole() {
    let disk = Arc::<VirtualDisk>::default();
    let terms = DiskTerms {
        checkpoints: true,
        ..terms()
    };
    let mut bench = Bench::new(&disk, terms.clone());
    for of in 0..20 {
        bench.offer(EntryKind::Checkpoint, 0, &tokens(of));
        bench.offer(PREFIX, 0, &[tokens(of), tokens(90)].concat());
        bench.settle();
    }
    assert!(disk.bytes() <= LIMIT);
    drop(bench);
    let mut bench = Bench::new(&disk, terms);
    for of in 16..20 {
        let prompt = [tokens(of), tokens(90)].concat();
        let checkpoint = bench.read(EntryKind::Checkpoint, 0, &prompt);
        assert_eq!(checkpoint, Some(tokens(of)));
        assert_eq!(bench.read(EntryKind::Checkpoint, 0, &prompt[..19]), None);
        assert_eq!(bench.read(PREFIX, 0, &prompt[..19]), Some(prompt));
    }
}

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

/// While the disk hangs, what waits to be written is bounded, and what is more is dropped.
#[test]
fn what_waits_for_a_slow_disk_is_bounded() {
    let disk = Arc::<VirtualDisk>::default();
    let big = DiskTerms {
        limit: 1 << 30,
        ..terms()
    };
    let mut bench = Bench::new(&disk, big);
    let held = DiskFaults {
        held: true,
        ..DiskFaults::default()
    };
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
            state: vec![0; WRITING_BYTES_MAX],
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
    disk.set(DiskFaults {
        held: true,
        ..DiskFaults::default()
    });
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

/// The newest entries come to the memory without being asked for, up to a part of it, one after the other.
#[test]
fn the_newest_entries_are_read_ahead() {
    let disk = Arc::<VirtualDisk>::default();
    let terms = DiskTerms {
        state_max: 6 * 20 * STATE,
        limit: 1 << 30,
        ..terms()
    };
    let mut bench = Bench::new(&disk, terms.clone());
    for of in 0..8 {
        bench.offer(PREFIX, 0, &tokens(of));
        bench.settle();
    }
    drop(bench);
    let mut bench = Bench::new(&disk, terms);
    let arrived: Vec<Token> = (0..8)
        .flat_map(|_| bench.settle())
        .map(|entry| entry.prefix.tokens[0])
        .collect();
    assert_eq!(arrived, [700, 600, 500]);
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
    let written = tier.finish([&memory, &none], LONG, &stats);
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
        tier.finish([&PrefixStore::new(0, true), &none], LONG, &stats),
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
    let written = tier.finish([&memory, &PrefixStore::new(0, false)], LONG, &stats);
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
                disk.set(HELD);
                bench.tier =
                    DiskTier::start(Arc::clone(&disk) as _, terms(), Arc::new(|| {})).unwrap();
            }
            disk.set(HELD);
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
                assert_eq!(tier.finish([&memory, &none], time, &stats), 0);
            } else {
                drop(tier);
            }
            assert!(began.elapsed() < LONG / 2);
            disk.set(DiskFaults::default());
        }
    }
}

const HELD: DiskFaults = DiskFaults {
    held: true,
    opens_fail: false,
    reads_fail: false,
    writes_fail: false,
    removals_fail: false,
    cut_at: None,
    room: None,
};

/// Nobody waits for it a second time.
#[test]
fn a_disk_that_answers_no_read_is_given_up() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = Bench::new(&disk, terms());
    bench.offer(PREFIX, 0, &tokens(1));
    bench.settle();
    disk.set(HELD);
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

#[cfg(unix)]
#[test]
fn a_folder_that_others_can_write_to_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.prefixes");
    std::fs::create_dir(&path).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for (path, mode, failures) in [(&path, 0o770, 0), (&path, 0o777, 1), (&link, 0o700, 1)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        let bench = Bench::over(Arc::new(PrefixFolder::new(path.clone())), terms());
        assert_eq!(bench.stats.prefix_disk_failures.get(), failures, "{mode:o}");
    }
}

#[test]
fn entries_are_kept_in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/m.prefixes");
    let open = || Bench::over(Arc::new(PrefixFolder::new(path.clone())), terms());
    let mut bench = open();
    for of in 0..3 {
        bench.offer(PREFIX, 5, &tokens(of));
    }
    bench.settle();
    // Two servers on one folder: the second one has no disk, and the first one's files stay.
    let mut second = open();
    second.offer(PREFIX, 5, &tokens(9));
    assert_eq!(second.read(PREFIX, 5, &tokens(0)), None);
    assert_eq!(second.stats.prefix_disk_failures.get(), 1);
    drop(second);
    assert!(bench.read(PREFIX, 5, &tokens(0)).is_some());
    drop(bench);
    // A file that is no entry, of other names, and what a killed process has left.
    std::fs::write(path.join("0000000000000077.prefix"), "no entry").unwrap();
    std::fs::write(path.join("0000000000000078.new"), "half of one").unwrap();
    let strange = [
        "+00000000000000f.prefix",
        "00000000000000AB.prefix",
        "notes.txt",
    ];
    for name in strange {
        std::fs::write(path.join(name), "of somebody").unwrap();
    }
    std::fs::create_dir(path.join("0000000000000079.new")).unwrap();
    let mut bench = open();
    for of in 0..3 {
        assert_eq!(bench.read(PREFIX, 5, &tokens(of)), Some(tokens(of)));
    }
    let names = std::fs::read_dir(&path).unwrap();
    let mut names: Vec<_> = names
        .map(|it| it.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected = [
        "+00000000000000f.prefix",
        "0000000000000000.prefix",
        "0000000000000001.prefix",
        "0000000000000002.prefix",
        "0000000000000079.new",
        "00000000000000AB.prefix",
        "lock",
        "notes.txt",
    ];
    assert_eq!(names, expected);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |name: &str| {
            let metadata = std::fs::metadata(path.join(name)).unwrap();
            metadata.permissions().mode() & 0o777
        };
        assert_eq!(["", expected[1], "lock"].map(mode), [0o700, 0o600, 0o600]);
    }
}

#[cfg(unix)]
#[test]
fn links_and_pipes_in_a_folder_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.prefixes");
    let open = || Bench::over(Arc::new(PrefixFolder::new(path.clone())), terms());
    let mut bench = open();
    bench.offer(PREFIX, 5, &tokens(1));
    bench.settle();
    drop(bench);
    let other = folder.path().join("other");
    std::fs::rename(path.join("0000000000000000.prefix"), &other).unwrap();
    std::os::unix::fs::symlink(&other, path.join("0000000000000000.prefix")).unwrap();
    let pipe = path.join("0000000000000001.prefix");
    let made = std::process::Command::new("mkfifo").arg(pipe).status();
    assert!(made.unwrap().success());
    let mut bench = open();
    assert_eq!(bench.read(PREFIX, 5, &tokens(1)), None);
    assert!(other.exists());
    drop(bench);
    std::fs::remove_file(path.join("lock")).unwrap();
    std::os::unix::fs::symlink(&other, path.join("lock")).unwrap();
    let bench = open();
    assert_eq!(bench.stats.prefix_disk_failures.get(), 1);
}

#[derive(Clone, Debug)]
enum Operation {
    Offer(u64, Vec<Token>),
    Read(u64, Vec<Token>),
    Settle,
    Restart,
    GoWrong(u8),
    Damage(u8),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let text = || prop::collection::vec(0_u32..3, 1..12);
    let one = prop_oneof![
        6 => (0_u64..2, text()).prop_map(|(scope, text)| Operation::Offer(scope, text)),
        6 => (0_u64..2, text()).prop_map(|(scope, text)| Operation::Read(scope, text)),
        2 => Just(Operation::Settle),
        1 => Just(Operation::Restart),
        1 => (0_u8..5).prop_map(Operation::GoWrong),
        1 => any::<u8>().prop_map(Operation::Damage),
    ];
    prop::collection::vec(one, 1..60)
}

fn faults(number: u8) -> DiskFaults {
    let none = DiskFaults::default();
    match number {
        0 => DiskFaults {
            reads_fail: true,
            ..none
        },
        1 => DiskFaults {
            cut_at: Some(60),
            ..none
        },
        2 => DiskFaults {
            room: Some(20_000),
            ..none
        },
        3 => DiskFaults {
            opens_fail: true,
            ..none
        },
        _ => none,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever happens: what arrives is what was saved for its scope and tokens, of the prompt that asked; the files stay
    /// within the limit; and every read ends.
    #[test]
    fn what_is_read_was_saved_and_the_limit_holds(
        partial in any::<bool>(),
        operations in operations(),
    ) {
        let disk = Arc::<VirtualDisk>::default();
        let terms = DiskTerms { partial, limit: 40_000, ..terms() };
        let mut bench = Bench::new(&disk, terms.clone());
        for operation in operations {
            match operation {
                Operation::Offer(scope, text) => bench.offer(PREFIX, scope, &text),
                Operation::Read(scope, text) => {
                    if let Some(read) = bench.read(PREFIX, scope, &text) {
                        prop_assert_eq!(read[0], text[0]);
                        prop_assert!(partial || text.starts_with(&read));
                    }
                }
                Operation::Settle => {
                    for SavedEntry { scope, prefix, .. } in bench.settle() {
                        prop_assert_eq!(&prefix.state, &state(scope, &prefix.tokens));
                    }
                }
                Operation::Restart => {
                    drop(bench);
                    bench = Bench::new(&disk, terms.clone());
                }
                Operation::GoWrong(number) => disk.set(faults(number)),
                Operation::Damage(at) => disk.each(|_, bytes| {
                    let at = at as usize * 3 % bytes.len();
                    bytes[at] ^= 0x10;
                }),
            }
            prop_assert!(disk.bytes() <= terms.limit);
        }
        bench.settle();
        prop_assert_eq!((bench.tier.writes.is_done(), bench.tier.reads.is_empty()), (true, true));
        prop_assert_eq!(bench.tier.queued_bytes(), 0);
    }
}
