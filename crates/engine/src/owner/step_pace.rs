//! [`StepPace`]: how many prompt tokens a step may compute, so that it ends in time.
//!
//! Streams wait for the end of a step, and so does a request that arrives meanwhile. How long a number of tokens takes
//! depends on the model, the machine, what else runs there and how long the sequences are, by a factor of thousands. So
//! the pace is measured, and the limit is a time.

mod prompt_time;

use std::time::Duration;

use self::prompt_time::{Doubt, PromptStep, PromptTime};
use crate::model::WarmTimes;

/// Prompt tokens of a step before anything was measured. Beside streams that is so until a request has had enough of them: at the loading
/// of the model something else may have run, or not yet.
const UNMEASURED_TOKENS: usize = 128;
/// Prompt tokens of a step, however slow they are. Where memory is what limits a step, so few cost hardly more than one.
const TOKENS_MIN: usize = 8;
/// So many prompt tokens show what one takes, whatever else a step has. With few, most of what they seem to take is the pass over the
/// weights, and the noise of the rest of the step.
const ENOUGH_TOKENS: usize = 64;
/// The share of a new measurement in an estimate.
const NEW_SHARE: f64 = 0.25;
/// A measurement counts as at most so many times the estimate, and at least as its inverse. A machine that slept says
/// nothing about its speed; one that has become slower says so in each step.
const CHANGE_MAX: f64 = 2.0;
/// A step may take so many times longer where other prompts wait for it, but no stream.
const PROMPTS_WAIT: f64 = 2.0;
/// A step may take so many times longer where nobody waits for it. Longer batches take less time for each token, and only a
/// request that arrives meanwhile would notice.
const NOBODY_WAITS: f64 = 4.0;
/// Beside streams, a step computes this share of the prompts that it finds, so that few prompt tokens make no stream wait for as long
/// as many do.
const PROMPTS_SHARE: f64 = 1.0 / 3.0;
/// Prompts have this share of a step's time beside streams, however few their tokens are.
const STEP_SHARE: f64 = 1.0 / 6.0;
/// And they have this share of what the step takes besides them: shorter ones would be mostly that, and the first token of a prompt
/// much later for streams that wait little less.
const BESIDE_SHARE: f64 = 1.0 / 2.0;
/// After so many steps in a row with prompt tokens, one computes a single one, and so shows what the others take: meanwhile streams have
/// begun and ended, and become longer. It is not a multiple of the turns of the oldest prompt.
const DECODE_OLD: u32 = 16;
/// After so many, one has another number of tokens if it has few: a long pass and slow tokens look alike in steps of one size, and a
/// number that is too small would stay so.
const PROBE: u32 = DECODE_OLD / 4;
/// The first tokens of a request take at most so many times what the loading promised. A request may be the first that reads some of
/// the weights from a disk, which says nothing about later ones.
const FIRST_MAX: f64 = 8.0;
/// A step is planned for this share of its time, because half of the steps take longer than planned.
const PLANNED: f64 = 0.9;
/// A step that took so many times longer than it should lowers the limit for the next ones.
const OVER: f64 = 1.2;

/// Who waits for the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepWaiting {
    /// Streams, for their next tokens.
    Streams,
    /// Other prompts, for theirs.
    Prompts,
    /// No sequence could run beside the one that does.
    Nobody,
}

/// What is known of a step before its batch is planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepStart {
    /// Who waits for its end.
    pub(super) waiting: StepWaiting,
    /// How many steps share the time of one, because sequences take turns: a stream waits for all of them.
    pub(super) turns: usize,
    /// What it has taken before its decode call: prefixes were copied.
    pub(super) spent: Duration,
    /// The prompt tokens that it could compute.
    pub(super) prompt_tokens: usize,
}

/// What a decode call computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepWork {
    /// Sequences with a single token, which is what a stream has.
    pub(super) decoding: usize,
    /// Prompts with more tokens.
    pub(super) prompts: usize,
    /// The tokens of these prompts.
    pub(super) prompt_tokens: usize,
}

/// Estimates what decoding sequences and prompt tokens add to the time of a step.
#[derive(Debug)]
pub(super) struct StepPace {
    /// The time that is planned for a step, in nanoseconds, as all times here.
    step: f64,
    /// Whether a step is one pass over the weights. Otherwise prompt tokens beside streams need a second one.
    computes_together: bool,
    /// The step that is planned now.
    start: StepStart,
    /// A step without prompt tokens, and with how many sequences; `None` before the first.
    decode: Option<(f64, f64)>,
    /// How many steps in a row had prompt tokens, so that `decode` was not measured.
    prompt_steps: u32,
    /// What prompts take; `None` before the first.
    prompts: Option<PromptTime>,
    /// Whether that is of a request, and not of the loading alone.
    prompts_observed: bool,
    /// A step with a single token when the model was loaded, which is little but a pass over the weights.
    pass: Option<f64>,
    /// No more prompt tokens than this, because so many took too long. It grows again with each step that does not.
    most: f64,
}

impl StepPace {
    /// Aims at steps of at most `step`, with what is known from the loading of the model, which has
    /// [`computes_together`](crate::Capacity::computes_together).
    pub(super) fn new(step: Duration, known: Option<WarmTimes>, computes_together: bool) -> Self {
        let decode = known.map(|times| nanoseconds(times.decode));
        let mut pace = Self {
            step: nanoseconds(step) * PLANNED,
            computes_together,
            start: StepStart {
                waiting: StepWaiting::Streams,
                turns: 1,
                spent: Duration::ZERO,
                prompt_tokens: usize::MAX,
            },
            decode: decode.map(|time| (time, 1.0)),
            prompt_steps: 0,
            prompts: None,
            prompts_observed: false,
            pass: decode,
            most: f64::INFINITY,
        };
        pace.prompts = known.map(|times| PromptTime {
            pass: pace.pass_guess(),
            token: nanoseconds(times.token),
            doubt: Doubt::ALL,
        });
        pace
    }

    /// Begins the plan of a step.
    pub(super) fn begin_step(&mut self, start: StepStart) {
        self.start = start;
    }

    /// Returns how many prompt tokens a further pass over the weights is worth, which each further prompt of a step needs where a
    /// batch is computed sequence by sequence; 0 where it is not, or as long as that is not known.
    pub(super) fn pass_tokens(&self) -> usize {
        match self.prompts {
            Some(PromptTime { pass, token, .. }) if !self.computes_together => {
                (pass / token.max(1.0)) as usize
            }
            _ => 0,
        }
    }

    /// Returns who waits for the step that is planned now.
    pub(super) fn waiting(&self) -> StepWaiting {
        self.start.waiting
    }

    /// Returns what a prompt token takes; `None` before the first was measured.
    pub(super) fn token_time(&self) -> Option<Duration> {
        self.prompts
            .map(|prompts| Duration::from_secs_f64(prompts.token / 1e9))
    }

    /// Returns whether the step that is planned now computes a single prompt token and no draft, to measure the time of the others.
    pub(super) fn measures_decode(&self) -> bool {
        self.prompt_steps >= DECODE_OLD
    }

    /// Returns how many prompt tokens a step may compute beside this many decoding sequences.
    pub(super) fn prefill_tokens(&self, decoding: usize) -> usize {
        if self.measures_decode() {
            return 1;
        }
        let Some(PromptTime { token, .. }) = self.prompts else {
            return UNMEASURED_TOKENS;
        };
        let fixed = self.beside_prompts(decoding);
        // What was spent before is taken from the prompts of this step, down to the part that they always have. It says nothing about
        // the speed of tokens, and so counts in nothing that is learned. A step that is short anyway has time for it, up to what a step
        // may take.
        let most = self.time_max(decoding);
        let late = nanoseconds(self.start.spent).min((most - 1.5 * fixed).max(0.0));
        let left = self.time_for(decoding).min(most - late) - fixed;
        // A cast saturates: a token that takes no time gives a number that the model's batch limits.
        let tokens = (left / token.max(1.0)).min(self.most) as usize;
        let most = match self.start.waiting {
            StepWaiting::Streams if !self.prompts_observed => UNMEASURED_TOKENS,
            _ => usize::MAX,
        };
        let tokens = match self.prompt_steps {
            PROBE if tokens < 2 * TOKENS_MIN => tokens.max(TOKENS_MIN) * 2,
            PROBE if tokens < ENOUGH_TOKENS => tokens * 3 / 2,
            _ => tokens,
        };
        tokens.clamp(TOKENS_MIN, most)
    }

    /// Returns how long the decoding sequences of a step and their drafts may take beside so many prompt tokens, in seconds.
    pub(super) fn decode_seconds(&self, decoding: usize, prompt_tokens: usize) -> f64 {
        let prompts = match (prompt_tokens, self.prompts) {
            (1.., Some(prompts)) => prompts.of(count(prompt_tokens)),
            _ => 0.0,
        };
        (self.time_for(decoding) - prompts) / 1e9
    }

    /// How long a step should take. One that finds few prompt tokens beside streams is shorter than it may be: they are computed
    /// almost as soon in several short steps, and the streams wait for each of those alone.
    fn time_for(&self, decoding: usize) -> f64 {
        let most = self.time_max(decoding);
        if self.start.waiting != StepWaiting::Streams || self.start.prompt_tokens == 0 {
            return most;
        }
        let token = self.prompts.map_or(0.0, |prompts| prompts.token);
        let found = count(self.start.prompt_tokens) * token;
        let fixed = self.beside_prompts(decoding);
        let prompts = (found * PROMPTS_SHARE)
            .max(self.step_time() * STEP_SHARE)
            .max(fixed * BESIDE_SHARE);
        most.min(fixed + prompts)
    }

    /// How long a step may take. Where a step takes long whatever is in it, prompts have a part of it nevertheless, or
    /// they would never be computed: a third beside streams, and two thirds where none of them waits.
    fn time_max(&self, decoding: usize) -> f64 {
        let (longer, part) = match self.start.waiting {
            StepWaiting::Streams => (1.0, 1.5),
            StepWaiting::Prompts => (PROMPTS_WAIT, 3.0),
            StepWaiting::Nobody => (NOBODY_WAITS, 3.0),
        };
        (self.step_time() * longer).max(part * self.beside_prompts(decoding))
    }

    /// The planned time of a step that shares it with others.
    fn step_time(&self) -> f64 {
        self.step / count(self.start.turns.max(1))
    }

    /// What a step with so many decoding sequences takes besides its prompt tokens. A pass over the weights that counted as time of
    /// the tokens would make few of them look slow, and so give the next step fewer still.
    fn beside_prompts(&self, decoding: usize) -> f64 {
        let pass = match self.start.prompt_tokens {
            0 => 0.0,
            _ => self.expected_prompts().pass,
        };
        self.without_prompts(decoding) + pass
    }

    /// What prompts take as far as it is known.
    fn expected_prompts(&self) -> PromptTime {
        self.prompts.unwrap_or_else(|| PromptTime {
            pass: self.pass_guess(),
            token: 0.0,
            doubt: Doubt::ALL,
        })
    }

    /// What a pass over the weights takes that prompts need besides that of the streams, before steps have told: none where both are
    /// computed together; otherwise that of a single token, or what one of the sequences takes.
    fn pass_guess(&self) -> f64 {
        let sequence = self.decode.map_or(0.0, |(time, measured)| time / measured);
        match self.computes_together {
            true => 0.0,
            false => self.pass.unwrap_or(sequence),
        }
    }

    /// The time of a step with so many decoding sequences alone.
    fn without_prompts(&self, decoding: usize) -> f64 {
        let Some((time, measured)) = self.decode else {
            return 0.0;
        };
        if decoding == 0 && !self.computes_together {
            // Prompts have passes of their own.
            return 0.0;
        }
        // Rather too little than too much: what is missing here counts as time of the prompt tokens, and the step is as long as
        // it should be all the same.
        let more = (count(decoding) / measured - 1.0).max(0.0);
        time * (1.0 + more / 16.0)
    }

    /// Takes the time of a decode call.
    pub(super) fn observe(&mut self, work: StepWork, took: Duration) {
        let took = nanoseconds(took);
        let StepWork {
            decoding,
            prompts,
            prompt_tokens,
        } = work;
        if prompt_tokens == 0 {
            self.observe_decode(decoding, took);
            return;
        }
        self.prompt_steps = self.prompt_steps.saturating_add(1);
        // The whole includes the decoding, or the pass that both need, so that was no longer.
        if let Some((time, measured)) = &mut self.decode
            && (decoding > 0 || self.computes_together)
            && took < *time
        {
            *time = took;
            *measured = measured.min(count(decoding.max(1)));
        }
        let should = self.time_max(decoding);
        let enough = self.enough_tokens(decoding);
        self.most = if took > should * OVER {
            // A step with few took long for another reason, such as a machine that slept. If it was the tokens after all, the limit
            // falls with each such step until it is theirs.
            count(prompt_tokens).max(enough) * (should / took).max(0.5)
        } else {
            self.most * 1.25
        };
        let all = count(decoding + prompt_tokens);
        let prompts_took = took - self.without_prompts(decoding);
        let step = PromptStep {
            passes: match self.computes_together {
                true => 1.0,
                false => count(prompts.max(1)),
            },
            tokens: count(prompt_tokens),
            // Streams that seem slower than they are make no prompt free.
            took: prompts_took.max(took * count(prompt_tokens) / all / 4.0),
            streams: self.decode.map_or(0.0, |(time, _)| time),
        };
        let mut prompts = self.expected_prompts();
        // What the loading said of tokens is a guess, which it would take many steps to average away.
        if self.prompts.is_some() && (self.prompts_observed || step.tokens < enough / 2.0) {
            prompts.learn(step);
        } else {
            let promised = self.prompts.map_or(f64::INFINITY, |it| it.token);
            prompts.token = prompts.token_of(step).min(promised * FIRST_MAX);
            self.prompts_observed = true;
        }
        self.prompts = Some(prompts);
    }

    fn observe_decode(&mut self, decoding: usize, took: f64) {
        let is_old = self.measures_decode();
        self.prompt_steps = 0;
        if decoding == 0 {
            return;
        }
        let known = self.decode.map(|_| self.without_prompts(decoding));
        let time = match known {
            // There is not soon another measurement to take the average with.
            Some(known) if is_old => took.min(known * CHANGE_MAX),
            _ => average(known, took),
        };
        self.decode = Some((time, count(decoding)));
    }

    /// How many prompt tokens show what one takes: [`ENOUGH_TOKENS`], or as many as a step may have, where those are fewer.
    fn enough_tokens(&self, decoding: usize) -> f64 {
        let left = self.time_max(decoding) - self.beside_prompts(decoding);
        let tokens = left / self.expected_prompts().token.max(1.0);
        tokens
            .min(self.most)
            .clamp(count(TOKENS_MIN), count(ENOUGH_TOKENS))
    }
}

/// The estimate with a new measurement; the first one is taken as it is.
fn average(estimate: Option<f64>, new: f64) -> f64 {
    let Some(old) = estimate else { return new };
    // An estimate of nothing could never grow.
    let old = old.max(1.0);
    old + (new.clamp(old / CHANGE_MAX, old * CHANGE_MAX) - old) * NEW_SHARE
}

fn nanoseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a batch are few")]
fn count(tokens: usize) -> f64 {
    tokens as f64
}

#[cfg(test)]
mod tests;
