//! [`Delta`]: the typed form of what a model writes, in order, with calls of tools as they come (KE-306).

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

/// One event of a chat: a line of the port `events` (KE-307).
///
/// The order of a call is `ToolCall`, any number of `ToolArgs`, and `ToolReady` or `ToolBroken`; the calls of a choice do
/// not interleave. The texts of a choice's deltas are those of its other ports; that of a `ToolBroken` is text of the main
/// port.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
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
    /// The JSON object of its line.
    pub(crate) fn to_json(&self) -> Value {
        match self {
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
            Self::ToolReady { turn, choice, call } => json!({
                "type": "tool_ready", "turn": turn, "choice": choice, "call": call.to_json(),
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
        }
    }
}

impl ToolCallRecord {
    /// The JSON object of its line.
    pub(crate) fn to_json(&self) -> Value {
        json!({"index": self.index, "id": self.id, "name": self.name, "arguments": self.arguments})
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
    pub arguments: Value,
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
            arguments: json!({"a": 1}),
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
            let read: Delta = serde_json::from_value(delta.to_json()).unwrap();
            assert_eq!(read, delta);
        }
    }
}
