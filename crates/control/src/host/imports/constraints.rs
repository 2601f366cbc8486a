//! The host functions of `sapwood`: constraints and masks that are computed natively and never pass through the memory of
//! the guest (AI-1007).
//!
//! A wrong handle is a mistake of the controller's code and traps; a pattern that does not compile may be one of the
//! request's argument, so the controller learns of it. All these functions look at the deadline before and after
//! their work, whose own limits are those of native constraints.

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::steer::{HostConstraint, HostConstraintCall, Mask, SharedMask, Steered, Token};
use wasmtime::Linker;

use super::{BLOB_FORCED, Call, Returns, copy_out, memory, out_of_bounds, range, read};
use crate::host::failure::Abort;
use crate::host::state::{ControllerState, token_blob};

const SAPWOOD: &str = crate::module::SAPWOOD;

pub(super) fn link(linker: &mut Linker<ControllerState>) -> wasmtime::Result<()> {
    linker.func_wrap(SAPWOOD, "constraint_new", open)?;
    linker.func_wrap(SAPWOOD, "constraint_consume", consume)?;
    linker.func_wrap(SAPWOOD, "constraint_rollback", rollback)?;
    linker.func_wrap(SAPWOOD, "constraint_mask", mask)?;
    linker.func_wrap(SAPWOOD, "constraint_ff", forced)?;
    linker.func_wrap(SAPWOOD, "mask_and", |call: Call<'_>, left, right| {
        combine(call, "mask_and", (left, right), Mask::intersect)
    })?;
    linker.func_wrap(SAPWOOD, "mask_or", |call: Call<'_>, left, right| {
        combine(call, "mask_or", (left, right), Mask::unite)
    })?;
    linker.func_wrap(SAPWOOD, "mask_not", not)?;
    linker.func_wrap(SAPWOOD, "mask_return", return_mask)?;
    linker.func_wrap(SAPWOOD, "prefix_mask", prefix_mask)?;
    linker.func_wrap(SAPWOOD, "token_bytes", token_bytes)?;
    linker.func_wrap(SAPWOOD, "free", free)?;
    linker.func_wrap(SAPWOOD, "top_logits", top_logits)?;
    Ok(())
}

/// `constraint_new`: 0, and a text in blob 6, if there is no such constraint.
fn open(mut call: Call<'_>, kind: u32, kind_len: u32, value: u32, len: u32) -> Returns<u32> {
    const NAME: &str = "constraint_new";
    // Of a longer name the start is enough to find that there is none.
    let kind = read(&mut call, NAME, kind, kind_len)?;
    let kind = String::from_utf8_lossy(&kind[..kind.len().min(KIND_BYTES_MAX)]).into_owned();
    let value = read(&mut call, NAME, value, len)?;
    let value = match std::str::from_utf8(value) {
        _ if value.len() > VALUE_BYTES_MAX => {
            Err(format!("the pattern has more than {VALUE_BYTES_MAX} bytes"))
        }
        Err(_) => Err("the pattern is not UTF-8".to_owned()),
        Ok(value) => Ok(value.to_owned()),
    };
    let state = call.data_mut();
    state.handles.check_room()?;
    let time = state.time_left().unwrap_or(Duration::MAX);
    let opened = value.and_then(|value| match state.surroundings.model.constraints() {
        Some(source) => source.open(HostConstraintCall {
            kind: &kind,
            value: &value,
            user: state.member().group().caller(),
            time,
        }),
        None => Err("this runtime has no constraints".to_owned()),
    });
    // First: a controller whose time is up does not go on with an error that the lack of time has made.
    state.check_deadline()?;
    state.blobs.constraint_error.clear();
    let constraint = match opened {
        Ok(constraint) => constraint,
        Err(text) => {
            state.blobs.constraint_error = sapwood_proto::clip::message(text).into_bytes();
            return Ok(0);
        }
    };
    let handle = state.handles.add_constraint(constraint)?;
    state.charge_kept()?;
    Ok(handle)
}

/// `constraint_consume`: 1 if the constraint allows the token; if not, 0, and nothing changes.
fn consume(mut call: Call<'_>, handle: u32, token: u32) -> Returns<u32> {
    let vocabulary = call.data().vocabulary();
    let consumed = follow(&mut call, "constraint_consume", handle, |constraint| {
        Ok((token as usize) < vocabulary && constraint.consume(token)?)
    })?;
    Ok(consumed.into())
}

fn rollback(mut call: Call<'_>, handle: u32, tokens: u32) -> Returns<()> {
    follow(&mut call, "constraint_rollback", handle, |constraint| {
        constraint.rollback(tokens)
    })
}

/// `constraint_mask`: no tokens where nothing may follow; returned to the host, that is end-of-sequence (AI-237).
fn mask(mut call: Call<'_>, handle: u32) -> Returns<u32> {
    call.data().handles.check_room()?;
    let mask = follow(&mut call, "constraint_mask", handle, HostConstraint::mask)?;
    let vocabulary = call.data().vocabulary();
    keep(&mut call, fitted(mask, vocabulary))
}

/// `constraint_ff`: blob 7, the tokens that must follow, perhaps none.
fn forced(mut call: Call<'_>, handle: u32) -> Returns<u32> {
    let tokens = follow(&mut call, "constraint_ff", handle, HostConstraint::forced)?;
    let state = call.data_mut();
    state.blobs.forced = token_blob(&tokens);
    state.charge_kept()?;
    Ok(BLOB_FORCED)
}

/// Uses a constraint.
fn follow<T>(
    call: &mut Call<'_>,
    name: &str,
    handle: u32,
    step: impl FnOnce(&mut (dyn HostConstraint + 'static)) -> Steered<T>,
) -> Returns<T> {
    let state = call.data_mut();
    state.check_deadline()?;
    let time = state.time_left();
    let stepped = state.handles.with_constraint(handle, |constraint| {
        constraint.limit_time(time);
        step(constraint)
    });
    let stepped = stepped
        .ok_or_else(|| Abort::trap(format!("{name}: {handle} is not a handle of a constraint")))?;
    if stepped.is_err() {
        // First: what the lack of time has made is not the constraint's failure.
        state.check_deadline()?;
    }
    let result = stepped
        .map_err(|failure| Abort::limit(failure.reason, format!("{name}: {}", failure.message)))?;
    state.charge_kept()?;
    state.check_deadline()?;
    Ok(result)
}

/// A mask over the vocabulary of the host: a model's own vocabulary may lack the padding.
fn fitted(mask: SharedMask, vocabulary: usize) -> SharedMask {
    if mask.vocabulary() == vocabulary {
        return mask;
    }
    let mut fitted = Mask::none(vocabulary);
    fitted.unite(&mask);
    Arc::new(fitted)
}

fn combine(
    mut call: Call<'_>,
    name: &str,
    (left, right): (u32, u32),
    into: fn(&mut Mask, &Mask),
) -> Returns<u32> {
    let mut mask = mask_of(&mut call, name, left)?;
    let other = mask_of(&mut call, name, right)?;
    into(Arc::make_mut(&mut mask), &other);
    keep(&mut call, mask)
}

fn not(mut call: Call<'_>, handle: u32) -> Returns<u32> {
    let mut mask = mask_of(&mut call, "mask_not", handle)?;
    Arc::make_mut(&mut mask).complement();
    keep(&mut call, mask)
}

/// `mask_return`: as `aici_host_return_logit_bias`; the mask stays the controller's.
fn return_mask(mut call: Call<'_>, handle: u32) -> Returns<u32> {
    let mask = mask_of(&mut call, "mask_return", handle)?;
    Ok(call.data_mut().add_mask(mask)?)
}

/// `prefix_mask`: the tokens that start with these bytes, or are the start of them.
fn prefix_mask(mut call: Call<'_>, src: u32, len: u32) -> Returns<u32> {
    let memory = memory(&mut call)?;
    call.data().handles.check_room()?;
    let (bytes, state) = memory.data_and_store_mut(&mut call);
    let prefix = range(bytes, src, len.into()).ok_or_else(|| out_of_bounds("prefix_mask"))?;
    let mask = state.surroundings.model.prefix_mask(prefix);
    keep(&mut call, Arc::new(mask))
}

fn token_bytes(mut call: Call<'_>, token: u32, dst: u32, size: u32) -> Returns<u32> {
    let memory = memory(&mut call)?;
    let (bytes, state) = memory.data_and_store_mut(&mut call);
    let source = state
        .surroundings
        .model
        .token_bytes(token, state.token_view());
    copy_out(bytes, &source, dst, size).ok_or_else(|| out_of_bounds("token_bytes"))
}

fn free(mut call: Call<'_>, handle: u32) -> Returns<()> {
    let state = call.data_mut();
    state.check_deadline()?;
    if !state.handles.free(handle) {
        return Err(Abort::trap(format!("free: {handle} is not a handle")).into());
    }
    state.charge_kept()?;
    Ok(())
}

/// `top_logits`: writes at most `count` pairs of a token and its log-probability, and returns how many (AI-1009).
fn top_logits(mut call: Call<'_>, count: u32, dst: u32) -> Returns<u32> {
    let memory = memory(&mut call)?;
    let (bytes, state) = memory.data_and_store_mut(&mut call);
    let pairs = state.best.iter().take(count as usize);
    let pair = |(token, logprob): &(Token, f32)| [token.to_le_bytes(), logprob.to_le_bytes()];
    let pairs: Vec<u8> = pairs.flat_map(pair).flatten().collect();
    let size = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
    copy_out(bytes, &pairs, dst, size).ok_or_else(|| out_of_bounds("top_logits"))?;
    Ok(size / 8)
}

fn mask_of(call: &mut Call<'_>, name: &str, handle: u32) -> Returns<SharedMask> {
    let state = call.data_mut();
    state.check_deadline()?;
    let mask = state.handles.mask(handle);
    mask.ok_or_else(|| Abort::trap(format!("{name}: {handle} is not a handle of a mask")).into())
}

/// Gives the controller a mask.
fn keep(call: &mut Call<'_>, mask: SharedMask) -> Returns<u32> {
    let state = call.data_mut();
    let handle = state.handles.add_mask(mask)?;
    state.charge_kept()?;
    Ok(handle)
}

/// Bytes of the name of a kind that are looked at.
const KIND_BYTES_MAX: usize = 64;
/// Bytes of a pattern that are copied for the source of constraints, which has a limit of its own.
const VALUE_BYTES_MAX: usize = 1 << 20;
