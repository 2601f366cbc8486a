//! Inputs of remote calls: nodes of the kernel become nodes of the session.
//!
//! Owns: [`hand_over`], which node goes by id and which is written, and [`Held`], what the peer holds already. Refuses to
//! know: calls and outputs. Nothing is spawned: a pump progresses while the call is polled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, try_join_all};
use futures::{FutureExt, StreamExt};
use sapwood_proto::evergreen::{Metadata, Status};
use sapwood_proto::session::WriteError;
use sapwood_proto::session::peer::{Node as Remote, Peer, Writer};

use super::super::{failure, wire};
use super::{output, read};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::node::{Identity, Node};

/// Writes one input; ends when all of it has been handed over.
pub(super) type Pump = BoxFuture<'static, Result<()>>;

/// Nodes of ours that the peer holds, as long as both live. A conversation's earlier turns are among them (KE-802).
#[derive(Default)]
pub(crate) struct Held(Mutex<HashMap<Identity, Remote>>);

impl Held {
    fn get(&self, peer: &Peer, node: &Node) -> Option<Remote> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|identity, _| identity.is_alive());
        held.get(&node.identity()?)
            .filter(|remote| remote.is_of(peer))
            .cloned()
    }

    fn put(&self, node: &Node, remote: Remote) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(identity) = node.identity()
            && held.len() < HELD_MAX
        {
            held.insert(identity, remote);
        }
    }
}

/// The node under which the peer finds `node`, and what has to be polled so that it does.
///
/// # Errors
/// The session is over, or holds as many nodes as it may.
pub(super) fn hand_over(
    peer: &Peer,
    held: &Arc<Held>,
    node: &Node,
    role: Option<&'static str>,
) -> Result<(Remote, Option<Pump>), Status> {
    if let Some(remote) = held
        .get(peer, node)
        .or_else(|| output::whole_of(peer, node))
    {
        return Ok((remote, None));
    }
    let writer = peer.write()?;
    let remote = writer.node().clone();
    let (peer, held, node) = (peer.clone(), Arc::clone(held), node.clone());
    let pump = async move {
        let mut writer = writer;
        match write(&peer, &held, &node, &mut writer, role).await {
            Ok(metadata) => {
                let remote = writer.end(&metadata).map_err(unwritten)?;
                held.put(&node, remote);
                Ok(())
            }
            Err(error) => {
                // Whoever reads the input there learns what went wrong here.
                writer.fail(failure::status(&error, "an input"));
                Err(error)
            }
        }
    };
    Ok((remote, Some(pump.boxed())))
}

/// Writes all of a node but its end. What it is said to be where nothing was written.
async fn write(
    peer: &Peer,
    held: &Arc<Held>,
    node: &Node,
    writer: &mut Writer,
    role: Option<&'static str>,
) -> Result<Arc<Metadata>> {
    if let Some(parts) = node.parts() {
        let handed = parts.iter().map(|part| hand_over(peer, held, part, role));
        let handed: Vec<_> = handed.collect::<Result<_, Status>>().map_err(super::told)?;
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
const HELD_MAX: usize = 16_384;
