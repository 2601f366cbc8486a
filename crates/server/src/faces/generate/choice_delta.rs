//! [`ChoiceDelta`]: what one choice of a text model has produced since its last response.

use sapwood_kernel::ChoiceFinish;
use serde_json::{Map, Value, json};

/// What one choice has produced since the last response.
#[derive(Default)]
pub(super) struct ChoiceDelta {
    pub(super) text: String,
    pub(super) reasoning: String,
    /// Calls of tools, each an object of JSON, with a comma after each but the last.
    pub(super) calls: String,
    /// The beginning of a line of the port of calls.
    pub(super) begun_call: Vec<u8>,
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
        self.has_text() || self.token_logprobs.len() >= LOGPROBS_MAX
    }

    /// Whether there is text, reasoning or a call.
    pub(super) const fn has_text(&self) -> bool {
        !(self.text.is_empty() && self.reasoning.is_empty() && self.calls.is_empty())
    }

    /// A chunk of the port `tool_calls`, which has a line for each call. Returns by how many bytes the calls have grown.
    pub(super) fn call(&mut self, data: &[u8]) -> usize {
        let before = self.calls.len() + self.begun_call.len();
        // The chunks of a server elsewhere may end within a line.
        for piece in data.split_inclusive(|byte| *byte == b'\n') {
            // A server elsewhere may send a line without end: what is longer than a call may be is no call.
            let room = (CALL_MAX + 1).saturating_sub(self.begun_call.len());
            self.begun_call
                .extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                self.end_call();
            }
        }
        (self.calls.len() + self.begun_call.len()).saturating_sub(before)
    }

    /// The line of a call is complete.
    pub(super) fn end_call(&mut self) {
        let line = std::mem::take(&mut self.begun_call);
        if line.len() > CALL_MAX {
            return;
        }
        let Ok(call) = str::from_utf8(&line) else {
            return;
        };
        // What is no object would make the list unreadable. It is read to be checked and sent as it is, because a value has
        // numbers of 64 bits, and arguments may have longer ones.
        if serde_json::from_str::<Map<String, Value>>(call).is_err() {
            return;
        }
        if !self.calls.is_empty() {
            self.calls.push(',');
        }
        self.calls.push_str(call.trim_ascii());
    }

    /// The calls as one list in JSON; an empty text if there are none.
    pub(super) fn calls_list(&self) -> String {
        if self.calls.is_empty() {
            return String::new();
        }
        format!("[{}]", self.calls)
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
            let entry =
                json!({"logprob": value.get("logprob"), "rank": rank, "decoded_token": text});
            (id, entry)
        };
        // First, also if it is one of its own alternatives: nothing else tells which entry was chosen. An upstream need not
        // report its rank: then it is the one after all that were sent.
        let rank = reported.get("rank").and_then(Value::as_u64);
        let mut map = Map::from_iter([entry(&reported, rank.unwrap_or(top.len() as u64 + 1))]);
        // An alternative that is the token itself keeps its place, and its rank is known exactly.
        map.extend((1..).zip(top).map(|(rank, value)| entry(value, rank)));
        let alternatives = map.len();
        self.logprobs.push(Value::Object(map));
        alternatives
    }
}

/// Bytes of one call: more than those of our own models may have.
const CALL_MAX: usize = 1 << 20;
/// Tokens of one choice whose log-probabilities wait for text: a stop text that is held back comes before as many.
const LOGPROBS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_one_list_however_their_lines_are_cut() {
        let lines = b"{\"name\":\"a\"}\n\nno call\n{\"name\":\"\xc3\xa9\"}";
        for border in 0..lines.len() {
            let mut delta = ChoiceDelta::default();
            delta.call(&lines[..border]);
            assert_eq!(delta.has_text(), border >= 13, "{border}");
            delta.call(&lines[border..]);
            assert_eq!(delta.calls_list(), r#"[{"name":"a"}]"#);
            delta.end_call();
            assert_eq!(delta.calls_list(), r#"[{"name":"a"},{"name":"é"}]"#);
        }
        assert_eq!(ChoiceDelta::default().calls_list(), "");
    }

    #[test]
    fn numbers_of_arguments_keep_their_digits() {
        let call = r#"{"arguments":{"wei":123456789012345678901,"share":0.1234567890123456789}}"#;
        let mut delta = ChoiceDelta::default();
        delta.call(format!("{call}\n").as_bytes());
        assert_eq!(delta.calls_list(), format!("[{call}]"));
    }

    #[test]
    fn a_call_without_end_takes_little_memory() {
        let mut delta = ChoiceDelta::default();
        for _ in 0..64 {
            delta.call(&[b' '; 1 << 16]);
        }
        assert!(delta.begun_call.len() <= CALL_MAX + 1);
        delta.call(b"\n{\"name\":\"a\"}\n");
        assert_eq!(delta.calls_list(), r#"[{"name":"a"}]"#);
    }

    /// As in vLLM's outputs: nothing else tells which of the entries was chosen.
    #[test]
    fn the_chosen_token_comes_before_its_alternatives() {
        let line = |id: u32, rank: u32| {
            json!({"token_id": id, "logprob": -2.0, "rank": rank, "text": "x", "top": [
                {"token_id": 30, "logprob": -1.0, "text": "a"},
                {"token_id": 20, "logprob": -2.0, "text": "b"},
            ]})
        };
        for (id, rank, expect) in [
            (20, 2, &["20", "30"][..]),
            (30, 1, &["30", "20"]),
            (7, 9, &["7", "30", "20"]),
        ] {
            let mut delta = ChoiceDelta::default();
            let count = delta.logprob(line(id, rank).to_string().as_bytes());
            let entries = delta.logprobs[0].as_object().unwrap();
            assert_eq!(entries.keys().collect::<Vec<_>>(), expect);
            assert_eq!(count, expect.len());
            assert_eq!(delta.logprobs[0][id.to_string()]["rank"], rank);
        }
    }
}
