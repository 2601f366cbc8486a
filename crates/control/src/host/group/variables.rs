//! [`Variables`]: named, versioned values that all sequences of a request read and write.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{NamedVariable, OutsideWrite, RequestVariables, VariableWrite};

use super::{Group, MemberNumber};
use crate::host::budget::{ALL_MEMORY_EXHAUSTED, MemoryBudget};
use crate::host::failure::Abort;
use crate::host::home::Home;

/// Limits of the variables of one request (AI-953).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VariablesLimits {
    /// Bytes of a name.
    pub name_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Variables.
    pub number: usize,
    /// Bytes of all names and values.
    pub total_bytes: usize,
    /// Successful writes of one sequence in one step.
    pub writes_per_step: usize,
}

impl Default for VariablesLimits {
    fn default() -> Self {
        Self {
            name_bytes: 256,
            value_bytes: 1 << 20,
            number: 1_024,
            total_bytes: 16 << 20,
            writes_per_step: 1_024,
        }
    }
}

/// The value of a variable at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versioned {
    /// 1 for the first write; each write adds 1.
    pub version: u64,
    /// The bytes.
    pub value: Arc<Vec<u8>>,
}

/// What a write did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::host) enum WriteResult {
    /// It was made; this is the version it made.
    Written(u64),
    /// The variable has another version than the write required, or there is none.
    Conflict(Option<Versioned>),
}

/// A set of variables. Every operation takes effect at one moment between its start and its end (AI-952).
#[derive(Debug)]
pub struct Variables {
    limits: VariablesLimits,
    set: Mutex<VariableSet>,
    /// In a controller's process: who has them instead.
    home: Option<Arc<dyn Home>>,
}

#[derive(Debug, Default)]
struct VariableSet {
    values: HashMap<String, Variable>,
    total_bytes: usize,
    /// The memory of all controllers, once one of the request lives.
    budget: Option<Arc<MemoryBudget>>,
    /// Writes of any variable.
    changes: u64,
}

#[derive(Debug)]
struct Variable {
    current: Versioned,
    /// `VariableSet::changes` after its last write.
    changed: u64,
    /// Who wrote it last.
    writer: MemberNumber,
}

impl Variables {
    pub(super) fn new(limits: VariablesLimits) -> Self {
        Self {
            limits,
            set: Mutex::default(),
            home: None,
        }
    }

    /// The variables of the runtime, seen from a controller's process.
    #[cfg(target_os = "linux")]
    pub(super) fn of_home(limits: VariablesLimits, home: Arc<dyn Home>) -> Self {
        Self {
            home: Some(home),
            ..Self::new(limits)
        }
    }

    /// Charges what they hold to the memory of all controllers, from now on and until the request is gone. `false`: there is not
    /// enough.
    pub(in crate::host) fn charge_to(&self, budget: &Arc<MemoryBudget>) -> bool {
        let mut set = self.lock();
        if set.budget.is_some() {
            return true;
        }
        // What was written before the first controller came.
        let charged = budget.charge(held(set.total_bytes, set.values.len()));
        if charged {
            set.budget = Some(Arc::clone(budget));
        }
        charged
    }

    /// The limits.
    #[must_use]
    pub const fn limits(&self) -> &VariablesLimits {
        &self.limits
    }

    /// The value of `name`, if it was ever written. Costs no copy of it.
    #[must_use]
    pub fn read(&self, name: &str) -> Option<Versioned> {
        if let Some(home) = &self.home {
            return home.read(name);
        }
        let set = self.lock();
        set.values
            .get(name)
            .map(|variable| variable.current.clone())
    }

    /// How many writes there were.
    pub(super) fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Whether somebody else than `member` has written one of the variables since there were so many writes.
    pub(super) fn changed_since(
        &self,
        changes: u64,
        names: &[String],
        member: Option<MemberNumber>,
    ) -> bool {
        let set = self.lock();
        // Most often nothing has changed at all.
        set.changes > changes
            && names
                .iter()
                .filter_map(|name| set.values.get(name))
                .any(|variable| variable.changed > changes && Some(variable.writer) != member)
    }

    /// Writes or appends for a sequence; over a limit nothing is written.
    pub(in crate::host) fn write(
        &self,
        write: &VariableWrite,
        writer: MemberNumber,
    ) -> Result<WriteResult, Abort> {
        // There it is known who writes.
        if let Some(home) = &self.home {
            return home.write(write);
        }
        let limits = &self.limits;
        limit("name", write.name.len(), limits.name_bytes)?;
        limit("value", write.value.len(), limits.value_bytes)?;
        let mut set = self.lock();
        let VariableSet {
            values,
            total_bytes,
            budget,
            changes,
        } = &mut *set;
        let number = values.len();
        let variable = values.get_mut(&write.name);
        if let Some(required) = write.when_version_is
            && variable.as_ref().map(|it| it.current.version) != Some(required)
        {
            let current = variable.map(|variable| variable.current.clone());
            return Ok(WriteResult::Conflict(current));
        }
        let Some(variable) = variable else {
            limit("number", number + 1, limits.number)?;
            let total = *total_bytes + write.name.len() + write.value.len();
            limit("total", total, limits.total_bytes)?;
            recharge(
                budget.as_deref(),
                held(*total_bytes, number),
                held(total, number + 1),
            )?;
            *total_bytes = total;
            *changes += 1;
            let first = Versioned {
                version: 1,
                value: Arc::new(write.value.clone()),
            };
            let variable = Variable {
                current: first,
                changed: *changes,
                writer,
            };
            values.insert(write.name.clone(), variable);
            return Ok(WriteResult::Written(1));
        };
        let current = &mut variable.current;
        let kept = if write.append { current.value.len() } else { 0 };
        limit("value", kept + write.value.len(), limits.value_bytes)?;
        let total = *total_bytes - current.value.len() + kept + write.value.len();
        limit("total", total, limits.total_bytes)?;
        recharge(
            budget.as_deref(),
            held(*total_bytes, number),
            held(total, number),
        )?;
        *total_bytes = total;
        // In place, unless a reader still holds the value.
        let value = Arc::make_mut(&mut current.value);
        value.truncate(kept);
        value.extend_from_slice(&write.value);
        current.version += 1;
        *changes += 1;
        (variable.changed, variable.writer) = (*changes, writer);
        Ok(WriteResult::Written(variable.current.version))
    }

    /// All of them, by name. Costs no copy of their values.
    fn all(&self) -> Vec<NamedVariable> {
        let set = self.lock();
        let named = |(name, variable): (&String, &Variable)| named(name, &variable.current);
        let mut all: Vec<_> = set.values.iter().map(named).collect();
        drop(set);
        all.sort_unstable_by(|left, right| left.name.cmp(&right.name));
        all
    }

    // No operation leaves the set half changed: limits are checked first, and allocation aborts.
    fn lock(&self) -> std::sync::MutexGuard<'_, VariableSet> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn named(name: &str, current: &Versioned) -> NamedVariable {
    NamedVariable {
        name: name.to_owned(),
        version: current.version,
        value: Arc::clone(&current.value),
    }
}

/// As somebody outside of the request has them (AI-1006).
impl RequestVariables for Group {
    fn list(&self) -> Vec<NamedVariable> {
        self.variables().all()
    }

    fn read(&self, name: &str) -> Option<NamedVariable> {
        let current = self.variables().read(name)?;
        Some(named(name, &current))
    }

    fn write(&self, write: &VariableWrite) -> OutsideWrite {
        match self.variables().write(write, MemberNumber::OUTSIDE) {
            Ok(WriteResult::Written(version)) => OutsideWrite::Written(version),
            Ok(WriteResult::Conflict(current)) => {
                OutsideWrite::OtherVersion(current.map(|current| current.version))
            }
            Err(over) => OutsideWrite::OverLimit(over.message),
        }
    }
}

/// Bytes that a set of variables takes.
const fn held(total_bytes: usize, number: usize) -> usize {
    total_bytes + number * VARIABLE_BYTES
}

/// Changes what a set of variables is charged.
fn recharge(budget: Option<&MemoryBudget>, from: usize, to: usize) -> Result<(), Abort> {
    let Some(budget) = budget else {
        return Ok(());
    };
    if let Some(fewer) = from.checked_sub(to) {
        budget.refund(fewer);
    } else if !budget.charge(to - from) {
        return Err(Abort::limit(ErrorReason::MEMORY, ALL_MEMORY_EXHAUSTED));
    }
    Ok(())
}

impl Drop for VariableSet {
    fn drop(&mut self) {
        if let Some(budget) = &self.budget {
            budget.refund(held(self.total_bytes, self.values.len()));
        }
    }
}

/// Fails the callback that goes over a limit: the interface has no reply for it (AI-953).
pub(in crate::host) fn limit(name: &str, value: usize, limit: usize) -> Result<(), Abort> {
    if value > limit {
        let text = format!("storage limit: {name}");
        return Err(Abort::limit(ErrorReason::LIMIT, text));
    }
    Ok(())
}

/// What a variable takes beside its name and value.
const VARIABLE_BYTES: usize = 160;

#[cfg(test)]
mod tests {
    use super::*;

    fn write(name: &str, value: &[u8]) -> VariableWrite {
        VariableWrite {
            name: name.to_owned(),
            value: value.to_vec(),
            append: false,
            when_version_is: None,
        }
    }

    fn append(name: &str, value: &[u8]) -> VariableWrite {
        VariableWrite {
            append: true,
            ..write(name, value)
        }
    }

    fn refused(result: Result<WriteResult, Abort>) -> String {
        result.unwrap_err().message
    }

    #[test]
    fn ai_951_versions_count_writes_and_guard_them() {
        let variables = Variables::new(VariablesLimits::default());
        assert_eq!(variables.read("x"), None);
        let first = VariableWrite {
            when_version_is: Some(1),
            ..write("x", b"no")
        };
        let missing = variables.write(&first, MemberNumber::OUTSIDE).unwrap();
        assert_eq!(missing, WriteResult::Conflict(None));
        let written =
            |write: &VariableWrite| variables.write(write, MemberNumber::OUTSIDE).unwrap();
        assert_eq!(written(&append("x", b"a")), WriteResult::Written(1));
        assert_eq!(written(&first), WriteResult::Written(2));
        let current = Versioned {
            version: 2,
            value: Arc::new(b"no".to_vec()),
        };
        assert_eq!(written(&first), WriteResult::Conflict(Some(current)));
        assert_eq!(written(&append("x", b"pe")), WriteResult::Written(3));
        assert_eq!(*variables.read("x").unwrap().value, b"nope");
    }

    #[test]
    fn ai_953_at_each_limit_it_works_and_over_it_nothing_is_written() {
        let variables = Variables::new(VariablesLimits {
            name_bytes: 3,
            value_bytes: 8,
            number: 2,
            total_bytes: 20,
            writes_per_step: 1,
        });
        variables
            .write(&write("abc", b"12345678"), MemberNumber::OUTSIDE)
            .unwrap();
        assert_eq!(
            refused(variables.write(&write("abcd", b""), MemberNumber::OUTSIDE)),
            "storage limit: name"
        );
        let long = refused(variables.write(&write("abc", b"123456789"), MemberNumber::OUTSIDE));
        assert_eq!(long, "storage limit: value");
        assert_eq!(
            refused(variables.write(&append("abc", b"9"), MemberNumber::OUTSIDE)),
            "storage limit: value"
        );
        assert_eq!(
            refused(variables.write(&write("b", b"12345678x"), MemberNumber::OUTSIDE)),
            "storage limit: value"
        );
        variables
            .write(&write("b", b"12345678"), MemberNumber::OUTSIDE)
            .unwrap();
        assert_eq!(
            refused(variables.write(&write("c", b""), MemberNumber::OUTSIDE)),
            "storage limit: number"
        );
        assert_eq!(variables.lock().total_bytes, 20);
        variables
            .write(&write("b", b""), MemberNumber::OUTSIDE)
            .unwrap();
        assert_eq!(variables.lock().total_bytes, 12);
        assert_eq!(variables.read("abc").unwrap().version, 1);
    }

    #[test]
    fn ai_953_the_total_counts_names_and_values() {
        let variables = Variables::new(VariablesLimits {
            total_bytes: 10,
            ..VariablesLimits::default()
        });
        variables
            .write(&write("ab", b"12345678"), MemberNumber::OUTSIDE)
            .unwrap();
        assert_eq!(
            refused(variables.write(&append("ab", b"9"), MemberNumber::OUTSIDE)),
            "storage limit: total"
        );
        assert_eq!(
            refused(variables.write(&write("c", b""), MemberNumber::OUTSIDE)),
            "storage limit: total"
        );
        assert_eq!(*variables.read("ab").unwrap().value, b"12345678");
    }

    #[test]
    fn ai_952_concurrent_appends_are_linearizable() {
        let variables = Variables::new(VariablesLimits::default());
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let variables = &variables;
                scope.spawn(move || {
                    let mut last = 0;
                    for _ in 0..200 {
                        let write = append("x", &[thread]);
                        let Ok(WriteResult::Written(version)) =
                            variables.write(&write, MemberNumber::OUTSIDE)
                        else {
                            panic!("an unconditional write is made");
                        };
                        let read = variables.read("x").unwrap();
                        assert!(version > last && read.version >= version);
                        assert_eq!(read.value.len() as u64, read.version);
                        last = version;
                    }
                });
            }
        });
        let end = variables.read("x").unwrap();
        assert_eq!((end.version, end.value.len()), (800, 800));
    }
}
