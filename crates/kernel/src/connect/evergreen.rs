//! Functions of another Evergreen server as functions of this kernel, and functions of this kernel offered to it
//! (KE-706, KE-801, EV-971, EV-976).

mod served;

use std::sync::Arc;

use sapwood_net::evergreen::{CallRequest, ClientSession};

use crate::Result;
use crate::error::Error;
use crate::function::Fun;
use crate::name::Name;
use crate::session::listed::PeerListing;
use crate::session::remote::{self as peers, SentInputs, to_kernel_error};
use crate::spec::Spec;

pub use self::served::{ServedSession, serve};

/// Functions for every function and every model that the server lists, to be added to a kernel. They share the session:
/// data that one of them has sent or received is not sent again as an input of another.
///
/// # Errors
/// The server lists nothing, or its list cannot be read.
pub async fn import(session: &ClientSession) -> Result<Vec<Fun>> {
    Ok(list(session).await?.functions)
}

/// The content of a server's list.
#[non_exhaustive]
pub struct Listing {
    /// Every function and every model, as [`import`] gives them.
    pub functions: Vec<Fun>,
    /// The default model: the one of calls that name none, where the server has one.
    pub default_target: Option<Name>,
}

/// Like [`import`], and returns the other facts of the list as well.
///
/// # Errors
/// As [`import`].
pub async fn list(session: &ClientSession) -> Result<Listing> {
    let listed = ask(session).await?;
    // One store for all functions of the session: an output of one is an input of another without being sent (EV-973).
    let (peer, retained) = (session.peer(), Arc::<SentInputs>::default());
    let all = listed.functions().into_iter().chain(listed.models());
    Ok(Listing {
        functions: all
            .map(|spec| peers::function(peer.clone(), spec, &retained))
            .collect(),
        default_target: listed.default_target.as_deref().map(Name::shared),
    })
}

/// The function of this spec, called over the session; a model is called through GENERATE.
#[must_use]
pub fn remote(session: &ClientSession, spec: Spec) -> Fun {
    peers::function(session.peer(), spec, &Arc::default())
}

async fn ask(session: &ClientSession) -> Result<PeerListing> {
    if !session.announces("list-actions") {
        let what = "listing the functions of a server that does not announce `list-actions`".into();
        return Err(Error::Unimplemented { what });
    }
    let call = session.call(CallRequest {
        name: "LIST_ACTIONS".into(),
        outputs: vec!["actions".into()],
        ..CallRequest::default()
    });
    let call = call.map_err(to_kernel_error)?;
    let unread = || Error::Protocol {
        peer: Name::new("the server"),
        why: "its list of functions cannot be read".into(),
    };
    let output = call.output("actions").ok_or_else(unread)?;
    let text = output
        .read()
        .whole()
        .await
        .map_err(|status| to_kernel_error((*status).clone()))?;
    PeerListing::read(&text).ok_or_else(unread)
}
