//! One stream on its way over upstreams (LM-806).
//!
//! Owns: what is left to be asked for, and whether an error of an upstream ends the stream or sends it elsewhere. Refuses to
//! know: which upstreams there are.

use crate::lmtp::{Fault, Finish, Generate, Reason, Received, Score, Work};
use crate::steer::Token;

/// The stream. Its caller sees one run of items, whatever becomes of upstreams.
#[derive(Debug)]
pub struct Passage {
    work: Work,
    /// Tokens of prompt and output; of a SCORE, of the prompt and what is scored already.
    tokens: Vec<Token>,
    prompt: usize,
    /// Items that upstreams gave which were lost.
    before: usize,
    /// Askings in a row that were lost before their first item.
    in_vain: u32,
    seeded: bool,
}

impl Passage {
    /// A stream that nobody was asked for yet. `seeded`: it may go on elsewhere although it has a seed.
    #[must_use]
    pub fn new(work: Work, seeded: bool) -> Self {
        let mut work = work;
        let tokens = match &mut work {
            Work::Generate(wanted) => std::mem::take(&mut wanted.prompt),
            Work::Score(wanted) => std::mem::take(&mut wanted.prompt),
        };
        Self {
            prompt: tokens.len(),
            work,
            tokens,
            before: 0,
            in_vain: 0,
            seeded,
        }
    }

    /// What the next upstream is asked for: all of it, or what is left.
    #[must_use]
    pub fn work(&self) -> Work {
        let given = u32::try_from(self.given()).unwrap_or(u32::MAX);
        match &self.work {
            Work::Generate(wanted) => Work::Generate(Generate {
                prompt: self.tokens.clone(),
                max_tokens: wanted.max_tokens.saturating_sub(given).max(1),
                min_tokens: wanted.min_tokens.saturating_sub(given),
                ..wanted.clone()
            }),
            Work::Score(wanted) => Work::Score(Score {
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

    /// Prompt and output so far: what the present upstream has computed.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// An item of the present upstream, as the caller shall see it.
    pub fn item(&mut self, item: &mut Received) {
        self.tokens.extend(item.token);
        if self.before == 0 {
            return;
        }
        // The upstream does not know what stood before the seam.
        let may_stop = matches!(item.finish, None | Some(Finish::Length));
        if may_stop && item.token.is_some() && self.is_stopped() {
            item.finish = Some(Finish::Stop);
        }
        if let Some(usage) = &mut item.usage {
            let before = self.before as u64;
            usage.prompt_tokens = usage.prompt_tokens.saturating_sub(before);
            usage.cached_tokens = usage.cached_tokens.min(usage.prompt_tokens);
            usage.completion_tokens += before;
        }
    }

    /// The present upstream has failed. `Ok`: the stream goes on elsewhere, with [`Self::work`].
    ///
    /// # Errors
    /// What the caller is told, and the stream is over: another error than a loss, or a loss that cannot be made good.
    pub fn failed(&mut self, fault: Fault) -> Result<(), Fault> {
        if !is_loss(fault.reason) {
            return Err(fault);
        }
        let new = self.given() > self.before;
        self.in_vain = if new { 0 } else { self.in_vain + 1 };
        if self.in_vain > IN_VAIN_MAX {
            let why = "the upstream was lost, and the one that was asked instead, too; try again";
            return Err(Fault::new(Reason::UpstreamError, why));
        }
        if self.given() > 0 && !self.is_continued() {
            let why = "the upstream was lost, and a stream with penalties, stop texts or a promised seed cannot go on \
                       at another one; try again";
            return Err(Fault::new(Reason::UpstreamError, why));
        }
        self.before = self.given();
        Ok(())
    }

    fn given(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether another upstream would give what the first would have: whatever looks back at the output must not
    /// see a difference between prompt and output.
    fn is_continued(&self) -> bool {
        let Work::Generate(wanted) = &self.work else {
            return true;
        };
        let is_free = wanted.presence_penalty == 0.0
            && wanted.frequency_penalty == 0.0
            && wanted.repetition_penalty == 1.0
            && wanted.stop.is_empty();
        is_free && (self.seeded || wanted.seed.is_none() || wanted.temperature == 0.0)
    }

    /// The output ends with one of the sequences that stop it.
    fn is_stopped(&self) -> bool {
        let Work::Generate(wanted) = &self.work else {
            return false;
        };
        let output = &self.tokens[self.prompt..];
        let mut stops = wanted.stop_tokens.iter();
        output.len() >= wanted.min_tokens as usize
            && stops.any(|stop| !stop.is_empty() && output.ends_with(stop))
    }
}

/// The upstream has gone, or is going; the request is as good as it was.
const fn is_loss(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::ConnectionLost | Reason::Draining | Reason::EngineDead
    )
}

/// A stream is sent again once, from wherever it has come to.
const IN_VAIN_MAX: u32 = 1;
