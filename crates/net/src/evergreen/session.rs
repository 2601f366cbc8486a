//! [`ClientSession`]: the client's end of a session (EV-970 to EV-974).
//!
//! Calls and nodes are handles of its [`PeerHandle`], the server.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sapwood_proto::evergreen::{Reason, SessionLimits, Status};
use sapwood_proto::session::{self as machine, Config, RetentionPolicy, Side};
use sapwood_session::peer::{CallRequest, HandleOwner, PeerCall, PeerHandle, PeerNodeWriter};
use sapwood_session::{SessionClock, SharedSession};
use tokio::task::AbortHandle;

use tokio_util::sync::CancellationToken;

use super::link::{self, ClientLink, ClientMessages, ClientReconnect, pump};
use super::transport::ServerConnection;
use crate::address::ServerAddress;

/// Options of a session.
#[derive(Clone, Debug, Default)]
pub struct ClientSessionOptions {
    /// A failed action does not end the session (EV-930), if the server supports that.
    pub partial_failure: bool,
    /// Content is released once all readers have read it or it is sent, both here and at a server that announces
    /// `retain`; later readers fail with `NODE_RELEASED` (EV-955). For sessions that stream without end.
    pub retain_unread: bool,
    /// The session survives the loss of its connection, if the server gives it a token: the client reconnects, and
    /// nothing is lost or executed twice (EV-940, EV-975). Not in the dialect msgpack, which cannot express it.
    pub resume: bool,
    /// The session ends this long after it began (EV-950).
    pub timeout: Option<std::time::Duration>,
    /// Local limits of memory and work; a server is not trusted (EV-972).
    pub limits: Arc<SessionLimits>,
}

/// A session with a server. Clones share it; dropping the last handle of any kind closes it.
#[derive(Clone)]
pub struct ClientSession(Arc<SessionHandle>);

struct SessionHandle {
    link: ClientLink,
    connection: ServerConnection,
    extensions: Vec<String>,
    task: AbortHandle,
    /// Number of nodes created here so far; a session never removes a node.
    nodes: AtomicUsize,
    limits: Arc<SessionLimits>,
    worn: CancellationToken,
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        // Ends the request stream. The end of the task resets the call, so that the server cancels the session's work.
        // The machine before the task: the readers that are left must get an end, and nobody drives the machine
        // afterwards.
        self.link.abort(link::closed());
        self.task.abort();
    }
}

impl HandleOwner for SessionHandle {
    /// Cancels `worn` when the session has used much of its limits.
    fn made(&self, nodes: usize, bytes: u64, refused: Option<Reason>) {
        // Counted here, outside of the session's lock, which the callers of this have released.
        let nodes = self.nodes.fetch_add(nodes, Ordering::Relaxed) + nodes;
        if matches!(refused, Some(Reason::NodeLimit | Reason::RetainedLimit))
            || nodes >= self.limits.max_nodes / NODES_WORN
            || bytes >= self.limits.retained_bytes / BYTES_WORN
        {
            // Early, because running calls still need room, and the caller needs time to open another session.
            self.worn.cancel();
        }
    }
}

impl ClientSession {
    /// Connects and opens a session. The URL is `http://HOST:PORT` or `https://HOST:PORT` for gRPC; `ws://` or `wss://`
    /// for WebSockets, in protobuf unless `?dialect=json` or `?dialect=msgpack` is given. All may have the prefix
    /// `evergreen+` (D-40).
    ///
    /// # Errors
    /// The address cannot be used, the server does not answer, or it refuses.
    pub async fn connect(
        address: &ServerAddress,
        options: ClientSessionOptions,
    ) -> Result<Self, Status> {
        Self::over(ServerConnection::open(address).await?, options).await
    }

    /// Opens another session over the same connection.
    ///
    /// # Errors
    /// The connection is lost, or the server refuses.
    pub async fn another(&self, options: ClientSessionOptions) -> Result<Self, Status> {
        Self::over(self.0.connection.clone(), options).await
    }

    async fn over(
        connection: ServerConnection,
        options: ClientSessionOptions,
    ) -> Result<Self, Status> {
        let mut headers = Vec::new();
        if options.partial_failure {
            headers.push(("evergreen-partial-failure", "1".to_owned()));
        }
        if options.retain_unread {
            headers.push(("evergreen-retain", "unread".to_owned()));
        }
        if options.resume {
            headers.push(("evergreen-resume", "1".to_owned()));
        }
        if let Some(timeout) = options.timeout {
            headers.push((
                "evergreen-timeout-ms",
                timeout.as_millis().max(1).to_string(),
            ));
        }
        let dialect = connection.dialect();
        let link = ClientLink::new(|now| {
            let config = Config {
                // The client has no idle timeout for a session: the server has its own.
                limits: Arc::new(SessionLimits {
                    idle_timeout: IDLE_NEVER,
                    ..SessionLimits::clone(&options.limits)
                }),
                // A function of the client that fails ends with a Status chunk, which servers accept in every mode
                // (EV-812). What a failed action of the server does is asked for by the header above.
                partial_failure: true,
                retain: if options.retain_unread {
                    RetentionPolicy::Unread
                } else {
                    RetentionPolicy::Session
                },
                resume: options.resume,
                entropy: link::entropy(),
                ..Config::for_server_of(dialect)
            };
            machine::SessionMachine::new(Side::Client, config, now)
        });
        let outgoing = ClientMessages {
            link: link.clone(),
            connection: 0,
        };
        let opened = connection.call(&headers, None, outgoing).await?;
        // A server that does not know the extension gives no token. What is retained for a reconnection is released.
        if options.resume && opened.token.is_none() {
            link.with(|live| live.machine().without_resume());
        }
        let back = opened.token.map(|token| ClientReconnect {
            connection: connection.clone(),
            token,
            // The server's grace period is not announced. It answers `NO_SESSION` when it is shorter.
            grace: options.limits.resume_grace,
        });
        let task = tokio::spawn(pump(link.clone(), opened.incoming, back)).abort_handle();
        Ok(Self(Arc::new(SessionHandle {
            link,
            connection,
            extensions: opened.extensions,
            task,
            nodes: AtomicUsize::new(0),
            limits: options.limits,
            worn: CancellationToken::new(),
        })))
    }

    /// Returns the extensions that the server announced; no others are used (EV-970).
    #[must_use]
    pub fn extensions(&self) -> &[String] {
        &self.0.extensions
    }

    /// Returns whether the server announced this extension.
    #[must_use]
    pub fn announces(&self, extension: &str) -> bool {
        self.0.extensions.iter().any(|name| name == extension)
    }

    /// Returns a handle to call the server's actions; holding it keeps the session open.
    #[must_use]
    pub fn peer(&self) -> PeerHandle {
        let keep = Arc::clone(&self.0);
        let mut peer = PeerHandle::new(self.0.link.shared.clone(), Some(keep));
        // Only announced extensions are used: another server would fail an unknown action, and so the session (EV-970).
        peer.cancels = self.announces("cancel");
        peer.deadlines = self.announces("deadline");
        peer
    }

    /// Creates a local node and returns its writer.
    ///
    /// # Errors
    /// The session is over, or its limit of nodes is reached.
    pub fn write(&self) -> Result<PeerNodeWriter, Status> {
        self.peer().write()
    }

    /// Calls a function of the server; see [`PeerHandle::call`].
    ///
    /// # Errors
    /// The session is over, or its limit of nodes is reached.
    pub fn call(&self, request: CallRequest) -> Result<PeerCall, Status> {
        self.peer().call(request)
    }

    /// Returns the state machine of this session, for running functions that its server calls; does not keep the
    /// session open.
    #[must_use]
    pub fn shared(&self) -> SharedSession {
        self.0.link.shared.clone()
    }

    /// Returns the clock of [`ClientSession::shared`].
    #[must_use]
    pub fn clock(&self) -> SessionClock {
        self.0.link.clock
    }

    /// Resolves once the session has used much of its limits (EV-801), or all of it. A session never removes nodes, so
    /// a caller with endless calls has to continue with another session. Does not keep the session alive, and stays
    /// pending when it ends.
    pub fn worn(&self) -> impl Future<Output = ()> + Send + 'static {
        self.0.worn.clone().cancelled_owned()
    }

    /// Sends the half-close, and waits until the server has finished everything (EV-109).
    ///
    /// # Errors
    /// The status with which the session was aborted.
    pub async fn close(self) -> Result<(), Status> {
        self.0
            .link
            .with(|live| live.machine().calls().finish_sending());
        self.closed().await
    }

    /// Resolves when the session is over, whichever side ends it.
    ///
    /// # Errors
    /// The status with which it was aborted.
    pub async fn closed(&self) -> Result<(), Status> {
        let closed = std::future::poll_fn(|cx| self.0.link.with(|live| live.poll_closed(cx))).await;
        closed.map_or(Ok(()), |status| Err(Status::clone(&status)))
    }
}

impl fmt::Debug for ClientSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("extensions", &self.0.extensions)
            .finish_non_exhaustive()
    }
}

/// A session is worn at a quarter of its nodes: nodes that the server creates as outputs count towards the limit, but
/// not here.
const NODES_WORN: usize = 4;
/// A session is worn at half of its bytes.
const BYTES_WORN: u64 = 2;
const IDLE_NEVER: std::time::Duration = std::time::Duration::from_secs(365 * 24 * 3600);
