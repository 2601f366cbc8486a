//! [`Budget`]: the memory of all automata of a model, those of the cache and of forks included (AI-841).
//!
//! An automaton grows while it is used: it keeps each state that its lexer has been in. So it reports its size after each
//! computation ([`Charge::set`]), and where all of them take too much of the budget, cached grammars are dropped. What is then
//! still too much is an error of the automaton that has grown. Its memory stays charged until it is dropped.
//!
//! An automaton may grow until it has as much as is then left, and never more than an eighth of the budget. So large ones are
//! refused long before small ones: with `n` that grow as far as they may, as much as one of them has is left for others.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::cache::GrammarCache;

/// Bytes that the automata of one model may take.
pub(super) struct Budget {
    bytes_max: usize,
    used: AtomicUsize,
    /// What can be dropped. Weak, because the cache has automata, which have this budget.
    cache: OnceLock<Weak<GrammarCache>>,
}

/// Why an automaton may not have the memory that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Excess {
    /// It alone is too large.
    Single,
    /// All together are, so that less is left than it has.
    Total,
}

/// An automaton may take this part of the budget, so that one cannot use up what others need.
const SHARE: usize = 8;

impl Budget {
    /// Creates a budget, of which nothing is used.
    pub(super) const fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            used: AtomicUsize::new(0),
            cache: OnceLock::new(),
        }
    }

    /// Names the cache whose grammars are dropped when the budget is used up. It can be named once.
    pub(super) fn evict_from(&self, cache: &Arc<GrammarCache>) {
        let _named_before = self.cache.set(Arc::downgrade(cache));
    }

    /// Bytes that are charged.
    pub(super) fn used(&self) -> usize {
        // Only a counter: no other memory is read by what it says.
        self.used.load(Ordering::Relaxed)
    }

    /// Whether as much is left as one automaton has.
    fn has_room(&self, bytes: usize) -> bool {
        self.used().saturating_add(bytes) <= self.bytes_max
    }

    /// Drops cached grammars until there is room for one automaton. Returns whether there is.
    fn make_room(&self, bytes: usize) -> bool {
        while !self.has_room(bytes) {
            let cache = self.cache.get().and_then(Weak::upgrade);
            if !cache.is_some_and(|cache| cache.drop_oldest()) {
                return false;
            }
        }
        true
    }
}

/// What one automaton has of a budget. Dropping it refunds that.
pub(super) struct Charge {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Charge {
    /// Charges nothing yet.
    pub(super) const fn new(budget: Arc<Budget>) -> Self {
        Self { budget, bytes: 0 }
    }

    /// The budget, for a copy of the automaton.
    pub(super) fn budget(&self) -> Arc<Budget> {
        Arc::clone(&self.budget)
    }

    /// Charges `bytes` instead of what was charged before. If they are too many, cached grammars are dropped first.
    pub(super) fn set(&mut self, bytes: usize) -> Result<(), Excess> {
        self.change(bytes, Budget::make_room)
    }

    /// As [`Charge::set`], without dropping grammars: that takes long.
    pub(super) fn set_quickly(&mut self, bytes: usize) -> Result<(), Excess> {
        self.change(bytes, Budget::has_room)
    }

    /// Refunds what is no longer needed. What is needed in addition is charged by the next [`Charge::set`].
    pub(super) fn refund_to(&mut self, bytes: usize) {
        let refunded = self.bytes.saturating_sub(bytes);
        self.budget.used.fetch_sub(refunded, Ordering::Relaxed);
        self.bytes -= refunded;
    }

    fn change(
        &mut self,
        bytes: usize,
        has_room: impl FnOnce(&Budget, usize) -> bool,
    ) -> Result<(), Excess> {
        let used = &self.budget.used;
        if bytes <= self.bytes {
            self.refund_to(bytes);
            return Ok(());
        }
        used.fetch_add(bytes - self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
        if bytes > self.budget.bytes_max / SHARE {
            return Err(Excess::Single);
        }
        match has_room(&self.budget, bytes) {
            true => Ok(()),
            false => Err(Excess::Total),
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_841_a_budget_is_charged_and_refunded() {
        let budget = Arc::new(Budget::new(80));
        let mut first = Charge::new(Arc::clone(&budget));
        assert_eq!(first.set(10), Ok(()));
        // A share is an eighth.
        assert_eq!(first.set(11), Err(Excess::Single));
        assert_eq!(first.set(10), Ok(()));
        let charges: Vec<Charge> = (0..6)
            .map(|_| {
                let mut charge = Charge::new(first.budget());
                assert_eq!(charge.set(10), Ok(()));
                charge
            })
            .collect();
        let mut over = Charge::new(first.budget());
        assert_eq!(over.set(10), Err(Excess::Total));
        assert_eq!(budget.used(), 80);
        drop(charges);
        assert_eq!(over.set(9), Ok(()));
        over.refund_to(12);
        assert_eq!(budget.used(), 19);
        over.refund_to(3);
        assert_eq!(budget.used(), 13);
        drop((first, over));
        assert_eq!(budget.used(), 0);
    }

    /// Eight that have an eighth each would leave nothing.
    #[test]
    fn ai_841_large_automata_leave_room_for_small_ones() {
        let budget = Arc::new(Budget::new(8000));
        let charge = |bytes| {
            let mut charge = Charge::new(Arc::clone(&budget));
            charge.set(bytes).map(|()| charge)
        };
        let mut large: Vec<Charge> = std::iter::from_fn(|| charge(1000).ok()).collect();
        assert_eq!(large.len(), 7);
        // What is left goes to those that are smaller and smaller.
        large.extend(std::iter::from_fn(|| charge(400).ok()));
        large.extend(std::iter::from_fn(|| charge(100).ok()));
        assert_eq!(budget.used(), 7900);
        let small: Vec<Charge> = (0..50).filter_map(|_| charge(1).ok()).collect();
        assert_eq!(small.len(), 50);
        assert_eq!(charge(51).err(), Some(Excess::Total));
        // One that does not grow is not refused, however large it is.
        assert_eq!(large[0].set(1000), Ok(()));
    }
}
