//! An append-only log with an end, read by index.
//!
//! A cursor is only an index, so readers cost nothing and are independent. The owner of the log may release its oldest
//! items; the indices of the others do not change.
//!
//! ```text
//!   open ──append──► open ──end(E)──► ended
//! ```

use std::collections::{VecDeque, vec_deque};

/// A list that only grows until it ends, once, with `E`.
#[derive(Clone, Debug)]
pub struct Log<T, E = ()> {
    items: VecDeque<T>,
    /// Number of released items; the first of `items` has this index.
    released: usize,
    end: Option<E>,
}

/// The result of reading at a cursor.
#[derive(Debug, PartialEq, Eq)]
pub enum LogRead<'a, T, E> {
    /// An item.
    Item(&'a T),
    /// The item at this index was released.
    Released,
    /// No item yet; the log is still open.
    Pending,
    /// The log has ended before this index.
    End(&'a E),
}

impl<T, E> Log<T, E> {
    /// An empty, open log. Allocates nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            items: VecDeque::new(),
            released: 0,
            end: None,
        }
    }

    /// Appends an item.
    ///
    /// # Errors
    /// Returns the item if the log has ended.
    pub fn append(&mut self, item: T) -> Result<(), T> {
        if self.end.is_some() {
            return Err(item);
        }
        self.items.push_back(item);
        Ok(())
    }

    /// Ends the log.
    ///
    /// # Errors
    /// Returns `end` if the log has ended before: the first end stays.
    pub fn end(&mut self, end: E) -> Result<(), E> {
        if self.end.is_some() {
            return Err(end);
        }
        self.end = Some(end);
        Ok(())
    }

    /// Reads at index `cursor`. Past the last item that is [`LogRead::Pending`] or [`LogRead::End`].
    #[must_use]
    pub fn at(&self, cursor: usize) -> LogRead<'_, T, E> {
        let Some(index) = cursor.checked_sub(self.released) else {
            return LogRead::Released;
        };
        match (self.items.get(index), &self.end) {
            (Some(item), _) => LogRead::Item(item),
            (None, None) => LogRead::Pending,
            (None, Some(end)) => LogRead::End(end),
        }
    }

    /// Releases the oldest retained item.
    pub fn release(&mut self) -> Option<T> {
        let item = self.items.pop_front()?;
        self.released += 1;
        Some(item)
    }

    /// Releases all items, and their memory.
    pub fn clear(&mut self) {
        // Counted as released, so that the indices of later items do not change.
        self.released += self.items.len();
        // Replaced, because `VecDeque::clear` would keep its memory.
        self.items = VecDeque::new();
    }

    /// Number of released items.
    #[must_use]
    pub const fn released(&self) -> usize {
        self.released
    }

    /// Number of appended items, released ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.released + self.items.len()
    }

    /// Whether nothing was ever appended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The end of the log, once it has ended.
    #[must_use]
    pub const fn ended(&self) -> Option<&E> {
        self.end.as_ref()
    }

    /// Iterates over the retained items.
    pub fn iter(&self) -> vec_deque::Iter<'_, T> {
        self.items.iter()
    }
}

impl<T, E> Default for Log<T, E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a, T, E> IntoIterator for &'a Log<T, E> {
    type Item = &'a T;
    type IntoIter = vec_deque::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_sees_every_item_then_waits_then_the_end() {
        let mut log: Log<u8, &str> = Log::new();
        assert_eq!(log.at(0), LogRead::Pending);
        assert_eq!(log.append(7), Ok(()));
        assert_eq!(
            (log.at(0), log.at(1)),
            (LogRead::Item(&7), LogRead::Pending)
        );
        assert_eq!(log.end("done"), Ok(()));
        assert_eq!(
            (log.at(0), log.at(1), log.at(9)),
            (
                LogRead::Item(&7),
                LogRead::End(&"done"),
                LogRead::End(&"done")
            )
        );
    }

    #[test]
    fn nothing_is_appended_after_the_end_and_the_first_end_stands() {
        let mut log: Log<u8, &str> = Log::new();
        assert_eq!(log.end("first"), Ok(()));
        assert_eq!(log.append(1), Err(1));
        assert_eq!(log.end("second"), Err("second"));
        assert_eq!((log.ended(), log.len()), (Some(&"first"), 0));
    }

    #[test]
    fn a_release_does_not_change_the_indices() {
        let mut log: Log<u8, &str> = Log::new();
        for item in 0..3 {
            log.append(item).unwrap();
        }
        assert_eq!((log.release(), log.release()), (Some(0), Some(1)));
        assert_eq!(
            (log.at(1), log.at(2), log.at(3)),
            (LogRead::Released, LogRead::Item(&2), LogRead::Pending)
        );
        assert_eq!((log.len(), log.released(), log.iter().count()), (3, 2, 1));
        log.end("done").unwrap();
        log.clear();
        assert_eq!((log.release(), log.released()), (None, 3));
        assert_eq!(
            (log.at(2), log.at(3)),
            (LogRead::Released, LogRead::End(&"done"))
        );
    }
}
