//! One model of a peer that speaks LMTP.
//!
//! Owns: reading its address, and joining it. Refuses to know: when it is joined, and what becomes of its function.

use futures::FutureExt;
use sapwood_kernel::connect::lmtp::function;
use sapwood_kernel::{Error, Name};
use sapwood_net::evergreen;
use sapwood_net::lmtp::{Address, Client, Options};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use sapwood_proto::lmtp::Fault;

use super::{Link, Place};

/// The peer and the model at `url`; we are let in there as `known` says.
///
/// # Errors
/// The address cannot be used.
pub(super) fn read(url: &str, known: evergreen::Address) -> Result<Place, Status> {
    let (mut peer, model) = Address::of_model(url).map_err(|fault| told(&fault))?;
    if let Some(key) = known.key {
        peer = peer.with_key(key);
    }
    if let Some(authorities) = known.authorities {
        peer = peer.with_authorities(authorities);
    }
    Ok(Place::Lmtp(peer, model))
}

/// A connection, which is made anew by itself when it is lost (LM-713).
pub(super) async fn dial(address: &Address, model: &str) -> Result<Link, Status> {
    let connecting = Client::connect(address.clone(), Options::default());
    let peer = connecting.await.map_err(|fault| told(&fault))?;
    let broken = |error: Error| Status::other(error.code(), "", error.to_string());
    let function = function(&peer, Name::shared(model), model).await;
    Ok(Link {
        functions: vec![function.map_err(broken)?],
        worn: std::future::pending().boxed(),
        over: async move { peer.closed().await }.boxed(),
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
