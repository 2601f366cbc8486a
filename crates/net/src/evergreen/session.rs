//! A client's session: calls, the nodes it writes, the nodes it reads (EV-970 to EV-974).
//!
//! Owns: [`Session`] and its handles. Refuses to know: functions and kernels. Ids, sequence numbers, the order on the
//! wire and the closing of nodes are the machine's business; a handle that is dropped leaves nothing behind.
//!
//! ```text
//!   Session ── call(Request) ──► Call ── output("response") ──► Node ── read() ──► Reader ── pieces, end or status
//!      └────── write() ──► Writer ── node() ──► bound as an input, before or after it is written
//! ```

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use prost_types::Any;
use sapwood_proto::evergreen::{Dialect, Limits, Manners, Metadata, MetadataMode, Reason, Status};
use sapwood_proto::session::{
    self as machine, ActionKey, Config, CursorId, Live, NodeKey, Piece, Read, Retain, Side,
    WriteError,
};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use super::link::{self, Back, Link, Outgoing, pump};
use super::transport::{Address, Connection};

/// What a session is asked to be.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A failed action leaves the session alive (EV-930), where the server can do that.
    pub partial_failure: bool,
    /// Content is let go once everybody has read it or it is sent, here and at a server that announces `retain`; who
    /// comes later is told `NODE_RELEASED` (EV-955). For sessions that stream without end.
    pub retain_unread: bool,
    /// The session survives the loss of its connection, where the server gives it a token: it is connected to again, and
    /// nothing is lost or done twice (EV-940, EV-975). Not in the dialect msgpack, which has no way to say so.
    pub resume: bool,
    /// The session ends this long after it began (EV-950).
    pub timeout: Option<std::time::Duration>,
    /// What we hold and do at most; a server is not trusted (EV-972).
    pub limits: Arc<Limits>,
}

/// A session with a server. Clones share it; dropping the last handle of any kind closes it.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

struct Inner {
    link: Link,
    connection: Connection,
    extensions: Vec<String>,
    task: AbortHandle,
    /// Outputs asked for so far: the next one's id. Nodes of ours have ids of the machine's making.
    outputs: AtomicU64,
    /// Nodes made here so far; a session forgets none.
    nodes: AtomicUsize,
    limits: Arc<Limits>,
    worn: CancellationToken,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Ends the request stream; the task's end resets the call, and the server drops what it does for us.
        self.link.abort(link::closed());
        self.task.abort();
    }
}

impl Session {
    /// Connects and opens a session.
    ///
    /// # Errors
    /// The address cannot be used, nobody answers, or the server refuses.
    pub async fn connect(address: &Address, options: Options) -> Result<Self, Status> {
        Self::over(Connection::open(address).await?, options).await
    }

    /// Opens another session over the same connection.
    ///
    /// # Errors
    /// The connection is gone, or the server refuses.
    pub async fn another(&self, options: Options) -> Result<Self, Status> {
        Self::over(self.0.connection.clone(), options).await
    }

    async fn over(connection: Connection, options: Options) -> Result<Self, Status> {
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
        let link = Link::new(|now| {
            let config = Config {
                // Nothing of ours ends a session that is merely quiet: the server has its own idle limit.
                limits: Arc::new(Limits {
                    idle_timeout: IDLE_NEVER,
                    ..Limits::clone(&options.limits)
                }),
                partial_failure: true,
                metadata: metadata(dialect),
                manners: Manners {
                    lax_seq: dialect.manners().lax_seq,
                    joins: dialect == Dialect::Msgpack,
                    ..Manners::default()
                },
                retain: if options.retain_unread {
                    Retain::Unread
                } else {
                    Retain::Session
                },
                resume: options.resume,
                entropy: link::entropy(),
                ..Config::default()
            };
            machine::Session::new(Side::Client, config, now)
        });
        let outgoing = Outgoing {
            link: link.clone(),
            connection: 0,
        };
        let opened = connection.call(&headers, None, outgoing).await?;
        if options.resume && opened.token.is_none() {
            link.with(|live| live.machine().without_resume());
        }
        let back = opened.token.map(|token| Back {
            connection: connection.clone(),
            token,
            grace: options.limits.resume_grace,
        });
        let task = tokio::spawn(pump(link.clone(), opened.incoming, back)).abort_handle();
        Ok(Self(Arc::new(Inner {
            link,
            connection,
            extensions: opened.extensions,
            task,
            outputs: AtomicU64::new(0),
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

    /// A new node of ours, to be written.
    ///
    /// # Errors
    /// The session is over, or holds as many nodes as it may.
    pub fn write(&self) -> Result<Writer, Status> {
        let key = self.make(1, |live| live.machine().make(None))?;
        Ok(Writer {
            node: Node {
                session: self.clone(),
                key,
            },
        })
    }

    /// Calls a function of the server's. The action goes out before its inputs (EV-971); the outputs can be read, or
    /// bound as inputs of further calls, before anything has come (EV-973).
    ///
    /// # Errors
    /// The session is over, or holds as many nodes as it may.
    pub fn call(&self, request: Request) -> Result<Call, Status> {
        self.make(request.outputs.len(), |live| {
            let machine = live.machine();
            let mut outputs = Vec::with_capacity(request.outputs.len());
            for name in request.outputs {
                let id = format!("{:x}", self.0.outputs.fetch_add(1, Ordering::Relaxed));
                outputs.push((name.into(), machine.node(&id)?));
            }
            let inputs = request
                .inputs
                .into_iter()
                .map(|(name, node)| (name.into(), node.key))
                .collect();
            let action = machine.call(machine::Call {
                name: request.name.into(),
                target: request.target.into(),
                inputs,
                outputs: outputs.clone(),
                configs: request.configs,
            })?;
            Ok(Call {
                session: self.clone(),
                action,
                outputs,
                detached: false,
            })
        })
    }

    /// Makes `count` nodes, and notes how much is left for more.
    fn make<T>(
        &self,
        count: usize,
        act: impl FnOnce(&mut Live) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let Inner { link, limits, .. } = &*self.0;
        let (made, bytes) = link.with(|live| (act(live), live.machine().retained_bytes()));
        let nodes = self.0.nodes.fetch_add(count, Ordering::Relaxed) + count;
        let refused = made.as_ref().err().and_then(Status::known);
        if matches!(refused, Some(Reason::NodeLimit | Reason::RetainedLimit))
            || nodes >= limits.max_nodes / NODES_WORN
            || bytes >= limits.retained_bytes / BYTES_WORN
        {
            self.0.worn.cancel();
        }
        made
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

    /// Waits until the session is over, whoever ends it.
    ///
    /// # Errors
    /// The status with which it was aborted.
    pub async fn closed(&self) -> Result<(), Status> {
        let closed = std::future::poll_fn(|cx| self.0.link.with(|live| live.poll_closed(cx))).await;
        closed.map_or(Ok(()), |status| Err(Status::clone(&status)))
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("extensions", &self.0.extensions)
            .finish_non_exhaustive()
    }
}

/// A call to be made.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The function.
    pub name: String,
    /// The target; empty for the server's default.
    pub target: String,
    /// Inputs: parameter and node.
    pub inputs: Vec<(String, Node)>,
    /// Outputs wanted. What is not listed is not computed (EV-506).
    pub outputs: Vec<String>,
    /// Configs.
    pub configs: Vec<Any>,
}

/// A node of a session, ours or the server's. Clones are the same node.
#[derive(Clone)]
pub struct Node {
    session: Session,
    key: NodeKey,
}

impl Node {
    /// Reads the node from its first item on; the same content for every reader, whenever it begins.
    #[must_use]
    pub fn read(&self) -> Reader {
        let cursor = self
            .session
            .0
            .link
            .with(|live| live.machine().open(self.key, None));
        Reader {
            session: self.session.clone(),
            cursor,
            over: false,
        }
    }

    /// Whether both belong to the same session, so that one can be bound in a call of the other.
    #[must_use]
    pub fn is_of(&self, session: &Session) -> bool {
        Arc::ptr_eq(&self.session.0, &session.0)
    }

    /// The session it belongs to.
    #[must_use]
    pub const fn session(&self) -> &Session {
        &self.session
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.key).finish()
    }
}

/// Writes a node of ours: a leaf, or a tree.
#[derive(Debug)]
pub struct Writer {
    node: Node,
}

impl Writer {
    /// The node, to be bound as an input.
    #[must_use]
    pub const fn node(&self) -> &Node {
        &self.node
    }

    /// Waits for room in the outbound queue (EV-803).
    pub fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.node.session.0.link.with(|live| live.poll_room(cx))
    }

    /// Appends bytes of a leaf; what they are is said by the first write.
    ///
    /// # Errors
    /// [`WriteError::Full`] where [`Writer::poll_room`] would wait.
    pub fn try_write(&mut self, metadata: &Arc<Metadata>, data: Bytes) -> Result<(), WriteError> {
        self.node
            .session
            .0
            .link
            .with(|live| live.machine().write(self.node.key, metadata, data))
    }

    /// Appends bytes of a leaf as soon as there is room.
    ///
    /// # Errors
    /// The node or the session cannot take it.
    pub async fn write(&mut self, metadata: &Arc<Metadata>, data: Bytes) -> Result<(), WriteError> {
        loop {
            std::future::poll_fn(|cx| self.poll_room(cx)).await;
            match self.try_write(metadata, data.clone()) {
                Err(WriteError::Full) => {}
                written => return written,
            }
        }
    }

    /// Appends children to a tree; they may be the server's, and need not be written yet.
    ///
    /// # Errors
    /// The node or the session cannot take it.
    pub async fn list(&mut self, children: &[Node]) -> Result<(), WriteError> {
        let keys: Vec<NodeKey> = children.iter().map(|child| child.key).collect();
        loop {
            std::future::poll_fn(|cx| self.poll_room(cx)).await;
            match self
                .node
                .session
                .0
                .link
                .with(|live| live.machine().list(self.node.key, &keys))
            {
                Err(WriteError::Full) => {}
                written => return written,
            }
        }
    }

    /// Ends the node. An empty leaf is said to be of the type in `metadata`.
    ///
    /// # Errors
    /// The session is over.
    pub fn end(self, metadata: &Arc<Metadata>) -> Result<Node, WriteError> {
        self.node
            .session
            .0
            .link
            .with(|live| live.machine().end(self.node.key, metadata))?;
        Ok(self.node)
    }
}

/// A call under way. Dropping it asks the server to stop, where the server understands that (EV-974).
#[derive(Debug)]
pub struct Call {
    session: Session,
    action: ActionKey,
    outputs: Vec<(bytestring::ByteString, NodeKey)>,
    detached: bool,
}

impl Call {
    /// The output bound to this parameter.
    #[must_use]
    pub fn output(&self, name: &str) -> Option<Node> {
        let (_, key) = self.outputs.iter().find(|(mine, _)| *mine == *name)?;
        Some(Node {
            session: self.session.clone(),
            key: *key,
        })
    }

    /// Asks the server to stop. The outputs end with what there is (EV-913).
    pub fn cancel(&self) {
        if self.session.announces("cancel") {
            self.session
                .0
                .link
                .with(|live| live.machine().cancel(self.action));
        }
    }

    /// Lets the call go on without this handle; its outputs can still be read.
    pub fn detach(mut self) {
        self.detached = true;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.detached {
            // A call whose outputs are complete has a stale key, and nothing is sent.
            self.cancel();
        }
    }
}

/// Reads one node. Dropping it costs nothing.
#[derive(Debug)]
pub struct Reader {
    session: Session,
    cursor: CursorId,
    over: bool,
}

impl Reader {
    /// The next piece; `None` at the end. Of a failure nothing follows.
    pub fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, Arc<Status>>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let read = ready!(
            self.session
                .0
                .link
                .with(|live| live.poll_read(self.cursor, cx))
        );
        Poll::Ready(match read {
            Read::Piece(piece) => Some(Ok(piece)),
            Read::Failed(status) => {
                self.over = true;
                Some(Err(status))
            }
            Read::End | Read::Pending => {
                self.over = true;
                None
            }
        })
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// How the node, or the session, failed; an unfinished node of a finished session is `TRUNCATED`.
    pub async fn next(&mut self) -> Option<Result<Piece, Arc<Status>>> {
        std::future::poll_fn(|cx| self.poll_piece(cx)).await
    }

    /// All bytes to the end.
    ///
    /// # Errors
    /// As [`Reader::next`].
    pub async fn whole(mut self) -> Result<Vec<u8>, Arc<Status>> {
        let mut all = Vec::new();
        while let Some(piece) = self.next().await {
            all.extend_from_slice(&piece?.data);
        }
        Ok(all)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.session
            .0
            .link
            .with(|live| live.close_cursor(self.cursor));
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
