//! Encodes GENERATE.

use bytes::{BufMut as _, BytesMut};

use crate::lmtp::read::known_params;
use crate::lmtp::write::{self, member};
use crate::lmtp::{Feature, Features, GenerateRequest, LmtpError, LmtpReason};
use crate::params::{GenerationParams, PARAMS, ParamField, ParamSpec, lora_to_json};
use crate::steer::Token;

/// Writes the members in the order of LMQL's own client, without parameters that have their default (LM-301, LM-703).
/// The object is left open.
///
/// # Errors
/// `unsupported_operation` for a parameter that a peer with these features does not know (LM-704, D-42).
pub(super) fn generate(
    out: &mut BytesMut,
    id: u64,
    model: &str,
    wanted: &GenerateRequest,
    features: Features,
) -> Result<(), LmtpError> {
    let mut params = wanted.params.clone();
    // Backends of the reference server fail on members that they do not know, so a default is not sent (LM-703).
    let mut default = GenerateRequest::default().params;
    let mut unset = GenerationParams::default();
    let mut is_sent = |param: &ParamSpec, params: &mut GenerationParams| {
        let field = param.field(params);
        field != param.field(&mut default) && field != param.field(&mut unset)
    };
    for param in PARAMS {
        let mut known = known_params(features);
        if is_sent(param, &mut params) && !known.any(|(_, known)| known.name == param.name) {
            return Err(unsupported(param.lmtp.unwrap_or(param.name)));
        }
    }
    if !wanted.params.logit_bias_texts.is_empty() {
        // The protocol has biases by token id only (LM-305).
        let message = "the upstream does not support texts in 'logit_bias'";
        return Err(LmtpError::new(LmtpReason::UnsupportedOperation, message));
    }
    if wanted.controller.is_some() && !features.has(Feature::Controllers) {
        // Without its controller the output would be unconstrained (LM-712).
        let message = "the upstream does not support 'controller'";
        return Err(LmtpError::new(LmtpReason::UnsupportedOperation, message));
    }
    out.put_slice(b"GENERATE {\"max_tokens\":");
    write::json(out, &wanted.max_tokens());
    member(out, "temperature", &wanted.temperature());
    // 0 is an error at the reference server (LM-304).
    member(out, "top_logprobs", &wanted.top_logprobs().max(1));
    member(out, "model", model);
    member(out, "prompt", &wanted.prompt);
    member(out, "stream_id", &id);
    // The first three were written above, because they are always sent.
    for (name, param) in known_params(features).skip(3) {
        if !is_sent(param, &mut params) {
            continue;
        }
        match param.field(&mut params) {
            ParamField::Count(value) => member(out, name, value),
            ParamField::Number(value) => member(out, name, value),
            ParamField::Seed(value) => member(out, name, value),
            ParamField::Flag(value) => member(out, name, value),
            ParamField::Window(value) => member(out, name, value),
            ParamField::Texts(texts) => member(out, name, texts),
            ParamField::OptionalTexts(texts) => member(out, name, texts),
            ParamField::Samplers(order) => {
                let order = order.unwrap_or_default();
                let names: Vec<_> = order.steps().iter().map(|step| step.name()).collect();
                member(out, name, &names);
            }
            ParamField::Lora(uses) => {
                let uses = uses.as_deref().unwrap_or_default();
                member(out, name, &lora_to_json(uses));
            }
            ParamField::Tokens(stops) => member(out, name, stops),
            ParamField::Biases { tokens, .. } => biases(out, tokens, !features.is_empty()),
        }
    }
    if let Some(controller) = &wanted.controller {
        member(out, "controller", &controller.id);
        member(out, "controller_arg", &controller.arg);
    }
    Ok(())
}

/// The error of a member that a peer does not know.
pub(super) fn unsupported(name: &str) -> LmtpError {
    let message = format!("the upstream does not support '{name}'");
    LmtpError::new(LmtpReason::UnsupportedOperation, message)
}

fn biases(out: &mut BytesMut, bias: &[(Token, f32)], whole: bool) {
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
