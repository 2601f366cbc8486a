//! Requests that wait for their model to load (LM-322).

use bytestring::ByteString;

use super::LmtpSession;
use super::extended::number;
use crate::lmtp::json;
use crate::lmtp::port::StreamUpdate;
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::{
    Feature, Features, LmtpError, LmtpReason, ModelLookup, StreamFinish, StreamId, write,
};
use crate::time::Time;

/// A request as it was received.
#[derive(Debug)]
struct DeferredRequest {
    id: StreamId,
    word: String,
    payload: ByteString,
    /// The features negotiated when it was received (LM-903).
    features: Features,
    received: Time,
    gives_up: Time,
    deadline: Option<Time>,
    /// Deadline for the first token.
    first_due: Option<Time>,
    /// Whether its client was sent a status that it waits.
    notified: bool,
}

/// The waiting requests, in the order in which they were received.
#[derive(Debug, Default)]
pub(super) struct Loading {
    requests: Vec<DeferredRequest>,
    bytes: usize,
}

impl Loading {
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn has(&self, id: &StreamId) -> bool {
        self.requests.iter().any(|request| request.id == *id)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &StreamId> {
        self.requests.iter().map(|request| &request.id)
    }

    fn push(&mut self, request: DeferredRequest) {
        self.bytes += request.payload.len();
        self.requests.push(request);
    }

    fn remove(&mut self, index: usize) -> DeferredRequest {
        let request = self.requests.remove(index);
        self.bytes -= request.payload.len();
        request
    }
}

/// How a request ends that has waited without success.
enum LoadWaitEnd {
    Finish(StreamFinish),
    Error(LmtpError),
}

impl LmtpSession {
    /// Number of streams that wait for their model.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.loading.len()
    }

    /// Makes a request wait for its model, if there is room; returns whether it does.
    pub(super) fn wait_for_model(
        &mut self,
        word: &str,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        now: Time,
    ) -> bool {
        let limits = &self.config.limits;
        let payload = members.source();
        let room = self.streams.len() + self.loading.len() < limits.max_streams
            && self.loading.bytes + payload.len() <= limits.max_message_in;
        let (Ok((deadline, first_due)), true) = (Self::deadlines(members, now), room) else {
            return false;
        };
        if limits.load_wait.is_zero() || self.draining {
            return false;
        }
        self.loading.push(DeferredRequest {
            id: id.clone(),
            word: word.to_owned(),
            payload: payload.into(),
            features: self.features,
            received: now,
            gives_up: now + limits.load_wait,
            deadline,
            first_due,
            notified: false,
        });
        true
    }

    /// A model was loaded, or failed to load: the requests that wait for it start, or fail with the reason.
    pub fn models_changed(&mut self, models: &dyn ModelLookup, now: Time) {
        let agreed = self.features;
        for request in std::mem::take(&mut self.loading).requests {
            self.features = request.features;
            // It was parsed successfully when it was received.
            let value = json::value(&request.payload).ok();
            let members = value.and_then(|(value, _)| PayloadMembers::of(value, request.features));
            let Some(members) = members else {
                continue;
            };
            let loads = |error: LmtpError| error.reason == LmtpReason::ModelLoading;
            if self.model(&members, models).is_err_and(loads) {
                self.loading.push(request);
                continue;
            }
            let id = request.id.clone();
            self.open(&request.word, id, &members, models, request.received);
            let first = self.ids.get(&request.id);
            if let Some(extended) = first.and_then(|first| self.extended.get_mut(first)) {
                extended.waited = request.notified;
            }
        }
        self.features = agreed;
        self.park(now);
        self.settle();
    }

    /// When the first of them times out, or is due for a status.
    pub(super) fn loading_due(&self) -> Option<Time> {
        let due = self.loading.requests.iter().flat_map(|request| {
            let reported = self.notify_at(request);
            let ends = [Some(request.gives_up), request.deadline, request.first_due];
            ends.into_iter().chain([reported]).flatten()
        });
        due.min()
    }

    /// When its client is sent a status, if it was not sent one yet (LM-922).
    fn notify_at(&self, request: &DeferredRequest) -> Option<Time> {
        let wanted = request.features.has(Feature::Status) && !request.notified;
        wanted.then(|| request.received + self.config.limits.status_after)
    }

    /// Ends requests that have waited too long, and sends a status for others that are due.
    pub(super) fn expire_loading(&mut self, now: Time) {
        let mut index = 0;
        while let Some(request) = self.loading.requests.get(index) {
            let over = |due: Option<Time>| due.is_some_and(|due| due <= now);
            let end = if over(request.deadline) {
                Some(LoadWaitEnd::Finish(StreamFinish::Deadline))
            } else if over(request.first_due) {
                let message = "no token came within 'ttft_ms'; the model is still loading";
                Some(LoadWaitEnd::Error(LmtpError::new(
                    LmtpReason::Timeout,
                    message,
                )))
            } else if request.gives_up <= now {
                Some(LoadWaitEnd::Error(LmtpError {
                    retry_after: Some(self.config.limits.retry_after),
                    ..LmtpError::model(LmtpReason::ModelLoading)
                }))
            } else {
                None
            };
            if let Some(end) = end {
                let request = self.loading.remove(index);
                self.end_waiting(&request, &end);
                continue;
            }
            if over(self.notify_at(request)) {
                let id = request.id.clone();
                if let Some(request) = self.loading.requests.get_mut(index) {
                    request.notified = true;
                }
                if self.outbound.bytes <= self.config.limits.outbox_low_bytes {
                    self.send_status(
                        Some(&id),
                        &StreamUpdate::Loading {
                            progress: None,
                            eta: None,
                        },
                    );
                }
            }
            index += 1;
        }
    }

    /// Cancels a waiting request; returns whether there was one.
    pub(super) fn cancel_waiting(&mut self, id: &StreamId) -> bool {
        let mut requests = self.loading.requests.iter();
        let Some(index) = requests.position(|request| request.id == *id) else {
            return false;
        };
        let request = self.loading.remove(index);
        self.end_waiting(&request, &LoadWaitEnd::Finish(StreamFinish::Cancelled));
        true
    }

    /// Fails all waiting requests (LM-505).
    pub(super) fn fail_waiting(&mut self, error: &LmtpError) {
        for request in std::mem::take(&mut self.loading).requests {
            self.end_waiting(&request, &LoadWaitEnd::Error(error.clone()));
        }
    }

    fn end_waiting(&mut self, request: &DeferredRequest, end: &LoadWaitEnd) {
        let agreed = std::mem::replace(&mut self.features, request.features);
        match end {
            LoadWaitEnd::Error(error) => {
                self.stats.refused += 1;
                self.refuse(&request.id, error);
            }
            LoadWaitEnd::Finish(finish) => {
                let seq = self.features.has(Feature::Resume).then_some(0);
                self.outbound.item(self.config.limits.max_frame_out, |out| {
                    write::end(out, &request.id, finish, |out| number(out, seq));
                });
                if !self.config.coalesce {
                    self.outbound.end_items();
                }
            }
        }
        self.features = agreed;
    }
}
