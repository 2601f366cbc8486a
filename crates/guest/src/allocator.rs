//! The allocator of modules without the standard library: blocks of few sizes, each with a list of free ones.
//!
//! Nothing is merged or given back, as memory of a module never shrinks. A list that grows by doubling leaves blocks
//! that the next one uses. It has a fifth of the code of a general allocator, and its speed does not depend on what was
//! freed before.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::{Cell, RefCell};
use core::ptr::{self, NonNull};

/// Blocks are multiples of this, and so aligned.
const UNIT: usize = 16;
/// Four sizes between each power of two and the next: at most a fifth of a block is wasted.
const STEPS: usize = 4;
/// Enough for 4 GiB.
const CLASSES: usize = 28 * STEPS;

/// A source of fresh memory.
pub(crate) trait Pages {
    /// Adds at least this many bytes, a multiple of [`UNIT`]; returns where they begin and how many there are.
    fn grow(&self, bytes: usize) -> Option<(NonNull<u8>, usize)>;
}

/// The heap of a module, which has one thread.
pub(crate) struct Heap<P> {
    pages: P,
    state: RefCell<Blocks>,
}

/// A free block: where the next one of its size is.
type Free = Option<NonNull<u8>>;

struct Blocks {
    free: [Cell<Free>; CLASSES],
    /// Memory that was never used.
    fresh: *mut u8,
    fresh_bytes: usize,
}

// SAFETY: it is used by modules, which have one thread, and by tests of one thread.
unsafe impl<P> Sync for Heap<P> {}

impl<P: Pages> Heap<P> {
    pub(crate) const fn new(pages: P) -> Self {
        Self {
            pages,
            state: RefCell::new(Blocks {
                free: [const { Cell::new(None) }; CLASSES],
                fresh: ptr::null_mut(),
                fresh_bytes: 0,
            }),
        }
    }

    fn fresh(&self, bytes: usize) -> *mut u8 {
        let Ok(mut blocks) = self.state.try_borrow_mut() else {
            return ptr::null_mut();
        };
        if blocks.fresh_bytes < bytes {
            let Some((start, grown)) = self.pages.grow(bytes) else {
                return ptr::null_mut();
            };
            // Fresh pages usually follow the old ones. If something else grew the memory meanwhile, what is left is lost.
            if blocks.fresh.wrapping_add(blocks.fresh_bytes) == start.as_ptr() {
                blocks.fresh_bytes += grown;
            } else {
                (blocks.fresh, blocks.fresh_bytes) = (start.as_ptr(), grown);
            }
        }
        let block = blocks.fresh;
        blocks.fresh = block.wrapping_add(bytes);
        blocks.fresh_bytes -= bytes;
        block
    }
}

/// The class of a size, and the bytes of its blocks; `None` if there is no such class.
fn class_of(layout: Layout) -> Option<(usize, usize)> {
    if layout.align() > UNIT {
        return None;
    }
    let units = layout.size().div_ceil(UNIT).max(1);
    let (class, units) = if units <= STEPS {
        (units - 1, units)
    } else {
        let power = (units - 1).ilog2() as usize;
        let step = 1 << (power - 2);
        let index = (units - 1 - (1 << power)) / step;
        (
            STEPS + (power - 2) * STEPS + index,
            (1 << power) + (index + 1) * step,
        )
    };
    (class < CLASSES).then_some(())?;
    Some((class, units.checked_mul(UNIT)?))
}

// SAFETY: a block belongs to one owner at a time: it is cut once from fresh memory, and is in a free list only between
// `dealloc` and the next `alloc`. Its size and alignment are at least those of the layout, by `class_of`.
unsafe impl<P: Pages> GlobalAlloc for Heap<P> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((class, bytes)) = class_of(layout) else {
            return ptr::null_mut();
        };
        let reused = self.state.try_borrow().ok().and_then(|blocks| {
            let block = blocks.free[class].get()?;
            // SAFETY: `dealloc` wrote the next free block there, and nobody has owned this one since.
            blocks.free[class].set(unsafe { block.cast::<Free>().read() });
            Some(block.as_ptr())
        });
        reused.unwrap_or_else(|| self.fresh(bytes))
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let (Some((class, _)), Some(block), Ok(blocks)) = (
            class_of(layout),
            NonNull::new(block),
            self.state.try_borrow(),
        ) else {
            return;
        };
        // SAFETY: the block is not used any more, is at least `UNIT` bytes long and aligned to that.
        unsafe { block.cast::<Free>().write(blocks.free[class].get()) };
        blocks.free[class].set(Some(block));
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else {
            return ptr::null_mut();
        };
        if class_of(layout) == class_of(wanted) {
            return block;
        }
        // SAFETY: the caller keeps the contract of `realloc`: `wanted` is not empty.
        let moved = unsafe { self.alloc(wanted) };
        if !moved.is_null() {
            // SAFETY: both blocks are at least as long as the shorter layout, and they are different blocks.
            unsafe { ptr::copy_nonoverlapping(block, moved, layout.size().min(size)) };
            // SAFETY: the caller gives up the block, which has this layout.
            unsafe { self.dealloc(block, layout) };
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of a fixed size that grows by pieces.
    struct Arena {
        memory: Box<[Cell<u128>]>,
        used: Cell<usize>,
    }

    impl Arena {
        fn new(units: usize) -> Self {
            Self {
                memory: (0..units).map(|_| Cell::new(0)).collect(),
                used: Cell::new(0),
            }
        }
    }

    impl Pages for Arena {
        fn grow(&self, bytes: usize) -> Option<(NonNull<u8>, usize)> {
            let start = self.used.get();
            let units = (bytes / UNIT).max(8);
            let piece = self.memory.get(start..start + units)?;
            self.used.set(start + units);
            Some((NonNull::from(piece).cast(), units * UNIT))
        }
    }

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 1).unwrap()
    }

    #[test]
    fn classes_fit_and_waste_little() {
        let mut before = (0, 0);
        for size in 1..5_000 {
            let (class, bytes) = class_of(layout(size)).unwrap();
            assert!(bytes >= size && bytes % UNIT == 0);
            assert!(
                size <= 4 * UNIT || bytes - size < size / 4 + UNIT,
                "{size}: {bytes}"
            );
            assert!(
                (class, bytes) == before
                    || (class == before.0 + 1 || before.0 == 0) && bytes > before.1
            );
            before = (class, bytes);
        }
        assert!(class_of(layout(1 << 31)).is_some());
        assert_eq!(class_of(Layout::from_size_align(8, 32).unwrap()), None);
    }

    #[test]
    fn blocks_are_apart_and_used_again() {
        let heap = Heap::new(Arena::new(4096));
        let mut blocks = Vec::new();
        // A fixed sequence of sizes, so that a failure is repeatable.
        let mut size = 7;
        for round in 0..400u32 {
            size = size * 37 % 300 + 1;
            // SAFETY: the layout is not empty, and the block is written within it.
            let block = unsafe { heap.alloc(layout(size)) };
            assert!(!block.is_null());
            // SAFETY: as above.
            unsafe { block.write_bytes(round as u8, size) };
            blocks.push((block, size, round as u8));
            if round % 3 == 2 {
                let (block, size, filled) = blocks.swap_remove(round as usize / 3 % blocks.len());
                // SAFETY: the block is owned here and has this layout.
                unsafe {
                    assert!(
                        core::slice::from_raw_parts(block, size)
                            .iter()
                            .all(|&byte| byte == filled)
                    );
                    heap.dealloc(block, layout(size));
                }
            }
        }
        for (block, size, filled) in blocks {
            // SAFETY: as above.
            let bytes = unsafe { core::slice::from_raw_parts(block, size) };
            assert!(bytes.iter().all(|&byte| byte == filled));
        }
    }

    #[test]
    fn a_list_that_grows_keeps_its_bytes_and_an_empty_arena_gives_null() {
        let heap = Heap::new(Arena::new(64));
        // SAFETY: the layouts are not empty, and those of the blocks.
        unsafe {
            let mut block = heap.alloc(layout(10));
            block.write_bytes(9, 10);
            block = heap.realloc(block, layout(10), 16);
            block = heap.realloc(block, layout(16), 200);
            assert!(
                core::slice::from_raw_parts(block, 10)
                    .iter()
                    .all(|&byte| byte == 9)
            );
            assert!(heap.alloc(layout(2_000)).is_null());
            assert!(heap.realloc(block, layout(200), 2_000).is_null());
            heap.dealloc(block, layout(200));
            assert_eq!(heap.alloc(layout(200)), block);
        }
    }
}
