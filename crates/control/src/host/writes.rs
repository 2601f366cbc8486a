//! [`StepWrites`]: what the callbacks of a step wrote into variables, for their report.

use std::collections::{HashSet, VecDeque};

use sapwood_proto::steer::VariableWrite;

/// The writes of a step, in their order. Of very many bytes the oldest are not reported; what they wrote stays.
#[derive(Debug, Default)]
pub(super) struct StepWrites {
    kept: VecDeque<VariableWrite>,
    bytes: usize,
    made: usize,
}

impl StepWrites {
    /// A step begins: its writes are counted from here, over all its callbacks.
    pub(super) const fn begin_step(&mut self) {
        self.made = 0;
    }

    /// How many were made in this step, also those that are no longer kept or were taken.
    pub(super) const fn made(&self) -> usize {
        self.made
    }

    /// Adds a write, and keeps at most so many bytes: first those go that a later one has replaced, then the oldest.
    pub(super) fn push(&mut self, write: VariableWrite, bytes_max: usize) {
        self.made += 1;
        self.bytes = self.bytes.saturating_add(write.held_bytes());
        self.kept.push_back(write);
        if self.bytes > bytes_max {
            self.drop_replaced();
        }
        while self.bytes > bytes_max
            && let Some(oldest) = self.kept.pop_front()
        {
            self.bytes -= oldest.held_bytes();
        }
    }

    /// Takes what is kept.
    pub(super) fn take(&mut self) -> Vec<VariableWrite> {
        self.bytes = 0;
        std::mem::take(&mut self.kept).into()
    }

    /// Drops the writes of a variable before the last that set it as a whole.
    fn drop_replaced(&mut self) {
        let mut set = HashSet::new();
        let newest_first = self.kept.iter().rev();
        let mut stays: Vec<_> = newest_first
            .map(|write| {
                let stays = !set.contains(&*write.name);
                if !write.append {
                    set.insert(&*write.name);
                }
                stays
            })
            .collect();
        self.kept.retain(|_| stays.pop().unwrap_or(true));
        self.bytes = self.kept.iter().map(VariableWrite::held_bytes).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(name: &str, value: &str, append: bool) -> VariableWrite {
        VariableWrite {
            name: name.to_owned(),
            value: value.into(),
            append,
            when_version_is: None,
        }
    }

    fn kept(writes: &mut StepWrites) -> Vec<String> {
        let writes = writes.take();
        let values = writes
            .into_iter()
            .map(|write| String::from_utf8(write.value));
        values.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn ai_953_the_reported_writes_of_a_step_are_bounded_in_bytes() {
        let mut writes = StepWrites::default();
        let each = write("", "", false).held_bytes();
        for (name, value, append) in [
            ("a", "one", false),
            ("b", "two", false),
            ("b", "more", true),
            ("a", "three", false),
        ] {
            writes.push(write(name, value, append), 4 * each + 19);
        }
        assert_eq!(kept(&mut writes), ["one", "two", "more", "three"]);
        writes.begin_step();
        // Without the replaced one there is room for all others.
        for value in ["one", "two", "three", "four"] {
            let name = if value == "two" { "b" } else { "a" };
            writes.push(write(name, value, false), 2 * each + 10);
        }
        assert_eq!(writes.made(), 4);
        assert_eq!(kept(&mut writes), ["two", "four"]);
        assert_eq!(writes.made(), 4);
        writes.begin_step();
        assert_eq!(writes.made(), 0);
        // What nothing has replaced goes in its turn, and what is larger than all of it at once.
        let large = "7".repeat(2 * each);
        for (value, expect) in [("six", &["two", "six"][..]), (&large, &[])] {
            writes.push(write("b", "two", true), 2 * each + 8);
            writes.push(write("a", value, true), 2 * each + 8);
            assert_eq!(kept(&mut writes), expect);
        }
    }
}
