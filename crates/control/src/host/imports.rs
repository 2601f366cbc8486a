//! The host functions of `env` (AI-605, AI-606). Those of WASI are in [`wasi`], those of `sapwood` in [`constraints`].
//!
//! Every function is short: the time limit of a callback is checked between instructions of the guest, not in here.
//! Sizes that a guest chooses are limited before anything is read.

mod constraints;
mod storage;
mod wasi;

use std::sync::Arc;

use wasmtime::{Caller, Engine, Linker, Memory};

use super::failure::Abort;
use super::long_texts::AT_ONCE_BYTES;
use super::state::{ControllerState, on_epoch, token_blob};
use crate::module::Abi;

type Call<'c> = Caller<'c, ControllerState>;
type Returns<T> = wasmtime::Result<T>;

/// Links all functions that a module of `abi` may import.
pub(super) fn linker(engine: &Engine, abi: Abi) -> wasmtime::Result<Linker<ControllerState>> {
    let mut linker = Linker::new(engine);
    blobs(&mut linker)?;
    match abi {
        Abi::P1 => {
            linker.func_wrap(ENV, "aici_host_return_logit_bias", |call: Call<'_>, src| {
                return_mask(call, src).map(drop)
            })?
        }
        Abi::P2 => linker.func_wrap(ENV, "aici_host_return_logit_bias", return_mask)?,
    };
    linker.func_wrap(ENV, "aici_host_self_seq_id", |call: Call<'_>| {
        call.data().number
    })?;
    linker.func_wrap(ENV, "aici_host_return_process_result", return_result)?;
    linker.func_wrap(ENV, "aici_host_storage_cmd", storage::command)?;
    linker.func_wrap(ENV, "aici_host_eos_token", |call: Call<'_>| {
        call.data().surroundings.model.eos()
    })?;
    linker.func_wrap(ENV, "aici_host_get_config", get_config)?;
    linker.func_wrap(ENV, "aici_host_stop", |_: Call<'_>| -> Returns<()> {
        Err(Abort::stop("*** aici_host_stop()").into())
    })?;
    constraints::link(&mut linker)?;
    wasi::link(&mut linker, abi)?;
    Ok(linker)
}

const ENV: &str = "env";

const BLOB_ARG: u32 = 1;
const BLOB_TOKENIZED: u32 = 2;
const BLOB_TOKENS: u32 = 3;
const BLOB_PROCESS_ARG: u32 = 4;
const BLOB_STORAGE: u32 = 5;
const BLOB_CONSTRAINT_ERROR: u32 = 6;
const BLOB_FORCED: u32 = 7;
const BLOB_TRIE: u32 = 100;
/// Blobs below are reserved: empty as long as they have no meaning.
const BLOBS_RESERVED: u32 = 20;

fn blobs(linker: &mut Linker<ControllerState>) -> wasmtime::Result<()> {
    linker.func_wrap(ENV, "aici_host_read_blob", read_blob)?;
    for (name, blob) in [
        ("aici_host_module_arg", BLOB_ARG),
        ("aici_host_process_arg", BLOB_PROCESS_ARG),
        ("aici_host_tokens", BLOB_TOKENS),
        ("aici_host_token_trie", BLOB_TRIE),
    ] {
        linker.func_wrap(ENV, name, move |_: Call<'_>| blob)?;
    }
    linker.func_wrap(ENV, "aici_host_tokenize", tokenize)?;
    Ok(())
}

fn read_blob(mut call: Call<'_>, blob: u32, dst: u32, size: u32) -> Returns<u32> {
    let memory = memory(&mut call)?;
    let (bytes, state) = memory.data_and_store_mut(&mut call);
    let trie;
    let source: &[u8] = match blob {
        BLOB_ARG => state.surroundings.arg.as_bytes(),
        BLOB_TOKENIZED => &state.blobs.tokenized,
        BLOB_PROCESS_ARG => &state.blobs.process_arg,
        BLOB_STORAGE => &state.blobs.storage,
        BLOB_CONSTRAINT_ERROR => &state.blobs.constraint_error,
        BLOB_FORCED => &state.blobs.forced,
        BLOB_TRIE => {
            trie = state.surroundings.model.trie(state.token_view());
            trie
        }
        0..BLOBS_RESERVED => &[],
        _ => return Err(Abort::fatal("FATAL ERROR: invalid blob_id").into()),
    };
    copy_out(bytes, source, dst, size).ok_or_else(|| out_of_bounds("aici_host_read_blob"))
}

/// Writes the start of `source` to the guest's memory, at most `size` bytes. Returns how many there are.
fn copy_out(memory: &mut [u8], source: &[u8], dst: u32, size: u32) -> Option<u32> {
    let written = source.len().min(size as usize);
    // Where nothing is written, it asks for the length alone, with any pointer.
    if written > 0 {
        // The part that is written must fit, not `size`: callers pass the size of a buffer whose end they never reach.
        range(memory, dst, written as u64)?.copy_from_slice(&source[..written]);
    }
    Some(u32::try_from(source.len()).unwrap_or(u32::MAX))
}

fn tokenize(mut call: Call<'_>, src: u32, len: u32) -> Returns<u32> {
    if len > TOKENIZE_BYTES_MAX {
        let text = format!("tokenize: more than {TOKENIZE_BYTES_MAX} bytes");
        return Err(Abort::trap(text).into());
    }
    // Owned, because a tokenizer may take long: nothing of the guest is borrowed meanwhile.
    let text = read(&mut call, "aici_host_tokenize", src, len)?.to_vec();
    let state = call.data();
    let view = state.token_view();
    let model = Arc::clone(&state.surroundings.model);
    let tokens = match &state.surroundings.long_texts {
        Some(threads) if text.len() > AT_ONCE_BYTES => {
            let work = move |late: &dyn Fn() -> bool| model.tokenize_until(&text, view, late);
            threads.run(|| state.check_deadline(), work)?
        }
        _ => model.tokenize_until(&text, view, &|| state.check_deadline().is_err()),
    };
    let state = call.data_mut();
    state.blobs.tokenized = token_blob(&tokens);
    state.charge_kept()?;
    // A long text may have used up the callback's time.
    state.check_deadline()?;
    Ok(BLOB_TOKENIZED)
}

fn return_mask(mut call: Call<'_>, src: u32) -> Returns<u32> {
    let words = call.data().vocabulary().div_ceil(32);
    let len = u32::try_from(words * 4).unwrap_or(u32::MAX);
    let bytes = read(&mut call, "aici_host_return_logit_bias", src, len)?;
    let words = bytes.as_chunks().0.iter().copied().map(u32::from_le_bytes);
    let words = words.collect();
    Ok(call.data_mut().add_mask_words(words)?)
}

fn return_result(mut call: Call<'_>, src: u32, len: u32) -> Returns<()> {
    let limit = call.data().result_bytes;
    if len as usize > limit {
        let text = format!("the result of the callback has {len} bytes, the limit is {limit}");
        let abort = Abort::limit(sapwood_proto::error_reason::ErrorReason::BAD_RESULT, text);
        return Err(abort.into());
    }
    let json = read(&mut call, "aici_host_return_process_result", src, len)?.to_vec();
    call.data_mut().result.json = Some(json);
    Ok(())
}

fn get_config(mut call: Call<'_>, src: u32, len: u32) -> Returns<u32> {
    let name = read(&mut call, "aici_host_get_config", src, len)?.to_vec();
    Ok(u32::from(call.data().capability(&name)))
}

const TOKENIZE_BYTES_MAX: u32 = 1 << 20;

/// The memory of the guest. During its start function it is not yet known, and looked up.
fn memory(call: &mut Call<'_>) -> Returns<Memory> {
    // Compiled code looks at its deadline at loops and at the entries of functions alone, and a function may have
    // 100,000 calls of the host in a row.
    call.data().check_deadline()?;
    if let Some(memory) = call.data().memory {
        return Ok(memory);
    }
    let memory = call
        .get_export("memory")
        .and_then(wasmtime::Extern::into_memory);
    memory.ok_or_else(|| Abort::trap("the module has no memory").into())
}

/// The bytes of the guest at `src`, in the memory of this moment.
fn read<'g>(call: &'g mut Call<'_>, name: &str, src: u32, len: u32) -> Returns<&'g [u8]> {
    let memory = memory(call)?;
    let bytes = memory.data(&*call);
    let (start, end) = (u64::from(src), u64::from(src) + u64::from(len));
    let bytes = usize::try_from(start)
        .ok()
        .zip(usize::try_from(end).ok())
        .and_then(|(start, end)| bytes.get(start..end));
    bytes.ok_or_else(|| out_of_bounds(name))
}

/// The part of `memory` at `at`, if it has one of this length. In u64, where no sum of a guest's numbers wraps.
fn range(memory: &mut [u8], at: u32, len: u64) -> Option<&mut [u8]> {
    let start = usize::try_from(at).ok()?;
    let end = usize::try_from(u64::from(at) + len).ok()?;
    memory.get_mut(start..end)
}

fn out_of_bounds(name: &str) -> wasmtime::Error {
    Abort::trap(format!("out of bounds pointer passed to {name}")).into()
}

/// Installs the interruption of late callbacks in a store.
pub(super) fn interrupt_when_late(store: &mut wasmtime::Store<ControllerState>) {
    store.epoch_deadline_callback(|context| on_epoch(&context));
}
