//! How an upstream is reached, by the scheme of its address (D-40).
//!
//! Owns: [`Place`], one server of any protocol that we can be a client of. Refuses to know: when it is dialled again.

mod lmtp;
mod triton;

use futures::FutureExt;
use sapwood_net::evergreen::Address;
use sapwood_net::triton::Address as TritonAddress;
use sapwood_proto::evergreen::Status;

pub(super) use self::lmtp::let_in;
use super::{Dial, Link, Watchers};
use crate::client;
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
    /// The place that `url` names.
    ///
    /// # Errors
    /// The address cannot be used, or the authorities to trust cannot be read.
    pub(super) fn read(url: &str, config: &Config, watchers: &Watchers) -> Result<Self, Status> {
        if url.starts_with("triton+") {
            let address = client::triton_address(url, config, client::CONNECT_TIMEOUT);
            return address.map(Self::Triton);
        }
        let address = client::address(url, config, client::CONNECT_TIMEOUT)?;
        if url.starts_with("lmtp:") {
            return lmtp::read(url, &address, watchers);
        }
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
        let known = client::address("", config, client::CONNECT_TIMEOUT)?;
        lmtp::configured(model, upstream, &known, watchers)
    }
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
    let (session, functions) = client::join(address).await?;
    let watched = session.clone();
    Ok(Link {
        functions,
        worn: session.worn().boxed(),
        // Why it ended, its calls have been told.
        over: async move { drop(watched.closed().await) }.boxed(),
        leave: client::leave(session).boxed(),
    })
}
