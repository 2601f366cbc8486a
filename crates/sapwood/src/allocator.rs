//! The process's allocator, and when it returns memory to the operating system.

/// Reuses the memory of a message for the next one; the C library's allocator asks the system each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Makes the allocator return large blocks to the system when they are freed, and not a second later, which is
/// mimalloc's default: otherwise refused requests and those that come in their place would be in memory together, and
/// the byte budget would cover half of the actual memory (D-47). Messages of 64 KiB and of 1 MiB cost the same
/// processor time either way.
pub(crate) fn give_back_at_once() {
    // SAFETY: sets a number in a static table; any index within it is sound, and no other thread has been started.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, 0) }
}

/// The index of `mi_option_purge_delay`, for which the crate has no name.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
