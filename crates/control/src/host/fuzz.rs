//! Fuzz entry point: arbitrary bytes as results of callbacks, and as messages of a controller's process.
//!
//! Invariants: a result is within its limits or an error of the controller; one that the host accepts comes out of a
//! controller's process as it went in; and bytes of such a process are read alike after they were written again.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Mask, StepReport, Token};

use super::controller::Outcome;
use super::group::{Group, VariablesLimits};
use super::result::{
    MidReturned, RawResult, ResultLimits, Returned, ReturnedBranch, SPLICES_MAX, TEMPERATURE_MAX,
    TOKENS_MAX, WAIT_NAMES_MAX, Waits,
};
use crate::fuzz::Choices;

const VOCABULARY: usize = 100;

/// Reads `bytes` as what a callback returned: which one, its masks and limits, and then the JSON. The last kinds are
/// messages of a controller's process.
///
/// # Panics
/// If an invariant does not hold.
pub fn results(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let (kind, masks, branches) = (choices.below(8), choices.below(4), choices.below(5));
    let limits = ResultLimits {
        vocabulary: VOCABULARY,
        branches,
    };
    let group = Group::new(4, VariablesLimits::default());
    let Ok(member) = group.enter() else {
        return;
    };
    let waits = Waits {
        member: &member,
        mark: group.mark(),
    };
    let rest = choices.rest();
    let raw = RawResult {
        json: Some(rest.to_vec()),
        masks: (0..masks)
            .map(|_| Arc::new(Mask::all(VOCABULARY)))
            .collect(),
    };
    let read = match kind {
        0 => raw.begun_p1(),
        1 => raw.begun_p2(&[1, 2], limits),
        2 => raw.pre(limits, &waits),
        3 => raw.mid(limits),
        4 => raw.post(),
        5 => raw.branches(limits, &waits),
        #[cfg(target_os = "linux")]
        6 => return super::process::fuzz::outcome(rest, limits, &waits),
        #[cfg(target_os = "linux")]
        _ => return super::process::fuzz::messages(rest),
        #[cfg(not(target_os = "linux"))]
        _ => return,
    };
    match &read {
        Ok(returned) => check(returned, limits),
        Err(failure) => {
            // The latter for more forks than a request may have.
            let reasons = [ErrorReason::BAD_RESULT, ErrorReason::LIMIT];
            assert!(reasons.contains(&failure.reason), "{failure}");
            assert!(failure.message.len() < MESSAGE_BYTES_MAX, "{failure}");
        }
    }
    #[cfg(target_os = "linux")]
    super::process::fuzz::passes(
        &Outcome {
            result: read,
            report: StepReport::default(),
        },
        limits,
        &waits,
    );
}

/// Texts of errors quote what they are about, but not all of it.
const MESSAGE_BYTES_MAX: usize = 2_000;

/// Checks that a result is within the limits.
fn check(returned: &Returned, limits: ResultLimits) {
    match returned {
        Returned::Begun { prompt } => tokens(prompt.as_deref().unwrap_or_default()),
        Returned::Pre {
            num_forks,
            suspend,
            ff_tokens,
            wait,
        } => {
            tokens(ff_tokens);
            assert!(ff_tokens.len() <= TOKENS_MAX);
            assert!(ff_tokens.is_empty() || (*num_forks == 1 && !suspend));
            assert!(wait.as_ref().is_none_or(|_| *suspend));
        }
        Returned::Mid(MidReturned::Splice {
            backtrack,
            ff_tokens,
        }) => {
            tokens(ff_tokens);
            assert!(ff_tokens.len() <= TOKENS_MAX);
            assert!(*backtrack > 0 || !ff_tokens.is_empty());
        }
        Returned::Mid(MidReturned::Stop | MidReturned::Sample(_)) | Returned::Post { .. } => {}
        Returned::Branches(branches) => {
            assert!(branches.len() <= limits.branches);
            branches.iter().for_each(branch);
            let splices = branches.iter().flat_map(|branch| &branch.splices);
            let all = splices.map(|splice| splice.ff_tokens.len() + splice.when_sampled.len());
            assert!(all.sum::<usize>() <= TOKENS_MAX);
        }
    }
}

fn branch(branch: &ReturnedBranch) {
    assert!(branch.splices.len() <= SPLICES_MAX);
    assert!(branch.mask.is_some() || branch.splices.len() == 1);
    let waits = branch.wait.as_ref().map_or(0, |wait| wait.names().len());
    assert!(waits <= WAIT_NAMES_MAX && (waits == 0 || branch.is_noop()));
    let is_in_range = |heat: f32| (0.0..=TEMPERATURE_MAX).contains(&heat);
    assert!(branch.temperature.is_none_or(is_in_range));
    for splice in &branch.splices {
        tokens(&splice.ff_tokens);
        tokens(&splice.when_sampled);
    }
}

fn tokens(tokens: &[Token]) {
    assert!(tokens.iter().all(|token| (*token as usize) < VOCABULARY));
}
