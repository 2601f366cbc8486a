//! Encodes responses as JSON: the flat objects of generate, or infer's tensors (TR-502, TR-1310).

use std::sync::Arc;

use axum::body::Bytes;
use sapwood_proto::generate::{
    AnswerHead, Infer, OutputRole, RequestParameter, ResponsePayload, Signature, Tensor, TensorData,
};

use super::call::CheckedRequest;

/// The mark of the response that ends a request.
const FINAL: &str = "triton_final_response";

/// What answers are written with.
pub(super) struct JsonResponseContext {
    head: AnswerHead,
    pub(super) signature: Arc<Signature>,
    infer: Option<Infer>,
    /// The text output of a text model, if the request gets it: clients of infer wait for a last payload of it.
    text: Option<usize>,
}

impl JsonResponseContext {
    pub(super) fn of(call: &CheckedRequest) -> Self {
        let found = &call.found;
        Self {
            head: AnswerHead::new(call.mapped.id.as_deref(), &found.name, found.version),
            signature: Arc::clone(&found.signature),
            infer: None,
            text: None,
        }
    }

    /// The same in the form of infer, without raw bytes.
    pub(super) fn infer(call: &CheckedRequest) -> Self {
        let found = &call.found;
        let wanted = found.signature.wanted(&call.mapped);
        let outputs = found.signature.outputs.iter();
        let text = outputs
            .zip(wanted)
            .position(|(output, wanted)| wanted && output.role == OutputRole::Text);
        Self {
            infer: Some(Infer::default()),
            text: text.filter(|_| found.text && found.model.controls.is_empty()),
            ..Self::of(call)
        }
    }

    /// The whole answer as JSON.
    pub(super) fn json(&self, response: &ResponsePayload) -> Bytes {
        self.head.json(&self.signature, response)
    }

    /// Whether responses say which of them is the last.
    pub(super) const fn marks_the_last(&self) -> bool {
        self.infer.is_some()
    }

    /// Writes one event behind what is there.
    pub(super) fn event(&self, response: &ResponsePayload, last: bool, out: &mut Vec<u8>) {
        let Some(infer) = &self.infer else {
            return self.head.event(&self.signature, response, out);
        };
        let mut response = response.clone();
        let mark = (FINAL.into(), RequestParameter::Bool(last));
        response.parameters.push(mark);
        let (json, _) = infer.answer(&self.head, &self.signature, &response);
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&json);
        out.extend_from_slice(b"\n\n");
    }

    /// Writes the response of an end that comes alone, if there is one.
    pub(super) fn end(&self, out: &mut Vec<u8>) {
        let Some(text) = self.text else { return };
        let empty = Tensor::flat(TensorData::Bytes([&b""[..]].into_iter().collect()));
        let response = ResponsePayload {
            outputs: vec![(text, empty)],
            parameters: Vec::new(),
        };
        self.event(&response, true, out);
    }
}
