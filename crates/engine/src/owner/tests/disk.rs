//! Prefixes on a disk: what they save, what they must not delay, and what happens if they cannot be read.

mod moves;

use std::sync::Arc;
use std::time::Duration;

use super::harness::{Answer, Bench, read, request_for};
use crate::prefix_disk::virtual_disk::{DiskFaults, VirtualDisk};
use crate::scripted::{Config as Script, Script as Name};
use crate::{Config, PrefixSharing, RequestHandle};

/// Memory for a few prompts.
const RAM_BYTES: usize = 12_000;

fn script() -> Script {
    Script {
        saves: true,
        parallel: 2,
        kept_prefixes: 1,
        context_tokens: 600,
        cells: Some(600),
        ..Script::default()
    }
}

fn config(ram_bytes: usize) -> Config {
    Config {
        prefix_ram_bytes: Some(ram_bytes),
        // Answers are read at their end.
        outbox_events: 10_000,
        ..Config::default()
    }
}

/// An engine with so much memory, and a disk.
fn bench_over(disk: &Arc<VirtualDisk>, script: Script, ram_bytes: usize) -> Bench {
    let mut bench = Bench::with(script, config(ram_bytes));
    let waker = bench.owner.admission.waker();
    let disk = Arc::clone(disk);
    bench.owner.requests.slots.start_disk(disk, 1 << 30, waker);
    bench
}

impl Bench {
    fn settle_disk(&mut self) {
        let requests = &mut self.owner.requests;
        requests.slots.tiers_mut().settle_disk(&requests.stats);
    }

    /// Steps until a request has ended, with a disk that has done everything before each step.
    fn answer_with_disk(&mut self, request: &str) -> Answer {
        let mut handle = self.submit(request_for(request));
        self.finish_with_disk(&mut handle)
    }

    fn finish_with_disk(&mut self, handle: &mut RequestHandle) -> Answer {
        for _ in 0..10_000 {
            self.settle_disk();
            self.step();
            if self.owner.is_empty() {
                return read(handle);
            }
        }
        panic!("the request does not end");
    }

    /// In little time, while a disk hangs.
    fn step_until_empty(&mut self) {
        for _ in 0..1_000 {
            if self.owner.is_empty() {
                return;
            }
            self.step();
        }
        panic!("a request does not end");
    }

    fn end(mut self) {
        let requests = &mut self.owner.requests;
        requests.slots.close_disk(&requests.stats);
    }
}

fn cached(answer: &Answer) -> usize {
    answer.usage.unwrap().cached_tokens as usize
}

fn prompt(of: usize) -> String {
    format!("conversation {of:02} begins with a question that is long enough to be saved")
}

fn kinds() -> [Script; 3] {
    [(true, 0), (true, 8), (false, 0)].map(|(truncates, window_tokens)| Script {
        truncates,
        window_tokens,
        ..script()
    })
}

/// Of which neither the cells nor the memory hold more than a few.
#[test]
fn conversations_that_lost_their_memory_go_on_where_they_were() {
    for script in kinds() {
        let disk = Arc::<VirtualDisk>::default();
        let mut bench = bench_over(&disk, script.clone(), RAM_BYTES);
        let mut cold = Bench::with(script, config(0));
        let mut texts: Vec<String> = (0..20).map(prompt).collect();
        for round in 0..3 {
            for text in &mut texts {
                let answer = bench.answer_with_disk(text);
                assert_eq!(answer.text(), cold.answer(request_for(text)).text());
                if round > 0 {
                    let expected = text.len() - 20;
                    assert!(
                        cached(&answer) >= expected,
                        "{round}: {} of {expected}",
                        cached(&answer)
                    );
                }
                text.push_str(answer.text());
                text.push_str(" and so on");
            }
            let stats = bench.engine.stats();
            assert!(stats.prefix_saved_bytes.get() <= RAM_BYTES as u64);
        }
        let stats = bench.engine.stats();
        assert!(stats.prefix_disk_read_bytes.get() > 20 * 8 * 60);
        assert!(stats.prefix_disk_written_bytes.get() > 20 * 8 * 60);
        assert!(stats.prefix_disk_bytes.get() > 0);
        assert_eq!(stats.prefix_disk_failures.get(), 0);
    }
}

/// Regenerated and edited answers too, which models with windows and recurrent ones need checkpoints for.
#[test]
fn conversations_go_on_after_a_restart() {
    for script in kinds() {
        let disk = Arc::<VirtualDisk>::default();
        let mut bench = bench_over(&disk, script.clone(), 1 << 20);
        let answers: Vec<String> = (0..10)
            .map(|of| bench.answer_with_disk(&prompt(of)).text().to_owned())
            .collect();
        bench.end();
        let mut bench = bench_over(&disk, script.clone(), 1 << 20);
        for of in (0..10).rev() {
            let again = bench.answer_with_disk(&prompt(of));
            assert_eq!(again.text(), answers[of]);
            assert_eq!(cached(&again), prompt(of).len(), "regenerated");
            let turn = format!("{}{} and another", prompt(of), answers[of]);
            let turn = bench.answer_with_disk(&turn);
            assert!(cached(&turn) >= prompt(of).len() + answers[of].len() - 1);
        }
        // Of another model, and of another caller.
        let mut other = bench_over(
            &disk,
            Script {
                name: "other".into(),
                ..script
            },
            1 << 20,
        );
        assert_eq!(cached(&other.answer_with_disk(&prompt(3))), 0);
        let mut request = request_for(&prompt(3));
        request.prefix_scope = 9;
        let mut handle = bench.submit(request);
        assert_eq!(cached(&bench.finish_with_disk(&mut handle)), 0);
    }
}

/// Fills the disk with a few conversations, and returns an engine that has read none of them.
fn restarted(disk: &Arc<VirtualDisk>) -> Bench {
    let mut bench = bench_over(disk, script(), 1 << 20);
    for of in 0..4 {
        bench.answer_with_disk(&prompt(of));
    }
    bench.end();
    bench_over(disk, script(), 1 << 20)
}

/// A disk that hangs, at the start or in the middle of its work: others go on, and whoever waits does so for a time only.
#[test]
fn a_disk_that_hangs_delays_its_own_prompts_and_not_for_ever() {
    for opened in [false, true] {
        let disk = Arc::<VirtualDisk>::default();
        let mut bench = restarted(&disk);
        if opened {
            bench.settle_disk();
        }
        disk.set(DiskFaults::HELD);
        let mut waits = bench.submit(request_for(&prompt(0)));
        bench.step();
        let wake_at = bench.step().wake_at.expect("it does not wait for ever");
        assert!(wake_at > bench.now);
        if opened {
            let mut other = bench.submit(request_for("short"));
            for _ in 0..20 {
                bench.step();
            }
            assert!(
                read(&mut other).usage.is_some(),
                "another prompt is answered"
            );
        }
        assert!(read(&mut waits).choices.is_empty());
        bench.step_after(Duration::from_secs(6));
        bench.step_until_empty();
        let answer = read(&mut waits);
        assert_eq!((answer.text(), cached(&answer)), (&*prompt(0), 0));
        assert_eq!(bench.engine.stats().prefix_disk_failures.get(), 1);
        // What comes too late is there for the next one.
        disk.set(DiskFaults::default());
        assert!(cached(&bench.answer_with_disk(&prompt(0))) > 60);
        assert!(cached(&bench.answer_with_disk(&prompt(1))) > 60);
    }
}

/// What is not known to be there is not waited for long, and only once for all prompts.
#[test]
fn a_disk_that_does_not_open_delays_the_first_prompts_alone() {
    let disk = Arc::<VirtualDisk>::default();
    disk.set(DiskFaults::HELD);
    let mut bench = bench_over(&disk, script(), RAM_BYTES);
    let mut first = bench.submit(request_for(&prompt(0)));
    bench.step();
    assert_eq!(bench.owner.requests.scheduler.waiting(), 1);
    bench.step_after(Duration::from_millis(251));
    assert_eq!(bench.owner.requests.scheduler.waiting(), 0);
    bench.step_until_empty();
    assert_eq!(read(&mut first).text(), prompt(0));
    let mut second = bench.submit(request_for(&prompt(1)));
    bench.step();
    assert_eq!(bench.owner.requests.scheduler.waiting(), 0);
    bench.step_until_empty();
    assert_eq!(read(&mut second).text(), prompt(1));
    disk.set(DiskFaults::default());
}

/// Files that all callers have shared are not those of the callers without a key.
#[test]
fn what_all_have_shared_is_nobodys_when_none_is_shared() {
    let disk = Arc::<VirtualDisk>::default();
    let over = |prefix_sharing| {
        let config = Config {
            prefix_sharing,
            ..config(1 << 20)
        };
        let mut bench = Bench::with(script(), config);
        let waker = bench.owner.admission.waker();
        let disk = Arc::clone(&disk);
        bench.owner.requests.slots.start_disk(disk, 1 << 30, waker);
        bench
    };
    let mut all = over(PrefixSharing::All);
    all.answer_with_disk(&prompt(0));
    all.end();
    let mut none = over(PrefixSharing::Scope);
    assert_eq!(cached(&none.answer_with_disk(&prompt(0))), 0);
    none.end();
    let mut all = over(PrefixSharing::All);
    assert!(cached(&all.answer_with_disk(&prompt(0))) > 60);
}

#[test]
fn a_request_that_is_cancelled_while_its_prefix_is_read_is_gone() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = restarted(&disk);
    bench.settle_disk();
    disk.set(DiskFaults::HELD);
    let waits = bench.submit(request_for(&prompt(0)));
    bench.step();
    drop(waits);
    bench.settle();
    assert!(bench.owner.is_empty());
    disk.set(DiskFaults::default());
    assert!(cached(&bench.answer_with_disk(&prompt(0))) > 60);
}

#[test]
fn what_cannot_be_read_is_computed() {
    let faults: [&dyn Fn(&VirtualDisk); 4] = [
        &|disk| {
            disk.set(DiskFaults {
                reads_fail: true,
                ..DiskFaults::default()
            });
        },
        &|disk| {
            disk.set(DiskFaults {
                cut_at: Some(200),
                ..DiskFaults::default()
            });
        },
        &VirtualDisk::remove_all,
        &|disk| {
            disk.each(|_, bytes| {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 4;
            });
        },
    ];
    for go_wrong in faults {
        let disk = Arc::<VirtualDisk>::default();
        let mut bench = restarted(&disk);
        bench.settle_disk();
        go_wrong(&disk);
        for of in 0..4 {
            let answer = bench.answer_with_disk(&prompt(of));
            assert_eq!((answer.text(), cached(&answer)), (&*prompt(of), 0));
        }
        assert_eq!(bench.engine.stats().prefix_disk_failures.get(), 4);
        // They are in memory now, as if there were no disk.
        assert!(cached(&bench.answer_with_disk(&prompt(1))) > 60);
    }
}

#[test]
fn a_full_disk_leaves_an_engine_that_works() {
    let disk = Arc::<VirtualDisk>::default();
    disk.set(DiskFaults {
        room: Some(3_000),
        ..DiskFaults::default()
    });
    let mut bench = bench_over(&disk, script(), RAM_BYTES);
    for round in 0..2 {
        for of in 0..12 {
            let answer = bench.answer_with_disk(&prompt(of));
            assert_eq!(answer.text(), prompt(of), "{round}");
        }
    }
    assert_eq!(bench.engine.stats().prefix_disk_failures.get(), 1);
    assert!(disk.bytes() <= 3_000);
    bench.end();
}

/// Many requests for a disk that is slow, or whose calls fail at times: all end with their text.
#[test]
fn all_requests_end_whatever_the_disk_does() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = bench_over(
        &disk,
        Script {
            script: Name::Echo,
            ..script()
        },
        RAM_BYTES,
    );
    for round in 0..30_usize {
        disk.set(DiskFaults {
            held: round % 3 == 1,
            reads_fail: round % 5 == 2,
            cut_at: (round % 7 == 3).then_some(300),
            ..DiskFaults::default()
        });
        let of = |at: usize| prompt((round * 5 + at * 7) % 16);
        let mut handles: Vec<_> = (0..6)
            .map(|at| bench.submit(request_for(&of(at))))
            .collect();
        bench.settle();
        assert!(bench.owner.is_empty());
        for (at, handle) in handles.iter_mut().enumerate() {
            assert_eq!(read(handle).text(), of(at), "{round}");
        }
    }
    disk.set(DiskFaults::default());
}
