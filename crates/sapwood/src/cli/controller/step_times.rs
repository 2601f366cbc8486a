//! [`TimedSteer`]: how long a controller takes for each step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::steer::{
    Appended, Begun, Mid, Post, Pre, Steer, Steered, StepReport, StepWaker, Token,
};

/// The times of the steps of one request, forks included.
#[derive(Clone, Debug, Default)]
pub(super) struct StepTimes(Arc<Mutex<Vec<Duration>>>);

impl StepTimes {
    /// How many steps there were, their median, and the longest; `None` if there was none.
    pub(super) fn summary(&self) -> Option<(usize, Duration, Duration)> {
        let mut times = self.lock().clone();
        times.sort_unstable();
        let most = *times.last()?;
        Some((times.len(), times[times.len() / 2], most))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Passes everything on, and measures from the first question of a step to the last answer.
pub(super) struct TimedSteer {
    steer: Box<dyn Steer>,
    times: StepTimes,
    /// What `pre` took in this step.
    pre: Duration,
    /// Since when an answer is awaited.
    asked: Option<Instant>,
}

impl TimedSteer {
    pub(super) fn new(steer: Box<dyn Steer>, times: &StepTimes) -> Self {
        Self {
            steer,
            times: times.clone(),
            pre: Duration::ZERO,
            asked: None,
        }
    }

    fn answered(&mut self) -> Duration {
        self.asked
            .take()
            .map_or(Duration::ZERO, |asked| asked.elapsed())
    }
}

impl Steer for TimedSteer {
    fn begin(&mut self, prompt: &[Token], waker: &Arc<dyn StepWaker>) {
        self.steer.begin(prompt, waker);
    }

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        self.steer.begin_poll()
    }

    fn bind(&mut self, number: u32) {
        self.steer.bind(number);
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        self.asked.get_or_insert_with(Instant::now);
        let pre = self.steer.pre()?;
        if pre.is_some() {
            self.pre = self.answered();
        }
        Ok(pre)
    }

    fn mid_begin(&mut self, group: &[u32]) {
        self.asked = Some(Instant::now());
        self.steer.mid_begin(group);
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let mid = self.steer.mid_poll()?;
        if mid.is_some() {
            let took = std::mem::take(&mut self.pre) + self.answered();
            self.times.lock().push(took);
        }
        Ok(mid)
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        self.steer.post(appended)
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let steer = self.steer.fork(index)?;
        Ok(Box::new(Self::new(steer, &self.times)))
    }

    fn would_accept(&mut self, backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        self.steer.would_accept(backtrack, tokens)
    }

    fn ends_at_eos(&self) -> bool {
        self.steer.ends_at_eos()
    }

    fn may_backtrack(&self) -> bool {
        self.steer.may_backtrack()
    }

    fn take_report(&mut self) -> Option<StepReport> {
        self.steer.take_report()
    }
}
