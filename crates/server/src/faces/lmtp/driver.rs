//! Drives one connection: the protocol's state machine, the calls that it starts, and the transport (LM-101).
//!
//! ```text
//!   transport ─ input ─► session ─ Start, Cancel ─► works ─ items of a step ─► session ─ one message ─► transport
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
use sapwood_kernel::pool::{BlockingPool, PoolRun, TaskSize};
use sapwood_proto::lmtp::{self, LmtpClose, LmtpOutput, LmtpSession, Unreadable};
use sapwood_proto::time::Time;
use tokio::sync::{oneshot, watch};
use tokio::time::{Sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::context::{LmtpClientInfo, LmtpContext};
use super::detached::{self, DetachedState, NoTransport, SessionRegistration};
use super::recorder::ConnectionRecorder;
use super::work::StreamWork;
use super::works::{StreamWorks, WorkUpdates};
use crate::auth::identity::CallerIdentity;
use crate::auth::rate_limit::TokenMeter;
use crate::http::request_trace;
use crate::ops::drain::DrainPhase;

/// Something that came over a wire.
#[derive(Debug)]
pub(super) enum LmtpInput {
    /// One frame or line.
    Text(ByteString),
    /// Neither.
    Unreadable(Unreadable),
    /// What is passed over, and counted.
    Ignored,
    /// Nothing that can be parsed any more.
    Broken,
    /// There was no room for what comes (D-47).
    Overloaded,
    /// The client sends nothing more, and may still read.
    End,
    /// The client has said goodbye.
    Left,
    /// The client is gone.
    Closed,
}

/// The client is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClientClosed;

/// A transport, as a conversation needs it.
pub(super) trait LmtpTransport {
    /// What came next.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<LmtpInput>;

    /// Resolves when the client is gone or dead. `deaf`: nothing is read now, and yet it is to be seen when it goes.
    fn poll_closed(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()>;

    /// Waits until a message can be sent without piling up.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>>;

    /// Sends one, where there was room.
    fn send(&mut self, message: Bytes) -> Result<(), ClientClosed>;

    /// Hands everything to the network.
    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>>;
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConversationEnd {
    /// In order; the wire is to be closed so.
    Close(LmtpClose),
    /// The peer does not read: the wire is to be broken off.
    Reset,
    /// The client was gone first.
    Closed,
    /// The client is gone and may come back: go on with [`ConnectionDriver::wait`].
    Lost,
    /// Another connection has taken over.
    Taken,
}

/// A connection in progress. Dropping it drops everything that it runs.
pub(super) struct ConnectionDriver {
    context: Arc<LmtpContext>,
    allowance: Option<Arc<TokenMeter>>,
    session: LmtpSession,
    works: StreamWorks,
    recorder: ConnectionRecorder,
    /// Whose it is, where a client can come back.
    identity: Option<CallerIdentity>,
    /// Its place among those that can be resumed.
    registration: Option<SessionRegistration>,
    /// What another connection has left for this one.
    coming: Option<oneshot::Receiver<DetachedState>>,
    /// There is no wire.
    is_detached: bool,
    /// The session is elsewhere with a long message: rendering and tokenising it may take long. What stands in its place
    /// meanwhile is nobody's, so nothing is done until it is back.
    reading: Option<PoolRun<(LmtpSession, Option<ByteString>)>>,
    /// Text that the session had no room to answer.
    unread: Option<ByteString>,
    /// The client sends nothing more.
    input_ended: bool,
    /// Wakes for [`LmtpSession::wake_at`].
    timer: Option<Pin<Box<Sleep>>>,
    /// What of the drain comes next.
    drain: Option<(DrainPhase, BoxFuture<'static, ()>)>,
    /// Tells that models have come, while streams wait for theirs.
    models: Option<BoxStream<'static, ()>>,
    /// Resolves when its key is no longer good.
    revoked: Option<BoxFuture<'static, ()>>,
}

impl ConnectionDriver {
    pub(super) fn new(server_context: &Arc<LmtpContext>, connection: LmtpClientInfo) -> Self {
        let shared = &server_context.shared;
        let session = server_context.open(&connection);
        let allowance = connection.caller.as_ref();
        Self {
            allowance: allowance.and_then(|caller| caller.allowance.clone()),
            session,
            works: StreamWorks::new(),
            recorder: ConnectionRecorder::begin(&shared.metrics, &shared.drain),
            identity: connection.identity,
            registration: None,
            coming: None,
            is_detached: false,
            reading: None,
            unread: None,
            input_ended: false,
            timer: None,
            drain: Some(await_phase(server_context, DrainPhase::Refusing)),
            models: None,
            revoked: Some(request_trace::revoked()),
            context: Arc::clone(server_context),
        }
    }

    /// Ends everything with last words (LM-505).
    pub(super) fn close(&mut self, close: LmtpClose, why: &'static str) {
        self.recorder.cancelled(self.session.live(), why);
        self.session.close(close, self.now());
    }

    /// Whether any stream is open.
    pub(super) fn is_busy(&self) -> bool {
        self.reading.is_some() || self.session.live() + self.session.waiting() > 0
    }

    /// Talks over `wire` to the end.
    pub(super) async fn run(&mut self, wire: &mut impl LmtpTransport) -> ConversationEnd {
        std::future::poll_fn(|cx| self.poll_end(wire, cx)).await
    }

    /// Goes on without a client until one comes back for it (LM-964).
    pub(super) fn wait(mut self) {
        let Some(way) = self.registration.as_ref().map(SessionRegistration::way) else {
            return;
        };
        self.is_detached = true;
        self.recorder.disconnected();
        let server_context = Arc::clone(&self.context);
        let task = tokio::spawn(request_trace::carry(async move {
            self.run(&mut NoTransport).await;
        }));
        way.keep(&server_context.detached, AbortOnDropHandle::new(task));
    }

    /// Goes on as far as it can.
    pub(super) fn poll_end(
        &mut self,
        wire: &mut impl LmtpTransport,
        cx: &mut Context<'_>,
    ) -> Poll<ConversationEnd> {
        // Streams wake the task that polls them, and after a takeover that is another connection's.
        self.works.belong_to(cx);
        for _ in 0..ROUNDS {
            if self.poll_read(cx).is_pending() {
                // If the client is gone, that shows again when there is a session to tell.
                let _ = wire.poll_sent(cx);
                return Poll::Pending;
            }
            // Before anything is received: a message that is taken in after the session was handed over would be answered
            // by nobody.
            if self.poll_asked(cx).is_ready() {
                return Poll::Ready(ConversationEnd::Taken);
            }
            // `|` and not `||`: both have to be polled, or one of them has no waker.
            let received = self.come(cx) | self.receive(wire, cx);
            if self.reading.is_some() {
                continue;
            }
            let seen = self.look();
            self.watch(cx);
            if let Some(end) = self.obey() {
                return Poll::Ready(self.ended(end));
            }
            let sent = match self.send_pending(wire, cx) {
                Ok(sent) => sent,
                Err(ClientClosed) => return Poll::Ready(self.client_closed()),
            };
            // What was taken may have been the last thing to say, or have made room.
            if let Some(end) = self.obey() {
                return Poll::Ready(self.ended(end));
            }
            if !(received || seen || sent) {
                // Only where nothing moved: while messages come the client is there, and looking may cost a system call.
                let deaf = !self.listens();
                if wire.poll_closed(deaf, cx).is_ready() {
                    return Poll::Ready(self.client_closed());
                }
                return match wire.poll_sent(cx) {
                    Poll::Ready(Err(ClientClosed)) => Poll::Ready(self.client_closed()),
                    _ => Poll::Pending,
                };
            }
        }
        // Others get their turn.
        cx.waker().wake_by_ref();
        match wire.poll_sent(cx) {
            Poll::Ready(Err(ClientClosed)) => Poll::Ready(self.client_closed()),
            _ => Poll::Pending,
        }
    }

    fn now(&self) -> Time {
        self.context.now()
    }

    /// Hands everything over to the connection that asks for it.
    fn poll_asked(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(position) = &mut self.registration else {
            return Poll::Pending;
        };
        let asking = std::task::ready!(position.poll_asked(cx));
        // Its counts go with it, and are not recorded twice.
        self.recorder.record(self.session.stats());
        let detached_state = DetachedState {
            session: std::mem::replace(
                &mut self.session,
                LmtpSession::new(lmtp::Config::default()),
            ),
            works: std::mem::replace(&mut self.works, StreamWorks::new()),
        };
        if let Err(detached_state) = asking.send(detached_state) {
            // The connection that asked is closed already.
            (self.session, self.works) = (detached_state.session, detached_state.works);
            self.works.belong_to(cx);
            return self.poll_asked(cx);
        }
        self.registration = None;
        // By now the session here is an empty one: this ends the connection, and nothing of what was handed over.
        self.session.hang_up();
        Poll::Ready(())
    }

    /// Continues the session of another connection; whether there is anything to be sent.
    fn come(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(detached_state) = &mut self.coming else {
            return false;
        };
        let Poll::Ready(detached_state) = detached_state.poll_unpin(cx) else {
            return false;
        };
        self.coming = None;
        let now = self.now();
        match detached_state {
            Ok(DetachedState { session, works }) => {
                let before = works.len();
                let moved = self.session.resumed(Some(session), now);
                self.recorder
                    .cancelled(before.saturating_sub(moved.len()), "client");
                self.works.take_over(works, &moved);
            }
            Err(_) => drop(self.session.resumed(None, now)),
        }
        true
    }

    /// Asks for what another connection has begun.
    fn ask_for(&mut self, name: &str) {
        let caller_identity = self.identity.as_ref();
        self.coming = caller_identity.and_then(|caller_identity| {
            detached::ask(&self.context.detached, name, caller_identity)
        });
        if self.coming.is_none() {
            let now = self.now();
            drop(self.session.resumed(None, now));
        }
    }

    /// A name for the session, if there is a place for it.
    fn name(&mut self) -> Option<ByteString> {
        let caller_identity = self.identity.as_ref()?;
        let position = SessionRegistration::take(&self.context.detached, caller_identity)?;
        let name = position.name().into();
        self.registration = Some(position);
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
                self.works = StreamWorks::new();
                self.works.belong_to(cx);
                self.close(LmtpClose::INTERNAL, "panic");
            }
        }
        Poll::Ready(())
    }

    /// Takes in a long message, elsewhere.
    fn offload_read(&mut self, text: ByteString) {
        let now = self.now();
        let (server_context, allowance) = (Arc::clone(&self.context), self.allowance.clone());
        let position = LmtpSession::new(lmtp::Config::default());
        let mut session = std::mem::replace(&mut self.session, position);
        let size = TaskSize::of(text.len());
        self.reading = Some(BlockingPool::global().run_only(
            request_trace::present_turn().caller,
            size,
            move || {
                let models = server_context.catalog.for_caller(allowance);
                let unread = session.handle(text, &models, now);
                (session, unread)
            },
        ));
    }

    fn listens(&self) -> bool {
        self.session.wants_input() && !self.input_ended
    }

    /// Takes in what came; whether anything did.
    fn receive(&mut self, wire: &mut impl LmtpTransport, cx: &mut Context<'_>) -> bool {
        let mut received = false;
        for _ in 0..MESSAGES {
            if self.reading.is_some() || !self.session.wants_input() {
                break;
            }
            let next = match self.unread.take() {
                Some(text) => LmtpInput::Text(text),
                None if self.input_ended => {
                    // Only now is nothing left of what the client has sent.
                    self.session.end_of_input();
                    break;
                }
                None => match wire.poll_receive(cx) {
                    Poll::Ready(next) => next,
                    Poll::Pending => break,
                },
            };
            received = true;
            self.take(next);
        }
        received
    }

    fn take(&mut self, received: LmtpInput) {
        let now = self.now();
        match received {
            LmtpInput::Text(text) if text.len() >= OFFLOAD_BYTES => self.offload_read(text),
            LmtpInput::Text(text) => {
                let models = self.context.catalog.for_caller(self.allowance.clone());
                self.unread = self.session.handle(text, &models, now);
            }
            LmtpInput::Unreadable(what) => self.session.handle_unreadable(what, now),
            LmtpInput::Ignored => self.recorder.ignored(),
            LmtpInput::Broken => self.close(BROKEN, "client"),
            LmtpInput::Overloaded => self.close(OVERLOADED, "client"),
            LmtpInput::End => self.input_ended = true,
            LmtpInput::Left => self.hang_up(),
            LmtpInput::Closed => self.lose(),
        }
    }

    /// Gives the session what a step has for its streams; whether there was anything.
    fn look(&mut self) -> bool {
        let mut client_info = WorkUpdates::default();
        self.works.look(&mut client_info);
        let WorkUpdates {
            pieces,
            over,
            updates: update,
        } = client_info;
        let seen = !(pieces.is_empty() && over.is_empty() && update.is_empty());
        if !pieces.is_empty() {
            let now = self.now();
            self.session.step(pieces, now);
        }
        for stream in over {
            let now = self.now();
            self.session.finished(stream, now);
        }
        for (stream, update) in update {
            let now = self.now();
            self.session.status(stream, &update, now);
        }
        seen
    }

    /// Does what the session asks for; its end, if that has come.
    fn obey(&mut self) -> Option<ConversationEnd> {
        while let Some(output) = self.session.poll() {
            match output {
                LmtpOutput::Start(start) => {
                    let stream = start.stream;
                    let work = StreamWork::new(&self.context.kernel, *start);
                    self.works.begin(stream, work, self.recorder.open());
                }
                LmtpOutput::Cancel(stream) => self.works.cancel(stream),
                LmtpOutput::Park => self.works.park(),
                LmtpOutput::Unpark => self.works.unpark(),
                LmtpOutput::ParkStream(stream) => self.works.stand(stream, true),
                LmtpOutput::UnparkStream(stream) => self.works.stand(stream, false),
                LmtpOutput::Name => {
                    let name = self.name();
                    self.session.named(name);
                }
                LmtpOutput::Resume(name) => self.ask_for(&name),
                LmtpOutput::Close(close) => return Some(ConversationEnd::Close(close)),
                LmtpOutput::Reset => return Some(ConversationEnd::Reset),
            }
        }
        if self.session.is_detached() && !self.is_detached {
            return Some(ConversationEnd::Lost);
        }
        // Nothing follows what hung up.
        self.session.is_closed().then_some(ConversationEnd::Closed)
    }

    /// Sends what there is; whether anything went.
    fn send_pending(
        &mut self,
        wire: &mut impl LmtpTransport,
        cx: &mut Context<'_>,
    ) -> Result<bool, ClientClosed> {
        let mut sent = false;
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
            sent = true;
        }
        self.recorder.record(self.session.stats());
        Ok(sent)
    }

    /// The drain and the clock.
    fn watch(&mut self, cx: &mut Context<'_>) {
        while let Some((phase, reached)) = &mut self.drain
            && reached.poll_unpin(cx).is_ready()
        {
            if *phase == DrainPhase::Refusing {
                self.session.drain();
                self.drain = Some(await_phase(&self.context, DrainPhase::Cutting));
            } else {
                self.drain = None;
                self.close(LmtpClose::SHUTDOWN, "drain");
            }
        }
        if let Some(revoked) = &mut self.revoked
            && revoked.poll_unpin(cx).is_ready()
        {
            self.revoked = None;
            self.close(LmtpClose::REVOKED, "revoked");
        }
        self.watch_models(cx);
        let Some(at) = self.session.wake_at() else {
            self.timer = None;
            return;
        };
        let at = self.context.instant(at);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        if timer.poll_unpin(cx).is_ready() {
            self.timer = None;
            let live = self.session.live();
            self.session.tick(self.now());
            if self.session.is_closed() {
                let why = if self.is_detached { "client" } else { "stall" };
                self.recorder.cancelled(live, why);
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
            let changes = self.context.catalog.changes();
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
            let models = self.context.catalog.for_caller(self.allowance.clone());
            self.session.models_changed(&models, now);
        }
    }

    fn hang_up(&mut self) {
        self.recorder.cancelled(self.session.live(), "client");
        self.session.hang_up();
    }

    /// The client did not say goodbye: it may come back.
    fn lose(&mut self) {
        let live = self.session.live();
        self.coming = None;
        self.session.lose(self.now());
        self.recorder
            .cancelled(live - self.session.live(), "client");
    }

    fn client_closed(&mut self) -> ConversationEnd {
        self.lose();
        let end = self.obey().unwrap_or(ConversationEnd::Closed);
        self.ended(end)
    }

    fn ended(&mut self, end: ConversationEnd) -> ConversationEnd {
        self.recorder.record(self.session.stats());
        end
    }
}

/// Who drops a conversation that has not ended has lost its client.
impl Drop for ConnectionDriver {
    fn drop(&mut self) {
        self.recorder.cancelled(self.works.len(), "client");
    }
}

fn await_phase(context: &LmtpContext, phase: DrainPhase) -> (DrainPhase, BoxFuture<'static, ()>) {
    let drain = context.shared.drain.clone();
    (phase, async move { drain.reached(phase).await }.boxed())
}

/// Bytes of a message from which on it is read on a thread for slow work: it may hold a text to be tokenised.
const OFFLOAD_BYTES: usize = 4 << 10;
/// How often everything is looked at before others get their turn.
const ROUNDS: usize = 32;
/// Messages taken in before works are looked at.
const MESSAGES: usize = 64;
/// The error of streams whose client's message finds no room (D-47).
const OVERLOADED: LmtpClose = LmtpClose {
    code: 1013,
    reason: lmtp::LmtpReason::ServerOverloaded,
    message: "the server is reading as much as it may",
};
/// The error of streams whose client sends frames that cannot be read.
const BROKEN: LmtpClose = LmtpClose {
    code: 1002,
    reason: lmtp::LmtpReason::Malformed,
    message: "what came is no WebSocket frame of a client",
};
