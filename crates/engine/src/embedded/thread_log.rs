//! [`ThreadLog`]: tells people which numbers of threads a model computes with, and why.

use std::fmt;
use std::time::Duration;

use sapwood_proto::time::Time;

use super::thread_choice::ThreadVerdict;

/// The time between two lines about one model: on a busy machine the numbers may change every second.
const LINES_EVERY: Duration = Duration::from_secs(60);

/// The kinds of calls, in the order of [`crate::model::ThreadNumbers`].
const KINDS: [&str; 3] = ["tokens of streams", "prompts", "short prompts and drafts"];

/// Verdicts about the numbers of threads of one model that were not logged yet, the last one of each kind of calls.
#[derive(Debug, Default)]
pub(super) struct ThreadLog {
    waiting: [Option<ThreadVerdict>; 3],
    logged: Option<Time>,
}

impl ThreadLog {
    /// Takes new verdicts; returns what is to be logged now.
    pub(super) fn observe(
        &mut self,
        verdicts: [Option<ThreadVerdict>; 3],
        now: Time,
    ) -> Option<String> {
        for (waiting, verdict) in self.waiting.iter_mut().zip(verdicts) {
            *waiting = verdict.or(*waiting);
        }
        let is_soon = |logged: Time| now.since(logged) < LINES_EVERY;
        if self.waiting == [None; 3] || self.logged.is_some_and(is_soon) {
            return None;
        }
        self.logged = Some(now);
        let lines = std::mem::take(&mut self.waiting).into_iter().zip(KINDS);
        let lines = lines.filter_map(|(verdict, kind)| Some(format!("{kind}: {}", verdict?)));
        Some(lines.collect::<Vec<_>>().join("; "))
    }
}

impl fmt::Display for ThreadVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |threads| if threads == 1 { "thread" } else { "threads" };
        write!(f, "{} {}", self.threads, name(self.threads))?;
        match self.instead_of {
            None => f.write_str(", as no other number is faster"),
            Some((before, share)) => {
                let percent = share * 100.0;
                write!(
                    f,
                    " instead of {before}, as calls take {percent:.0} % of the time"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(threads: u32, instead_of: Option<(u32, f64)>) -> Option<ThreadVerdict> {
        Some(ThreadVerdict {
            threads,
            instead_of,
        })
    }

    #[test]
    fn numbers_of_threads_are_told_with_their_reason() {
        let mut log = ThreadLog::default();
        assert_eq!(log.observe([None; 3], Time::ZERO), None);
        let verdicts = [verdict(1, Some((2, 0.274))), None, verdict(2, None)];
        assert_eq!(
            log.observe(verdicts, Time::ZERO).unwrap(),
            "tokens of streams: 1 thread instead of 2, as calls take 27 % of the time; short prompts and drafts: 2 threads, as \
             no other number is faster"
        );
    }

    #[test]
    fn there_is_at_most_one_line_a_minute_with_the_last_verdicts() {
        let mut log = ThreadLog::default();
        let at = Time::from_millis;
        assert!(log.observe([verdict(8, None), None, None], at(5)).is_some());
        let changes = [verdict(7, Some((8, 0.5))), verdict(8, None), None];
        assert_eq!(log.observe(changes, at(6)), None);
        let change = [verdict(8, Some((7, 0.9))), None, None];
        assert_eq!(log.observe(change, at(60_004)), None);
        assert_eq!(
            log.observe([None; 3], at(60_005)).unwrap(),
            "tokens of streams: 8 threads instead of 7, as calls take 90 % of the time; prompts: 8 threads, as no other number \
             is faster"
        );
        assert_eq!(log.observe([None; 3], at(600_000)), None);
    }
}
