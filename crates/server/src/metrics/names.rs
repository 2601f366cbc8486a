//! The names of our metrics, in one place: each is documented in `docs/operating.md`, which tidy checks.
//!
//! Owns: names. Refuses to know: who counts.

pub(crate) const CONNECTIONS_OPEN: &str = "sapwood_connections_open";
pub(crate) const DRAINING: &str = "sapwood_draining";
pub(crate) const BUILD_INFO: &str = "sapwood_build_info";
pub(crate) const AUTH_FAILURES: &str = "sapwood_auth_failures_total";
pub(crate) const REJECTED: &str = "sapwood_rejected_total";
pub(crate) const CANCELLED: &str = "sapwood_cancelled_total";
pub(crate) const PANICS: &str = "sapwood_panics_total";
pub(crate) const STREAMS_OPEN: &str = "sapwood_streams_open";
pub(crate) const REQUESTS: &str = "sapwood_requests_total";
pub(crate) const REQUEST_SECONDS: &str = "sapwood_request_seconds";
pub(crate) const TIME_TO_FIRST_TOKEN: &str = "sapwood_time_to_first_token_seconds";
pub(crate) const INTER_TOKEN: &str = "sapwood_inter_token_seconds";

pub(crate) const EVERGREEN_SESSIONS_OPEN: &str = "sapwood_evergreen_sessions_open";
pub(crate) const EVERGREEN_ACTIONS_OPEN: &str = "sapwood_evergreen_actions_open";
pub(crate) const EVERGREEN_FRAGMENTS: &str = "sapwood_evergreen_fragments_total";
pub(crate) const EVERGREEN_BYTES: &str = "sapwood_evergreen_bytes_total";
pub(crate) const EVERGREEN_ABORTS: &str = "sapwood_evergreen_aborts_total";
pub(crate) const EVERGREEN_FAILURES: &str = "sapwood_evergreen_failures_total";
pub(crate) const EVERGREEN_RETAINED_BYTES: &str = "sapwood_evergreen_retained_bytes";
pub(crate) const EVERGREEN_IGNORED: &str = "sapwood_evergreen_ignored_total";
