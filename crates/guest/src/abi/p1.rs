//! The form with three callbacks, from the same source.
//!
//! `pre` runs [`Controller::step`], because only `pre` can fork and suspend; its decision is kept until the step has
//! happened. `mid` hands out the mask or the splice, and after a fork the branch of its own sequence. `post` records what
//! happened, for the next `step`.
//!
//! What differs from the form with branches: a replaced prompt must begin with the original one; temperatures are
//! dropped with a line in the log; a branch of a fork cannot be a no-op; and `step` has the time of `pre`, which by
//! default is 4 ms.

use alloc::string::String;
use alloc::vec::Vec;

use super::Argument;
use crate::json::{push_number, push_numbers};
use crate::{Branch, ConditionalSplice, Controller, Sample, SequenceId, Step, Token};

/// A controller behind the exports of this form.
#[derive(Clone)]
pub struct StepMachine<C> {
    controller: C,
    pending: Pending,
    happened: Happened,
    /// The group of the last `mid`, until a step has seen it.
    group: Vec<SequenceId>,
    dropped_temperature: bool,
}

/// What was decided for this step. A host may call `pre` more than once before the step happens, and gets the same answer.
#[derive(Clone)]
enum Pending {
    /// Nothing: the next `pre` asks the controller.
    Ask,
    /// Nothing until one of these variables changes: the next `pre` asks the controller.
    Wait(Vec<String>),
    /// Append these tokens.
    FastForward(Vec<Token>),
    /// `mid` answers this.
    One(Branch),
    /// Fork; `mid` of each sequence takes its branch.
    Fork(Vec<Branch>),
    /// End the sequence.
    Stop,
}

/// What happened since the last step that the controller saw.
#[derive(Clone, Default)]
struct Happened {
    backtrack: u32,
    tokens: Vec<Token>,
    sampled: Option<Token>,
}

impl Happened {
    fn record(&mut self, backtrack: u32, tokens: &[Token]) {
        // Tokens that were appended since the last step are not there for the controller if they were taken back.
        let unseen = self.tokens.len().min(backtrack as usize);
        self.tokens.truncate(self.tokens.len() - unseen);
        self.backtrack += backtrack - unseen as u32;
        self.tokens.extend_from_slice(tokens);
    }
}

impl<C: Controller> StepMachine<C> {
    /// Creates the controller.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "creating a controller runs its code; that is no default"
    )]
    pub fn new() -> Self {
        Self {
            controller: C::default(),
            pending: Pending::Ask,
            happened: Happened::default(),
            group: Vec::new(),
            dropped_temperature: false,
        }
    }

    /// `aici_init_prompt`
    pub fn init_prompt(&mut self, argument: &[u8]) -> String {
        let prompt = Argument::of(argument).prompt;
        if let Some(replaced) = self.controller.init(&prompt).prompt {
            let Some(added) = replaced.strip_prefix(prompt.as_slice()) else {
                panic!("with the feature `p1` a replaced prompt must begin with the original one");
            };
            if !added.is_empty() {
                self.pending = Pending::FastForward(added.to_vec());
            }
        }
        "{}".into()
    }

    /// `aici_pre_process`
    pub fn pre_process(&mut self, _argument: &[u8]) -> String {
        self.decide();
        match &self.pending {
            Pending::Ask => pre_result(1, true, &[]),
            Pending::Wait(names) => {
                let mut json = pre_result(1, true, &[]);
                json.pop();
                super::push_wait(&mut json, names);
                json.push('}');
                json
            }
            Pending::FastForward(tokens) => pre_result(1, false, tokens),
            Pending::One(_) => pre_result(1, false, &[]),
            Pending::Fork(branches) => pre_result(branches.len(), false, &[]),
            Pending::Stop => pre_result(0, false, &[]),
        }
    }

    /// `aici_mid_process`
    pub fn mid_process(&mut self, argument: &[u8]) -> String {
        self.decide();
        self.group = Argument::of(argument).group();
        if let Pending::Fork(branches) = &mut self.pending {
            let own = crate::self_id();
            let index = self.group.iter().position(|&id| id == own).unwrap_or(0);
            // An engine may clone more often than it was asked to.
            let index = index % branches.len();
            self.pending = Pending::One(branches.swap_remove(index));
        }
        match &self.pending {
            Pending::Stop => "\"Stop\"".into(),
            Pending::One(Branch::Sample(sample)) => {
                if sample.temperature.is_some() && !self.dropped_temperature {
                    self.dropped_temperature = true;
                    crate::log!("this host cannot change the temperature");
                }
                sample.mask.return_to_host();
                "{\"SampleWithBias\":{}}".into()
            }
            Pending::One(Branch::Splice { backtrack, tokens }) => mid_splice(*backtrack, tokens),
            Pending::FastForward(tokens) => mid_splice(0, tokens),
            Pending::One(Branch::Noop | Branch::Wait(_))
            | Pending::Ask
            | Pending::Wait(_)
            | Pending::Fork(_) => {
                panic!("with the feature `p1` a step that has begun cannot be a no-op")
            }
        }
    }

    /// `aici_post_process`
    pub fn post_process(&mut self, argument: &[u8]) -> String {
        let Argument {
            tokens, backtrack, ..
        } = Argument::of(argument);
        self.happened.record(backtrack, &tokens);
        self.pending = match core::mem::replace(&mut self.pending, Pending::Ask) {
            Pending::One(Branch::Sample(sample)) => self.sampled(&sample, &tokens),
            Pending::Stop => Pending::Stop,
            _ => Pending::Ask,
        };
        // The next `pre`, in the same exchange, stops if the controller wants that.
        "{\"stop\":false}".into()
    }

    /// Finds the splice that the sampled token asks for, which this form does in a step of its own.
    fn sampled(&mut self, sample: &Sample, tokens: &[Token]) -> Pending {
        let &[token] = tokens else {
            return Pending::Ask;
        };
        self.happened.sampled = Some(token);
        let splice = sample
            .splices
            .iter()
            .find(|splice| splice.applies_to(token));
        match splice.cloned() {
            Some(ConditionalSplice {
                backtrack: 0,
                tokens,
                ..
            }) => Pending::of(Branch::Splice {
                backtrack: 0,
                tokens,
            }),
            Some(ConditionalSplice {
                backtrack, tokens, ..
            }) => Pending::One(Branch::Splice { backtrack, tokens }),
            None => Pending::Ask,
        }
    }

    fn decide(&mut self) {
        if !matches!(self.pending, Pending::Ask | Pending::Wait(_)) {
            return;
        }
        let happened = core::mem::take(&mut self.happened);
        let group = core::mem::take(&mut self.group);
        let group = if group.is_empty() {
            alloc::vec![crate::self_id()]
        } else {
            group
        };
        let decision = self.controller.step(Step {
            backtrack: happened.backtrack,
            tokens: &happened.tokens,
            sampled: happened.sampled,
            fork_group: &group,
        });
        let mut branches = decision.into_branches();
        self.pending = match branches.len() {
            0 => Pending::Stop,
            1 => branches.pop().map_or(Pending::Stop, Pending::of),
            _ => Pending::Fork(branches),
        };
    }
}

impl Pending {
    /// A decision without a fork.
    fn of(branch: Branch) -> Self {
        match branch {
            Branch::Splice {
                backtrack: 0,
                tokens,
            } if tokens.is_empty() => Self::Ask,
            Branch::Splice {
                backtrack: 0,
                tokens,
            } => Self::FastForward(tokens),
            Branch::Noop => Self::Ask,
            Branch::Wait(names) => Self::Wait(names),
            branch => Self::One(branch),
        }
    }
}

fn pre_result(forks: usize, suspend: bool, tokens: &[Token]) -> String {
    let mut json = String::from("{\"num_forks\":");
    push_number(&mut json, forks as u32);
    json.push_str(if suspend {
        ",\"suspend\":true"
    } else {
        ",\"suspend\":false"
    });
    json.push_str(",\"ff_tokens\":");
    push_numbers(&mut json, tokens);
    json.push('}');
    json
}

fn mid_splice(backtrack: u32, tokens: &[Token]) -> String {
    let mut json = String::from("{\"Splice\":{\"backtrack\":");
    push_number(&mut json, backtrack);
    json.push_str(",\"ff_tokens\":");
    push_numbers(&mut json, tokens);
    json.push_str("}}");
    json
}
