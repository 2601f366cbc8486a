//! One stream that may move from one upstream to another (LM-806).

use std::sync::Arc;

use crate::lmtp::{
    GenerateRequest, LmtpError, LmtpReason, ReceivedItem, Score, StreamDemand, StreamFinish,
};
use crate::steer::Token;

/// The stream. Its caller sees one sequence of items, even if upstreams are lost.
#[derive(Debug)]
pub struct RelayedStream {
    work: StreamDemand,
    /// Tokens of prompt and output; for SCORE, of the prompt and the tokens scored so far.
    tokens: Vec<Token>,
    prompt: usize,
    /// Number of items from upstreams that were lost.
    before: usize,
    /// Number of consecutive attempts that were lost before their first new item.
    in_vain: u32,
    /// Number of items that the caller had when the current upstream was asked.
    at_last: usize,
    seeded: bool,
    /// EOS tokens, as far as they are known.
    ends: Arc<[Token]>,
    /// Whether the current upstream was asked for the tokens of `min_tokens` only.
    short: bool,
    /// If the current upstream computes the stream from its beginning: how many items that the caller has already it
    /// has repeated.
    repeated: Option<usize>,
}

/// What to do with an item of an upstream.
#[derive(Clone, Debug, PartialEq)]
pub enum RelayedItem {
    /// Pass it to the caller.
    On,
    /// Pass it to the caller and ask for the rest of the stream: this was the last item of `min_tokens`, but not of the
    /// stream.
    OnAndAgain,
    /// Drop it: the caller has it already.
    Known,
    /// It differs from the output of the first upstream, although the seed is the same: the stream fails with this
    /// error.
    Differs(LmtpError),
}

impl RelayedStream {
    /// Creates a stream that was not sent to an upstream yet. With `seeded` it may move to another upstream even if it
    /// has a seed.
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

    /// Sets the EOS tokens, with which `min_tokens` can be emulated for upstreams that do not support it (LM-704).
    #[must_use]
    pub fn with_ends(mut self, ends: Arc<[Token]>) -> Self {
        self.ends = ends;
        self
    }

    /// The work for the next upstream: all of it, or the rest.
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

    /// The same for an upstream that supports only the base protocol. The tokens of `min_tokens` are requested first,
    /// with all tokens forbidden that would end the stream; then the rest (LM-704).
    #[must_use]
    pub fn base_work(&mut self) -> StreamDemand {
        let mut work = self.work();
        self.short = false;
        if let StreamDemand::Generate(wanted) = &mut work
            && wanted.min_tokens > 0
            && !self.ends.is_empty()
            // These penalties depend on the output, and would not see the first part of it in the second request.
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

    /// Prompt and output so far: what the current upstream has computed.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Handles an item of the current upstream and adjusts it for the caller.
    #[must_use]
    pub fn item(&mut self, item: &mut ReceivedItem) -> RelayedItem {
        if let Some(at) = self.repeated {
            return self.repeat(at, item);
        }
        self.tokens.extend(item.token);
        if self.before == 0 && !self.short {
            return RelayedItem::On;
        }
        // A stop sequence may span two upstreams, or may not have been sent to this one, so it is checked here as well.
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

    /// Compares an item of a stream that is computed again with the item that the caller has.
    fn repeat(&mut self, at: usize, item: &ReceivedItem) -> RelayedItem {
        let same = item
            .token
            .is_none_or(|token| self.tokens[self.prompt + at] == token);
        // The stream of the first upstream did not end there.
        if !same || item.finish.is_some() {
            let why = "the upstream was lost, and another one gave other tokens for the same seed; try again";
            return RelayedItem::Differs(LmtpError::new(LmtpReason::UpstreamError, why));
        }
        let at = at + usize::from(item.token.is_some());
        self.repeated = (at < self.given()).then_some(at);
        RelayedItem::Known
    }

    /// The current upstream has failed. `Ok`: the stream continues at another one, with [`Self::work`].
    ///
    /// # Errors
    /// The stream ends with this error for its caller: an error other than a loss, or a loss from which it cannot
    /// continue.
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

    /// Whether the stream would continue at another upstream if this one were lost now.
    #[must_use]
    pub fn can_move(&self) -> bool {
        self.is_continued() && self.in_vain_now() <= IN_VAIN_MAX
    }

    /// Number of consecutive attempts without a new item, if this one were lost now.
    fn in_vain_now(&self) -> u32 {
        let new = self.given() > self.at_last;
        if new { 0 } else { self.in_vain + 1 }
    }

    /// Maximum number of items that the caller asked for.
    fn most(&self) -> usize {
        match &self.work {
            StreamDemand::Generate(wanted) => wanted.max_tokens as usize,
            StreamDemand::Score(wanted) => wanted.scored.len(),
        }
    }

    fn given(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether another upstream would give the same output: by continuing, or from the beginning.
    fn is_continued(&self) -> bool {
        self.given() == 0 || self.is_seamless() || self.is_repeatable()
    }

    /// Whether the stream can be recomputed from the beginning with its seed. Not if it was requested in parts: its
    /// seed does not apply to the whole then.
    fn is_repeatable(&self) -> bool {
        let StreamDemand::Generate(wanted) = &self.work else {
            return false;
        };
        let is_seeded = wanted.seed.is_some() && wanted.temperature != 0.0;
        is_seeded && self.seeded && wanted.min_tokens == 0
    }

    /// Whether the output can become part of the prompt: nothing in the request may distinguish prompt and output.
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

    /// Whether the output ends with one of the stop sequences.
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

/// The biases with these tokens forbidden; ascending, each once.
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

/// Whether the error means that the upstream was lost, drains or hangs; the request itself is valid then.
const fn is_loss(reason: LmtpReason) -> bool {
    matches!(
        reason,
        LmtpReason::ConnectionLost
            | LmtpReason::Draining
            | LmtpReason::EngineDead
            | LmtpReason::Timeout
    )
}

/// How often a stream is sent again without progress.
const IN_VAIN_MAX: u32 = 1;
