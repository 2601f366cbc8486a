//! Copies a linear memory page by page, and leaves out what cannot differ.
//!
//! Fresh pages are what a copy costs, not bytes: the copy of a page that the guest has never touched would make the
//! system give it two, one to read and one to write. On Linux the page table, which a process may read of itself, shows
//! which pages were touched; elsewhere, and where it is hidden, all of the memory is compared. Where most of a huge page
//! is to be copied, the copy gets one: the system makes it in a tenth of the time of its 512 pages.

#[cfg(target_os = "linux")]
mod huge;

use std::ops::Range;

/// Makes `to` equal to `from`. `to` is the memory of a new instance of the same module, of the same size: zero, but for
/// `initialised`, which data segments have written.
pub(super) fn copy(from: &[u8], to: &mut [u8], initialised: &Range<usize>) {
    let touched = touched(from);
    let touched = touched.as_deref();
    #[cfg(target_os = "linux")]
    huge::copy_with(to, touched, |to| {
        copy_pages(from, to, touched, initialised);
    });
    #[cfg(not(target_os = "linux"))]
    copy_pages(from, to, touched, initialised);
}

fn copy_pages(from: &[u8], to: &mut [u8], touched: Option<&[bool]>, initialised: &Range<usize>) {
    let (from, _) = from.as_chunks::<PAGE>();
    let (to, _) = to.as_chunks_mut::<PAGE>();
    for (index, (from, to)) in from.iter().zip(to).enumerate() {
        if touched.is_some_and(|touched| !touched[index]) {
            continue;
        }
        let start = index * PAGE;
        let was_zero = start >= initialised.end || start + PAGE <= initialised.start;
        let same = if was_zero {
            // Does not look at the page of the child, which would be a fresh one.
            *from == ZERO
        } else {
            *from == *to
        };
        if !same {
            *to = *from;
        }
    }
}

const PAGE: usize = 4096;
static ZERO: [u8; PAGE] = [0; PAGE];

/// For each page of a memory, whether it may differ from that of a new instance. `None` if that is unknown.
///
/// A page without an entry in the page table has never been touched since the memory was mapped or reset, so it shows
/// what the mapping has at this place: zeros, or the module's initial data. The same is true of a page that is still
/// the file's: a write would have made it the process's own.
#[cfg(target_os = "linux")]
fn touched(memory: &[u8]) -> Option<Vec<bool>> {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    if memory.len() < WORTH_BYTES || rustix::param::page_size() != PAGE {
        return None;
    }
    // Opened each time: a process that was cloned meanwhile has another page table, and an open file would show the old
    // one.
    let table = File::open("/proc/self/pagemap").ok()?;
    let first = memory.as_ptr().addr() / PAGE;
    if !memory.as_ptr().addr().is_multiple_of(PAGE) {
        return None;
    }
    let mut entries = vec![0; memory.len() / PAGE * 8];
    table.read_exact_at(&mut entries, first as u64 * 8).ok()?;
    let (entries, _) = entries.as_chunks();
    let may_differ = |entry: &[u8; 8]| {
        let entry = u64::from_ne_bytes(*entry);
        entry & SWAPPED != 0 || (entry & PRESENT != 0 && entry & OF_FILE == 0)
    };
    Some(entries.iter().map(may_differ).collect())
}

/// Smaller memories are compared faster than the page table is read.
#[cfg(target_os = "linux")]
const WORTH_BYTES: usize = 256 << 10;

#[cfg(not(target_os = "linux"))]
const fn touched(_memory: &[u8]) -> Option<Vec<bool>> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_711_pages_are_copied_whatever_was_there() {
        // Heap memory is not page-aligned, so this compares.
        let mut from = vec![0; 8 * PAGE];
        let mut to = from.clone();
        // Initialised by a segment that ends within page 2.
        to[PAGE..2 * PAGE + 7].fill(9);
        from[PAGE + 1] = 9;
        from[5 * PAGE - 1] = 1;
        from[7 * PAGE] = 2;
        copy(&from, &mut to, &(PAGE..2 * PAGE + 7));
        assert_eq!(from, to);
    }

    /// Mapped memory with random pages, some of them dense enough for huge pages.
    #[cfg(target_os = "linux")]
    #[test]
    fn ai_711_mapped_memories_are_copied_exactly() {
        const PAGES: usize = 3 * 512;
        let mut seed = 7_u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(seed >> 33).unwrap() % below
        };
        let initialised = 100 * PAGE..600 * PAGE + 9;
        for _ in 0..12 {
            let mut from = memmap2::MmapMut::map_anon(PAGES * PAGE).unwrap();
            let mut to = memmap2::MmapMut::map_anon(PAGES * PAGE).unwrap();
            from[initialised.clone()].fill(3);
            to[initialised.clone()].fill(3);
            // Sparse, dense and full.
            let writes = [20, PAGES, 20 * PAGES][random(3)];
            for _ in 0..writes {
                let at = random(PAGES) * PAGE + random(PAGE);
                from[at] = u8::try_from(random(256)).unwrap();
            }
            copy(&from, &mut to, &initialised);
            assert!(from[..] == to[..]);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ai_1105_a_page_that_was_written_is_touched() {
        let mut map = memmap2::MmapMut::map_anon(4 << 20).unwrap();
        map[5 * PAGE + 3] = 1;
        let Some(touched) = touched(&map) else {
            // Hidden from this process.
            return;
        };
        assert_eq!(touched.len(), 1024);
        assert!(touched[5]);
        // With huge pages the neighbours are touched too, never the end.
        assert!(!touched[1023]);
    }
}
