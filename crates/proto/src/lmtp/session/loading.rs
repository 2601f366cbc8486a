//! Requests that wait for their model to load (LM-322).

use bytestring::ByteString;

use super::cancel::deadlines;
use super::outbox::Outbox;
use super::request_reader::StreamRequest;
use crate::lmtp::port::StreamUpdate;
use crate::lmtp::{
    ConnectionLimits, Feature, Features, LmtpError, LmtpReason, StreamFinish, StreamId,
};
use crate::time::Time;

/// A request as it was received.
#[derive(Debug)]
pub(super) struct DeferredRequest {
    pub(super) id: StreamId,
    pub(super) word: String,
    pub(super) payload: ByteString,
    /// The features negotiated when it was received (LM-903).
    pub(super) features: Features,
    pub(super) received: Time,
    gives_up: Time,
    deadline: Option<Time>,
    /// Deadline for the first token.
    first_due: Option<Time>,
    /// Whether its client was sent `loading` (LM-922).
    pub(super) notified: bool,
}

/// The waiting requests, in the order in which they were received.
///
/// Invariant: `bytes` is the sum of their payloads, at most `max_message_in`; with the live streams they are at most
/// `max_streams`, which is checked where one is added.
#[derive(Debug, Default)]
pub(super) struct Loading {
    requests: Vec<DeferredRequest>,
    bytes: usize,
    /// Number of requests that have ended with an error while they waited.
    pub(super) refused: u64,
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

    /// Makes a request wait for its model, if there is room beside `live` streams; returns whether it does.
    pub(super) fn defer(
        &mut self,
        request: &StreamRequest<'_, '_>,
        limits: &ConnectionLimits,
        live: usize,
    ) -> bool {
        let received = request.received;
        let payload = request.members.source();
        // Bytes are bounded beside the number, because the whole payload is retained and parsed again later.
        let room = live + self.requests.len() < limits.max_streams
            && self.bytes + payload.len() <= limits.max_message_in;
        let (Ok((deadline, first_due)), true) = (deadlines(request.members, received), room) else {
            return false;
        };
        // A wait of 0 turns deferring off: the client gets `model_loading` at once.
        if limits.load_wait.is_zero() {
            return false;
        }
        self.push(DeferredRequest {
            id: request.id.clone(),
            word: request.word.to_owned(),
            payload: payload.into(),
            features: request.features,
            received,
            gives_up: received + limits.load_wait,
            deadline,
            first_due,
            notified: false,
        });
        true
    }

    /// Takes all requests, to try each again; those whose model still loads are to be pushed again, in this order.
    pub(super) fn take(&mut self) -> Vec<DeferredRequest> {
        self.bytes = 0;
        std::mem::take(&mut self.requests)
    }

    /// When the first of them times out, or is due for a status.
    pub(super) fn due(&self, limits: &ConnectionLimits) -> Option<Time> {
        let due = self.requests.iter().flat_map(|request| {
            let ends = [
                Some(request.gives_up),
                request.deadline,
                request.first_due,
                request.notify_at(limits),
            ];
            ends.into_iter().flatten()
        });
        due.min()
    }

    /// Ends requests that have waited too long, and sends a status for others that are due.
    pub(super) fn expire(&mut self, out: &mut Outbox, now: Time) {
        let mut index = 0;
        while let Some(request) = self.requests.get_mut(index) {
            if let Some(end) = request.end_due(&out.limits, now) {
                let request = self.remove(index);
                self.end(&request, &end, out);
                // The next request has moved to this index.
                continue;
            }
            if request.notify_at(&out.limits).is_some_and(|due| due <= now) {
                // Set also if there is no room for the status, which is dropped then (LM-923).
                request.notified = true;
                if out.has_room() {
                    let loading = StreamUpdate::Loading {
                        progress: None,
                        eta: None,
                    };
                    out.status(Some(&request.id), &loading);
                }
            }
            index += 1;
        }
    }

    /// Cancels a waiting request; returns whether there was one.
    pub(super) fn cancel(&mut self, id: &StreamId, out: &mut Outbox) -> bool {
        let mut requests = self.requests.iter();
        let Some(index) = requests.position(|request| request.id == *id) else {
            return false;
        };
        let request = self.remove(index);
        self.end(&request, &Ok(StreamFinish::Cancelled), out);
        true
    }

    /// Fails all waiting requests (LM-505).
    pub(super) fn fail_all(&mut self, error: &LmtpError, out: &mut Outbox) {
        for request in self.take() {
            self.end(&request, &Err(error.clone()), out);
        }
    }

    fn end(&mut self, request: &DeferredRequest, end: &LoadWaitEnd, out: &mut Outbox) {
        // The features when it was received count, not those of a later negotiation (LM-903).
        let numbered = request.features.has(Feature::Resume);
        match end {
            Err(error) => {
                self.refused += 1;
                out.refuse(&request.id, error, numbered);
            }
            Ok(finish) => out.finish(&request.id, finish, numbered),
        }
    }

    pub(super) fn push(&mut self, request: DeferredRequest) {
        self.bytes += request.payload.len();
        self.requests.push(request);
    }

    fn remove(&mut self, index: usize) -> DeferredRequest {
        let request = self.requests.remove(index);
        self.bytes -= request.payload.len();
        request
    }
}

impl DeferredRequest {
    /// When its client is sent a status, if it was not sent one yet (LM-922).
    fn notify_at(&self, limits: &ConnectionLimits) -> Option<Time> {
        let wanted = self.features.has(Feature::Status) && !self.notified;
        wanted.then(|| self.received + limits.status_after)
    }

    /// How it ends, if it ends now.
    fn end_due(&self, limits: &ConnectionLimits, now: Time) -> Option<LoadWaitEnd> {
        let over = |due: Option<Time>| due.is_some_and(|due| due <= now);
        // The client's own deadlines first: if several have passed, it expects these.
        if over(self.deadline) {
            return Some(Ok(StreamFinish::Deadline));
        }
        if over(self.first_due) {
            let message = "no token came within 'ttft_ms'; the model is still loading";
            let error = LmtpError::new(LmtpReason::Timeout, message);
            return Some(Err(error));
        }
        (self.gives_up <= now).then(|| {
            Err(LmtpError {
                retry_after: Some(limits.retry_after),
                ..LmtpError::model(LmtpReason::ModelLoading)
            })
        })
    }
}

/// How a request ends that has waited without success.
type LoadWaitEnd = Result<StreamFinish, LmtpError>;
