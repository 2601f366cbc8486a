//! GENERATE as a client writes it.
//!
//! Owns: which members go out, and in which order. Refuses to know: calls and peers.

use bytes::{BufMut as _, BytesMut};

use crate::lmtp::Generate;
use crate::lmtp::write::{self, member};

/// Only what LMQL's own client sends, in its order, and nothing that is not set (LM-301, LM-703). `whole`: the rest too,
/// for a peer that has shown that it is no reference server.
pub(super) fn generate(out: &mut BytesMut, id: u64, model: &str, wanted: &Generate, whole: bool) {
    out.put_slice(b"GENERATE {\"max_tokens\":");
    write::json(out, &wanted.max_tokens);
    member(out, "temperature", &wanted.temperature);
    // 0 is an error at the reference server (LM-304).
    member(out, "top_logprobs", &wanted.top_logprobs.max(1));
    member(out, "model", model);
    member(out, "prompt", &wanted.prompt);
    member(out, "stream_id", &id);
    if !wanted.logit_bias.is_empty() {
        out.put_slice(b",\"logit_bias\":{");
        for (at, &(token, bias)) in wanted.logit_bias.iter().enumerate() {
            if at > 0 {
                out.put_u8(b',');
            }
            write::json(out, &token.to_string());
            out.put_u8(b':');
            // What cannot be spelled is said as LMQL says it.
            write::json(out, &if bias.is_finite() { bias } else { -100.0 });
        }
        out.put_u8(b'}');
    }
    let default = Generate::default();
    if wanted.top_p.to_bits() != default.top_p.to_bits() {
        member(out, "top_p", &wanted.top_p);
    }
    if wanted.top_k != default.top_k {
        member(out, "top_k", &wanted.top_k);
    }
    for (name, value, off) in [
        (
            "repetition_penalty",
            wanted.repetition_penalty,
            default.repetition_penalty,
        ),
        (
            "presence_penalty",
            wanted.presence_penalty,
            default.presence_penalty,
        ),
        (
            "frequency_penalty",
            wanted.frequency_penalty,
            default.frequency_penalty,
        ),
    ] {
        if value.to_bits() != off.to_bits() {
            member(out, name, &value);
        }
    }
    if whole {
        rest(out, wanted);
    }
    out.put_u8(b'}');
}

/// What the reference server does not take.
fn rest(out: &mut BytesMut, wanted: &Generate) {
    if let Some(seed) = wanted.seed {
        member(out, "seed", &seed);
    }
    if wanted.min_p != 0.0 {
        member(out, "min_p", &wanted.min_p);
    }
    if !wanted.stop.is_empty() {
        member(out, "stop", &wanted.stop);
    }
    if !wanted.stop_tokens.is_empty() {
        member(out, "stop_tokens", &wanted.stop_tokens);
    }
    if wanted.min_tokens != 0 {
        member(out, "min_tokens", &wanted.min_tokens);
    }
    if wanted.ignore_eos {
        member(out, "ignore_eos", &true);
    }
}
