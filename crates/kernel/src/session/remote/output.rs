//! Reads the outputs of a remote call: nodes of the session become chunks.

use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures::{FutureExt, StreamExt};
use sapwood_proto::bounded_json::{self, JsonUnread};
use sapwood_proto::evergreen::Metadata;
use sapwood_proto::session::LeafPiece;
use sapwood_session::peer::{NodeReader, PeerHandle, SessionNode as Remote};
use serde_json::Value;

use super::super::{failure, wire};
use super::{META, PEER, read};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::limits;
use crate::meta::{ChoiceFinish, Meta, RunUsage};
use crate::name::{Mime, Name, Port};
use crate::node::Node;

/// One output that is being read.
pub(super) struct RemoteOutput {
    port: Port,
    reader: Option<NodeReader>,
    /// Whether the children of the tree are choices; else they are parts of one.
    choices: bool,
    mime: Option<(Arc<Metadata>, Mime)>,
    origin: Option<Arc<RemoteNode>>,
    read: u64,
    /// The data of output `meta` so far; it can be decoded only when complete.
    meta: BytesMut,
}

/// A node of the peer, as the origin of the chunks that were read from it.
struct RemoteNode {
    node: Remote,
    /// Its length in bytes, once that is known.
    len: OnceLock<u64>,
}

/// The raw object of a chunk: its node and its offset there.
struct ChunkOrigin {
    source: Arc<RemoteNode>,
    offset: u64,
    data: Bytes,
}

impl RemoteOutput {
    pub(super) fn new(port: Port, node: Remote, choices: bool, inner: bool) -> Self {
        let reader = Some(node.read());
        let origin = inner.then(|| {
            Arc::new(RemoteNode {
                node,
                len: OnceLock::new(),
            })
        });
        Self {
            port,
            reader,
            choices,
            mime: None,
            origin,
            read: 0,
            meta: BytesMut::new(),
        }
    }

    pub(super) fn port(&self) -> &str {
        self.port.as_str()
    }

    /// Polls the next chunk; `None` at the end, and for ever after.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Chunk>>> {
        let Some(reader) = &mut self.reader else {
            return Poll::Ready(None);
        };
        match ready!(reader.poll_piece(cx)) {
            Some(Ok(piece)) => {
                if self.port == *META {
                    // The peer decides how long its answer is, and a client that offers functions is no trusted peer.
                    if self.meta.len() + piece.data.len() > META_BYTES_MAX {
                        self.reader = None;
                        return Poll::Ready(Some(Err(bad_meta(format!(
                            "is longer than {META_BYTES_MAX} bytes"
                        )))));
                    }
                    self.meta.extend_from_slice(&piece.data);
                }
                Poll::Ready(Some(Ok(self.chunk(piece))))
            }
            // Nothing follows a failure (KE-311), and the cursor is closed at once.
            Some(Err(status)) => {
                self.reader = None;
                Poll::Ready(Some(Err(failure::error(&status))))
            }
            None => {
                self.reader = None;
                if let Some(source) = &self.origin {
                    // Set only here, so this cannot fail.
                    let _ = source.len.set(self.read);
                }
                Poll::Ready(self.last_words())
            }
        }
    }

    fn chunk(&mut self, piece: LeafPiece) -> Chunk {
        let mime = match &self.mime {
            Some((metadata, mime)) if Arc::ptr_eq(metadata, &piece.metadata) => mime.clone(),
            _ => {
                let mime = Mime::shared(piece.metadata.mimetype());
                self.mime
                    .insert((Arc::clone(&piece.metadata), mime))
                    .1
                    .clone()
            }
        };
        let mut chunk = Chunk::bytes(piece.data)
            .on(self.port.clone())
            .with_mime(mime);
        (chunk.choice, chunk.part) = if self.choices {
            (piece.item, 0)
        } else {
            (0, piece.item)
        };
        if piece.first {
            chunk.meta = wire::meta(&piece.metadata).map(Arc::new);
        }
        if let Some(source) = &self.origin {
            let (source, data) = (Arc::clone(source), chunk.data.clone());
            chunk.inner = Some(Arc::new(ChunkOrigin {
                source,
                offset: self.read,
                data,
            }));
        }
        self.read += chunk.data.len() as u64;
        chunk
    }

    /// KE-305: converts the document of output `meta` to metadata of the run.
    fn last_words(&mut self) -> Option<Result<Chunk>> {
        // A peer may end the output without a document: metadata is optional (KE-305).
        if self.meta.is_empty() {
            return None;
        }
        let document = bounded_json::read(&self.meta, limits::JSON_BOUNDS);
        self.meta.clear();
        let chunk = |document: Value| Chunk::empty().with_meta(meta(&document));
        let bad = |error: JsonUnread| match error {
            JsonUnread::Syntax(_) => bad_meta("is not JSON".into()),
            exceeded => bad_meta(format!("has {exceeded}")),
        };
        Some(document.map(chunk).map_err(bad))
    }
}

fn bad_meta(why: String) -> Error {
    Error::Protocol {
        peer: PEER,
        why: format!("its output `meta` {why}"),
    }
}

/// Reduces a chunk of an unrequested port to its metadata of the run.
pub(super) fn bare(chunk: Chunk) -> Chunk {
    let mut bare = Chunk::empty();
    bare.meta = chunk.meta;
    bare
}

fn meta(document: &Value) -> Meta {
    let mut meta = Meta::default();
    let text = |key: &str| document.get(key).and_then(Value::as_str);
    meta.model = text("model").map(Name::shared);
    if let Some(reason) = text("finish_reason") {
        meta = meta.with_finish(0, ChoiceFinish::from_name(reason));
    }
    for choice in document
        .get("choices")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let index = choice
            .get("index")
            .and_then(Value::as_u64)
            .and_then(|index| u32::try_from(index).ok());
        let reason = choice.get("finish_reason").and_then(Value::as_str);
        if let Some((index, reason)) = index.zip(reason) {
            meta = meta.with_finish(index, ChoiceFinish::from_name(reason));
        }
    }
    if let Some(usage) = document.get("usage") {
        let count = |key: &str| usage.get(key).and_then(Value::as_u64).unwrap_or(0);
        let mut counted = RunUsage::of(count("prompt_tokens"), count("completion_tokens"));
        counted.cached_tokens = count("cached_tokens");
        counted.reasoning_tokens = count("reasoning_tokens");
        meta = meta.with_usage(0, counted);
    }
    for key in ["seed", "stop", "timing"] {
        if let Some(value) = document.get(key).filter(|value| !value.is_null()) {
            meta = meta.with_extra(key, value.clone());
        }
    }
    meta
}

/// The node of the session with `peer` that `node` is a complete and unmodified copy of, if it is one: every chunk is
/// the very piece that was read from it, from its first byte to its last.
pub(super) fn whole_of(peer: &PeerHandle, node: &Node) -> Option<Remote> {
    if !node.is_complete() {
        return None;
    }
    let mut chunks = read(node);
    let (mut source, mut read): (Option<Arc<RemoteNode>>, u64) = (None, 0);
    // The node is complete, so this never waits.
    while let Some(chunk) = chunks.next().now_or_never()? {
        let chunk = chunk.ok()?;
        let Some(origin) = chunk.inner::<ChunkOrigin>() else {
            // The chunk with the metadata at the end has no bytes of the node.
            if chunk.data.is_empty() {
                continue;
            }
            return None;
        };
        let same = source.get_or_insert_with(|| Arc::clone(&origin.source));
        let faithful = Arc::ptr_eq(same, &origin.source)
            && origin.offset == read
            // A layer may have replaced the data and kept `inner`, so the bytes must be the very ones; comparing
            // content would read all of it.
            && origin.data.as_ptr() == chunk.data.as_ptr()
            && origin.data.len() == chunk.data.len();
        if !faithful {
            return None;
        }
        read += chunk.data.len() as u64;
    }
    let source = source?;
    // Without its length the copy could be a prefix; and a node of another session has no id here.
    (source.len.get() == Some(&read) && source.node.is_of(peer)).then(|| source.node.clone())
}

/// Bytes of one document of output `meta`, which is held until it ends.
const META_BYTES_MAX: usize = 1 << 20;
