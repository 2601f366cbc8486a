//! Counts what one session does in the server's metrics (EV-904).
//!
//! When it is dropped it removes the session from the gauges, however the session ended.

use std::sync::Arc;

use sapwood_kernel::session::Observe;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::{Reason, Status};
use sapwood_proto::session::SessionStats;

use crate::auth::quotas::{NoSlot, Permit};
use crate::ops::drain::{Drain, DrainPhase};
use crate::ops::metrics::{FaceLabel, ServerMetrics};
use crate::ops::open_streams::OpenStreamGuard;

/// The numbers of one session.
pub(super) struct SessionRecorder {
    metrics: Arc<ServerMetrics>,
    counted: SessionStats,
    retained: i64,
    /// The session's part of the bytes that all sessions share.
    permit: Permit,
    /// The label of `cancelled_total` for actions that still run when this is dropped; `None` if the session failed.
    early: Option<&'static str>,
    drain: Drain,
    /// One for each action that runs: a drain waits for them, not for sessions that are merely open (OA-904).
    actions: Vec<OpenStreamGuard>,
}

impl SessionRecorder {
    /// Counts a session that opens; the bytes that it retains are charged to `permit` (EV-801).
    pub(super) fn begin(metrics: Arc<ServerMetrics>, drain: Drain, permit: Permit) -> Self {
        metrics.evergreen.sessions_open.inc();
        Self {
            metrics,
            counted: SessionStats::default(),
            retained: 0,
            permit,
            // `over` is not called where the session's task is dropped, which is what a client does that disconnects.
            early: Some("client"),
            drain,
            actions: Vec::new(),
        }
    }

    /// An action has failed, or was ended early.
    fn failed(&self, status: &Status) {
        let numbers = &self.metrics;
        let failures = &numbers.evergreen.failures;
        failures.with_label_values(&[label(status)]).inc();
        if let Some(reason) = early(status) {
            numbers.cancelled.with_label_values(&[reason]).inc();
        }
        if status.known() == Some(Reason::UnknownTarget) {
            // A call of a model that exists is counted by the metrics layer, which never sees this one. The name that
            // the client sent must not become a label (OA-802).
            let labels = [FaceLabel::Evergreen.name(), "unknown", status.code.name()];
            numbers.requests.with_label_values(&labels).inc();
        }
    }

    /// Sets the session's part of the gauge that all sessions share.
    fn retain(&mut self, bytes: i64) {
        self.metrics
            .evergreen
            .retained_bytes
            .add(bytes - self.retained);
        self.retained = bytes;
    }
}

impl Observe for SessionRecorder {
    fn action_began(&mut self) {
        let open = OpenStreamGuard::begin(&self.metrics, &self.drain, FaceLabel::Evergreen);
        self.actions.push(open);
        self.metrics.evergreen.actions_open.inc();
    }

    fn action_ended(&mut self, failure: Option<&Status>) {
        self.actions.pop();
        if let Some(status) = failure {
            self.failed(status);
        }
        self.metrics.evergreen.actions_open.dec();
    }

    fn action_refused(&mut self, rejection: &Status) {
        let numbers = &self.metrics;
        let failures = &numbers.evergreen.failures;
        failures.with_label_values(&[label(rejection)]).inc();
        if rejection.known() == Some(Reason::GoingAway) {
            numbers.rejected.with_label_values(&["drain"]).inc();
        }
    }

    fn retains(&mut self, bytes: u64) -> Result<(), Status> {
        // The gauge includes what the quota refuses: these bytes are in memory until the session is aborted.
        self.retain(i64::try_from(bytes).unwrap_or(i64::MAX));
        let permit = self.permit.amount();
        let Err(full) = self.permit.set(bytes) else {
            return Ok(());
        };
        // A refused `set` changes nothing: the totals lack `more`, which is added to show what was asked for.
        let shares = self.permit.shares();
        let (all, own) = shares.taken(self.permit.caller());
        let more = bytes.saturating_sub(permit);
        let (limit, value, max, remedy) = match full {
            NoSlot::All => (
                "server_retained_bytes",
                all,
                shares.most(),
                "try again later",
            ),
            NoSlot::Each => (
                "retained_bytes_each",
                own,
                shares.most_each(),
                "end inputs and sessions, or drop nodes that are no longer needed",
            ),
        };
        let value = value.saturating_add(more);
        let mut status = Status::limit(Reason::RetainedLimit, limit, value, max);
        status.message = format!("{}: {remedy}", status.message);
        Err(status)
    }

    fn counted(&mut self, now: &SessionStats) {
        // The session counts from its start, and the metrics are sums over all sessions: only the difference is added.
        let numbers = &self.metrics.evergreen;
        let before = &self.counted;
        for (family, label, more) in [
            (
                &numbers.fragments,
                "in",
                now.fragments_in - before.fragments_in,
            ),
            (
                &numbers.fragments,
                "out",
                now.fragments_out - before.fragments_out,
            ),
            (&numbers.bytes, "in", now.bytes_in - before.bytes_in),
            (&numbers.bytes, "out", now.bytes_out - before.bytes_out),
            (
                &numbers.ignored,
                "duplicate",
                now.duplicates - before.duplicates,
            ),
            (
                &numbers.ignored,
                "dropped",
                now.discarded - before.discarded,
            ),
        ] {
            family.with_label_values(&[label]).inc_by(more);
        }
        self.counted = *now;
    }

    fn over(&mut self, status: Option<&Status>) {
        self.early = match status {
            // First: with whatever a session ends while a drain cuts, the drain is the cause.
            _ if self.drain.phase() == DrainPhase::Cutting => Some("drain"),
            Some(status) => early(status),
            None => Some("client"),
        };
        if let Some(status) = status {
            self.metrics
                .evergreen
                .aborts
                .with_label_values(&[label(status)])
                .inc();
            tracing::info!(code = %status.code, reason = label(status), "session aborted");
        }
    }
}

impl Drop for SessionRecorder {
    fn drop(&mut self) {
        self.retain(0);
        let numbers = &self.metrics.evergreen;
        numbers.sessions_open.dec();
        // `action_ended` is not called for actions that are dropped with the session's task.
        let actions = self.actions.len();
        numbers
            .actions_open
            .sub(i64::try_from(actions).unwrap_or(0));
        // Actions of a session that failed are failures, and were counted as aborts (OA-801).
        if let Some(reason) = self.early {
            let cancelled = self.metrics.cancelled.with_label_values(&[reason]);
            cancelled.inc_by(actions as u64);
        }
    }
}

/// The label of `cancelled_total`, if this status is an early end rather than a failure.
fn early(status: &Status) -> Option<&'static str> {
    match status.known() {
        Some(Reason::SlowReader) => Some("stall"),
        Some(Reason::GoingAway) => Some("drain"),
        Some(Reason::Revoked) => Some("revoked"),
        // By its reason, because its code is `unavailable`, which is a failure otherwise.
        _ if *status.reason == *ErrorReason::QUEUE_TIMEOUT.name() => Some("timeout"),
        _ => match status.code {
            Code::DeadlineExceeded => Some("timeout"),
            Code::Cancelled => Some("client"),
            _ => None,
        },
    }
}

/// The reason as a label. A function or a peer may send any reason, and labels must come from a closed set.
fn label(status: &Status) -> &'static str {
    status.known().map_or("OTHER", Reason::name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::identity::CallerIdentity;
    use crate::auth::quotas::CallerQuotas;

    /// A permit without a limit.
    fn unlimited() -> Permit {
        Permit::empty(
            &CallerQuotas::new(u64::MAX, u64::MAX),
            &CallerIdentity::Anonymous(None),
        )
    }

    fn count(metrics: &ServerMetrics, reason: &str) -> u64 {
        metrics.cancelled.with_label_values(&[reason]).get()
    }

    #[test]
    fn oa_801_running_actions_of_a_session_that_ends_are_counted_once_by_cause() {
        let status = |reason| Status::new(reason, "");
        // How the session ends, and the label under which its two running actions are counted.
        for (over, reason) in [
            (None, Some("client")),
            (Some(None), Some("client")),
            (Some(Some(status(Reason::SlowReader))), Some("stall")),
            (Some(Some(status(Reason::IdleTimeout))), Some("timeout")),
            (Some(Some(status(Reason::GoingAway))), Some("drain")),
            (Some(Some(status(Reason::Function))), None),
        ] {
            let metrics = Arc::new(ServerMetrics::new().unwrap());
            let mut recorder =
                SessionRecorder::begin(Arc::clone(&metrics), Drain::default(), unlimited());
            recorder.action_began();
            recorder.action_began();
            if let Some(status) = &over {
                recorder.over(status.as_ref());
            }
            drop(recorder);
            for known in ["client", "stall", "timeout", "drain", "delete"] {
                let expect = if Some(known) == reason { 2 } else { 0 };
                assert_eq!(count(&metrics, known), expect, "{over:?}: {known}");
            }
            assert_eq!(metrics.evergreen.actions_open.get(), 0);
        }
    }

    #[test]
    fn ev_904_refused_actions_count_as_failures_and_those_of_a_drain_as_rejected_too() {
        let metrics = Arc::new(ServerMetrics::new().unwrap());
        let mut recorder =
            SessionRecorder::begin(Arc::clone(&metrics), Drain::default(), unlimited());
        for reason in [Reason::ActionLimit, Reason::ActionLimit, Reason::GoingAway] {
            recorder.action_refused(&Status::new(reason, ""));
        }
        recorder.over(None);
        drop(recorder);
        let failures = &metrics.evergreen.failures;
        assert_eq!(failures.with_label_values(&["ACTION_LIMIT"]).get(), 2);
        assert_eq!(failures.with_label_values(&["GOING_AWAY"]).get(), 1);
        assert_eq!(metrics.rejected.with_label_values(&["drain"]).get(), 1);
        for reason in ["client", "drain"] {
            assert_eq!(
                count(&metrics, reason),
                0,
                "a refused action did not end early"
            );
        }
    }

    /// OA-802: an unknown model is `unknown`.
    #[test]
    fn oa_802_failed_actions_are_counted_by_reasons_of_a_closed_set() {
        let metrics = Arc::new(ServerMetrics::new().unwrap());
        let mut recorder =
            SessionRecorder::begin(Arc::clone(&metrics), Drain::default(), unlimited());
        let queue = Status::other(Code::Unavailable, "queue_timeout", "");
        let odd = Status::other(Code::Internal, "made up by a client", "");
        for status in [
            Status::new(Reason::UnknownTarget, "there is no model \"x\""),
            Status::new(Reason::Deadline, ""),
            Status::new(Reason::Cancelled, ""),
            queue,
            odd,
        ] {
            recorder.action_began();
            recorder.action_ended(Some(&status));
        }
        recorder.over(None);
        drop(recorder);
        assert_eq!(
            (count(&metrics, "timeout"), count(&metrics, "client")),
            (2, 1)
        );
        let unknown = ["evergreen", "unknown", "not-found"];
        assert_eq!(metrics.requests.with_label_values(&unknown).get(), 1);
        let failures = &metrics.evergreen.failures;
        assert_eq!(failures.with_label_values(&["UNKNOWN_TARGET"]).get(), 1);
        assert_eq!(failures.with_label_values(&["OTHER"]).get(), 2);
    }
}
