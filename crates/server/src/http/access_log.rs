//! The access log: one line per request, at its end (OA-804).

use std::net::SocketAddr;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use sapwood_kernel::{Name, RunUsage};
use tokio::time::Instant;

use crate::auth::identity::CallerIdentity;
use crate::http::request_id::RequestId;
use crate::listener::peer::PeerInfo;
use crate::ops::metrics::FaceLabel;

/// The fields of one line; written on drop, so that requests whose client disconnects are logged too.
#[derive(Debug)]
pub(crate) struct AccessRecord {
    pub(crate) id: RequestId,
    /// The caller; `None` if the middleware refused the request.
    pub(crate) caller: Option<CallerIdentity>,
    /// The peer's address; a Unix socket has none.
    pub(crate) address: Option<SocketAddr>,
    /// The face that answered; `None` if the middleware refused.
    pub(crate) face: Option<FaceLabel>,
    pub(crate) method: http::Method,
    pub(crate) path: String,
    pub(crate) status: u16,
    pub(crate) grpc: Option<i32>,
    pub(crate) sums: UsageTotals,
    pub(crate) began: Instant,
    pub(crate) ended: bool,
}

/// What models did for one request: a session may call several, and each often.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct UsageTotals {
    /// The models that were called, each once; bounded by the models that the kernel has.
    pub(crate) models: Vec<Name>,
    /// Time from the begin of a call to its first output, of the first call that had one.
    pub(crate) first_output: Option<Duration>,
    /// The tokens of all calls, as reported by their models; a call that is cut short may report none.
    pub(crate) usage: Option<RunUsage>,
}

impl UsageTotals {
    /// A model is called.
    pub(crate) fn called(&mut self, model: &Name) {
        // A list and not a set: nearly every request has one model, and the line shows them in order of first use.
        if !self.models.contains(model) {
            self.models.push(model.clone());
        }
    }

    /// A call has cost this.
    pub(crate) fn cost(&mut self, usage: RunUsage) {
        let sum = self.usage.get_or_insert_default();
        sum.prompt_tokens += usage.prompt_tokens;
        sum.cached_tokens += usage.cached_tokens;
        sum.completion_tokens += usage.completion_tokens;
    }
}

impl AccessRecord {
    /// A request that begins now and has no response yet.
    pub(crate) fn new(
        id: RequestId,
        caller: Option<CallerIdentity>,
        request: &http::request::Parts,
    ) -> Self {
        Self {
            id,
            caller,
            address: request.extensions.get().map(|PeerInfo(address)| *address),
            face: None,
            method: request.method.clone(),
            // Without the query, which may hold a key (`?key=`, EV-704).
            path: shown(request.uri.path()),
            status: 0,
            grpc: None,
            sums: UsageTotals::default(),
            began: Instant::now(),
            ended: false,
        }
    }
}

impl AccessRecord {
    /// The caller as the log shows it.
    pub(crate) fn key(&self) -> String {
        let caller = self.caller.as_ref();
        caller.map_or_else(|| "-".to_owned(), ToString::to_string)
    }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let sums = &self.sums;
        let models: Vec<_> = sums.models.iter().map(|model| model.as_str()).collect();
        tracing::info!(
            target: "sapwood::access",
            request = self.id.as_str(),
            key = self.key(),
            client = self.address.map(tracing::field::display),
            face = self.face.map_or("-", FaceLabel::name),
            method = %self.method,
            route = self.path,
            model = (!models.is_empty()).then(|| models.join(",")),
            status = self.status,
            grpc = self.grpc,
            prompt_tokens = sums.usage.map(|usage| usage.prompt_tokens),
            cached_tokens = sums.usage.map(|usage| usage.cached_tokens),
            completion_tokens = sums.usage.map(|usage| usage.completion_tokens),
            ttft_ms = sums.first_output.map(milliseconds),
            ms = milliseconds(self.began.elapsed()),
            // The status alone does not show it: a stream that breaks off has status 200 as well.
            end = if self.ended { "sent" } else { "dropped" },
            "request"
        );
    }
}

/// The path as the log shows it: without the name of a resumable stream, which is as good as a key (TR-1303). Segments are
/// compared decoded and without empty ones: such a path has no route, but the name in it is valid. Every other path is shown
/// as it was sent.
fn shown(path: &str) -> String {
    let mut segments = path
        .split('/')
        .filter(|segment| !segment.is_empty())
        .map(|it| percent_decode_str(it).collect::<Vec<_>>());
    let mut is = |name: &str| {
        segments
            .next()
            .is_some_and(|segment| segment == name.as_bytes())
    };
    if is("v2") && is("streams") && segments.next().is_some() {
        return "/v2/streams/*".to_owned();
    }
    path.to_owned()
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// OA-804
    #[test]
    fn tr_1303_the_name_of_a_resumable_stream_is_not_logged() {
        for (path, expect) in [
            ("/v2/streams/secret", "/v2/streams/*"),
            ("/v2/streams/secret/more", "/v2/streams/*"),
            ("/v2/%73treams/secret", "/v2/streams/*"),
            ("/%76%32/%73%74reams/secret", "/v2/streams/*"),
            ("//v2/streams/secret", "/v2/streams/*"),
            ("/v2//streams//secret", "/v2/streams/*"),
            ("/v2/streams", "/v2/streams"),
            ("/v2/models/streams/generate", "/v2/models/streams/generate"),
        ] {
            assert_eq!(shown(path), expect);
        }
    }
}
