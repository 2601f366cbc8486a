//! Writes the inputs of a remote call: nodes of the kernel become nodes of the session.
//!
//! Nothing is spawned: a pump progresses while the call is polled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, try_join_all};
use futures::{FutureExt, StreamExt};
use sapwood_proto::evergreen::{Metadata, Status};
use sapwood_proto::session::WriteError;
use sapwood_proto::session::peer::{PeerHandle, PeerNodeWriter, SessionNode as Remote};

use super::super::{failure, wire};
use super::{output, read};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::node::{Node, NodeIdentity};

/// Writes one input; ends when all of it has been handed over.
pub(super) type InputPump = BoxFuture<'static, Result<()>>;

/// Nodes of ours that the peer holds, as long as both live. A conversation's earlier turns are among them (KE-802).
#[derive(Default)]
pub(crate) struct SentInputs(Mutex<HashMap<NodeIdentity, Remote>>);

impl SentInputs {
    fn get(&self, peer: &PeerHandle, node: &Node) -> Option<Remote> {
        let mut retained = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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

/// The node under which the peer finds `node`, and what has to be polled so that it does.
///
/// # Errors
/// The session is over, or holds as many nodes as it may.
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
                retained.put(&node, remote);
                Ok(())
            }
            Err(error) => {
                // The reader of the input there learns what went wrong here.
                writer.fail(failure::status(&error, "an input"));
                Err(error)
            }
        }
    };
    Ok((remote, Some(pump.boxed())))
}

/// Writes all of a node but its end. What it is said to be where nothing was written.
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
        // Parents before children (EV-971).
        writer.list(&children).await.map_err(unwritten)?;
        try_join_all(handed.into_iter().filter_map(|(_, pump)| pump)).await?;
        return Ok(Arc::default());
    }
    let mut leaf: Option<(u32, Arc<Metadata>)> = None;
    let mut chunks = read(node);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        let (part, metadata) =
            leaf.get_or_insert_with(|| (chunk.part, Arc::new(metadata(&chunk, role))));
        if *part != chunk.part {
            let why =
                "several parts are sent to the other side as a tree of nodes, not as one node";
            return Err(Error::argument("input", why).because("UNSUPPORTED_MIMETYPE"));
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

/// A session that does not take an input any more; why, its outputs tell.
fn unwritten(error: WriteError) -> Error {
    Error::Unavailable {
        why: error.to_string(),
        retry_after: None,
    }
}

/// Nodes remembered at most; what is forgotten is sent again.
const RETAINED_MAX: usize = 16_384;
