//! One model of LMTP servers as an upstream.

mod tokenizer;

use std::path::PathBuf;

use futures::FutureExt;
use sapwood_kernel::connect::lmtp::{LmtpModelTerms, function};
use sapwood_kernel::{Name, OutputParsers, SamplingDefaults};
use sapwood_net::lmtp::pool::{LmtpPool, PoolEndpoint};
use sapwood_net::lmtp::{ConnectOptions, PeerAddress};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use sapwood_proto::lmtp::{LmtpError, pool};

use super::super::Watchers;
use super::{UpstreamLink, UpstreamTarget};
use crate::config::endpoint::{self, ServerAccess};
use crate::config::remote_model::RemoteModel;
use crate::config::upstream::UpstreamConfig;
use crate::config::{Config, ServedModelConfig};

/// A model that a pool of LMTP servers serves.
pub(crate) struct PeerPool {
    /// The name of the model on this server.
    name: String,
    endpoints: Vec<PoolEndpoint>,
    settings: pool::PoolOptions,
    /// Path of its tokenizer files.
    tokenizer: Option<PathBuf>,
    /// The context length, if the servers do not report it.
    context: Option<u32>,
    /// What finds calls and reasoning in its output.
    parsers: OutputParsers,
    /// Its values for parameters that a call leaves unset.
    defaults: SamplingDefaults,
    watchers: Watchers,
}

/// The servers and the model of `url`, with the credentials of `access`.
///
/// # Errors
/// The address cannot be used.
pub(super) fn read(
    url: &str,
    access: &ServerAccess,
    watchers: &Watchers,
) -> Result<UpstreamTarget, Status> {
    let RemoteModel {
        peers,
        model,
        tokenizer,
    } = RemoteModel::read(url).map_err(|error| to_status(&error))?;
    Ok(UpstreamTarget::Lmtp(PeerPool {
        endpoints: named_by_url(peers, &model, access),
        name: model,
        settings: pool::PoolOptions::default(),
        tokenizer,
        context: None,
        parsers: OutputParsers::default(),
        defaults: SamplingDefaults::default(),
        watchers: watchers.clone(),
    }))
}

/// The servers of the configured `model`.
///
/// # Errors
/// An address, a key or the trusted authorities cannot be used.
pub(in crate::upstreams) fn configured(
    model: &ServedModelConfig,
    upstream: &UpstreamConfig,
    config: &Config,
    watchers: &Watchers,
) -> Result<UpstreamTarget, Status> {
    Ok(UpstreamTarget::Lmtp(PeerPool {
        name: model.name.clone(),
        endpoints: of_model(&model.name, upstream, config)?,
        tokenizer: upstream.tokenizer.clone(),
        context: model.ctx,
        parsers: model.parsers(),
        defaults: model.sampling.alone(),
        settings: pool::PoolOptions {
            seeded: upstream.failover.seeded,
            ..pool::PoolOptions::default()
        },
        watchers: watchers.clone(),
    }))
}

/// The endpoints of a model that a URL names, with the credentials of `access`.
pub(in crate::upstreams) fn named_by_url(
    peers: Vec<PeerAddress>,
    model: &str,
    access: &ServerAccess,
) -> Vec<PoolEndpoint> {
    let endpoint = |address| PoolEndpoint {
        address,
        model: model.to_owned(),
        weight: 1,
    };
    let endpoints = peers.into_iter().map(endpoint);
    endpoints.map(|one| let_in(one, access)).collect()
}

/// The endpoints of the configured model that is called `name`.
///
/// # Errors
/// As [`configured`].
pub(in crate::upstreams) fn of_model(
    name: &str,
    upstream: &UpstreamConfig,
    config: &Config,
) -> Result<Vec<PoolEndpoint>, Status> {
    let peers = upstream.peers(name).map_err(|error| to_status(&error))?;
    let endpoints = peers.into_iter();
    endpoints
        .map(|(peer, server)| Ok(let_in(peer, &super::access(server, config)?)))
        .collect()
}

/// Adds the credentials of `access` to an endpoint.
fn let_in(endpoint: PoolEndpoint, access: &ServerAccess) -> PoolEndpoint {
    let mut peer = endpoint.address;
    if let Some(key) = &access.key {
        peer = peer.with_key(key.clone());
    }
    if let Some(authorities) = &access.authorities {
        peer = peer.with_authorities(authorities.clone());
    }
    if peer.exposes_key() {
        endpoint::warn_of_plain_text(&format!("{peer:?}"));
    }
    PoolEndpoint {
        address: peer,
        ..endpoint
    }
}

/// Connects a pool, which reconnects by itself (LM-713, LM-804).
pub(super) async fn dial(peers: &PeerPool) -> Result<UpstreamLink, Status> {
    let options = ConnectOptions::default();
    let connecting = LmtpPool::connect(peers.endpoints.clone(), &options, peers.settings.clone());
    let pool = connecting.await.map_err(|error| to_status(&error))?;
    let tokenizer = tokenizer::find(pool.facts(), peers).await?;
    let terms = LmtpModelTerms {
        chat: tokenizer.as_ref().is_some_and(|one| one.has_template()),
        vocabulary: tokenizer.map(|one| one as _),
        context: peers.context,
        parsers: peers.parsers,
        defaults: peers.defaults.clone(),
    };
    let Watchers { metrics, pools } = &peers.watchers;
    // Registered only now: a pool whose tokenizer cannot be used is dropped again.
    metrics.watch_pool(&peers.name, pool.clone());
    pools.add(&peers.name, pool.clone());
    Ok(UpstreamLink {
        functions: vec![function(&pool, Name::shared(&peers.name), terms)],
        // Calls of LMTP leave nothing behind on a connection that would have to be renewed.
        worn: std::future::pending().boxed(),
        // Its servers come and go, but the pool itself is never lost.
        over: std::future::pending().boxed(),
        leave: std::future::ready(()).boxed(),
        served: Some(pool.served()),
    })
}

/// Converts an LMTP error to a status.
fn to_status(error: &LmtpError) -> Status {
    // If a connection breaks while it is being made, nothing is truncated.
    let code = match error.reason.code() {
        Code::Truncated => Code::Unavailable,
        code => code,
    };
    Status::other(code, "", error.message.clone())
}
