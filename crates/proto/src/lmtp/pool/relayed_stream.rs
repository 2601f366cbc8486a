//! One stream that may move from one upstream to another (LM-806).

use crate::lmtp::{LmtpError, LmtpReason, ReceivedItem, StreamDemand, StreamFinish};
use crate::params::LoraName;
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
    /// Whether the stop sequences were not sent to the current upstream, which does not know them, and are matched
    /// here.
    stops_here: bool,
    /// If the current upstream computes the stream from its beginning: how many items that the caller has already it
    /// has repeated.
    repeated: Option<usize>,
    /// Items came that only a controller causes: what its caller has is more than `tokens`.
    steered: bool,
}

/// What to do with an item of an upstream.
#[derive(Clone, Debug, PartialEq)]
pub enum RelayedItem {
    /// Pass it to the caller.
    On,
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
            stops_here: false,
            repeated: None,
            steered: false,
        }
    }

    /// The work for the next upstream: all of it, or the rest.
    #[must_use]
    pub fn work(&self) -> StreamDemand {
        let given = u32::try_from(self.given()).unwrap_or(u32::MAX);
        // Its prompt is empty: `new` has moved it into `tokens`.
        let mut work = self.work.clone();
        match &mut work {
            StreamDemand::Generate(wanted) if self.repeated.is_some() => {
                wanted.prompt.extend(&self.tokens[..self.prompt]);
            }
            StreamDemand::Generate(wanted) => {
                wanted.prompt.extend(&self.tokens);
                // 0 is refused by peers (LM-304). It does not occur: the item that uses up `max_tokens` ends the stream.
                let rest = wanted.max_tokens().saturating_sub(given).max(1);
                wanted.params.max_tokens = Some(rest);
                let min_tokens = &mut wanted.params.min_tokens;
                *min_tokens = min_tokens.map(|min| min.saturating_sub(given));
            }
            StreamDemand::Score(wanted) => {
                wanted.prompt.extend(&self.tokens);
                let scored = self.given().min(wanted.scored.len());
                wanted.scored.drain(..scored);
            }
        }
        work
    }

    /// The same for an upstream of the base protocol, which has no stop sequences of tokens: they are matched here, and
    /// the rest of its stream is dropped (LM-704).
    #[must_use]
    pub fn base_work(&mut self) -> StreamDemand {
        let mut work = self.work();
        if let StreamDemand::Generate(wanted) = &mut work {
            self.stops_here = !std::mem::take(&mut wanted.params.stop_sequences).is_empty();
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
        self.steered |= item.branch.is_some();
        // The tokens of forks are not those of one text, which an upstream would find in its cache again.
        if item.sample == 0 {
            let backtrack = item.branch.as_ref().and_then(|branch| branch.backtrack);
            let backtrack = backtrack.unwrap_or_default() as usize;
            let rest = self.given().saturating_sub(backtrack);
            self.tokens.truncate(self.prompt + rest);
            self.tokens.extend(item.token);
        }
        // The first upstream knows all stops, and its usage is that of the whole stream.
        if self.before == 0 && !self.stops_here {
            return RelayedItem::On;
        }
        // A stop sequence may span two upstreams, or was not sent to this one.
        // A stop that is complete with the last token allowed wins over `length`, as EOS does (LM-404).
        let may_stop = matches!(item.finish, None | Some(StreamFinish::Length));
        if may_stop && item.token.is_some() && self.is_stopped() {
            item.finish = Some(StreamFinish::Stop);
        }
        // Output that has become prompt at this upstream is still output to the caller.
        if let Some(usage) = &mut item.usage {
            let before = self.before as u64;
            usage.prompt_tokens = usage.prompt_tokens.saturating_sub(before);
            usage.cached_tokens = usage.cached_tokens.min(usage.prompt_tokens);
            usage.completion_tokens = usage.completion_tokens.saturating_add(before);
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
            let why = "the upstream was lost, and another one returned different tokens for the same seed; try again";
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
            let why = "the upstream was lost, and so was the one that replaced it; try again";
            return Err(LmtpError::new(LmtpReason::UpstreamError, why));
        }
        if !self.is_continued() {
            let why = "the upstream was lost, and a stream with penalties, stop texts, a controller, adapters by number or \
                       a promised seed cannot continue at another one; try again";
            return Err(LmtpError::new(LmtpReason::UpstreamError, why));
        }
        // A sampled stream with a seed is computed again: continued, the generator would start anew in its middle.
        (self.before, self.repeated) = if self.given() > 0 && self.is_repeatable() {
            (0, Some(0))
        } else {
            (self.given(), None)
        };
        self.at_last = self.given();
        self.stops_here = false;
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

    fn given(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether another upstream would give the same output: by continuing, or from the beginning.
    fn is_continued(&self) -> bool {
        let another = self.is_seamless() || self.is_repeatable();
        (self.given() == 0 && !self.steered) || (another && !self.names_places())
    }

    /// Whether it names LoRA adapters by their places, in lists that may differ from upstream to upstream.
    fn names_places(&self) -> bool {
        let lora = match &self.work {
            StreamDemand::Generate(wanted) => &wanted.params.lora,
            StreamDemand::Score(wanted) => &wanted.lora,
        };
        let mut uses = lora.iter().flatten();
        uses.any(|it| matches!(it.adapter, LoraName::Index(_)))
    }

    /// Whether the stream can be recomputed from the beginning with its seed.
    fn is_repeatable(&self) -> bool {
        let StreamDemand::Generate(wanted) = &self.work else {
            return false;
        };
        let is_seeded = wanted.params.seed.is_some() && wanted.temperature() != 0.0;
        // A controller may look at a clock or at variables of others, and its items are more than tokens.
        is_seeded && self.seeded && wanted.controller.is_none()
    }

    /// Whether the output can become part of the prompt: nothing in the request may distinguish prompt and output.
    fn is_seamless(&self) -> bool {
        let StreamDemand::Generate(wanted) = &self.work else {
            return true;
        };
        let params = &wanted.params;
        let is_free = matches!(params.presence_penalty, None | Some(0.0))
            && matches!(params.frequency_penalty, None | Some(0.0))
            && matches!(params.repetition_penalty, None | Some(1.0))
            // DRY sees prompt and output alike; mirostat begins anew with each request.
            && matches!(params.mirostat, None | Some(0))
            && params.stop.is_empty()
            && wanted.controller.is_none();
        // Without a seed no certain tokens are promised, and at temperature 0 the seed has no effect.
        is_free && (params.seed.is_none() || wanted.temperature() == 0.0)
    }

    /// Whether the output ends with one of the stop sequences.
    fn is_stopped(&self) -> bool {
        let StreamDemand::Generate(wanted) = &self.work else {
            return false;
        };
        let output = &self.tokens[self.prompt..];
        let min_tokens = wanted.params.min_tokens.unwrap_or(0);
        let mut stops = wanted.params.stop_sequences.iter();
        // Before `min_tokens` a stop has no effect, also across two upstreams.
        output.len() >= min_tokens as usize
            && stops.any(|stop| !stop.is_empty() && output.ends_with(stop))
    }
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

/// How often a stream is sent again without progress: once (LM-806).
const IN_VAIN_MAX: u32 = 1;
