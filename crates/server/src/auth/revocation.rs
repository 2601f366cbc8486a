//! Ends what a caller has open when its key is revoked (D-45, LM-108).
//!
//! ```text
//!   keys replaced ─► would this caller still be let in? ─ no ─► faces: last words, reason `revoked`, each in its own spelling
//!                                                          └──► a moment later the gate cuts whatever has not ended by itself
//! ```

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, pending};
use tokio::time::timeout;

use crate::auth::Authenticator;
use crate::auth::caller::Caller;
use crate::auth::scopes::RouteAccess;

/// Knows when what was let in once would be let in no more.
#[derive(Clone, Debug)]
pub(crate) struct Revocation(Arc<RevocationInner>);

#[derive(Debug)]
struct RevocationInner {
    auth: Arc<Authenticator>,
    caller: Caller,
    access: RouteAccess,
}

impl Revocation {
    /// Of what `caller` has been let in to.
    pub(crate) fn new(auth: Arc<Authenticator>, caller: Caller, access: RouteAccess) -> Self {
        Self(Arc::new(RevocationInner {
            auth,
            caller,
            access,
        }))
    }

    /// Resolves when the caller's key is revoked; never where none was asked for.
    pub(crate) fn reached(&self) -> BoxFuture<'static, ()> {
        let inner = Arc::clone(&self.0);
        let RouteAccess::Needs(scope) = inner.access else {
            return pending().boxed();
        };
        async move { inner.auth.revoked(&inner.caller, scope).await }.boxed()
    }

    /// The same, when last words have had their time as well.
    pub(crate) fn over(&self) -> BoxFuture<'static, ()> {
        let reached = self.reached();
        async move {
            reached.await;
            tokio::time::sleep(LAST_WORDS).await;
        }
        .boxed()
    }

    /// Does `work` as long as the key is good, and a moment longer. `None`: it was cut.
    pub(crate) async fn within<F: Future>(&self, work: F) -> Option<F::Output> {
        tokio::pin!(work);
        // Both may be cancelled: what is cut is not asked for again.
        tokio::select! {
            biased;
            done = work.as_mut() => return Some(done),
            () = self.reached() => {}
        }
        timeout(LAST_WORDS, work).await.ok()
    }
}

/// How long a face has to say that a key was revoked. As for what a drain cuts.
const LAST_WORDS: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::ApiKey;
    use crate::auth::scopes::{KeyScope, Scopes};

    fn asked(auth: &Arc<Authenticator>, access: RouteAccess) -> Revocation {
        let request = http::Request::get("/").header("x-api-key", "one");
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let caller = auth.check(access, &parts).unwrap();
        Revocation::new(Arc::clone(auth), caller, access)
    }

    fn auth() -> Arc<Authenticator> {
        Arc::new(Authenticator::new(vec![ApiKey::new(
            "anna",
            "one",
            Scopes::ALL,
        )]))
    }

    #[tokio::test(start_paused = true)]
    async fn d_45_what_a_revoked_key_has_open_has_a_moment_for_last_words() {
        for (takes, cut) in [
            (LAST_WORDS - Duration::from_millis(1), false),
            (LAST_WORDS + Duration::from_millis(1), true),
        ] {
            let auth = auth();
            let revocation = asked(&auth, RouteAccess::Needs(KeyScope::Infer));
            let words = async {
                revocation.reached().await;
                tokio::time::sleep(takes).await;
            };
            let revoke = async {
                let other = vec![ApiKey::new("ben", "two", Scopes::ALL)];
                auth.replace(other);
            };
            let (done, ()) = tokio::join!(revocation.within(words), revoke);
            assert_eq!(done.is_none(), cut, "{takes:?}");
        }
    }

    #[tokio::test]
    async fn d_45_what_needs_no_key_is_not_revoked_with_one() {
        let auth = auth();
        let revocation = asked(&auth, RouteAccess::Open);
        auth.replace(vec![ApiKey::new("ben", "two", Scopes::ALL)]);
        assert!(futures::poll!(revocation.reached()).is_pending());
    }
}
