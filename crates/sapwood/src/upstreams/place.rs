//! How an upstream is reached, by the scheme of its address (D-40).
//!
//! Owns: [`Place`], one server of any protocol that we can be a client of. Refuses to know: when it is dialled again.

mod lmtp;
mod triton;

use futures::FutureExt;
use sapwood_net::evergreen::Address;
use sapwood_net::triton::Address as TritonAddress;
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;

pub(super) use self::lmtp::let_in;
use super::{Dial, Link, Watchers};
use crate::client;
use crate::config::endpoint::{Access, Endpoint};
use crate::config::upstream::Upstream;
use crate::config::{Config, Model};

/// Where an upstream is.
pub(super) enum Place {
    Evergreen(Address),
    Triton(TritonAddress),
    /// A model that peers serve.
    Lmtp(lmtp::Peers),
}

impl Place {
    /// The place that an entry of `upstreams` names.
    ///
    /// # Errors
    /// The address, the key or the authorities to trust cannot be used.
    pub(super) fn read(
        upstream: &Endpoint,
        config: &Config,
        watchers: &Watchers,
    ) -> Result<Self, Status> {
        let access = access(upstream, config)?;
        let url = upstream.url.expose();
        if url.starts_with("lmtp:") {
            return lmtp::read(url, &access, watchers);
        }
        if url.starts_with("triton+") {
            let address = client::triton_address(url, access, client::CONNECT_TIMEOUT);
            return Ok(Self::Triton(address));
        }
        let address = client::address(url, access, client::CONNECT_TIMEOUT);
        Ok(Self::Evergreen(address))
    }

    /// The servers of a configured model.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn of_model(
        model: &Model,
        upstream: &Upstream,
        config: &Config,
        watchers: &Watchers,
    ) -> Result<Self, Status> {
        lmtp::configured(model, upstream, config, watchers)
    }
}

/// How we are let in at a server.
///
/// # Errors
/// A file that holds the key or the authorities cannot be read.
pub(super) fn access(server: &Endpoint, config: &Config) -> Result<Access, Status> {
    server
        .access(&config.client)
        .map_err(|failure| Status::other(Code::InvalidRequest, "", failure.message))
}

impl Dial for Place {
    async fn dial(&self) -> Result<Link, Status> {
        match self {
            Self::Evergreen(address) => evergreen(address).await,
            Self::Triton(address) => triton::dial(address).await,
            Self::Lmtp(peers) => lmtp::dial(peers).await,
        }
    }
}

/// One session, for as long as it lasts.
async fn evergreen(address: &Address) -> Result<Link, Status> {
    let (session, listing) = client::join(address).await?;
    let watched = session.clone();
    Ok(Link {
        functions: listing.functions,
        worn: session.worn().boxed(),
        // Why it ended, its calls have been told.
        over: async move { drop(watched.closed().await) }.boxed(),
        leave: client::leave(session).boxed(),
        served: None,
    })
}
