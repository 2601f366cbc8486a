//! What our own C++ computes inside ggml's operations: attention over KV cells of 16-bit floats (`attention_x86.cpp`), and products
//! of Q4_1, Q5_1, Q5_0 and Q8_0 weights with several tokens (`matmul_x86.cpp`).
//!
//! ggml's fastest paths are for other types of weights. The K types fall back to these in models whose rows are no multiple of 256, and
//! small models are often used with Q8_0. Our products of finite numbers have ggml's bits. Attention has not: it is more exact, and
//! each of its numbers is the same whatever is computed beside it.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::backends::cpu_function;

unsafe extern "C" {
    fn sapwood_hooks_install(may_use_avx512: bool, of_backend: *mut c_void) -> *const c_char;
}

/// Has ggml call ours from now on. Must be called before the first model is loaded; later calls change nothing. Returns the
/// instructions they use; none where ggml's own path stays, as on other processors.
pub(super) fn install() -> Option<&'static str> {
    static INSTALLED: OnceLock<Option<&'static str>> = OnceLock::new();
    *INSTALLED.get_or_init(|| install_with(true))
}

fn install_with(may_use_avx512: bool) -> Option<&'static str> {
    let of_backend =
        cpu_function(c"ggml_threadpool_new").map_or(ptr::null_mut(), ptr::NonNull::as_ptr);
    // SAFETY: it returns null or a static string; the caller keeps it from running beside an operation of ggml. The pointer is to a
    // function of the CPU backend, or null.
    let name = unsafe { sapwood_hooks_install(may_use_avx512, of_backend) };
    if name.is_null() {
        return None;
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(name) }.to_str().ok()
}

#[cfg(all(test, not(feature = "dynamic-backends")))]
mod tests;
