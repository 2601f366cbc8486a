//! Byte ranges of nodes, and their intersection when they are nested (EV-740).
//!
//! ```text
//!   outer      ····[────────────────)      selects from its own content: A, then 3..8 of B, then C
//!   inner          A A A ·[─────)· C C     only the selected range of B counts towards the outer range
//! ```

use std::ops::Range;

/// The selected part of some bytes that were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceOverlap {
    /// The selected range of them.
    pub range: Range<usize>,
    /// Whether bytes after these may be selected as well.
    pub more: bool,
}

impl SliceOverlap {
    /// Selects all bytes.
    pub(in crate::session) const fn all(bytes: usize) -> Self {
        Self {
            range: 0..bytes,
            more: true,
        }
    }
}

/// The ranges around a reader's position, the innermost last. Most readers never have one.
#[derive(Debug, Default)]
pub(in crate::session) struct Slices(Vec<NodeSlice>);

/// The range of one node on the path.
#[derive(Debug)]
struct NodeSlice {
    /// Length of the path at the node with this range.
    depth: usize,
    begin: u64,
    len: u64,
    /// Bytes of the node's content that were passed.
    passed: u64,
    /// Bytes to skip until the selection of all enclosing ranges begins, and the number of selected bytes after that.
    skip: u64,
    left: u64,
}

impl NodeSlice {
    /// Whether the range is exhausted. The bytes before an empty selection are only read if an enclosing range counts
    /// them.
    const fn is_over(&self) -> bool {
        self.left == 0 && (self.skip == 0 || self.len == 0)
    }
}

impl Slices {
    /// Applies `range` to the node that the reader has just entered, at the end of a path of this length.
    pub(in crate::session) fn enter(&mut self, depth: usize, range: Range<u64>) {
        let (skip, left) = self
            .0
            .last()
            .map_or((0, u64::MAX), |outer| (outer.skip, outer.left));
        let len = range.end.saturating_sub(range.start);
        // What an enclosing range skips or selects is counted in bytes of this range, so both carry over to it.
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

    /// Ends the range of the node at the end of a path of this length.
    pub(in crate::session) fn leave(&mut self, depth: usize) {
        // Most nodes on a path have no range of their own.
        let Some(slice) = self.0.pop_if(|slice| slice.depth == depth) else {
            return;
        };
        if let Some(outer) = self.0.last_mut() {
            // The enclosing range counts the bytes of this node's range only.
            outer.pass(slice.passed.saturating_sub(slice.begin).min(slice.len));
        }
    }

    /// Whether the selection is exhausted for the innermost node with a range.
    pub(in crate::session) fn is_over(&self) -> bool {
        self.0.last().is_some_and(NodeSlice::is_over)
    }

    /// Passes `bytes`. Returns which of them are selected; `None` if none are, and then an item that ends with them is
    /// not selected either. An item without bytes is selected if it is inside the range.
    pub(in crate::session) fn take(&mut self, bytes: usize) -> Option<SliceOverlap> {
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

    /// Reads `bytes` one by one within these ranges, the outermost first; returns those that were selected.
    fn read(ranges: &[(u64, u64)], bytes: u8) -> Vec<u8> {
        let mut slices = Slices::default();
        for (at, &(begin, end)) in ranges.iter().enumerate() {
            slices.enter(at + 1, begin..end);
        }
        let meant = (0..bytes).filter(|_| !slices.is_over() && slices.take(1).is_some());
        meant.collect()
    }

    #[test]
    fn ev_740_an_outer_range_is_counted_from_where_the_inner_one_begins() {
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
    fn ev_740_only_selected_bytes_count_towards_the_enclosing_range() {
        let mut slices = Slices::default();
        slices.enter(1, 2..6);
        // Two nodes with two selected bytes each, and one that is selected whole.
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
    fn ev_740_an_item_without_bytes_is_selected_inside_the_range() {
        let mut slices = Slices::default();
        slices.enter(1, 1..2);
        for (bytes, inside) in [(0, false), (1, false), (0, true), (1, true), (0, false)] {
            assert_eq!(slices.take(bytes).is_some(), inside);
        }
    }
}
