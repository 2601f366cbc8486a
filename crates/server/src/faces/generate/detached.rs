//! Resumable streams: they continue without a connection, and their client reconnects by name (TR-1303).
//!
//! ```text
//!   events ─► task ─► channel ─► the response to the request
//!                         └────► the response to a client that reconnects by name, when the first is lost
//! ```

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use http::StatusCode;
use sapwood_proto::code::Code;
use sapwood_proto::generate::error_event;
use sapwood_proto::replay::ReplayGap;
use tokio_util::task::AbortOnDropHandle;

use super::event_channel::{EventChannel, EventReader, ReadRefused};
use super::events::EventStream;
use super::options::Config;
use super::replay::StreamEnd;
use super::request_end::{EarlyEnd, RequestEnd};
use super::request_error::RequestError;
use super::running;
use crate::auth::identity::CallerIdentity;
use crate::http::request_trace;
use crate::ops::drain::Drain;
use crate::resume::{RegistryGuard, ResumeRegistry, SecretToken, TokenFormat};

/// Names of 256 random bits.
const NAMES: TokenFormat = TokenFormat {
    prefix: "st_",
    bytes: 32,
};

/// The resumable streams.
pub(super) struct Streams {
    retained: Arc<ResumeRegistry<DetachedStream>>,
    bytes: usize,
    grace: Duration,
    drain: Drain,
}

/// A stream and its task, which is aborted with the server, or when its place is needed for another stream.
struct DetachedStream {
    channel: Arc<EventChannel>,
    ending: RequestEnd,
    _task: AbortOnDropHandle<()>,
}

/// A stream's registration.
pub(super) struct StreamRegistration<'a> {
    streams: &'a Streams,
    token: SecretToken,
    guard: RegistryGuard<DetachedStream>,
}

impl Streams {
    pub(super) fn new(config: &Config, drain: Drain) -> Self {
        let (most, most_each) = (config.resumable_streams, config.resumable_streams_each);
        Self {
            retained: Arc::new(ResumeRegistry::new(NAMES, most, most_each)),
            bytes: config.resume_bytes,
            grace: config.resume_grace,
            drain,
        }
    }

    /// Registers a stream of this caller; `None` where there is no room for another. A stream that was read to its end
    /// makes room.
    pub(super) fn registration(&self, identity: &CallerIdentity) -> Option<StreamRegistration<'_>> {
        // Only where there is no room: a stream that was read to its end is kept as long as possible, because its last
        // bytes may still be lost on the way to the client.
        let issued = self.retained.issue(identity).or_else(|| {
            self.retained
                .spare(identity, |stored| stored.channel.spare_since());
            self.retained.issue(identity)
        });
        let (token, guard) = issued?;
        let streams = self;
        Some(StreamRegistration {
            streams,
            token,
            guard,
        })
    }

    /// Continues the stream of this name after this event. Its present reader is cut off. `None`: there is nothing more,
    /// and it ended well.
    ///
    /// # Errors
    /// Why that is not possible; then no reader is cut off.
    pub(super) fn read(
        &self,
        name: &str,
        identity: &CallerIdentity,
        after: u64,
    ) -> Result<Option<EventReader>, RequestError> {
        match self.channel(name, identity)?.read(after, self.drain.hold()) {
            Ok(reader) => Ok(Some(reader)),
            Err(removed) => check_position(removed, after).map(|()| None),
        }
    }

    /// Whether there is anything to be read. Changes nothing.
    ///
    /// # Errors
    /// As [`Streams::read`].
    pub(super) fn look(
        &self,
        name: &str,
        identity: &CallerIdentity,
        after: u64,
    ) -> Result<bool, RequestError> {
        match self.channel(name, identity)?.follows(after) {
            Ok(()) => Ok(true),
            Err(removed) => check_position(removed, after).map(|()| false),
        }
    }

    /// Ends the stream of this name, and removes it.
    ///
    /// # Errors
    /// `not-found`.
    pub(super) fn cancel(&self, name: &str, identity: &CallerIdentity) -> Result<(), RequestError> {
        let stored = |stored: &DetachedStream| (Arc::clone(&stored.channel), stored.ending.clone());
        let stored = self.retained.back(name, identity, stored);
        let (channel, ending) = stored.ok_or_else(unknown)?;
        // Before the cancellation, which drops the responses: their drop would count a client that has disconnected.
        ending.decide(Some(EarlyEnd::Delete));
        channel.cancel(&error_event(&running::cancelled().message));
        Ok(())
    }

    /// The channel of a stream. Unknown, ended and foreign streams have the same error (D-29).
    fn channel(
        &self,
        name: &str,
        identity: &CallerIdentity,
    ) -> Result<Arc<EventChannel>, RequestError> {
        let channel = self
            .retained
            .back(name, identity, |stored| Arc::clone(&stored.channel));
        channel.ok_or_else(unknown)
    }
}

impl StreamRegistration<'_> {
    /// The stream's name.
    pub(super) fn name(&self) -> &str {
        self.token.text()
    }

    /// Lets the stream continue in a task of its own; returns its first reader.
    pub(super) fn keep(self, events: EventStream, ending: RequestEnd) -> EventReader {
        let Self {
            streams,
            token,
            guard,
        } = self;
        let drain = streams.drain.clone();
        let (channel, reader) = EventChannel::new(streams.bytes, drain.hold());
        // Within the trace of its request while it produces events, and not while it is only retained.
        let pushing = request_trace::carry(push(Arc::clone(&channel), events));
        let ended = TaskEndGuard {
            channel: Arc::clone(&channel),
            _registration: guard,
        };
        let grace = streams.grace;
        // The task may end before `keep` below. Then its guard has removed the entry already, `keep` finds none, and
        // drops the handle of a task that is over.
        let task = tokio::spawn(async move { live(&ended, pushing, grace, &drain).await });
        let _task = AbortOnDropHandle::new(task);
        let stored = DetachedStream {
            channel,
            ending,
            _task,
        };
        streams.retained.keep(&token, stored);
        reader
    }
}

/// Ends the stream when its task ends, however that happens.
struct TaskEndGuard {
    channel: Arc<EventChannel>,
    _registration: RegistryGuard<DetachedStream>,
}

impl Drop for TaskEndGuard {
    fn drop(&mut self) {
        // The end comes before the stream is given up: the present reader finds the end (a cut, if the stream has none
        // of its own), and no new one is let in. The token is removed last, with the field.
        self.channel.end(StreamEnd::Cut);
        self.channel.give_up();
    }
}

/// Runs as long as a reader may reconnect.
async fn live(
    ended: &TaskEndGuard,
    pushing: impl Future<Output = ()>,
    grace: Duration,
    drain: &Drain,
) {
    let deserted = ended.channel.deserted(grace, drain);
    tokio::pin!(deserted);
    // Biased, so that a stream that was given up produces nothing more. Both can be polled again after they were left.
    tokio::select! {
        biased;
        () = &mut deserted => return,
        () = pushing => {}
    }
    deserted.await;
}

async fn push(channel: Arc<EventChannel>, mut events: EventStream) {
    loop {
        // Awaited before the next event is polled: the model waits while its reader is behind, instead of filling
        // memory.
        channel.room().await;
        match events.next().await {
            Some(Ok(event)) => channel.push(&event),
            Some(Err(_cut)) => return channel.end(StreamEnd::Cut),
            None => return channel.end(StreamEnd::Well),
        }
    }
}

/// The error of a reader that cannot continue: none where all was read.
fn check_position(removed: ReadRefused, after: u64) -> Result<(), RequestError> {
    match removed {
        ReadRefused::Nothing => Ok(()),
        ReadRefused::Over => Err(unknown()),
        ReadRefused::Behind(ReplayGap::Unsaid) => {
            let message = format!("event {after} of this stream has not been sent");
            Err(RequestError::new(Code::InvalidRequest, message))
        }
        ReadRefused::Behind(ReplayGap::Evicted(first)) => {
            let message = format!("event {first} of this stream is no longer kept");
            let failure = RequestError::new(Code::FailedPrecondition, message);
            Err(failure.with_status(StatusCode::GONE))
        }
    }
}

fn unknown() -> RequestError {
    RequestError::new(Code::NotFound, "there is no stream of this id to resume")
}

#[cfg(test)]
mod tests;
