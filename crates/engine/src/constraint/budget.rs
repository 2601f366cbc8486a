//! [`Budget`]: the memory of all automata of a model, those of the cache and of forks included (AI-841).
//!
//! An automaton grows while it is used: it keeps each state that its lexer has been in. So it reports its size after each
//! computation ([`Charge::set`]), and where all of them take more than the budget, cached grammars are dropped. What is then
//! still too much is an error of the automaton that grew last. Its memory stays charged until it is dropped.

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
    /// All together are.
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

    /// Drops cached grammars until the budget suffices. Returns whether it does.
    fn make_room(&self) -> bool {
        while self.used() > self.bytes_max {
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

    /// Charges `bytes` instead of what was charged before.
    pub(super) fn set(&mut self, bytes: usize) -> Result<(), Excess> {
        let used = &self.budget.used;
        if bytes <= self.bytes {
            used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
            self.bytes = bytes;
            return Ok(());
        }
        used.fetch_add(bytes - self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
        if bytes > self.budget.bytes_max / SHARE {
            return Err(Excess::Single);
        }
        match self.budget.make_room() {
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
        let charges: Vec<Charge> = (0..7)
            .map(|_| {
                let mut charge = Charge::new(first.budget());
                assert_eq!(charge.set(10), Ok(()));
                charge
            })
            .collect();
        assert_eq!(budget.used(), 80);
        let mut over = Charge::new(first.budget());
        assert_eq!(over.set(1), Err(Excess::Total));
        drop(charges);
        assert_eq!(over.set(2), Ok(()));
        drop((first, over));
        assert_eq!(budget.used(), 0);
    }
}
