//! Connects to an upstream by the scheme of its address (D-40).

pub(super) mod lmtp;
mod triton;

use futures::FutureExt;
use sapwood_net::ServerAddress;
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;

use super::{DialUpstream, UpstreamLink, Watchers};
use crate::client;
use crate::config::Config;
use crate::config::endpoint::{EndpointConfig, ServerAccess};

/// The kind of an upstream, with its address.
pub(super) enum UpstreamTarget {
    Evergreen(ServerAddress),
    Triton(ServerAddress),
    /// A model that a pool of LMTP servers serves.
    Lmtp(lmtp::PeerPool),
}

impl UpstreamTarget {
    /// The target that an entry of `upstreams` names.
    ///
    /// # Errors
    /// The address, the key or the trusted authorities cannot be used.
    pub(super) fn read(
        upstream: &EndpointConfig,
        config: &Config,
        watchers: &Watchers,
    ) -> Result<Self, Status> {
        let access = access(upstream, config)?;
        let url = upstream.url.expose();
        // Everything else is Evergreen: other schemes were refused by `Config::check`.
        if url.starts_with("lmtp:") {
            return lmtp::read(url, &access, watchers);
        }
        let address = client::address(url, access, client::CONNECT_TIMEOUT);
        if url.starts_with("triton+") {
            return Ok(Self::Triton(address));
        }
        Ok(Self::Evergreen(address))
    }
}

/// The credentials for a server.
///
/// # Errors
/// A file with the key or the authorities cannot be read.
pub(super) fn access(server: &EndpointConfig, config: &Config) -> Result<ServerAccess, Status> {
    server
        .access(&config.client)
        .map_err(|failure| Status::other(Code::InvalidRequest, "", failure.message))
}

impl DialUpstream for UpstreamTarget {
    async fn dial(&self) -> Result<UpstreamLink, Status> {
        match self {
            Self::Evergreen(address) => evergreen(address).await,
            Self::Triton(address) => triton::dial(address).await,
            Self::Lmtp(peers) => lmtp::dial(peers).await,
        }
    }
}

/// Opens one session. The link lasts as long as the session.
async fn evergreen(address: &ServerAddress) -> Result<UpstreamLink, Status> {
    let (session, listing) = client::join(address).await?;
    let watched = session.clone();
    Ok(UpstreamLink {
        functions: listing.functions,
        worn: session.worn().boxed(),
        // Running calls have received the reason of its end.
        over: async move { drop(watched.closed().await) }.boxed(),
        leave: client::leave(session).boxed(),
        served: None,
    })
}
