//! [`ClientSession`]: the client's end of a session (EV-970 to EV-974).
//!
//! Calls and nodes are handles of its [`PeerHandle`], the server.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sapwood_proto::evergreen::{
    Dialect, DialectCapabilities, MetadataMode, Reason, SessionLimits, Status,
};
use sapwood_proto::session::peer::{
    CallRequest, HandleOwner, PeerCall, PeerHandle, PeerNodeWriter,
};
use sapwood_proto::session::{self as machine, Config, RetentionPolicy, SharedSession, Side};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::link::{self, ClientLink, ClientMessages, ClientReconnect, pump};
use super::transport::{ServerAddress, ServerConnection};

/// What a session is asked to be.
#[derive(Clone, Debug, Default)]
pub struct ClientSessionOptions {
    /// A failed action leaves the session alive (EV-930), where the server can do that.
    pub partial_failure: bool,
    /// Content is let go once everybody has read it or it is sent, here and at a server that announces `retain`; who
    /// arrives later fails with `NODE_RELEASED` (EV-955). For sessions that stream without end.
    pub retain_unread: bool,
    /// The session survives the loss of its connection, where the server gives it a token: it is connected to again, and
    /// nothing is lost or done twice (EV-940, EV-975). Not in the dialect msgpack, which has no way to say so.
    pub resume: bool,
    /// The session ends this long after it began (EV-950).
    pub timeout: Option<std::time::Duration>,
    /// What we hold and do at most; a server is not trusted (EV-972).
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
    /// Nodes made here so far; a session forgets none.
    nodes: AtomicUsize,
    limits: Arc<SessionLimits>,
    worn: CancellationToken,
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        // Ends the request stream; the task's end resets the call, and the server drops what it does for us.
        self.link.abort(link::closed());
        self.task.abort();
    }
}

impl HandleOwner for SessionHandle {
    /// Notes how much is left for more.
    fn made(&self, nodes: usize, bytes: u64, refused: Option<Reason>) {
        let nodes = self.nodes.fetch_add(nodes, Ordering::Relaxed) + nodes;
        if matches!(refused, Some(Reason::NodeLimit | Reason::RetainedLimit))
            || nodes >= self.limits.max_nodes / NODES_WORN
            || bytes >= self.limits.retained_bytes / BYTES_WORN
        {
            self.worn.cancel();
        }
    }
}

impl ClientSession {
    /// Connects and opens a session.
    ///
    /// # Errors
    /// The address cannot be used, nobody answers, or the server refuses.
    pub async fn connect(
        address: &ServerAddress,
        options: ClientSessionOptions,
    ) -> Result<Self, Status> {
        Self::over(ServerConnection::open(address).await?, options).await
    }

    /// Opens another session over the same connection.
    ///
    /// # Errors
    /// The connection is gone, or the server refuses.
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
                // Nothing of ours ends a session that is merely quiet: the server has its own idle limit.
                limits: Arc::new(SessionLimits {
                    idle_timeout: IDLE_NEVER,
                    ..SessionLimits::clone(&options.limits)
                }),
                partial_failure: true,
                metadata: metadata(dialect),
                capabilities: DialectCapabilities {
                    lax_seq: dialect.capabilities().lax_seq,
                    mixes: dialect.capabilities().mixes,
                    joins: dialect == Dialect::Msgpack,
                    ..DialectCapabilities::default()
                },
                retain: if options.retain_unread {
                    RetentionPolicy::Unread
                } else {
                    RetentionPolicy::Session
                },
                resume: options.resume,
                entropy: link::entropy(),
                ..Config::default()
            };
            machine::SessionMachine::new(Side::Client, config, now)
        });
        let outgoing = ClientMessages {
            link: link.clone(),
            connection: 0,
        };
        let opened = connection.call(&headers, None, outgoing).await?;
        if options.resume && opened.token.is_none() {
            link.with(|live| live.machine().without_resume());
        }
        let back = opened.token.map(|token| ClientReconnect {
            connection: connection.clone(),
            token,
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

    /// The extensions that the server announced; nothing else is used (EV-970).
    #[must_use]
    pub fn extensions(&self) -> &[String] {
        &self.0.extensions
    }

    /// Whether the server announced this extension.
    #[must_use]
    pub fn announces(&self, extension: &str) -> bool {
        self.0.extensions.iter().any(|name| name == extension)
    }

    /// A handle to call the server's actions; holding it keeps the session open.
    #[must_use]
    pub fn peer(&self) -> PeerHandle {
        let keep = Arc::clone(&self.0);
        let mut peer = PeerHandle::new(self.0.link.shared.clone(), Some(keep));
        peer.cancels = self.announces("cancel");
        peer.deadlines = self.announces("deadline");
        peer
    }

    /// A new node of ours, to be written.
    ///
    /// # Errors
    /// The session is over, or holds as many nodes as it may.
    pub fn write(&self) -> Result<PeerNodeWriter, Status> {
        self.peer().write()
    }

    /// Calls a function of the server's, see [`PeerHandle::call`].
    ///
    /// # Errors
    /// The session is over, or holds as many nodes as it may.
    pub fn call(&self, request: CallRequest) -> Result<PeerCall, Status> {
        self.peer().call(request)
    }

    /// The state machine of this session, for serving what its server asks for; does not keep the session open.
    #[must_use]
    pub fn shared(&self) -> SharedSession {
        self.0.link.shared.clone()
    }

    /// From when the times of [`ClientSession::shared`] count.
    #[must_use]
    pub fn origin(&self) -> Instant {
        self.0.link.origin
    }

    /// Resolves once the session has used much of what it may ever hold (EV-801), or all of it: a session forgets
    /// nothing, so who calls without end goes on with another one. Does not keep the session alive, and stays pending
    /// when it ends.
    pub fn worn(&self) -> impl Future<Output = ()> + Send + 'static {
        self.0.worn.clone().cancelled_owned()
    }

    /// Says that nothing more is sent, and waits until the server has finished everything (EV-109).
    ///
    /// # Errors
    /// The status with which the session was aborted.
    pub async fn close(self) -> Result<(), Status> {
        self.0.link.with(|live| live.machine().finish_sending());
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

/// How a server's metadata is judged. A server of the JSON dialect says the same on every fragment of a leaf (EV-721).
const fn metadata(dialect: Dialect) -> MetadataMode {
    match dialect {
        Dialect::Json => MetadataMode::Lenient,
        dialect => dialect.metadata(),
    }
}

/// A quarter of the nodes: what the server lists under its outputs are nodes too, and are not counted here.
const NODES_WORN: usize = 4;
/// Half of the bytes.
const BYTES_WORN: u64 = 2;
const IDLE_NEVER: std::time::Duration = std::time::Duration::from_secs(365 * 24 * 3600);
