//! The keys of `[limits]`.

use std::time::Duration;

use sapwood_proto::evergreen::SessionLimits as Evergreen;
use serde::{Deserialize, Serialize};

use crate::failure::CliError;

/// Limits of the listener, of sessions and of queues.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LimitsConfig {
    /// Open connections; above it the listener stops accepting.
    pub(crate) connections: usize,
    /// Open connections from one address; further ones are closed.
    pub(crate) connections_each: usize,
    /// Concurrent HTTP/2 streams of one connection.
    pub(crate) streams_per_connection: u32,
    /// Bytes of a request's head.
    pub(crate) header_bytes: u32,
    /// Header lines of a request, over each version of HTTP.
    pub(crate) headers: usize,
    /// Timeout for the first byte of a connection, and for the head of a request.
    #[serde(with = "humantime_serde")]
    pub(crate) handshake: Duration,
    /// Idle timeout of a connection.
    #[serde(with = "humantime_serde")]
    pub(crate) idle: Duration,
    /// Idle timeout of a request body; after its first 4 KiB, at least 16 KiB must arrive in each such interval.
    #[serde(with = "humantime_serde")]
    pub(crate) body_idle: Duration,
    /// Byte budget: bytes of requests in memory, of all callers together; what does not fit waits, then 503.
    pub(crate) body_bytes_total: usize,
    /// The part of it that one key, or one address without a key, may use.
    pub(crate) body_bytes_each: usize,
    /// How long a request waits for room in the budget.
    #[serde(with = "humantime_serde")]
    pub(crate) body_bytes_wait: Duration,
    /// Bytes of a refused request's body that are read before it is answered; without a valid key at most 1 MiB.
    pub(crate) drain_bytes: u64,
    /// Write-stall timeout: a response whose client reads nothing for this long is reset.
    #[serde(with = "humantime_serde")]
    pub(crate) stall: Duration,
    /// Timeout of a request, 0: none; a client may ask for less.
    #[serde(with = "humantime_serde")]
    pub(crate) request: Duration,
    /// Bytes of one message of an Evergreen client, in any dialect; a longer one ends its session.
    pub(crate) max_message_bytes: usize,
    /// Open Evergreen sessions; further ones are refused.
    pub(crate) sessions: usize,
    /// The part of them that one key, or one address without a key, may have.
    pub(crate) sessions_each: usize,
    /// Bytes retained by all Evergreen sessions together; a session that needs more ends.
    pub(crate) server_retained_bytes: u64,
    /// Bytes retained by the Evergreen sessions of one key, or of one address without a key.
    pub(crate) retained_bytes_each: u64,
    /// Resumable sessions, or streams, of each face; 0: none.
    pub(crate) resumable_sessions: usize,
    /// The part of them that one key, or one address without a key, may have.
    pub(crate) resumable_sessions_each: usize,
    /// How long a detached Evergreen session or Triton stream waits for its client.
    #[serde(with = "humantime_serde")]
    pub(crate) resume_grace: Duration,
    /// Timeout of a function that a client has offered.
    #[serde(with = "humantime_serde")]
    pub(crate) reverse_timeout: Duration,
    /// Queued requests of one model; further ones are refused.
    pub(crate) queue_requests: usize,
    /// Prompt tokens of the queued requests of one model.
    pub(crate) queue_tokens: usize,
    /// A request that is queued longer fails; 0: none does.
    #[serde(with = "humantime_serde")]
    pub(crate) queue_timeout: Duration,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            connections: 20_000,
            connections_each: 10_000,
            streams_per_connection: 256,
            header_bytes: 65_536,
            headers: 100,
            handshake: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            body_idle: Duration::from_secs(30),
            body_bytes_total: 160 << 20,
            body_bytes_each: 112 << 20,
            body_bytes_wait: Duration::from_secs(5),
            drain_bytes: 128 << 20,
            stall: Duration::from_secs(60),
            request: Duration::from_secs(600),
            max_message_bytes: Evergreen::default().max_message_bytes,
            sessions: 20_000,
            sessions_each: 10_000,
            server_retained_bytes: 4 << 30,
            retained_bytes_each: 2 << 30,
            resumable_sessions: 1_000,
            resumable_sessions_each: 250,
            resume_grace: Duration::from_secs(60),
            reverse_timeout: Duration::from_secs(60),
            queue_requests: 1_024,
            queue_tokens: 4_194_304,
            queue_timeout: Duration::from_secs(60),
        }
    }
}

impl LimitsConfig {
    /// The milliseconds that a request may be queued, rounded up: what is less than one is not 0, which is no limit.
    pub(crate) fn queue_timeout_ms(&self) -> u64 {
        let milliseconds = self.queue_timeout.as_nanos().div_ceil(1_000_000);
        u64::try_from(milliseconds).unwrap_or(u64::MAX)
    }

    /// Checks the bounds of numbers for which memory is reserved in advance, and the times without which nothing would be
    /// served.
    pub(super) fn check(&self) -> Result<(), CliError> {
        for (key, value, least, most) in [
            // Below this minimum, HTTP has too little buffer to start.
            ("header_bytes", self.header_bytes as usize, 8 << 10, 1 << 20),
            ("headers", self.headers, 10, 10_000),
            ("queue_requests", self.queue_requests, 0, 1 << 20),
        ] {
            if !(least..=most).contains(&value) {
                let what = format!("limits.{key}: must be from {least} to {most}");
                return Err(CliError::usage(what));
            }
        }
        for (key, time) in [
            ("handshake", self.handshake),
            ("idle", self.idle),
            ("body_idle", self.body_idle),
            ("stall", self.stall),
            ("reverse_timeout", self.reverse_timeout),
        ] {
            check_time(&format!("limits.{key}"), time)?;
        }
        check_message_bytes("limits.max_message_bytes", self.max_message_bytes)
    }
}

/// Refuses zero for a time after which something is cut: nothing would pass.
pub(super) fn check_time(key: &str, time: Duration) -> Result<(), CliError> {
    if !time.is_zero() {
        return Ok(());
    }
    let what =
        format!("{key}: must be more than 0; for no limit name a long time, such as \"365d\"");
    Err(CliError::usage(what))
}

/// A message must have room for its own frame, and its length must fit into four bytes.
pub(super) fn check_message_bytes(key: &str, value: usize) -> Result<(), CliError> {
    let bounds = MESSAGE_BYTES_LEAST..=MESSAGE_BYTES_MOST;
    if bounds.contains(&value) {
        return Ok(());
    }
    Err(CliError::usage(format!(
        "{key}: must be from {MESSAGE_BYTES_LEAST} to {MESSAGE_BYTES_MOST}"
    )))
}

const MESSAGE_BYTES_LEAST: usize = 1 << 10;
const MESSAGE_BYTES_MOST: usize = 1 << 30;
