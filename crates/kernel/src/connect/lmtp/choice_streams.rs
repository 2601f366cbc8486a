//! The streams of one call at an LMTP server, one for each choice, merged into the events of a model.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_engine::Transcript;
use sapwood_engine::api::{FinishReason, Sampled};
use sapwood_net::lmtp::pool::{LmtpPool, PooledItems};
use sapwood_proto::code::Code;
use sapwood_proto::lmtp::{LmtpError, LmtpReason, ReceivedItem, StreamFinish};
use sapwood_proto::steer::Token;

use super::request::LmtpRequest;
use crate::Result;
use crate::error::Error;
use crate::model::AnswerEvent;
use crate::name::Name;

/// The streams of a call. Dropping them cancels those that still run.
pub(super) struct ChoiceStreams {
    /// By choice. A finished one is dropped, which ends the work for it at the server.
    streams: Vec<Option<PooledItems>>,
    /// The stream that is polled next, round robin.
    next: usize,
    transcript: Transcript,
    /// Tells whether the peers send values that are no probabilities.
    pool: LmtpPool,
    alternatives: u32,
    ready: VecDeque<AnswerEvent>,
}

impl ChoiceStreams {
    /// Starts one stream for each choice of `transcript`; none if nothing is to be generated.
    pub(super) fn new(asking: LmtpRequest, mut transcript: Transcript, alternatives: u32) -> Self {
        let (mut ready, mut streams) = (VecDeque::new(), Vec::new());
        for choice in 0..transcript.choices() {
            // Nothing is asked of a peer for no tokens; the answer is an empty one at its limit.
            if transcript.max_tokens() == 0 {
                let events = transcript.take(choice, None, Some(FinishReason::Length));
                ready.extend(events.into_iter().map(AnswerEvent::Event));
                continue;
            }
            streams.push(Some(asking.stream(choice)));
        }
        Self {
            streams,
            next: 0,
            transcript,
            pool: asking.pool,
            alternatives,
            ready,
        }
    }

    /// Handles an item of the stream of this choice.
    fn receive(&mut self, choice: u32, item: ReceivedItem) {
        if let Some(usage) = item.usage {
            let cached = u32::try_from(usage.cached_tokens).unwrap_or(u32::MAX);
            self.transcript.cached(cached);
        }
        let end = item.finish.as_ref().map(|finish| match finish {
            StreamFinish::Length => FinishReason::Length,
            StreamFinish::Controller => FinishReason::Controller,
            StreamFinish::Cancelled => FinishReason::Cancelled,
            StreamFinish::Stop | StreamFinish::Deadline | StreamFinish::Other(_) => {
                FinishReason::Stop
            }
        });
        let odd = match &item.finish {
            Some(finish @ (StreamFinish::Deadline | StreamFinish::Other(_))) => {
                Some(Name::shared(finish.name()))
            }
            _ => None,
        };
        // Before the events of the transcript, because it names the finish that comes with them.
        self.ready
            .extend(odd.map(|name| AnswerEvent::Odd(choice, name)));
        let token = item.token.map(|id| self.sampled(id, item));
        let events = self.transcript.take(choice, token, end);
        self.ready
            .extend(events.into_iter().map(AnswerEvent::Event));
    }

    /// A token in the form that engines emit. Invalid probabilities are not passed on (LM-711).
    fn sampled(&self, id: Token, item: ReceivedItem) -> Sampled {
        let raw = self.pool.raw_logprobs();
        let mut top = if raw { Vec::new() } else { item.top };
        top.sort_by(|(a, p), (b, q)| q.total_cmp(p).then(a.cmp(b)));
        top.truncate(self.alternatives as usize);
        Sampled {
            id,
            logprob: item.logprob.filter(|_| !raw).unwrap_or(f32::NAN),
            rank: None,
            top,
            special: false,
            forced: false,
        }
    }
}

impl Stream for ChoiceStreams {
    type Item = Result<AnswerEvent>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(reported) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(reported)));
            }
            let (mut open, mut received) = (false, false);
            for _ in 0..this.streams.len() {
                let at = this.next % this.streams.len();
                this.next = at + 1;
                let Some(stream) = &mut this.streams[at] else {
                    continue;
                };
                open = true;
                // There are at most 64.
                let choice = u32::try_from(at).unwrap_or(u32::MAX);
                match stream.poll_next_unpin(cx) {
                    Poll::Pending => continue,
                    Poll::Ready(Some(Ok(item))) => {
                        this.receive(choice, item);
                    }
                    Poll::Ready(Some(Err(cause))) => {
                        return Poll::Ready(Some(Err(to_kernel_error(cause))));
                    }
                    // A lost stream reports an error itself; an end without a finish truncates the answer.
                    Poll::Ready(None) => return Poll::Ready(None),
                }
                // The transcript may end before the peer does: stop texts are matched here (LM-704).
                if this.transcript.is_over(choice) {
                    this.streams[at] = None;
                }
                received = true;
                break;
            }
            if !open {
                return Poll::Ready(None);
            }
            // Every open stream has been polled and has this task's waker.
            if !received {
                return Poll::Pending;
            }
        }
    }
}

/// Converts an LMTP error. If no server is available at the moment, nothing was requested, so it is not reported as a
/// failure of a server (LM-804).
fn to_kernel_error(error: LmtpError) -> Error {
    let nobody = error.reason == LmtpReason::UpstreamError && error.retry_after.is_some();
    Error::Remote {
        code: if nobody {
            Code::Unavailable
        } else {
            error.reason.code()
        },
        reason: Name::shared(error.reason.name()),
        retryable: error.reason.is_retryable(),
        retry_after: error.retry_after,
        message: error.message.into_owned(),
    }
}
