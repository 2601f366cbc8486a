//! The tier over a disk in memory: what is written, found and read.

use super::virtual_disk::{DiskFaults, VirtualDisk};
use super::*;

mod endings;
mod failures;
mod folders;
mod limits;
mod moves;
mod operations;

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
        assert_eq!(
            *prefix.state.whole().unwrap(),
            state(*scope, &prefix.tokens)
        );
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
        state: state(scope, tokens).into(),
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
