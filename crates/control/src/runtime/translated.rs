//! [`WireInstance`]: an instance of either generation of modules, behind the callbacks of the engine's generation (the table
//! after AI-609).
//!
//! | | P1 wire | P2 wire |
//! |---|---|---|
//! | P1 module | as it is | `post`, then `pre` with its loop, then `mid`, all in one `Process` |
//! | P2 module | its callback runs in `Pre`; what it decides is kept for `Mid` and `Post` | as it is |

mod p1_on_p2;
mod p2_on_p1;

use sapwood_proto::steer::StepReport;

use self::p1_on_p2::P1OnP2;
use self::p2_on_p1::P2OnP1;
use super::sequence::{CallFailure, Callback, Outcome, Returned, Sequence};

/// An instance on a wire.
#[derive(Debug)]
pub(crate) enum WireInstance<S> {
    /// Of the wire's own generation.
    Direct(S),
    /// A P1 module of a P2 engine.
    P1OnP2(P1OnP2<S>),
    /// A P2 module of a P1 engine.
    P2OnP1(P2OnP1<S>),
}

impl<S: Sequence> WireInstance<S> {
    /// A P1 module of a P2 engine, over a vocabulary of so many tokens.
    pub(crate) fn p1_on_p2(inner: S, vocabulary: usize) -> Self {
        Self::P1OnP2(P1OnP2::new(inner, vocabulary))
    }

    /// A P2 module of a P1 engine.
    pub(crate) fn p2_on_p1(inner: S) -> Self {
        Self::P2OnP1(P2OnP1::new(inner))
    }
}

impl<S: Sequence> Sequence for WireInstance<S> {
    fn bind(&mut self, id: u32) {
        match self {
            Self::Direct(inner) => inner.bind(id),
            Self::P1OnP2(inner) => inner.bind(id),
            Self::P2OnP1(inner) => inner.bind(id),
        }
    }

    fn call(&mut self, callback: Callback) {
        match self {
            Self::Direct(inner) => inner.call(callback),
            Self::P1OnP2(inner) => inner.call(callback),
            Self::P2OnP1(inner) => inner.call(callback),
        }
    }

    fn call_all<const N: usize>(&mut self, callbacks: [Callback; N]) {
        match self {
            Self::Direct(inner) => inner.call_all(callbacks),
            Self::P1OnP2(inner) => callbacks.into_iter().for_each(|it| inner.call(it)),
            Self::P2OnP1(inner) => callbacks.into_iter().for_each(|it| inner.call(it)),
        }
    }

    fn poll(&mut self) -> Option<Outcome> {
        match self {
            Self::Direct(inner) => inner.poll(),
            Self::P1OnP2(inner) => inner.poll(),
            Self::P2OnP1(inner) => inner.poll(),
        }
    }

    fn fork(&mut self) -> Result<Self, CallFailure> {
        Ok(match self {
            Self::Direct(inner) => Self::Direct(inner.fork()?),
            Self::P1OnP2(inner) => Self::P1OnP2(inner.fork()?),
            Self::P2OnP1(inner) => Self::P2OnP1(inner.fork()?),
        })
    }

    fn needs_mid_time(&self) -> bool {
        matches!(self, Self::P2OnP1(_))
    }
}

/// The outcome of a step that was made of several callbacks, or of none.
fn outcome(result: Result<Returned, CallFailure>, report: &mut StepReport) -> Outcome {
    Outcome {
        result,
        report: std::mem::take(report),
    }
}

#[cfg(test)]
mod tests;
