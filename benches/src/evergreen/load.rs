//! The client that drives every server: a window of raw messages.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use sapwood_proto::evergreen::wire::{
    Action, Chunk, ChunkMetadata, NamedParameter, NodeFragment, Payload, SessionMessage,
};

use super::wire::{Peer, Wire};

/// The parameters of one round.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Payload of one chunk.
    pub bytes: usize,
    /// Chunks in flight.
    pub window: usize,
}

/// The result of one round.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    /// Chunks that were echoed.
    pub chunks: u64,
    /// The duration of the round.
    pub took: Duration,
}

impl Count {
    /// Chunks per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        #[allow(
            clippy::cast_precision_loss,
            reason = "counts of a few seconds are far below 2^52"
        )]
        let chunks = self.chunks as f64;
        chunks / self.took.as_secs_f64()
    }
}

/// Echoes for about `span`, in sessions without retention (EV-984).
///
/// # Errors
/// If the session fails.
pub async fn round(peer: &Peer, shape: Shape, span: Duration) -> Result<Count> {
    let began = Instant::now();
    let mut chunks = 0;
    while began.elapsed() < span {
        chunks += session(peer, shape, began, span).await?;
    }
    Ok(Count {
        chunks,
        took: began.elapsed(),
    })
}

async fn session(peer: &Peer, shape: Shape, began: Instant, span: Duration) -> Result<u64> {
    let mut wire = peer.open(shape.window + 2).await?;
    let payload = Bytes::from(vec![b'x'; shape.bytes]);
    wire.send(opening()).await?;
    let (mut sent, mut back) = (0_i32, 0_i32);
    while sent < i32::try_from(shape.window)? {
        wire.send(fragment(sent, true, &payload)).await?;
        sent += 1;
    }
    let most = i32::try_from(SESSION_BYTES / shape.bytes)?;
    let mut open = true;
    while back < sent {
        let message = wire.receive().await?;
        back += i32::try_from(message.node_fragments.iter().filter(|f| carries(f)).count())?;
        while open && sent - back < i32::try_from(shape.window)? {
            open = sent < most && began.elapsed() < span;
            wire.send(fragment(sent, open, &payload)).await?;
            sent += 1;
        }
    }
    wire.finish().await?;
    ensure!(back == sent, "{sent} chunks went out and {back} came back");
    Ok(u64::try_from(back)?)
}

/// Echoes chunks one after the other; returns the time of each.
///
/// # Errors
/// If the session fails.
pub async fn one_by_one(peer: &Peer, bytes: usize, span: Duration) -> Result<Vec<Duration>> {
    let mut wire = peer.open(2).await?;
    let payload = Bytes::from(vec![b'x'; bytes]);
    wire.send(opening()).await?;
    let (began, mut took, mut seq, mut open) = (Instant::now(), Vec::new(), 0, true);
    while open {
        open = began.elapsed() < span;
        let sent = Instant::now();
        wire.send(fragment(seq, open, &payload)).await?;
        seq += 1;
        while !wire.receive().await?.node_fragments.iter().any(carries) {}
        took.push(sent.elapsed());
    }
    wire.finish().await?;
    Ok(took)
}

/// Payload of one session: below the limit of what a function may read from an input.
const SESSION_BYTES: usize = 512 << 20;

/// Opens a session, echoes one chunk of 32 bytes and then leaves it idle; dropping the result closes it.
///
/// # Errors
/// If the session fails.
pub async fn idle(peer: &Peer) -> Result<Wire> {
    let mut wire = peer.open(2).await?;
    wire.send(opening()).await?;
    wire.send(fragment(0, false, &Bytes::from_static(&[b'x'; 32])))
        .await?;
    let mut done = false;
    while !done {
        let message = wire.receive().await?;
        done = message
            .node_fragments
            .iter()
            .any(|fragment| !fragment.continued);
    }
    Ok(wire)
}

fn opening() -> SessionMessage {
    let bind = |name: &str, id: &str| {
        vec![NamedParameter {
            name: name.into(),
            id: id.into(),
        }]
    };
    let action = Action {
        name: "echo".into(),
        inputs: bind("text", "in"),
        outputs: bind("response", "out"),
        ..Action::default()
    };
    SessionMessage {
        actions: vec![action],
        ..SessionMessage::default()
    }
}

fn fragment(seq: i32, continued: bool, payload: &Bytes) -> SessionMessage {
    let metadata = (seq == 0).then(|| ChunkMetadata {
        mimetype: "text/plain".into(),
        ..ChunkMetadata::default()
    });
    let chunk = Chunk {
        metadata,
        payload: Some(Payload::Data(payload.clone())),
    };
    let fragment = NodeFragment {
        id: "in".into(),
        seq,
        continued,
        chunk_fragment: Some(chunk),
        ..NodeFragment::default()
    };
    SessionMessage {
        node_fragments: vec![fragment],
        ..SessionMessage::default()
    }
}

/// Whether a fragment carries an echoed chunk; closing fragments without payload do not.
fn carries(fragment: &NodeFragment) -> bool {
    let payload = fragment
        .chunk_fragment
        .as_ref()
        .and_then(|chunk| chunk.payload.as_ref());
    matches!(payload, Some(Payload::Data(data)) if !data.is_empty())
}
