//! `aici_host_storage_cmd`: the variables of the request, as JSON (AI-951).

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::VariableWrite;
use serde::{Deserialize, Serialize};

use super::{BLOB_STORAGE, Call, Returns, read};
use crate::host::failure::Abort;
use crate::host::group::variables::{VariablesLimits, Versioned, WriteResult, limit};

#[derive(Deserialize)]
enum Command {
    ReadVar {
        name: String,
    },
    WriteVar {
        name: String,
        value: String,
        op: Operation,
        #[serde(default)]
        when_version_is: Option<u64>,
    },
}

#[derive(Clone, Copy, Deserialize)]
enum Operation {
    Set,
    Append,
}

#[derive(Serialize)]
enum Response {
    ReadVar { version: u64, value: String },
    VariableMissing {},
    WriteVar { version: u64 },
}

/// Executes the command at `src`; blob 5 is the response.
pub(super) fn command(mut call: Call<'_>, src: u32, len: u32) -> Returns<u32> {
    let limits = *call.data().member().group().variables().limits();
    // Before it is parsed: a value in hex, a name whose characters are all escaped, and the members around them.
    let bytes_max = limits.value_bytes * 2 + limits.name_bytes * 6 + 1024;
    limit("value", len as usize, bytes_max)?;
    let json = read(&mut call, "aici_host_storage_cmd", src, len)?;
    let command = serde_json::from_slice(json).map_err(|error| {
        let error = sapwood_proto::clip::shown(error);
        bad_command(format!("the storage command cannot be read: {error}"))
    })?;
    let response = execute(&mut call, command, limits)?;
    let response = serde_json::to_vec(&response).map_err(|error| Abort::trap(error.to_string()))?;
    let state = call.data_mut();
    state.blobs.storage = response;
    state.charge_kept()?;
    Ok(BLOB_STORAGE)
}

fn execute(
    call: &mut Call<'_>,
    command: Command,
    limits: VariablesLimits,
) -> Result<Response, Abort> {
    let state = call.data_mut();
    let variables = state.member().group().variables();
    let (name, value, op, when_version_is) = match command {
        Command::ReadVar { name } => return Ok(shown(variables.read(&name))),
        Command::WriteVar {
            name,
            value,
            op,
            when_version_is,
        } => (name, value, op, when_version_is),
    };
    // Also a write that would conflict: what a guest may do does not depend on its siblings.
    limit(
        "writes per step",
        state.writes.made() + 1,
        limits.writes_per_step,
    )?;
    let value = decode_hex(&value)?;
    // No guest code ran meanwhile, and so none that the clock could interrupt.
    state.check_deadline()?;
    let write = VariableWrite {
        name,
        value,
        append: matches!(op, Operation::Append),
        when_version_is,
    };
    Ok(match variables.write(&write, state.member().number())? {
        WriteResult::Written(version) => {
            state.writes.push(write, limits.total_bytes);
            Response::WriteVar { version }
        }
        WriteResult::Conflict(current) => shown(current),
    })
}

fn shown(current: Option<Versioned>) -> Response {
    current.map_or(
        Response::VariableMissing {},
        |Versioned { version, value }| {
            let digit = |digit: u8| char::from(b"0123456789abcdef"[usize::from(digit)]);
            // Without the machinery of formatting: a guest may read a mebibyte as often as its time allows.
            let hex = value
                .iter()
                .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
            Response::ReadVar {
                version,
                value: hex.collect(),
            }
        },
    )
}

fn decode_hex(text: &str) -> Result<Vec<u8>, Abort> {
    let digit = |byte: u8| {
        char::from(byte)
            .to_digit(16)
            .and_then(|digit| u8::try_from(digit).ok())
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs
        .iter()
        .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?))
        .collect();
    match bytes {
        Some(bytes) if rest.is_empty() => Ok(bytes),
        _ => Err(bad_command(
            "the value of a storage command is not hex".to_owned(),
        )),
    }
}

fn bad_command(text: String) -> Abort {
    Abort {
        reason: ErrorReason::BAD_RESULT,
        ..Abort::fatal(text)
    }
}
