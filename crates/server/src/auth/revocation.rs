//! Ends the open work of a caller when its key is revoked (D-45, LM-108).
//!
//! ```text
//!   keys replaced ─► is this caller still admitted? ─ no ─► each face ends with its own error, reason `revoked`
//!                                                      └──► 1 s later the middleware cuts what has not ended by itself
//! ```

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, pending};
use sapwood_kernel::SteerRights;
use tokio::time::timeout;

use crate::auth::Authenticator;
use crate::auth::caller::Caller;
use crate::auth::scopes::RouteAccess;

/// Resolves when a caller that was admitted would be refused; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Revocation(Arc<RevocationInner>);

#[derive(Debug)]
struct RevocationInner {
    auth: Arc<Authenticator>,
    caller: Caller,
    access: RouteAccess,
}

impl Revocation {
    /// For a `caller` that was admitted with this `access`.
    pub(crate) fn new(auth: Arc<Authenticator>, caller: Caller, access: RouteAccess) -> Self {
        Self(Arc::new(RevocationInner {
            auth,
            caller,
            access,
        }))
    }

    /// Resolves when the caller's key is revoked; never where the route needs none.
    pub(crate) fn reached(&self) -> BoxFuture<'static, ()> {
        let inner = Arc::clone(&self.0);
        // An open route was entered without looking at the key, so losing it ends nothing there.
        let RouteAccess::Needs(scope) = inner.access else {
            return pending().boxed();
        };
        async move { inner.auth.revoked(&inner.caller, scope).await }.boxed()
    }

    /// What the caller may do with controllers now (AI-902).
    pub(crate) fn rights(&self) -> SteerRights {
        let RevocationInner {
            auth,
            caller,
            access,
        } = &*self.0;
        let scopes = match access {
            RouteAccess::Needs(_) => auth.scopes_now(caller),
            // What an open route grants does not depend on the keys alone; nothing of it lasts.
            RouteAccess::Open => caller.scopes,
        };
        caller.identity.steer_rights(scopes)
    }

    /// Resolves when the key is revoked and the faces have had their time to end by themselves.
    pub(crate) fn over(&self) -> BoxFuture<'static, ()> {
        let reached = self.reached();
        async move {
            reached.await;
            tokio::time::sleep(LAST_WORDS).await;
        }
        .boxed()
    }

    /// Runs `work` as long as the key is valid, and [`LAST_WORDS`] longer. `None`: it was cut.
    pub(crate) async fn within<F: Future>(&self, work: F) -> Option<F::Output> {
        tokio::pin!(work);
        // `work` is not cancelled here: it is polled on below. Biased, so that work that is done wins over a revocation that
        // comes in the same moment.
        tokio::select! {
            biased;
            done = work.as_mut() => return Some(done),
            () = self.reached() => {}
        }
        timeout(LAST_WORDS, work).await.ok()
    }
}

/// How long a face may take to send its error after a revocation; as long as for work that a drain cuts.
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
    async fn d_45_open_work_of_a_revoked_key_has_one_second_to_end() {
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

    #[test]
    fn ai_902_rights_are_those_of_the_present_keys() {
        let auth = auth();
        let revocation = asked(&auth, RouteAccess::Needs(KeyScope::Infer));
        for scopes in [
            &[KeyScope::Infer][..],
            &[KeyScope::Infer, KeyScope::Control],
        ] {
            let scopes: Scopes = scopes.iter().copied().collect();
            auth.replace(vec![ApiKey::new("anna", "one", scopes)]);
            let rights = revocation.rights();
            let found = (rights.is_admin, rights.may_control);
            assert_eq!(found, (false, scopes.has(KeyScope::Control)));
        }
        auth.replace(vec![ApiKey::new("anna", "another", Scopes::ALL)]);
        let rights = revocation.rights();
        assert!(!rights.is_admin && !rights.may_control, "an old secret");
    }

    #[tokio::test]
    async fn d_45_work_on_an_open_route_is_not_revoked() {
        let auth = auth();
        let revocation = asked(&auth, RouteAccess::Open);
        auth.replace(vec![ApiKey::new("ben", "two", Scopes::ALL)]);
        assert!(futures::poll!(revocation.reached()).is_pending());
    }
}
