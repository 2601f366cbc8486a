//! One stream that may move from one upstream to another (LM-806).

use std::sync::Arc;

use crate::lmtp::{
    GenerateRequest, LmtpError, LmtpReason, ReceivedItem, Score, StreamDemand, StreamFinish,
};
use crate::steer::Token;

/// The stream. Its caller sees one run of items, whatever becomes of upstreams.
#[derive(Debug)]
pub struct RelayedStream {
    work: StreamDemand,
    /// Tokens of prompt and output; of a SCORE, of the prompt and what is scored already.
    tokens: Vec<Token>,
    prompt: usize,
    /// Items that upstreams gave which were lost.
    before: usize,
    /// Askings in a row that were lost before their first new item.
    in_vain: u32,
    /// Items that the caller had when the present upstream was asked.
    at_last: usize,
    seeded: bool,
    /// Tokens that end a text, as far as they are known.
    ends: Arc<[Token]>,
    /// The present upstream was asked for the tokens of `min_tokens` alone.
    short: bool,
    /// The present upstream computes the stream from its beginning, and has come so far in what the caller has already.
    repeated: Option<usize>,
}

/// What becomes of an item of an upstream.
#[derive(Clone, Debug, PartialEq)]
pub enum RelayedItem {
    /// The caller gets it.
    On,
    /// The caller gets it, and the stream is to be asked for again: this was the last of its minimum and not of its own.
    OnAndAgain,
    /// The caller has it already.
    Known,
    /// It is not what the first upstream gave, whose seed was promised: the stream is over with this.
    Differs(LmtpError),
}

impl RelayedStream {
    /// A stream that nobody was asked for yet. `seeded`: it may go on elsewhere although it has a seed.
    #[must_use]
    pub fn new(work: StreamDemand, seeded: bool) -> Self {
        let mut work = work;
        let tokens = match &mut work {
            StreamDemand::Generate(wanted) => std::mem::take(&mut wanted.prompt),
            StreamDemand::Score(wanted) => std::mem::take(&mut wanted.prompt),
        };
        Self {
            prompt: tokens.len(),
            work,
            tokens,
            before: 0,
            in_vain: 0,
            at_last: 0,
            seeded,
            ends: Arc::default(),
            short: false,
            repeated: None,
        }
    }

    /// With the tokens that end a text, which make a minimum of tokens possible where upstreams know of none (LM-704).
    #[must_use]
    pub fn with_ends(mut self, ends: Arc<[Token]>) -> Self {
        self.ends = ends;
        self
    }

    /// What the next upstream is asked for: all of it, or what is left.
    #[must_use]
    pub fn work(&self) -> StreamDemand {
        if let (Some(_), StreamDemand::Generate(wanted)) = (self.repeated, &self.work) {
            return StreamDemand::Generate(GenerateRequest {
                prompt: self.tokens[..self.prompt].to_vec(),
                ..wanted.clone()
            });
        }
        let given = u32::try_from(self.given()).unwrap_or(u32::MAX);
        match &self.work {
            StreamDemand::Generate(wanted) => StreamDemand::Generate(GenerateRequest {
                prompt: self.tokens.clone(),
                max_tokens: wanted.max_tokens.saturating_sub(given).max(1),
                min_tokens: wanted.min_tokens.saturating_sub(given),
                ..wanted.clone()
            }),
            StreamDemand::Score(wanted) => StreamDemand::Score(Score {
                prompt: self.tokens.clone(),
                scored: wanted
                    .scored
                    .get(self.given()..)
                    .unwrap_or_default()
                    .to_vec(),
                top_logprobs: wanted.top_logprobs,
            }),
        }
    }

    /// The same for an upstream that knows nothing but the base protocol. The tokens of `min_tokens` are asked for first, with
    /// whatever would end the stream forbidden, and the rest then (LM-704).
    #[must_use]
    pub fn base_work(&mut self) -> StreamDemand {
        let mut work = self.work();
        self.short = false;
        if let StreamDemand::Generate(wanted) = &mut work
            && wanted.min_tokens > 0
            && !self.ends.is_empty()
            // These look back at the output, and would not see it across the seam.
            && wanted.presence_penalty == 0.0
            && wanted.frequency_penalty == 0.0
        {
            wanted.max_tokens = wanted.max_tokens.min(wanted.min_tokens);
            wanted.min_tokens = 0;
            let stops = std::mem::take(&mut wanted.stop_tokens);
            let singles = stops.iter().filter(|stop| stop.len() == 1).flatten();
            wanted.logit_bias = forbidding(&wanted.logit_bias, self.ends.iter().chain(singles));
            self.short = true;
        }
        work
    }

    /// Prompt and output so far: what the present upstream has computed.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// An item of the present upstream, as the caller shall see it.
    #[must_use]
    pub fn item(&mut self, item: &mut ReceivedItem) -> RelayedItem {
        if let Some(at) = self.repeated {
            return self.repeat(at, item);
        }
        self.tokens.extend(item.token);
        if self.before == 0 && !self.short {
            return RelayedItem::On;
        }
        // The upstream does not know what precedes the seam, nor what it was not sent.
        let may_stop = matches!(item.finish, None | Some(StreamFinish::Length));
        if may_stop && item.token.is_some() && self.is_stopped() {
            item.finish = Some(StreamFinish::Stop);
        }
        let ended = item.finish == Some(StreamFinish::Length);
        if self.short && ended && self.given() > self.before && self.given() < self.most() {
            item.finish = None;
            item.usage = None;
            self.before = self.given();
            self.at_last = self.before;
            return RelayedItem::OnAndAgain;
        }
        if let Some(usage) = &mut item.usage {
            let before = self.before as u64;
            usage.prompt_tokens = usage.prompt_tokens.saturating_sub(before);
            usage.cached_tokens = usage.cached_tokens.min(usage.prompt_tokens);
            usage.completion_tokens += before;
        }
        RelayedItem::On
    }

    /// An item of a stream that is computed again: what the caller has already, or something else.
    fn repeat(&mut self, at: usize, item: &ReceivedItem) -> RelayedItem {
        let same = item
            .token
            .is_none_or(|token| self.tokens[self.prompt + at] == token);
        // What the caller has did not end there.
        if !same || item.finish.is_some() {
            let why = "the upstream was lost, and another one gave other tokens for the same seed; try again";
            return RelayedItem::Differs(LmtpError::new(LmtpReason::UpstreamError, why));
        }
        let at = at + usize::from(item.token.is_some());
        self.repeated = (at < self.given()).then_some(at);
        RelayedItem::Known
    }

    /// The present upstream has failed. `Ok`: the stream goes on elsewhere, with [`Self::work`].
    ///
    /// # Errors
    /// The stream is over with this error for its caller: another error than a loss, or a loss that cannot be repaired.
    pub fn failed(&mut self, error: LmtpError) -> Result<(), LmtpError> {
        if !is_loss(error.reason) {
            return Err(error);
        }
        self.in_vain = self.in_vain_now();
        if self.in_vain > IN_VAIN_MAX {
            let why = "the upstream was lost, and the one that was asked instead, too; try again";
            return Err(LmtpError::new(LmtpReason::UpstreamError, why));
        }
        if !self.is_continued() {
            let why = "the upstream was lost, and a stream with penalties, stop texts or a promised seed cannot go on \
                       at another one; try again";
            return Err(LmtpError::new(LmtpReason::UpstreamError, why));
        }
        (self.before, self.repeated) = if self.given() > 0 && self.is_repeatable() {
            (0, Some(0))
        } else {
            (self.given(), None)
        };
        self.short = false;
        self.at_last = self.given();
        Ok(())
    }

    /// Whether the stream would go on elsewhere if it were lost now.
    #[must_use]
    pub fn can_move(&self) -> bool {
        self.is_continued() && self.in_vain_now() <= IN_VAIN_MAX
    }

    /// Askings in a row that were lost before anything new, were this one lost now.
    fn in_vain_now(&self) -> u32 {
        let new = self.given() > self.at_last;
        if new { 0 } else { self.in_vain + 1 }
    }

    /// Items that the caller asked for.
    fn most(&self) -> usize {
        match &self.work {
            StreamDemand::Generate(wanted) => wanted.max_tokens as usize,
            StreamDemand::Score(wanted) => wanted.scored.len(),
        }
    }

    fn given(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether another upstream gives what the first would have given: by going on, or from the beginning.
    fn is_continued(&self) -> bool {
        self.given() == 0 || self.is_seamless() || self.is_repeatable()
    }

    /// Its seed is promised, and kept by computing all of it again. What was asked for in parts has no seed for its whole.
    fn is_repeatable(&self) -> bool {
        let StreamDemand::Generate(wanted) = &self.work else {
            return false;
        };
        let is_seeded = wanted.seed.is_some() && wanted.temperature != 0.0;
        is_seeded && self.seeded && wanted.min_tokens == 0
    }

    /// Whatever looks back at the output must not see a difference between prompt and output.
    fn is_seamless(&self) -> bool {
        let StreamDemand::Generate(wanted) = &self.work else {
            return true;
        };
        let is_free = wanted.presence_penalty == 0.0
            && wanted.frequency_penalty == 0.0
            && wanted.repetition_penalty == 1.0
            && wanted.stop.is_empty();
        is_free && (wanted.seed.is_none() || wanted.temperature == 0.0)
    }

    /// The output ends with one of the sequences that stop it.
    fn is_stopped(&self) -> bool {
        let StreamDemand::Generate(wanted) = &self.work else {
            return false;
        };
        let output = &self.tokens[self.prompt..];
        let mut stops = wanted.stop_tokens.iter();
        output.len() >= wanted.min_tokens as usize
            && stops.any(|stop| !stop.is_empty() && output.ends_with(stop))
    }
}

/// The biases, and these tokens forbidden; ascending, each once.
fn forbidding<'a>(
    bias: &[(Token, f32)],
    tokens: impl Iterator<Item = &'a Token> + Clone,
) -> Arc<[(Token, f32)]> {
    let others = bias
        .iter()
        .filter(|(token, _)| !tokens.clone().any(|forbidden| forbidden == token));
    let forbidden = tokens.clone().map(|token| (*token, f32::NEG_INFINITY));
    let mut all: Vec<_> = others.copied().chain(forbidden).collect();
    all.sort_by_key(|(token, _)| *token);
    all.dedup_by_key(|(token, _)| *token);
    all.into()
}

/// The upstream has gone, is going, or says nothing; the request is as good as it was.
const fn is_loss(reason: LmtpReason) -> bool {
    matches!(
        reason,
        LmtpReason::ConnectionLost
            | LmtpReason::Draining
            | LmtpReason::EngineDead
            | LmtpReason::Timeout
    )
}

/// A stream is sent again once, from wherever it has come to.
const IN_VAIN_MAX: u32 = 1;
