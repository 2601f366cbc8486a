//! The keys of `[lmtp]`: limits of connections, and the Unix socket.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::lmtp::ConnectionLimits;
use sapwood_server::faces::lmtp;
use serde::{Deserialize, Serialize};

use super::limits::check_time;
use crate::failure::CliError;

/// Limits and behaviour of LMTP connections (section 10 of its page).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LmtpConfig {
    /// A Unix socket for the line transport.
    pub(crate) unix: Option<PathBuf>,
    /// Open connections; further ones are refused.
    pub(crate) max_connections: usize,
    /// The part of them that one key, or one address without a key, may have.
    pub(crate) connections_each: usize,
    /// Live streams of one connection; further ones are refused.
    pub(crate) max_streams: usize,
    /// Size of a received message in bytes.
    pub(crate) max_message_in: usize,
    /// Size of a sent message in bytes; more is split into several.
    pub(crate) max_frame_out: usize,
    /// Unsent bytes of a connection above which its streams are parked.
    pub(crate) outbox_bytes: usize,
    /// A connection whose streams are parked for this long is closed.
    #[serde(with = "humantime_serde")]
    pub(crate) stall_timeout: Duration,
    /// How long a detached session waits for its client, and an ended stream can be replayed.
    #[serde(with = "humantime_serde")]
    pub(crate) resume_grace: Duration,
    /// Unknown members of GENERATE are refused instead of ignored.
    pub(crate) strict_parameters: bool,
    /// Batching of items into messages.
    pub(crate) coalesce: Coalesce,
    /// Handling of a malformed message.
    pub(crate) malformed: MalformedPolicy,
}

/// Batching of items into messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Coalesce {
    /// All items of an engine step in one message.
    #[default]
    Step,
    /// One item per message.
    Off,
}

/// Handling of a malformed message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MalformedPolicy {
    /// It is answered, and the connection stays open.
    #[default]
    Answer,
    /// The connection is closed, as by LMQL's own server.
    Close,
}

impl Default for LmtpConfig {
    fn default() -> Self {
        let limits = ConnectionLimits::default();
        Self {
            unix: None,
            max_connections: 10_000,
            connections_each: 5_000,
            max_streams: limits.max_streams,
            max_message_in: limits.max_message_in,
            max_frame_out: limits.max_frame_out,
            outbox_bytes: limits.outbox_bytes,
            stall_timeout: Duration::from_secs(60),
            resume_grace: Duration::from_secs(30),
            strict_parameters: false,
            coalesce: Coalesce::default(),
            malformed: MalformedPolicy::default(),
        }
    }
}

impl LmtpConfig {
    /// Checks the constraints that the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(super) fn check(&self) -> Result<(), CliError> {
        for (key, value) in [
            ("max_connections", self.max_connections),
            ("connections_each", self.connections_each),
            ("max_streams", self.max_streams),
            ("max_message_in", self.max_message_in),
            ("max_frame_out", self.max_frame_out),
            ("outbox_bytes", self.outbox_bytes),
        ] {
            if value == 0 {
                return Err(CliError::usage(format!("lmtp.{key}: at least 1")));
            }
        }
        if self.max_frame_out > FRAME_OUT_MAX {
            return Err(CliError::usage(format!(
                "lmtp.max_frame_out: at most {FRAME_OUT_MAX}, because clients refuse larger messages"
            )));
        }
        check_time("lmtp.stall_timeout", self.stall_timeout)
    }

    /// The settings of the face.
    pub(crate) fn face(
        &self,
        default_model: Option<String>,
        limits: &super::LimitsConfig,
    ) -> lmtp::Config {
        lmtp::Config {
            connections: self.max_connections,
            connections_each: self.connections_each,
            resumable_sessions: limits.resumable_sessions,
            resumable_sessions_each: limits.resumable_sessions_each,
            limits: Arc::new(ConnectionLimits {
                max_streams: self.max_streams,
                max_message_in: self.max_message_in,
                max_frame_out: self.max_frame_out,
                outbox_bytes: self.outbox_bytes,
                outbox_low_bytes: self.outbox_bytes / 4,
                stall_timeout: self.stall_timeout,
                resume_grace: self.resume_grace,
                ..ConnectionLimits::default()
            }),
            default_model,
            strict_parameters: self.strict_parameters,
            coalesce: self.coalesce == Coalesce::Step,
            close_on_malformed: self.malformed == MalformedPolicy::Close,
        }
    }
}

/// LM-1202: the maximum of `aiohttp`.
const FRAME_OUT_MAX: usize = 4_194_303;
