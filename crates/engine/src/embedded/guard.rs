//! Catches C++ exceptions of llama.cpp and turns them into errors; one that reached Rust would end the process.
//!
//! The other half is `guard.cpp`, because nothing but C++ can catch.
//!
//! ```text
//!   guarded (Rust) ──► sapwood_guard (C++: try) ──► run (Rust) ──► llama_decode … (C++: throw)
//! ```
//!
//! What is thrown passes one frame of Rust on its way, `run`, which holds nothing that has to be dropped. A failed
//! `GGML_ASSERT` is no exception: it ends the process, and what could fail one is refused before (`checks`).

use std::ffi::{CStr, c_char, c_int, c_void};

use llama_cpp_sys_2 as sys;

/// What throws: a text that cannot be tokenised, memory that is not there. The others allocate nothing, or catch themselves.
pub(super) mod throwing {
    use super::{c_char, sys};

    // SAFETY: these are the declarations of llama.cpp's header, as `sys` has them, but for what may pass them.
    unsafe extern "C-unwind" {
        pub(in super::super) fn llama_model_load_from_file(
            path: *const c_char,
            params: sys::llama_model_params,
        ) -> *mut sys::llama_model;
        pub(in super::super) fn llama_init_from_model(
            model: *mut sys::llama_model,
            params: sys::llama_context_params,
        ) -> *mut sys::llama_context;
        pub(in super::super) fn llama_decode(
            context: *mut sys::llama_context,
            batch: sys::llama_batch,
        ) -> i32;
        pub(in super::super) fn llama_tokenize(
            vocabulary: *const sys::llama_vocab,
            text: *const c_char,
            length: i32,
            tokens: *mut sys::llama_token,
            room: i32,
            add_special: bool,
            parse_special: bool,
        ) -> i32;
        pub(in super::super) fn llama_token_to_piece(
            vocabulary: *const sys::llama_vocab,
            token: sys::llama_token,
            buffer: *mut c_char,
            room: i32,
            lstrip: i32,
            special: bool,
        ) -> i32;
    }
}

unsafe extern "C" {
    fn sapwood_guard(
        call: unsafe extern "C-unwind" fn(*mut c_void),
        data: *mut c_void,
        what: *mut c_char,
        room: usize,
    ) -> c_int;
}

/// A call, and what it returned.
struct Task<F, R> {
    call: Option<F>,
    returned: Option<R>,
}

/// Makes a call that may throw. It must not panic, and hold nothing that has to be dropped.
///
/// # Errors
/// What the exception says.
pub(super) fn guarded<F: FnOnce() -> R + Copy, R: Copy>(call: F) -> Result<R, String> {
    let mut task = Task {
        call: Some(call),
        returned: None,
    };
    let mut what = [0_u8; 256];
    // SAFETY: `run` is for a task of these types, which outlives the call, and the buffer has the length passed.
    let thrown = unsafe {
        let data = (&raw mut task).cast();
        sapwood_guard(run::<F, R>, data, what.as_mut_ptr().cast(), what.len())
    };
    match task.returned {
        Some(returned) if thrown == 0 => Ok(returned),
        _ => {
            let sent = CStr::from_bytes_until_nul(&what).unwrap_or_default();
            Err(sent.to_string_lossy().into_owned())
        }
    }
}

unsafe extern "C-unwind" fn run<F: FnOnce() -> R, R>(data: *mut c_void) {
    // SAFETY: `guarded` passes the address of its task, which nobody else uses meanwhile.
    let task = unsafe { &mut *data.cast::<Task<F, R>>() };
    if let Some(call) = task.call.take() {
        task.returned = Some(call());
    }
}
