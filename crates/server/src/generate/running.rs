//! Requests with an id, while they run: whoever sent one may cancel it by that id (TR-1311).
//!
//! Owns: [`Running`], which ids run for whom. Refuses to know: what runs. Ids need not be unique; who cancels one cancels
//! all of its own that bear it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{StreamExt, stream};
use sapwood_proto::code::Code;
use tokio_util::sync::CancellationToken;

use super::call::Responses;
use super::ending::Early;
use super::failure::Failure;
use crate::caller::Identity;

/// What runs, by key and id.
#[derive(Debug, Default)]
pub(super) struct Running(Mutex<HashMap<Name, Vec<Entry>>>);

type Name = (Identity, Box<str>);

#[derive(Debug)]
struct Entry {
    number: u64,
    token: CancellationToken,
}

/// A request that is on the list until this goes.
#[derive(Debug)]
struct Listed {
    running: Arc<Running>,
    name: Name,
    number: u64,
    token: CancellationToken,
}

/// Whose requests of an id these are. Whoever has no key is known by nothing but the id itself: one that others cannot guess
/// is as good as a token, and under another one nothing can be cancelled (D-45).
fn name(caller: &Identity, id: &str) -> Option<Name> {
    let owner = match caller {
        Identity::Anonymous(_) if id.len() < TOKEN_BYTES => return None,
        // The same from wherever it comes.
        Identity::Anonymous(_) => Identity::Anonymous(None),
        known => known.clone(),
    };
    Some((owner, id.into()))
}

/// The shortest id that is taken for a secret, as long as a random one of 128 bits in hexadecimal digits.
const TOKEN_BYTES: usize = 32;

impl Running {
    /// The responses of a request that can be cancelled by its id, if it has one.
    pub(super) fn list(
        self: &Arc<Self>,
        caller: &Identity,
        id: Option<&str>,
        responses: Responses,
    ) -> Responses {
        let Some(name) = id.and_then(|id| name(caller, id)) else {
            return responses;
        };
        let listed = self.enter(name);
        let told = stream::unfold(Some((responses, listed)), |state| async move {
            let (mut responses, listed) = state?;
            // Both arms may be cancelled: a response that was not taken is still there. Whoever cancels goes first.
            tokio::select! {
                biased;
                () = listed.token.cancelled() => Some((Err(cancelled()), None)),
                next = responses.next() => Some((next?, Some((responses, listed)))),
            }
        });
        told.boxed()
    }

    /// Cancels what `caller` runs under this id. Says whether there was anything.
    pub(super) fn cancel(&self, caller: &Identity, id: &str) -> bool {
        let all = self.all();
        let entries = name(caller, id).and_then(|name| all.get(&name));
        let entries = entries.map_or(&[][..], Vec::as_slice);
        entries.iter().for_each(|entry| entry.token.cancel());
        !entries.is_empty()
    }

    fn enter(self: &Arc<Self>, name: Name) -> Listed {
        let token = CancellationToken::new();
        let mut all = self.all();
        let entries = all.entry(name.clone()).or_default();
        let number = entries.last().map_or(0, |last| last.number + 1);
        entries.push(Entry {
            number,
            token: token.clone(),
        });
        Listed {
            running: Arc::clone(self),
            name,
            number,
            token,
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Name, Vec<Entry>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut all = self.running.all();
        if let Some(entries) = all.get_mut(&self.name) {
            entries.retain(|entry| entry.number != self.number);
            if entries.is_empty() {
                all.remove(&self.name);
            }
        }
    }
}

/// What a request ends with that its sender has cancelled.
pub(super) fn cancelled() -> Failure {
    Failure::new(Code::Cancelled, "Request was cancelled")
        .late()
        .because(Early::Delete)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tr_1311_who_sent_a_request_may_cancel_it_and_nobody_else() {
        let running = Arc::new(Running::default());
        let list = |caller: &str, id| {
            let pending: Responses = stream::pending().boxed();
            running.list(&Identity::Key(caller.into()), id, pending)
        };
        let mut mine = [list("anna", Some("a")), list("anna", Some("a"))];
        let mut other = list("anna", Some("b"));
        let theirs = list("ben", Some("a"));
        let nameless = list("anna", None);
        assert!(!running.cancel(&Identity::Key("carl".into()), "a"));
        assert!(running.cancel(&Identity::Key("anna".into()), "a"));
        for responses in &mut mine {
            let failure = responses.next().await.unwrap().unwrap_err();
            assert_eq!(
                (failure.code, failure.status.as_u16()),
                (Code::Cancelled, 400)
            );
            assert!(responses.next().await.is_none());
        }
        assert!(futures::poll!(other.next()).is_pending());
        // Who has gone is not on the list.
        assert!(!running.cancel(&Identity::Key("anna".into()), "a"));
        drop((mine, other, theirs, nameless));
        assert!(running.all().is_empty());
    }

    #[tokio::test]
    async fn d_45_without_a_key_only_an_id_that_nobody_guesses_cancels() {
        let running = Arc::new(Running::default());
        let [here, there] = ["10.0.0.1", "10.0.0.2"]
            .map(|address| Identity::Anonymous(Some(address.parse().unwrap())));
        let key = Identity::Key("anonymous".into());
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
