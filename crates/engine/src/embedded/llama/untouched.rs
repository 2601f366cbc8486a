//! Memory of KV caches that nobody has used yet: it is no part of the process until it is (`untouched_memory.cpp`).

unsafe extern "C" {
    fn sapwood_untouched_install();
    fn sapwood_untouched_bytes() -> u64;
}

/// Has llama.cpp leave the memory of new KV caches to the kernel until it is used. Must be called before the first model is loaded,
/// and once.
pub(super) fn install() {
    // SAFETY: the caller keeps it from running twice, and beside another call of ggml.
    unsafe { sapwood_untouched_install() };
}

/// Returns how many bytes the caches of loaded models will take in addition to what they take now, if all their cells come into use.
pub(in super::super) fn untouched_bytes() -> u64 {
    // SAFETY: it may be called at any time, and excludes buffers from being freed meanwhile.
    unsafe { sapwood_untouched_bytes() }
}
