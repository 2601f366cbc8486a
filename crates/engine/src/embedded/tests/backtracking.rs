//! D-48: a controller that goes back gets the text of one that never took the wrong way, with each kind of model.

use std::sync::Arc;

use sapwood_proto::steer::{
    Appended, Branch, Mid, Post, Pre, Sample, Splice, Steer, Steered, StepWaker,
};

use super::reuse::{Answer, Bench, generated, kinds, text};
use super::*;

/// Samples 25 tokens, replaces the last 20 by three others, and forks later.
#[derive(Clone)]
struct Winding {
    round: u32,
}

impl Steer for Winding {
    fn begin(&mut self, _: &[Token], _: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        Ok(Some(match self.round {
            50 => Pre::Fork(2),
            _ => Pre::Run {
                fast_forward: Vec::new(),
            },
        }))
    }

    fn mid_begin(&mut self, _: &[u32]) {
        self.round += 1;
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let branch = match self.round {
            26 => Branch::Splice(Splice {
                backtrack: 20,
                tokens: OTHERS.to_vec(),
            }),
            _ => Branch::Sample(Sample::default()),
        };
        Ok(Some(Mid::One(branch)))
    }

    fn post(&mut self, _: Appended<'_>) -> Steered<Post> {
        Ok(Post::Continue)
    }

    fn fork(&mut self, _: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(self.clone()))
    }
}

const OTHERS: [Token; 3] = [7, 8, 9];

#[test]
fn d_48_backtracking_gives_the_text_of_the_straight_way() {
    for of in kinds() {
        for cache_tokens in [None, Some(1024)] {
            let options = LoadOptions {
                cache_tokens,
                ..of.options(&options())
            };
            let what = format!("{}, cache {cache_tokens:?}", of.name);
            let mut bench = Bench::with(&of.shape, &options, crate::Config::default());
            let prompt = text(1, 200);
            let mut winding = generated(&prompt, 100, 1);
            winding.steer = Some(Box::new(Winding { round: 0 }));
            // Another request uses the cells that a window leaves.
            let other = generated(&text(2, 150), 80, 1);
            let answer = bench.answers(vec![winding, other]).remove(0);
            assert_eq!(answer.choices.len(), 2, "{what}: it forks");
            for choice in &answer.choices {
                let tokens: Vec<Token> = choice.iter().map(|token| token.0).collect();
                assert_eq!(tokens[5..8], OTHERS, "{what}");
                let straight = [&prompt, &tokens[..8]].concat();
                let rest = choice[8..].to_vec();
                let mut cold = Bench::with(&of.shape, &options, crate::Config::default());
                let length = rest.len() as u32;
                assert!(length > 50, "{what}: {length} tokens");
                let cold = cold
                    .answers(vec![generated(&straight, length, 1)])
                    .remove(0);
                Answer::of(rest).assert_as(&cold, bench.equality, &what);
            }
        }
    }
}
