//! [`Delta`]: the typed form of what a model writes, in order, with calls of tools as they come (KE-306).

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::tool_arguments::ToolArguments;

/// One event of a chat: a line of the port `events` (KE-307).
///
/// The order of a call is `ToolCall`, any number of `ToolArgs`, and `ToolReady` or `ToolBroken`; the calls of a choice do
/// not interleave. The texts of a choice's deltas are those of its other ports; that of a `ToolBroken` is text of the main
/// port.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
pub enum Delta {
    /// Text of the answer.
    Text {
        /// The turn of an agent; 0 for a model.
        turn: u32,
        /// Which of n answers.
        choice: u32,
        /// The text to append.
        text: String,
    },
    /// Text of the reasoning.
    Reasoning {
        /// The turn.
        turn: u32,
        /// Which of n answers.
        choice: u32,
        /// The text to append.
        text: String,
    },
    /// A call begins.
    ToolCall {
        /// The turn.
        turn: u32,
        /// Which of n answers.
        choice: u32,
        /// Which call of the choice, from 0.
        index: u32,
        /// Its id, unique in the conversation.
        id: String,
        /// The name of the tool.
        name: String,
    },
    /// Arguments of the call that began last.
    ToolArgs {
        /// The turn.
        turn: u32,
        /// Which of n answers.
        choice: u32,
        /// Which call.
        index: u32,
        /// JSON text to append; together it is one JSON value, if the call is complete.
        json: String,
    },
    /// The call is complete: its tool may be run.
    ToolReady {
        /// The turn.
        turn: u32,
        /// Which of n answers.
        choice: u32,
        /// The whole call.
        call: ToolCallRecord,
    },
    /// What began as a call is none: its arguments broke off, or are no JSON.
    ToolBroken {
        /// The turn.
        turn: u32,
        /// Which of n answers.
        choice: u32,
        /// Which call.
        index: u32,
        /// What the model wrote, markers and all: text of the answer, in place of the call. It is empty in reasoning, which
        /// has that text behind it.
        text: String,
    },
    /// A choice ended.
    Finish {
        /// The turn.
        turn: u32,
        /// Which of n answers.
        choice: u32,
        /// The name of a [`ChoiceFinish`](crate::ChoiceFinish).
        reason: String,
    },
}

impl Delta {
    /// The JSON text of its line.
    pub(crate) fn to_line(&self) -> String {
        let value = match self {
            // A value would round the numbers of its arguments.
            Self::ToolReady { turn, choice, call } => {
                let call = call.to_line();
                return format!(
                    r#"{{"type":"tool_ready","turn":{turn},"choice":{choice},"call":{call}}}"#
                );
            }
            Self::Text { turn, choice, text } => {
                json!({"type": "text", "turn": turn, "choice": choice, "text": text})
            }
            Self::Reasoning { turn, choice, text } => {
                json!({"type": "reasoning", "turn": turn, "choice": choice, "text": text})
            }
            Self::ToolCall {
                turn,
                choice,
                index,
                id,
                name,
            } => json!({
                "type": "tool_call", "turn": turn, "choice": choice, "index": index, "id": id, "name": name,
            }),
            Self::ToolArgs {
                turn,
                choice,
                index,
                json,
            } => json!({
                "type": "tool_args", "turn": turn, "choice": choice, "index": index, "json": json,
            }),
            Self::ToolBroken {
                turn,
                choice,
                index,
                text,
            } => json!({
                "type": "tool_broken", "turn": turn, "choice": choice, "index": index, "text": text,
            }),
            Self::Finish {
                turn,
                choice,
                reason,
            } => json!({"type": "finish", "turn": turn, "choice": choice, "reason": reason}),
        };
        value.to_string()
    }
}

impl ToolCallRecord {
    /// The JSON text of its line.
    pub(crate) fn to_line(&self) -> String {
        let Self {
            index, arguments, ..
        } = self;
        let [id, name] = [&self.id, &self.name].map(|text| Value::from(text.as_str()));
        format!(r#"{{"index":{index},"id":{id},"name":{name},"arguments":{arguments}}}"#)
    }
}

/// The members of all kinds of lines.
///
/// A derived reader of [`Delta`] would look for the type first and hold the rest as values, with rounded numbers.
#[derive(Deserialize)]
struct DeltaLine {
    #[serde(rename = "type")]
    kind: DeltaKind,
    turn: u32,
    choice: u32,
    index: Option<u32>,
    id: Option<String>,
    name: Option<String>,
    text: Option<String>,
    json: Option<String>,
    call: Option<ToolCallRecord>,
    reason: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum DeltaKind {
    Text,
    Reasoning,
    ToolCall,
    ToolArgs,
    ToolReady,
    ToolBroken,
    Finish,
}

impl DeltaLine {
    /// The name of a member that is missing otherwise.
    fn into_delta(self) -> Result<Delta, &'static str> {
        let (turn, choice) = (self.turn, self.choice);
        let index = self.index.ok_or("index");
        let text = self.text.ok_or("text");
        Ok(match self.kind {
            DeltaKind::Text => Delta::Text {
                turn,
                choice,
                text: text?,
            },
            DeltaKind::Reasoning => Delta::Reasoning {
                turn,
                choice,
                text: text?,
            },
            DeltaKind::ToolCall => Delta::ToolCall {
                turn,
                choice,
                index: index?,
                id: self.id.ok_or("id")?,
                name: self.name.ok_or("name")?,
            },
            DeltaKind::ToolArgs => Delta::ToolArgs {
                turn,
                choice,
                index: index?,
                json: self.json.ok_or("json")?,
            },
            DeltaKind::ToolReady => Delta::ToolReady {
                turn,
                choice,
                call: self.call.ok_or("call")?,
            },
            DeltaKind::ToolBroken => Delta::ToolBroken {
                turn,
                choice,
                index: index?,
                text: text?,
            },
            DeltaKind::Finish => Delta::Finish {
                turn,
                choice,
                reason: self.reason.ok_or("reason")?,
            },
        })
    }
}

impl<'de> Deserialize<'de> for Delta {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let line = DeltaLine::deserialize(deserializer)?;
        line.into_delta().map_err(D::Error::missing_field)
    }
}

/// A complete call: a line of the port `tool_calls`.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
pub struct ToolCallRecord {
    /// Which call of the choice. There are gaps where calls broke off.
    pub index: u32,
    /// Its id.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// Its arguments; an object, unless the model wrote something else.
    #[schemars(with = "Value")]
    pub arguments: ToolArguments,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ke_307_a_delta_survives_its_json_form_unchanged() {
        let (turn, choice, index) = (1, 2, 3);
        let text = || "t".to_owned();
        let call = ToolCallRecord {
            index,
            id: text(),
            name: text(),
            arguments: json!({"a": 1}).into(),
        };
        for delta in [
            Delta::Text {
                turn,
                choice,
                text: text(),
            },
            Delta::Reasoning {
                turn,
                choice,
                text: text(),
            },
            Delta::ToolCall {
                turn,
                choice,
                index,
                id: text(),
                name: text(),
            },
            Delta::ToolArgs {
                turn,
                choice,
                index,
                json: text(),
            },
            Delta::ToolReady { turn, choice, call },
            Delta::ToolBroken {
                turn,
                choice,
                index,
                text: text(),
            },
            Delta::Finish {
                turn,
                choice,
                reason: text(),
            },
        ] {
            let line = delta.to_line();
            assert_eq!(serde_json::from_str::<Delta>(&line).unwrap(), delta);
            // As it comes in a message of JSON.
            let value: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(serde_json::from_value::<Delta>(value).unwrap(), delta);
        }
        let short = r#"{"type": "tool_args", "turn": 0, "choice": 0, "index": 0}"#;
        let error = serde_json::from_str::<Delta>(short).unwrap_err();
        assert_eq!(error.to_string(), "missing field `json`");
    }
}
