//! One model of peers that speak LMTP.
//!
//! Owns: reading their addresses, and joining them. Refuses to know: when they are joined, and what becomes of the function.

use futures::FutureExt;
use sapwood_kernel::Name;
use sapwood_kernel::connect::lmtp::function;
use sapwood_net::evergreen;
use sapwood_net::lmtp::pool::{Endpoint, Pool};
use sapwood_net::lmtp::{Address, Options};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use sapwood_proto::lmtp::{Fault, pool};

use super::super::Watchers;
use super::{Link, Place};
use crate::config::upstream::Upstream;

/// A model that peers serve.
pub(crate) struct Peers {
    /// What it is called here.
    name: String,
    endpoints: Vec<Endpoint>,
    settings: pool::Options,
    watchers: Watchers,
}

/// The peers and the model at `url`; we are let in there as `known` says.
///
/// # Errors
/// The address cannot be used.
pub(super) fn read(
    url: &str,
    known: &evergreen::Address,
    watchers: &Watchers,
) -> Result<Place, Status> {
    let (peers, model) = Address::of_model(url).map_err(|fault| told(&fault))?;
    let endpoint = |address: Address| Endpoint {
        address: let_in(address, known),
        model: model.clone(),
        weight: 1,
    };
    Ok(Place::Lmtp(Peers {
        endpoints: peers.into_iter().map(endpoint).collect(),
        name: model,
        settings: pool::Options::default(),
        watchers: watchers.clone(),
    }))
}

/// The peers of the configured model `name`; we are let in there as `known` says.
///
/// # Errors
/// An address cannot be used.
pub(super) fn configured(
    name: &str,
    upstream: &Upstream,
    known: &evergreen::Address,
    watchers: &Watchers,
) -> Result<Place, Status> {
    let endpoints = upstream.peers(name).map_err(|fault| told(&fault))?;
    let let_in = |endpoint: Endpoint| Endpoint {
        address: let_in(endpoint.address, known),
        ..endpoint
    };
    Ok(Place::Lmtp(Peers {
        name: name.to_owned(),
        endpoints: endpoints.into_iter().map(let_in).collect(),
        settings: pool::Options {
            seeded: upstream.failover.seeded,
            ..pool::Options::default()
        },
        watchers: watchers.clone(),
    }))
}

fn let_in(mut peer: Address, known: &evergreen::Address) -> Address {
    if let Some(key) = &known.key {
        peer = peer.with_key(key);
    }
    if let Some(authorities) = &known.authorities {
        peer = peer.with_authorities(authorities.clone());
    }
    peer
}

/// A pool, which makes connections anew by itself (LM-713, LM-804).
pub(super) async fn dial(peers: &Peers) -> Result<Link, Status> {
    let options = Options::default();
    let connecting = Pool::connect(peers.endpoints.clone(), &options, peers.settings.clone());
    let pool = connecting.await.map_err(|fault| told(&fault))?;
    let Watchers { metrics, pools } = &peers.watchers;
    metrics.watch_pool(&peers.name, pool.clone());
    pools.add(&peers.name, pool.clone());
    Ok(Link {
        functions: vec![function(&pool, Name::shared(&peers.name))],
        worn: std::future::pending().boxed(),
        // Its peers come and go; the pool stays.
        over: std::future::pending().boxed(),
        leave: std::future::ready(()).boxed(),
    })
}

/// A fault, as servers of functions would tell it.
fn told(fault: &Fault) -> Status {
    // A connection that breaks while it is made has cut nothing short.
    let code = match fault.reason.code() {
        Code::Truncated => Code::Unavailable,
        code => code,
    };
    Status::other(code, "", fault.message.clone())
}
