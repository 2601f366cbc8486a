//! The form with branches: one callback for each step.

use alloc::string::String;

use super::Argument;
use crate::json::{push_number, push_numbers};
use crate::{Branch, Controller, Sample, Step, Token};

/// A controller behind the exports of this form.
#[derive(Clone)]
pub struct BranchMachine<C> {
    controller: C,
}

impl<C: Controller> BranchMachine<C> {
    /// Creates the controller.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "creating a controller runs its code; that is no default"
    )]
    pub fn new() -> Self {
        Self {
            controller: C::default(),
        }
    }

    /// `aici_init_prompt`
    pub fn init_prompt(&mut self, argument: &[u8]) -> String {
        let prompt = Argument::of(argument).prompt;
        let init = self.controller.init(&prompt);
        let mut json = String::from("{\"prompt\":");
        push_numbers(&mut json, &init.prompt.unwrap_or(prompt));
        json.push('}');
        json
    }

    /// `aici_mid_process`
    pub fn mid_process(&mut self, argument: &[u8]) -> String {
        let Argument {
            backtrack,
            tokens,
            sampled,
            fork_group,
            ..
        } = Argument::of(argument);
        let decision = self.controller.step(Step {
            backtrack,
            tokens: &tokens,
            sampled,
            fork_group: &fork_group,
        });
        let mut json = String::from("{\"branches\":[");
        for (index, branch) in decision.into_branches().iter().enumerate() {
            if index > 0 {
                json.push(',');
            }
            push_branch(&mut json, branch);
        }
        json.push_str("]}");
        json
    }
}

fn push_branch(json: &mut String, branch: &Branch) {
    match branch {
        Branch::Sample(sample) => push_sample(json, sample),
        Branch::Splice { backtrack, tokens } => push_unsampled(json, *backtrack, tokens, None),
        // A splice that changes nothing.
        Branch::Noop => push_unsampled(json, 0, &[], None),
        Branch::Wait(names) => push_unsampled(json, 0, &[], Some(names.as_slice())),
    }
}

fn push_sample(json: &mut String, sample: &Sample) {
    json.push_str("{\"sample_mask\":");
    push_number(json, sample.mask.return_to_host());
    json.push_str(",\"temperature\":");
    match sample.temperature {
        Some(temperature) => push_millionths(json, temperature.millionths()),
        None => json.push_str("null"),
    }
    json.push_str(",\"splices\":[");
    for (index, splice) in sample.splices.iter().enumerate() {
        if index > 0 {
            json.push(',');
        }
        push_splice(json, &splice.when_sampled, splice.backtrack, &splice.tokens);
    }
    json.push_str("]}");
}

fn push_unsampled(json: &mut String, backtrack: u32, tokens: &[Token], wait: Option<&[String]>) {
    json.push_str("{\"sample_mask\":null,\"temperature\":null,\"splices\":[");
    push_splice(json, &[], backtrack, tokens);
    json.push(']');
    if let Some(names) = wait {
        super::push_wait(json, names);
    }
    json.push('}');
}

fn push_splice(json: &mut String, when_sampled: &[Token], backtrack: u32, tokens: &[Token]) {
    json.push_str("{\"when_sampled\":");
    push_numbers(json, when_sampled);
    json.push_str(",\"backtrack\":");
    push_number(json, backtrack);
    json.push_str(",\"ff_tokens\":");
    push_numbers(json, tokens);
    json.push('}');
}

/// In digits, because code that prints fractions is larger than a small controller.
fn push_millionths(json: &mut String, millionths: u32) {
    push_number(json, millionths / 1_000_000);
    json.push('.');
    let mut place = 100_000;
    while place > 0 {
        push_number(json, millionths / place % 10);
        place /= 10;
    }
}
