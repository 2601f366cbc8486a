//! One connection: the machine of the protocol, the work that it asks for, and the wire (LM-101).
//!
//! Owns: [`Conversation`], what is polled in which order, and how a connection ends. Refuses to know: what a wire is made of,
//! and what messages say.
//!
//! ```text
//!   wire ─ heard ─► session ─ Start, Cancel ─► works ─ what a step gave ─► session ─ one message ─► wire
//!   a long message ─► the session goes with it to a thread for slow work, and everything waits until it is back
//!   a drain, the clock, a peer that goes ─► session ─ last words ─► Close
//!   a peer that is lost ─► session, held ─ in a task of its own ─► another connection, or the end
//! ```

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use bytestring::ByteString;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use sapwood_kernel::pool::{Pool, Running, Size};
use sapwood_proto::lmtp::{self, Close, Output, Session, Unreadable};
use sapwood_proto::time::Time;
use tokio::sync::{oneshot, watch};
use tokio::time::{Sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::held::{self, Estate, Nowhere, Place};
use super::house::{Guest, House};
use super::tally::Tally;
use super::work::Work;
use super::works::{Sights, Works};
use crate::allowance::Allowance;
use crate::caller::Identity;
use crate::drain::Phase;
use crate::{revocation, trail};

/// Something that came over a wire.
#[derive(Debug)]
pub(super) enum Heard {
    /// One frame or line.
    Text(ByteString),
    /// Neither.
    Unreadable(Unreadable),
    /// What is passed over, and counted.
    Ignored,
    /// Nothing that can be told apart any more.
    Broken,
    /// There was no room for what comes (D-47).
    Overloaded,
    /// The client sends nothing more, and may still read.
    End,
    /// The client has said goodbye.
    Left,
    /// The client is gone.
    Gone,
}

/// The client is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone;

/// A transport, as a conversation needs it.
pub(super) trait Wire {
    /// What came next.
    fn poll_heard(&mut self, cx: &mut Context<'_>) -> Poll<Heard>;

    /// Resolves when the client is gone or dead. `deaf`: nothing is read now, and yet it is to be seen when it goes.
    fn poll_gone(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()>;

    /// Waits until a message can be sent without piling up.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Gone>>;

    /// Sends one, where there was room.
    fn send(&mut self, message: Bytes) -> Result<(), Gone>;

    /// Hands everything to the network.
    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Gone>>;
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// In order; the wire is to be closed so.
    Close(Close),
    /// The peer does not read: the wire is to be broken off.
    Reset,
    /// The client was gone first.
    Gone,
    /// The client is gone and may come back: go on with [`Conversation::wait`].
    Lost,
    /// Another connection has taken over.
    Taken,
}

/// A connection in progress. Dropping it drops everything that it runs.
pub(super) struct Conversation {
    house: Arc<House>,
    allowance: Option<Arc<Allowance>>,
    session: Session,
    works: Works,
    tally: Tally,
    /// Whose it is, where a client can come back.
    visitor: Option<Identity>,
    /// Its place among those that can be come back to.
    place: Option<Place>,
    /// What another connection has left for this one.
    coming: Option<oneshot::Receiver<Estate>>,
    /// There is no wire.
    apart: bool,
    /// The session is elsewhere with a long message: rendering and tokenising it may take long. What stands in its place
    /// meanwhile is nobody's, so nothing is done until it is back.
    reading: Option<Running<(Session, Option<ByteString>)>>,
    /// Text that the session had no room to answer.
    unread: Option<ByteString>,
    /// The client sends nothing more.
    heard_all: bool,
    /// Wakes for [`Session::wake_at`].
    timer: Option<Pin<Box<Sleep>>>,
    /// What of the drain comes next.
    drain: Option<(Phase, BoxFuture<'static, ()>)>,
    /// Tells that models have come, while streams wait for theirs.
    models: Option<BoxStream<'static, ()>>,
    /// Resolves when its key is no longer good.
    revoked: Option<BoxFuture<'static, ()>>,
}

impl Conversation {
    pub(super) fn new(house: &Arc<House>, guest: Guest) -> Self {
        let shared = &house.shared;
        let session = house.open(&guest);
        let allowance = guest.caller.as_ref();
        Self {
            allowance: allowance.and_then(|caller| caller.allowance.clone()),
            session,
            works: Works::new(),
            tally: Tally::begin(&shared.metrics, &shared.drain),
            visitor: guest.visitor,
            place: None,
            coming: None,
            apart: false,
            reading: None,
            unread: None,
            heard_all: false,
            timer: None,
            drain: Some(await_phase(house, Phase::Refusing)),
            models: None,
            revoked: Some(revocation::reached()),
            house: Arc::clone(house),
        }
    }

    /// Ends everything with last words (LM-505).
    pub(super) fn close(&mut self, close: Close, why: &'static str) {
        self.tally.cancelled(self.session.live(), why);
        self.session.close(close, self.now());
    }

    /// Whether any stream is open.
    pub(super) fn is_busy(&self) -> bool {
        self.reading.is_some() || self.session.live() + self.session.waiting() > 0
    }

    /// Talks over `wire` to the end.
    pub(super) async fn run(&mut self, wire: &mut impl Wire) -> End {
        std::future::poll_fn(|cx| self.poll_end(wire, cx)).await
    }

    /// Goes on without a client until one comes back for it (LM-964).
    pub(super) fn wait(mut self) {
        let Some(way) = self.place.as_ref().map(Place::way) else {
            return;
        };
        self.apart = true;
        self.tally.disconnected();
        let house = Arc::clone(&self.house);
        let task = tokio::spawn(trail::carry(async move {
            self.run(&mut Nowhere).await;
        }));
        way.keep(&house.held, AbortOnDropHandle::new(task));
    }

    /// Goes on as far as it can.
    pub(super) fn poll_end(&mut self, wire: &mut impl Wire, cx: &mut Context<'_>) -> Poll<End> {
        self.works.belong_to(cx);
        for _ in 0..ROUNDS {
            if self.poll_read(cx).is_pending() {
                // If the client is gone, that shows again when there is a session to tell.
                let _ = wire.poll_sent(cx);
                return Poll::Pending;
            }
            if self.poll_asked(cx).is_ready() {
                return Poll::Ready(End::Taken);
            }
            let heard = self.come(cx) | self.hear(wire, cx);
            if self.reading.is_some() {
                continue;
            }
            let seen = self.look();
            self.watch(cx);
            if let Some(end) = self.obey() {
                return Poll::Ready(self.ended(end));
            }
            let said = match self.say(wire, cx) {
                Ok(said) => said,
                Err(Gone) => return Poll::Ready(self.gone()),
            };
            // What was taken may have been the last thing to say, or have made room.
            if let Some(end) = self.obey() {
                return Poll::Ready(self.ended(end));
            }
            if !(heard || seen || said) {
                let deaf = !self.listens();
                if wire.poll_gone(deaf, cx).is_ready() {
                    return Poll::Ready(self.gone());
                }
                return match wire.poll_sent(cx) {
                    Poll::Ready(Err(Gone)) => Poll::Ready(self.gone()),
                    _ => Poll::Pending,
                };
            }
        }
        // Others get their turn.
        cx.waker().wake_by_ref();
        match wire.poll_sent(cx) {
            Poll::Ready(Err(Gone)) => Poll::Ready(self.gone()),
            _ => Poll::Pending,
        }
    }

    fn now(&self) -> Time {
        self.house.now()
    }

    /// Hands everything over to whoever asks for it.
    fn poll_asked(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(place) = &mut self.place else {
            return Poll::Pending;
        };
        let asking = std::task::ready!(place.poll_asked(cx));
        // What it counted leaves with it, and is not told again.
        self.tally.tell(self.session.stats());
        let estate = Estate {
            session: std::mem::replace(&mut self.session, Session::new(lmtp::Config::default())),
            works: std::mem::replace(&mut self.works, Works::new()),
        };
        if let Err(estate) = asking.send(estate) {
            // Whoever has asked is gone already.
            (self.session, self.works) = (estate.session, estate.works);
            self.works.belong_to(cx);
            return self.poll_asked(cx);
        }
        self.place = None;
        self.session.hang_up();
        Poll::Ready(())
    }

    /// Goes on with what another connection has begun; whether there was anything to be told.
    fn come(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(estate) = &mut self.coming else {
            return false;
        };
        let Poll::Ready(estate) = estate.poll_unpin(cx) else {
            return false;
        };
        self.coming = None;
        let now = self.now();
        match estate {
            Ok(Estate { session, works }) => {
                let before = works.len();
                let moved = self.session.resumed(Some(session), now);
                self.tally
                    .cancelled(before.saturating_sub(moved.len()), "client");
                self.works.take_over(works, &moved);
            }
            Err(_) => drop(self.session.resumed(None, now)),
        }
        true
    }

    /// Asks for what another connection has begun.
    fn ask_for(&mut self, name: &str) {
        let visitor = self.visitor.as_ref();
        self.coming = visitor.and_then(|visitor| held::ask(&self.house.held, name, visitor));
        if self.coming.is_none() {
            let now = self.now();
            drop(self.session.resumed(None, now));
        }
    }

    /// A name for the session, if there is a place for it.
    fn name(&mut self) -> Option<ByteString> {
        let visitor = self.visitor.as_ref()?;
        let place = Place::take(&self.house.held, visitor)?;
        let name = place.name().into();
        self.place = Some(place);
        Some(name)
    }

    /// Waits until the session is back from reading a long message.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(reading) = &mut self.reading else {
            return Poll::Ready(());
        };
        let back = std::task::ready!(reading.poll_unpin(cx));
        self.reading = None;
        match back {
            Ok((session, unread)) => (self.session, self.unread) = (session, unread),
            // It is lost with everything that it knew; the new one in its place says goodbye.
            Err(_logged) => {
                self.works = Works::new();
                self.works.belong_to(cx);
                self.close(Close::INTERNAL, "panic");
            }
        }
        Poll::Ready(())
    }

    /// Takes in a long message, elsewhere.
    fn read_apart(&mut self, text: ByteString) {
        let now = self.now();
        let (house, allowance) = (Arc::clone(&self.house), self.allowance.clone());
        let place = Session::new(lmtp::Config::default());
        let mut session = std::mem::replace(&mut self.session, place);
        let size = Size::of(text.len());
        self.reading =
            Some(
                Pool::global().run_only(trail::present_turn().caller, size, move || {
                    let models = house.catalog.for_caller(allowance);
                    let unread = session.handle(text, &models, now);
                    (session, unread)
                }),
            );
    }

    fn listens(&self) -> bool {
        self.session.wants_input() && !self.heard_all
    }

    /// Takes in what came; whether anything did.
    fn hear(&mut self, wire: &mut impl Wire, cx: &mut Context<'_>) -> bool {
        let mut heard = false;
        for _ in 0..MESSAGES {
            if self.reading.is_some() || !self.session.wants_input() {
                break;
            }
            let next = match self.unread.take() {
                Some(text) => Heard::Text(text),
                None if self.heard_all => {
                    // Only now is nothing left of what the client has sent.
                    self.session.end_of_input();
                    break;
                }
                None => match wire.poll_heard(cx) {
                    Poll::Ready(next) => next,
                    Poll::Pending => break,
                },
            };
            heard = true;
            self.take(next);
        }
        heard
    }

    fn take(&mut self, heard: Heard) {
        let now = self.now();
        match heard {
            Heard::Text(text) if text.len() >= APART_BYTES => self.read_apart(text),
            Heard::Text(text) => {
                let models = self.house.catalog.for_caller(self.allowance.clone());
                self.unread = self.session.handle(text, &models, now);
            }
            Heard::Unreadable(what) => self.session.handle_unreadable(what, now),
            Heard::Ignored => self.tally.ignored(),
            Heard::Broken => self.close(BROKEN, "client"),
            Heard::Overloaded => self.close(OVERLOADED, "client"),
            Heard::End => self.heard_all = true,
            Heard::Left => self.hang_up(),
            Heard::Gone => self.lose(),
        }
    }

    /// Gives the session what a step has for its streams; whether there was anything.
    fn look(&mut self) -> bool {
        let mut sights = Sights::default();
        self.works.look(&mut sights);
        let Sights { pieces, over, news } = sights;
        let seen = !(pieces.is_empty() && over.is_empty() && news.is_empty());
        if !pieces.is_empty() {
            let now = self.now();
            self.session.step(pieces, now);
        }
        for stream in over {
            let now = self.now();
            self.session.finished(stream, now);
        }
        for (stream, news) in news {
            let now = self.now();
            self.session.status(stream, &news, now);
        }
        seen
    }

    /// Does what the session asks for; its end, if that has come.
    fn obey(&mut self) -> Option<End> {
        while let Some(output) = self.session.poll() {
            match output {
                Output::Start(start) => {
                    let stream = start.stream;
                    let work = Work::new(&self.house.kernel, *start);
                    self.works.begin(stream, work, self.tally.open());
                }
                Output::Cancel(stream) => self.works.cancel(stream),
                Output::Park => self.works.park(),
                Output::Unpark => self.works.unpark(),
                Output::ParkStream(stream) => self.works.stand(stream, true),
                Output::UnparkStream(stream) => self.works.stand(stream, false),
                Output::Name => {
                    let name = self.name();
                    self.session.named(name);
                }
                Output::Resume(name) => self.ask_for(&name),
                Output::Close(close) => return Some(End::Close(close)),
                Output::Reset => return Some(End::Reset),
            }
        }
        if self.session.is_held() && !self.apart {
            return Some(End::Lost);
        }
        // Nothing follows what hung up.
        self.session.is_closed().then_some(End::Gone)
    }

    /// Sends what there is; whether anything went.
    fn say(&mut self, wire: &mut impl Wire, cx: &mut Context<'_>) -> Result<bool, Gone> {
        let mut said = false;
        while self.session.has_message() {
            match wire.poll_room(cx)? {
                Poll::Ready(()) => {}
                Poll::Pending => break,
            }
            let now = self.now();
            let Some(message) = self.session.next_message(now) else {
                break;
            };
            wire.send(message)?;
            said = true;
        }
        self.tally.tell(self.session.stats());
        Ok(said)
    }

    /// The drain and the clock.
    fn watch(&mut self, cx: &mut Context<'_>) {
        while let Some((phase, reached)) = &mut self.drain
            && reached.poll_unpin(cx).is_ready()
        {
            if *phase == Phase::Refusing {
                self.session.drain();
                self.drain = Some(await_phase(&self.house, Phase::Cutting));
            } else {
                self.drain = None;
                self.close(Close::SHUTDOWN, "drain");
            }
        }
        if let Some(revoked) = &mut self.revoked
            && revoked.poll_unpin(cx).is_ready()
        {
            self.revoked = None;
            self.close(Close::REVOKED, "revoked");
        }
        self.watch_models(cx);
        let Some(at) = self.session.wake_at() else {
            self.timer = None;
            return;
        };
        let at = self.house.instant(at);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        if timer.poll_unpin(cx).is_ready() {
            self.timer = None;
            let live = self.session.live();
            self.session.tick(self.now());
            if self.session.is_closed() {
                let why = if self.apart { "client" } else { "stall" };
                self.tally.cancelled(live, why);
            } else {
                // It wanted to be looked at a moment later.
                cx.waker().wake_by_ref();
            }
        }
    }

    /// Streams begin whose model has come (LM-322).
    fn watch_models(&mut self, cx: &mut Context<'_>) {
        if self.session.waiting() == 0 {
            self.models = None;
            return;
        }
        // What came before it was listened for is looked at once.
        let mut came = self.models.is_none();
        let models = self.models.get_or_insert_with(|| {
            let changes = self.house.catalog.changes();
            let next = |mut changes: watch::Receiver<()>| async move {
                changes.changed().await.ok()?;
                Some(((), changes))
            };
            stream::unfold(changes, next).boxed()
        });
        while let Poll::Ready(Some(())) = models.poll_next_unpin(cx) {
            came = true;
        }
        if came {
            let now = self.now();
            let models = self.house.catalog.for_caller(self.allowance.clone());
            self.session.models_changed(&models, now);
        }
    }

    fn hang_up(&mut self) {
        self.tally.cancelled(self.session.live(), "client");
        self.session.hang_up();
    }

    /// The client did not say goodbye: it may come back.
    fn lose(&mut self) {
        let live = self.session.live();
        self.coming = None;
        self.session.lose(self.now());
        self.tally.cancelled(live - self.session.live(), "client");
    }

    fn gone(&mut self) -> End {
        self.lose();
        let end = self.obey().unwrap_or(End::Gone);
        self.ended(end)
    }

    fn ended(&mut self, end: End) -> End {
        self.tally.tell(self.session.stats());
        end
    }
}

/// Who drops a conversation that has not ended has lost its client.
impl Drop for Conversation {
    fn drop(&mut self) {
        self.tally.cancelled(self.works.len(), "client");
    }
}

fn await_phase(house: &House, phase: Phase) -> (Phase, BoxFuture<'static, ()>) {
    let drain = house.shared.drain.clone();
    (phase, async move { drain.reached(phase).await }.boxed())
}

/// Bytes of a message from which on it is read on a thread for slow work: it may hold a text to be tokenised.
const APART_BYTES: usize = 4 << 10;
/// How often everything is looked at before others get their turn.
const ROUNDS: usize = 32;
/// Messages taken in before works are looked at.
const MESSAGES: usize = 64;
/// What is told to streams of a client whose message finds no room (D-47).
const OVERLOADED: Close = Close {
    code: 1013,
    reason: lmtp::Reason::ServerOverloaded,
    message: "the server is reading as much as it may",
};
/// What is told to streams of a client whose frames cannot be read.
const BROKEN: Close = Close {
    code: 1002,
    reason: lmtp::Reason::Malformed,
    message: "what came is no WebSocket frame of a client",
};
