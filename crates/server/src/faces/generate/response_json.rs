//! Encodes responses as JSON: the flat objects of generate (TR-502).

use std::sync::Arc;

use axum::body::Bytes;
use sapwood_proto::generate::{AnswerHead, ResponsePayload, Signature};

use super::call::CheckedRequest;

/// What every answer of a request repeats, and the signature that names its outputs.
pub(super) struct JsonResponseContext {
    head: AnswerHead,
    signature: Arc<Signature>,
}

impl JsonResponseContext {
    pub(super) fn of(call: &CheckedRequest) -> Self {
        let found = &call.found;
        Self {
            head: AnswerHead::new(call.mapped.id.as_deref(), &found.name, found.version),
            signature: Arc::clone(&found.signature),
        }
    }

    /// The whole answer as JSON.
    pub(super) fn json(&self, response: &ResponsePayload) -> Bytes {
        self.head.json(&self.signature, response)
    }

    /// Appends one event to `out`.
    pub(super) fn event(&self, response: &ResponsePayload, out: &mut Vec<u8>) {
        self.head.event(&self.signature, response, out);
    }
}
