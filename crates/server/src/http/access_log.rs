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

/// What the line says; written on drop, so that a client that goes away is logged too.
#[derive(Debug)]
pub(crate) struct AccessRecord {
    pub(crate) id: RequestId,
    /// Whose request it is; of nobody's, if the gate refused.
    pub(crate) caller: Option<CallerIdentity>,
    /// Where it came from; a Unix socket has no address.
    pub(crate) address: Option<SocketAddr>,
    /// The face that answered; none did if the gate refused.
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
    /// The models that were called, each once; there are no more than the kernel knows.
    pub(crate) models: Vec<Name>,
    /// From the beginning of a call to its first output, for the first call that had one.
    pub(crate) first_output: Option<Duration>,
    /// What the calls cost, as far as their models said; a call that is cut short says nothing.
    pub(crate) usage: Option<RunUsage>,
}

impl UsageTotals {
    /// A model is called.
    pub(crate) fn called(&mut self, model: &Name) {
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
    /// A request that begins now and was answered by nobody.
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
    /// Who is named in the log.
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
            end = if self.ended { "sent" } else { "dropped" },
            "request"
        );
    }
}

/// A path without what is as good as a key: the name of a stream that can be resumed (TR-1303). Segments are compared as
/// they are read, decoded, and empty ones are passed over: such a path leads nowhere, but the name in it is as good. What is
/// shown otherwise is what was sent.
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
    fn tr_1303_the_name_of_a_stream_stands_in_no_log() {
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
