//! What is asked of ggml's registry of back-ends: functions of the CPU backend, which may be in a library that no linker sees.

use std::ffi::{CStr, c_void};
use std::mem;
#[cfg(any(test, feature = "dynamic-backends"))]
use std::path::Path;
use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;

type NewThreadpool =
    unsafe extern "C" fn(*mut sys::ggml_threadpool_params) -> *mut sys::ggml_threadpool;
type FreeThreadpool = unsafe extern "C" fn(*mut sys::ggml_threadpool);

/// The functions that make and free worker threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThreadpoolFunctions {
    pub(super) new: NewThreadpool,
    pub(super) free: FreeThreadpool,
}

impl ThreadpoolFunctions {
    /// Those of the CPU backend; `None` without one.
    pub(super) fn find() -> Option<Self> {
        let new = cpu_function(c"ggml_threadpool_new")?;
        let free = cpu_function(c"ggml_threadpool_free")?;
        // SAFETY: ggml gives its functions by these names, and `ggml-cpu.h` declares them with these types. Their library is never
        // unloaded.
        Some(unsafe {
            Self {
                new: mem::transmute::<NonNull<c_void>, NewThreadpool>(new),
                free: mem::transmute::<NonNull<c_void>, FreeThreadpool>(free),
            }
        })
    }
}

/// A function of the CPU backend that others may ask for.
pub(super) fn cpu_function(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: both names are NUL-terminated, and the registry lives as long as the process.
    let function = unsafe {
        let cpu = sys::ggml_backend_reg_by_name(c"CPU".as_ptr());
        if cpu.is_null() {
            return None;
        }
        sys::ggml_backend_reg_get_proc_address(cpu, name.as_ptr())
    };
    NonNull::new(function)
}

/// Loads a library with a back-end, which stays loaded.
///
/// # Errors
/// The error that ggml logged; it logs none for kernels of another processor.
#[cfg(any(test, feature = "dynamic-backends"))]
pub(super) fn load_library(path: &Path) -> Result<(), String> {
    let path = path.as_os_str().as_encoded_bytes();
    let path = std::ffi::CString::new(path).map_err(|error| error.to_string())?;
    super::forward_log();
    let _ = super::LAST_ERROR.take();
    // SAFETY: the path is NUL-terminated. The caller has made sure that only who may replace this program may write to the library,
    // whose code runs from here on.
    let backend = unsafe { sys::ggml_backend_load(path.as_ptr()) };
    if !backend.is_null() {
        return Ok(());
    }
    let logged = super::LAST_ERROR.take();
    Err(logged.unwrap_or_else(|| "it is not for this machine".to_owned()))
}
