//! Encodes GENERATE.

use bytes::{BufMut as _, BytesMut};

use crate::lmtp::GenerateRequest;
use crate::lmtp::write::{self, member};
use crate::steer::Token;

/// Writes only the members that LMQL's own client sends, in its order, and none that is not set (LM-301, LM-703). With
/// `whole` also the others, for a peer that is known not to be a reference server. The object is left open.
pub(super) fn generate(
    out: &mut BytesMut,
    id: u64,
    model: &str,
    wanted: &GenerateRequest,
    whole: bool,
) {
    out.put_slice(b"GENERATE {\"max_tokens\":");
    write::json(out, &wanted.max_tokens);
    member(out, "temperature", &wanted.temperature);
    // 0 is an error at the reference server (LM-304).
    member(out, "top_logprobs", &wanted.top_logprobs.max(1));
    member(out, "model", model);
    member(out, "prompt", &wanted.prompt);
    member(out, "stream_id", &id);
    biases(out, &wanted.logit_bias, whole);
    // Backends of the reference server fail on members that they do not know, so a default is not sent (LM-703).
    let default = GenerateRequest::default();
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
}

fn biases(out: &mut BytesMut, bias: &[(Token, f32)], whole: bool) {
    if bias.is_empty() {
        return;
    }
    out.put_slice(b",\"logit_bias\":{");
    for (at, &(token, bias)) in bias.iter().enumerate() {
        if at > 0 {
            out.put_u8(b',');
        }
        write::json(out, &token.to_string());
        out.put_u8(b':');
        if bias.is_finite() {
            write::json(out, &bias);
        } else {
            // LMQL's own client sends this value, for the lack of an infinity in its JSON.
            let forbidden: &[u8] = if whole { b"-Infinity" } else { b"-100.0" };
            out.put_slice(forbidden);
        }
    }
    out.put_u8(b'}');
}

/// Writes the members that the reference server does not support.
fn rest(out: &mut BytesMut, wanted: &GenerateRequest) {
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
