//! [`LatePriority`]: a process loses its priority while its callback is late, as a thread does in the other mode: its
//! sequence has missed the step already, and others need the processor.
//!
//! Anybody may lower a priority; to raise it again takes a right that many containers do not give. A thread that has
//! lost its priority is replaced, but a process has its controller in it. So the first attempt to give a priority back
//! shows whether that works. Where it does not, a process keeps the low one, and from then on a process must run for
//! five steps before it is slowed down: by then it has hardly been the machine that was busy, and its sequence has half
//! of its late steps left.

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, getpriority_process, setpriority_process};

/// What priorities the controllers' processes have.
#[derive(Debug)]
pub(super) struct LatePriority {
    /// That of this process, which they inherit.
    usual: i32,
    /// A priority that was lowered cannot be given back here.
    is_final: AtomicBool,
}

impl LatePriority {
    pub(super) fn new() -> Self {
        Self {
            usual: getpriority_process(None).unwrap_or_default(),
            is_final: AtomicBool::new(false),
        }
    }

    /// After how long a callback is slowed down, which is late after `late`. How long it may run at most says little: a
    /// runtime for another process lets it run for many times the late steps after which the sequence ends.
    pub(super) fn slows_after(&self, late: Duration) -> Duration {
        if self.is_final.load(Ordering::Relaxed) {
            late.saturating_mul(STEPS_UNTIL_FINAL)
        } else {
            late
        }
    }

    #[cfg(test)]
    pub(super) fn is_final(&self) -> bool {
        self.is_final.load(Ordering::Relaxed)
    }

    /// Lowers the priority of a process.
    pub(super) fn lower(&self, process: BorrowedFd<'_>) {
        if let Err(error) = set(process, self.usual.max(LOW_PRIORITY)) {
            tracing::debug!(%error, "the priority of a late controller cannot be lowered");
        }
    }

    /// Gives a process its priority back.
    pub(super) fn restore(&self, process: BorrowedFd<'_>) {
        if let Err(error) = set(process, self.usual) {
            self.is_final.store(true, Ordering::Relaxed);
            tracing::debug!(%error, "a controller that was late keeps its low priority");
        }
    }
}

fn set(process: BorrowedFd<'_>, priority: i32) -> std::io::Result<()> {
    // The process may have ended, then it has no number; and no other process gets this number in the next moment.
    let text = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
    let text = std::fs::read_to_string(text)?;
    let number = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    let number = number.and_then(|number| number.trim().parse().ok());
    match number.filter(|number| *number > 0).and_then(Pid::from_raw) {
        Some(process) => Ok(setpriority_process(Some(process), priority)?),
        None => Ok(()),
    }
}

/// Half of the late steps after which a sequence ends by default.
const STEPS_UNTIL_FINAL: u32 = 5;
/// A thirtieth of the usual share, as late threads have in the other mode.
const LOW_PRIORITY: i32 = 15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_priority_is_lost_for_good_it_is_lost_later() {
        let priority = LatePriority::new();
        let late = Duration::from_millis(45);
        assert_eq!(priority.slows_after(late), late);
        priority.is_final.store(true, Ordering::Relaxed);
        // Before ten late steps of 25 ms have ended the sequence.
        assert_eq!(priority.slows_after(late), Duration::from_millis(225));
        assert_eq!(priority.slows_after(Duration::MAX), Duration::MAX);
    }
}
