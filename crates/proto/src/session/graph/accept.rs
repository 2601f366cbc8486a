//! Validates one received fragment and inserts it into its node.
//!
//! The outcome never depends on the order in which legal fragments arrive.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::copy_arena::CopyArena;
use super::{ChildSlice, Graph, LogPiece, NodeKind, NodeProducer, Reference, StoredNode};
use crate::evergreen::reference::{self, ReferenceTarget};
use crate::evergreen::{
    Chunk, Fragment, Metadata, MetadataMode, NodeId, Payload, Reason, SessionLimits, Status,
    metadata,
};
use crate::session::lifetime::NodeFate;
use crate::session::port::NodeKey;
use crate::session::reference::ExternalContent;

/// The rules that a fragment is validated against.
#[derive(Clone, Copy)]
pub(in crate::session) struct AcceptanceRules {
    pub(in crate::session) mode: MetadataMode,
    /// Whether the shell follows references (EV-410).
    pub(in crate::session) references: bool,
    /// Payloads below this are copied out of the receive buffer (EV-805).
    pub(in crate::session) copy_below: usize,
}

/// The result of accepting a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::session) enum Acceptance {
    /// A fragment with this seq was accepted before (EV-204).
    Duplicate,
    /// The fragment's node was dropped (EV-911).
    Discarded,
    /// The fragment is buffered until the fragments before it arrive.
    Buffered(NodeKey),
    /// The contiguous prefix of its node grew.
    Grown(NodeKey),
    /// Its node is complete.
    Complete(NodeKey),
}

impl Graph {
    /// Accepts a fragment from the peer.
    pub(in crate::session) fn accept(
        &mut self,
        fragment: Fragment,
        rules: AcceptanceRules,
    ) -> Result<Acceptance, Status> {
        // The id first: every other error names the node. After any error the session is aborted and the graph
        // replaced, so nothing below undoes what an earlier step has charged or changed.
        let key = self.mention(&fragment.id)?;
        let (node, packer, limits) = self.get_to_fill(key);
        let Ok(seq) = u32::try_from(fragment.seq) else {
            return Err(at(Reason::BadSeq, "seq is negative", node, fragment.seq));
        };
        // Also for a dropped node, so that the result does not depend on whether the drop or the fragment came first
        // (D-26).
        match node.owner {
            NodeProducer::Local(_) => {
                let what = "a fragment for a node that the receiver produces";
                return Err(at(Reason::NodeOwner, what, node, fragment.seq));
            }
            NodeProducer::Unclaimed => node.owner = NodeProducer::Peer(None),
            NodeProducer::Peer(_) => {}
        }
        if node.fate != NodeFate::Retained {
            return Ok(Acceptance::Discarded);
        }
        // Duplicates are detected before the content is validated, so that a retry never fails where the first try
        // succeeded (EV-204).
        if node.has(seq) {
            // Only noted: for a client that numbers wrongly, the reader's error names this seq instead of a gap alone.
            if node.repeated.is_none() && differs(node, seq, &fragment) {
                node.repeated = Some(seq);
            }
            return Ok(Acceptance::Duplicate);
        }
        check_end(node, seq, fragment.last)?;
        let (last, children, range) = (fragment.last, fragment.children, fragment.range);
        let chunk = fragment
            .chunk
            // An empty chunk is none (EV-210): it does not make the node a leaf.
            .filter(|chunk| chunk.metadata.is_some() || chunk.payload.is_some());
        let content = match (children.is_empty(), &range) {
            (true, _) => chunk.is_some().then_some(NodeKind::Leaf),
            (false, None) => Some(NodeKind::Tree),
            (false, Some(_)) => Some(NodeKind::Excerpts),
        };
        check_kind(node, seq, content, chunk.is_some())?;
        let piece = match chunk {
            Some(chunk) => {
                check_sizes(&chunk, node, seq, limits)?;
                check_chunk(&chunk, node, seq, rules.mode)?;
                leaf_piece(chunk, node, seq, rules, packer)?
            }
            None if children.is_empty() => LogPiece::Empty,
            None => {
                let children = self.mention_all(key, seq, &children)?;
                match (range, children.first()) {
                    // Only fragments of the msgpack dialect have ranges, and those refer to one node each (EV-740).
                    (Some(range), Some(&child)) => {
                        let range = *range;
                        LogPiece::Slice(Box::new(ChildSlice { child, range }))
                    }
                    _ => LogPiece::Children(children),
                }
            }
        };
        self.hold(seq, &piece)?;
        self.insert(key, seq, last, piece, rules.mode)
    }

    /// Removes the buffered fragments from `seq` on, as if they had not been received.
    pub(in crate::session) fn remove_early_from(&mut self, key: NodeKey, seq: u32) {
        let past = self.get_mut(key).early.split_off(&seq);
        for (seq, piece) in past {
            let bytes = piece.len() as u64;
            self.get_mut(key).unread -= bytes;
            self.unread -= bytes;
            self.quota.give_back(piece.cost(seq));
            for &child in piece.children() {
                // Other readers may have passed the child already: then only this listing has retained its pieces
                // (EV-955).
                if self.unlist(child) {
                    self.release(child);
                }
            }
        }
    }

    fn mention_all(
        &mut self,
        key: NodeKey,
        seq: u32,
        children: &[NodeId],
    ) -> Result<Box<[NodeKey]>, Status> {
        let (limit, max) = (
            "max_children_per_fragment",
            self.limits.max_children_per_fragment,
        );
        Status::within(Reason::ChildLimit, limit, children.len(), max)
            .map_err(|status| located(status, self.get(key), seq))?;
        children.iter().map(|id| self.mention(id)).collect()
    }

    /// Inserts a validated piece into the log, or buffers it if it is ahead of the contiguous prefix.
    fn insert(
        &mut self,
        key: NodeKey,
        seq: u32,
        last: bool,
        piece: LogPiece,
        mode: MetadataMode,
    ) -> Result<Acceptance, Status> {
        let bytes = piece.len() as u64;
        self.unread += bytes;
        let max_early = self.limits.max_early_fragments;
        let node = self.get_mut(key);
        node.unread += bytes;
        if last {
            node.last = Some(seq);
        }
        if seq != node.next_seq() {
            let (reason, value) = (Reason::ReorderLimit, node.early.len() + 1);
            Status::within(reason, "max_early_fragments", value, max_early)
                .map_err(|status| located(status, node, seq))?;
            node.early.insert(seq, piece);
            return Ok(Acceptance::Buffered(key));
        }
        // Before the buffered pieces join the log: none may be read that disagrees with the first.
        let mut dropped = if seq == 0 {
            type_by_first(node, &piece, mode)?
        } else {
            0
        };
        dropped += node.extend(piece, mode);
        let complete = node.is_complete();
        // Charged with the pieces, before it was known that their metadata is not retained.
        self.quota.give_back(dropped);
        Ok(if complete {
            Acceptance::Complete(key)
        } else {
            Acceptance::Grown(key)
        })
    }
}

impl StoredNode {
    /// Appends a piece and the buffered pieces that directly follow it, and ends the log if the final one was appended.
    /// Returns the quota bytes of metadata that was dropped.
    fn extend(&mut self, piece: LogPiece, mode: MetadataMode) -> u64 {
        let mut dropped = 0;
        let mut next = Some(piece);
        while let Some(mut piece) = next {
            let seq = self.next_seq();
            // Here and not on arrival: a buffered piece does not know yet which metadata comes before it.
            if mode == MetadataMode::PerItem && seq > 0 {
                let before = piece.cost(seq);
                piece = self.join(piece);
                dropped += before - piece.cost(seq);
            }
            // An ended log takes nothing, and nothing is past the final seq by now: the results cannot be errors.
            let _ = self.log.append(piece);
            next = self.early.remove(&self.next_seq());
        }
        if self.last.is_some_and(|last| self.next_seq() > last) {
            let _ = self.log.end(());
        }
        dropped
    }

    /// Turns a piece with the same metadata as the piece before it into a continuation of that item. Decided by seq,
    /// not by order of arrival.
    fn join(&mut self, piece: LogPiece) -> LogPiece {
        match piece {
            LogPiece::Begin(metadata, data) if self.metadata.as_ref() == Some(&metadata) => {
                plain_piece(None, data)
            }
            LogPiece::Begin(metadata, data) => {
                self.metadata = Some(Arc::clone(&metadata));
                LogPiece::Begin(metadata, data)
            }
            LogPiece::Children(_) | LogPiece::Slice(_) => {
                // Children between two pieces of the same metadata make them two items.
                self.metadata = None;
                piece
            }
            other => other,
        }
    }
}

/// Whether a fragment differs from the one already accepted with its seq, judged by length and final flag. A retry is
/// equal; a peer that numbers fragments wrongly sends different content.
fn differs(node: &StoredNode, seq: u32, fragment: &Fragment) -> bool {
    let chunk = fragment.chunk.as_ref();
    let payload = chunk.and_then(|chunk| chunk.payload.as_ref());
    let bytes = match (payload, node.piece(seq)) {
        (Some(Payload::Data(data)), Some(retained)) => data.len() != retained.len(),
        _ => false,
    };
    bytes || fragment.last != (node.last == Some(seq))
}

/// EV-206: no fragment may follow the final one, whichever arrives first.
fn check_end(node: &StoredNode, seq: u32, last: bool) -> Result<(), Status> {
    let past_known = node.last.is_some_and(|known| seq > known);
    let before_held = last && node.highest().is_some_and(|highest| highest > seq);
    if past_known || before_held {
        // Names the same final seq whichever of the two fragments came second.
        let last = node.last.filter(|_| past_known).unwrap_or(seq);
        let status = at(
            Reason::SeqPastFinal,
            "a fragment follows the node's final one",
            node,
            seq,
        );
        return Err(status.with("max", last));
    }
    Ok(())
}

/// EV-209: a node is a leaf or a tree. Excerpts are content of a leaf (EV-740). `content` is the kind of node that the
/// fragment belongs in, if it decides that.
fn check_kind(
    node: &mut StoredNode,
    seq: u32,
    content: Option<NodeKind>,
    chunk: bool,
) -> Result<(), Status> {
    let Some(content) = content else {
        return Ok(());
    };
    // A fragment with a chunk and children is none of the three.
    let both = chunk && content != NodeKind::Leaf;
    node.kind = match (node.kind, content) {
        (NodeKind::Unknown, content) if !both => content,
        (known, content) if known == content && !both => known,
        (NodeKind::Leaf, NodeKind::Excerpts) | (NodeKind::Excerpts, NodeKind::Leaf) if !both => {
            NodeKind::Excerpts
        }
        _ => {
            return Err(at(
                Reason::NodeKind,
                "a node carries chunks and children",
                node,
                seq,
            ));
        }
    };
    Ok(())
}

/// Checks EV-401 and EV-405 as far as this fragment allows.
fn check_chunk(
    chunk: &Chunk,
    node: &mut StoredNode,
    seq: u32,
    mode: MetadataMode,
) -> Result<(), Status> {
    if matches!(chunk.payload, Some(Payload::Status(_))) {
        // The one permitted change of mimetype (EV-931), in every mode (EV-812).
        return Ok(());
    }
    // A payload without metadata of its own relies on that of seq 0; in a per-chunk mode one with metadata does not.
    let untyped = chunk.payload.is_some() && !(mode.is_per_chunk() && chunk.metadata.is_some());
    if seq == 0 {
        if chunk.payload.is_some() && chunk.metadata.is_none() {
            return Err(missing(node, seq));
        }
        return Ok(());
    }
    if chunk.metadata.is_some() && mode == MetadataMode::Strict {
        let what = "metadata after the first fragment, in strict mode";
        return Err(at(Reason::MetadataRepeated, what, node, seq));
    }
    if node.next_seq() == 0 {
        // Buffered without a type until seq 0 arrives.
        node.relies_on_first |= untyped;
        return Ok(());
    }
    // Seq 0 is there and was empty.
    if untyped && node.metadata.is_none() {
        return Err(missing(node, seq));
    }
    match &chunk.metadata {
        Some(later) if mode == MetadataMode::Lenient => agree(node, seq, later),
        _ => Ok(()),
    }
}

fn check_sizes(
    chunk: &Chunk,
    node: &StoredNode,
    seq: u32,
    limits: &SessionLimits,
) -> Result<(), Status> {
    let check = |reason, limit, value: usize, max| {
        Status::within(reason, limit, value, max).map_err(|status| located(status, node, seq))
    };
    // Content has one reason, names have another (section 8.2).
    let (content, name) = (Reason::FragmentLimit, Reason::BadName);
    let payload = chunk.payload.as_ref().map_or(0, Payload::len);
    check(
        content,
        "max_fragment_bytes",
        payload,
        limits.max_fragment_bytes,
    )?;
    let Some(metadata) = &chunk.metadata else {
        return Ok(());
    };
    let (mimetype, role) = (metadata.mimetype.len(), metadata.role.len());
    let (experimental, max) = (metadata.experimental_bytes(), limits.max_experimental_bytes);
    check(content, "max_experimental_bytes", experimental, max)?;
    check(name, "max_name_bytes", mimetype, limits.max_name_bytes)?;
    check(name, "max_role_bytes", role, limits.max_role_bytes)
}

/// EV-405, lenient mode: later metadata must agree with the first.
fn agree(node: &StoredNode, seq: u32, later: &Metadata) -> Result<(), Status> {
    let agrees = match &node.metadata {
        Some(first) => first.agrees_with(later),
        None => Metadata::default().agrees_with(later),
    };
    if agrees {
        return Ok(());
    }
    let what = "metadata after the first fragment differs from it; use a tree for mixed content";
    Err(at(Reason::MetadataConflict, what, node, seq))
}

/// Handles seq 0: sets the leaf's metadata and validates the pieces that were buffered without a type. Returns the
/// quota bytes of metadata that was dropped.
fn type_by_first(
    node: &mut StoredNode,
    first: &LogPiece,
    mode: MetadataMode,
) -> Result<u64, Status> {
    node.metadata = match first {
        LogPiece::Begin(metadata, _) => Some(Arc::clone(metadata)),
        LogPiece::Ref(reference) => reference.metadata.clone(),
        _ => None,
    };
    if node.metadata.is_none() && node.relies_on_first {
        return Err(missing(node, 0));
    }
    // Strict mode has refused later metadata on arrival; in a per-chunk mode it begins a new item.
    if mode != MetadataMode::Lenient {
        return Ok(0);
    }
    let mut dropped = 0;
    let mut early = std::mem::take(&mut node.early);
    for (&seq, piece) in &mut early {
        let before = piece.cost(seq);
        match piece {
            LogPiece::Begin(later, data) => {
                agree(node, seq, later)?;
                // Without its metadata, so that it continues the leaf's one item instead of beginning another (EV-402).
                *piece = plain_piece(None, std::mem::take(data));
            }
            LogPiece::Ref(reference) => {
                if let Some(later) = reference.metadata.take() {
                    agree(node, seq, &later)?;
                }
            }
            _ => {}
        }
        dropped += before - piece.cost(seq);
    }
    node.early = early;
    Ok(dropped)
}

/// Builds the log piece of a validated chunk.
fn leaf_piece(
    chunk: Chunk,
    node: &StoredNode,
    seq: u32,
    rules: AcceptanceRules,
    packer: &mut CopyArena,
) -> Result<LogPiece, Status> {
    // Lenient mode drops metadata after the first, once the first is there to compare it with.
    let dropped = rules.mode == MetadataMode::Lenient && seq > 0 && node.next_seq() > 0;
    let metadata = chunk.metadata.filter(|_| !dropped).map(clean);
    let data = match chunk.payload {
        None => Bytes::new(),
        Some(Payload::Data(data)) if data.len() < rules.copy_below => packer.copy(&data),
        Some(Payload::Data(data)) => data,
        Some(Payload::Status(status)) => return Ok(LogPiece::Status(status)),
        Some(Payload::Ref(uri)) => {
            // A rejection is stored, not returned: it fails the action that reads the reference, and an unread one is
            // no error (EV-410).
            let content = match reference::target_of(&uri) {
                Ok(ReferenceTarget::Inline(data)) => return Ok(plain_piece(metadata, data)),
                Ok(ReferenceTarget::External(_)) if rules.references => {
                    Ok(Arc::new(ExternalContent::new(&uri)))
                }
                Ok(ReferenceTarget::External(scheme)) => Err(reference::switched_off(scheme)),
                Err(rejection) => Err(rejection),
            };
            let content = content.map_err(|rejection| Arc::new(located(rejection, node, seq)));
            return Ok(LogPiece::Ref(Box::new(Reference { metadata, content })));
        }
    };
    Ok(plain_piece(metadata, data))
}

fn plain_piece(metadata: Option<Arc<Metadata>>, data: Bytes) -> LogPiece {
    match metadata {
        Some(metadata) => LogPiece::Begin(metadata, data),
        None if data.is_empty() => LogPiece::Empty,
        None => LogPiece::Data(data),
    }
}

/// Applies EV-407 to metadata that will be retained.
fn clean(found: Arc<Metadata>) -> Arc<Metadata> {
    if found.file_name.is_empty() {
        return found;
    }
    let file_name = metadata::file_name(&found.file_name).into();
    Arc::new(Metadata {
        file_name,
        ..Arc::unwrap_or_clone(found)
    })
}

fn missing(node: &StoredNode, seq: u32) -> Status {
    let what = "a leaf has content and its first fragment no metadata; send the mimetype at seq 0";
    at(Reason::MetadataMissing, what, node, seq)
}

fn at(reason: Reason, what: &str, node: &StoredNode, seq: impl fmt::Display) -> Status {
    let message = format!("{what}: node {:?}, seq {seq}", node.id);
    located(Status::new(reason, message), node, seq)
}

fn located(status: Status, node: &StoredNode, seq: impl fmt::Display) -> Status {
    status.with("node", &node.id).with("seq", seq)
}
