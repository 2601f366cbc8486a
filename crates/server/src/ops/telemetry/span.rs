//! The attributes of a generation's span, by OpenTelemetry's conventions for generative AI (OA-803).
//!
//! Prompts and outputs are in it only if the layer has recorded them.

use std::time::{Duration, SystemTime};

use sapwood_engine::api::{self, Prompt};
use sapwood_kernel::RunUsage;
use sapwood_net::otlp::api::trace::{
    Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use sapwood_net::otlp::api::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use sapwood_net::otlp::{SpanData, SpanEvents, SpanLinks};

use super::Parent;

/// What is known of a generation when it has ended.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) parent: Option<Parent>,
    /// The trace id, used if there is no parent, and the span's own id.
    pub(super) ids: ([u8; 16], [u8; 8]),
    pub(super) model: String,
    /// The request id, as in logs and responses.
    pub(super) request: Option<String>,
    pub(super) began: SystemTime,
    pub(super) took: Duration,
    pub(super) asked: Option<RequestAttributes>,
    /// From its beginning to its first output.
    pub(super) first_chunk: Option<Duration>,
    pub(super) finish: Vec<String>,
    pub(super) usage: Option<RunUsage>,
    /// Time in the queue, and time of the prefill; known at the end.
    pub(super) phases: Option<(Duration, Duration)>,
    /// The code of the error that ended it.
    pub(super) error: Option<&'static str>,
    pub(super) output: Option<String>,
}

/// The request to the model, as attributes.
#[derive(Debug)]
pub(super) struct RequestAttributes {
    chat: bool,
    /// From the beginning of the call to its submission.
    pub(super) after: Duration,
    attributes: Vec<KeyValue>,
}

impl RequestAttributes {
    pub(super) fn of(request: &api::GenerationRequest, after: Duration, content: bool) -> Self {
        let params = &request.params;
        let sampling = api::Sampling::from(params);
        let mut attributes = vec![
            KeyValue::new(
                "gen_ai.request.temperature",
                f64::from(sampling.temperature),
            ),
            KeyValue::new("gen_ai.request.top_p", f64::from(sampling.top_p)),
            count("gen_ai.request.top_k", u64::from(sampling.top_k)),
            KeyValue::new(
                "gen_ai.request.frequency_penalty",
                f64::from(sampling.frequency_penalty),
            ),
            KeyValue::new(
                "gen_ai.request.presence_penalty",
                f64::from(sampling.presence_penalty),
            ),
            count(
                "gen_ai.request.choice.count",
                u64::from(params.n.unwrap_or(1)),
            ),
            // The kernel streams every call, whether or not the client does.
            KeyValue::new("gen_ai.request.stream", true),
        ];
        if let Some(max) = params.max_tokens {
            attributes.push(count("gen_ai.request.max_tokens", u64::from(max)));
        }
        if let Some(seed) = sampling.seed {
            attributes.push(whole("gen_ai.request.seed", seed));
        }
        if !params.stop.is_empty() {
            attributes.push(list("gen_ai.request.stop_sequences", &params.stop));
        }
        if content {
            attributes.push(KeyValue::new(
                "gen_ai.input.messages",
                input(&request.prompt),
            ));
        }
        Self {
            chat: matches!(request.prompt, Prompt::Chat(_)),
            after,
            attributes,
        }
    }
}

/// A prompt as JSON messages, up to [`CONTENT_BYTES_MAX`]; empty for a prompt of tokens.
fn input(prompt: &Prompt) -> String {
    let mut left = CONTENT_BYTES_MAX;
    let mut messages = Vec::new();
    let mut notify = |role: &str, text: &str| {
        // The role counts and is cut too: a client chooses it, as well as the number of messages (`MESSAGE_BYTES`).
        let role = &role[..role.floor_char_boundary(left)];
        left = left.saturating_sub(role.len() + MESSAGE_BYTES);
        let text = &text[..text.floor_char_boundary(left)];
        left -= text.len();
        let part = serde_json::json!({"type": "text", "content": text});
        messages.push(serde_json::json!({"role": role, "parts": [part]}));
        left > 0
    };
    match prompt {
        Prompt::Tokens(_) => {}
        Prompt::Text(text) => {
            notify("user", text);
        }
        Prompt::Infill { prefix, suffix } => {
            let _all = notify("user", prefix) && notify("user", suffix);
        }
        Prompt::Chat(chat) => {
            // `all` stops at the first message for which there is no more room.
            let _all = chat
                .messages
                .iter()
                .all(|one| notify(&one.role, &one.content));
        }
    }
    serde_json::Value::from(messages).to_string()
}

impl Generation {
    pub(super) fn into_span(self) -> SpanData {
        let operation = match &self.asked {
            Some(asked) if !asked.chat => "text_completion",
            _ => "chat",
        };
        let (trace, span) = self.ids;
        // The trace of the caller goes on with a span of ours; without one a trace begins here.
        let trace = self.parent.map_or(trace, |parent| parent.trace);
        let parent = self.parent.map(|parent| SpanId::from_bytes(parent.span));
        SpanData {
            span_context: SpanContext::new(
                TraceId::from_bytes(trace),
                SpanId::from_bytes(span),
                TraceFlags::SAMPLED,
                false,
                TraceState::default(),
            ),
            parent_span_id: parent.unwrap_or(SpanId::INVALID),
            parent_span_is_remote: parent.is_some(),
            span_kind: SpanKind::Server,
            name: format!("{operation} {}", self.model).into(),
            start_time: self.began,
            end_time: self.began + self.took,
            events: self.events(),
            status: self.error.map_or(Status::Unset, Status::error),
            attributes: self.attributes(operation),
            dropped_attributes_count: 0,
            links: SpanLinks::default(),
            instrumentation_scope: InstrumentationScope::builder("sapwood")
                .with_version(crate::VERSION)
                .build(),
        }
    }

    fn attributes(self, operation: &'static str) -> Vec<KeyValue> {
        let mut all = vec![
            KeyValue::new("gen_ai.operation.name", operation),
            KeyValue::new("gen_ai.provider.name", "sapwood"),
            KeyValue::new("gen_ai.request.model", self.model.clone()),
            KeyValue::new("gen_ai.response.model", self.model.clone()),
        ];
        all.extend(self.asked.into_iter().flat_map(|asked| asked.attributes));
        all.extend(
            self.request
                .map(|id| KeyValue::new("gen_ai.response.id", id)),
        );
        if !self.finish.is_empty() {
            all.push(list("gen_ai.response.finish_reasons", &self.finish));
        }
        let first = self.first_chunk.map(|first| first.as_secs_f64());
        all.extend(first.map(|first| KeyValue::new("gen_ai.response.time_to_first_chunk", first)));
        if let Some(usage) = self.usage {
            all.extend([
                count("gen_ai.usage.input_tokens", usage.prompt_tokens),
                count("gen_ai.usage.output_tokens", usage.completion_tokens),
                count("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens),
            ]);
        }
        all.extend(self.error.map(|error| KeyValue::new("error.type", error)));
        all.extend(
            self.output
                .map(|text| KeyValue::new("gen_ai.output.messages", text)),
        );
        all
    }

    fn events(&self) -> SpanEvents {
        let event = |name: &'static str, after: Duration, seconds: Option<Duration>| {
            let seconds = seconds.map(|span| KeyValue::new("sapwood.seconds", span.as_secs_f64()));
            Event::new(name, self.began + after, seconds.into_iter().collect(), 0)
        };
        let mut events = SpanEvents::default();
        if let Some(asked) = &self.asked {
            let queued = self.phases.map(|(queued, _)| queued);
            events.events.push(event("queue", asked.after, queued));
            if let Some((queued, prefill)) = self.phases {
                events
                    .events
                    .push(event("prefill", asked.after + queued, Some(prefill)));
            }
        }
        events.events.extend(
            self.first_chunk
                .map(|first| event("first_token", first, None)),
        );
        events
    }
}

/// Approximate size of a span in an export.
pub(super) fn size(span: &SpanData) -> usize {
    // Only texts are counted exactly, because only they can be large.
    let attribute = |pair: &KeyValue| match &pair.value {
        Value::String(text) => text.as_str().len() + ATTRIBUTE_BYTES,
        Value::Array(Array::String(texts)) => {
            let texts = texts.iter().map(|text| text.as_str().len());
            texts.sum::<usize>() + ATTRIBUTE_BYTES
        }
        _ => ATTRIBUTE_BYTES,
    };
    span.name.len() + span.attributes.iter().map(attribute).sum::<usize>()
}

fn count(key: &'static str, value: u64) -> KeyValue {
    KeyValue::new(key, i64::try_from(value).unwrap_or(i64::MAX))
}

/// A number of 64 bits that must stay exact: as text beyond `i64`, the integer of the protocol.
fn whole(key: &'static str, value: u64) -> KeyValue {
    match i64::try_from(value) {
        Ok(value) => KeyValue::new(key, value),
        Err(_) => KeyValue::new(key, value.to_string()),
    }
}

fn list(key: &'static str, values: &[String]) -> KeyValue {
    let values = values.iter().cloned().map(StringValue::from);
    KeyValue::new(key, Value::Array(Array::String(values.collect())))
}

/// Maximum of bytes of a prompt, and of an output, in a span; the rest is left out.
pub(super) const CONTENT_BYTES_MAX: usize = 64 * 1024;
/// Approximate bytes of a message beside its role and its text.
const MESSAGE_BYTES: usize = 64;
/// Approximate bytes of an attribute beside its text.
const ATTRIBUTE_BYTES: usize = 48;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_803_a_seed_is_exported_exactly_however_large() {
        for (seed, expect) in [
            (7, Value::I64(7)),
            (i64::MAX as u64, Value::I64(i64::MAX)),
            (1 << 63, Value::String("9223372036854775808".into())),
            (u64::MAX, Value::String("18446744073709551615".into())),
        ] {
            let reported = whole("gen_ai.request.seed", seed);
            assert_eq!(reported.value, expect);
        }
    }
}
