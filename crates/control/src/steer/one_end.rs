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
}

impl OneEnd {
    /// A steerer for which all ends are the one that it knows.
    #[must_use]
    pub fn open(inner: Box<dyn Steer>, ends: Arc<Ends>) -> Box<dyn Steer> {
        if ends.others.is_empty() {
            return inner;
        }
        Box::new(Self { inner, ends })
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
        self.inner.pre()
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
        match &mut mid {
            Some(Mid::One(branch)) => self.widen(branch),
            Some(Mid::Fork(branches)) => branches.iter_mut().for_each(|branch| self.widen(branch)),
            Some(Mid::Stop) | None => {}
        }
        Ok(mid)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let other = appended
            .sampled
            .filter(|end| self.ends.others.contains(end));
        let Some(end) = other else {
            return self.inner.post(appended);
        };
        let known = [self.ends.known];
        // After a splice they are the controller's own tokens, which it knows.
        let is_appended = appended.tokens == [end];
        self.inner.post(Appended {
            tokens: if is_appended { &known } else { appended.tokens },
            sampled: Some(self.ends.known),
            ..appended
        })
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Self::open(self.inner.fork(index)?, Arc::clone(&self.ends)))
    }

    fn would_accept(&mut self, backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        self.inner.would_accept(backtrack, tokens)
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
