//! Reads a node depth-first, left to right, without recursion and without consuming it (section 4).
//!
//! ```text
//!   path:  [tree at piece 2, child 1] ► [tree at piece 0, child 0] ► [leaf at piece 7]
//! ```

use std::collections::HashSet;
use std::sync::Arc;

use smallvec::SmallVec;

use super::budget::{ReadBudget, ReadStop};
use super::slice::{SliceOverlap, Slices};
use crate::evergreen::{Metadata, Reason, Status, mimetype, protobuf};
use crate::log::LogRead;
use crate::session::graph::release::released;
use crate::session::graph::{Graph, LogPiece, NodeProducer, Reference};
use crate::session::lifetime::NodeFate;
use crate::session::port::{self, ActionKey, NodeKey};
use crate::session::reference::Referenced;
use crate::session::slab::SlabKey;

/// One node on the path, with its next piece and the next child of that piece.
#[derive(Clone, Copy, Debug)]
struct CursorFrame {
    node: NodeKey,
    piece: u32,
    child: u32,
}

/// A reader of one node's content. Its memory grows with depth, never with content (EV-306).
#[derive(Debug)]
pub(in crate::session) struct TreeCursor {
    pub(in crate::session) root: NodeKey,
    /// The action that reads; it must not read its own outputs (EV-308).
    pub(in crate::session) reader: Option<ActionKey>,
    /// The node it waits for, if it is parked.
    pub(in crate::session) parked: Option<NodeKey>,
    /// Whether it waits for the session's budget of visits.
    pub(in crate::session) starved: bool,
    /// The status it failed with, if it failed.
    pub(in crate::session) failed: Option<Arc<Status>>,
    /// The dropped nodes that it may still read, by batch (EV-911).
    pub(in crate::session) holds: SmallVec<[SlabKey; 1]>,
    /// Whether the session itself reads it, for a reserved action.
    pub(in crate::session) ours: bool,
    path: Vec<CursorFrame>,
    /// The nodes on the path; only tracked where the eager cycle search may have missed a cycle.
    on_path: Option<HashSet<NodeKey>>,
    begun: bool,
    visits: u32,
    bytes: u64,
    items: u32,
    metadata: Option<Arc<Metadata>>,
    /// Whether `metadata` begins an item of which nothing was yielded yet.
    fresh: bool,
    /// Byte ranges that apply to the nodes on the path.
    slices: Slices,
}

/// The result of one step.
#[derive(Debug)]
pub(in crate::session) enum CursorStep {
    Piece(port::LeafPiece),
    /// External content; the cursor stays here until [`TreeCursor::pass_reference`].
    Reference(Referenced),
    /// No more content until this node grows.
    Park(NodeKey),
    /// There is more to read, but a visit budget is used up for now.
    Pause(ReadStop),
    End,
    /// The read fails; the session may continue.
    Fail(Arc<Status>),
    /// The session must be aborted.
    Abort(Status),
}

impl TreeCursor {
    pub(in crate::session) fn new(root: NodeKey, reader: Option<ActionKey>) -> Self {
        Self {
            root,
            reader,
            parked: None,
            starved: false,
            failed: None,
            holds: SmallVec::new(),
            ours: false,
            path: Vec::new(),
            on_path: None,
            begun: false,
            visits: 0,
            bytes: 0,
            items: 0,
            metadata: None,
            fresh: false,
            slices: Slices::default(),
        }
    }

    /// Advances until there is a result to return. `cycles` is set if some edges were not searched for cycles.
    pub(in crate::session) fn step(
        &mut self,
        graph: &mut Graph,
        cycles: bool,
        work: &mut ReadBudget,
    ) -> CursorStep {
        let advanced = self.advance_to_next(graph, cycles, work);
        advanced.unwrap_or_else(|stop| stop)
    }

    /// The next content, or what stops the reader before it.
    fn advance_to_next(
        &mut self,
        graph: &mut Graph,
        cycles: bool,
        work: &mut ReadBudget,
    ) -> Result<CursorStep, CursorStep> {
        self.begin(graph, cycles)?;
        while let Some(&frame) = self.path.last() {
            // Before the next piece is looked at: a reader with all of its range does not wait for the rest of the
            // node.
            if self.slices.is_over() {
                // The selected range of this node, or of a node above it, is exhausted.
                self.leave(graph);
                continue;
            }
            let Some(piece) = piece_at(frame, graph)? else {
                self.leave(graph);
                continue;
            };
            // Paid before anything changes: after a pause the same step is made again.
            if visits(piece, frame) {
                work.visit().map_err(CursorStep::Pause)?;
            }
            match piece {
                LogPiece::Children(children) => {
                    if let Some(&child) = children.get(frame.child as usize) {
                        // Before `enter`, which makes the child the last of the path.
                        self.advance(0, 1);
                        self.enter(child, graph, cycles)?;
                        continue;
                    }
                }
                LogPiece::Slice(slice) if frame.child == 0 => {
                    let (child, range) = (slice.child, slice.range.clone());
                    self.advance(0, 1);
                    self.enter(child, graph, cycles)?;
                    self.slices.enter(self.path.len(), range);
                    continue;
                }
                LogPiece::Status(Some(status)) => {
                    // Only an error ends the read: success is content, for a reader of a status output.
                    return Err(CursorStep::Fail(upstream(status, graph, frame.node)));
                }
                LogPiece::Ref(reference) => return Ok(self.refer(frame.node, reference)),
                LogPiece::Slice(_) => {}
                // Two budgets: `work` is the session's and makes readers wait, `visit` is this read's and fails it
                // (EV-306).
                LogPiece::Empty => self.visit(graph)?,
                LogPiece::Begin(_, _) | LogPiece::Data(_) | LogPiece::Status(None) => {
                    if let Some(step) = self.give(frame, graph) {
                        return Ok(step);
                    }
                    // The piece is outside of the selected range; this costs a visit, as an empty piece does.
                    work.visit().map_err(CursorStep::Pause)?;
                    continue;
                }
            }
            graph.pass(frame.node, frame.piece, 0);
            self.advance(1, 0);
        }
        Ok(CursorStep::End)
    }

    /// Enters the root before the first step, not on creation: a cursor may be created before its node may be read.
    fn begin(&mut self, graph: &mut Graph, cycles: bool) -> Result<(), CursorStep> {
        if self.begun {
            return Ok(());
        }
        // Also if entering fails: `unbind_reader` below must not be repeated by `abandon`.
        self.begun = true;
        let entered = self.enter(self.root, graph, cycles);
        // After `enter`: in between, nothing else would retain the first pieces.
        graph.unbind_reader(self.root);
        entered
    }

    /// Yields the part of the piece at `frame` that is selected, if any; a piece with metadata begins an item.
    fn give(&mut self, frame: CursorFrame, graph: &mut Graph) -> Option<CursorStep> {
        let (begins, data) = match graph.get(frame.node).log.at(frame.piece as usize) {
            LogRead::Item(LogPiece::Begin(metadata, data)) => {
                (Some(Arc::clone(metadata)), data.clone())
            }
            LogRead::Item(LogPiece::Data(data)) => (None, data.clone()),
            _ => {
                let metadata = Arc::new(Metadata::of(mimetype::STATUS));
                (Some(metadata), protobuf::status_bytes(None))
            }
        };
        // Bytes outside of the selected range count as well: passing them is work.
        if let Err(status) = self.count(data.len(), graph) {
            return Some(CursorStep::Fail(status));
        }
        graph.pass(frame.node, frame.piece, data.len());
        self.advance(1, 0);
        if let Some(metadata) = begins {
            // The item begins with its first selected piece, which may be a later one.
            self.fresh = true;
            self.metadata = Some(metadata);
        }
        let Some(SliceOverlap { range, .. }) = self.slices.take(data.len()) else {
            return self.visit(graph).err();
        };
        let whole = range.len() == data.len();
        let first = std::mem::take(&mut self.fresh);
        self.items = self.items.saturating_add(u32::from(first));
        Some(CursorStep::Piece(port::LeafPiece {
            item: self.items.saturating_sub(1),
            first,
            node: frame.node,
            metadata: self.metadata.clone().unwrap_or_default(),
            data: if whole { data } else { data.slice(range) },
        }))
    }

    /// Counts bytes that are delivered to the reader (EV-306).
    pub(in crate::session) fn count(
        &mut self,
        bytes: usize,
        graph: &Graph,
    ) -> Result<(), Arc<Status>> {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        let max = graph.limits().max_read_bytes;
        Status::within(Reason::FlattenLimit, "max_read_bytes", self.bytes, max)
            .map_err(|status| Arc::new(status.with("node", &graph.get(self.root).id)))
    }

    fn refer(&self, node: NodeKey, reference: &Reference) -> CursorStep {
        let content = match &reference.content {
            Ok(content) => Arc::clone(content),
            Err(rejection) => return CursorStep::Fail(Arc::clone(rejection)),
        };
        let begins = reference.metadata.as_ref();
        let first = begins.is_some() || self.fresh;
        let metadata = begins.or(self.metadata.as_ref()).cloned();
        CursorStep::Reference(Referenced {
            item: self.items.saturating_sub(u32::from(!first)),
            first,
            node,
            metadata: metadata.unwrap_or_default(),
            content,
        })
    }

    /// Returns which of the next `bytes` of a reference's content are selected.
    pub(in crate::session) fn meant(&mut self, bytes: usize) -> SliceOverlap {
        let nothing = SliceOverlap {
            range: 0..0,
            more: !self.slices.is_over(),
        };
        self.slices.take(bytes).unwrap_or(nothing)
    }

    /// The reference at the cursor's position, with its node and seq.
    pub(in crate::session) fn reference<'a>(
        &self,
        graph: &'a Graph,
    ) -> Option<(NodeKey, u32, &'a Reference)> {
        let frame = self.path.last()?;
        match graph.get(frame.node).log.at(frame.piece as usize) {
            LogRead::Item(LogPiece::Ref(reference)) => Some((frame.node, frame.piece, reference)),
            _ => None,
        }
    }

    /// Continues after the reference at the cursor's position; its content was read.
    pub(in crate::session) fn pass_reference(&mut self, graph: &mut Graph) {
        let Some((node, piece, reference)) = self.reference(graph) else {
            return;
        };
        let begins = reference.metadata.clone();
        let first = begins.is_some() || std::mem::take(&mut self.fresh);
        self.items = self.items.saturating_add(u32::from(first));
        self.metadata = begins.or_else(|| self.metadata.take());
        graph.pass(node, piece, 0);
        self.advance(1, 0);
    }

    /// Advances within the last node of the path: by pieces, or by children of the current piece.
    fn advance(&mut self, pieces: u32, children: u32) {
        if let Some(frame) = self.path.last_mut() {
            frame.piece += pieces;
            frame.child = if pieces > 0 {
                0
            } else {
                frame.child + children
            };
        }
    }

    fn enter(&mut self, node: NodeKey, graph: &mut Graph, cycles: bool) -> Result<(), CursorStep> {
        // A node without its first pieces cannot be read in order (EV-955); a dropped one only by those that hold it
        // (EV-911).
        let open = match graph.get(node).fate {
            NodeFate::Retained => graph.get(node).log.released() == 0,
            NodeFate::Dropped(batch) => self.holds.contains(&batch),
            NodeFate::Removed => false,
        };
        if !open {
            return Err(CursorStep::Fail(released(graph, node)));
        }
        let id = &graph.get(node).id;
        // Where the eager search was cut short, the reader is the one to find this (EV-308).
        if let (NodeProducer::Local(Some(producer)), Some(reader)) =
            (graph.get(node).owner, self.reader)
            && producer == reader
        {
            let message = format!("an action reads its own output {id:?}");
            return Err(CursorStep::Abort(
                Status::new(Reason::ActionCycle, message).with("node", id),
            ));
        }
        if cycles {
            // The flag can be set while this reader is inside: the nodes that it has entered before count as well.
            let path = &self.path;
            let on_path = self
                .on_path
                .get_or_insert_with(|| path.iter().map(|frame| frame.node).collect());
            if !on_path.insert(node) {
                let message = format!("node {id:?} contains itself");
                return Err(CursorStep::Abort(
                    Status::new(Reason::Cycle, message).with("node", id),
                ));
            }
        }
        self.visit(graph)?;
        let (value, max) = (self.path.len() + 1, graph.limits().max_depth);
        Status::within(Reason::DepthLimit, "max_depth", value, max)
            .map_err(|status| CursorStep::Abort(status.with("node", id)))?;
        self.path.push(CursorFrame {
            node,
            piece: 0,
            child: 0,
        });
        graph.enter(node);
        Ok(())
    }

    /// Counts a visit: of a node, or of a piece that yields nothing (EV-306).
    fn visit(&mut self, graph: &Graph) -> Result<(), CursorStep> {
        self.visits = self.visits.saturating_add(1);
        let max = graph.limits().max_visits;
        Status::within(Reason::FlattenLimit, "max_visits", self.visits, max).map_err(|status| {
            CursorStep::Fail(Arc::new(status.with("node", &graph.get(self.root).id)))
        })
    }

    fn leave(&mut self, graph: &mut Graph) {
        let Some(frame) = self.path.pop() else { return };
        // The length that the path had when the range was entered.
        self.slices.leave(self.path.len() + 1);
        graph.leave(frame.node, frame.piece);
        if let Some(on_path) = &mut self.on_path {
            on_path.remove(&frame.node);
        }
    }

    /// The nodes on its path.
    pub(in crate::session) fn inside(&self) -> impl Iterator<Item = NodeKey> + '_ {
        self.path.iter().map(|frame| frame.node)
    }

    /// The edges to the nodes that it will enter next, at every level of its path.
    pub(in crate::session) fn ahead(&self, graph: &Graph) -> impl Iterator<Item = Option<NodeKey>> {
        let root = (!self.begun).then_some(Some(self.root));
        // A frame's `child` is the next one already: the one that it is inside is on the path itself.
        let next = |frame: &CursorFrame| graph.get(frame.node).edges_from(frame.piece, frame.child);
        root.into_iter().chain(self.path.iter().flat_map(next))
    }

    /// Length of its path.
    pub(in crate::session) fn depth(&self) -> usize {
        self.path.len()
    }

    /// Leaves all nodes on its path; it reads nothing more.
    pub(in crate::session) fn abandon(&mut self, graph: &mut Graph) {
        if !std::mem::replace(&mut self.begun, true) {
            graph.unbind_reader(self.root);
        }
        while !self.path.is_empty() {
            self.leave(graph);
        }
    }
}

/// The next piece of a node on the path; `None` at the node's end.
fn piece_at(frame: CursorFrame, graph: &Graph) -> Result<Option<&LogPiece>, CursorStep> {
    let node = graph.get(frame.node);
    match node.log.at(frame.piece as usize) {
        LogRead::Item(piece) => Ok(Some(piece)),
        LogRead::End(()) => Ok(None),
        // A dropped node accepts nothing more, so that waiting for it would not end.
        LogRead::Pending if node.fate == NodeFate::Retained => Err(CursorStep::Park(frame.node)),
        LogRead::Pending | LogRead::Released => Err(CursorStep::Fail(released(graph, frame.node))),
    }
}

/// Whether the next step costs a visit: a child, or a piece that yields nothing.
fn visits(piece: &LogPiece, frame: CursorFrame) -> bool {
    match piece {
        LogPiece::Children(children) => (frame.child as usize) < children.len(),
        LogPiece::Slice(_) => frame.child == 0,
        LogPiece::Empty => true,
        LogPiece::Begin(..) | LogPiece::Data(_) | LogPiece::Ref(_) | LogPiece::Status(_) => false,
    }
}

/// A reader of a failed node fails with the same status, with the node's id as a detail (EV-930).
fn upstream(status: &Arc<Status>, graph: &Graph, node: NodeKey) -> Arc<Status> {
    // The first node that failed is named, not each one that the failure has passed through.
    if status.detail("upstream").is_some() {
        return Arc::clone(status);
    }
    Arc::new(Status::clone(status).with("upstream", &graph.get(node).id))
}
