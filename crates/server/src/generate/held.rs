//! Streams that outlive their connections (TR-1303).
//!
//! Owns: [`Streams`]: the task that each goes on in, its end, and what comes of whoever comes back. Refuses to know: places and
//! names (`crate::held`), what is kept of a stream (`tape`), its readers (`line`).
//!
//! ```text
//!   events ─► task ─► line ─► the answer of the request
//!                      └────► that of whoever comes with its name, when the first is lost
//! ```

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use http::StatusCode;
use sapwood_proto::code::Code;
use sapwood_proto::generate::error_event;
use tokio_util::task::AbortOnDropHandle;

use super::ending::{Early, Ending};
use super::events::Events;
use super::failure::Failure;
use super::line::{Gone, Line, Reader};
use super::options::Config;
use super::running;
use super::tape::{Behind, End};
use crate::caller::Identity;
use crate::drain::Drain;
use crate::held::{Held, Kind, Stay, Token};
use crate::trail;

/// Names of 256 random bits.
const NAMES: Kind = Kind {
    prefix: "st_",
    bytes: 32,
};

/// The streams that can be come back to.
pub(super) struct Streams {
    held: Arc<Held<Kept>>,
    bytes: usize,
    grace: Duration,
    drain: Drain,
}

/// The way to a stream, and its task; it is aborted with the server, and where its place is needed.
struct Kept {
    line: Arc<Line>,
    ending: Ending,
    _task: AbortOnDropHandle<()>,
}

/// A stream's place among those that can be come back to.
pub(super) struct Place<'a> {
    streams: &'a Streams,
    token: Token,
    stay: Stay<Kept>,
}

impl Streams {
    pub(super) fn new(config: &Config, drain: Drain) -> Self {
        let (most, most_each) = (config.resumable_streams, config.resumable_streams_each);
        Self {
            held: Arc::new(Held::new(NAMES, most, most_each)),
            bytes: config.resume_bytes,
            grace: config.resume_grace,
            drain,
        }
    }

    /// A place for a stream of `visitor`; `None` where there is no room for another. What was read to its end makes room.
    pub(super) fn place(&self, visitor: &Identity) -> Option<Place<'_>> {
        let issued = self.held.issue(visitor).or_else(|| {
            self.held.spare(visitor, |kept| kept.line.spare_since());
            self.held.issue(visitor)
        });
        let (token, stay) = issued?;
        let streams = self;
        Some(Place {
            streams,
            token,
            stay,
        })
    }

    /// Reads the stream of this name on, behind this event. Whoever has read until now is cut. `None`: there is nothing more,
    /// and it ended well.
    ///
    /// # Errors
    /// Why that cannot be; then nobody is cut.
    pub(super) fn read(
        &self,
        name: &str,
        visitor: &Identity,
        after: u64,
    ) -> Result<Option<Reader>, Failure> {
        match self.line(name, visitor)?.read(after, self.drain.hold()) {
            Ok(reader) => Ok(Some(reader)),
            Err(gone) => told(gone, after).map(|()| None),
        }
    }

    /// Whether there is anything to be read, and nothing else.
    ///
    /// # Errors
    /// As [`Streams::read`].
    pub(super) fn look(&self, name: &str, visitor: &Identity, after: u64) -> Result<bool, Failure> {
        match self.line(name, visitor)?.follows(after) {
            Ok(()) => Ok(true),
            Err(gone) => told(gone, after).map(|()| false),
        }
    }

    /// Ends the stream of this name, and forgets it.
    ///
    /// # Errors
    /// `not-found`.
    pub(super) fn cancel(&self, name: &str, visitor: &Identity) -> Result<(), Failure> {
        let kept = |kept: &Kept| (Arc::clone(&kept.line), kept.ending.clone());
        let kept = self.held.back(name, visitor, kept);
        let (line, ending) = kept.ok_or_else(unknown)?;
        ending.decide(Some(Early::Delete));
        line.cancel(&error_event(&running::cancelled().message));
        Ok(())
    }

    /// Unknown, over and somebody else's are one answer.
    fn line(&self, name: &str, visitor: &Identity) -> Result<Arc<Line>, Failure> {
        let line = self.held.back(name, visitor, |kept| Arc::clone(&kept.line));
        line.ok_or_else(unknown)
    }
}

impl Place<'_> {
    /// What the stream is called.
    pub(super) fn name(&self) -> &str {
        self.token.text()
    }

    /// Has the stream go on by itself, and gives its first reader.
    pub(super) fn keep(self, events: Events, ending: Ending) -> Reader {
        let Self {
            streams,
            token,
            stay,
        } = self;
        let drain = streams.drain.clone();
        let (line, reader) = Line::new(streams.bytes, drain.hold());
        // Within the trail of its request for as long as it says anything, and not while it is only kept.
        let saying = trail::carry(say(Arc::clone(&line), events));
        let ended = Ended {
            line: Arc::clone(&line),
            _stay: stay,
        };
        let grace = streams.grace;
        let task = tokio::spawn(async move { live(&ended, saying, grace, &drain).await });
        let _task = AbortOnDropHandle::new(task);
        let kept = Kept {
            line,
            ending,
            _task,
        };
        streams.held.keep(&token, kept);
        reader
    }
}

/// The end of a stream's task, however it comes: nobody waits for more.
struct Ended {
    line: Arc<Line>,
    _stay: Stay<Kept>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.line.end(End::Cut);
        self.line.give_up();
    }
}

/// As long as anybody may come back.
async fn live(ended: &Ended, saying: impl Future<Output = ()>, grace: Duration, drain: &Drain) {
    let deserted = ended.line.deserted(grace, drain);
    tokio::pin!(deserted);
    // Both may be cancelled: what nobody wants is not said, and what was not awaited can be awaited again. Who is not
    // wanted says nothing more.
    tokio::select! {
        biased;
        () = &mut deserted => return,
        () = saying => {}
    }
    deserted.await;
}

async fn say(line: Arc<Line>, mut events: Events) {
    loop {
        line.room().await;
        match events.next().await {
            Some(Ok(event)) => line.say(&event),
            Some(Err(_cut)) => return line.end(End::Cut),
            None => return line.end(End::Well),
        }
    }
}

/// What somebody is told who cannot read on: nothing where all was read.
fn told(gone: Gone, after: u64) -> Result<(), Failure> {
    match gone {
        Gone::Nothing => Ok(()),
        Gone::Over => Err(unknown()),
        Gone::Behind(Behind::Unsaid) => {
            let message = format!("event {after} of this stream has not been sent");
            Err(Failure::new(Code::InvalidRequest, message))
        }
        Gone::Behind(Behind::Forgotten(first)) => {
            let message = format!("event {first} of this stream is no longer kept");
            let failure = Failure::new(Code::FailedPrecondition, message);
            Err(failure.with_status(StatusCode::GONE))
        }
    }
}

fn unknown() -> Failure {
    Failure::new(
        Code::NotFound,
        "there is no stream of this id to come back to",
    )
}

#[cfg(test)]
mod tests;
