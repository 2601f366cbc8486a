//! [`ChoiceDelta`]: what one choice of a text model has produced since its last response.

use sapwood_kernel::ChoiceFinish;
use serde_json::{Map, Value, json};

/// What one choice has produced since the last response.
#[derive(Default)]
pub(super) struct ChoiceDelta {
    pub(super) text: String,
    pub(super) tokens: u32,
    /// Of the whole output so far.
    pub(super) cumulative: f64,
    pub(super) logprobs: Vec<Value>,
    pub(super) token_logprobs: Vec<f64>,
    pub(super) finish: Option<ChoiceFinish>,
}

impl ChoiceDelta {
    /// Whether there is text to send, or too much to wait for it: the tokens of a model may have no text at all, as when it
    /// repeats its EOG token.
    pub(super) fn is_ready(&self) -> bool {
        !self.text.is_empty() || self.token_logprobs.len() >= LOGPROBS_MAX
    }

    /// One line of the port `logprobs`: a token, and its alternatives. Returns how many log-probabilities these are.
    pub(super) fn logprob(&mut self, line: &[u8]) -> usize {
        // The empty line after the last line feed, too.
        let Ok(reported) = serde_json::from_slice::<Value>(line) else {
            return 0;
        };
        let number = |value: &Value| {
            value
                .get("logprob")
                .and_then(Value::as_f64)
                .unwrap_or(f64::NAN)
        };
        let own = number(&reported);
        self.cumulative += own;
        self.token_logprobs.push(own);
        let none = Vec::new();
        let top = reported
            .get("top")
            .and_then(Value::as_array)
            .unwrap_or(&none);
        let entry = |value: &Value, rank: u64| {
            let id = value
                .get("token_id")
                .map(ToString::to_string)
                .unwrap_or_default();
            let text = value.get("text").cloned().unwrap_or_default();
            let reported =
                json!({"logprob": value.get("logprob"), "rank": rank, "decoded_token": text});
            (id, reported)
        };
        let mut map: Map<String, Value> = (1..)
            .zip(top)
            .map(|(rank, value)| entry(value, rank))
            .collect();
        // An upstream need not report the rank of the token: then it is the one after all that were sent.
        let rank = reported.get("rank").and_then(Value::as_u64);
        let (id, own) = entry(&reported, rank.unwrap_or(top.len() as u64 + 1));
        // The token is often one of its own alternatives, whose rank is known exactly.
        map.entry(id).or_insert(own);
        let alternatives = map.len();
        self.logprobs.push(Value::Object(map));
        alternatives
    }
}

/// Tokens of one choice whose log-probabilities wait for text: a stop text that is held back comes before as many.
const LOGPROBS_MAX: usize = 256;
