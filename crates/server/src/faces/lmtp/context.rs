//! What every LMTP connection starts with, over each transport: kernel, limits, quotas, registries.

use std::sync::Arc;

use bytestring::ByteString;
use sapwood_kernel::Kernel;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::lmtp::{self, Feature, Features, LmtpSession, MessageFraming};
use sapwood_proto::time::Time;
use tokio::time::Instant;

use super::Config;
use super::catalog::Catalog;
use super::detached::{ConnectionRegistry, new_registry};
use crate::auth::caller::Caller;
use crate::auth::identity::CallerIdentity;
use crate::auth::quotas::{CallerQuotas, NoSlot, Permit};
use crate::context::ServerContext;
use crate::http::rejection::Rejection;

/// Shared by everything that opens connections.
pub(super) struct LmtpContext {
    pub(super) shared: ServerContext,
    pub(super) kernel: Kernel,
    pub(super) catalog: Catalog,
    pub(super) config: Config,
    default_model: Option<ByteString>,
    quotas: Arc<CallerQuotas>,
    pub(super) detached: Arc<ConnectionRegistry>,
    /// The origin of all sessions' times. It is one for all, so that a session can move to another connection.
    began: Instant,
}

impl LmtpContext {
    pub(super) fn new(shared: ServerContext, kernel: Kernel, config: Config) -> Self {
        Self {
            catalog: Catalog::new(kernel.clone(), &shared),
            default_model: config.default_model.as_deref().map(ByteString::from),
            quotas: CallerQuotas::new(config.connections as u64, config.connections_each as u64),
            detached: Arc::new(new_registry(
                config.resumable_sessions,
                config.resumable_sessions_each,
            )),
            began: Instant::now(),
            shared,
            kernel,
            config,
        }
    }

    /// Acquires a place among the connections.
    ///
    /// # Errors
    /// Why there is none (LM-109).
    pub(super) fn admit(&self, caller: &CallerIdentity) -> Result<Permit, Rejection> {
        self.quotas.take(caller).map_err(|full| {
            let rejected = &self.shared.metrics.rejected;
            rejected.with_label_values(&[full.reason()]).inc();
            let message = match full {
                NoSlot::All => {
                    "The server has all the LMTP connections it can hold (lmtp.max_connections): try again later."
                        .to_owned()
                }
                NoSlot::Each => format!(
                    "You have {} LMTP connections, and one caller may have no more (lmtp.connections_each): close one, \
                     or send more streams over those that you have.",
                    self.quotas.most_each()
                ),
            };
            // 503 with `Retry-After` for both, as LM-109 has it, also where only the caller's own share is used up.
            Rejection::new(Code::Unavailable, ErrorReason::SERVER_OVERLOADED, message)
        })
    }

    /// The time now, as sessions count it.
    pub(super) fn now(&self) -> Time {
        Time::new(self.began.elapsed())
    }

    /// A time of sessions as an instant.
    pub(super) fn instant(&self, time: Time) -> Instant {
        self.began + time.since_origin()
    }

    /// Makes a session for a connection.
    pub(super) fn open(&self, connection: &LmtpClientInfo) -> LmtpSession {
        // Where no model can be steered, a client must not take the feature for granted (LM-902).
        let steers = self.kernel.specs().iter().any(|spec| spec.steers);
        let features = if steers {
            Features::BUILT
        } else {
            Features::BUILT.without(Feature::Controllers)
        };
        LmtpSession::new(lmtp::Config {
            limits: Arc::clone(&self.config.limits),
            carrier: connection.carrier,
            default_model: self.default_model.clone(),
            strict_parameters: self.config.strict_parameters,
            coalesce: self.config.coalesce,
            bare: connection.bare,
            close_on_malformed: self.config.close_on_malformed,
            features: match &connection.identity {
                Some(_) => features,
                // A session belongs to the identity that made it. Without one nothing may resume it (D-45), and so the
                // feature is not offered.
                None => features.without(Feature::Resume),
            },
            negotiated: connection.negotiated,
        })
    }
}

/// The client of a connection, and the form of its messages.
pub(super) struct LmtpClientInfo {
    pub(super) carrier: MessageFraming,
    /// All features of version 2 are on, without a negotiation (LM-905).
    pub(super) negotiated: bool,
    /// Items are objects (LM-114).
    pub(super) bare: bool,
    pub(super) caller: Option<Caller>,
    /// The owner of its session, if it can resume.
    pub(super) identity: Option<CallerIdentity>,
}

impl LmtpClientInfo {
    /// A client of the line transport without an identity.
    pub(super) const fn of_lines() -> Self {
        Self {
            carrier: MessageFraming::Lines,
            negotiated: false,
            bare: false,
            caller: None,
            identity: None,
        }
    }
}
