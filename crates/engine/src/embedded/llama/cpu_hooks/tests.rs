//! What both kinds of operations need to be compared.

mod attention;
mod products;

use std::ffi::c_int;

use llama_cpp_sys_2 as sys;

unsafe extern "C" {
    fn sapwood_hooks_take(operation: *const sys::ggml_tensor) -> bool;
    fn sapwood_hooks_work_bytes(operation: *const sys::ggml_tensor, threads: c_int) -> usize;
}

/// Whether an operation is computed here.
fn is_taken(operation: *const sys::ggml_tensor) -> bool {
    // SAFETY: the tensor and its operands are live.
    unsafe { sapwood_hooks_take(operation) }
}

/// Returns the bytes of the work buffer that an operation asks for, if it is computed here.
fn work_bytes(operation: *const sys::ggml_tensor, threads: u32) -> Option<u64> {
    let threads = c_int::try_from(threads).expect("they are few");
    // SAFETY: the tensor and its operands are live.
    let bytes = unsafe { sapwood_hooks_work_bytes(operation, threads) };
    (bytes > 0).then_some(bytes as u64)
}

/// Computes a result as a graph, as llama.cpp does.
///
/// # Safety
/// The context is live, owns the result and has room for a graph.
unsafe fn run_graph(
    context: *mut sys::ggml_context,
    result: *mut sys::ggml_tensor,
    threads: i32,
) -> Vec<f32> {
    // SAFETY: see above; the result has so many numbers.
    unsafe {
        let graph = sys::ggml_new_graph(context);
        sys::ggml_build_forward_expand(graph, result);
        sys::ggml_graph_compute_with_ctx(context, graph, threads);
        let numbers = usize::try_from(sys::ggml_nelements(result)).expect("it is small");
        std::slice::from_raw_parts((*result).data.cast(), numbers).to_vec()
    }
}
