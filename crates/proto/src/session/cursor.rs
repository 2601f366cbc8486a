//! Reads a node depth-first, left to right, without recursion and without consuming it (section 4).
//!
//! ```text
//!   path:  [tree at piece 2, child 1] ► [tree at piece 0, child 0] ► [leaf at piece 7]
//! ```

use std::collections::HashSet;
use std::sync::Arc;

use super::dropping::NodeFate;
use super::port::{self, ActionKey, CursorId, NodeKey};
use super::reference::Referenced;
use super::release::released;
use super::slice::{SliceOverlap, Slices};
use super::store::{LogPiece, NodeProducer, Reference, Store};
use super::work::{ReadBudget, ReadStop};
use crate::evergreen::{Metadata, Reason, SessionLimits, Status, mimetype, protobuf};
use crate::log::LogRead;

/// One node on the path, with its next piece and the next child of that piece.
#[derive(Clone, Copy, Debug)]
struct CursorFrame {
    node: NodeKey,
    piece: u32,
    child: u32,
}

/// A reader of one node's content. Its memory grows with depth, never with content (EV-306).
#[derive(Debug)]
pub(super) struct TreeCursor {
    pub(super) root: NodeKey,
    /// The action that reads; it must not read its own outputs (EV-308).
    pub(super) reader: Option<ActionKey>,
    /// The node it waits for, if it is parked.
    pub(super) parked: Option<NodeKey>,
    /// Whether it waits for the session's budget of visits.
    pub(super) starved: bool,
    /// The status it failed with, if it failed.
    pub(super) failed: Option<Arc<Status>>,
    /// Whether dropped nodes are retained until it has read them (EV-911).
    pub(super) holds: bool,
    /// Whether the session itself reads it, for a reserved action.
    pub(super) ours: bool,
    /// Its id, under which drop batches list it as a reader.
    me: Option<CursorId>,
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
pub(super) enum CursorStep {
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
    pub(super) const fn new(root: NodeKey, reader: Option<ActionKey>) -> Self {
        Self {
            root,
            reader,
            parked: None,
            starved: false,
            failed: None,
            holds: false,
            ours: false,
            me: None,
            path: Vec::new(),
            on_path: None,
            begun: false,
            visits: 0,
            bytes: 0,
            items: 0,
            metadata: None,
            fresh: false,
            slices: Slices::new(),
        }
    }

    /// Advances until there is a result to return. `cycles` is set if some edges were not searched for cycles.
    pub(super) fn step(
        &mut self,
        me: CursorId,
        store: &mut Store,
        limits: &SessionLimits,
        cycles: bool,
        work: &mut ReadBudget,
    ) -> CursorStep {
        if let Err(stop) = self.begin(me, store, limits, cycles) {
            return stop;
        }
        while let Some(&frame) = self.path.last() {
            if self.slices.is_over() {
                // The selected range of this node, or of a node above it, is exhausted.
                self.leave(store);
                continue;
            }
            let index = frame.piece;
            let piece = match store.get(frame.node).log.at(index as usize) {
                LogRead::Pending if store.get(frame.node).fate != NodeFate::Retained => {
                    return CursorStep::Fail(released(store, frame.node));
                }
                LogRead::Pending => return CursorStep::Park(frame.node),
                LogRead::Released => return CursorStep::Fail(released(store, frame.node)),
                LogRead::End(()) => {
                    self.leave(store);
                    continue;
                }
                LogRead::Item(piece) => piece,
            };
            if visits(piece, frame)
                && let Err(refused) = work.visit()
            {
                return CursorStep::Pause(refused);
            }
            match piece {
                LogPiece::Children(children) => {
                    if let Some(&child) = children.get(frame.child as usize) {
                        self.advance(0, 1);
                        if let Err(stop) = self.enter(child, store, limits, cycles) {
                            return stop;
                        }
                        continue;
                    }
                }
                LogPiece::Slice(slice) if frame.child == 0 => {
                    let (child, range) = (slice.child, slice.range.clone());
                    self.advance(0, 1);
                    if let Err(stop) = self.enter(child, store, limits, cycles) {
                        return stop;
                    }
                    self.slices.enter(self.path.len(), range);
                    continue;
                }
                LogPiece::Status(Some(status)) => {
                    return CursorStep::Fail(upstream(status, store, frame.node));
                }
                LogPiece::Ref(reference) => return self.refer(frame.node, reference),
                LogPiece::Slice(_) => {}
                LogPiece::Empty => {
                    if let Err(stop) = self.visit(store, limits) {
                        return stop;
                    }
                }
                LogPiece::Begin(_, _) | LogPiece::Data(_) | LogPiece::Status(None) => {
                    match self.give(frame, store, limits) {
                        Some(step) => return step,
                        // The piece is outside of the selected range; this costs a visit, as an empty piece does.
                        None => match work.visit() {
                            Ok(()) => continue,
                            Err(refused) => return CursorStep::Pause(refused),
                        },
                    }
                }
            }
            store.pass(frame.node, index, 0);
            self.advance(1, 0);
        }
        CursorStep::End
    }

    /// Enters the root before the first step, not on creation: a cursor may be created before its node may be read.
    fn begin(
        &mut self,
        me: CursorId,
        store: &mut Store,
        limits: &SessionLimits,
        cycles: bool,
    ) -> Result<(), CursorStep> {
        self.me = Some(me);
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        let entered = self.enter(self.root, store, limits, cycles);
        store.unbind_reader(self.root);
        entered
    }

    /// Yields the part of the piece at `frame` that is selected, if any; a piece with metadata begins an item.
    fn give(
        &mut self,
        frame: CursorFrame,
        store: &mut Store,
        limits: &SessionLimits,
    ) -> Option<CursorStep> {
        let (begins, data) = match store.get(frame.node).log.at(frame.piece as usize) {
            LogRead::Item(LogPiece::Begin(metadata, data)) => {
                (Some(Arc::clone(metadata)), data.clone())
            }
            LogRead::Item(LogPiece::Data(data)) => (None, data.clone()),
            _ => {
                let metadata = Arc::new(Metadata::of(mimetype::STATUS));
                (Some(metadata), protobuf::status_bytes(None))
            }
        };
        if let Err(status) = self.count(data.len(), store, limits) {
            return Some(CursorStep::Fail(status));
        }
        store.pass(frame.node, frame.piece, data.len());
        self.advance(1, 0);
        if let Some(metadata) = begins {
            self.fresh = true;
            self.metadata = Some(metadata);
        }
        let Some(SliceOverlap { range, .. }) = self.slices.take(data.len()) else {
            return self.visit(store, limits).err();
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
    pub(super) fn count(
        &mut self,
        bytes: usize,
        store: &Store,
        limits: &SessionLimits,
    ) -> Result<(), Arc<Status>> {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        let (value, max) = (self.bytes, limits.max_read_bytes);
        if value <= max {
            return Ok(());
        }
        let status = Status::limit(Reason::FlattenLimit, "max_read_bytes", value, max);
        Err(Arc::new(status.with("node", &store.get(self.root).id)))
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
    pub(super) fn meant(&mut self, bytes: usize) -> SliceOverlap {
        let nothing = SliceOverlap {
            range: 0..0,
            more: !self.slices.is_over(),
        };
        self.slices.take(bytes).unwrap_or(nothing)
    }

    /// The reference at the cursor's position, with its node and seq.
    pub(super) fn reference<'a>(&self, store: &'a Store) -> Option<(NodeKey, u32, &'a Reference)> {
        let frame = self.path.last()?;
        match store.get(frame.node).log.at(frame.piece as usize) {
            LogRead::Item(LogPiece::Ref(reference)) => Some((frame.node, frame.piece, reference)),
            _ => None,
        }
    }

    /// Continues after the reference at the cursor's position; its content was read.
    pub(super) fn pass_reference(&mut self, store: &mut Store) {
        let Some((node, piece, reference)) = self.reference(store) else {
            return;
        };
        let begins = reference.metadata.clone();
        let first = begins.is_some() || std::mem::take(&mut self.fresh);
        self.items = self.items.saturating_add(u32::from(first));
        self.metadata = begins.or_else(|| self.metadata.take());
        store.pass(node, piece, 0);
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

    fn enter(
        &mut self,
        node: NodeKey,
        store: &mut Store,
        limits: &SessionLimits,
        cycles: bool,
    ) -> Result<(), CursorStep> {
        let open = match store.get(node).fate {
            NodeFate::Retained => store.get(node).log.released() == 0,
            NodeFate::Dropped(batch) => self.me.is_some_and(|me| store.keeps_for(batch, me)),
            NodeFate::Removed => false,
        };
        if !open {
            return Err(CursorStep::Fail(released(store, node)));
        }
        let id = &store.get(node).id;
        if let (NodeProducer::Local(Some(producer)), Some(reader)) =
            (store.get(node).owner, self.reader)
            && producer == reader
        {
            let message = format!("an action reads its own output {id:?}");
            return Err(CursorStep::Abort(
                Status::new(Reason::ActionCycle, message).with("node", id),
            ));
        }
        if cycles {
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
        self.visit(store, limits)?;
        if self.path.len() >= limits.max_depth {
            let value = self.path.len() as u64 + 1;
            let status = Status::limit(
                Reason::DepthLimit,
                "max_depth",
                value,
                limits.max_depth as u64,
            );
            return Err(CursorStep::Abort(status.with("node", id)));
        }
        self.path.push(CursorFrame {
            node,
            piece: 0,
            child: 0,
        });
        store.enter(node);
        Ok(())
    }

    /// Counts a visit: of a node, or of a piece that yields nothing (EV-306).
    fn visit(&mut self, store: &Store, limits: &SessionLimits) -> Result<(), CursorStep> {
        self.visits = self.visits.saturating_add(1);
        let (value, max) = (self.visits, limits.max_visits);
        if value <= max {
            return Ok(());
        }
        let status = Status::limit(Reason::FlattenLimit, "max_visits", value.into(), max.into());
        let root = &store.get(self.root).id;
        Err(CursorStep::Fail(Arc::new(status.with("node", root))))
    }

    fn leave(&mut self, store: &mut Store) {
        let Some(frame) = self.path.pop() else { return };
        self.slices.leave(self.path.len() + 1);
        store.leave(frame.node, frame.piece);
        if let Some(on_path) = &mut self.on_path {
            on_path.remove(&frame.node);
        }
    }

    /// The nodes on its path.
    pub(super) fn inside(&self) -> impl Iterator<Item = NodeKey> + '_ {
        self.path.iter().map(|frame| frame.node)
    }

    /// The nodes that it will enter next, at every level of its path.
    pub(super) fn ahead(&self, store: &Store) -> Vec<NodeKey> {
        if !self.begun {
            return vec![self.root];
        }
        let frames = self.path.iter();
        frames
            .flat_map(|frame| {
                store
                    .get(frame.node)
                    .children_from(frame.piece, frame.child)
            })
            .collect()
    }

    /// Length of its path.
    #[cfg(any(test, fuzzing))]
    pub(super) fn depth(&self) -> usize {
        self.path.len()
    }

    /// Leaves all nodes on its path; it reads nothing more.
    pub(super) fn abandon(&mut self, store: &mut Store) {
        if !std::mem::replace(&mut self.begun, true) {
            store.unbind_reader(self.root);
        }
        while !self.path.is_empty() {
            self.leave(store);
        }
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
fn upstream(status: &Arc<Status>, store: &Store, node: NodeKey) -> Arc<Status> {
    if status.detail("upstream").is_some() {
        return Arc::clone(status);
    }
    Arc::new(Status::clone(status).with("upstream", &store.get(node).id))
}
