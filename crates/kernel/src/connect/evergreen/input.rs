//! Inputs of remote calls: nodes of the kernel become nodes of the session.
//!
//! Owns: [`offer`], which node goes by id and which is written, and [`Held`], what the peer holds already. Refuses to
//! know: calls and outputs. Nothing is spawned: a pump progresses while the call is polled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, try_join_all};
use futures::{FutureExt, StreamExt};
use sapwood_net::evergreen::{Node as Remote, Session, Writer};
use sapwood_proto::evergreen::{Metadata, Status};
use sapwood_proto::session::WriteError;

use super::{output, read};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::node::{Identity, Node};
use crate::session::wire;

/// Writes one input; ends when all of it has been handed over.
pub(super) type Pump = BoxFuture<'static, Result<()>>;

/// Nodes of ours that the peer holds, as long as both live. A conversation's earlier turns are among them (KE-802).
#[derive(Default)]
pub(super) struct Held(Mutex<HashMap<Identity, Remote>>);

impl Held {
    fn get(&self, session: &Session, node: &Node) -> Option<Remote> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|identity, _| identity.is_alive());
        held.get(&node.identity()?)
            .filter(|remote| remote.is_of(session))
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
pub(super) fn offer(
    session: &Session,
    held: &Arc<Held>,
    node: &Node,
    role: Option<&'static str>,
) -> Result<(Remote, Option<Pump>), Status> {
    if let Some(remote) = held
        .get(session, node)
        .or_else(|| output::whole_of(session, node))
    {
        return Ok((remote, None));
    }
    let writer = session.write()?;
    let remote = writer.node().clone();
    let (session, held, node) = (session.clone(), Arc::clone(held), node.clone());
    let pump = async move { write(session, held, node, writer, role).await }.boxed();
    Ok((remote, Some(pump)))
}

async fn write(
    session: Session,
    held: Arc<Held>,
    node: Node,
    mut writer: Writer,
    role: Option<&'static str>,
) -> Result<()> {
    if let Some(parts) = node.parts() {
        let offers = parts.iter().map(|part| offer(&session, &held, part, role));
        let offers: Vec<_> = offers.collect::<Result<_, Status>>().map_err(super::told)?;
        let children: Vec<Remote> = offers.iter().map(|(remote, _)| remote.clone()).collect();
        // Parents before children (EV-971).
        writer.list(&children).await.map_err(unwritten)?;
        writer.end(&Arc::default()).map_err(unwritten)?;
        try_join_all(offers.into_iter().filter_map(|(_, pump)| pump)).await?;
        return Ok(());
    }
    let mut leaf: Option<(u32, Arc<Metadata>)> = None;
    let mut chunks = read(&node);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        let (part, metadata) =
            leaf.get_or_insert_with(|| (chunk.part, Arc::new(metadata(&chunk, role))));
        if *part != chunk.part {
            let why = "several parts are sent to a server as a tree of nodes, not as one node";
            return Err(Error::argument("input", why).because("UNSUPPORTED_MIMETYPE"));
        }
        writer
            .write(metadata, chunk.data)
            .await
            .map_err(unwritten)?;
    }
    let metadata = leaf.map_or_else(
        || Arc::new(Metadata::of("text/plain")),
        |(_, metadata)| metadata,
    );
    let remote = writer.end(&metadata).map_err(unwritten)?;
    held.put(&node, remote);
    Ok(())
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
