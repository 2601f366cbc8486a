//! A list of five items, written by five forks at the same time. The first one then has the whole list.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::prelude::*;

const ITEMS: usize = 5;

/// Before the fork, and in each fork.
#[derive(Clone, Default)]
pub struct ListOfFive {
    item: Option<Item>,
    done: bool,
}

/// The item of one fork.
#[derive(Clone)]
struct Item {
    index: usize,
    line: Matcher<Pattern>,
    tokens: Vec<Token>,
}

/// The variable of an item.
fn variable(index: usize) -> String {
    format!("item-{index}")
}

impl Controller for ListOfFive {
    fn step(&mut self, step: Step<'_>) -> Decision {
        if self.done {
            return Decision::Stop;
        }
        let Some(item) = &mut self.item else {
            self.item = Some(Item {
                index: 0,
                line: Matcher::new(
                    Pattern::new()
                        .some_of(ByteClass::PRINTABLE, 1..=60)
                        .text("\n"),
                ),
                tokens: Vec::new(),
            });
            let number = |index| tokenize(format!("{}. ", index + 1));
            let branches = (0..ITEMS).map(|index| Branch::Splice {
                backtrack: 0,
                tokens: number(index),
            });
            return Decision::Fork(branches.collect());
        };
        let is_first_step = item.tokens.is_empty();
        item.tokens.extend_from_slice(step.tokens);
        if is_first_step {
            // The tokens are those of the number, before the line.
            item.index = step.fork_index();
        } else if !item.line.follow(&step) {
            return Decision::Stop;
        }
        if !item.line.is_finished() {
            return Decision::Sample(item.line.mask());
        }
        if Vars::read(&variable(item.index)).is_none() {
            Vars::write(&variable(item.index), trie().decode(&item.tokens));
        }
        if item.index > 0 {
            return Decision::Stop;
        }
        // The first one waits for the others and puts the list in the place of its item.
        let items: Option<Vec<String>> = (0..ITEMS)
            .map(|index| Some(Vars::read(&variable(index))?.text()))
            .collect();
        let Some(items) = items else {
            return Decision::Wait((0..ITEMS).map(variable).collect());
        };
        self.done = true;
        Decision::Splice {
            backtrack: item.tokens.len() as u32,
            tokens: tokenize(items.concat()),
        }
    }
}

sapwood_guest::export!(ListOfFive);

#[cfg(test)]
mod tests {
    use super::ListOfFive;
    use sapwood_guest::testing::{End, Scenario};

    #[test]
    fn five_forks_write_five_items() {
        let preferred = [
            "1. red\n",
            "2. green apples\n",
            "3. blue\n",
            "4. yes\n",
            "5. no\n",
        ];
        let run = Scenario::new("Five words:\n")
            .prefers(preferred)
            .run::<ListOfFive>();
        assert_eq!(run.sequences.len(), 5);
        assert_eq!(run.sequences[0].text, preferred.concat());
        assert_eq!(run.texts()[1..], preferred[1..]);
        assert!(
            run.sequences
                .iter()
                .all(|sequence| sequence.end == End::Stop)
        );
    }
}
