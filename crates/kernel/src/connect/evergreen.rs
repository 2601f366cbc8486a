//! Functions of another Sapwood, or of any Evergreen server, as functions of this kernel, and functions of this kernel
//! served to it (KE-706, KE-801, EV-971, EV-976).
//!
//! Owns: [`import`], [`remote`] and [`serve`]. Refuses to know: how a session is carried, and what a call of a function of
//! the other side is (`session::remote`).

mod served;

use std::sync::Arc;

use sapwood_net::evergreen::{Request, Session};

use crate::Result;
use crate::error::Error;
use crate::function::Fun;
use crate::name::Name;
use crate::session::listed::Listed;
use crate::session::remote::{self as peers, Held, told};
use crate::spec::Spec;

pub use self::served::{Served, serve};

/// Every function and every model that the server lists, to be added to a kernel. The functions share the session: what
/// one of them has sent or answered is not sent again as an input of another.
///
/// # Errors
/// The server lists nothing, or what it lists cannot be read.
pub async fn import(session: &Session) -> Result<Vec<Fun>> {
    Ok(list(session).await?.functions)
}

/// What a server lists.
#[non_exhaustive]
pub struct Listing {
    /// Every function and every model, as [`import`] gives them.
    pub functions: Vec<Fun>,
    /// The model of calls that name none, where the server has one.
    pub default_target: Option<Name>,
}

/// The same with what else the server says.
///
/// # Errors
/// As [`import`].
pub async fn list(session: &Session) -> Result<Listing> {
    let listed = ask(session).await?;
    let (peer, held) = (session.peer(), Arc::<Held>::default());
    let all = listed.functions().into_iter().chain(listed.models());
    Ok(Listing {
        functions: all
            .map(|spec| peers::function(peer.clone(), spec, &held))
            .collect(),
        default_target: listed.default_target.as_deref().map(Name::shared),
    })
}

/// The function of this spec as the server serves it; a model is called through GENERATE.
#[must_use]
pub fn remote(session: &Session, spec: Spec) -> Fun {
    peers::function(session.peer(), spec, &Arc::default())
}

async fn ask(session: &Session) -> Result<Listed> {
    if !session.announces("list-actions") {
        let what = "listing the functions of a server that does not announce `list-actions`".into();
        return Err(Error::Unimplemented { what });
    }
    let call = session.call(Request {
        name: "LIST_ACTIONS".into(),
        outputs: vec!["actions".into()],
        ..Request::default()
    });
    let call = call.map_err(told)?;
    let unread = || Error::Protocol {
        peer: Name::new("the server"),
        why: "its list of functions cannot be read".into(),
    };
    let output = call.output("actions").ok_or_else(unread)?;
    let text = output
        .read()
        .whole()
        .await
        .map_err(|status| told((*status).clone()))?;
    Listed::read(&text).ok_or_else(unread)
}
