//! Huge pages for the copy of a memory. Advice to the system, the only `unsafe` code beside the loading of artefacts.
//!
//! Where every program gets huge pages anyway, or none does, nothing is advised. What is advised ends with the copy: the
//! instances that later have the same memory may touch little of it.

use std::ops::Range;
use std::sync::OnceLock;

use rustix::mm::{Advice, madvise};

use super::PAGE;

/// Copies with huge pages where `wanted` names enough of their pages; the others are left to the system.
pub(super) fn copy_with(to: &mut [u8], wanted: Option<&[bool]>, copy: impl FnOnce(&mut [u8])) {
    let blocks = match wanted {
        Some(wanted) if are_for_the_asking() => dense_blocks(to.as_ptr().addr(), wanted),
        _ => Vec::new(),
    };
    advise(to, &blocks, Advice::LinuxHugepage);
    copy(to);
    advise(to, &blocks, Advice::LinuxNoHugepage);
}

fn advise(memory: &mut [u8], blocks: &[Range<usize>], advice: Advice) {
    for block in blocks {
        let Some(block) = memory.get_mut(block.clone()) else {
            continue;
        };
        // SAFETY: the range is that of an exclusive reference, and neither advice changes what stands there.
        let advised = unsafe { madvise(block.as_mut_ptr().cast(), block.len(), advice) };
        if let Err(error) = advised {
            // The copy is made of small pages then.
            tracing::debug!(%error, "no huge pages for a fork");
        }
    }
}

/// The parts of a memory at `address` in which huge pages lie whose pages are mostly wanted.
fn dense_blocks(address: usize, wanted: &[bool]) -> Vec<Range<usize>> {
    let mut blocks: Vec<Range<usize>> = Vec::new();
    let mut start = address.next_multiple_of(HUGE) - address;
    if !start.is_multiple_of(PAGE) {
        return blocks;
    }
    while let Some(pages) = wanted.get(start / PAGE..(start + HUGE) / PAGE) {
        let end = start + HUGE;
        if pages.iter().filter(|&&wanted| wanted).count() >= DENSE_PAGES {
            match blocks.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => blocks.push(start..end),
            }
        }
        start = end;
    }
    blocks
}

/// Whether a program gets huge pages if, and only if, it asks for them.
fn are_for_the_asking() -> bool {
    static ASKED: OnceLock<bool> = OnceLock::new();
    *ASKED.get_or_init(|| {
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
            .is_ok_and(|setting| setting.contains("[madvise]"))
    })
}

/// The size of a huge page on x86-64, and on AArch64 with pages of 4 KiB.
const HUGE: usize = 2 << 20;
/// Three quarters of its pages: a copy takes at most a third more memory than it needs, and no more than was charged.
const DENSE_PAGES: usize = HUGE / PAGE / 4 * 3;

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = HUGE / PAGE;

    #[test]
    fn ai_1105_huge_pages_are_asked_for_where_most_of_their_pages_are_copied() {
        let check = |address: usize, wanted: &[(usize, usize)], expected: &[Range<usize>]| {
            let mut pages = vec![false; 4 * PAGES];
            for &(start, end) in wanted {
                pages[start..end].fill(true);
            }
            assert_eq!(dense_blocks(address, &pages), expected);
        };
        let whole = 0..4 * HUGE;
        check(4 * HUGE, &[(0, 4 * PAGES)], std::slice::from_ref(&whole));
        check(
            0,
            &[(0, PAGES), (2 * PAGES, 3 * PAGES)],
            &[0..HUGE, 2 * HUGE..3 * HUGE],
        );
        // Three quarters, and one page less.
        check(0, &[(0, 384)], std::slice::from_ref(&(0..HUGE)));
        check(0, &[(1, 384)], &[]);
        // Only whole ones, by their addresses.
        check(
            HUGE - PAGE,
            &[(0, 4 * PAGES)],
            std::slice::from_ref(&(PAGE..PAGE + 3 * HUGE)),
        );
        check(
            HUGE + PAGE,
            &[(PAGES, 2 * PAGES)],
            std::slice::from_ref(&(HUGE - PAGE..2 * HUGE - PAGE)),
        );
        // No memory of the engine.
        check(HUGE + 1, &[(0, 4 * PAGES)], &[]);
        assert!(dense_blocks(0, &[true; PAGES - 1]).is_empty());
    }
}
