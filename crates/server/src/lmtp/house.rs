//! What every connection of this face begins with, whichever way its client came.
//!
//! Owns: [`House`]: the models, the limits, the places for connections. Refuses to know: transports.

use std::sync::Arc;

use bytestring::ByteString;
use sapwood_kernel::Kernel;
use sapwood_proto::code::Code;
use sapwood_proto::lmtp::{self, Carrier, Feature, Features, Session};
use sapwood_proto::time::Time;
use tokio::time::Instant;

use super::Config;
use super::catalog::Catalog;
use super::held::{Held, held};
use crate::caller::{Caller, Identity};
use crate::places::{Full, Place, Shares};
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Shared by everything that opens connections.
pub(super) struct House {
    pub(super) shared: Shared,
    pub(super) kernel: Kernel,
    pub(super) catalog: Catalog,
    pub(super) config: Config,
    default_model: Option<ByteString>,
    places: Arc<Shares>,
    pub(super) held: Arc<Held>,
    /// Sessions count their time from here, so that one can go on where another has begun.
    began: Instant,
}

impl House {
    pub(super) fn new(shared: Shared, kernel: Kernel, config: Config) -> Self {
        Self {
            catalog: Catalog::new(kernel.clone(), &shared),
            default_model: config.default_model.as_deref().map(ByteString::from),
            places: Shares::new(config.connections as u64, config.connections_each as u64),
            held: Arc::new(held(
                config.resumable_sessions,
                config.resumable_sessions_each,
            )),
            began: Instant::now(),
            shared,
            kernel,
            config,
        }
    }

    /// A place among the connections, or why there is none (LM-109).
    pub(super) fn admit(&self, caller: &Identity) -> Result<Place, Refusal> {
        self.places.take(caller).map_err(|full| {
            let rejected = &self.shared.metrics.rejected;
            rejected.with_label_values(&[full.reason()]).inc();
            let message = match full {
                Full::All => {
                    "The server has all the LMTP connections it can hold (lmtp.max_connections): try again later."
                        .to_owned()
                }
                Full::Each => format!(
                    "You have {} LMTP connections, and one caller may have no more (lmtp.connections_each): close one, \
                     or send more streams over those that you have.",
                    self.places.most_each()
                ),
            };
            Refusal::new(Code::Unavailable, "server_overloaded", message)
        })
    }

    /// The time of sessions.
    pub(super) fn now(&self) -> Time {
        Time::new(self.began.elapsed())
    }

    /// When that is on the clock.
    pub(super) fn instant(&self, time: Time) -> Instant {
        self.began + time.since_origin()
    }

    /// A session that begins now.
    pub(super) fn open(&self, guest: &Guest) -> Session {
        let features = Features::BUILT;
        Session::new(lmtp::Config {
            limits: Arc::clone(&self.config.limits),
            carrier: guest.carrier,
            default_model: self.default_model.clone(),
            strict_parameters: self.config.strict_parameters,
            coalesce: self.config.coalesce,
            bare: guest.bare,
            close_on_malformed: self.config.close_on_malformed,
            features: match &guest.visitor {
                Some(_) => features,
                None => features.without(Feature::Resume),
            },
            negotiated: guest.negotiated,
        })
    }
}

/// Who has come, and how.
pub(super) struct Guest {
    pub(super) carrier: Carrier,
    /// With all that version 2 has here (LM-905).
    pub(super) negotiated: bool,
    /// Items are objects (LM-114).
    pub(super) bare: bool,
    pub(super) caller: Option<Caller>,
    /// As whom it can come back, if it can.
    pub(super) visitor: Option<Identity>,
}

impl Guest {
    /// Whoever speaks lines and is nobody in particular.
    pub(super) const fn of_lines() -> Self {
        Self {
            carrier: Carrier::Lines,
            negotiated: false,
            bare: false,
            caller: None,
            visitor: None,
        }
    }
}
