//! Writes the inputs of a remote call: nodes of the kernel become nodes of the session.
//!
//! No task is spawned: a pump progresses while the call is polled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, try_join_all};
use futures::{FutureExt, StreamExt};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::{Metadata, Status};
use sapwood_proto::session::WriteError;
use sapwood_session::peer::{PeerHandle, PeerNodeWriter, SessionNode as Remote};

use super::super::{failure, wire};
use super::{output, read};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::node::{Node, NodeIdentity};

/// Writes one input; resolves when all of it has been written.
pub(super) type InputPump = BoxFuture<'static, Result<()>>;

/// Nodes of this process that the peer already has, as long as both are alive. A conversation's earlier turns are among
/// them (KE-802).
#[derive(Default)]
pub(crate) struct SentInputs(Mutex<HashMap<NodeIdentity, Remote>>);

impl SentInputs {
    fn get(&self, peer: &PeerHandle, node: &Node) -> Option<Remote> {
        let mut retained = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A dead node cannot be passed again, and its entry would only count against `RETAINED_MAX`.
        retained.retain(|identity, _| identity.is_alive());
        retained
            .get(&node.identity()?)
            .filter(|remote| remote.is_of(peer))
            .cloned()
    }

    fn put(&self, node: &Node, remote: Remote) {
        let mut retained = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(identity) = node.identity()
            && retained.len() < RETAINED_MAX
        {
            retained.insert(identity, remote);
        }
    }
}

/// The peer's node for `node`, and the future that sends its content, if it has to be sent.
///
/// # Errors
/// The session is over, or holds the maximum number of nodes.
pub(super) fn hand_over(
    peer: &PeerHandle,
    retained: &Arc<SentInputs>,
    node: &Node,
    role: Option<&'static str>,
) -> Result<(Remote, Option<InputPump>), Status> {
    if let Some(remote) = retained
        .get(peer, node)
        .or_else(|| output::whole_of(peer, node))
    {
        return Ok((remote, None));
    }
    let writer = peer.write()?;
    let remote = writer.node().clone();
    let (peer, retained, node) = (peer.clone(), Arc::clone(retained), node.clone());
    let pump = async move {
        let mut writer = writer;
        match write(&peer, &retained, &node, &mut writer, role).await {
            Ok(metadata) => {
                let remote = writer.end(&metadata).map_err(unwritten)?;
                // Only a complete node: the peer would wait for the rest of one whose pump was dropped.
                retained.put(&node, remote);
                Ok(())
            }
            Err(error) => {
                // The reader of this input at the peer gets the error.
                writer.fail(failure::status(&error, "an input"));
                Err(error)
            }
        }
    };
    Ok((remote, Some(pump.boxed())))
}

/// Writes the content of a node without its end. Returns the metadata for that end; `text/plain` if nothing was
/// written.
async fn write(
    peer: &PeerHandle,
    retained: &Arc<SentInputs>,
    node: &Node,
    writer: &mut PeerNodeWriter,
    role: Option<&'static str>,
) -> Result<Arc<Metadata>> {
    if let Some(parts) = node.parts() {
        let handed = parts
            .iter()
            .map(|part| hand_over(peer, retained, part, role));
        let handed: Vec<_> = handed
            .collect::<Result<_, Status>>()
            .map_err(super::to_kernel_error)?;
        let children: Vec<Remote> = handed.iter().map(|(remote, _)| remote.clone()).collect();
        // A parent is announced before its children (EV-971).
        writer.list(&children).await.map_err(unwritten)?;
        // Together: a part that is slow, or that the peer reads last, must not hold up the others.
        try_join_all(handed.into_iter().filter_map(|(_, pump)| pump)).await?;
        return Ok(Arc::default());
    }
    let mut leaf: Option<(u32, Arc<Metadata>)> = None;
    let mut chunks = read(node);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        let (part, metadata) =
            leaf.get_or_insert_with(|| (chunk.part, Arc::new(metadata(&chunk, role))));
        // Known only while it is read, after the leaf was announced, so it can no longer become a tree.
        if *part != chunk.part {
            let why = "a node of several parts cannot be sent as one leaf: pass a tree of nodes";
            return Err(Error::argument("input", why).because(ErrorReason::UNSUPPORTED_MIMETYPE));
        }
        writer
            .write(metadata, chunk.data)
            .await
            .map_err(unwritten)?;
    }
    let plain = || Arc::new(Metadata::of("text/plain"));
    Ok(leaf.map_or_else(plain, |(_, metadata)| metadata))
}

fn metadata(chunk: &Chunk, role: Option<&'static str>) -> Metadata {
    let mut metadata = wire::metadata(chunk);
    if let Some(role) = role.filter(|_| metadata.role.is_empty() && chunk.mime.is_text()) {
        metadata.role = role.into();
    }
    metadata
}

/// The error for a session that accepts no more input; the outputs report the reason.
fn unwritten(error: WriteError) -> Error {
    Error::Unavailable {
        why: error.to_string(),
        retry_after: None,
    }
}

/// Maximum number of remembered nodes; others are sent again.
const RETAINED_MAX: usize = 16_384;
