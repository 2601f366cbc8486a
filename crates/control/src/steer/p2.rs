//! [`P2Steps`]: the steps of a P2 module, which has one callback: it is told what happened, and decides what comes
//! next.
//!
//! A P2 splice counts the sampled token among those it takes back; one that takes back nothing keeps it and appends
//! others. Where it keeps any token, it is expressed as an ordinary sample and tokens forced in the next `pre`: that sample
//! has its own log-probability.

use std::time::Instant;

use sapwood_proto::steer::{
    Appended, Branch, ConditionalSplice, Mid, Pre, Sample, Splice, Steered, Token,
};

use super::{Calls, unexpected};
use crate::host::{Instance, Returned, ReturnedBranch, ReturnedSplice, Unreported, Waiting};

/// What a P2 module has not been told yet, and what it wants after the next sample.
#[derive(Clone, Debug, Default)]
pub(super) struct P2Steps {
    unreported: Unreported,
    /// What follows a sampled token, of each branch of the last result.
    following: Vec<Following>,
    /// Tokens to be forced in the next `pre`.
    forced: Vec<Token>,
    in_mid: bool,
    /// What a result without effect waits for.
    wait: Option<Waiting>,
}

/// What follows a branch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Following {
    /// These follow whatever is sampled, unless an earlier splice applies to it.
    tokens: Vec<Token>,
    unless: Vec<Token>,
    wait: Option<Waiting>,
}

impl Following {
    /// What a branch without effect waits for.
    pub(crate) const fn wait(&self) -> Option<&Waiting> {
        self.wait.as_ref()
    }

    /// The tokens that follow `sampled`.
    pub(crate) fn after(self, sampled: Token) -> Vec<Token> {
        if self.unless.contains(&sampled) {
            return Vec::new();
        }
        self.tokens
    }
}

impl P2Steps {
    pub(super) fn pre(&mut self) -> Pre {
        if let Some(wait) = &self.wait
            && !wait.is_over(Instant::now())
        {
            return Pre::Wait;
        }
        self.wait = None;
        let fast_forward = std::mem::take(&mut self.forced);
        self.unreported.append(&fast_forward);
        Pre::Run { fast_forward }
    }

    pub(super) fn mid_begin(&mut self, instance: &mut Instance, group: &[u32]) {
        instance.call(self.unreported.report(group.to_vec()));
        self.in_mid = true;
    }

    pub(super) fn mid_poll(&mut self, calls: &mut Calls<'_>) -> Steered<Option<Mid>> {
        if !self.in_mid {
            return Err(unexpected());
        }
        let Some(returned) = calls.poll()? else {
            return Ok(None);
        };
        self.in_mid = false;
        let Returned::Branches(returned) = returned else {
            return Err(unexpected());
        };
        let mid = decide(returned, &mut self.following)?;
        // Of this sequence: branch 0.
        self.wait = self.following.first().and_then(|it| it.wait.clone());
        Ok(Some(mid))
    }

    pub(super) fn post(&mut self, appended: Appended<'_>) {
        // Also where another steerer has changed the text of a sequence that waits.
        self.wait = None;
        // Of the parent, branch 0; a fork has its own at this place.
        let following = std::mem::take(&mut self.following);
        if let Some(sampled) = appended.sampled
            && let Some(following) = following.into_iter().next()
        {
            self.forced = following.after(sampled);
        }
        let Appended {
            backtrack,
            tokens,
            sampled,
        } = appended;
        self.unreported.add(backtrack, tokens, sampled);
    }

    /// The steps of branch `index`, the original being 0.
    pub(super) fn fork(&self, index: u32) -> Self {
        let following = self.following.get(index as usize).cloned();
        let wait = following.as_ref().and_then(|it| it.wait.as_ref());
        Self {
            wait: wait.map(Waiting::of_fork),
            following: following.into_iter().collect(),
            ..self.clone()
        }
    }
}

/// What a step returned, as the engine takes it; `following` gets what follows each branch.
pub(crate) fn decide(
    returned: Vec<ReturnedBranch>,
    following: &mut Vec<Following>,
) -> Steered<Mid> {
    following.clear();
    let mut branches = Vec::with_capacity(returned.len());
    for branch in returned {
        let (branch, follows) = translate(branch)?;
        branches.push(branch);
        following.push(follows);
    }
    Ok(match branches.len() {
        0 => Mid::Stop,
        1 => Mid::One(branches.remove(0)),
        _ => Mid::Fork(branches),
    })
}

/// A branch as the engine takes it, and what follows it.
fn translate(branch: ReturnedBranch) -> Steered<(Branch, Following)> {
    if branch.is_noop() {
        let following = Following {
            wait: branch.wait,
            ..Following::default()
        };
        return Ok((Branch::Noop, following));
    }
    if branch.mask.is_some() {
        return Ok(sample(branch));
    }
    // Exactly one, which the host has checked. Nothing is sampled, so `backtrack` counts committed tokens alone.
    let Some(splice) = branch.splices.into_iter().next() else {
        return Err(unexpected());
    };
    let splice = Splice {
        backtrack: splice.backtrack,
        tokens: splice.ff_tokens,
    };
    Ok((Branch::Splice(splice), Following::default()))
}

/// A branch that samples.
fn sample(branch: ReturnedBranch) -> (Branch, Following) {
    let ReturnedBranch {
        mask,
        temperature,
        splices,
        ..
    } = branch;
    let mut conditional = Vec::with_capacity(splices.len());
    let mut following = Following::default();
    for splice in splices {
        let ReturnedSplice {
            when_sampled,
            backtrack,
            ff_tokens,
        } = splice;
        let always = when_sampled.is_empty();
        following.unless.extend_from_slice(&when_sampled);
        let keeps_sampled = backtrack == 0;
        if keeps_sampled && always {
            following.tokens = ff_tokens;
        } else {
            conditional.push(ConditionalSplice {
                when_sampled,
                keeps_sampled,
                splice: Splice {
                    backtrack: backtrack.saturating_sub(1),
                    tokens: ff_tokens,
                },
            });
        }
        if always {
            // The first that applies wins, and this one always does.
            break;
        }
    }
    let sample = Sample {
        mask,
        bias: Vec::new(),
        temperature,
        splices: conditional,
    };
    (Branch::Sample(sample), following)
}
