//! Running requests by id, so that their sender can cancel them (TR-1311).
//!
//! Ids need not be unique: a cancellation ends all requests of the caller with that id.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{StreamExt, stream};
use sapwood_proto::code::Code;
use tokio_util::sync::CancellationToken;

use super::call::CallResponses;
use super::request_end::EarlyEnd;
use super::request_error::RequestError;
use crate::auth::identity::CallerIdentity;

/// The running requests, by caller and id.
#[derive(Debug, Default)]
pub(super) struct RunningRequests(Mutex<HashMap<RequestName, Vec<RunningEntry>>>);

type RequestName = (CallerIdentity, Box<str>);

#[derive(Debug)]
struct RunningEntry {
    number: u64,
    token: CancellationToken,
}

/// Keeps a request on the list until it is dropped.
#[derive(Debug)]
struct RunningGuard {
    running: Arc<RunningRequests>,
    name: RequestName,
    number: u64,
    token: CancellationToken,
}

/// The name of a request in the list; `None` if it cannot be cancelled. Nothing but the id identifies a caller without
/// a key: one that cannot be guessed is as good as a token, and with a shorter one nothing can be cancelled (D-45).
fn name(caller: &CallerIdentity, id: &str) -> Option<RequestName> {
    let owner = match caller {
        CallerIdentity::Anonymous(_) if id.len() < TOKEN_BYTES => return None,
        // Without the address, which may change between the request and its cancellation.
        CallerIdentity::Anonymous(_) => CallerIdentity::Anonymous(None),
        known => known.clone(),
    };
    Some((owner, id.into()))
}

/// The shortest id, in bytes, that is taken for a secret: 128 random bits in hexadecimal digits.
const TOKEN_BYTES: usize = 32;

impl RunningRequests {
    /// The responses of a request that can be cancelled by its id, if it has one.
    pub(super) fn list(
        self: &Arc<Self>,
        caller: &CallerIdentity,
        id: Option<&str>,
        responses: CallResponses,
    ) -> CallResponses {
        let Some(name) = id.and_then(|id| name(caller, id)) else {
            return responses;
        };
        let listed = self.enter(name);
        let reported = stream::unfold(Some((responses, listed)), |state| async move {
            let (mut responses, listed) = state?;
            // Both arms may be cancelled: a response that was not taken is still there. A cancellation goes first.
            tokio::select! {
                biased;
                () = listed.token.cancelled() => Some((Err(cancelled()), None)),
                next = responses.next() => Some((next?, Some((responses, listed)))),
            }
        });
        reported.boxed()
    }

    /// Cancels the requests of `caller` with this id. Returns whether there were any.
    pub(super) fn cancel(&self, caller: &CallerIdentity, id: &str) -> bool {
        let all = self.all();
        let entries = name(caller, id).and_then(|name| all.get(&name));
        let entries = entries.map_or(&[][..], Vec::as_slice);
        // Only signals: the streams end in their own tasks, and their guards take this lock when they drop.
        entries.iter().for_each(|entry| entry.token.cancel());
        !entries.is_empty()
    }

    fn enter(self: &Arc<Self>, name: RequestName) -> RunningGuard {
        let token = CancellationToken::new();
        let mut all = self.all();
        let entries = all.entry(name.clone()).or_default();
        // Unique among those that are listed, because entries stay in order: the guard removes its own, and no other of
        // the same id.
        let number = entries.last().map_or(0, |last| last.number + 1);
        entries.push(RunningEntry {
            number,
            token: token.clone(),
        });
        RunningGuard {
            running: Arc::clone(self),
            name,
            number,
            token,
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<RequestName, Vec<RunningEntry>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        let mut all = self.running.all();
        if let Some(entries) = all.get_mut(&self.name) {
            entries.retain(|entry| entry.number != self.number);
            // Otherwise the map would grow with every id that was ever sent.
            if entries.is_empty() {
                all.remove(&self.name);
            }
        }
    }
}

/// The error of a request that its sender has cancelled.
pub(super) fn cancelled() -> RequestError {
    RequestError::new(Code::Cancelled, "Request was cancelled")
        .late()
        .because(EarlyEnd::Delete)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tr_1311_a_request_is_cancelled_by_its_id_and_only_by_its_caller() {
        let running = Arc::new(RunningRequests::default());
        let list = |caller: &str, id| {
            let pending: CallResponses = stream::pending().boxed();
            running.list(&CallerIdentity::Key(caller.into()), id, pending)
        };
        let mut mine = [list("anna", Some("a")), list("anna", Some("a"))];
        let mut other = list("anna", Some("b"));
        let theirs = list("ben", Some("a"));
        let nameless = list("anna", None);
        assert!(!running.cancel(&CallerIdentity::Key("carl".into()), "a"));
        assert!(running.cancel(&CallerIdentity::Key("anna".into()), "a"));
        for responses in &mut mine {
            let failure = responses.next().await.unwrap().unwrap_err();
            assert_eq!(
                (failure.code, failure.status.as_u16()),
                (Code::Cancelled, 400)
            );
            assert!(responses.next().await.is_none());
        }
        assert!(futures::poll!(other.next()).is_pending());
        // Requests that have ended are not on the list.
        assert!(!running.cancel(&CallerIdentity::Key("anna".into()), "a"));
        drop((mine, other, theirs, nameless));
        assert!(running.all().is_empty());
    }

    #[tokio::test]
    async fn d_45_without_a_key_only_ids_of_32_bytes_or_more_can_be_cancelled() {
        let running = Arc::new(RunningRequests::default());
        let [here, there] = ["10.0.0.1", "10.0.0.2"]
            .map(|address| CallerIdentity::Anonymous(Some(address.parse().unwrap())));
        let key = CallerIdentity::Key("anonymous".into());
        for (length, cancels) in [(TOKEN_BYTES - 1, false), (TOKEN_BYTES, true)] {
            let id = "a".repeat(length);
            let listed = running.list(&here, Some(&id), stream::pending().boxed());
            assert!(!running.cancel(&key, &id));
            assert_eq!(running.cancel(&there, &id), cancels, "{length}");
            drop(listed);
        }
        assert!(running.all().is_empty());
    }
}
