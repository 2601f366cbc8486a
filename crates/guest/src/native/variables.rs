//! The variables of a request in native runs.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::Value;

/// The variables that all forks of a request share. Each call is atomic.
pub trait Variables: Send + Sync {
    /// The value of a variable, if it was ever written.
    fn read(&self, name: &str) -> Option<Value>;

    /// Writes a variable.
    fn write(&self, write: &VariableWrite) -> WriteOutcome;
}

/// A write of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableWrite {
    /// The variable's name.
    pub name: String,
    /// What is written or appended.
    pub value: Vec<u8>,
    /// Whether `value` is added to the end of what is there.
    pub append: bool,
    /// The version that the variable must have, if one is required.
    pub when_version_is: Option<u64>,
}

/// The result of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The new version.
    Written(u64),
    /// Nothing was written: the variable has another version than required. `None` if it does not exist.
    OtherVersion(Option<Value>),
    /// Nothing was written: the limit of this name would be exceeded. The controller fails.
    OverLimit(&'static str),
}

/// Variables in memory.
#[derive(Debug, Default)]
pub struct SharedVariables(Mutex<BTreeMap<String, Value>>);

/// The limits of the specification (AI-953).
const NAME_BYTES_MAX: usize = 256;
const VALUE_BYTES_MAX: usize = 1 << 20;
const COUNT_MAX: usize = 1_024;

impl SharedVariables {
    /// All variables.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<String, Value> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Variables for SharedVariables {
    fn read(&self, name: &str) -> Option<Value> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    fn write(&self, write: &VariableWrite) -> WriteOutcome {
        let mut variables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let current = variables.get(&write.name);
        let version = current.map(|value| value.version);
        if write
            .when_version_is
            .is_some_and(|required| version != Some(required))
        {
            return WriteOutcome::OtherVersion(current.cloned());
        }
        let kept = current
            .filter(|_| write.append)
            .map_or(0, |value| value.bytes.len());
        if write.name.len() > NAME_BYTES_MAX {
            return WriteOutcome::OverLimit("name");
        }
        if kept + write.value.len() > VALUE_BYTES_MAX {
            return WriteOutcome::OverLimit("value");
        }
        if current.is_none() && variables.len() == COUNT_MAX {
            return WriteOutcome::OverLimit("number");
        }
        let value = variables.entry(write.name.clone()).or_insert(Value {
            version: 0,
            bytes: Vec::new(),
        });
        value.version += 1;
        value.bytes.truncate(kept);
        value.bytes.extend_from_slice(&write.value);
        WriteOutcome::Written(value.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: impl Into<String>, value: Vec<u8>) -> VariableWrite {
        VariableWrite {
            name: name.into(),
            value,
            append: false,
            when_version_is: None,
        }
    }

    /// AI-953
    #[test]
    fn ai_953_limits_hold() {
        let variables = SharedVariables::default();
        let written = |write: &VariableWrite| variables.write(write);
        assert_eq!(
            written(&set("n".repeat(256), vec![])),
            WriteOutcome::Written(1)
        );
        assert_eq!(
            written(&set("n".repeat(257), vec![])),
            WriteOutcome::OverLimit("name")
        );
        assert_eq!(
            written(&set("v", vec![0; 1 << 20])),
            WriteOutcome::Written(1)
        );
        assert_eq!(
            written(&set("w", vec![0; (1 << 20) + 1])),
            WriteOutcome::OverLimit("value")
        );
        let one_more = VariableWrite {
            append: true,
            ..set("v", vec![0])
        };
        assert_eq!(written(&one_more), WriteOutcome::OverLimit("value"));
        for index in 2..1_024 {
            assert_eq!(
                written(&set(index.to_string(), vec![])),
                WriteOutcome::Written(1)
            );
        }
        assert_eq!(
            written(&set("new", vec![])),
            WriteOutcome::OverLimit("number")
        );
        assert_eq!(written(&set("v", vec![1])), WriteOutcome::Written(2));
    }
}
