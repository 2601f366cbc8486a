//! Memory that is freed for another model: what it held goes to the disk first, as far as there is time.

use super::*;
use crate::PrefixDiskConfig;

/// More than may wait to be written at a time.
const CONVERSATIONS: usize = 100;

/// An engine whose memory holds all conversations.
fn filled(disk: &Arc<VirtualDisk>, script: Script) -> Bench {
    let mut bench = bench_over(disk, script, 1 << 20);
    for of in 0..CONVERSATIONS {
        bench.answer_with_disk(&prompt(of));
    }
    assert_eq!(disk.files(), 0, "the memory has room");
    bench
}

impl Bench {
    fn saved(&self) -> u64 {
        self.engine.stats().prefix_saved_bytes.get()
    }

    /// Steps until the memory is free, in no time, with a disk that has done everything before each step.
    fn free_memory(&mut self) {
        self.engine.drop_saved_prefixes();
        for _ in 0..100 {
            self.step_after(Duration::ZERO);
            if self.saved() == 0 {
                return;
            }
            self.settle_disk();
        }
        panic!("{} bytes are not freed", self.saved());
    }
}

#[test]
fn what_is_freed_for_another_model_is_on_the_disk() {
    for script in kinds() {
        let disk = Arc::<VirtualDisk>::default();
        let mut bench = filled(&disk, script);
        bench.free_memory();
        for of in 0..CONVERSATIONS {
            let again = bench.answer_with_disk(&prompt(of));
            assert_eq!(cached(&again), prompt(of).len(), "{of}");
        }
        assert_eq!(bench.engine.stats().prefix_disk_failures.get(), 0);
    }
}

/// Neither wears the disk a second time nor waits for it.
#[test]
fn what_is_on_the_disk_is_freed_at_once() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = filled(&disk, script());
    let ask_all = |bench: &mut Bench| {
        for of in 0..CONVERSATIONS {
            bench.answer_with_disk(&prompt(of));
        }
    };
    // Twice, because one of them was in a slot.
    bench.free_memory();
    ask_all(&mut bench);
    bench.free_memory();
    let written = bench.engine.stats().prefix_disk_written_bytes.get();
    ask_all(&mut bench);
    assert!(bench.saved() > 0);
    disk.set(DiskFaults::HELD);
    bench.engine.drop_saved_prefixes();
    bench.step();
    assert_eq!(bench.saved(), 0);
    disk.set(DiskFaults::default());
    bench.settle_disk();
    let again = bench.engine.stats().prefix_disk_written_bytes.get();
    assert_eq!(again, written);
}

/// Meanwhile nothing waits, and what is still in memory is used.
#[test]
fn a_disk_that_hangs_keeps_the_memory_for_a_time_only() {
    let disk = Arc::<VirtualDisk>::default();
    let mut bench = filled(&disk, script());
    let before = bench.saved();
    disk.set(DiskFaults::HELD);
    bench.engine.drop_saved_prefixes();
    let wake_at = bench.step().wake_at.expect("it does not wait for ever");
    assert!(wake_at <= bench.now + PrefixDiskConfig::MOVE_MAX);
    assert!(bench.saved() > before / 2);
    // In memory, in the queue of the disk, and in a slot.
    for of in [0, CONVERSATIONS - 2, CONVERSATIONS - 1] {
        let mut handle = bench.submit(request_for(&prompt(of)));
        bench.step();
        bench.step_until_empty();
        assert!(cached(&read(&mut handle)) > 60, "{of}");
    }
    bench.step_after(PrefixDiskConfig::MOVE_MAX);
    // But for what the disk has taken already.
    let waits = bench.saved();
    assert!(waits < before * 3 / 4, "{waits} of {before}");
    disk.set(DiskFaults::default());
    bench.settle_disk();
    bench.step();
    assert!(bench.saved() < waits / 8, "{}", bench.saved());
}

#[test]
fn a_disk_that_takes_nothing_keeps_no_memory() {
    let faults = [
        DiskFaults {
            writes_fail: true,
            ..DiskFaults::default()
        },
        DiskFaults {
            room: Some(3_000),
            ..DiskFaults::default()
        },
    ];
    for faults in faults {
        let disk = Arc::<VirtualDisk>::default();
        let mut bench = filled(&disk, script());
        disk.set(faults);
        bench.free_memory();
        let answer = bench.answer_with_disk(&prompt(CONVERSATIONS - 1));
        assert_eq!(answer.text(), prompt(CONVERSATIONS - 1));
    }
    let disk = Arc::<VirtualDisk>::default();
    disk.set(DiskFaults {
        opens_fail: true,
        ..DiskFaults::default()
    });
    let mut bench = filled(&disk, script());
    bench.engine.drop_saved_prefixes();
    bench.step();
    assert_eq!(bench.saved(), 0);
}
