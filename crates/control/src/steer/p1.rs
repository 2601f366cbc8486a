//! [`P1Steps`]: the steps of a P1 module, `pre`, `mid` and `post`.
//!
//! ```text
//!   Idle ─(pre)─► InPre ─(ff_tokens)─► InPost ─► InPre …     `post` then `pre` are queued together
//!     ▲             └─(else)─► Idle ─(mid_begin)─► InMid ─► Idle
//!     └── post of the engine: InPost
//! ```

use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Branch, Mid, Pre, Sample, Splice, SteerFailure, Steered, Token,
};

use super::{Calls, failure_of, unexpected};
use crate::host::{Callback, Instance, MidReturned, PreRounds, Returned, Waiting};

/// Where a sequence of a P1 module is in its step.
#[derive(Clone, Debug, Default)]
pub(super) struct P1Steps {
    state: P1Phase,
    /// Tokens of this step's `pre` results so far.
    rounds: PreRounds,
    /// What `pre` asks for in the next step, because its tokens come first.
    deferred: Option<Pre>,
    /// The step only waits for `deferred`: its `mid` does nothing.
    skips_mid: bool,
    /// What the last `pre` waits for.
    wait: Option<Waiting>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum P1Phase {
    #[default]
    Idle,
    /// `post` and `pre` are queued, the first has not ended.
    InPost,
    InPre,
    InMid,
}

impl P1Steps {
    pub(super) fn pre(&mut self, calls: &mut Calls<'_>, forks_max: u32) -> Steered<Option<Pre>> {
        if let Some(deferred) = self.deferred.take() {
            return Ok(Some(deferred));
        }
        if self.state == P1Phase::Idle {
            if let Some(wait) = &self.wait
                && !wait.is_over(Instant::now())
            {
                return Ok(Some(Pre::Wait));
            }
            self.wait = None;
            calls.instance()?.call(Callback::Pre);
            self.state = P1Phase::InPre;
        }
        loop {
            let Some(returned) = calls.poll()? else {
                return Ok(None);
            };
            match (self.state, returned) {
                (P1Phase::InPost, Returned::Post { stop: false }) => self.state = P1Phase::InPre,
                // The `pre` that was queued with it has no meaning any more; the sequence ends here.
                (P1Phase::InPost, Returned::Post { stop: true }) => return Ok(Some(Pre::Stop)),
                (
                    P1Phase::InPre,
                    Returned::Pre {
                        num_forks,
                        suspend,
                        ff_tokens,
                        wait,
                    },
                ) => {
                    if !ff_tokens.is_empty() {
                        self.report_forced(calls, ff_tokens)?;
                        continue;
                    }
                    self.state = P1Phase::Idle;
                    self.wait = wait;
                    return self.decide(num_forks, suspend, forks_max).map(Some);
                }
                _ => return Err(unexpected()),
            }
        }
    }

    /// The controller hears of its own tokens by `post`, and is asked again (AI-405).
    fn report_forced(&mut self, calls: &mut Calls<'_>, tokens: Vec<Token>) -> Steered<()> {
        let post = self.rounds.add(tokens);
        let post = post.map_err(|failure| failure_of(&failure))?;
        calls.instance()?.call_all([post, Callback::Pre]);
        self.state = P1Phase::InPost;
        Ok(())
    }

    fn decide(&mut self, num_forks: u32, suspend: bool, forks_max: u32) -> Steered<Pre> {
        let fast_forward = self.rounds.finish();
        if num_forks > forks_max {
            return Err(SteerFailure {
                reason: ErrorReason::LIMIT,
                message: format!("too many forks (max={forks_max})"),
            });
        }
        let wanted = match (num_forks, suspend) {
            (_, true) if self.wait.is_some() => Pre::Wait,
            (_, true) => Pre::Suspend,
            (0, false) => Pre::Stop,
            (1, false) => return Ok(Pre::Run { fast_forward }),
            (forks, false) => Pre::Fork(forks),
        };
        if fast_forward.is_empty() {
            return Ok(wanted);
        }
        // Both at once cannot be asked of the engine: the tokens are appended in this step, in which nothing is
        // sampled.
        self.deferred = Some(wanted);
        self.skips_mid = true;
        Ok(Pre::Run { fast_forward })
    }

    pub(super) fn mid_begin(&mut self, instance: &mut Instance, group: &[u32]) {
        if self.skips_mid {
            return;
        }
        let fork_group = group.to_vec();
        instance.call(Callback::Mid { fork_group });
        self.state = P1Phase::InMid;
    }

    pub(super) fn mid_poll(&mut self, calls: &mut Calls<'_>) -> Steered<Option<Mid>> {
        if std::mem::take(&mut self.skips_mid) {
            return Ok(Some(Mid::One(Branch::Noop)));
        }
        if self.state != P1Phase::InMid {
            return Err(unexpected());
        }
        let Some(returned) = calls.poll()? else {
            return Ok(None);
        };
        self.state = P1Phase::Idle;
        let Returned::Mid(mid) = returned else {
            return Err(unexpected());
        };
        Ok(Some(match mid {
            MidReturned::Stop => Mid::Stop,
            MidReturned::Sample(mask) => {
                let sample = Sample {
                    mask,
                    ..Sample::default()
                };
                Mid::One(Branch::Sample(sample))
            }
            MidReturned::Splice {
                backtrack,
                ff_tokens: tokens,
            } => Mid::One(Branch::Splice(Splice { backtrack, tokens })),
        }))
    }

    /// Both calls at once: the engine asks for `pre` next in any case, and one hand-off is half the price of two.
    pub(super) fn post(&mut self, instance: &mut Instance, appended: Appended<'_>) {
        let post = Callback::Post {
            backtrack: appended.backtrack,
            tokens: appended.tokens.to_vec(),
        };
        instance.call_all([post, Callback::Pre]);
        self.state = P1Phase::InPost;
        // Another steerer has changed the text: what was to follow is decided anew.
        (self.wait, self.deferred, self.skips_mid) = (None, None, false);
    }

    /// The steps of a fork, which is made between callbacks.
    pub(super) fn fork(&self) -> Self {
        Self {
            // Nothing of its own is outstanding.
            state: P1Phase::Idle,
            wait: None,
            ..self.clone()
        }
    }
}
