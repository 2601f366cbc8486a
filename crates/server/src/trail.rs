//! What a request leaves behind in the logs: the span of its lines, and what models did for it (OA-804).
//!
//! Owns: [`Trail`], how it goes with the request's work from task to task, and its [`Sums`]. Refuses to know: who
//! writes the lines; no payload comes by here.
//!
//! ```text
//!   gate ─► route, answer's body ─► tasks begun for them (`carry`)      all within one trail
//!                                      └─ calls of models add to its sums ─► access line
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sapwood_kernel::{Name, Usage};
use tracing::{Instrument, Span};

tokio::task_local! {
    static PRESENT: Trail;
}

/// The trail of one request; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Trail {
    span: Span,
    sums: Arc<Mutex<Sums>>,
}

/// What models did for one request: a session may call several, and each often.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    /// The models that were called, each once; there are no more than the kernel knows.
    pub(crate) models: Vec<Name>,
    /// From the beginning of a call to its first output, for the first call that had one.
    pub(crate) first_output: Option<Duration>,
    /// What the calls cost, as far as their models said; a call that is cut short says nothing.
    pub(crate) usage: Option<Usage>,
}

impl Trail {
    pub(crate) fn new(span: Span) -> Self {
        Self {
            span,
            sums: Arc::default(),
        }
    }

    /// The trail of the request that is being worked for, if any is.
    pub(crate) fn present() -> Option<Self> {
        PRESENT.try_with(Self::clone).ok()
    }

    /// `work` within this trail.
    pub(crate) async fn follow<F: Future>(self, work: F) -> F::Output {
        let span = self.span.clone();
        PRESENT.scope(self, work.instrument(span)).await
    }

    /// What is done at once within this trail.
    pub(crate) fn within<R>(&self, act: impl FnOnce() -> R) -> R {
        let _entered = self.span.enter();
        PRESENT.sync_scope(self.clone(), act)
    }

    /// What has come together so far.
    pub(crate) fn sums(&self) -> Sums {
        self.lock().clone()
    }

    /// A model is called.
    pub(crate) fn called(&self, model: &Name) {
        let models = &mut self.lock().models;
        if !models.contains(model) {
            models.push(model.clone());
        }
    }

    /// The call of a model has its first output, so long after its beginning.
    pub(crate) fn first_output(&self, after: Duration) {
        self.lock().first_output.get_or_insert(after);
    }

    /// The call of a model has cost this.
    pub(crate) fn cost(&self, usage: Usage) {
        let sum = &mut self.lock().usage;
        let sum = sum.get_or_insert_default();
        sum.prompt_tokens += usage.prompt_tokens;
        sum.cached_tokens += usage.cached_tokens;
        sum.completion_tokens += usage.completion_tokens;
    }

    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `work` for a task of its own, within the trail of the request that begins it.
pub(crate) fn carry<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let trail = Trail::present();
    async move {
        match trail {
            Some(trail) => trail.follow(work).await,
            None => work.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_begun_for_a_request_adds_to_its_sums() {
        let trail = Trail::new(Span::none());
        let work = async {
            let work = carry(async {
                let trail = Trail::present().unwrap();
                trail.called(&Name::new("parrot"));
                trail.cost(Usage::of(3, 4));
            });
            tokio::spawn(work).await.unwrap();
        };
        trail.clone().follow(work).await;
        trail.within(|| Trail::present().unwrap().called(&Name::new("parrot")));
        trail.cost(Usage::of(1, 1));
        for milliseconds in [7, 9] {
            trail.first_output(Duration::from_millis(milliseconds));
        }
        let expect = Sums {
            models: vec![Name::new("parrot")],
            first_output: Some(Duration::from_millis(7)),
            usage: Some(Usage::of(4, 5)),
        };
        assert_eq!(trail.sums(), expect);
        assert!(Trail::present().is_none());
        assert_eq!(carry(async { 1 }).await, 1);
    }
}
