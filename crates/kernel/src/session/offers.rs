//! The functions that a client offers for as long as its session lives (EV-810, EV-812).
//!
//! Offered functions are visible to their own session alone, and never hide a function of the server.
//!
//! ```text
//!   server's kernel ◄── scope of the session ── offered functions, each an action of the client's
//! ```

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{StreamExt, TryStreamExt, stream};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::SessionLimits;
use sapwood_session::peer::PeerHandle;
use serde_json::json;

use super::link::SessionLink;
use super::listed::PeerListing;
use super::{OFFER, remote};
use crate::call::Call;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::function::Fun;
use crate::handler::raw;
use crate::kernel::Kernel;
use crate::layer::layered;
use crate::name::{Mime, Name, Port};
use crate::node::gather;
use crate::spec::{InputSpec, OutputSpec, Spec};
use crate::{Chunks, Result};

/// The offers of one session. Dropping it withdraws them.
pub(super) struct Offers(Arc<OffersInner>);

struct OffersInner {
    link: SessionLink,
    server: Kernel,
    /// The server's functions and the offered ones.
    scope: Kernel,
    limits: Arc<SessionLimits>,
    /// Approximate memory of the current offer.
    retained: AtomicU64,
    state: Mutex<OfferState>,
}

#[derive(Default)]
struct OfferState {
    /// Number of offers so far, in the order of the actions.
    asked: u64,
    /// The number of the current offer.
    in_force: u64,
    names: BTreeSet<Name>,
    withdrawn: bool,
}

impl Offers {
    pub(super) fn new(link: SessionLink, server: Kernel, limits: Arc<SessionLimits>) -> Self {
        Self(Arc::new(OffersInner {
            link,
            scope: server.annex(),
            server,
            limits,
            retained: AtomicU64::new(0),
            state: Mutex::default(),
        }))
    }

    /// The server's functions and the offered ones.
    pub(super) fn kernel(&self) -> &Kernel {
        &self.0.scope
    }

    /// Approximate bytes of the current offer; its document may have been dropped.
    pub(super) fn retained_bytes(&self) -> u64 {
        self.0.retained.load(Ordering::Relaxed)
    }

    /// The function for the next OFFER_ACTIONS.
    pub(super) fn function(&self) -> Fun {
        // Numbered when the action starts, not when its input has been read: the later of two offers wins, whichever
        // arrives first.
        let ticket = self.0.change(|state| {
            state.asked += 1;
            state.asked
        });
        let spec = Spec::new(OFFER, "Declares the functions that the client serves.")
            .inputs([InputSpec::new(ACTIONS).taking([Mime::JSON, Mime::TEXT])])
            .outputs([OutputSpec::new(Port::MAIN, Mime::JSON).wire("result")]);
        let inner = Arc::clone(&self.0);
        raw(spec, move |call| {
            let inner = Arc::clone(&inner);
            let taken = async move {
                // It is parsed as a whole, so its size has to be bounded before.
                let max = inner.limits.max_offer_bytes;
                let (_, text) = gather(call.read(ACTIONS)?, MAX_OFFER_BYTES, max).await?;
                let count = inner.take(ticket, &text)?;
                Chunk::json(&json!({ "offered": count }))
            };
            stream::once(taken).boxed()
        })
    }
}

impl Drop for Offers {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.withdrawn = true;
            for name in std::mem::take(&mut state.names) {
                self.0.scope.remove(&name);
            }
        });
    }
}

impl OffersInner {
    fn change<R>(&self, change: impl FnOnce(&mut OfferState) -> R) -> R {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the current offer, all of it or nothing. Returns the number of offered functions.
    fn take(&self, ticket: u64, text: &[u8]) -> Result<usize> {
        let listed = PeerListing::read(text).ok_or_else(|| {
            let form = "must be JSON of the form {\"actions\":[{\"name\":…,\"inputs\":[{\"name\":…}],\"outputs\":[…]}]}";
            Error::argument(ACTIONS, form).because(ErrorReason::BAD_CONFIG)
        })?;
        let (cancels, specs): (Vec<Spec>, Vec<Spec>) = listed
            .functions()
            .into_iter()
            // CANCEL in an offer only says that the client understands it; it is no function to call.
            .partition(|spec| spec.name == *CANCEL);
        // All of it before anything changes: a refused offer leaves the one before in force.
        self.check(&specs)?;
        // No owner: the session's own task holds these handles, and ends them with itself.
        let mut client = PeerHandle::new(self.link.shared(), None);
        client.cancels = !cancels.is_empty();
        let pending = Arc::default();
        let offered: Vec<Fun> = specs
            .into_iter()
            .map(|spec| until_closed(&client, remote::function(client.clone(), spec, &pending)))
            .collect();
        let count = offered.len();
        self.change(|state| {
            // A later offer may have been decoded earlier; it stays current.
            if state.withdrawn || ticket < state.in_force {
                return;
            }
            state.in_force = ticket;
            let pending = text.len() as u64 * BYTES_PER_BYTE;
            self.retained.store(pending, Ordering::Relaxed);
            let names = offered.iter().map(|offer| offer.spec().name.clone());
            let before = std::mem::replace(&mut state.names, names.collect());
            // New ones before old ones go, so that a function in both offers is never missing for a running agent.
            for offer in offered {
                self.scope.replace(offer);
            }
            for name in before.difference(&state.names) {
                self.scope.remove(name);
            }
        });
        Ok(count)
    }

    fn check(&self, specs: &[Spec]) -> Result<()> {
        let max = self.limits.max_offers;
        if specs.len() > max {
            return Err(Error::Limit {
                name: MAX_OFFERS,
                max: max as u64,
            });
        }
        let mut names = BTreeSet::new();
        for spec in specs {
            let name = &spec.name;
            let refuse =
                |why: String| Err(Error::argument(ACTIONS, why).because(ErrorReason::BAD_NAME));
            if let Err(error) = spec.check() {
                return refuse(error.to_string());
            }
            if name.starts_with("__") {
                return refuse(format!("{name}: names that begin with __ are reserved"));
            }
            // A caller of the server's function must never reach the client's instead.
            if self.server.get(name).is_ok() {
                return refuse(format!(
                    "the server has a function {name}: offer yours under another name"
                ));
            }
            if !names.insert(name) {
                return refuse(format!("{name} is offered twice"));
            }
        }
        Ok(())
    }
}

/// Calls end as cancelled once the session has ended, for whatever reason (EV-812).
fn until_closed(client: &PeerHandle, function: Fun) -> Fun {
    let client = client.clone();
    layered(function, move |call: Call, next: crate::Next| -> Chunks {
        let client = client.clone();
        let reported = move |error| {
            // The peer's error would be about the lost connection or the abort; EV-812 promises CANCELLED.
            if client.is_over() {
                return Error::Cancelled;
            }
            error
        };
        next.call(call).map_err(reported).boxed()
    })
}

/// The names of the limits in errors.
pub(super) const MAX_OFFERS: &str = "max_offers";
pub(super) const MAX_OFFER_BYTES: &str = "max_offer_bytes";
/// Two characters of a schema may become a JSON value of 72 bytes.
const BYTES_PER_BYTE: u64 = 40;
const ACTIONS: &str = "actions";
/// Offered by a client that supports cancelling. Without it the client is not notified that its result is no longer
/// needed.
const CANCEL: &str = "CANCEL";
