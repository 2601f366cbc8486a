//! What a module needs in WebAssembly: the host's functions, one controller in a static, and, without the standard
//! library, an allocator and a panic handler.

pub(crate) mod host;

use alloc::string::String;
use core::cell::RefCell;

/// A value of a module, which has one thread.
struct SingleThread<T>(RefCell<T>);

// SAFETY: WebAssembly modules of this target have one thread; threads would need a target feature that hosts refuse.
unsafe impl<T> Sync for SingleThread<T> {}

/// The controller of a module.
pub struct Exported<M>(SingleThread<Option<M>>);

impl<M> Exported<M> {
    /// No controller yet.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "it is the initial value of a static, so it is const"
    )]
    pub const fn new() -> Self {
        Self(SingleThread(RefCell::new(None)))
    }

    /// Creates the controller.
    pub fn create(&self, machine: fn() -> M) {
        let machine = machine();
        *self.0.0.borrow_mut() = Some(machine);
    }

    /// Runs a callback with the argument that the host has for it, and returns its result to the host.
    pub fn call(&self, callback: fn(&mut M, &[u8]) -> String) {
        let argument = host::process_argument();
        let mut machine = self.0.0.borrow_mut();
        let Some(machine) = machine.as_mut() else {
            panic!("a callback was called before aici_create");
        };
        host::return_result(&callback(machine, &argument));
    }
}

/// The first callback of a module.
pub fn start() {
    #[cfg(feature = "std")]
    std::panic::set_hook(alloc::boxed::Box::new(|info| {
        host::log(&alloc::format!("{info}\n"))
    }));
}

#[cfg(not(feature = "std"))]
mod freestanding {
    use core::fmt::Write as _;
    use core::panic::PanicInfo;
    use core::ptr::NonNull;

    use crate::allocator::{Heap, Pages};

    const PAGE: usize = 64 * 1024;

    #[global_allocator]
    static HEAP: Heap<Memory> = Heap::new(Memory);

    struct Memory;

    impl Pages for Memory {
        fn grow(&self, bytes: usize) -> Option<(NonNull<u8>, usize)> {
            let pages = bytes.div_ceil(PAGE);
            let before = core::arch::wasm32::memory_grow(0, pages);
            if before == usize::MAX {
                return None;
            }
            let start = core::ptr::with_exposed_provenance_mut(before * PAGE);
            Some((NonNull::new(start)?, pages * PAGE))
        }
    }

    #[panic_handler]
    fn panic(info: &PanicInfo<'_>) -> ! {
        // In pieces, because the panic may be that no memory is left.
        let _ = writeln!(super::host::Log, "{info}");
        core::arch::wasm32::unreachable()
    }
}
