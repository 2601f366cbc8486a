//! WASI preview 1, as far as controllers need it: printing, and answers that let libraries start (AI-607).
//!
//! Nothing here lets time, addresses, files or randomness in, unless the host is configured so. A function without a meaning for controllers returns an
//! error number, so that a library which links it and never calls it still works.

use wasmtime::{FuncType, Linker, Val, ValType};

use super::{Call, Returns, memory, out_of_bounds, range, read};
use crate::host::failure::Abort;
use crate::host::state::ControllerState;
use crate::module::Abi;

const WASI: &str = "wasi_snapshot_preview1";

const SUCCESS: u32 = 0;
const BADF: u32 = 8;
const INVAL: u32 = 28;
const NOSYS: u32 = 52;
/// What the newest reference returns for a clock other than the monotonic one.
const NOT_A_CLOCK: u32 = 63;

/// Functions that only return a number: name, parameters (`i` is i32, `I` is i64), number.
const CONSTANT: &[(&str, &str, u32)] = &[
    ("args_get", "ii", SUCCESS),
    ("clock_res_get", "ii", NOSYS),
    ("environ_get", "ii", BADF),
    ("fd_advise", "iIIi", NOSYS),
    ("fd_allocate", "iII", NOSYS),
    ("fd_close", "i", BADF),
    ("fd_datasync", "i", NOSYS),
    ("fd_fdstat_set_flags", "ii", NOSYS),
    ("fd_fdstat_set_rights", "iII", NOSYS),
    ("fd_filestat_get", "ii", BADF),
    ("fd_filestat_set_size", "iI", BADF),
    ("fd_filestat_set_times", "iIIi", BADF),
    ("fd_pread", "iiiIi", NOSYS),
    ("fd_prestat_dir_name", "iii", BADF),
    ("fd_prestat_get", "ii", BADF),
    ("fd_pwrite", "iiiIi", NOSYS),
    ("fd_read", "iiii", BADF),
    ("fd_readdir", "iiiIi", BADF),
    ("fd_renumber", "ii", NOSYS),
    ("fd_seek", "iIii", BADF),
    ("fd_sync", "i", SUCCESS),
    ("fd_tell", "ii", NOSYS),
    ("path_create_directory", "iii", BADF),
    ("path_filestat_get", "iiiii", BADF),
    ("path_filestat_set_times", "iiiiIIi", BADF),
    ("path_link", "iiiiiii", BADF),
    ("path_open", "iiiiiIIii", BADF),
    ("path_readlink", "iiiiii", BADF),
    ("path_remove_directory", "iii", BADF),
    ("path_rename", "iiiiii", BADF),
    ("path_symlink", "iiiii", BADF),
    ("path_unlink_file", "iii", BADF),
    ("poll_oneoff", "iiii", BADF),
    ("proc_raise", "i", NOSYS),
    ("sched_yield", "", SUCCESS),
    ("sock_accept", "iii", NOSYS),
    ("sock_recv", "iiiiii", NOSYS),
    ("sock_send", "iiiii", NOSYS),
    ("sock_shutdown", "ii", NOSYS),
];

pub(super) fn link(linker: &mut Linker<ControllerState>, abi: Abi) -> wasmtime::Result<()> {
    for &(name, params, number) in CONSTANT {
        let params = params.bytes().map(|kind| match kind {
            b'I' => ValType::I64,
            _ => ValType::I32,
        });
        let signature = FuncType::new(linker.engine(), params, [ValType::I32]);
        linker.func_new(WASI, name, signature, move |_, _, results| {
            results[0] = Val::I32(number.cast_signed());
            Ok(())
        })?;
    }
    linker.func_wrap(WASI, "args_sizes_get", |call: Call<'_>, count, size| {
        no_strings(call, "args_sizes_get", count, size)
    })?;
    linker.func_wrap(WASI, "environ_sizes_get", |call: Call<'_>, count, size| {
        no_strings(call, "environ_sizes_get", count, size)
    })?;
    linker.func_wrap(WASI, "fd_fdstat_get", describe)?;
    linker.func_wrap(WASI, "fd_write", print)?;
    linker.func_wrap(WASI, "random_get", draw)?;
    linker.func_wrap(WASI, "proc_exit", |_: Call<'_>, code: i32| -> Returns<()> {
        Err(Abort::stop(format!("proc_exit: {code}")).into())
    })?;
    match abi {
        Abi::P1 => linker.func_wrap(
            WASI,
            "clock_time_get",
            |_: Call<'_>, _clock: u32, _precision: u64, _dst: u32| BADF,
        )?,
        Abi::P2 => linker.func_wrap(WASI, "clock_time_get", clock)?,
    };
    Ok(())
}

fn no_strings(mut call: Call<'_>, name: &str, count: u32, size: u32) -> Returns<u32> {
    for place in [count, size] {
        write(&mut call, name, place, &0_u32.to_le_bytes())?;
    }
    Ok(SUCCESS)
}

/// `fd_fdstat_get`: the three standard streams are character devices.
fn describe(mut call: Call<'_>, fd: u32, dst: u32) -> Returns<u32> {
    if fd > 2 {
        return Ok(BADF);
    }
    let mut stat = [0; 24];
    stat[0] = 2;
    write(&mut call, "fd_fdstat_get", dst, &stat)?;
    Ok(SUCCESS)
}

/// `fd_write`: the two output streams go to the log. May write less than is asked for, as everywhere.
fn print(mut call: Call<'_>, fd: u32, vectors: u32, count: u32, written: u32) -> Returns<u32> {
    const NAME: &str = "fd_write";
    if !matches!(fd, 1 | 2) {
        return Ok(BADF);
    }
    if count > VECTORS_MAX {
        return Ok(INVAL);
    }
    let mut total = 0;
    for index in 0..count {
        let place = vectors
            .checked_add(index * 8)
            .ok_or_else(|| out_of_bounds(NAME))?;
        let vector = read(&mut call, NAME, place, 8)?;
        let word = |at: usize| {
            u32::from_le_bytes([vector[at], vector[at + 1], vector[at + 2], vector[at + 3]])
        };
        let (src, len) = (word(0), word(4));
        let memory = memory(&mut call)?;
        let (bytes, state) = memory.data_and_store_mut(&mut call);
        let text = range(bytes, src, u64::from(len)).ok_or_else(|| out_of_bounds(NAME))?;
        state.log.push(text);
        total += u64::from(len);
        // Each vector may name all of the memory, and no time limit is checked in here.
        if total >= PRINT_BYTES_MAX {
            break;
        }
    }
    let total = u32::try_from(total).unwrap_or(u32::MAX);
    write(&mut call, NAME, written, &total.to_le_bytes())?;
    Ok(SUCCESS)
}

/// Vectors of one `fd_write`, as on Linux.
const VECTORS_MAX: u32 = 1024;
/// After that many bytes the rest of the vectors is left to another call.
const PRINT_BYTES_MAX: u64 = 1 << 20;

/// `random_get`: leaves the bytes as they are where nothing is drawn, wherever they are.
fn draw(mut call: Call<'_>, dst: u32, len: u32) -> Returns<u32> {
    if call.data().random.is_none() {
        return Ok(SUCCESS);
    }
    let memory = memory(&mut call)?;
    let (bytes, state) = memory.data_and_store_mut(&mut call);
    let target = range(bytes, dst, len.into()).ok_or_else(|| out_of_bounds("random_get"))?;
    // It may be all of the memory, and no time limit is checked between.
    for part in target.chunks_mut(DRAWN_BYTES_MAX) {
        state.check_deadline()?;
        if let Some(random) = &mut state.random {
            random.fill(part);
        }
    }
    Ok(SUCCESS)
}

/// Bytes that are drawn between two looks at the deadline.
const DRAWN_BYTES_MAX: usize = 64 << 10;

/// `clock_time_get` of P2: the time since instantiation, in steps of the configured resolution.
fn clock(mut call: Call<'_>, clock: u32, _precision: u64, dst: u32) -> Returns<u32> {
    const MONOTONIC: u32 = 1;
    if clock != MONOTONIC {
        return Ok(NOT_A_CLOCK);
    }
    let state = call.data();
    let step = state.surroundings.timer_resolution.as_nanos();
    let now = state.instantiated.elapsed().as_nanos();
    // At zero the clock stands still.
    let now = now.checked_div(step).unwrap_or(0) * step;
    let now = u64::try_from(now).unwrap_or(u64::MAX);
    write(&mut call, "clock_time_get", dst, &now.to_le_bytes())?;
    Ok(SUCCESS)
}

fn write(call: &mut Call<'_>, name: &str, dst: u32, data: &[u8]) -> Returns<()> {
    let memory = memory(call)?;
    let place = range(memory.data_mut(call), dst, data.len() as u64);
    place
        .ok_or_else(|| out_of_bounds(name))?
        .copy_from_slice(data);
    Ok(())
}
