//! Drives one connection: the protocol's state machine, the calls that it starts, and the transport (LM-101).
//!
//! ```text
//!   transport ─ input ─► session ─ Start, Cancel ─► works ─ items of a step ─► session ─ one message ─► transport
//!   a long message ─► the session moves with it to a thread for slow work, and everything waits until it is back
//!   a drain, a timer, a revoked key ─► session ─ last messages ─► Close
//!   a lost peer ─► session, detached ─ in a task of its own ─► another connection, or the end
//! ```
//!
//! Invariants: while `reading` is set, `session` is a placeholder that must be neither asked nor driven; `registration`
//! is set exactly while another connection can take the session over; whatever waits has registered the task of the
//! last [`ConnectionDriver::poll_end`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
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

/// Something that was received by a transport.
#[derive(Debug)]
pub(super) enum LmtpInput {
    /// One frame or line.
    Text(ByteString),
    /// A frame or line that is no text, or is too long.
    Unreadable(Unreadable),
    /// A message that is ignored and counted.
    Ignored,
    /// Data that is not in the transport's framing: nothing after it can be parsed.
    Broken,
    /// There was no room for a message in the byte budget (D-47).
    Overloaded,
    /// The client sends nothing more, and may still read.
    End,
    /// The client has closed in good order.
    Left,
    /// The connection is lost.
    Closed,
}

/// The connection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClientClosed;

/// A transport, as [`ConnectionDriver`] needs it.
pub(super) trait LmtpTransport {
    /// The next input.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<LmtpInput>;

    /// Resolves when the client is gone or dead. `deaf`: nothing is read now, and a disconnect has to be seen
    /// nevertheless.
    fn poll_closed(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()>;

    /// Waits until a message can be sent without piling up.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>>;

    /// Sends a message, for which there was room.
    fn send(&mut self, message: Bytes) -> Result<(), ClientClosed>;

    /// Hands everything to the network.
    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>>;
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConversationEnd {
    /// In order: close the transport with this code.
    Close(LmtpClose),
    /// The peer does not read: drop the transport without a close.
    Reset,
    /// The client has disconnected.
    Closed,
    /// The client has disconnected and may come back: continue with [`ConnectionDriver::wait`].
    Lost,
    /// Another connection has taken over the session.
    Taken,
}

/// A long message that is being read, and the session, which the other thread has meanwhile.
struct LongRead {
    run: PoolRun<Option<ByteString>>,
    session: Arc<Mutex<LmtpSession>>,
}

/// A connection in progress. Dropping it drops everything that it runs.
pub(super) struct ConnectionDriver {
    context: Arc<LmtpContext>,
    allowance: Option<Arc<TokenMeter>>,
    session: LmtpSession,
    works: StreamWorks,
    recorder: ConnectionRecorder,
    /// The owner of the session, where its client can reconnect.
    identity: Option<CallerIdentity>,
    /// Its entry in the registry of sessions that can be resumed.
    registration: Option<SessionRegistration>,
    /// The session of another connection, which was asked for.
    coming: Option<oneshot::Receiver<DetachedState>>,
    /// There is no transport.
    is_detached: bool,
    /// A long message is read on another thread: rendering and tokenising it may take long. A placeholder stands in the
    /// session's field, so nothing is done until it is back.
    reading: Option<LongRead>,
    /// The rest of a message, which the session had no room to answer.
    unread: Option<ByteString>,
    /// The client sends nothing more.
    input_ended: bool,
    /// Wakes for [`LmtpSession::wake_at`].
    timer: Option<Pin<Box<Sleep>>>,
    /// The next phase of the drain.
    drain: Option<(DrainPhase, BoxFuture<'static, ()>)>,
    /// Changes of the models' states, while streams wait for one to load.
    models: Option<BoxStream<'static, ()>>,
    /// Resolves when the caller's key is revoked.
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

    /// Ends every stream with an error item, then the connection (LM-505).
    pub(super) fn close(&mut self, close: LmtpClose, why: &'static str) {
        // Counted first: afterwards no stream is live, and the works that are dropped on `Cancel` count nothing.
        self.recorder.cancelled(self.session.live(), why);
        self.session.close(close, self.now());
    }

    /// Whether any stream is open.
    pub(super) fn is_busy(&self) -> bool {
        self.reading.is_some() || self.session.live() + self.session.waiting() > 0
    }

    /// Drives the connection over `wire` to its end.
    pub(super) async fn run(&mut self, wire: &mut impl LmtpTransport) -> ConversationEnd {
        std::future::poll_fn(|cx| self.poll_end(wire, cx)).await
    }

    /// Goes on without a client until it reconnects (LM-964), or its grace is over.
    pub(super) fn wait(mut self) {
        // `Lost` is only returned for sessions with a name, which have an entry; without one nothing could resume it.
        let Some(keep) = self.registration.as_ref().map(SessionRegistration::keeper) else {
            return;
        };
        self.is_detached = true;
        self.recorder.disconnected();
        let server_context = Arc::clone(&self.context);
        let task = tokio::spawn(request_trace::carry(async move {
            self.run(&mut NoTransport).await;
        }));
        keep(&server_context.detached, AbortOnDropHandle::new(task));
    }

    /// Does everything that can be done now. Resolves with the end of the connection.
    pub(super) fn poll_end(
        &mut self,
        wire: &mut impl LmtpTransport,
        cx: &mut Context<'_>,
    ) -> Poll<ConversationEnd> {
        // Streams wake the task that polls them, and after a takeover that is another connection's.
        self.works.belong_to(cx);
        for _ in 0..ROUNDS {
            let was_reading = self.reading.is_some();
            if self.poll_read(cx).is_pending() {
                // What was sent before still has to leave. An error is ignored because it shows again at the next send,
                // when there is a session to notify.
                let _ = wire.poll_sent(cx);
                return Poll::Pending;
            }
            // What the message has started or asked for, before the session is handed over: a stream would be without its
            // work. And before anything is polled below that this may set.
            if was_reading && let Some(end) = self.obey() {
                return Poll::Ready(self.ended(end));
            }
            // Before anything is received: a message that is read after the session was handed over would be lost.
            if self.poll_asked(cx).is_ready() {
                return Poll::Ready(ConversationEnd::Taken);
            }
            // `|` and not `||`: both have to be polled, or one of them has no waker.
            let received = self.come(cx) | self.receive(wire, cx);
            if self.reading.is_some() {
                // The session is a placeholder from here on. The next round registers the waker.
                continue;
            }
            let seen = self.look();
            self.watch(cx);
            // Before sending: a session that hung up or was reset has nothing more to send.
            if let Some(end) = self.obey() {
                return Poll::Ready(self.ended(end));
            }
            let sent = match self.send_pending(wire, cx) {
                Ok(sent) => sent,
                Err(ClientClosed) => return Poll::Ready(self.client_closed()),
            };
            // The last message may have been taken, which lets the session close; or there is room to unpark streams.
            if let Some(end) = self.obey() {
                return Poll::Ready(self.ended(end));
            }
            // A work that has just begun, or goes on, has to be polled before this rests: nothing else wakes for it.
            if !(received || seen || sent || self.works.are_due()) {
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
        // Other tasks get their turn. The network does as well: a client that is served without pause would otherwise
        // see nothing until the buffers are full.
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
        // Recorded here for the last time: the session's counters move with it, and the new connection counts with its
        // own.
        self.recorder.record(self.session.stats());
        let detached_state = DetachedState {
            session: std::mem::replace(
                &mut self.session,
                LmtpSession::new(lmtp::Config::default()),
            ),
            works: std::mem::replace(&mut self.works, StreamWorks::new()),
        };
        if let Err(detached_state) = asking.send(detached_state) {
            // The connection that asked has closed by now. The session is taken back, and the next request is looked at,
            // because only a poll that is pending registers a waker.
            (self.session, self.works) = (detached_state.session, detached_state.works);
            self.works.belong_to(cx);
            return self.poll_asked(cx);
        }
        self.registration = None;
        // The session in this struct is an empty one now: this ends the connection, and nothing that was handed over.
        self.session.hang_up();
        Poll::Ready(())
    }

    /// Continues the session of another connection, once it has been handed over. Returns whether it has.
    fn come(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(detached_state) = &mut self.coming else {
            return false;
        };
        let Poll::Ready(detached_state) = detached_state.poll_unpin(cx) else {
            return false;
        };
        self.coming = None;
        match detached_state {
            Ok(detached_state) => self.adopt(detached_state),
            // The other connection ended before it saw the request: the session is gone.
            Err(_) => drop(self.session.resumed(None, self.now())),
        }
        true
    }

    /// Continues this session of another connection.
    fn adopt(&mut self, DetachedState { session, works }: DetachedState) {
        // The client names the streams that it continues; the others end here (LM-965).
        let before = works.len();
        let moved = self.session.resumed(Some(session), self.now());
        self.recorder
            .cancelled(before.saturating_sub(moved.len()), "client");
        self.works.take_over(works, &moved);
    }

    /// Requests the session of another connection.
    fn ask_for(&mut self, name: &str) {
        let caller_identity = self.identity.as_ref();
        self.coming = caller_identity.and_then(|caller_identity| {
            detached::ask(&self.context.detached, name, caller_identity)
        });
        if self.coming.is_none() {
            drop(self.session.resumed(None, self.now()));
        }
    }

    /// Registers the session for resume and returns its name; `None` if there is no room, and the client gets no resume.
    fn name(&mut self) -> Option<ByteString> {
        let caller_identity = self.identity.as_ref()?;
        let position = SessionRegistration::take(&self.context.detached, caller_identity)?;
        let name = position.name().into();
        self.registration = Some(position);
        Some(name)
    }

    /// Waits until the session is back from reading a long message.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(LongRead { run, session }) = &mut self.reading else {
            return Poll::Ready(());
        };
        let read = std::task::ready!(run.poll_unpin(cx));
        std::mem::swap(
            &mut *session.lock().unwrap_or_else(PoisonError::into_inner),
            &mut self.session,
        );
        self.reading = None;
        self.has_read(read);
        Poll::Ready(())
    }

    /// Keeps what the session has left of a message. An error is a panic, as a rule of a template or a tokenizer: the
    /// session is only closed then, so that each stream gets its error item (LM-505).
    fn has_read<E>(&mut self, read: Result<Option<ByteString>, E>) {
        match read {
            Ok(unread) => self.unread = unread,
            Err(_logged) => self.close(LmtpClose::INTERNAL, "panic"),
        }
    }

    /// Lets the session handle a long message on another thread.
    fn offload_read(&mut self, text: ByteString) {
        let now = self.now();
        let (server_context, allowance) = (Arc::clone(&self.context), self.allowance.clone());
        let placeholder = LmtpSession::new(lmtp::Config::default());
        let session = std::mem::replace(&mut self.session, placeholder);
        // The lock is never waited for: it brings the session back also where the work panics. The streams stand still
        // meanwhile, and those of other connections do not (LM-607).
        let session = Arc::new(Mutex::new(session));
        let lent = Arc::clone(&session);
        let run = BlockingPool::global().run_only(
            request_trace::present_turn().caller,
            TaskSize::of(text.len()),
            move || {
                let models = server_context.catalog.for_caller(allowance);
                let mut session = lent.lock().unwrap_or_else(PoisonError::into_inner);
                session.handle(text, &models, now)
            },
        );
        self.reading = Some(LongRead { run, session });
    }

    fn listens(&self) -> bool {
        self.session.wants_input() && !self.input_ended
    }

    /// Receives messages, as long as the session takes them. Returns whether there were any.
    fn receive(&mut self, wire: &mut impl LmtpTransport, cx: &mut Context<'_>) -> bool {
        let mut received = false;
        for _ in 0..MESSAGES {
            if self.reading.is_some() || !self.session.wants_input() {
                break;
            }
            let next = match self.unread.take() {
                Some(text) => LmtpInput::Text(text),
                None if self.input_ended => {
                    // Only here, where nothing is left of what the client has sent: after a half-close running streams
                    // finish, and a message that is still unread would start another.
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
                let read = AssertUnwindSafe(|| self.session.handle(text, &models, now));
                let read = catch_unwind(read);
                if read.is_err() {
                    tracing::error!("reading a message of an LMTP client panicked");
                    self.context.shared.metrics.panics.inc();
                }
                self.has_read(read);
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

    /// Gives the session what a step has for its streams. Returns whether there was anything.
    fn look(&mut self) -> bool {
        let WorkUpdates {
            pieces,
            over,
            updates,
        } = self.works.look();
        let seen = !(pieces.is_empty() && over.is_empty() && updates.is_empty());
        // Items first: a stream that is over without an end fails, and its last item may be that end (LM-501).
        if !pieces.is_empty() {
            self.session.step(pieces, self.now());
        }
        for stream in over {
            self.session.finished(stream, self.now());
        }
        for (stream, update) in updates {
            self.session.status(stream, &update, self.now());
        }
        seen
    }

    /// Carries out the session's outputs. Returns the end of the connection, if it has come.
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
        // Reported once: in the task of a detached session `is_detached` is set, and the session waits there.
        if self.session.is_detached() && !self.is_detached {
            return Some(ConversationEnd::Lost);
        }
        // A session that hung up has no further outputs; `Close` and `Reset` were handled above.
        self.session.is_closed().then_some(ConversationEnd::Closed)
    }

    /// Sends pending messages, as long as the transport has room. Returns whether there were any.
    fn send_pending(
        &mut self,
        wire: &mut impl LmtpTransport,
        cx: &mut Context<'_>,
    ) -> Result<bool, ClientClosed> {
        let mut sent = false;
        while self.session.has_message() {
            // Asked before the message is built: items of later steps join the pending message while there is no room
            // (LM-607).
            match wire.poll_room(cx)? {
                Poll::Ready(()) => {}
                Poll::Pending => break,
            }
            let Some(message) = self.session.next_message(self.now()) else {
                break;
            };
            wire.send(message)?;
            sent = true;
        }
        self.recorder.record(self.session.stats());
        Ok(sent)
    }

    /// Handles the drain, a revoked key, changes of models, and timers.
    fn watch(&mut self, cx: &mut Context<'_>) {
        // A loop, because the future of the next phase has no waker until it is polled, and may be ready at once.
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
        // Deadlines move often, and resetting a timer costs less than making one.
        let at = self.context.instant(at);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        if timer.poll_unpin(cx).is_ready() {
            self.timer = None;
            let live = self.session.live();
            self.session.tick(self.now());
            // Of timers only the stall of the reader and the end of the grace close a session with streams.
            if self.session.is_closed() {
                let why = if self.is_detached { "client" } else { "stall" };
                self.recorder.cancelled(live, why);
            } else {
                // The tick may have produced messages, or set the next deadline, for which nothing is registered here.
                cx.waker().wake_by_ref();
            }
        }
    }

    /// Starts the streams whose model was loaded, and fails those whose model was not (LM-322).
    fn watch_models(&mut self, cx: &mut Context<'_>) {
        if self.session.waiting() == 0 {
            self.models = None;
            return;
        }
        // A model that was loaded before this subscribes sends no change: the first call looks at the models in any
        // case.
        let mut came = self.models.is_none();
        let models = self.models.get_or_insert_with(|| {
            let changes = self.context.catalog.changes();
            let next = |mut changes: watch::Receiver<()>| async move {
                changes.changed().await.ok()?;
                Some(((), changes))
            };
            stream::unfold(changes, next).boxed()
        });
        // To the end, because only a pending poll registers the waker.
        while let Poll::Ready(Some(())) = models.poll_next_unpin(cx) {
            came = true;
        }
        if came {
            let models = self.context.catalog.for_caller(self.allowance.clone());
            self.session.models_changed(&models, self.context.now());
        }
    }

    fn hang_up(&mut self) {
        self.recorder.cancelled(self.session.live(), "client");
        self.session.hang_up();
    }

    /// The connection is lost without a close: the client may come back.
    fn lose(&mut self) {
        if let Some(mut coming) = self.coming.take() {
            // A session that was asked for and not handed over yet stays where it is, for the client's next connection.
            coming.close();
            // One that was handed over meanwhile is this connection's, and is kept with its own.
            if let Ok(detached_state) = coming.try_recv() {
                self.adopt(detached_state);
            }
        }
        let live = self.session.live();
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

/// A driver that is dropped before its end has lost its client: the task of a POST is aborted with its answer.
impl Drop for ConnectionDriver {
    fn drop(&mut self) {
        self.recorder.cancelled(self.works.len(), "client");
    }
}

fn await_phase(context: &LmtpContext, phase: DrainPhase) -> (DrainPhase, BoxFuture<'static, ()>) {
    let drain = context.shared.drain.clone();
    (phase, async move { drain.reached(phase).await }.boxed())
}

/// A message of this many bytes or more is read on a thread for slow work: it may hold a text to be tokenised.
pub(super) const OFFLOAD_BYTES: usize = 4 << 10;
/// Rounds of one poll, after which other tasks get their turn.
const ROUNDS: usize = 32;
/// Messages that are received before the works are polled.
const MESSAGES: usize = 64;
/// The close of a connection whose message finds no room in the byte budget (D-47).
const OVERLOADED: LmtpClose = LmtpClose {
    code: 1013,
    reason: lmtp::LmtpReason::ServerOverloaded,
    message: "the server has no room for this message",
};
/// The close of a connection whose frames cannot be parsed.
const BROKEN: LmtpClose = LmtpClose {
    code: 1002,
    reason: lmtp::LmtpReason::Malformed,
    message: "the data is not a WebSocket frame of a client",
};

#[cfg(test)]
mod tests;
