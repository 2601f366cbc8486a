//! Quotas that all callers share and of which each may hold a part (D-45): connections, LMTP connections, Evergreen
//! sessions, and bytes held by sessions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::auth::identity::CallerIdentity;

/// What all callers share, of one kind.
#[derive(Debug)]
pub(crate) struct CallerQuotas {
    most: u64,
    /// How much of it each may have.
    most_each: u64,
    state: Mutex<SlotCounts>,
}

#[derive(Debug, Default)]
struct SlotCounts {
    all: u64,
    /// Nobody stands here who has nothing.
    taken: HashMap<CallerIdentity, u64>,
}

/// Why there is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// All together have as much as there is.
    All,
    /// This caller has as much as each may.
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
    /// So much for all, and for each.
    pub(crate) fn new(most: u64, most_each: u64) -> Arc<Self> {
        Arc::new(Self {
            most,
            most_each,
            state: Mutex::default(),
        })
    }

    /// How much there is for all.
    pub(crate) const fn most(&self) -> u64 {
        self.most
    }

    /// How much each may have.
    pub(crate) const fn most_each(&self) -> u64 {
        self.most_each
    }

    /// Takes one for `caller`.
    pub(crate) fn take(self: &Arc<Self>, caller: &CallerIdentity) -> Result<Permit, NoSlot> {
        let mut position = Permit::empty(self, caller);
        position.set(1)?;
        Ok(position)
    }

    /// How much all have, and how much `caller` has.
    pub(crate) fn taken(&self, caller: &CallerIdentity) -> (u64, u64) {
        let state = self.state();
        (state.all, state.taken.get(caller).copied().unwrap_or(0))
    }

    fn state(&self) -> MutexGuard<'_, SlotCounts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one holder has of it; given back when it is dropped.
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

    /// How much it is.
    pub(crate) const fn amount(&self) -> u64 {
        self.amount
    }

    /// What it is part of.
    pub(crate) fn shares(&self) -> &CallerQuotas {
        &self.shares
    }

    /// Whose it is.
    pub(crate) const fn caller(&self) -> &CallerIdentity {
        &self.caller
    }

    /// Makes it as large as `amount`. Less is always taken; what cannot be had leaves everything as it was.
    pub(crate) fn set(&mut self, amount: u64) -> Result<(), NoSlot> {
        let mut state = self.shares.state();
        let before = state.taken.get(&self.caller).copied().unwrap_or(0);
        // What this holder has is part of both.
        let all = state.all - self.amount + amount;
        let own = before - self.amount + amount;
        if amount > self.amount {
            // The caller's own limit first: who has reached it is told so whether or not there is room for others.
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
        // Less is always taken.
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
    fn d_45_nobody_takes_what_all_share() {
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
    fn d_45_an_amount_grows_to_its_limits_and_shrinks_always() {
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
