//! [`Group`]: what the sequences of one request share: their number, and the variables of their controllers (AI-951 to
//! AI-953).

pub(super) mod variables;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sapwood_proto::error_reason::ErrorReason;

pub use self::variables::{Variables, VariablesLimits, Versioned};
use super::failure::CallFailure;
use super::home::Home;

/// One request. It lasts as long as one of its sequences does, also a failed one (AI-952).
#[derive(Debug)]
pub struct Group {
    live: AtomicU32,
    forks_max: u32,
    variables: Variables,
}

impl Group {
    /// A request that may have `forks_max` live sequences at once.
    #[must_use]
    pub fn new(forks_max: u32, limits: VariablesLimits) -> Arc<Self> {
        Arc::new(Self {
            live: AtomicU32::new(0),
            forks_max,
            variables: Variables::new(limits),
        })
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
            forks_max,
            variables: Variables::of_home(limits, home),
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

    /// Counts one more sequence, until the returned value is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Result<Member, CallFailure> {
        let add = |live: u32| (live < self.forks_max).then_some(live + 1);
        let entered = self
            .live
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if entered.is_err() {
            let text = format!("too many forks (max={})", self.forks_max);
            return Err(CallFailure::new(ErrorReason::LIMIT, text));
        }
        Ok(Member {
            group: Arc::clone(self),
            counted: true,
        })
    }
}

/// One live sequence of a group.
#[derive(Debug)]
pub(super) struct Member {
    group: Arc<Group>,
    counted: bool,
}

impl Member {
    pub(super) const fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Counts it no longer: its sequence is gone, although its memory may not be freed yet.
    pub(super) fn leave(&mut self) {
        if std::mem::take(&mut self.counted) {
            self.group.live.fetch_sub(1, Ordering::Relaxed);
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
