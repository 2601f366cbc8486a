//! Requests whose steerer has not begun: they wait outside the scheduler until its program is ready.
//!
//! Such a request has its job, so that deadlines and cancellation apply to it and it stays charged to the queue, but no
//! sequences. [`Steer::begin`](sapwood_proto::steer::Steer::begin) was called when it was submitted; its result may
//! replace the prompt, and only then is the steerer forked for the further choices.

use sapwood_proto::steer::{Steered, Token};

use super::requests::Requests;
use super::steer_rounds::name_siblings;
use super::steering::{Steering, bad_result, check_tokens};
use crate::sampling::TokenHistory;

/// Starts the requests whose steerers have begun.
pub(super) fn poll_openings(requests: &mut Requests) {
    // A copy, because a request that starts or fails leaves the list.
    for job in requests.opening.clone() {
        poll_opening(requests, job);
    }
}

/// Starts a request if its steerer has begun.
pub(super) fn poll_opening(requests: &mut Requests, job: usize) {
    if let Err(failure) = open(requests, job) {
        requests.fail(job, failure.into(), true);
    }
}

fn open(requests: &mut Requests, job: usize) -> Steered<()> {
    let panics = &requests.stats.panics;
    let request = &mut requests.jobs[job];
    let Some(opening) = &mut request.opening else {
        return Ok(());
    };
    let Some(begun) = opening.begin_poll(panics)? else {
        return Ok(());
    };
    if let Some(prompt) = begun.prompt {
        replace_prompt(requests, job, prompt)?;
    }
    let request = &mut requests.jobs[job];
    let Some(first) = &mut request.opening else {
        return Ok(());
    };
    let branches = 1..request.submission.choices;
    let branches = branches.map(|index| first.branch(index, &requests.stats.panics));
    // Before anything starts: a fork that fails leaves no sequence behind.
    let branches: Vec<Steering> = branches.collect::<Steered<_>>()?;
    requests.opening.retain(|&opening| opening != job);
    let first = requests.jobs[job].opening.take();
    let forked = !branches.is_empty();
    let keys = requests.start(job, first.into_iter().chain(branches));
    if forked {
        let group = (1..).take(keys.len()).collect();
        name_siblings(requests, keys, &group);
    }
    Ok(())
}

/// Replaces the prompt of a request that has no sequence yet.
fn replace_prompt(requests: &mut Requests, job: usize, prompt: Vec<Token>) -> Steered<()> {
    let context = requests.context_tokens;
    if prompt.is_empty() {
        return Err(bad_result("the prompt is empty: give at least one token"));
    }
    // At least one token must fit behind the prompt (D-23).
    if prompt.len() >= context {
        let length = prompt.len();
        return Err(bad_result(format!(
            "a prompt of {length} tokens exceeds the model's context of {context} tokens"
        )));
    }
    check_tokens(&prompt, requests.vocabulary_tokens)?;
    let submission = &mut requests.jobs[job].submission;
    let caller = submission.turn.caller;
    let charged = submission.prompt.len();
    requests.queue.recharge(caller, charged, prompt.len());
    let rest = u32::try_from(context - prompt.len()).unwrap_or(u32::MAX);
    let terms = &mut submission.terms;
    terms.max_tokens = terms.asked_max_tokens.map_or(rest, |max| max.min(rest));
    let vocabulary = &*requests.tokens.vocabulary;
    submission.history = TokenHistory::of(&prompt, &terms.sampling, vocabulary);
    submission.prompt = prompt;
    Ok(())
}
