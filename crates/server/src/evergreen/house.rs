//! What every session of this face begins with, whichever way its client came.
//!
//! Owns: [`House`]: the functions, the limits, the places for sessions, and what a drain asks of them. Refuses to know:
//! transports and dialects' bytes.

use std::sync::Arc;

use futures::{Stream, StreamExt, stream};
use sapwood_kernel::Kernel;
use sapwood_kernel::session::{self, Incoming, Order, Outgoing, Session};
use sapwood_proto::evergreen::{Dialect, Reason, Status};
use tokio_util::task::AbortOnDropHandle;

use super::held::{self, Held, Kept, Stay};
use super::options::Options;
use super::tally::Tally;
use super::{Config, known_models};
use crate::caller::Identity;
use crate::drain::{Drain, Phase};
use crate::held::Token;
use crate::places::{Full, Place, Shares};
use crate::revocation;
use crate::shared::Shared;
use crate::trail::{self, Trail};

/// Shared by everything that opens sessions.
pub(super) struct House {
    pub(super) shared: Shared,
    kernel: Kernel,
    pub(super) config: Config,
    places: Arc<Shares>,
    retained: Arc<Shares>,
    pub(super) held: Arc<Held>,
}

impl House {
    pub(super) fn new(shared: Shared, kernel: Kernel, config: Config) -> Self {
        let places = Shares::new(config.sessions as u64, config.sessions_each as u64);
        let retained = Shares::new(config.retained_bytes, config.retained_bytes_each);
        Self {
            shared,
            kernel,
            held: Arc::new(held::held(
                config.resumable_sessions,
                config.resumable_sessions_each,
            )),
            config,
            places,
            retained,
        }
    }

    /// A place among the open sessions, or the reason why there is none (section 8.2, EV-960).
    pub(super) fn admit(&self, caller: &Identity) -> Result<Place, Status> {
        let rejected = &self.shared.metrics.rejected;
        if self.shared.drain.phase() >= Phase::Refusing {
            rejected.with_label_values(&["drain"]).inc();
            let message = "the server is shutting down and opens no new sessions: try another one";
            return Err(Status::new(Reason::GoingAway, message));
        }
        self.places.take(caller).map_err(|full| {
            rejected.with_label_values(&[full.reason()]).inc();
            let message = match full {
                Full::All => {
                    "the server has all the sessions it can hold (limits.sessions): try again later"
                        .to_owned()
                }
                Full::Each => format!(
                    "you have {} sessions, and one caller may have no more (limits.sessions_each): close one, or begin \
                     more actions in those that you have",
                    self.places.most_each()
                ),
            };
            Status::new(Reason::EngineBusy, message)
        })
    }

    /// A session that is counted from here on.
    pub(super) fn open(
        &self,
        dialect: Dialect,
        options: Options,
        token: Option<&Token>,
        caller: &Identity,
    ) -> (Session<Tally>, Outgoing) {
        let tally = Tally::begin(
            Arc::clone(&self.shared.metrics),
            self.shared.drain.clone(),
            Place::empty(&self.retained, caller),
        );
        let mut options = self.config.session(dialect, options);
        let allowance = Trail::present().and_then(|trail| trail.allowance());
        options.models = known_models(allowance);
        options.token = token.map(|token| session::Token(token.text().into()));
        session::open(self.kernel.clone(), options, tally)
    }

    /// A session that outlives its connections, in a task of its own; the first of them gives `incoming`.
    pub(super) fn hold(
        &self,
        dialect: Dialect,
        options: Options,
        (token, stay): (Token, Stay),
        place: Place,
        incoming: Incoming,
    ) -> Outgoing {
        let (session, outgoing) = self.open(dialect, options, Some(&token), place.caller());
        let (connections, back) = session.connections(incoming);
        let orders = self.orders();
        let task = tokio::spawn(trail::carry_session(async move {
            session.run(connections, orders).await;
            drop((place, stay));
        }));
        let _task = AbortOnDropHandle::new(task);
        self.held.keep(&token, Kept { back, _task });
        outgoing
    }

    /// What the drain asks of a live session (EV-960, D-31), and the end of its caller's key (D-45). Ask for them where the
    /// session's request is worked for.
    pub(super) fn orders(&self) -> impl Stream<Item = Order> + Send + use<> {
        let revoked = stream::once(revocation::reached()).map(|()| Order::Revoke);
        stream::select(revoked, orders(self.shared.drain.clone()))
    }
}

fn orders(drain: Drain) -> impl Stream<Item = Order> + Send {
    stream::iter([Order::Finish, Order::Leave]).then(move |order| {
        let drain = drain.clone();
        async move {
            match order {
                Order::Finish => drain.reached(Phase::Refusing).await,
                Order::Leave => drain.cutting().await,
                // That is no drain's.
                Order::Revoke => return order,
            }
            order
        }
    })
}
