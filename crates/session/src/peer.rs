//! Handles with which a task calls actions of the peer and writes nodes (EV-970 to EV-974, EV-811).
//!
//! Ids, sequence numbers, the order on the wire and the end of nodes are managed by the session machine; dropping a
//! handle cleans up after it.
//!
//! ```text
//!   Peer ── call(Request) ──► Call ── output("response") ──► Node ── read() ──► Reader ── pieces, end or status
//!     └──── write() ──► Writer ── node() ──► bound as an input, before or after it is written
//! ```

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use bytestring::ByteString;
use prost_types::Any;

use sapwood_proto::evergreen::{Metadata, Reason, Status};
use sapwood_proto::session::{
    ActionKey, ActionRequest, CursorId, CursorRead, LeafPiece, NodeKey, WriteError,
};

use crate::live::Live;
use crate::shared::SharedSession;

/// An owner that all handles of a session share; it is notified of the nodes that handles create.
pub trait HandleOwner: Send + Sync {
    /// `nodes` nodes were created, or creation was refused for the given reason; the session now retains `bytes` bytes.
    fn made(&self, nodes: usize, bytes: u64, refused: Option<Reason>) {
        let _ = (nodes, bytes, refused);
    }
}

/// The peer of a session. Clones refer to the same peer.
#[derive(Clone)]
pub struct PeerHandle {
    shared: SharedSession,
    keep: Option<Arc<dyn HandleOwner>>,
    /// Whether the peer understands CANCEL.
    pub cancels: bool,
    /// Whether the peer enforces deadlines (EV-950).
    pub deadlines: bool,
}

impl PeerHandle {
    /// Creates a handle for the peer of `shared`, which understands no extensions of the seed. Every derived handle
    /// shares `keep`.
    #[must_use]
    pub fn new(shared: SharedSession, keep: Option<Arc<dyn HandleOwner>>) -> Self {
        Self {
            shared,
            keep,
            cancels: false,
            deadlines: false,
        }
    }

    /// Creates a node of ours, to be written.
    ///
    /// # Errors
    /// The session is over, or its node limit is reached.
    pub fn write(&self) -> Result<PeerNodeWriter, Status> {
        let key = self.make(1, |live| live.machine().nodes().make(None))?;
        Ok(PeerNodeWriter {
            node: SessionNode {
                peer: self.clone(),
                key,
            },
            ended: false,
        })
    }

    /// Calls a function of the peer. The action is sent before its inputs (EV-971); its outputs can be read, or bound
    /// as inputs of further calls, before anything has arrived (EV-973).
    ///
    /// # Errors
    /// The session is over, or its node limit is reached.
    pub fn call(&self, request: CallRequest) -> Result<PeerCall, Status> {
        self.make(request.outputs.len(), |live| {
            let machine = live.machine();
            let mut outputs = Vec::with_capacity(request.outputs.len());
            for name in request.outputs {
                outputs.push((name.into(), machine.calls().expect()?));
            }
            let inputs = request
                .inputs
                .into_iter()
                .map(|(name, node)| (name.into(), node.key))
                .collect();
            let action = machine.calls().call(ActionRequest {
                name: request.name.into(),
                target: request.target.into(),
                inputs,
                outputs: outputs.clone(),
                configs: request.configs,
            })?;
            Ok(PeerCall {
                peer: self.clone(),
                action,
                outputs,
                detached: false,
            })
        })
    }

    /// Whether the session is over, however it ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.shared.with(|live| live.closed().is_some())
    }

    fn make<T>(
        &self,
        count: usize,
        act: impl FnOnce(&mut Live) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let act = |live: &mut Live| (act(live), live.machine().retained_bytes());
        let (made, bytes) = self.shared.with_flushed(act);
        // After the lock: the owner may look at the session. A refusal is reported too, because it shows that the
        // session is at its limits.
        if let Some(keep) = &self.keep {
            let refused = made.as_ref().err().and_then(Status::known);
            keep.made(count, bytes, refused);
        }
        made
    }
}

impl fmt::Debug for PeerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerHandle").finish_non_exhaustive()
    }
}

/// Parameters of a call.
#[derive(Clone, Debug, Default)]
pub struct CallRequest {
    /// The function.
    pub name: String,
    /// The target; empty for the peer's default.
    pub target: String,
    /// Inputs: parameter and node.
    pub inputs: Vec<(String, SessionNode)>,
    /// Requested outputs. Outputs that are not listed are not computed (EV-506).
    pub outputs: Vec<String>,
    /// Configs.
    pub configs: Vec<Any>,
}

/// A node of a session, ours or the peer's. Clones refer to the same node.
#[derive(Clone)]
pub struct SessionNode {
    peer: PeerHandle,
    key: NodeKey,
}

impl SessionNode {
    /// Reads the node from its first item; every reader gets the same content, whenever it starts.
    #[must_use]
    pub fn read(&self) -> NodeReader {
        let open = |live: &mut Live| live.machine().nodes().open(self.key, None);
        NodeReader {
            cursor: self.peer.shared.with_flushed(open),
            peer: self.peer.clone(),
            over: false,
        }
    }

    /// Whether the node belongs to the session with this peer, so that it can be bound in a call there.
    #[must_use]
    pub fn is_of(&self, peer: &PeerHandle) -> bool {
        self.peer.shared.is(&peer.shared)
    }
}

impl fmt::Debug for SessionNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SessionNode").field(&self.key).finish()
    }
}

/// Writes a node of ours: a leaf, or a tree. If it is dropped before [`PeerNodeWriter::end`], the node ends as aborted,
/// and its readers fail with that status.
#[derive(Debug)]
pub struct PeerNodeWriter {
    node: SessionNode,
    ended: bool,
}

impl PeerNodeWriter {
    /// The node, which can be bound as an input.
    #[must_use]
    pub const fn node(&self) -> &SessionNode {
        &self.node
    }

    /// Appends bytes to a leaf, waiting for room (EV-803); the first write sets its metadata.
    ///
    /// # Errors
    /// The node or the session cannot take it.
    pub async fn write(&mut self, metadata: &Arc<Metadata>, data: Bytes) -> Result<(), WriteError> {
        self.when_room(|live, node| live.machine().nodes().write(node, metadata, data.clone()))
            .await
    }

    /// Appends children to a tree, waiting for room; they may be the peer's nodes, and need not be written yet.
    ///
    /// # Errors
    /// The node or the session cannot take it.
    pub async fn list(&mut self, children: &[SessionNode]) -> Result<(), WriteError> {
        let keys: Vec<NodeKey> = children.iter().map(|child| child.key).collect();
        self.when_room(|live, node| live.machine().nodes().list(node, &keys))
            .await
    }

    async fn when_room(
        &self,
        write: impl Fn(&mut Live, NodeKey) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        poll_fn(|cx| {
            // The waker is registered under the lock of the attempt, so room that appears now is not missed.
            self.with(|live, node| match write(live, node) {
                Err(WriteError::Full) => live.poll_room(cx).map(|()| Err(WriteError::Full)),
                written => Poll::Ready(written),
            })
        })
        .await
    }

    /// Ends the node. An empty leaf gets `metadata`.
    ///
    /// # Errors
    /// The session is over.
    pub fn end(mut self, metadata: &Arc<Metadata>) -> Result<SessionNode, WriteError> {
        self.ended = true;
        self.with(|live, node| live.machine().nodes().end(node, metadata))?;
        Ok(self.node.clone())
    }

    /// Ends the node with an error status (EV-931).
    pub fn fail(mut self, status: impl Into<Arc<Status>>) {
        self.fail_with(status.into());
    }

    fn fail_with(&mut self, status: Arc<Status>) {
        self.ended = true;
        self.with(|live, node| live.machine().nodes().end_with_status(node, Some(status)));
    }

    fn with<R>(&self, act: impl FnOnce(&mut Live, NodeKey) -> R) -> R {
        let SessionNode { peer, key } = &self.node;
        peer.shared.with_flushed(|live| act(live, *key))
    }
}

impl Drop for PeerNodeWriter {
    fn drop(&mut self) {
        if !self.ended {
            let message = "the writer of this node was dropped before its end";
            self.fail_with(Arc::new(Status::new(Reason::Cancelled, message)));
        }
    }
}

/// A running call. Dropping it asks the peer to stop, if the peer understands that (EV-974).
#[derive(Debug)]
pub struct PeerCall {
    peer: PeerHandle,
    action: ActionKey,
    outputs: Vec<(ByteString, NodeKey)>,
    detached: bool,
}

impl PeerCall {
    /// The output bound to this parameter.
    #[must_use]
    pub fn output(&self, name: &str) -> Option<SessionNode> {
        let (_, key) = self.outputs.iter().find(|(mine, _)| *mine == *name)?;
        Some(SessionNode {
            peer: self.peer.clone(),
            key: *key,
        })
    }

    /// Asks the peer to stop. The outputs end with what was produced so far (EV-913).
    pub fn cancel(&self) {
        if self.peer.cancels {
            // A peer that does not know CANCEL would fail it as an unknown action, which can end the session (EV-107).
            let cancel = |live: &mut Live| live.machine().calls().cancel(self.action);
            self.peer.shared.with_flushed(cancel);
        }
    }

    /// Detaches the call from this handle: it goes on, and its outputs can still be read.
    pub fn detach(mut self) {
        self.detached = true;
    }
}

impl Drop for PeerCall {
    fn drop(&mut self) {
        if !self.detached {
            // The key of a call whose outputs are complete is stale, so nothing is sent for it.
            let PeerHandle {
                shared, cancels, ..
            } = &self.peer;
            shared.with_flushed(|live| live.machine().calls().abandon(self.action, *cancels));
        }
    }
}

/// Reads one node. Dropping it costs nothing.
#[derive(Debug)]
pub struct NodeReader {
    peer: PeerHandle,
    cursor: CursorId,
    over: bool,
}

impl NodeReader {
    /// Returns the next piece; `None` at the end. Nothing follows a failure.
    pub fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<LeafPiece, Arc<Status>>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let read = |live: &mut Live| {
            // A client has no task that begins turns, so each poll of a reader is one: the budget of visits is per turn
            // (D-27).
            live.machine().nodes().begin_turn();
            live.poll_read(self.cursor, cx)
        };
        Poll::Ready(match ready!(self.peer.shared.with_flushed(read)) {
            CursorRead::Piece(piece) => Some(Ok(piece)),
            CursorRead::Failed(status) => {
                self.over = true;
                Some(Err(status))
            }
            CursorRead::Reference(_) => {
                self.over = true;
                // Following it would take a resolver with the guards of EV-412 to EV-414, which handles do not have.
                let message = "references in an answer are not followed; send the content inline";
                let rejection = Status::new(Reason::RefDenied, message);
                let fail = |live: &mut Live| {
                    live.machine()
                        .nodes()
                        .fail_reference(self.cursor, &rejection)
                };
                Some(Err(self.peer.shared.with_flushed(fail)))
            }
            CursorRead::Busy => {
                // The visit budget of this turn is used up: yield to other tasks and continue in the next turn.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            // `poll_read` has turned a pending cursor into `Poll::Pending`, so only the end is left.
            CursorRead::End | CursorRead::Pending => {
                self.over = true;
                None
            }
        })
    }

    /// Returns the next piece; `None` at the end.
    ///
    /// # Errors
    /// How the node, or the session, failed; an unfinished node of a finished session is `TRUNCATED`.
    pub async fn next(&mut self) -> Option<Result<LeafPiece, Arc<Status>>> {
        poll_fn(|cx| self.poll_piece(cx)).await
    }

    /// Reads all bytes to the end.
    ///
    /// # Errors
    /// As [`NodeReader::next`].
    pub async fn whole(mut self) -> Result<Vec<u8>, Arc<Status>> {
        let mut all = Vec::new();
        while let Some(piece) = self.next().await {
            all.extend_from_slice(&piece?.data);
        }
        Ok(all)
    }
}

impl Drop for NodeReader {
    fn drop(&mut self) {
        let close = |live: &mut Live| live.close_cursor(self.cursor);
        self.peer.shared.with_flushed(close);
    }
}

#[cfg(test)]
mod tests;
