//! Masks that a client stores by name (LM-945).

use std::collections::HashMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;
use bytestring::ByteString;
use serde::Serialize;

use super::text::RequestSubject;
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::write::member;
use crate::lmtp::{ConnectionLimits, GenerateRequest, LmtpError, LmtpModelInfo, LmtpReason};
use crate::steer::{Mask, Token};

/// A logit bias, in the form that requests have.
type Biases = Arc<[(Token, f32)]>;

#[derive(Debug)]
struct Named {
    model: ByteString,
    mask: Mask,
    used: u64,
}

/// The masks of one connection.
///
/// Invariants: `bytes` is the sum over all masks, within `max_mask_bytes`; `spelled` names a mask that exists, in its
/// current content, so whatever replaces or removes a mask passes [`Self::remove`].
#[derive(Debug, Default)]
pub(super) struct Masks {
    named: HashMap<String, Named>,
    uses: u64,
    bytes: usize,
    /// The mask used last, as a bias: clients use the same one many times in a row (LM-1307).
    spelled: Option<(String, Biases)>,
}

#[derive(Serialize)]
struct MaskReply<'a> {
    id: &'a str,
    allowed: usize,
}

impl Masks {
    /// Handles MASK: creates or replaces a mask. Returns the members of the answer.
    pub(super) fn change(
        &mut self,
        members: &PayloadMembers<'_>,
        subject: &RequestSubject,
    ) -> Result<BytesMut, LmtpError> {
        let name = members.name("mask", &subject.limits)?.ok_or_else(|| {
            let message = "'mask' is required: a name for it";
            LmtpError::new(LmtpReason::MissingRequiredParameter, message)
        })?;
        let mask = read(members, &subject.model)?;
        let allowed = mask.count();
        if allowed == 0 {
            let message = "the mask allows no token; allow at least one";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let mut reply = BytesMut::new();
        let id = &*name;
        member(&mut reply, "mask", &MaskReply { id, allowed });
        self.put(name, subject.name.clone(), mask, &subject.limits);
        Ok(reply)
    }

    /// Merges the mask of a GENERATE, if it names one, into its bias.
    pub(super) fn apply(
        &mut self,
        members: &PayloadMembers<'_>,
        subject: &RequestSubject,
        wanted: &mut GenerateRequest,
    ) -> Result<(), LmtpError> {
        let Some(name) = members.name("mask", &subject.limits)? else {
            return Ok(());
        };
        let mask = self.spell(&name, &subject.name)?;
        // The usual case costs no copy (LM-1307). Nothing to check either: a stored mask allows at least one token.
        let logit_bias = &mut wanted.params.logit_bias;
        if logit_bias.is_empty() {
            *logit_bias = mask;
            return Ok(());
        }
        // Each list has a token once, so at most two entries per token meet: minus infinity sorts first and wins.
        let mut all: Vec<_> = mask.iter().chain(&**logit_bias).copied().collect();
        all.sort_by(|left, right| left.0.cmp(&right.0).then(left.1.total_cmp(&right.1)));
        all.dedup_by_key(|(token, _)| *token);
        let forbidden = all.iter().filter(|(_, bias)| *bias == f32::NEG_INFINITY);
        if subject.model.is_all(forbidden.count()) {
            let message = "'mask' and 'logit_bias' forbid every token; allow at least one";
            return Err(LmtpError::new(LmtpReason::ConstraintFailed, message));
        }
        *logit_bias = all.into();
        Ok(())
    }

    fn put(&mut self, name: String, model: ByteString, mask: Mask, limits: &ConnectionLimits) {
        self.remove(&name);
        self.bytes += bytes(&mask);
        self.uses += 1;
        let used = self.uses;
        self.named.insert(name, Named { model, mask, used });
        while self.named.len() > limits.max_masks || self.bytes > limits.max_mask_bytes {
            // A scan, as for buffers: `max_masks` is small.
            let oldest = self.named.iter().min_by_key(|(_, named)| named.used);
            let Some(oldest) = oldest.map(|(name, _)| name.clone()) else {
                return;
            };
            self.remove(&oldest);
        }
    }

    /// Takes over the masks of another connection; masks with the same name here are retained.
    pub(super) fn take_over(&mut self, other: Self, limits: &ConnectionLimits) {
        let mut others: Vec<_> = other.named.into_iter().collect();
        others.retain(|(name, _)| !self.named.contains_key(name));
        // In order of use, so that `put` evicts the oldest if there is no room for all.
        others.sort_by_key(|(_, named)| named.used);
        for (name, Named { model, mask, .. }) in others {
            self.put(name, model, mask, limits);
        }
    }

    fn remove(&mut self, name: &str) {
        if let Some(old) = self.named.remove(name) {
            self.bytes -= bytes(&old.mask);
        }
        if self
            .spelled
            .as_ref()
            .is_some_and(|(spelled, _)| spelled == name)
        {
            self.spelled = None;
        }
    }

    /// Returns what a mask forbids as a bias, for the model with this name.
    fn spell(&mut self, name: &str, model: &str) -> Result<Biases, LmtpError> {
        let named = self.named.get_mut(name).ok_or_else(|| {
            let message = "there is no mask of this name; send it again";
            LmtpError::new(LmtpReason::MaskNotFound, message)
        })?;
        if named.model != model {
            let message = "'mask' was made for another model";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        self.uses += 1;
        named.used = self.uses;
        // The cached list belongs to the current content: `put` removes it together with the mask that it replaces.
        if let Some((spelled, biases)) = &self.spelled
            && spelled == name
        {
            return Ok(Arc::clone(biases));
        }
        let size = Token::try_from(named.mask.vocabulary()).unwrap_or(Token::MAX);
        let forbidden = (0..size).filter(|token| !named.mask.allows(*token));
        let biases: Biases = forbidden.map(|token| (token, f32::NEG_INFINITY)).collect();
        self.spelled = Some((name.to_owned(), Arc::clone(&biases)));
        Ok(biases)
    }
}

fn bytes(mask: &Mask) -> usize {
    size_of_val(mask.words())
}

/// Reads a mask from a message, in one of three forms.
fn read(members: &PayloadMembers<'_>, model: &LmtpModelInfo) -> Result<Mask, LmtpError> {
    let wrong = |message: &'static str| LmtpError::new(LmtpReason::InvalidValue, message);
    let given = members.one_of(&["allow", "deny", "bitmap"])?;
    let vocabulary = model.vocab_size.ok_or_else(|| {
        let message = "a mask needs the size of the vocabulary, which the server of this model does not report; send \
                       'logit_bias'";
        LmtpError::new(LmtpReason::UnsupportedOperation, message)
    })?;
    let size = vocabulary as usize;
    match given {
        Some("allow") => {
            let mut mask = Mask::none(size);
            read::ranges(members, "allow", vocabulary)?.for_each(|token| mask.allow(token));
            Ok(mask)
        }
        Some("deny") => {
            let mut mask = Mask::all(size);
            read::ranges(members, "deny", vocabulary)?.for_each(|token| mask.forbid(token));
            Ok(mask)
        }
        Some("bitmap") => {
            let text = members.value("bitmap").and_then(|value| value.string());
            let bits = text.and_then(|text| STANDARD.decode(text.as_bytes()).ok());
            let bits = bits.ok_or_else(|| wrong("'bitmap' must be base64"))?;
            let mut mask = Mask::none(size);
            // Bytes beyond the vocabulary are ignored, as ids are.
            for (byte, first) in bits.iter().take(size.div_ceil(8)).zip((0..).step_by(8)) {
                let set = (0..8).filter(|bit| byte >> bit & 1 == 1);
                set.for_each(|bit| mask.allow(first + bit));
            }
            Ok(mask)
        }
        _ => Err(wrong("send one of 'allow', 'deny' and 'bitmap'")),
    }
}
