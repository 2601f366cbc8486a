//! A node of a session as a node of the kernel: the flattening cursor behind [`crate::Node`] (D-1).
//!
//! Owns: [`Flattened`], the [`Replay`] over a session's cursors, and how a piece becomes a chunk (section 14 of the
//! kernel page). Refuses to know: actions, and how pieces arrive.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use sapwood_proto::evergreen::Metadata;
use sapwood_proto::session::{ActionKey, CursorId, NodeKey, Piece, Read, Session};

use super::failure;
use super::link::Link;
use super::signals::Signals;
use super::wire;
use crate::Result;
use crate::chunk::Chunk;
use crate::meta::Meta;
use crate::name::Mime;
use crate::node::{Cursor, Node, Replay};

/// An input of an action.
pub(super) struct Flattened {
    link: Link,
    node: NodeKey,
    action: ActionKey,
    signals: Arc<Signals>,
    /// What the last piece was: nearly every piece is of the same leaf as the one before.
    last: Mutex<Option<Typed>>,
}

/// Metadata of the wire, and what it is in the kernel.
struct Typed {
    wire: Arc<Metadata>,
    mime: Mime,
    meta: Option<Arc<Meta>>,
}

impl Flattened {
    /// The node `node` as an input of `action`.
    pub(super) fn node(
        link: Link,
        node: NodeKey,
        action: ActionKey,
        signals: Arc<Signals>,
    ) -> Node {
        Node::replaying(Arc::new(Self {
            link,
            node,
            action,
            signals,
            last: Mutex::default(),
        }))
    }

    fn chunk(&self, piece: Piece) -> Chunk {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let typed = match &*last {
            Some(typed) if Arc::ptr_eq(&typed.wire, &piece.metadata) => typed,
            _ => last.insert(Typed::new(&piece.metadata)),
        };
        let mut chunk = Chunk::bytes(piece.data)
            .with_mime(typed.mime.clone())
            .with_part(piece.item);
        if piece.first {
            chunk.meta.clone_from(&typed.meta);
        }
        chunk
    }

    /// Takes what else is there: the lock is taken once for all of it, and what comes after is told again.
    fn read_ahead(&self, machine: &mut Session, cursor: &mut Cursor, first: &Piece) {
        let mut bytes = first.data.len();
        while cursor.ahead.len() < AHEAD && bytes < AHEAD_BYTES {
            let Read::Piece(piece) = machine.read(CursorId::from_bits(cursor.slot)) else {
                return;
            };
            bytes += piece.data.len();
            cursor.position += 1;
            cursor.ahead.push_back(self.chunk(piece));
        }
    }
}

impl Typed {
    fn new(metadata: &Arc<Metadata>) -> Self {
        Self {
            wire: Arc::clone(metadata),
            mime: Mime::shared(metadata.mimetype()),
            meta: wire::meta(metadata).map(Arc::new),
        }
    }
}

impl Replay for Flattened {
    fn open(&self) -> Cursor {
        let id = self
            .link
            .with(|live| live.machine().open(self.node, Some(self.action)));
        Cursor {
            slot: id.to_bits(),
            ..Cursor::default()
        }
    }

    fn poll_next(&self, cursor: &mut Cursor, cx: &mut Context<'_>) -> Poll<Option<Result<Chunk>>> {
        let read = self.link.with(|live| {
            let read = live.poll_read(CursorId::from_bits(cursor.slot), cx);
            if let Poll::Ready(Read::Piece(first)) = &read {
                self.read_ahead(live.machine(), cursor, first);
            }
            read
        });
        if read.is_pending() {
            self.signals.park();
        }
        read.map(|read| match read {
            Read::Piece(piece) => {
                cursor.position += 1;
                Some(Ok(self.chunk(piece)))
            }
            Read::Failed(status) => {
                self.signals.fail(&status);
                Some(Err(failure::error(&status)))
            }
            // `poll_read` keeps a pending cursor waiting; what is left is the end.
            Read::End | Read::Pending => None,
        })
    }

    fn close(&self, cursor: &mut Cursor) {
        self.link
            .with(|live| live.close_cursor(CursorId::from_bits(cursor.slot)));
    }

    fn is_complete(&self) -> bool {
        self.link.with(|live| live.machine().is_complete(self.node))
    }
}

/// Pieces taken at once, and their bytes; the last may exceed that.
const AHEAD: usize = 32;
const AHEAD_BYTES: usize = 16 * 1024;
