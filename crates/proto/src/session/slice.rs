//! Byte ranges of nodes (EV-740).
//!
//! ```text
//!   outer      ····[────────────────)      of its own content: A, then 3..8 of B, then C
//!   inner          A A A ·[─────)· C C     what is left of B counts there, and nothing else of it
//! ```

use std::ops::Range;

/// What is meant of some bytes that were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceOverlap {
    /// These of them.
    pub range: Range<usize>,
    /// Whether anything that comes after them may be meant as well.
    pub more: bool,
}

impl SliceOverlap {
    /// All of them.
    pub(super) const fn all(bytes: usize) -> Self {
        Self {
            range: 0..bytes,
            more: true,
        }
    }
}

/// The ranges around a reader's place, the innermost last. Most readers never have one.
#[derive(Debug)]
pub(super) struct Slices(Vec<NodeSlice>);

/// The range of one node on the path.
#[derive(Debug)]
struct NodeSlice {
    /// How long the path is there.
    depth: usize,
    begin: u64,
    len: u64,
    /// Bytes of the node's content that were passed.
    passed: u64,
    /// How many to pass before what all ranges around mean, and how many of these there are.
    skip: u64,
    left: u64,
}

impl NodeSlice {
    /// A range that means nothing more needs no look at what it would have passed over, unless others count that.
    const fn is_over(&self) -> bool {
        self.left == 0 && (self.skip == 0 || self.len == 0)
    }
}

impl Slices {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Only `range` is meant of the node that the reader has just entered, at the end of a path of this length.
    pub(super) fn enter(&mut self, depth: usize, range: Range<u64>) {
        let (skip, left) = self
            .0
            .last()
            .map_or((0, u64::MAX), |outer| (outer.skip, outer.left));
        let len = range.end.saturating_sub(range.start);
        let passed_over = skip.min(len);
        self.0.push(NodeSlice {
            depth,
            begin: range.start,
            len,
            passed: 0,
            skip: range.start.saturating_add(passed_over),
            left: left.min(len - passed_over),
        });
    }

    /// The reader leaves the node at the end of a path of this length.
    pub(super) fn leave(&mut self, depth: usize) {
        let Some(slice) = self.0.pop_if(|slice| slice.depth == depth) else {
            return;
        };
        if let Some(outer) = self.0.last_mut() {
            // What it had of its range is what it is to those around it.
            outer.pass(slice.passed.saturating_sub(slice.begin).min(slice.len));
        }
    }

    /// Whether nothing more is meant before the innermost node with a range is left.
    pub(super) fn is_over(&self) -> bool {
        self.0.last().is_some_and(NodeSlice::is_over)
    }

    /// The reader passes `bytes`. Gives which of them are meant; `None` if none are, and an item that ends with them is not
    /// either. An item without bytes is meant where it stands inside.
    pub(super) fn take(&mut self, bytes: usize) -> Option<SliceOverlap> {
        let Some(slice) = self.0.last_mut() else {
            return Some(SliceOverlap::all(bytes));
        };
        let meant = slice.pass(bytes as u64);
        let inside = meant.start < meant.end || (bytes == 0 && slice.skip == 0 && slice.left > 0);
        // Both are at most `bytes`.
        let at = |position: u64| usize::try_from(position).unwrap_or(bytes);
        inside.then(|| SliceOverlap {
            range: at(meant.start)..at(meant.end),
            more: !slice.is_over(),
        })
    }
}

impl NodeSlice {
    fn pass(&mut self, bytes: u64) -> Range<u64> {
        self.passed = self.passed.saturating_add(bytes);
        let begin = self.skip.min(bytes);
        let end = begin + self.left.min(bytes - begin);
        self.skip -= begin;
        self.left -= end - begin;
        begin..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `bytes` one by one inside of these ranges, the outermost first; gives which were meant.
    fn read(ranges: &[(u64, u64)], bytes: u8) -> Vec<u8> {
        let mut slices = Slices::new();
        for (at, &(begin, end)) in ranges.iter().enumerate() {
            slices.enter(at + 1, begin..end);
        }
        let meant = (0..bytes).filter(|_| !slices.is_over() && slices.take(1).is_some());
        meant.collect()
    }

    #[test]
    fn ev_740_a_part_of_a_part_is_counted_from_where_that_begins() {
        for (ranges, expect) in [
            (&[(0, u64::MAX)][..], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9][..]),
            (&[(3, 8)][..], &[3, 4, 5, 6, 7][..]),
            (&[(8, u64::MAX)][..], &[8, 9][..]),
            (&[(3, 3)][..], &[][..]),
            (&[(2, 9), (3, 8)][..], &[5, 6, 7][..]),
            (&[(1, 3), (3, 8)][..], &[4, 5][..]),
            (&[(0, 2), (0, 4), (5, u64::MAX)][..], &[5, 6][..]),
            (&[(5, 9), (2, 6)][..], &[][..]),
            (
                &[(u64::MAX, u64::MAX), (u64::MAX - 1, u64::MAX)][..],
                &[][..],
            ),
        ] {
            assert_eq!(read(ranges, 10), expect, "{ranges:?}");
        }
    }

    #[test]
    fn ev_740_what_a_part_leaves_out_does_not_count_around_it() {
        let mut slices = Slices::new();
        slices.enter(1, 2..6);
        // Two nodes of which two bytes each are meant, and one of which all are.
        let mut meant = Vec::new();
        for range in [1..3, 0..2, 0..u64::MAX] {
            slices.enter(2, range);
            let of_it: Vec<usize> = (0..4).filter(|_| slices.take(1).is_some()).collect();
            meant.push(of_it);
            slices.leave(2);
        }
        assert_eq!(meant, [vec![], vec![0, 1], vec![0, 1]]);
        assert!(slices.is_over());
    }

    #[test]
    fn ev_740_an_item_without_bytes_is_meant_where_it_stands_inside() {
        let mut slices = Slices::new();
        slices.enter(1, 1..2);
        for (bytes, inside) in [(0, false), (1, false), (0, true), (1, true), (0, false)] {
            assert_eq!(slices.take(bytes).is_some(), inside);
        }
    }
}
