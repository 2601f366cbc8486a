//! Quotas with a limit for all callers together and one for each caller (D-45): connections, LMTP connections, Evergreen
//! sessions, bytes held by sessions, and detached sessions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::auth::identity::CallerIdentity;

/// The quota of one kind of resource.
#[derive(Debug)]
pub(crate) struct CallerQuotas {
    most: u64,
    /// The limit of one caller.
    most_each: u64,
    state: Mutex<SlotCounts>,
}

#[derive(Debug, Default)]
struct SlotCounts {
    all: u64,
    /// The amount of each caller; no entry is 0.
    taken: HashMap<CallerIdentity, u64>,
}

/// Why an amount was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// The limit of all callers together is reached.
    All,
    /// The limit of this caller is reached.
    Each,
}

impl NoSlot {
    /// The `reason` of `sapwood_rejected_total`.
    pub(crate) const fn reason(self) -> &'static str {
        match self {
            Self::All => "queue",
            Self::Each => "share",
        }
    }
}

impl CallerQuotas {
    /// A quota with these limits for all callers together and for each.
    pub(crate) fn new(most: u64, most_each: u64) -> Arc<Self> {
        Arc::new(Self {
            most,
            most_each,
            state: Mutex::default(),
        })
    }

    /// The limit of all callers together.
    pub(crate) const fn most(&self) -> u64 {
        self.most
    }

    /// The limit of each caller.
    pub(crate) const fn most_each(&self) -> u64 {
        self.most_each
    }

    /// Acquires one for `caller`.
    pub(crate) fn take(self: &Arc<Self>, caller: &CallerIdentity) -> Result<Permit, NoSlot> {
        let mut position = Permit::empty(self, caller);
        position.set(1)?;
        Ok(position)
    }

    /// The amounts of all callers together and of `caller`.
    pub(crate) fn taken(&self, caller: &CallerIdentity) -> (u64, u64) {
        let state = self.state();
        (state.all, state.taken.get(caller).copied().unwrap_or(0))
    }

    fn state(&self) -> MutexGuard<'_, SlotCounts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The amount of one holder; released when it is dropped. A caller may have several.
#[derive(Debug)]
pub(crate) struct Permit {
    shares: Arc<CallerQuotas>,
    caller: CallerIdentity,
    amount: u64,
}

impl Permit {
    /// Nothing yet.
    pub(crate) fn empty(shares: &Arc<CallerQuotas>, caller: &CallerIdentity) -> Self {
        Self {
            shares: Arc::clone(shares),
            caller: caller.clone(),
            amount: 0,
        }
    }

    /// The amount.
    pub(crate) const fn amount(&self) -> u64 {
        self.amount
    }

    /// The quota that it belongs to.
    pub(crate) fn shares(&self) -> &CallerQuotas {
        &self.shares
    }

    /// The caller that holds it.
    pub(crate) const fn caller(&self) -> &CallerIdentity {
        &self.caller
    }

    /// Changes the amount. Shrinking always succeeds; a refused growth leaves everything as it was.
    pub(crate) fn set(&mut self, amount: u64) -> Result<(), NoSlot> {
        let mut state = self.shares.state();
        let before = state.taken.get(&self.caller).copied().unwrap_or(0);
        // Both sums include this holder's present amount, so the subtractions cannot underflow.
        let all = state.all - self.amount + amount;
        let own = before - self.amount + amount;
        if amount > self.amount {
            // The caller's own limit first: a caller that has reached it gets that reason whether or not others have room.
            if own > self.shares.most_each {
                return Err(NoSlot::Each);
            }
            if all > self.shares.most {
                return Err(NoSlot::All);
            }
        }
        state.all = all;
        if own == 0 {
            // Otherwise the map would grow with every address that ever connected.
            state.taken.remove(&self.caller);
        } else {
            state.taken.insert(self.caller.clone(), own);
        }
        self.amount = amount;
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // Shrinking cannot fail.
        let _ = self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> CallerIdentity {
        CallerIdentity::Key(name.into())
    }

    #[test]
    fn d_45_each_caller_is_limited_within_the_shared_quota() {
        let shares = CallerQuotas::new(5, 2);
        let mut positions = Vec::new();
        for name in ["one", "other"] {
            for turn in 0..3 {
                let taken = shares.take(&key(name));
                assert_eq!(taken.as_ref().err(), (turn == 2).then_some(&NoSlot::Each));
                positions.extend(taken);
            }
        }
        positions.extend(shares.take(&key("third")));
        assert_eq!(shares.take(&key("third")).unwrap_err(), NoSlot::All);
        assert_eq!(shares.taken(&key("one")), (5, 2));
        drop(positions.remove(0));
        positions.extend(shares.take(&key("third")));
        assert_eq!(shares.taken(&key("third")), (5, 2));
        drop(positions);
        assert!(shares.state().taken.is_empty());
        assert_eq!(shares.taken(&key("one")), (0, 0));
    }

    #[test]
    fn d_45_an_amount_grows_up_to_its_limits_and_always_shrinks() {
        let shares = CallerQuotas::new(100, 60);
        let mut first = Permit::empty(&shares, &key("one"));
        let mut second = Permit::empty(&shares, &key("one"));
        let mut other = Permit::empty(&shares, &key("other"));
        assert_eq!(first.set(50), Ok(()));
        assert_eq!(second.set(10), Ok(()));
        assert_eq!(second.set(11), Err(NoSlot::Each));
        assert_eq!(other.set(41), Err(NoSlot::All));
        assert_eq!(other.set(40), Ok(()));
        assert_eq!(shares.taken(&key("one")), (100, 60));
        assert_eq!(first.set(20), Ok(()));
        assert_eq!(second.set(40), Ok(()));
        drop((first, second));
        assert_eq!(shares.taken(&key("other")), (40, 40));
    }
}
