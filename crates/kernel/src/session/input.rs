//! A session's node as a node of the kernel: the flattening cursor behind [`crate::Node`] (D-1).

use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::reference::switched_off;
use sapwood_proto::evergreen::{Metadata, Status};
use sapwood_proto::session::{
    ActionKey, CursorId, CursorRead, LeafEnd, LeafPiece, NodeKey, Referenced, SessionMachine,
    SliceOverlap,
};

use super::failure;
use super::link::SessionLink;
use super::reference::{ReferenceReader, SessionFetcher};
use super::signals::InputSignals;
use super::wire;
use crate::Result;
use crate::chunk::Chunk;
use crate::meta::{ChoiceFinish, Meta};
use crate::name::Mime;
use crate::node::{Node, Replay, ReplayCursor};

/// An input of an action.
pub(super) struct FlattenedInput {
    link: SessionLink,
    node: NodeKey,
    action: ActionKey,
    signals: Arc<InputSignals>,
    references: Option<SessionFetcher>,
    /// Whether the function gathers it before it starts: the gathered content is a second copy, and counts (EV-801).
    gathered: bool,
    /// Metadata of the last piece: nearly every piece is of the same leaf as the one before.
    last: Mutex<Option<TypedMetadata>>,
}

/// Metadata of the wire, and its kernel form.
struct TypedMetadata {
    wire: Arc<Metadata>,
    mime: Mime,
    meta: Option<Arc<Meta>>,
}

impl FlattenedInput {
    /// The node `node` as an input of `action`.
    pub(super) fn node(
        link: SessionLink,
        node: NodeKey,
        action: ActionKey,
        signals: Arc<InputSignals>,
        references: Option<SessionFetcher>,
        gathered: bool,
    ) -> Node {
        Node::replaying(Arc::new(Self {
            link,
            node,
            action,
            signals,
            references,
            gathered,
            last: Mutex::default(),
        }))
    }

    fn chunk(&self, piece: LeafPiece) -> Chunk {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let typed = match &*last {
            Some(typed) if Arc::ptr_eq(&typed.wire, &piece.metadata) => typed,
            _ => last.insert(TypedMetadata::new(&piece.metadata)),
        };
        let mut chunk = Chunk::bytes(piece.data)
            .with_mime(typed.mime.clone())
            .with_part(piece.item);
        // Once for each leaf: metadata in a run is merged, so a repetition would only cost (KE-303).
        if piece.first {
            chunk.meta.clone_from(&typed.meta);
        }
        chunk
    }

    /// Continues the reader within the content of a reference, which is read in place of the reference.
    fn follow(&self, cursor: &mut ReplayCursor, reference: &Referenced) {
        let id = CursorId::from_bits(cursor.slot);
        let Some(references) = &self.references else {
            // The machine reports references only if they are followed.
            let rejection = switched_off("this kind");
            self.link
                .with(|live| live.machine().nodes().fail_reference(id, &rejection));
            return;
        };
        let typed = TypedMetadata::new(&reference.metadata);
        let followed = ReferencedChunks {
            link: self.link.clone(),
            signals: Arc::clone(&self.signals),
            cursor: id,
            reading: references.read(&reference.content),
            gatherer: self.gathered.then_some(self.action),
            blank: Chunk::empty()
                .with_mime(typed.mime)
                .with_part(reference.item),
            begins: reference.first.then_some(typed.meta),
            cut: false,
            more: true,
            waits: false,
        };
        cursor.inside = Some(followed.boxed());
    }

    /// Reads all available pieces under one lock. Data that arrives later wakes the reader again.
    fn read_ahead(
        &self,
        machine: &mut SessionMachine,
        cursor: &mut ReplayCursor,
        first: &LeafPiece,
    ) {
        // One lock round for many pieces instead of one for each token. Bounded, because the lock is shared by the
        // whole session.
        let mut bytes = first.data.len();
        while cursor.ahead.len() < AHEAD && bytes < AHEAD_BYTES {
            let CursorRead::Piece(piece) = machine.nodes().read(CursorId::from_bits(cursor.slot))
            else {
                break;
            };
            bytes += piece.data.len();
            self.push(machine, cursor, piece);
        }
        // Charged before the function gets the bytes: it keeps a copy of its own until its action ends.
        if self.gathered {
            gather(machine, self.action, bytes);
        }
    }

    /// Appends a piece. Before it, the finish of the leaf before, if that was an answer.
    fn push(&self, machine: &SessionMachine, cursor: &mut ReplayCursor, piece: LeafPiece) {
        // Only here is it known that the leaf before has ended: pieces do not say that they are the last.
        if cursor
            .turn
            .as_ref()
            .is_some_and(|(leaf, _)| *leaf != piece.node)
        {
            end_turn(machine, cursor);
        }
        let (leaf, answers) = (piece.node, is_answer(&piece.metadata.role));
        let chunk = self.chunk(piece);
        cursor.turn = answers.then(|| {
            let blank = Chunk::empty().with_mime(chunk.mime.clone());
            (leaf, blank.with_part(chunk.part))
        });
        cursor.position += 1;
        cursor.ahead.push_back(chunk);
    }
}

/// Appends an empty chunk that says whether the answer of an action is whole or truncated. A caller that builds
/// conversation turns from it needs to know (D-51).
fn end_turn(machine: &SessionMachine, cursor: &mut ReplayCursor) {
    let Some((leaf, blank)) = cursor.turn.take() else {
        return;
    };
    let reason = match machine.written(leaf) {
        None => return,
        Some(LeafEnd::Whole) => ChoiceFinish::Stop,
        Some(LeafEnd::Cut) => ChoiceFinish::Length,
    };
    let ended = Meta::default().with_finish(0, reason);
    cursor.ahead.push_back(blank.with_meta(ended));
}

fn is_answer(role: &str) -> bool {
    ["assistant", "model"]
        .iter()
        .any(|name| role.eq_ignore_ascii_case(name))
}

/// Counts `bytes` more as held by the function until its action ends.
fn gather(machine: &mut SessionMachine, action: ActionKey, bytes: usize) {
    // Without room for it the machine ends the session, and with it the function.
    let _ = machine.calls().hold_aside(action, bytes);
}

impl TypedMetadata {
    fn new(metadata: &Arc<Metadata>) -> Self {
        Self {
            wire: Arc::clone(metadata),
            mime: Mime::shared(metadata.mimetype()),
            meta: wire::meta(metadata).map(Arc::new),
        }
    }
}

/// The content of one reference, as chunks of the item that it is part of (EV-410).
struct ReferencedChunks {
    link: SessionLink,
    signals: Arc<InputSignals>,
    cursor: CursorId,
    /// The action whose function gathers it, if one does.
    gatherer: Option<ActionKey>,
    reading: ReferenceReader,
    /// A chunk of the item, without data.
    blank: Chunk,
    /// Metadata for the item's first chunk; `None` once that was returned.
    begins: Option<Option<Arc<Meta>>>,
    /// Whether any bytes were left out, because only a slice of a node is read (EV-740).
    cut: bool,
    /// Whether later bytes may still be in the slice.
    more: bool,
    waits: bool,
}

impl ReferencedChunks {
    fn chunk(&mut self, data: Bytes) -> Chunk {
        let meta = self.begins.take().flatten();
        Chunk {
            data,
            meta,
            ..self.blank.clone()
        }
    }

    /// Counts received bytes. Returns the range of them that is in the slice.
    fn count(&mut self, bytes: usize) -> std::result::Result<Range<usize>, Arc<Status>> {
        let SliceOverlap { range, more } = self.link.with(|live| {
            let counted = live.machine().nodes().count_reference(self.cursor, bytes);
            if let (Some(action), Ok(meant)) = (self.gatherer, &counted) {
                gather(live.machine(), action, meant.range.len());
            }
            counted
        })?;
        self.more = more;
        self.cut |= range.len() < bytes;
        Ok(range)
    }

    fn set_waits(&mut self, waits: bool) {
        if self.waits != waits {
            self.waits = waits;
            self.signals.waits_for_others(waits);
        }
    }
}

impl Stream for ReferencedChunks {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let failed = loop {
            // After the slice nothing more is fetched for this reader, however long the content is.
            let next = if this.more {
                let polled = this.reading.poll_piece(cx);
                // Before the early return: while this waits, the action must not count as deadlocked (EV-110).
                this.set_waits(polled.is_pending());
                ready!(polled)
            } else {
                None
            };
            match next {
                Some(Ok(data)) => match this.count(data.len()) {
                    Ok(range) if range.is_empty() => {}
                    Ok(range) => return Poll::Ready(Some(Ok(this.chunk(data.slice(range))))),
                    Err(status) => break status,
                },
                Some(Err(status)) => {
                    break this
                        .link
                        .with(|live| live.machine().nodes().fail_reference(this.cursor, &status));
                }
                // An empty item is an item too (EV-301).
                None if this.begins.is_some() && !this.cut => {
                    return Poll::Ready(Some(Ok(this.chunk(Bytes::new()))));
                }
                None => {
                    this.link
                        .with(|live| live.machine().nodes().end_reference(this.cursor));
                    return Poll::Ready(None);
                }
            }
        };
        this.signals.fail(&failed);
        Poll::Ready(Some(Err(failure::error(&failed))))
    }
}

impl Drop for ReferencedChunks {
    fn drop(&mut self) {
        // A reader that is dropped while it waits must not leave its count behind: the action would never be found
        // deadlocked.
        self.set_waits(false);
    }
}

impl Replay for FlattenedInput {
    fn open(&self) -> ReplayCursor {
        let id = self
            .link
            .with(|live| live.machine().nodes().open(self.node, Some(self.action)));
        ReplayCursor {
            slot: id.to_bits(),
            ..ReplayCursor::default()
        }
    }

    fn poll_next(
        &self,
        cursor: &mut ReplayCursor,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Chunk>>> {
        let id = CursorId::from_bits(cursor.slot);
        loop {
            if let Some(inside) = &mut cursor.inside {
                // The reader stands within a reference: the machine's cursor is not asked before its content has ended.
                if let Some(item) = ready!(inside.as_mut().poll_next(cx)) {
                    return Poll::Ready(Some(item));
                }
                cursor.inside = None;
            }
            let read = self.link.with(|live| {
                let read = live.poll_read(id, cx);
                match &read {
                    // Under the lock of the read, so that the position of the cursor and what is read ahead agree.
                    Poll::Ready(CursorRead::Piece(first)) => {
                        self.push(live.machine(), cursor, first.clone());
                        self.read_ahead(live.machine(), cursor, first);
                    }
                    Poll::Ready(CursorRead::End) => end_turn(live.machine(), cursor),
                    _ => {}
                }
                read
            });
            // Also at the end: `end_turn` may have added a last chunk.
            if let Some(chunk) = cursor.ahead.pop_front() {
                return Poll::Ready(Some(Ok(chunk)));
            }
            return match read {
                Poll::Pending => {
                    self.signals.park();
                    Poll::Pending
                }
                Poll::Ready(CursorRead::Reference(reference)) => {
                    self.follow(cursor, &reference);
                    continue;
                }
                Poll::Ready(CursorRead::Busy) => {
                    // A large graph with little content: yield to other tasks. The reader waits for nothing, so it
                    // wakes itself, and its action is not deadlocked, whatever another of its readers waits for.
                    self.signals.yielded();
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
                Poll::Ready(CursorRead::Failed(status)) => {
                    self.signals.fail(&status);
                    Poll::Ready(Some(Err(failure::error(&status))))
                }
                // `poll_read` turns a pending cursor into `Poll::Pending`, and a piece was returned above; only the end
                // is left.
                Poll::Ready(CursorRead::End | CursorRead::Pending | CursorRead::Piece(_)) => {
                    Poll::Ready(None)
                }
            };
        }
    }

    fn close(&self, cursor: &mut ReplayCursor) {
        // Before the cursor closes: the content of a reference counts its bytes on that cursor.
        cursor.inside = None;
        self.link
            .with(|live| live.close_cursor(CursorId::from_bits(cursor.slot)));
    }

    fn is_complete(&self) -> bool {
        self.link.with(|live| live.machine().is_complete(self.node))
    }
}

/// Pieces read at once, and their bytes; the last may exceed that.
const AHEAD: usize = 32;
const AHEAD_BYTES: usize = 16 * 1024;
