//! [`Player`]: steers some sequences as the engine's thread does, without an engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use sapwood_proto::steer::{Appended, Mid, Pre, Steer, StepWaker, Token};

use super::gate::Gate;

/// Sequences that are stepped together.
pub struct Player {
    steers: Vec<Box<dyn Steer>>,
    gate: Arc<Gate>,
    /// How long the last forward pass took.
    decode: Duration,
    /// Buffers of a step.
    missing: Vec<usize>,
}

impl Player {
    /// Begins the sequences.
    ///
    /// # Errors
    /// One of them fails.
    pub fn begin(mut steers: Vec<Box<dyn Steer>>) -> Result<Self> {
        let gate = Gate::here();
        let waker: Arc<dyn StepWaker> = Arc::clone(&gate) as _;
        for (number, steer) in (1..).zip(&mut steers) {
            steer.begin(&[1, 300, 301], &waker);
            gate.wait(|| Ok(steer.begin_poll()?))?;
            steer.bind(number);
        }
        Ok(Self {
            steers,
            gate,
            decode: Duration::ZERO,
            missing: Vec::new(),
        })
    }

    /// The waker of its steerers.
    #[must_use]
    pub fn waker(&self) -> Arc<dyn StepWaker> {
        Arc::clone(&self.gate) as _
    }

    /// One step, in which each sequence samples `token`: `pre` of all, `mid` of all, `post` of all. Returns how long it
    /// took. `between` is called where the engine would compute.
    ///
    /// # Errors
    /// A steerer fails, or does something else than to sample.
    pub fn step(&mut self, token: Token, mut between: impl FnMut()) -> Result<Duration> {
        let begin = Instant::now();
        self.gather(|steer| match steer.pre()? {
            Some(Pre::Run { .. }) => Ok(true),
            None => Ok(false),
            other => bail!("not a step: {other:?}"),
        })?;
        for (number, steer) in (1..).zip(&mut self.steers) {
            steer.mid_begin(&[number]);
        }
        let pass = Instant::now();
        between();
        self.decode = pass.elapsed();
        self.gather(|steer| match steer.mid_poll()? {
            Some(Mid::One(branch)) => {
                std::hint::black_box(branch);
                Ok(true)
            }
            None => Ok(false),
            other => bail!("not a sample: {other:?}"),
        })?;
        for steer in &mut self.steers {
            steer.post(Appended {
                backtrack: 0,
                tokens: &[token],
                sampled: Some(token),
            })?;
        }
        Ok(begin.elapsed())
    }

    /// Polls each steerer until it has a result.
    fn gather(&mut self, mut poll: impl FnMut(&mut dyn Steer) -> Result<bool>) -> Result<()> {
        let Self {
            steers,
            gate,
            decode,
            missing,
        } = self;
        missing.clear();
        missing.extend(0..steers.len());
        gate.wait_beside(*decode, || {
            let mut failed = None;
            missing.retain(|&index| match poll(steers[index].as_mut()) {
                Ok(done) => !done,
                Err(error) => {
                    failed = Some(error);
                    false
                }
            });
            match failed {
                Some(error) => Err(error),
                None => Ok(missing.is_empty().then_some(())),
            }
        })
    }
}
