//! [`Node`]: an append-only log of chunks that any number of readers replay (D-1).
//!
//! Nothing progresses unless a reader is polled (KE-122).
//!
//! ```text
//!   Node ─┬─ one chunk                    ── read() ──► a stream of chunks
//!         ├─ a log over a lazy source (local), or a cursor into a session
//!         ├─ a tree of nodes
//!         └─ a view: one port, one choice
//! ```

mod channel;
mod convert;
mod local;
mod read;
mod relay;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_proto::session::NodeKey;

pub use self::channel::NodeWriter;
pub(crate) use self::convert::finite;
pub(crate) use self::local::panic_text;
pub use self::local::source_panics;
pub(crate) use self::read::gather;
use crate::chunk::Chunk;
use crate::limits;
use crate::name::Port;
use crate::want::RequestedPorts;
use crate::{Chunks, Result};

/// What a node retains for later readers. Each chunk counts as its data, or as its own size if that is more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// Everything, up to `bytes`; then readers get `Limit` after the logged chunks (KE-124).
    All {
        /// Bytes retained at most.
        bytes: usize,
    },
    /// Chunks that some live reader has not passed. The leading reader waits while more than `bytes` separate it from
    /// the slowest (KE-125). Not for diamonds: they deadlock.
    Window {
        /// Bytes between the slowest and the leading reader.
        bytes: usize,
    },
}

impl Default for Retention {
    fn default() -> Self {
        Self::All {
            bytes: limits::NODE_BYTES_MAX,
        }
    }
}

/// A stream of chunks that can be read any number of times, from the start, at any time. Cloning shares it.
#[derive(Clone)]
pub struct Node {
    body: NodeBody,
    demand: Option<Arc<Demand>>,
}

#[derive(Clone)]
enum NodeBody {
    /// One chunk, or one error: the result of a conversion.
    One(Arc<Result<Chunk>>),
    Log(Arc<dyn Replay>),
    Tree(Arc<[Node]>),
    View(Arc<Node>, NodeView),
}

/// The filter of a view: one port, which becomes the main one, and one choice, which becomes choice 0. `None` lets all
/// of them through.
#[derive(Clone, Debug, Default)]
struct NodeView {
    port: Option<Port>,
    choice: Option<u32>,
}

impl NodeView {
    /// Whether a chunk passes the filter. Renames its port and choice.
    fn admit(&self, chunk: &mut Chunk) -> bool {
        if let Some(port) = &self.port {
            if chunk.port != *port {
                return false;
            }
            chunk.port = Port::MAIN;
        }
        if let Some(choice) = self.choice {
            if chunk.choice != choice {
                return false;
            }
            chunk.choice = 0;
        }
        true
    }

    /// This filter combined with `inner`; `None` if both select a port, or both select a choice.
    fn over(&self, inner: &Self) -> Option<Self> {
        // Two filters of one kind are not one filter: the inner one renames what it lets through, and the outer one
        // sees the new name.
        let both = self.port.is_some() && inner.port.is_some()
            || self.choice.is_some() && inner.choice.is_some();
        (!both).then(|| Self {
            port: self.port.clone().or_else(|| inner.port.clone()),
            choice: self.choice.or(inner.choice),
        })
    }
}

/// A reader's position in a [`Replay`]. Its numbers are interpreted by that replay.
#[derive(Default)]
pub(crate) struct ReplayCursor {
    /// The reader's slot.
    pub(crate) slot: u64,
    /// The number of the next chunk.
    pub(crate) position: u64,
    /// Chunks that were read together with the last one, for a log whose lock is expensive. They are returned before
    /// the log is read again.
    pub(crate) ahead: VecDeque<Chunk>,
    /// A stream that is read in place of the log until it ends; the log's [`Replay::poll_next`] polls it.
    pub(crate) inside: Option<Chunks>,
    /// The answer of a session's node that is being read, and a chunk without data that will carry its finish reason
    /// (D-51).
    pub(crate) turn: Option<(NodeKey, Chunk)>,
}

/// The log behind a node, read through cursors. There are two implementations: local, and a session's flattening
/// cursor.
///
/// A cursor is not polled again after an error or the end. No lock may be held across an await, and
/// [`Replay::poll_next`] must wake the last waker of every cursor that it left pending.
pub(crate) trait Replay: Send + Sync {
    /// A new reader, at the first chunk. Must not start work.
    fn open(&self) -> ReplayCursor;

    /// The next chunk of a reader.
    fn poll_next(
        &self,
        cursor: &mut ReplayCursor,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Chunk>>>;

    /// Ends a reader; called exactly once for each.
    fn close(&self, cursor: &mut ReplayCursor);

    /// Whether everything has been logged.
    fn is_complete(&self) -> bool;
}

/// The ports of a run that the readers of its node have requested so far (KE-149).
#[derive(Debug, Default)]
pub(crate) struct Demand(Mutex<OnDemand>);

#[derive(Debug, Default)]
struct OnDemand {
    all: bool,
    ports: Vec<Port>,
}

impl Demand {
    pub(crate) fn add(&self, port: Option<&Port>) {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match port {
            None => asked.all = true,
            // A list and not a set: a function has 64 ports at most, and most readers want one.
            Some(port) if !asked.ports.contains(port) => asked.ports.push(port.clone()),
            Some(_) => {}
        }
    }

    /// The requested ports; `None`: all.
    pub(crate) fn ports(&self) -> Option<Vec<Port>> {
        let asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (!asked.all).then(|| asked.ports.clone())
    }
}

/// The identity of a node, without keeping it alive. While an identity exists the address of the node is not reused.
#[derive(Clone)]
pub(crate) enum NodeIdentity {
    One(std::sync::Weak<Result<Chunk>>),
    Log(std::sync::Weak<dyn Replay>),
}

impl NodeIdentity {
    /// Whether the node is still alive.
    pub(crate) fn is_alive(&self) -> bool {
        match self {
            Self::One(node) => node.strong_count() > 0,
            Self::Log(node) => node.strong_count() > 0,
        }
    }

    fn address(&self) -> *const () {
        match self {
            Self::One(node) => node.as_ptr().cast(),
            Self::Log(node) => node.as_ptr().cast(),
        }
    }
}

impl PartialEq for NodeIdentity {
    fn eq(&self, other: &Self) -> bool {
        // Equal addresses are the same node: the weak pointer keeps the allocation, so no later node gets its address.
        std::ptr::eq(self.address(), other.address())
    }
}

impl Eq for NodeIdentity {}

impl std::hash::Hash for NodeIdentity {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.address().hash(state);
    }
}

impl Node {
    /// A node over a lazy source that retains everything up to `node_bytes_max`.
    pub fn new(source: impl Stream<Item = Result<Chunk>> + Send + 'static) -> Self {
        Self::with(source, Retention::default())
    }

    /// A node over a lazy source. The source runs at most once, whatever the number of readers (KE-121).
    pub fn with(
        source: impl Stream<Item = Result<Chunk>> + Send + 'static,
        keep: Retention,
    ) -> Self {
        Self::replaying(Arc::new(local::Local::new(source.boxed(), keep)))
    }

    /// A node over a custom log.
    pub(crate) fn replaying(log: Arc<dyn Replay>) -> Self {
        Self {
            body: NodeBody::Log(log),
            demand: None,
        }
    }

    /// A node over a source that reads, when it is first polled, which ports its readers have requested.
    pub(crate) fn on_demand(
        demand: Arc<Demand>,
        source: impl Stream<Item = Result<Chunk>> + Send + 'static,
    ) -> Self {
        Self {
            demand: Some(demand),
            ..Self::new(source)
        }
    }

    fn of(chunk: Result<Chunk>) -> Self {
        Self {
            body: NodeBody::One(Arc::new(chunk)),
            demand: None,
        }
    }

    /// A node that is written through a [`NodeWriter`]. `send` waits while more than `bytes` are unread by the leading
    /// reader (KE-127).
    #[must_use]
    pub fn channel(bytes: usize) -> (NodeWriter, Self) {
        channel::channel(bytes)
    }

    /// The concatenation of `parts` in order, each a leaf of its own; a part may itself be a tree (KE-128).
    pub fn tree(parts: impl IntoIterator<Item = Self>) -> Self {
        Self {
            body: NodeBody::Tree(parts.into_iter().collect()),
            demand: None,
        }
    }

    /// A new reader: every chunk from the first one on. Polls nothing yet.
    #[must_use]
    pub fn read(&self) -> Chunks {
        self.ask(None);
        self.open()
    }

    fn open(&self) -> Chunks {
        match &self.body {
            NodeBody::One(chunk) => futures::stream::iter([Result::clone(chunk)]).boxed(),
            NodeBody::Log(log) => read::LogReader::new(log.clone()).boxed(),
            NodeBody::Tree(parts) => read::TreeReader::new(parts.clone()).boxed(),
            // A view of a log is by far the most common one; its reader needs no boxed stream in between.
            NodeBody::View(node, view) => match &node.body {
                NodeBody::Log(log) => {
                    read::ViewReader::new(read::LogReader::new(log.clone()), view.clone()).boxed()
                }
                _ => read::ViewReader::new(node.open(), view.clone()).boxed(),
            },
        }
    }

    /// Opens a reader that requests only these ports.
    pub(crate) fn open_for(&self, ports: &RequestedPorts) -> Chunks {
        match ports {
            RequestedPorts::All => self.ask(None),
            RequestedPorts::Only(ports) => ports.iter().for_each(|port| self.ask(Some(port))),
        }
        self.open()
    }

    fn ask(&self, port: Option<&Port>) {
        if let Some(demand) = &self.demand {
            demand.add(port);
        }
    }

    /// The same log, seen through one port, which becomes the view's main port.
    #[must_use]
    pub fn port(&self, port: impl Into<Port>) -> Self {
        let port = port.into();
        self.ask(Some(&port));
        // A reader of one port requests no other.
        self.view(
            NodeView {
                port: Some(port),
                choice: None,
            },
            None,
        )
    }

    /// The same log, seen through one choice, which becomes the view's choice 0.
    #[must_use]
    pub fn choice(&self, choice: u32) -> Self {
        self.view(
            NodeView {
                port: None,
                choice: Some(choice),
            },
            self.demand.clone(),
        )
    }

    /// What a consumer of one input reads: the main port's choice 0.
    pub(crate) fn main(&self) -> Self {
        match &self.body {
            // A converted value has only the main port and choice 0, so a view would only cost.
            NodeBody::One(_) => self.clone(),
            _ => self.port(Port::MAIN).choice(0),
        }
    }

    fn view(&self, view: NodeView, demand: Option<Arc<Demand>>) -> Self {
        let merged = match &self.body {
            NodeBody::View(node, inner) => view.over(inner).map(|both| (Arc::clone(node), both)),
            _ => None,
        };
        // Merged where possible, so that `main()` of a view adds no stage to the path of every chunk.
        let (node, view) = merged.unwrap_or_else(|| (Arc::new(self.clone()), view));
        Self {
            body: NodeBody::View(node, view),
            demand,
        }
    }

    /// The parts of a tree.
    pub(crate) fn parts(&self) -> Option<&[Self]> {
        match &self.body {
            NodeBody::Tree(parts) => Some(parts),
            _ => None,
        }
    }

    /// The identity of this node; `None` for trees and views, which are created again for each use.
    pub(crate) fn identity(&self) -> Option<NodeIdentity> {
        match &self.body {
            NodeBody::One(chunk) => Some(NodeIdentity::One(Arc::downgrade(chunk))),
            NodeBody::Log(log) => Some(NodeIdentity::Log(Arc::downgrade(log))),
            NodeBody::Tree(_) | NodeBody::View(..) => None,
        }
    }

    /// Whether everything has been logged, the error at the end included.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match &self.body {
            NodeBody::One(_) => true,
            NodeBody::Log(log) => log.is_complete(),
            NodeBody::Tree(parts) => parts.iter().all(Self::is_complete),
            NodeBody::View(node, _) => node.is_complete(),
        }
    }
}

/// Prints nothing of the content.
impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.body {
            NodeBody::One(_) => "one",
            NodeBody::Log(_) => "log",
            NodeBody::Tree(_) => "tree",
            NodeBody::View(..) => "view",
        };
        f.debug_struct("Node")
            .field("kind", &kind)
            .field("complete", &self.is_complete())
            .finish()
    }
}
