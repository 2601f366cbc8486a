//! Metadata of a request that is no data: usage, finish reason, model, role.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};

use crate::name::Name;

/// Request-level metadata, on chunks and on runs.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    /// The cost of the whole request: the sum over its turns.
    pub usage: RunUsage,
    /// The cost of each turn.
    pub usage_by_turn: BTreeMap<u32, RunUsage>,
    /// How each choice ended.
    pub finish: BTreeMap<u32, ChoiceFinish>,
    /// The model that answered.
    pub model: Option<Name>,
    /// The id of the request at its server.
    pub request_id: Option<Name>,
    /// The role of the author: `USER`, `ASSISTANT`, `SYSTEM` …
    pub role: Option<Name>,
    /// Which turn of an agent this belongs to.
    pub turn: Option<u32>,
    /// The answer came from a cache.
    pub cached: Option<bool>,
    /// Everything else.
    pub extra: BTreeMap<Name, Value>,
}

/// Tokens counted.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated, all choices together.
    pub completion_tokens: u64,
    /// Tokens of the prompt that were read from a cache.
    pub cached_tokens: u64,
    /// Generated tokens that were reasoning.
    pub reasoning_tokens: u64,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ChoiceFinish {
    /// At its end of sequence, or at a stop.
    Stop,
    /// At `max_tokens` or the end of the context.
    Length,
    /// It requests tool calls.
    ToolCalls,
    /// A controller ended it.
    Controller,
    /// The caller cancelled.
    Cancelled,
    /// A filter ended it.
    ContentFilter,
    /// An agent had no turns left.
    Turns,
    /// Its controller failed while other choices went on.
    Failed,
    /// A reason of a peer that is not in this list.
    Other(Name),
}

impl ChoiceFinish {
    /// The stable name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::Controller => "controller",
            Self::Cancelled => "cancelled",
            Self::ContentFilter => "content_filter",
            Self::Turns => "turns",
            Self::Failed => "error",
            Self::Other(name) => name,
        }
    }

    /// The reason with this name; an unknown one is retained.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "stop" => Self::Stop,
            "length" => Self::Length,
            "tool_calls" => Self::ToolCalls,
            "controller" => Self::Controller,
            "cancelled" => Self::Cancelled,
            "content_filter" => Self::ContentFilter,
            "turns" => Self::Turns,
            "error" => Self::Failed,
            other => Self::Other(Name::shared(other)),
        }
    }
}

impl fmt::Display for ChoiceFinish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl RunUsage {
    /// With these prompt and completion counts; the rest zero.
    #[must_use]
    pub const fn of(prompt_tokens: u64, completion_tokens: u64) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            cached_tokens: 0,
            reasoning_tokens: 0,
        }
    }

    const fn plus(self, other: Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            completion_tokens: self
                .completion_tokens
                .saturating_add(other.completion_tokens),
            cached_tokens: self.cached_tokens.saturating_add(other.cached_tokens),
            reasoning_tokens: self.reasoning_tokens.saturating_add(other.reasoning_tokens),
        }
    }

    /// The counts as JSON, under their field names.
    #[must_use]
    pub fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": self.reasoning_tokens,
        })
    }
}

impl Meta {
    /// Sets the role.
    #[must_use]
    pub fn with_role(mut self, role: impl Into<Name>) -> Self {
        self.role = Some(role.into());
        self
    }

    /// Sets the running total of one turn.
    #[must_use]
    pub fn with_usage(mut self, turn: u32, usage: RunUsage) -> Self {
        self.turn = Some(turn);
        self.usage_by_turn.insert(turn, usage);
        self.usage = self.total();
        self
    }

    /// Sets the finish of one choice.
    #[must_use]
    pub fn with_finish(mut self, choice: u32, reason: ChoiceFinish) -> Self {
        self.finish.insert(choice, reason);
        self
    }

    /// Sets a field of `extra`.
    #[must_use]
    pub fn with_extra(mut self, key: impl Into<Name>, value: impl Into<Value>) -> Self {
        self.extra.insert(key.into(), value.into());
        self
    }

    fn total(&self) -> RunUsage {
        self.usage_by_turn
            .values()
            .fold(RunUsage::default(), |sum, usage| sum.plus(*usage))
    }

    /// Merges the fields of `newer` (KE-303). Within a turn usage is replaced, over turns it is summed; for everything
    /// else the last value wins, and an absent field erases nothing.
    pub fn merge(&mut self, newer: &Self) {
        if newer.usage_by_turn.is_empty() {
            // Metadata without usage must not reset what was counted.
            if newer.usage != RunUsage::default() {
                // A source without turns reports one total; it belongs to the turn that its metadata names.
                let turn = newer.turn.unwrap_or(0);
                self.usage_by_turn.insert(turn, newer.usage);
            }
        } else {
            self.usage_by_turn.extend(&newer.usage_by_turn);
        }
        // Recomputed and not added: usage within a turn is a running total (KE-303).
        self.usage = self.total();
        for (choice, reason) in &newer.finish {
            self.finish.insert(*choice, reason.clone());
        }
        for (key, value) in &newer.extra {
            self.extra.insert(key.clone(), value.clone());
        }
        last(&mut self.model, &newer.model);
        last(&mut self.request_id, &newer.request_id);
        last(&mut self.role, &newer.role);
        last(&mut self.turn, &newer.turn);
        last(&mut self.cached, &newer.cached);
    }

    /// The value under `key`: a field's name, else a key of `extra`. `None` if it is not set.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Value> {
        let text = |name: &Option<Name>| name.as_ref().map(|name| Value::from(name.as_str()));
        match key {
            "usage" => (self.usage != RunUsage::default()).then(|| self.usage.to_json()),
            "usage_by_turn" => by_number(&self.usage_by_turn, |usage| usage.to_json()),
            "finish" => by_number(&self.finish, |reason| Value::from(reason.name())),
            "model" => text(&self.model),
            "request_id" => text(&self.request_id),
            "role" => text(&self.role),
            "turn" => self.turn.map(Value::from),
            "cached" => self.cached.map(Value::from),
            extra => self.extra.get(extra).cloned(),
        }
    }
}

fn last<T: Clone>(mine: &mut Option<T>, newer: &Option<T>) {
    if newer.is_some() {
        mine.clone_from(newer);
    }
}

fn by_number<T>(map: &BTreeMap<u32, T>, value: impl Fn(&T) -> Value) -> Option<Value> {
    (!map.is_empty()).then(|| {
        map.iter()
            .map(|(number, item)| (number.to_string(), value(item)))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ke_302_every_field_is_reached_by_name() {
        let meta = Meta {
            model: Some("tiny".into()),
            request_id: Some("r1".into()),
            cached: Some(true),
            ..Meta::default()
        }
        .with_role("ASSISTANT")
        .with_usage(2, RunUsage::of(3, 4))
        .with_finish(1, ChoiceFinish::Turns)
        .with_extra("seed", 7);
        for (key, expect) in [
            (
                "usage",
                json!({"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0, "reasoning_tokens": 0}),
            ),
            ("finish", json!({"1": "turns"})),
            ("model", json!("tiny")),
            ("request_id", json!("r1")),
            ("role", json!("ASSISTANT")),
            ("turn", json!(2)),
            ("cached", json!(true)),
            ("seed", json!(7)),
        ] {
            assert_eq!(meta.get(key), Some(expect), "{key}");
        }
        assert!(
            meta.get("usage_by_turn")
                .is_some_and(|turns| turns.get("2").is_some())
        );
        assert_eq!(Meta::default().get("usage"), None);
        for reason in [
            "stop",
            "length",
            "tool_calls",
            "controller",
            "cancelled",
            "content_filter",
            "turns",
            "error",
            "odd",
        ] {
            assert_eq!(ChoiceFinish::from_name(reason).name(), reason);
        }
    }

    #[test]
    fn ke_303_usage_replaces_in_a_turn_and_sums_over_turns() {
        let mut meta = Meta::default();
        meta.merge(
            &Meta::default()
                .with_usage(0, RunUsage::of(5, 1))
                .with_extra("a", 1),
        );
        meta.merge(
            &Meta::default()
                .with_usage(0, RunUsage::of(5, 3))
                .with_extra("b", 2),
        );
        meta.merge(&Meta::default().with_usage(1, RunUsage::of(9, 12)));
        assert_eq!(meta.usage, RunUsage::of(14, 15));
        assert_eq!(meta.usage_by_turn[&0], RunUsage::of(5, 3));
        // A usage without turns belongs to the turn that its metadata names.
        let plain = Meta {
            usage: RunUsage::of(1, 1),
            turn: Some(1),
            ..Meta::default()
        };
        meta.merge(&plain);
        assert_eq!(meta.usage, RunUsage::of(6, 4));
        assert_eq!(
            (meta.get("a"), meta.get("b")),
            (Some(json!(1)), Some(json!(2)))
        );
    }

    #[test]
    fn ke_303_the_last_wins_and_absence_erases_nothing() {
        let mut meta = Meta::default()
            .with_finish(0, ChoiceFinish::Stop)
            .with_role("USER");
        meta.merge(
            &Meta::default()
                .with_finish(0, ChoiceFinish::Length)
                .with_finish(1, ChoiceFinish::Stop),
        );
        meta.merge(&Meta::default());
        assert_eq!(meta.finish[&0], ChoiceFinish::Length);
        assert_eq!(meta.finish.len(), 2);
        assert_eq!(meta.role, Some(Name::new("USER")));
    }
}
