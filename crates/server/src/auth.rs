//! Bearer keys and their scopes (OA-905, EV-704, D-31).
//!
//! Only digests are kept; a secret is never stored, logged or compared directly.

pub mod caller;
pub mod charge_layer;
pub mod identity;
pub(crate) mod quotas;
pub mod rate_limit;
pub(crate) mod revocation;
pub mod scopes;

use std::borrow::Cow;
use std::sync::{Arc, RwLock};

use http::request::Parts;
use http::{HeaderMap, HeaderValue, header};
use percent_encoding::percent_decode_str;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use subtle::ConditionallySelectable;
use tokio::sync::watch;

use self::caller::Caller;
use self::identity::CallerIdentity;
use self::rate_limit::TokenMeter;
use self::scopes::{KeyFingerprint, KeyScope, RouteAccess, Scopes};
use crate::http::rejection::Rejection;
use crate::listener::tls::Subject;
use crate::websocket::handshake::is_handshake;

/// One entry of the keys that the server accepts: a secret, a certificate, or both, and what may be done with either.
#[derive(Clone, Debug)]
pub struct ApiKey {
    /// Its name in the log, and the identity of what its callers create.
    pub name: Arc<str>,
    /// Digest of the secret; `None`: only a certificate gives access.
    pub fingerprint: Option<KeyFingerprint>,
    /// Subject of the client certificate that stands for this key; a certificate that no entry names stands for none.
    pub certificate: Option<Arc<str>>,
    /// What it may be used for.
    pub scopes: Scopes,
    /// Its rate limits and models, and the scope within which its cached prefixes are shared. `None`: no limits, and the
    /// shared prefixes of callers without a key.
    pub allowance: Option<Arc<TokenMeter>>,
}

impl ApiKey {
    /// A key with this secret and without limits.
    #[must_use]
    pub fn new(name: &str, secret: &str, scopes: Scopes) -> Self {
        Self {
            name: name.into(),
            fingerprint: Some(KeyFingerprint::of(secret)),
            certificate: None,
            scopes,
            allowance: None,
        }
    }

    /// The caller with this key.
    fn caller(&self, fingerprint: Option<KeyFingerprint>) -> Caller {
        Caller {
            identity: CallerIdentity::Key(Arc::clone(&self.name)),
            scopes: self.scopes,
            allowance: self.allowance.clone(),
            fingerprint,
            certificate: None,
        }
    }
}

/// The keys in force. Cheap to share; replaced as a whole on SIGHUP.
#[derive(Debug, Default)]
pub struct Authenticator {
    keys: RwLock<Arc<[ApiKey]>>,
    query_key: bool,
    /// Clients are asked for certificates: a caller without one is not trusted with everything.
    certified: bool,
    /// Notified whenever the keys were replaced.
    replaced: watch::Sender<()>,
}

impl Authenticator {
    /// Checks against these keys. Without any, every caller that reaches the server may do everything, but see
    /// [`Self::with_certificates`].
    #[must_use]
    pub fn new(keys: Vec<ApiKey>) -> Self {
        Self {
            keys: RwLock::new(keys.into()),
            ..Self::default()
        }
    }

    /// The same, with `?key=` accepted where a WebSocket is asked for: browsers cannot send headers there (EV-704).
    #[must_use]
    pub fn with_query_key(self, accepted: bool) -> Self {
        Self {
            query_key: accepted,
            ..self
        }
    }

    /// The same, where clients are asked for certificates: then callers without a key have `infer` only (D-45).
    #[must_use]
    pub fn with_certificates(self, asked: bool) -> Self {
        Self {
            certified: asked,
            ..self
        }
    }

    /// The headers of a request, the key of the query among them if that is accepted; a header wins.
    fn headers<'a>(&self, request: &'a Parts) -> Cow<'a, HeaderMap> {
        let headers = &request.headers;
        // Only a handshake: on other requests a key in the URL would end up in histories, referrers and proxy logs, and a
        // link on a web page could carry one.
        if !self.query_key || !is_handshake(request) || presented(headers).is_some() {
            return Cow::Borrowed(headers);
        }
        let mut pairs = request.uri.query().unwrap_or_default().split('&');
        let key = pairs.find_map(|pair| pair.strip_prefix("key="));
        let bearer = key.and_then(|key| {
            let key = percent_decode_str(key).decode_utf8().ok()?;
            HeaderValue::try_from(format!("Bearer {key}")).ok()
        });
        // An unreadable key counts as none: the request is then refused like any other without a key.
        let Some(bearer) = bearer else {
            return Cow::Borrowed(headers);
        };
        // Turned into the header, so that keys from both places take the same path through the check.
        let mut headers = headers.clone();
        headers.insert(header::AUTHORIZATION, bearer);
        Cow::Owned(headers)
    }

    /// Whether any key is needed.
    #[must_use]
    pub fn required(&self) -> bool {
        !self.keys().is_empty()
    }

    /// Replaces all keys. Open work of callers whose key was removed ends; a key that remains keeps its open work and what it
    /// has used, under its new limits.
    pub fn replace(&self, mut keys: Vec<ApiKey>) {
        let before = self.keys();
        for key in &mut keys {
            // By name and not by secret: a key that is rotated keeps what it has used, or rotating would refill its
            // buckets.
            let same = before.iter().find(|old| old.name == key.name);
            if let (Some(allowance), Some(old)) = (
                &mut key.allowance,
                same.and_then(|old| old.allowance.as_ref()),
            ) {
                // The old meter with the new limits, and not a new meter: callers hold clones of the old one, and calls that
                // run have to count against the same buckets as those that begin.
                old.renew(&allowance.limits());
                *allowance = Arc::clone(old);
            }
        }
        *self
            .keys
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = keys.into();
        // After the new keys are in place: a woken task checks at once, and must not find the old ones.
        self.replaced.send_replace(());
    }

    /// Resolves when `caller` would no longer be admitted with this scope (LM-108, D-45).
    pub(crate) async fn revoked(&self, caller: &Caller, scope: KeyScope) {
        // Before the first look: keys that are replaced between the look and the wait are not missed.
        let mut replaced = self.replaced.subscribe();
        // `changed` cannot fail, because `self` owns the sender.
        while self.stands(caller, scope) && replaced.changed().await.is_ok() {}
    }

    /// Whether `caller` would be admitted now.
    fn stands(&self, caller: &Caller, scope: KeyScope) -> bool {
        self.scopes_now(caller).has(scope)
    }

    /// What `caller` may do by the present keys; nothing if it would not be admitted.
    pub(crate) fn scopes_now(&self, caller: &Caller) -> Scopes {
        let keys = self.keys();
        // The same decision as `Self::caller`, from what the caller has shown instead of from its headers, which are gone.
        match (&caller.identity, caller.fingerprint) {
            (CallerIdentity::Anonymous(_), _) if keys.is_empty() => self.unkeyed(),
            (CallerIdentity::Anonymous(_), _) => Scopes::default(),
            // By fingerprint and not by name alone: a rotated key keeps its name, and whoever holds the old secret is out. The plain
            // comparison leaks nothing, because both sides are digests of accepted keys and not of what a client sends.
            // The name too: what is open goes on as this user, whose name another key may have by now.
            (CallerIdentity::Key(name), Some(shown)) => {
                let shown = |key: &&ApiKey| key.name == *name && key.fingerprint == Some(shown);
                let key = keys.iter().find(shown);
                key.map_or_else(Scopes::default, |key| key.scopes)
            }
            // A certificate that an entry names. Entries without one are skipped, so that two absent certificates never count
            // as equal.
            (CallerIdentity::Key(name), None) => {
                let shown =
                    |key: &&ApiKey| key.name == *name && key.certificate == caller.certificate;
                let key = keys
                    .iter()
                    .filter(|key| key.certificate.is_some())
                    .find(shown);
                key.map_or_else(Scopes::default, |key| key.scopes)
            }
            (CallerIdentity::Certificate(subject), _) => certified(&keys, subject).scopes,
        }
    }

    fn keys(&self) -> Arc<[ApiKey]> {
        Arc::clone(
            &self
                .keys
                .read()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }

    /// What a caller may do that the file mode of a Unix socket lets in: everything where no key is configured, else what
    /// needs no key of its own.
    pub(crate) fn local_scopes(&self) -> Scopes {
        if self.required() { INFER } else { Scopes::ALL }
    }

    /// What a caller without a key may do where no key is configured.
    fn unkeyed(&self) -> Scopes {
        // A server that asks for certificates is reachable by others, so that `admin` for everybody would be theirs too.
        if self.certified { INFER } else { Scopes::ALL }
    }

    /// The caller of a request to a route with this access, or the reason to refuse it. A key that is presented decides;
    /// without one, the client's certificate (OA-907). Only a key gives more than `infer`, except where neither keys nor
    /// certificates are configured (D-45).
    ///
    /// # Errors
    /// `unauthenticated` without a valid key, `permission-denied` without the scope of the route.
    pub fn check(&self, access: RouteAccess, request: &Parts) -> Result<Caller, Rejection> {
        let caller = self.caller(request);
        let RouteAccess::Needs(scope) = access else {
            // A wrong key is no reason to refuse where none is needed (OA-905), but it grants no scopes: a handler that shows
            // more to some callers asks for them.
            let nobody = || Caller::anonymous(&request.extensions, Scopes::default());
            return Ok(caller.unwrap_or_else(nobody));
        };
        let caller = caller.ok_or_else(|| {
            let message = "A valid API key is needed: send it as `Authorization: Bearer KEY`.";
            Rejection::new(Code::Unauthenticated, ErrorReason::INVALID_API_KEY, message)
        })?;
        caller.require(scope)?;
        Ok(caller)
    }

    /// Who sends a request; `None` if that needs a key and none that is valid is shown.
    fn caller(&self, request: &Parts) -> Option<Caller> {
        let extensions = &request.extensions;
        let keys = self.keys();
        let subject: Option<&Subject> = extensions.get();
        let headers = self.headers(request);
        match (presented(&headers), subject) {
            // Whatever key is sent: OpenAI clients insist on one, so users of a server without keys set a placeholder.
            _ if keys.is_empty() && subject.is_none() => {
                Some(Caller::anonymous(extensions, self.unkeyed()))
            }
            // Before the certificate: a wrong key is refused and does not fall back to the certificate. Without configured
            // keys a presented one has no meaning, and the certificate decides.
            (Some(secret), _) if !keys.is_empty() => matching(&keys, secret),
            (_, Some(subject)) => Some(certified(&keys, &subject.0)),
            (_, None) => None,
        }
    }
}

/// The caller of a client certificate: the key whose entry names this certificate, or a caller that may call functions. A
/// certificate whose subject equals the name of a key is not that key: its authority need not know of keys.
fn certified(keys: &[ApiKey], subject: &Arc<str>) -> Caller {
    let named = |key: &&ApiKey| key.certificate.as_deref() == Some(&**subject);
    match keys.iter().find(named) {
        Some(key) => Caller {
            certificate: Some(Arc::clone(subject)),
            ..key.caller(None)
        },
        None => Caller {
            identity: CallerIdentity::Certificate(Arc::clone(subject)),
            scopes: INFER,
            allowance: Some(Arc::new(TokenMeter::of_certificate(subject))),
            fingerprint: None,
            certificate: Some(Arc::clone(subject)),
        },
    }
}

/// The scopes of a caller whose key or certificate grants no others.
const INFER: Scopes = Scopes::of(KeyScope::Infer);

/// The secret that the client presents, in any of the three accepted headers.
fn presented(headers: &HeaderMap) -> Option<&str> {
    // `Authorization` alone decides where it is sent, whatever its scheme: a proxy that adds its own must not be combined
    // with a key from another header.
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, secret) = value.to_str().ok()?.split_once(' ')?;
        return scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim());
    }
    // The headers of Anthropic's and of Azure OpenAI's clients.
    headers
        .get("x-api-key")
        .or_else(|| headers.get("api-key"))?
        .to_str()
        .ok()
}

/// Compares with every entry, so that the time taken does not tell which one, or how much of one, was right.
fn matching(keys: &[ApiKey], secret: &str) -> Option<Caller> {
    // Digests are compared, so that neither the length nor the beginning of a secret shows in the time.
    let presented = KeyFingerprint::of(secret);
    let mut found = u32::MAX;
    // No early return, and no branch on the result: `conditional_assign` keeps the last match in constant time.
    for (index, key) in (0_u32..).zip(keys) {
        if let Some(fingerprint) = &key.fingerprint {
            found.conditional_assign(&index, fingerprint.ct_eq(&presented));
        }
    }
    let key = keys.get(usize::try_from(found).ok()?)?;
    Some(key.caller(key.fingerprint))
}

#[cfg(test)]
mod tests {
    use sapwood_kernel::{Name, TokenCharge};

    use super::*;
    use crate::auth::rate_limit::RateLimits;

    const CALL: RouteAccess = RouteAccess::Needs(KeyScope::Infer);
    const SCRAPE: RouteAccess = RouteAccess::Needs(KeyScope::Metrics);
    const MANAGE: RouteAccess = RouteAccess::Needs(KeyScope::Admin);

    fn keys() -> Vec<ApiKey> {
        let key = |name: &str, secret, scopes: &[KeyScope]| {
            ApiKey::new(name, secret, scopes.iter().copied().collect())
        };
        vec![
            key("anna", "one", &KeyScope::ALL),
            key("scraper", "two", &[KeyScope::Metrics]),
            key("app", "three", &[KeyScope::Infer]),
        ]
    }

    fn request(header: &'static str, value: &'static str, subject: Option<&str>) -> Parts {
        let mut request = http::Request::new(());
        if !header.is_empty() {
            let value = HeaderValue::from_static(value);
            request.headers_mut().insert(header, value);
        }
        if let Some(subject) = subject {
            request.extensions_mut().insert(Subject(subject.into()));
        }
        request.into_parts().0
    }

    fn ask(auth: &Authenticator, access: RouteAccess, request: &Parts) -> Result<String, u16> {
        match auth.check(access, request) {
            Ok(caller) => Ok(caller.identity.to_string()),
            Err(rejection) => Err(rejection.code.http()),
        }
    }

    #[test]
    fn oa_905_keys_are_accepted_in_three_headers_and_carry_scopes() {
        let auth = Authenticator::new(keys());
        for (access, header, value, expect) in [
            (CALL, "authorization", "Bearer one", Ok("anna")),
            (CALL, "authorization", "bearer three", Ok("app")),
            (CALL, "x-api-key", "three", Ok("app")),
            (CALL, "api-key", "three", Ok("app")),
            (CALL, "authorization", "Basic one", Err(401)),
            (CALL, "authorization", "Bearer on", Err(401)),
            (CALL, "x-api-key", "", Err(401)),
            (CALL, "", "", Err(401)),
            (CALL, "x-api-key", "two", Err(403)),
            (SCRAPE, "x-api-key", "two", Ok("scraper")),
            (SCRAPE, "x-api-key", "three", Err(403)),
            (SCRAPE, "", "", Err(401)),
            (MANAGE, "x-api-key", "three", Err(403)),
            (MANAGE, "x-api-key", "one", Ok("anna")),
        ] {
            let got = ask(&auth, access, &request(header, value, None));
            let got = got.as_deref().map_err(|code| *code);
            assert_eq!(got, expect, "{access:?} {header}: {value}");
        }
    }

    #[test]
    fn d_45_an_open_route_grants_no_extra_scopes() {
        let auth = Authenticator::new(keys());
        for (secret, name, scopes) in [
            ("", "anonymous", Scopes::default()),
            ("wrong", "anonymous", Scopes::default()),
            ("three", "app", INFER),
            ("one", "anna", Scopes::ALL),
        ] {
            let caller = auth.check(RouteAccess::Open, &request("x-api-key", secret, None));
            let caller = caller.unwrap();
            assert_eq!(
                (&*caller.identity.to_string(), caller.scopes),
                (name, scopes)
            );
        }
    }

    #[test]
    fn oa_905_no_keys_means_no_check() {
        let auth = Authenticator::default();
        for access in [CALL, SCRAPE, MANAGE] {
            let got = ask(&auth, access, &request("x-api-key", "any", None));
            assert_eq!(got, Ok("anonymous".into()));
        }
        auth.replace(keys());
        assert!(auth.required());
        assert_eq!(ask(&auth, CALL, &request("", "", None)), Err(401));
    }

    #[test]
    fn d_45_a_certificate_has_infer_and_more_only_where_a_key_names_it() {
        let mut mapped = keys();
        mapped[1].certificate = Some("monitor".into());
        mapped.push(ApiKey {
            fingerprint: None,
            certificate: Some("robot-7".into()),
            ..ApiKey::new("operator", "", Scopes::ALL)
        });
        let with = Authenticator::new(mapped).with_certificates(true);
        let without = Authenticator::default().with_certificates(true);
        for (auth, access, secret, subject, expect) in [
            (&with, CALL, None, Some("robot"), Ok("certificate:robot")),
            (&with, SCRAPE, None, Some("robot"), Err(403)),
            // A certificate never stands for the key of the same name.
            (&with, CALL, None, Some("anna"), Ok("certificate:anna")),
            (&with, MANAGE, None, Some("anna"), Err(403)),
            (&with, SCRAPE, None, Some("scraper"), Err(403)),
            (
                &with,
                CALL,
                None,
                Some("anonymous"),
                Ok("certificate:anonymous"),
            ),
            // Only where an entry says so.
            (&with, SCRAPE, None, Some("monitor"), Ok("scraper")),
            (&with, CALL, None, Some("monitor"), Err(403)),
            (&with, MANAGE, None, Some("robot-7"), Ok("operator")),
            // A presented key decides; an entry without a secret matches none.
            (&with, CALL, Some("three"), Some("robot-7"), Ok("app")),
            (&with, CALL, Some("wrong"), Some("robot-7"), Err(401)),
            (&with, CALL, Some(""), Some("robot-7"), Err(401)),
            (&with, CALL, None, None, Err(401)),
            // Without keys nobody is an admin, with or without a certificate.
            (&without, CALL, None, Some("robot"), Ok("certificate:robot")),
            (
                &without,
                CALL,
                Some("any"),
                Some("robot"),
                Ok("certificate:robot"),
            ),
            (&without, MANAGE, None, Some("default"), Err(403)),
            (&without, SCRAPE, None, Some("robot"), Err(403)),
            (&without, CALL, None, None, Ok("anonymous")),
            (&without, MANAGE, None, None, Err(403)),
        ] {
            let header = secret.map_or("", |_| "x-api-key");
            let asked = request(header, secret.unwrap_or_default(), subject);
            let got = ask(auth, access, &asked);
            let got = got.as_deref().map_err(|code| *code);
            assert_eq!(got, expect, "{access:?} {secret:?} {subject:?}");
        }
    }

    /// By the time to the first token a certificate would tell what another one has sent.
    #[test]
    fn lm_609_each_certificate_has_cached_prefixes_of_its_own() {
        let scope = |caller: Caller| {
            let meter = caller.allowance.unwrap();
            meter.begin(&Name::shared("m")).unwrap().prefix_scope()
        };
        let auth = Authenticator::default().with_certificates(true);
        let asked = |subject| {
            let asked = auth.check(CALL, &request("", "", Some(subject)));
            scope(asked.unwrap())
        };
        assert_eq!(asked("anna"), asked("anna"));
        let mut key = keys().remove(0);
        key.allowance = Some(Arc::new(TokenMeter::new("anna", RateLimits::default())));
        let scopes = [0, scope(key.caller(None)), asked("anna"), asked("ben")];
        for (i, one) in scopes.iter().enumerate() {
            assert!(!scopes[i + 1..].contains(one), "{scopes:?}");
        }
    }

    #[tokio::test]
    async fn d_45_callers_that_are_no_longer_admitted_are_revoked() {
        let named = |certificate: &str| ApiKey {
            certificate: Some(certificate.into()),
            fingerprint: None,
            ..ApiKey::new("robot", "", INFER)
        };
        let all = || [keys(), vec![named("robot-7")]].concat();
        let less = |scopes| {
            let mut keys = all();
            keys[2].scopes = scopes;
            keys
        };
        // The same entry, for another certificate.
        let renamed = || {
            let mut keys = all();
            for key in &mut keys {
                key.certificate = key.certificate.as_ref().map(|_| "robot-8".into());
            }
            keys
        };
        let app = || request("x-api-key", "three", None);
        let robot = || request("", "", Some("robot-7"));
        for (before, asked, after, stands) in [
            (all(), app(), all(), true),
            (all(), app(), keys()[..2].to_vec(), false),
            (
                all(),
                app(),
                less([KeyScope::Admin].into_iter().collect()),
                false,
            ),
            (all(), app(), less(Scopes::ALL), true),
            (all(), robot(), all(), true),
            // A certificate that no entry names keeps `infer`.
            (all(), request("", "", Some("x")), keys(), true),
            (all(), robot(), keys(), false),
            (all(), robot(), renamed(), false),
            (Vec::new(), request("", "", None), keys(), false),
            (Vec::new(), request("", "", None), Vec::new(), true),
        ] {
            let auth = Authenticator::new(before);
            let caller = auth.check(CALL, &asked).unwrap();
            let revoked = auth.revoked(&caller, KeyScope::Infer);
            tokio::pin!(revoked);
            assert!(futures::poll!(&mut revoked).is_pending());
            auth.replace(after);
            assert_eq!(
                futures::poll!(&mut revoked).is_pending(),
                stands,
                "{caller:?}"
            );
        }
    }

    #[test]
    fn d_45_new_limits_of_a_key_apply_to_open_callers() {
        let limited = |per_minute, models: Option<&str>| {
            let mut keys = keys();
            let models = models.map(|name| Arc::new([Name::shared(name)].into()));
            keys[2].allowance = Some(Arc::new(TokenMeter::new(
                "key",
                RateLimits {
                    models,
                    requests_per_minute: per_minute,
                    ..RateLimits::default()
                },
            )));
            keys
        };
        let auth = Authenticator::new(limited(None, Some("alpha")));
        let caller = auth
            .check(CALL, &request("x-api-key", "three", None))
            .unwrap();
        assert!(caller.may_use(&Name::shared("alpha")));
        auth.replace(limited(Some(5), Some("beta")));
        assert!(!caller.may_use(&Name::shared("alpha")) && caller.may_use(&Name::shared("beta")));
        let allowance = caller.allowance.unwrap();
        assert_eq!(allowance.limits().requests_per_minute, Some(5));
    }

    #[test]
    fn a_fingerprint_round_trips_and_malformed_hex_is_refused() {
        let print = KeyFingerprint::of("secret");
        assert_eq!(KeyFingerprint::from_hex(&print.to_string()), Some(print));
        assert_eq!(KeyFingerprint::from_hex("00"), None);
        assert_eq!(KeyFingerprint::from_hex(&"g".repeat(64)), None);
        assert_eq!(KeyFingerprint::from_hex(&"é".repeat(32)), None);
    }
}
