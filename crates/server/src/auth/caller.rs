//! The caller of a request: its identity, its scopes and its rate limits (D-45).

use std::sync::Arc;

use http::Extensions;
use sapwood_kernel::{Name, SteerRights};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use crate::auth::identity::CallerIdentity;
use crate::auth::rate_limit::TokenMeter;
use crate::auth::scopes::{KeyFingerprint, KeyScope, Scopes};
use crate::http::rejection::Rejection;

/// The caller of a request. The middleware puts it into the extensions of each; a handler that finds none refuses.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The owner of the request and of what it creates.
    pub identity: CallerIdentity,
    /// What the caller may do.
    pub scopes: Scopes,
    /// What its calls of models are charged to; `None` for a caller with neither key nor certificate.
    pub allowance: Option<Arc<TokenMeter>>,
    /// The key that it presented; `None` if it needed none, or presented a certificate.
    pub(crate) fingerprint: Option<KeyFingerprint>,
    /// The subject of the certificate that it presented instead.
    pub(crate) certificate: Option<Arc<str>>,
}

impl Caller {
    /// A caller without a key that may do this much.
    #[must_use]
    pub fn anonymous(extensions: &Extensions, scopes: Scopes) -> Self {
        Self {
            identity: CallerIdentity::anonymous(extensions),
            scopes,
            allowance: None,
            fingerprint: None,
            certificate: None,
        }
    }

    /// The caller of a request with these extensions.
    ///
    /// # Errors
    /// `unauthenticated` if the middleware has not run: a handler that was reached past it does nothing.
    pub fn of(extensions: &Extensions) -> Result<&Self, Rejection> {
        // Refused and not taken for an anonymous caller: without keys an anonymous caller may do everything, so that one
        // route outside the middleware would be open to all (D-45).
        extensions.get().ok_or_else(|| {
            let message = "This request was not authenticated.";
            Rejection::new(
                Code::Unauthenticated,
                ErrorReason::UNCHECKED_CALLER,
                message,
            )
        })
    }

    /// Fails with `insufficient_scope` if the caller may not do things of this kind.
    ///
    /// # Errors
    /// `permission-denied`.
    pub fn require(&self, scope: KeyScope) -> Result<(), Rejection> {
        if self.scopes.has(scope) {
            return Ok(());
        }
        let message = format!("This caller does not have the scope `{}`.", scope.name());
        Err(Rejection::new(
            Code::PermissionDenied,
            ErrorReason::INSUFFICIENT_SCOPE,
            message,
        ))
    }

    /// What the caller may do with controllers (AI-902).
    #[must_use]
    pub fn steer_rights(&self) -> SteerRights {
        self.identity.steer_rights(self.scopes)
    }

    /// Whether the caller may know of this model, and call it.
    pub(crate) fn may_use(&self, model: &Name) -> bool {
        // Read from the meter at each call and not kept in the caller: a reload of the keys changes the models of callers
        // that are already here.
        let limits = self.allowance.as_ref().map(|allowance| allowance.limits());
        let models = limits.as_ref().and_then(|limits| limits.models.as_ref());
        models.is_none_or(|models| models.contains(model))
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::listener::peer::PeerInfo;

    fn from(address: &str) -> Extensions {
        let mut extensions = Extensions::new();
        extensions.insert(PeerInfo(SocketAddr::new(address.parse().unwrap(), 7)));
        extensions
    }

    #[test]
    fn d_45_equal_names_of_different_kinds_are_different_callers() {
        let name = |name: &str| -> Arc<str> { name.into() };
        let all = [
            CallerIdentity::Anonymous(None),
            CallerIdentity::Key(name("anonymous")),
            CallerIdentity::Certificate(name("anonymous")),
            CallerIdentity::Key(name("default")),
            CallerIdentity::Certificate(name("default")),
        ];
        for (i, one) in all.iter().enumerate() {
            for (j, other) in all.iter().enumerate() {
                assert_eq!(one.may_use_what(other), i == j, "{one:?} {other:?}");
            }
        }
        let [here, there] = ["10.0.0.1", "10.0.0.2"].map(|it| CallerIdentity::anonymous(&from(it)));
        assert!(here != there && here.may_use_what(&there));
    }

    #[test]
    fn d_45_an_address_counts_as_its_network_in_canonical_form() {
        for (one, other, same) in [
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("2001:db8::1", "2001:db8:0:0:ffff::1", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
        ] {
            let [one, other] = [one, other].map(|it| CallerIdentity::anonymous(&from(it)));
            assert_eq!(one == other, same, "{one:?} {other:?}");
        }
    }

    #[test]
    fn ai_902_users_are_keys_and_without_keys_only_this_machine_is_trusted() {
        let key = |scopes: &[KeyScope]| Caller {
            identity: CallerIdentity::Key("anna".into()),
            ..Caller::anonymous(&Extensions::new(), scopes.iter().copied().collect())
        };
        let at = |address| Caller::anonymous(&from(address), Scopes::ALL);
        let subject = Caller {
            identity: CallerIdentity::Certificate("anna".into()),
            ..key(&[KeyScope::Infer])
        };
        for (caller, user, is_admin, may_control) in [
            (key(&[KeyScope::Infer]), "anna", false, false),
            (
                key(&[KeyScope::Infer, KeyScope::Control]),
                "anna",
                false,
                true,
            ),
            (key(&[KeyScope::Admin]), "anna", true, false),
            (subject, "certificate:anna", false, false),
            (at("127.0.0.1"), "localhost", true, true),
            (at("::1"), "localhost", true, true),
            (at("::ffff:127.0.0.1"), "localhost", true, true),
            (at("10.0.0.1"), "anonymous", false, false),
            (at("2001:db8::1"), "anonymous", false, false),
            (
                Caller::anonymous(&Extensions::new(), Scopes::default()),
                "localhost",
                false,
                false,
            ),
        ] {
            let rights = caller.steer_rights();
            let expect = SteerRights {
                user: user.into(),
                is_admin,
                may_control,
            };
            assert_eq!(rights, expect, "{caller:?}");
        }
    }

    #[test]
    fn d_45_a_request_without_a_caller_is_unauthenticated() {
        let rejection = Caller::of(&Extensions::new()).unwrap_err();
        assert_eq!(rejection.code, Code::Unauthenticated);
    }
}
