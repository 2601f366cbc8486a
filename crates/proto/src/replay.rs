//! [`ReplayBuffer`]: numbered items of a stream, retained so that a client that reconnects can be sent them again
//! (D-44).
//!
//! ```text
//!           first             next_unsent            next
//!   evicted │ sent, retained   │ unsent              │
//!           └── evicted, the oldest first             └── pushed here
//!                              ▲
//!                              └── rewind: these are sent again
//! ```
//!
//! Only sent items are evicted: an item that nobody has received is never lost. How much is retained, and what happens
//! when unsent items fill it, is for the owner to decide: it reads [`ReplayBuffer::bytes`] and calls
//! [`ReplayBuffer::evict`].

use std::collections::VecDeque;
use std::ops::Range;

/// Bounded replay buffer of numbered items.
#[derive(Clone, Debug)]
pub struct ReplayBuffer<T> {
    items: VecDeque<T>,
    /// The number of the oldest retained item, or of the next one if none is retained.
    first: u64,
    /// The number of the first unsent item; `first <= next_unsent <= first + items.len()`.
    next_unsent: u64,
    /// The charge for all items, and for the unsent ones.
    bytes: usize,
    unsent_bytes: usize,
    /// What an item is charged in addition to its bytes.
    overhead: usize,
}

/// Why a client cannot be sent what follows a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayGap {
    /// The item of this number, the first that is needed, was evicted.
    Evicted(u64),
    /// No item before this number was ever pushed.
    Unsaid,
}

impl<T: AsRef<[u8]>> ReplayBuffer<T> {
    /// An empty buffer whose first item has the number `first`. Each item is charged its bytes and `overhead`.
    #[must_use]
    pub const fn new(first: u64, overhead: usize) -> Self {
        Self {
            items: VecDeque::new(),
            first,
            next_unsent: first,
            bytes: 0,
            unsent_bytes: 0,
            overhead,
        }
    }

    /// The number of the oldest retained item, or of the next one if none is retained.
    #[must_use]
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// The number of the first unsent item, or of the next one if all were sent.
    #[must_use]
    pub const fn next_unsent(&self) -> u64 {
        self.next_unsent
    }

    /// The number of the next item to be pushed.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.first + self.items.len() as u64
    }

    /// How many items are retained.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether no item is retained.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether there is an unsent item.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        self.next_unsent < self.next()
    }

    /// The charge for all retained items.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The charge for the unsent items.
    #[must_use]
    pub const fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Appends an unsent item; returns its charge.
    pub fn push(&mut self, item: T) -> usize {
        let cost = self.cost(&item);
        self.bytes += cost;
        self.unsent_bytes += cost;
        self.items.push_back(item);
        cost
    }

    /// The first unsent item.
    #[must_use]
    pub fn peek(&self) -> Option<&T> {
        self.items.get(self.sent_items())
    }

    /// Marks the first unsent item as sent.
    pub fn advance(&mut self) {
        if let Some(item) = self.peek() {
            self.unsent_bytes -= self.cost(item);
            self.next_unsent += 1;
        }
    }

    /// Evicts the oldest item, if it was sent; returns its charge.
    pub fn evict(&mut self) -> Option<usize> {
        // The oldest item is unsent: without it every client would miss an item.
        if self.next_unsent == self.first {
            return None;
        }
        let item = self.items.pop_front()?;
        let cost = self.cost(&item);
        self.first += 1;
        self.bytes -= cost;
        Some(cost)
    }

    /// Checks that everything from the item `number` on can be sent.
    ///
    /// # Errors
    /// If an item is missing.
    pub fn check(&self, number: u64) -> Result<(), ReplayGap> {
        // `next` itself is valid: the client has received everything and waits for what follows.
        if number > self.next() {
            Err(ReplayGap::Unsaid)
        } else if number < self.first {
            Err(ReplayGap::Evicted(number))
        } else {
            Ok(())
        }
    }

    /// Makes `number` the first unsent item: it and all after it are sent again, and all before it count as sent.
    ///
    /// # Errors
    /// As [`ReplayBuffer::check`]; then nothing changes.
    pub fn rewind(&mut self, number: u64) -> Result<(), ReplayGap> {
        self.check(number)?;
        self.next_unsent = number;
        // Counted anew, because `number` may be before or behind the old position; it happens once per reconnection.
        let unsent = self.items.range(self.unsent());
        self.unsent_bytes = unsent.map(|item| self.cost(item)).sum();
        Ok(())
    }

    /// Drops the unsent items; returns their charge.
    pub fn discard_unsent(&mut self) -> usize {
        let dropped = std::mem::take(&mut self.unsent_bytes);
        // Their numbers are given again, which is right because nobody has received them.
        self.items.truncate(self.sent_items());
        self.bytes -= dropped;
        dropped
    }

    /// The indices of the unsent items.
    fn unsent(&self) -> Range<usize> {
        self.sent_items()..self.items.len()
    }

    fn sent_items(&self) -> usize {
        // No more than `items.len()`, so it is a usize.
        usize::try_from(self.next_unsent - self.first).unwrap_or(usize::MAX)
    }

    fn cost(&self, item: &T) -> usize {
        item.as_ref().len() + self.overhead
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sent(buffer: &mut ReplayBuffer<Vec<u8>>) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(item) = buffer.peek() {
            all.push(item.clone());
            buffer.advance();
        }
        all
    }

    #[test]
    fn sent_items_are_evicted_oldest_first_and_unsent_ones_never() {
        let mut buffer = ReplayBuffer::new(1, 10);
        assert_eq!(buffer.push(b"a".to_vec()), 11);
        buffer.push(b"bb".to_vec());
        assert_eq!(buffer.evict(), None);
        buffer.advance();
        assert_eq!(buffer.evict(), Some(11));
        assert_eq!(buffer.evict(), None);
        assert_eq!(
            (buffer.first(), buffer.next_unsent(), buffer.next()),
            (2, 2, 3)
        );
        assert_eq!((buffer.bytes(), buffer.unsent_bytes()), (12, 12));
    }

    #[test]
    fn a_rewind_sends_again_what_is_retained() {
        let mut buffer = ReplayBuffer::new(0, 0);
        for item in [b"a", b"b", b"c"] {
            buffer.push(item.to_vec());
        }
        assert_eq!(sent(&mut buffer).len(), 3);
        buffer.evict();
        assert_eq!(buffer.rewind(0), Err(ReplayGap::Evicted(0)));
        assert_eq!(buffer.rewind(4), Err(ReplayGap::Unsaid));
        assert!(!buffer.has_unsent(), "a failed rewind changes nothing");
        assert_eq!(buffer.rewind(3), Ok(()));
        assert_eq!(buffer.rewind(1), Ok(()));
        assert_eq!(buffer.unsent_bytes(), 2);
        assert_eq!(sent(&mut buffer), [b"b".to_vec(), b"c".to_vec()]);
    }

    #[test]
    fn discarding_unsent_items_leaves_the_sent_ones() {
        let mut buffer = ReplayBuffer::new(0, 1);
        buffer.push(b"a".to_vec());
        buffer.advance();
        buffer.push(b"b".to_vec());
        assert_eq!(buffer.discard_unsent(), 2);
        assert_eq!((buffer.len(), buffer.bytes(), buffer.next()), (1, 2, 1));
        assert_eq!(buffer.rewind(0), Ok(()));
        assert_eq!(sent(&mut buffer), [b"a".to_vec()]);
    }

    proptest! {
        /// After any operations the counts are those of the retained items, and items come in their order.
        #[test]
        fn the_charges_are_those_of_the_items(acts in prop::collection::vec((0..5_u8, 0..40_u64), 1..200)) {
            let mut buffer = ReplayBuffer::new(7, 3);
            let mut pushed = Vec::new();
            for (act, amount) in acts {
                match act {
                    0 | 1 => {
                        let item = vec![0; usize::try_from(amount).unwrap()];
                        pushed.push(item.clone());
                        buffer.push(item);
                    }
                    2 => {
                        let index = usize::try_from(buffer.next_unsent() - 7).unwrap();
                        prop_assert_eq!(buffer.peek(), pushed.get(index));
                        buffer.advance();
                    }
                    3 => {
                        let before = buffer.first();
                        let evicted = buffer.evict().is_some();
                        prop_assert_eq!(buffer.first(), before + u64::from(evicted));
                    }
                    _ => {
                        let can = (buffer.first()..=buffer.next()).contains(&(amount + 7));
                        prop_assert_eq!(buffer.rewind(amount + 7).is_ok(), can);
                    }
                }
                let costs: Vec<usize> = buffer.items.iter().map(|item| item.len() + 3).collect();
                prop_assert_eq!(buffer.bytes(), costs.iter().sum::<usize>());
                prop_assert_eq!(buffer.unsent_bytes(), costs[buffer.unsent()].iter().sum::<usize>());
                prop_assert_eq!(buffer.next() - 7, pushed.len() as u64);
            }
        }
    }
}
