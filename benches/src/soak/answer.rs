//! [`SoakAnswer`]: the text and the tokens of a response of `generate_stream`.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::side::events;

/// A token that was chosen or could have been.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its id.
    pub id: u32,
    /// Its log-probability.
    pub logprob: f64,
    /// Its text.
    pub text: String,
}

/// One position of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// The chosen token.
    pub chosen: Candidate,
    /// The others, as many as the request has asked for.
    pub others: Vec<Candidate>,
}

/// One choice of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SoakChoice {
    /// The whole text.
    pub text: String,
    /// Its tokens; empty if the request has not asked for log-probabilities.
    pub tokens: Vec<Position>,
    /// Why it ended.
    pub finish_reason: String,
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SoakAnswer {
    /// Its choices.
    pub choices: Vec<SoakChoice>,
}

impl SoakAnswer {
    /// Reads a response, head included.
    ///
    /// # Errors
    /// If its status is not 200, an event is an error, or a choice has no end.
    pub fn read(reply: &[u8]) -> Result<Self> {
        let reply = String::from_utf8_lossy(reply);
        ensure!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        let mut answer = Self::default();
        for event in events(&reply) {
            answer.add(&event)?;
        }
        ensure!(!answer.choices.is_empty(), "a response without events");
        for choice in &answer.choices {
            ensure!(
                !choice.finish_reason.is_empty(),
                "a stream without its end: {:?}",
                choice.text
            );
        }
        Ok(answer)
    }

    /// Returns whether every choice with a text tells of its tokens.
    #[must_use]
    pub fn has_logprobs(&self) -> bool {
        let mut choices = self.choices.iter();
        choices.all(|choice| choice.text.is_empty() || !choice.tokens.is_empty())
    }

    fn add(&mut self, event: &Value) -> Result<()> {
        if let Some(error) = event.get("error") {
            bail!("the stream ended with an error: {error}");
        }
        let texts = rows(event, "text_output").context("no text_output")?;
        let reasons = rows(event, "finish_reason").unwrap_or_default();
        let tokens = rows(event, "logprobs").unwrap_or_default();
        if self.choices.len() < texts.len() {
            self.choices.resize_with(texts.len(), SoakChoice::default);
        }
        for (place, choice) in self.choices.iter_mut().enumerate() {
            choice.text += texts.get(place).copied().unwrap_or_default();
            let reason = reasons.get(place).copied().unwrap_or("None");
            if reason != "None" {
                reason.clone_into(&mut choice.finish_reason);
            }
            let tokens = tokens.get(place).copied().unwrap_or("null");
            if let Some(tokens) = serde_json::from_str::<Option<Vec<Value>>>(tokens)? {
                let tokens: Option<Vec<_>> = tokens.iter().map(position).collect();
                choice
                    .tokens
                    .extend(tokens.context("a token without its numbers")?);
            }
        }
        Ok(())
    }
}

/// The texts of an output: one, or one for each choice.
fn rows<'a>(event: &'a Value, name: &str) -> Option<Vec<&'a str>> {
    match event.get(name)? {
        Value::Array(rows) => rows.iter().map(Value::as_str).collect(),
        row => Some(vec![row.as_str()?]),
    }
}

/// Reads a position: an object with a member for each candidate, the chosen one first.
fn position(position: &Value) -> Option<Position> {
    let candidates = position.as_object()?.iter().map(|(id, candidate)| {
        Some(Candidate {
            id: id.parse().ok()?,
            logprob: candidate.get("logprob")?.as_f64()?,
            text: candidate.get("decoded_token")?.as_str()?.to_owned(),
        })
    });
    let mut candidates = candidates.collect::<Option<Vec<_>>>()?;
    (!candidates.is_empty()).then(|| Position {
        chosen: candidates.remove(0),
        others: candidates,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "HTTP/1.1 200 OK\r\n\r\n";

    #[test]
    fn the_events_of_two_choices_are_joined() {
        let one = r#"{"text_output":["a",""],"finish_reason":["None","stop"],"logprobs":["[{\"7\":{\"logprob\":-0.5,\"rank\":1,\"decoded_token\":\"a\"},\"3\":{\"logprob\":-1.5,\"rank\":2,\"decoded_token\":\"x\"}}]","null"]}"#;
        let two = r#"{"text_output":["b",""],"finish_reason":["length","None"],"logprobs":["null","null"]}"#;
        let reply = format!("{HEAD}data: {one}\n\ndata: {two}\n\n");
        let answer = SoakAnswer::read(reply.as_bytes()).unwrap();
        assert_eq!(answer.choices.len(), 2);
        let first = &answer.choices[0];
        assert_eq!(
            (first.text.as_str(), first.finish_reason.as_str()),
            ("ab", "length")
        );
        assert_eq!(
            (first.tokens[0].chosen.id, first.tokens[0].others[0].id),
            (7, 3)
        );
        assert_eq!(answer.choices[1].finish_reason, "stop");
    }

    #[test]
    fn what_is_refused_fails_or_has_no_end_is_an_error() {
        let refused = "HTTP/1.1 503 Service Unavailable\r\n\r\n{}".to_owned();
        let failed = format!("{HEAD}data: {{\"error\":\"x\"}}\n\n");
        let cut = format!("{HEAD}data: {{\"text_output\":\"a\",\"finish_reason\":\"None\"}}\n\n");
        for (reply, expect) in [
            (refused, "503"),
            (failed, "an error"),
            (cut, "without its end"),
        ] {
            let error = SoakAnswer::read(reply.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        }
    }
}
