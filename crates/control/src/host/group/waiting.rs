//! [`Waiting`]: what a suspended controller waits for (AI-1005).

use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::steer::WAIT_TIME_MAX;
use serde::{Serialize, Serializer};

use super::{Group, GroupMark, MemberNumber, VariablesLimits};

/// A suspended controller waits: its callback is not run again before one of some variables changes, a sibling ends, or
/// [`WAIT_TIME_MAX`] has passed.
#[derive(Clone, Debug)]
pub struct Waiting {
    group: Arc<Group>,
    names: Arc<[String]>,
    /// Taken before the callback ran that asked for this: what changed while it ran was perhaps not seen by it.
    mark: GroupMark,
    /// Whose own writes are no news.
    member: Option<MemberNumber>,
    until: Instant,
}

impl Waiting {
    /// A wait that begins now.
    pub(in crate::host) fn new(
        group: Arc<Group>,
        member: MemberNumber,
        mark: GroupMark,
        names: Vec<String>,
        now: Instant,
    ) -> Self {
        Self {
            group,
            names: names.into(),
            mark,
            member: Some(member),
            until: now + WAIT_TIME_MAX,
        }
    }

    /// A wait that begins now for what only another process sees change, so that here only its time ends it.
    pub(crate) fn in_other_process(names: Vec<String>) -> Self {
        let group = Group::new(0, VariablesLimits::default());
        let mark = group.mark();
        Self {
            group,
            names: names.into(),
            mark,
            member: None,
            until: Instant::now() + WAIT_TIME_MAX,
        }
    }

    /// A wait of tests, for variables of this group.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of_test(group: &Arc<Group>, names: &[&str]) -> Self {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        let (mark, now) = (group.mark(), Instant::now());
        Self::new(Arc::clone(group), MemberNumber(1), mark, names, now)
    }

    /// The variables.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether the callback is to be run again.
    #[must_use]
    pub fn is_over(&self, now: Instant) -> bool {
        let ended = || self.group.mark().ended != self.mark.ended;
        let changed = || {
            let variables = self.group.variables();
            variables.changed_since(self.mark.changes, &self.names, self.member)
        };
        now >= self.until || ended() || changed()
    }

    /// The same for a fork, to which its parent's writes are news.
    #[must_use]
    pub fn of_fork(&self) -> Self {
        Self {
            member: None,
            ..self.clone()
        }
    }
}

/// On the wire it is the names.
impl Serialize for Waiting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.names())
    }
}

/// Results of callbacks are compared in tests.
impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.group, &other.group)
            && self.names == other.names
            && self.mark == other.mark
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sapwood_proto::steer::VariableWrite;

    use super::*;

    fn set(group: &Group, name: &str, member: MemberNumber) {
        let write = VariableWrite {
            name: name.to_owned(),
            value: Vec::new(),
            append: false,
            when_version_is: None,
        };
        group.variables().write(&write, member).unwrap();
    }

    fn waiting(group: &Arc<Group>, member: MemberNumber, mark: GroupMark) -> Waiting {
        let names = vec!["a".to_owned(), "b".to_owned()];
        Waiting::new(Arc::clone(group), member, mark, names, Instant::now())
    }

    #[test]
    fn ai_1005_a_change_of_a_named_variable_ends_a_wait() {
        let group = Group::new(4, VariablesLimits::default());
        let (own, other) = (group.enter().unwrap(), group.enter().unwrap());
        set(&group, "a", other.number());
        let mark = group.mark();
        let waits = waiting(&group, own.number(), mark);
        let now = Instant::now();
        assert!(!waits.is_over(now), "what was there before is no change");
        set(&group, "c", other.number());
        set(&group, "b", own.number());
        assert!(!waits.is_over(now), "others, and what it wrote itself");
        assert!(waits.of_fork().is_over(now), "to a fork that is news");
        let fork = waiting(&group, own.number(), group.mark()).of_fork();
        assert!(!fork.is_over(now));
        set(&group, "c", other.number());
        set(&group, "a", MemberNumber::OUTSIDE);
        assert!(
            fork.is_over(now) && waits.is_over(now),
            "so is what comes from outside"
        );
        let waits = waiting(&group, own.number(), group.mark());
        set(&group, "b", other.number());
        assert!(waits.is_over(now));
        // It was written after the mark, while the callback ran.
        assert!(waiting(&group, own.number(), mark).is_over(now));
        assert!(!waiting(&group, own.number(), group.mark()).is_over(now));
    }

    #[test]
    fn ai_1005_the_end_of_a_sibling_ends_a_wait() {
        let group = Group::new(4, VariablesLimits::default());
        let (own, mut other) = (group.enter().unwrap(), group.enter().unwrap());
        let waits = waiting(&group, own.number(), group.mark());
        let third = group.enter().unwrap();
        assert!(
            !waits.is_over(Instant::now()),
            "a new one is none that ended"
        );
        other.leave();
        assert!(waits.is_over(Instant::now()));
        let waits = waiting(&group, own.number(), group.mark());
        drop(other);
        assert!(!waits.is_over(Instant::now()), "each ends once");
        drop(third);
        assert!(waits.is_over(Instant::now()));
    }

    #[test]
    fn ai_1005_a_wait_takes_a_second_at_most() {
        let group = Group::new(4, VariablesLimits::default());
        let own = group.enter().unwrap();
        let waits = waiting(&group, own.number(), group.mark());
        let begun = waits.until - WAIT_TIME_MAX;
        assert!(!waits.is_over(begun + Duration::from_millis(999)));
        assert!(waits.is_over(begun + Duration::from_secs(1)));
    }
}
