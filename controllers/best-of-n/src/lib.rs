//! The best of several answers: forks answer at the same time, and the first one takes the best answer.
//!
//! The argument is the number of answers, 3 if it is empty. The best is the one with the most different words.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::prelude::*;

/// One line of each fork.
#[derive(Clone)]
pub struct BestOfN {
    answers: usize,
    index: usize,
    line: Matcher<Pattern>,
    tokens: Vec<Token>,
    forked: bool,
    written: bool,
    done: bool,
}

/// The variable to which each fork adds its answer, a line.
const ANSWERS: &str = "answers";

impl Default for BestOfN {
    fn default() -> Self {
        let text: String = arg();
        Self {
            answers: if text.is_empty() { 3 } else { arg() },
            index: 0,
            line: Matcher::new(
                Pattern::new()
                    .some_of(ByteClass::PRINTABLE, 1..=60)
                    .text("\n"),
            ),
            tokens: Vec::new(),
            forked: false,
            written: false,
            done: false,
        }
    }
}

/// How many different words there are.
fn score(answer: &str) -> usize {
    let mut words: Vec<&str> = answer.split_whitespace().collect();
    words.sort_unstable();
    words.dedup();
    words.len()
}

/// The first of the best. Sorted, because forks finish in any order and equal runs must have equal results.
fn best(answers: &str) -> &str {
    let mut lines: Vec<&str> = answers.split_inclusive('\n').collect();
    lines.sort_unstable();
    lines
        .into_iter()
        .rev()
        .max_by_key(|line| score(line))
        .unwrap_or_default()
}

impl Controller for BestOfN {
    fn step(&mut self, step: Step<'_>) -> Decision {
        if self.done {
            return Decision::Stop;
        }
        if !self.forked {
            self.forked = true;
            // All forks sample from the same logits; a higher temperature makes them differ.
            let branch: Branch = Sample::new(self.line.mask()).temperature(0.9).into();
            return Decision::Fork(vec![branch; self.answers]);
        }
        if self.tokens.is_empty() {
            self.index = step.fork_index();
        }
        self.tokens.extend_from_slice(step.tokens);
        if !self.line.follow(&step) {
            return Decision::Stop;
        }
        if !self.line.is_finished() {
            return Decision::Sample(self.line.mask());
        }
        if !self.written {
            self.written = true;
            Vars::append(ANSWERS, trie().decode(&self.tokens));
        }
        if self.index > 0 {
            return Decision::Stop;
        }
        let answers = Vars::read(ANSWERS)
            .map(|value| value.text())
            .unwrap_or_default();
        if answers.lines().count() < self.answers {
            return Decision::wait_for(ANSWERS);
        }
        log!("{} answers", self.answers);
        self.done = true;
        Decision::Splice {
            backtrack: self.tokens.len() as u32,
            tokens: tokenize(best(&answers)),
        }
    }
}

sapwood_guest::export!(BestOfN);

#[cfg(test)]
mod tests {
    use super::{BestOfN, best};
    use sapwood_guest::testing::Scenario;

    #[test]
    fn the_first_sequence_has_the_best_answer() {
        let preferred = ["no no no no\n", "yes it is\n", "it is what it is\n", "no\n"];
        let run = Scenario::new("Why? ")
            .prefers(preferred)
            .argument("4")
            .run::<BestOfN>();
        assert_eq!(run.sequences[0].text, "it is what it is\n");
        assert_eq!(run.texts()[1..], preferred[1..]);
        assert_eq!(run.variable("answers").lines().count(), 4);
        assert_eq!(run.sequences[0].logs, "4 answers\n");
    }

    #[test]
    fn one_answer_needs_no_fork() {
        let run = Scenario::new("")
            .prefers(["only\n"])
            .argument("1")
            .run::<BestOfN>();
        assert_eq!(run.texts(), ["only\n"]);
    }

    #[test]
    fn the_order_of_answers_does_not_matter() {
        assert_eq!(best("b c\na d\n"), best("a d\nb c\n"));
    }
}
