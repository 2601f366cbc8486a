//! Registry of detached sessions, for every face that has them (EV-940, EV-941, LM-964, LM-965, D-29).
//!
//! The number of entries is bounded here; what a detached session retains is charged to the session (EV-801).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::auth::identity::CallerIdentity;
use crate::auth::quotas::{CallerQuotas, Permit};

/// An unguessable resume token.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct SecretToken(Arc<str>);

impl SecretToken {
    /// `None` if the system has no randomness to give.
    fn random(kind: TokenFormat) -> Option<Self> {
        let mut bytes = vec![0; kind.bytes];
        fill_unguessably(&mut bytes)?;
        let text = format!("{}{}", kind.prefix, URL_SAFE_NO_PAD.encode(bytes));
        Some(Self(text.into()))
    }

    /// As clients send it.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

/// Fills `bytes` with what nobody can guess. `None` if the system has no randomness to give.
pub(crate) fn fill_unguessably(bytes: &mut [u8]) -> Option<()> {
    // The source that TLS uses: another crate for random numbers is not needed.
    let source = rustls::crypto::ring::default_provider().secure_random;
    source.fill(bytes).ok()
}

/// The format of a face's tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenFormat {
    /// The prefix.
    pub(crate) prefix: &'static str,
    /// Random bytes of each.
    pub(crate) bytes: usize,
}

/// The resumable sessions of a face. `B` is the handle through which a session is resumed; dropping it ends the session's
/// task, if it has one of its own.
pub(crate) struct ResumeRegistry<B> {
    entries: Mutex<RegistryEntries<B>>,
    kind: TokenFormat,
    /// The number of entries, of all callers and of each, so that none takes all.
    quotas: Arc<CallerQuotas>,
}

type RegistryEntries<B> = HashMap<Arc<str>, RegistryEntry<B>>;

struct RegistryEntry<B> {
    permit: Permit,
    back: Option<B>,
}

/// Held by a session; dropping it removes the entry, so that the token is no longer valid.
pub(crate) struct RegistryGuard<B> {
    registry: Weak<ResumeRegistry<B>>,
    token: SecretToken,
}

impl<B> ResumeRegistry<B> {
    pub(crate) fn new(kind: TokenFormat, most: usize, most_each: usize) -> Self {
        Self {
            entries: Mutex::default(),
            kind,
            quotas: CallerQuotas::new(most as u64, most_each as u64),
        }
    }

    /// Issues a token for a session of this caller. `None` if the registry or the caller's share is full; the session then
    /// cannot be resumed.
    pub(crate) fn issue(
        self: &Arc<Self>,
        caller_identity: &CallerIdentity,
    ) -> Option<(SecretToken, RegistryGuard<B>)> {
        // Before the lock, because the system's random source may block.
        let token = SecretToken::random(self.kind)?;
        let permit = self.quotas.take(caller_identity).ok()?;
        let entry = RegistryEntry { permit, back: None };
        self.entries().insert(Arc::clone(&token.0), entry);
        let guard = RegistryGuard {
            // An entry holds its session's task, and that task holds this guard: with a strong reference the registry would
            // keep itself alive.
            registry: Arc::downgrade(self),
            token: token.clone(),
        };
        Some((token, guard))
    }

    /// Removes one entry to make room for this caller: one of its own if its share is full, else any. `when` selects the
    /// entries that may be removed and orders them; it must not call the registry.
    pub(crate) fn spare<T: Ord>(
        &self,
        caller_identity: &CallerIdentity,
        when: impl Fn(&B) -> Option<T>,
    ) {
        let mut entries = self.entries();
        // A caller at its own limit removes one of its own: freeing an entry of another caller would not help it.
        let (_, taken) = self.quotas.taken(caller_identity);
        let mine = taken >= self.quotas.most_each();
        let can_go = entries.iter().filter_map(|(token, position)| {
            let asked = !mine || position.permit.caller() == caller_identity;
            let back = position.back.as_ref().filter(|_| asked)?;
            Some((when(back)?, token))
        });
        let first = can_go.min_by(|(one, _), (other, _)| one.cmp(other));
        let first = first.map(|(_, token)| Arc::clone(token));
        let removed = first.and_then(|token| entries.remove(&token));
        drop(entries);
        // Dropped after the lock: with the entry goes a task, which may hold guards of this registry.
        drop(removed);
    }

    /// Stores the handle of a session; without effect if the session has ended.
    pub(crate) fn keep(&self, token: &SecretToken, back: B) {
        let mut back = Some(back);
        if let Some(position) = self.entries().get_mut(&token.0) {
            std::mem::swap(&mut position.back, &mut back);
        }
        // Dropped after the lock, like every handle.
        drop(back);
    }

    /// The entry of this token, if it belongs to this caller. An unknown token, an ended session and another caller's
    /// session give the same answer.
    pub(crate) fn back<T>(
        &self,
        token: &str,
        caller_identity: &CallerIdentity,
        way: impl FnOnce(&B) -> T,
    ) -> Option<T> {
        let entries = self.entries();
        let position = entries.get(token);
        // The owner is checked here and not by the faces, so that none can forget it.
        let position =
            position.filter(|position| caller_identity.may_use_what(position.permit.caller()));
        // Called under the lock, so that the session cannot be removed before it is taken over. `way` only clones a handle
        // or sends a request to the session; it must not wait.
        position?.back.as_ref().map(way)
    }

    fn entries(&self) -> MutexGuard<'_, RegistryEntries<B>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B> Drop for RegistryGuard<B> {
    fn drop(&mut self) {
        // The entry is moved out under the lock and dropped after it: with it goes the session's task, and what that holds
        // may be guards of the same registry.
        let position = self.registry.upgrade();
        let position = position.and_then(|registry| registry.entries().remove(&self.token.0));
        drop(position);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> CallerIdentity {
        CallerIdentity::Key(name.into())
    }

    fn at(address: &str) -> CallerIdentity {
        CallerIdentity::Anonymous(Some(address.parse().unwrap()))
    }

    /// D-29
    #[test]
    fn ev_940_the_entries_of_each_caller_are_limited_with_and_without_a_key() {
        let kind = TokenFormat {
            prefix: "s_",
            bytes: 16,
        };
        let registry = Arc::new(ResumeRegistry::<()>::new(kind, 7, 2));
        // Each caller gets two entries and not a third, whatever the others have.
        let mut stays = Vec::new();
        for identity in [key("key"), at("10.0.0.1"), at("10.0.0.2")] {
            for turn in 0..3 {
                let issued = registry.issue(&identity);
                assert_eq!(issued.is_some(), turn < 2, "{identity:?}");
                stays.extend(issued);
            }
        }
        // The seventh entry is the last of all.
        stays.extend(registry.issue(&key("other")));
        assert_eq!(stays.len(), 7);
        assert!(registry.issue(&key("third")).is_none());
        // An entry that may be removed makes room: one of the caller's own if its share is full.
        let own = key("key");
        let all: Vec<_> = registry.entries().keys().cloned().collect();
        all.into_iter()
            .for_each(|token| registry.keep(&SecretToken(token), ()));
        registry.spare(&own, |()| None::<u8>);
        assert!(registry.issue(&own).is_none());
        registry.spare(&own, |()| Some(0));
        stays.extend(registry.issue(&own));
        assert_eq!(stays.len(), 8);
        assert!(registry.issue(&own).is_none());
        // A dropped guard frees its entry and leaves nothing behind.
        drop(stays.pop());
        let again = registry.issue(&key("key"));
        assert!(again.is_some());
        drop((again, stays));
        assert!(registry.entries().is_empty());
        assert_eq!(registry.quotas.taken(&own), (0, 0));
    }
}
