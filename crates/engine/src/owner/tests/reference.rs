//! Random steerers in the engine and in a reference implementation of a few lines: the texts are the same (AI-821 to
//! AI-824).

use std::sync::Arc;

use proptest::prelude::*;
use sapwood_proto::steer::{
    Appended, Branch, ConditionalSplice, Mask, Mid, Post, Pre, Sample, Splice, Steer, Steered,
    StepWaker, Token,
};

use super::harness::{Bench, read, request_for};
use crate::Config;
use crate::ranking::mix;
use crate::scripted::Config as Script;

/// The text that the script repeats; longer than any output.
const TEXT: &str =
    "the quick brown fox jumps over the lazy dog and runs away from it as fast as it can";
/// The limit of each output.
const MAX_TOKENS: u32 = 24;

/// Decides at random, but equally in equal histories. A fork differs from its parent.
#[derive(Clone)]
pub(super) struct Random {
    state: u64,
    /// Calls without a result before the next one with a result.
    delay: u64,
    delayed: bool,
    suspended: u32,
    noops: u32,
    forks: u32,
    /// The output as `post` reported it.
    output: Vec<Token>,
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            state: seed,
            delay: 0,
            delayed: false,
            suspended: 0,
            noops: 0,
            forks: 0,
            output: Vec::new(),
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.state = mix(self.state);
        self.state % limit
    }

    fn letters(&mut self, most: u64) -> Vec<Token> {
        let count = self.below(most + 1);
        (0..count).map(|_| 97 + self.letter()).collect()
    }

    fn letter(&mut self) -> Token {
        Token::try_from(self.below(26)).unwrap()
    }

    /// Returns whether a result is there.
    fn is_ready(&mut self) -> bool {
        if !self.delayed {
            self.delay = self.below(6).saturating_sub(3);
            self.delayed = true;
        }
        if self.delay > 0 {
            self.delay -= 1;
            return false;
        }
        self.delayed = false;
        true
    }

    fn splice(&mut self) -> Splice {
        let most = u64::try_from(self.output.len().min(5)).unwrap();
        let backtrack = u32::try_from(self.below(most + 1)).unwrap();
        let tokens = self.letters(3);
        Splice { backtrack, tokens }
    }

    fn branch(&mut self) -> Branch {
        let choice = self.below(8);
        self.noops = if choice == 0 { self.noops + 1 } else { 0 };
        match choice {
            0 if self.noops < 3 => Branch::Noop,
            1 | 2 => Branch::Splice(self.splice()),
            _ => {
                let mut sample = Sample::default();
                if choice < 6 {
                    let mut mask = Mask::none(258);
                    mask.allow(97 + self.letter());
                    sample.mask = Some(Arc::new(mask));
                }
                if choice > 4 {
                    let letters = (0..10).map(|_| 97 + self.letter()).collect();
                    sample.splices = vec![ConditionalSplice {
                        when_sampled: letters,
                        keeps_sampled: false,
                        splice: self.splice(),
                    }];
                }
                Branch::Sample(sample)
            }
        }
    }
}

impl Steer for Random {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        if !self.is_ready() {
            return Ok(None);
        }
        let choice = self.below(10);
        Ok(Some(match choice {
            // Once: without a slot for each, sequences that suspend twice in a row could be suspended all at once.
            0 if self.suspended < 1 => {
                self.suspended += 1;
                Pre::Suspend
            }
            1 if self.forks < 3 => {
                self.forks += 1;
                Pre::Fork(1 + u32::try_from(self.below(2)).unwrap())
            }
            choice => {
                self.suspended = 0;
                let most = if choice == 2 { 4 } else { 0 };
                let fast_forward = self.letters(most);
                self.output.extend(&fast_forward);
                Pre::Run { fast_forward }
            }
        }))
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        if !self.is_ready() {
            return Ok(None);
        }
        let choice = self.below(40);
        Ok(Some(match choice {
            0 => Mid::Stop,
            1..4 if self.forks < 3 => {
                self.forks += 1;
                let sequences = 1 + self.below(3);
                Mid::Fork((0..sequences).map(|_| self.branch()).collect())
            }
            _ => Mid::One(self.branch()),
        }))
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let left = self.output.len() - appended.backtrack as usize;
        self.output.truncate(left);
        self.output.extend(appended.tokens);
        Ok(if self.below(60) == 0 {
            Post::Stop
        } else {
            Post::Continue
        })
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let state = mix(self.state ^ u64::from(index));
        Ok(Box::new(Self {
            state,
            ..self.clone()
        }))
    }
}

/// The reference: one sequence, without steps, batches or a cache.
struct Sequence {
    steer: Box<dyn Steer>,
    output: Vec<Token>,
    appended: u32,
    stopped: bool,
}

impl Sequence {
    fn is_over(&self) -> bool {
        self.stopped || self.appended >= MAX_TOKENS
    }

    fn fork(&mut self, index: u32) -> Self {
        Self {
            steer: self.steer.fork(index).unwrap(),
            output: self.output.clone(),
            ..*self
        }
    }

    /// Appends tokens up to the limit; returns how many.
    fn append(&mut self, tokens: &[Token]) -> usize {
        let room = (MAX_TOKENS - self.appended) as usize;
        let fits = tokens.len().min(room);
        self.output.extend(&tokens[..fits]);
        self.appended += u32::try_from(fits).unwrap();
        fits
    }

    fn apply(&mut self, branch: &Branch) {
        let (splice, sampled) = match branch {
            Branch::Noop => return,
            Branch::Splice(splice) => (splice.clone(), None),
            Branch::Sample(sample) => {
                let allowed = |&token: &Token| {
                    let mask = sample.mask.as_ref();
                    mask.is_some_and(|mask| mask.allows(token))
                };
                let scripted = Token::from(TEXT.as_bytes()[self.output.len()]);
                let token = (97..123).find(allowed).unwrap_or(scripted);
                let mut splices = sample.splices.iter();
                let plain = Splice {
                    backtrack: 0,
                    tokens: vec![token],
                };
                let splice = splices.find(|splice| splice.when_sampled.contains(&token));
                (splice.map_or(plain, |one| one.splice.clone()), Some(token))
            }
        };
        let left = self.output.len() - splice.backtrack as usize;
        self.output.truncate(left);
        let fits = self.append(&splice.tokens);
        let post = self.steer.post(Appended {
            backtrack: splice.backtrack,
            tokens: &splice.tokens[..fits],
            sampled,
        });
        self.stopped = post.unwrap() == Post::Stop;
    }
}

/// Runs a sequence and its forks to their ends; adds their outputs.
fn finish(mut sequence: Sequence, mut in_round: bool, outputs: &mut Vec<Vec<Token>>) {
    while !sequence.is_over() {
        if !in_round {
            match sequence.steer.pre().unwrap() {
                None | Some(Pre::Suspend | Pre::Wait) => continue,
                Some(Pre::Run { fast_forward }) => {
                    sequence.append(&fast_forward);
                    if sequence.is_over() {
                        break;
                    }
                }
                Some(Pre::Fork(sequences)) => {
                    let forks: Vec<_> = (1..sequences).map(|index| sequence.fork(index)).collect();
                    forks
                        .into_iter()
                        .for_each(|fork| finish(fork, true, outputs));
                }
                Some(Pre::Stop) => break,
            }
        }
        in_round = false;
        sequence.steer.mid_begin(&[]);
        let mid = loop {
            if let Some(mid) = sequence.steer.mid_poll().unwrap() {
                break mid;
            }
        };
        match mid {
            Mid::One(branch) => sequence.apply(&branch),
            Mid::Stop => break,
            Mid::Fork(branches) => {
                let forks = (1..).take(branches.len() - 1);
                let forks: Vec<_> = forks.map(|index| sequence.fork(index)).collect();
                sequence.apply(&branches[0]);
                for (mut fork, branch) in forks.into_iter().zip(&branches[1..]) {
                    fork.apply(branch);
                    finish(fork, false, outputs);
                }
            }
        }
    }
    outputs.push(sequence.output);
}

fn reference(seed: u64) -> Vec<Vec<Token>> {
    let sequence = Sequence {
        steer: Box::new(Random::new(seed)),
        output: Vec::new(),
        appended: 0,
        stopped: false,
    };
    let mut outputs = Vec::new();
    finish(sequence, false, &mut outputs);
    outputs.sort();
    outputs
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever steerers do and whenever they do it: each sequence has the text of the reference, with a full cache,
    /// few slots, and models that cannot truncate or have a window, and beside other requests.
    #[test]
    fn ai_821_ai_822_ai_823_steered_outputs_are_those_of_the_reference(
        seeds in prop::collection::vec(any::<u64>(), 1..4),
        truncates in any::<bool>(),
        window_tokens in prop::sample::select(vec![0, 3, 40]),
        saves in any::<bool>(),
        parallel in 1..6_u32,
        full in any::<bool>(),
    ) {
        let script = Script {
            truncates,
            window_tokens,
            saves,
            parallel,
            context_tokens: 160,
            cells: full.then_some(200),
            ..Script::default()
        };
        let config = Config {
            prefix_tokens_min: 1,
            fuel_tokens: Some(u64::MAX),
            ..Config::default()
        };
        let mut bench = Bench::with(script, config);
        let submit = |seed: &u64| {
            let mut request = request_for(TEXT);
            request.params.max_tokens = Some(MAX_TOKENS);
            request.steer = Some(Box::new(Random::new(*seed)));
            bench.submit(request)
        };
        let mut handles: Vec<_> = seeds.iter().map(submit).collect();
        let mut plain = bench.submit(request_for("plain"));
        bench.settle();
        let answer = read(&mut plain);
        prop_assert_eq!(answer.text(), "plain");
        for (seed, handle) in seeds.iter().zip(&mut handles) {
            let answer = read(handle);
            prop_assert_eq!(&answer.error, &None);
            let mut outputs = Vec::new();
            for (text, tokens, end) in answer.choices {
                prop_assert!(end.is_some());
                let bytes: Vec<u8> = tokens.iter().map(|&token| u8::try_from(token).unwrap()).collect();
                prop_assert_eq!(text.as_bytes(), &bytes[..], "the text is that of the tokens");
                outputs.push(tokens);
            }
            outputs.sort();
            prop_assert_eq!(outputs, reference(*seed));
        }
        prop_assert!(bench.owner.is_empty());
        prop_assert_eq!(bench.engine.stats().panics.get(), 0);
    }
}
