//! Catches C++ exceptions of llama.cpp and turns them into errors; an exception that reached Rust would end the
//! process.
//!
//! The other half is `guard.cpp`, because only C++ can catch C++ exceptions; `throwing.cpp` throws some, for tests.
//!
//! ```text
//!   guarded (Rust) ──► sapwood_guard (C++: try) ──► run (Rust) ──► llama_decode … (C++: throw)
//! ```
//!
//! An exception unwinds through one frame of Rust, `run`, which holds nothing that has to be dropped. A failed
//! `GGML_ASSERT` is not an exception: it ends the process, so inputs that could fail one are refused earlier
//! (`gguf::checks`).

#[cfg(test)]
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
#[cfg(test)]
use std::ptr;
#[cfg(test)]
use std::sync::atomic::AtomicU32;

use llama_cpp_sys_2 as sys;

/// The functions that throw: for a text that cannot be tokenised, or if memory runs out. All others allocate nothing,
/// or catch their exceptions.
pub(super) mod throwing {
    use super::{c_char, sys};

    // SAFETY: these are the declarations of llama.cpp's header, as in `sys`, except that exceptions may unwind through
    // them.
    unsafe extern "C-unwind" {
        pub(in super::super) fn llama_model_load_from_file(
            path: *const c_char,
            params: sys::llama_model_params,
        ) -> *mut sys::llama_model;
        pub(in super::super) fn llama_init_from_model(
            model: *mut sys::llama_model,
            params: sys::llama_context_params,
        ) -> *mut sys::llama_context;
        pub(in super::super) fn llama_adapter_lora_init(
            model: *mut sys::llama_model,
            path: *const c_char,
        ) -> *mut sys::llama_adapter_lora;
        pub(in super::super) fn llama_decode(
            context: *mut sys::llama_context,
            batch: sys::llama_batch,
        ) -> i32;
        pub(in super::super) fn llama_encode(
            context: *mut sys::llama_context,
            batch: sys::llama_batch,
        ) -> i32;
        pub(in super::super) fn llama_state_seq_get_size_ext(
            context: *mut sys::llama_context,
            slot: sys::llama_seq_id,
            flags: sys::llama_state_seq_flags,
        ) -> usize;
        pub(in super::super) fn llama_state_seq_get_data_ext(
            context: *mut sys::llama_context,
            buffer: *mut u8,
            room: usize,
            slot: sys::llama_seq_id,
            flags: sys::llama_state_seq_flags,
        ) -> usize;
        pub(in super::super) fn llama_state_seq_set_data_ext(
            context: *mut sys::llama_context,
            state: *const u8,
            size: usize,
            slot: sys::llama_seq_id,
            flags: sys::llama_state_seq_flags,
        ) -> usize;
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

/// Has the decode calls of contexts that this thread makes from now on throw at the end of a graph: of the one at which this number,
/// counted down by each, becomes zero.
#[cfg(test)]
pub(super) fn throwing_graphs() -> &'static AtomicU32 {
    let graphs = Box::leak(Box::default());
    GRAPHS.set(Some(graphs));
    graphs
}

#[cfg(test)]
thread_local! {
    static GRAPHS: Cell<Option<&'static AtomicU32>> = const { Cell::new(None) };
}

/// Gives a context what [`throwing_graphs`] has asked for.
#[cfg(test)]
pub(super) fn set_throwing_graphs(params: &mut sys::llama_context_params) {
    unsafe extern "C" {
        // Called by C++ alone, which is what it throws through.
        fn sapwood_throw_at_graph(
            node: *mut sys::ggml_tensor,
            is_asked: bool,
            data: *mut c_void,
        ) -> bool;
    }
    if let Some(graphs) = GRAPHS.get() {
        params.cb_eval = Some(sapwood_throw_at_graph);
        params.cb_eval_user_data = ptr::from_ref(graphs).cast_mut().cast();
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

/// A call, and its result.
struct Task<F, R> {
    call: Option<F>,
    returned: Option<R>,
}

/// Makes a call that may throw. The call must not panic, and must not hold anything that has to be dropped.
///
/// # Errors
/// The message of the exception.
pub(super) fn guarded<F: FnOnce() -> R + Copy, R: Copy>(call: F) -> Result<R, String> {
    // On the stack of this function, and passed by address: the guard is C and knows no closures.
    let mut task = Task {
        call: Some(call),
        returned: None,
    };
    let mut what = [0_u8; 256];
    // SAFETY: `run` has the types of this task, which outlives the call, and the buffer has the length passed.
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
    // SAFETY: `guarded` passes the address of its task, which nothing else uses during the call.
    let task = unsafe { &mut *data.cast::<Task<F, R>>() };
    if let Some(call) = task.call.take() {
        task.returned = Some(call());
    }
}
