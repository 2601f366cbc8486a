//! One model of LMTP servers as an upstream.

mod tokenizer;

use std::path::PathBuf;

use futures::FutureExt;
use sapwood_kernel::Name;
use sapwood_kernel::connect::lmtp::{LmtpModelTerms, function};
use sapwood_net::lmtp::pool::{LmtpPool, PoolEndpoint};
use sapwood_net::lmtp::{ConnectOptions, PeerAddress};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use sapwood_proto::lmtp::{LmtpError, pool};

use super::super::Watchers;
use super::{UpstreamLink, UpstreamTarget};
use crate::client;
use crate::config::endpoint::ServerAccess;
use crate::config::remote_model::RemoteModel;
use crate::config::upstream::UpstreamConfig;
use crate::config::{Config, ServedModelConfig};

/// A model that peers serve.
pub(crate) struct PeerPool {
    /// What it is called here.
    name: String,
    endpoints: Vec<PoolEndpoint>,
    settings: pool::PoolOptions,
    /// Where the files of its tokenizer are.
    tokenizer: Option<PathBuf>,
    /// How many tokens fit, where the peers do not say it.
    context: Option<u32>,
    emulate: bool,
    watchers: Watchers,
}

/// The peers and the model at `url`; we are let in there as `access` says.
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
    let endpoint = |address: PeerAddress| PoolEndpoint {
        address,
        model: model.clone(),
        weight: 1,
    };
    let endpoints = peers.into_iter().map(endpoint);
    Ok(UpstreamTarget::Lmtp(PeerPool {
        endpoints: endpoints.map(|one| let_in(one, access)).collect(),
        name: model,
        settings: pool::PoolOptions::default(),
        tokenizer,
        context: None,
        emulate: true,
        watchers: watchers.clone(),
    }))
}

/// The peers of the configured `model`.
///
/// # Errors
/// An address, a key or the authorities to trust cannot be used.
pub(super) fn configured(
    model: &ServedModelConfig,
    upstream: &UpstreamConfig,
    config: &Config,
    watchers: &Watchers,
) -> Result<UpstreamTarget, Status> {
    let peers = upstream
        .peers(&model.name)
        .map_err(|error| to_status(&error))?;
    let endpoints = peers.into_iter().map(|(peer, server)| {
        let access = super::access(server, config)?;
        Ok(let_in(peer, &access))
    });
    Ok(UpstreamTarget::Lmtp(PeerPool {
        name: model.name.clone(),
        endpoints: endpoints.collect::<Result<_, Status>>()?,
        tokenizer: upstream.tokenizer.clone(),
        context: model.ctx,
        emulate: upstream.emulate,
        settings: pool::PoolOptions {
            seeded: upstream.failover.seeded,
            ..pool::PoolOptions::default()
        },
        watchers: watchers.clone(),
    }))
}

/// The same, where we are let in as `access` says.
pub(in crate::upstreams) fn let_in(endpoint: PoolEndpoint, access: &ServerAccess) -> PoolEndpoint {
    let mut peer = endpoint.address;
    if let Some(key) = &access.key {
        peer = peer.with_key(key.clone());
    }
    if let Some(authorities) = &access.authorities {
        peer = peer.with_authorities(authorities.clone());
    }
    if peer.exposes_key() {
        client::warn_of_plain_text(&format!("{peer:?}"));
    }
    PoolEndpoint {
        address: peer,
        ..endpoint
    }
}

/// A pool, which makes connections anew by itself (LM-713, LM-804).
pub(super) async fn dial(peers: &PeerPool) -> Result<UpstreamLink, Status> {
    let options = ConnectOptions::default();
    let connecting = LmtpPool::connect(peers.endpoints.clone(), &options, peers.settings.clone());
    let pool = connecting.await.map_err(|error| to_status(&error))?;
    let tokenizer = tokenizer::find(pool.facts(), peers).await?;
    let terms = LmtpModelTerms {
        chat: tokenizer.as_ref().is_some_and(|one| one.has_template()),
        vocabulary: tokenizer.map(|one| one as _),
        context: peers.context,
        emulate: peers.emulate,
    };
    let Watchers { metrics, pools } = &peers.watchers;
    metrics.watch_pool(&peers.name, pool.clone());
    pools.add(&peers.name, pool.clone());
    Ok(UpstreamLink {
        functions: vec![function(&pool, Name::shared(&peers.name), terms)],
        worn: std::future::pending().boxed(),
        // Its peers come and go; the pool stays.
        over: std::future::pending().boxed(),
        leave: std::future::ready(()).boxed(),
        served: Some(pool.served()),
    })
}

/// A fault, as servers of functions would tell it.
fn to_status(error: &LmtpError) -> Status {
    // A connection that breaks while it is made has cut nothing short.
    let code = match error.reason.code() {
        Code::Truncated => Code::Unavailable,
        code => code,
    };
    Status::other(code, "", error.message.clone())
}
