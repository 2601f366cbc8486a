//! What every connection of this face begins with, whichever way its client came.
//!
//! Owns: [`House`]: the models, the limits, the places for connections. Refuses to know: transports.

use std::sync::Arc;

use bytestring::ByteString;
use sapwood_kernel::Kernel;
use sapwood_proto::code::Code;
use sapwood_proto::lmtp::{self, Carrier, Session};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Config;
use super::catalog::Catalog;
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Shared by everything that opens connections.
pub(super) struct House {
    pub(super) shared: Shared,
    pub(super) kernel: Kernel,
    pub(super) catalog: Catalog,
    pub(super) config: Config,
    default_model: Option<ByteString>,
    places: Arc<Semaphore>,
}

impl House {
    pub(super) fn new(shared: Shared, kernel: Kernel, config: Config) -> Self {
        Self {
            catalog: Catalog::new(kernel.clone(), &shared),
            default_model: config.default_model.as_deref().map(ByteString::from),
            places: Arc::new(Semaphore::new(config.connections)),
            shared,
            kernel,
            config,
        }
    }

    /// A place among the connections, or why there is none (LM-109).
    pub(super) fn admit(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            let rejected = &self.shared.metrics.rejected;
            rejected.with_label_values(&["queue"]).inc();
            let message = "The server has all the LMTP connections it can hold: try again later.";
            Refusal::new(Code::Unavailable, "server_overloaded", message)
        })
    }

    /// A session that begins now; `negotiated`: with all that version 2 has here (LM-905).
    pub(super) fn open(&self, carrier: Carrier, negotiated: bool) -> Session {
        Session::new(lmtp::Config {
            limits: Arc::clone(&self.config.limits),
            carrier,
            default_model: self.default_model.clone(),
            strict_parameters: self.config.strict_parameters,
            coalesce: self.config.coalesce,
            close_on_malformed: self.config.close_on_malformed,
            negotiated,
            // Nobody can come back to it yet.
            ..lmtp::Config::default()
        })
    }
}
