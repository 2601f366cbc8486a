//! [`Group`]: what the sequences of one request share: their number, and the variables of their controllers (AI-951 to
//! AI-953).

pub(super) mod variables;
mod waiting;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use sapwood_proto::error_reason::ErrorReason;

pub use self::variables::{Variables, VariablesLimits, Versioned};
pub use self::waiting::Waiting;
use super::failure::CallFailure;
use super::home::Home;

/// One request. It lasts as long as one of its sequences does, also a failed one (AI-952).
#[derive(Debug)]
pub struct Group {
    live: AtomicU32,
    /// Sequences that were ever in it, and those of them that have ended.
    entered: AtomicU64,
    ended: AtomicU64,
    forks_max: u32,
    variables: Variables,
    seed: OnceLock<u64>,
    caller: OnceLock<Box<str>>,
}

/// The state of a group at one moment, to be compared with a later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::host) struct GroupMark {
    /// Writes of variables.
    changes: u64,
    /// Sequences that have ended.
    ended: u64,
}

/// Tells the sequences of a group apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::host) struct MemberNumber(u64);

impl MemberNumber {
    /// Of somebody outside of the request.
    pub(in crate::host) const OUTSIDE: Self = Self(0);
}

impl Group {
    /// A request that may have `forks_max` live sequences at once.
    #[must_use]
    pub fn new(forks_max: u32, limits: VariablesLimits) -> Arc<Self> {
        Arc::new(Self {
            live: AtomicU32::new(0),
            entered: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            forks_max,
            variables: Variables::new(limits),
            seed: OnceLock::new(),
            caller: OnceLock::new(),
        })
    }

    /// Sets the seed of the request, before its first instance starts. Without one it is 0.
    pub fn set_seed(&self, seed: u64) {
        // The first one stays: an instance may have drawn from it.
        let _set = self.seed.set(seed);
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed.get().copied().unwrap_or_default()
    }

    /// Sets who makes the request, before its first instance starts: callers have shares of what all use (AI-841).
    pub fn set_caller(&self, name: &str) {
        let _set = self.caller.set(name.into());
    }

    /// Empty if it is not known.
    pub(super) fn caller(&self) -> &str {
        self.caller.get().map_or("", |name| name)
    }

    /// A request of the runtime, seen from a controller's process.
    #[cfg(target_os = "linux")]
    pub(super) fn of_home(
        forks_max: u32,
        limits: VariablesLimits,
        home: Arc<dyn Home>,
    ) -> Arc<Self> {
        Arc::new(Self {
            live: AtomicU32::new(0),
            entered: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            forks_max,
            variables: Variables::of_home(limits, home),
            seed: OnceLock::new(),
            caller: OnceLock::new(),
        })
    }

    /// The variables.
    #[must_use]
    pub const fn variables(&self) -> &Variables {
        &self.variables
    }

    /// How many sequences may be alive at once.
    #[must_use]
    pub const fn forks_max(&self) -> u32 {
        self.forks_max
    }

    /// The state at this moment.
    pub(super) fn mark(&self) -> GroupMark {
        GroupMark {
            changes: self.variables.changes(),
            ended: self.ended.load(Ordering::Acquire),
        }
    }

    /// Counts one more sequence, until the returned value is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Result<Member, CallFailure> {
        let add = |live: u32| (live < self.forks_max).then_some(live + 1);
        let entered = self
            .live
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if entered.is_err() {
            let text = format!("too many forks (max={})", self.forks_max);
            return Err(CallFailure::new(ErrorReason::LIMIT, text));
        }
        let before = self.entered.fetch_add(1, Ordering::Relaxed);
        Ok(Member {
            group: Arc::clone(self),
            number: MemberNumber(before + 1),
            counted: true,
        })
    }
}

/// One live sequence of a group.
#[derive(Debug)]
pub(crate) struct Member {
    group: Arc<Group>,
    number: MemberNumber,
    counted: bool,
}

impl Member {
    pub(super) const fn number(&self) -> MemberNumber {
        self.number
    }

    pub(crate) const fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Counts it no longer: its sequence is gone, although its memory may not be freed yet.
    pub(super) fn leave(&mut self) {
        if std::mem::take(&mut self.counted) {
            self.group.live.fetch_sub(1, Ordering::Relaxed);
            // After everything that it wrote: whoever is woken by this sees that.
            self.group.ended.fetch_add(1, Ordering::Release);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_413_a_member_that_left_is_counted_off_once() {
        let group = Group::new(2, VariablesLimits::default());
        let (first, mut second) = (group.enter().unwrap(), group.enter().unwrap());
        assert!(group.enter().is_err());
        second.leave();
        let third = group.enter().unwrap();
        assert!(group.enter().is_err());
        second.leave();
        drop(second);
        assert!(group.enter().is_err());
        drop((first, third));
        assert_eq!(group.live.load(Ordering::Relaxed), 0);
    }
}
