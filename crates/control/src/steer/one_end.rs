//! [`OneEnd`]: a controller of a model several of whose tokens end a text.
//!
//! The interface of controllers has one end-of-sequence token, but models have several: a model that ends a turn with
//! `<|im_end|>` may as well end it with `<|endoftext|>`. A controller that only looks for its one would go on after the other,
//! and a mask that allows only its one would forbid the token with which the model ends. So all of them are that one to a
//! controller.

use std::sync::Arc;

use sapwood_proto::steer::{
    Appended, Begun, Branch, Mid, Post, Pre, Steer, Steered, StepReport, StepWaker, Token,
};

/// The tokens that end a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// The one that controllers know.
    pub known: Token,
    /// The others.
    pub others: Vec<Token>,
}

/// A steerer that knows one end, in the place of one that knows all.
pub struct OneEnd {
    inner: Box<dyn Steer>,
    ends: Arc<Ends>,
    /// The other ends with which the controller itself has just asked a text to go on: it knows them.
    own: Vec<Token>,
}

impl OneEnd {
    /// A steerer for which all ends are the one that it knows.
    #[must_use]
    pub fn open(inner: Box<dyn Steer>, ends: Arc<Ends>) -> Box<dyn Steer> {
        if ends.others.is_empty() {
            return inner;
        }
        Box::new(Self {
            inner,
            ends,
            own: Vec::new(),
        })
    }

    /// Notes tokens that the controller appends.
    fn note_own(&mut self, tokens: &[Token]) {
        if let Some(end) = self.other_end(tokens) {
            self.own.push(end);
        }
    }

    fn note_branch(&mut self, branch: &Branch) {
        match branch {
            Branch::Splice(splice) => self.note_own(&splice.tokens),
            Branch::Sample(sample) => {
                for conditional in &sample.splices {
                    self.note_own(&conditional.splice.tokens);
                }
            }
            Branch::Noop => {}
        }
    }

    /// The end of `tokens`, if it is one that the controller does not know.
    fn other_end(&self, tokens: &[Token]) -> Option<Token> {
        let last = tokens.last()?;
        self.ends.others.contains(last).then_some(*last)
    }

    /// `tokens` with the known end in the place of another.
    fn with_known_end(&self, tokens: &[Token]) -> Option<Vec<Token>> {
        self.other_end(tokens)?;
        let (_, before) = tokens.split_last()?;
        Some([before, &[self.ends.known]].concat())
    }

    /// Where the one is allowed, all are.
    fn widen(&self, branch: &mut Branch) {
        let Branch::Sample(sample) = branch else {
            return;
        };
        if let Some(mask) = &mut sample.mask
            && mask.allows(self.ends.known)
            && !self.ends.others.iter().all(|end| mask.allows(*end))
        {
            let mask = Arc::make_mut(mask);
            self.ends.others.iter().for_each(|end| mask.allow(*end));
        }
        for splice in &mut sample.splices {
            if splice.when_sampled.contains(&self.ends.known) {
                splice.when_sampled.extend_from_slice(&self.ends.others);
            }
        }
    }
}

impl Steer for OneEnd {
    fn seed(&mut self, seed: u64) {
        self.inner.seed(seed);
    }

    fn begin(&mut self, prompt: &[Token], waker: &Arc<dyn StepWaker>) {
        self.inner.begin(prompt, waker);
    }

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        self.inner.begin_poll()
    }

    fn bind(&mut self, number: u32) {
        self.inner.bind(number);
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let pre = self.inner.pre()?;
        if let Some(Pre::Run { fast_forward }) = &pre {
            self.note_own(fast_forward);
        }
        Ok(pre)
    }

    fn mid_begin(&mut self, group: &[u32]) {
        self.inner.mid_begin(group);
    }

    fn best_tokens_wanted(&self) -> usize {
        self.inner.best_tokens_wanted()
    }

    fn show_best_tokens(&mut self, best: &[(Token, f32)]) {
        self.inner.show_best_tokens(best);
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let mut mid = self.inner.mid_poll()?;
        let branches = match &mut mid {
            Some(Mid::One(branch)) => std::slice::from_mut(branch),
            Some(Mid::Fork(branches)) => branches,
            Some(Mid::Stop) | None => &mut [],
        };
        for branch in branches {
            self.note_branch(branch);
            self.widen(branch);
        }
        Ok(mid)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let own = std::mem::take(&mut self.own);
        let is_other = |end: &Token| self.ends.others.contains(end);
        let sampled = appended.sampled.map(|token| {
            if is_other(&token) {
                self.ends.known
            } else {
                token
            }
        });
        // Sampled, or forced by another steerer of the same sequence. What it has forced itself it gets as it is.
        let is_own = appended.tokens != appended.sampled.as_slice()
            && appended.tokens.last().is_some_and(|it| own.contains(it));
        let mut tokens = if is_own {
            None
        } else {
            self.with_known_end(appended.tokens)
        };
        // A splice has kept the sampled token.
        if let [first, _, ..] = appended.tokens
            && appended.sampled == Some(*first)
            && is_other(first)
        {
            tokens.get_or_insert_with(|| appended.tokens.to_vec())[0] = self.ends.known;
        }
        self.inner.post(Appended {
            tokens: tokens.as_deref().unwrap_or(appended.tokens),
            sampled,
            ..appended
        })
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(Self {
            inner: self.inner.fork(index)?,
            ends: Arc::clone(&self.ends),
            own: self.own.clone(),
        }))
    }

    fn would_accept(&mut self, backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        match self.with_known_end(tokens) {
            Some(tokens) => self.inner.would_accept(backtrack, &tokens),
            None => self.inner.would_accept(backtrack, tokens),
        }
    }

    fn ends_at_eos(&self) -> bool {
        self.inner.ends_at_eos()
    }

    fn may_backtrack(&self) -> bool {
        self.inner.may_backtrack()
    }

    fn limits_itself(&self) -> bool {
        self.inner.limits_itself()
    }

    fn take_report(&mut self) -> Option<StepReport> {
        self.inner.take_report()
    }
}

#[cfg(test)]
mod tests;
