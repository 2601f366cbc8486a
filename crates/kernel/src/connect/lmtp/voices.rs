//! The streams of one call at a peer, as what a model tells.
//!
//! Owns: [`Voices`]: one stream for each choice, read in turn, and what its items are to whoever asked. Refuses to know: what
//! was asked; chunks.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_engine::Transcript;
use sapwood_engine::api::{Reason, Sampled};
use sapwood_net::lmtp::pool::{Items, Pool};
use sapwood_proto::lmtp::{Fault, Finish, Received};
use sapwood_proto::steer::Token;

use crate::Result;
use crate::error::Error;
use crate::model::Told;
use crate::name::Name;

/// The streams. Dropping them abandons what still runs.
pub(super) struct Voices {
    /// By choice; one that is over is dropped, and with it what the peer does for it.
    streams: Vec<Option<Items>>,
    /// Whose turn it is.
    next: usize,
    transcript: Transcript,
    pool: Pool,
    alternatives: u32,
    ready: VecDeque<Told>,
}

impl Voices {
    /// One stream for each choice of `transcript`; none at all if nothing is to be computed.
    pub(super) fn new(
        streams: Vec<Items>,
        mut transcript: Transcript,
        pool: Pool,
        alternatives: u32,
    ) -> Self {
        let mut ready = VecDeque::new();
        if streams.is_empty() {
            for choice in 0..transcript.choices() {
                let events = transcript.take(choice, None, Some(Reason::Length));
                ready.extend(events.into_iter().map(Told::Event));
            }
        }
        Self {
            streams: streams.into_iter().map(Some).collect(),
            next: 0,
            transcript,
            pool,
            alternatives,
            ready,
        }
    }

    fn heard(&mut self, choice: u32, item: Received) {
        if let Some(usage) = item.usage {
            let cached = u32::try_from(usage.cached_tokens).unwrap_or(u32::MAX);
            self.transcript.cached(cached);
        }
        let end = item.finish.as_ref().map(|finish| match finish {
            Finish::Length => Reason::Length,
            Finish::Cancelled => Reason::Cancelled,
            Finish::Stop | Finish::Deadline | Finish::Superseded | Finish::Other(_) => Reason::Stop,
        });
        let odd = match &item.finish {
            Some(finish @ (Finish::Deadline | Finish::Superseded | Finish::Other(_))) => {
                Some(Name::shared(finish.name()))
            }
            _ => None,
        };
        self.ready.extend(odd.map(|name| Told::Odd(choice, name)));
        let token = item.token.map(|id| self.sampled(id, item));
        let events = self.transcript.take(choice, token, end);
        self.ready.extend(events.into_iter().map(Told::Event));
    }

    /// A token as engines give it. Probabilities that are none are not passed on (LM-711).
    fn sampled(&self, id: Token, item: Received) -> Sampled {
        let raw = self.pool.raw_logprobs();
        let mut top = if raw { Vec::new() } else { item.top };
        top.sort_by(|(a, p), (b, q)| q.total_cmp(p).then(a.cmp(b)));
        top.truncate(self.alternatives as usize);
        Sampled {
            id,
            logprob: item.logprob.filter(|_| !raw).unwrap_or(f32::NAN),
            top,
            special: false,
            forced: false,
        }
    }
}

impl Stream for Voices {
    type Item = Result<Told>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(told) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(told)));
            }
            let (mut open, mut heard) = (false, false);
            for _ in 0..this.streams.len() {
                let at = this.next % this.streams.len();
                this.next = at + 1;
                let Some(stream) = &mut this.streams[at] else {
                    continue;
                };
                open = true;
                // There are no more than 64.
                let choice = u32::try_from(at).unwrap_or(u32::MAX);
                match stream.poll_next_unpin(cx) {
                    Poll::Pending => continue,
                    Poll::Ready(Some(Ok(item))) => this.heard(choice, item),
                    Poll::Ready(Some(Err(fault))) => return Poll::Ready(Some(Err(told(fault)))),
                    // They say themselves that they were lost: the answer is cut short.
                    Poll::Ready(None) => return Poll::Ready(None),
                }
                if this.transcript.is_over(choice) {
                    this.streams[at] = None;
                }
                heard = true;
                break;
            }
            if !open {
                return Poll::Ready(None);
            }
            if !heard {
                return Poll::Pending;
            }
        }
    }
}

/// A fault as every other failure of a peer.
fn told(fault: Fault) -> Error {
    Error::Remote {
        code: fault.reason.code(),
        reason: Name::shared(fault.reason.name()),
        retryable: fault.reason.is_retryable(),
        retry_after: fault.retry_after,
        message: fault.message.into_owned(),
    }
}
