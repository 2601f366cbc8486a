//! Who may do what: bearer keys and their scopes (OA-905, EV-704, D-31).
//!
//! Owns: the keys in force, the check of a presented one, the list of routes that need none. Refuses to know: where
//! keys are stored, what a route does. Only digests are kept; a secret is never stored, logged or compared directly.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, RwLock};

use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, header};
use percent_encoding::percent_decode_str;
use sapwood_proto::code::Code;
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use tokio::sync::watch;

use crate::allowance::Allowance;
use crate::refusal::Refusal;
use crate::tls::Subject;
use crate::websocket;

/// What a key may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Call functions.
    Infer,
    /// Store and run controllers.
    Control,
    /// Load and unload models, read logs.
    Admin,
    /// Read `/metrics`.
    Metrics,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Self; 4] = [Self::Infer, Self::Control, Self::Admin, Self::Metrics];

    /// The name used in key files and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Infer => "infer",
            Self::Control => "control",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
        }
    }

    /// The scope of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scope| scope.name() == name)
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// A set of scopes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// All of them: what a caller has when no keys are configured.
    pub const ALL: Self = Self(0b1111);

    /// Whether `scope` is in the set.
    #[must_use]
    pub const fn has(self, scope: Scope) -> bool {
        self.0 & scope.bit() != 0
    }
}

impl FromIterator<Scope> for Scopes {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Self {
        Self(scopes.into_iter().fold(0, |bits, scope| bits | scope.bit()))
    }
}

/// SHA-256 of a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The digest of `secret`.
    #[must_use]
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret.as_bytes()).into())
    }

    /// Reads 64 hex digits.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let high = char::from(pair[0]).to_digit(16)?;
            let low = char::from(pair[1]).to_digit(16)?;
            *byte = u8::try_from(high * 16 + low).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprint(…)")
    }
}

/// One key that the server accepts.
#[derive(Clone, Debug)]
pub struct Key {
    /// The name under which its use is logged.
    pub name: Arc<str>,
    /// Digest of the secret.
    pub fingerprint: Fingerprint,
    /// What it may be used for.
    pub scopes: Scopes,
    /// How much of it, and with which models; also whose turn it is where requests wait, and whose computed prefixes are
    /// shared. `None`: as much as there is, and like whoever has no key.
    pub allowance: Option<Arc<Allowance>>,
}

/// The name of whoever needed no key.
pub(crate) const ANONYMOUS: &str = "anonymous";

/// Whoever sent a request, as far as the server knows. Stands in the extensions of every request that passed the gate.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The key's name; `anonymous` where no key was needed.
    pub name: Arc<str>,
    /// What the caller may do.
    pub scopes: Scopes,
    /// What its calls of models are charged to.
    pub allowance: Option<Arc<Allowance>>,
    /// Which key it has shown; `None` if it needed none, or has shown a certificate.
    pub fingerprint: Option<Fingerprint>,
}

impl Caller {
    /// Fails with `insufficient_scope` if the caller may not do things of this kind.
    ///
    /// # Errors
    /// `permission-denied`.
    pub fn require(&self, scope: Scope) -> Result<(), Refusal> {
        if self.scopes.has(scope) {
            return Ok(());
        }
        let message = format!("This key does not have the scope `{}`.", scope.name());
        Err(Refusal::new(
            Code::PermissionDenied,
            "insufficient_scope",
            message,
        ))
    }
}

/// The keys in force. Cheap to share; replaced as a whole on SIGHUP.
#[derive(Debug, Default)]
pub struct Auth {
    keys: RwLock<Arc<[Key]>>,
    metrics_public: bool,
    query_key: bool,
    /// Told whenever other keys are put in force.
    replaced: watch::Sender<()>,
}

impl Auth {
    /// Checks against these keys; with none of them, everybody may do everything.
    #[must_use]
    pub fn new(keys: Vec<Key>, metrics_public: bool) -> Self {
        Self {
            keys: RwLock::new(keys.into()),
            metrics_public,
            query_key: false,
            replaced: watch::Sender::default(),
        }
    }

    /// The same, with `?key=` accepted where a WebSocket is asked for: browsers cannot send headers there (EV-704).
    #[must_use]
    pub const fn with_query_key(mut self, accepted: bool) -> Self {
        self.query_key = accepted;
        self
    }

    /// The headers of a request, the key of the query among them if that is accepted; a header wins.
    pub(crate) fn headers<'a>(&self, request: &'a Parts) -> Cow<'a, HeaderMap> {
        let headers = &request.headers;
        if !self.query_key || !websocket::is_asked(headers) || presented(headers).is_some() {
            return Cow::Borrowed(headers);
        }
        let mut pairs = request.uri.query().unwrap_or_default().split('&');
        let key = pairs.find_map(|pair| pair.strip_prefix("key="));
        let bearer = key.and_then(|key| {
            let key = percent_decode_str(key).decode_utf8().ok()?;
            HeaderValue::try_from(format!("Bearer {key}")).ok()
        });
        let Some(bearer) = bearer else {
            return Cow::Borrowed(headers);
        };
        let mut headers = headers.clone();
        headers.insert(header::AUTHORIZATION, bearer);
        Cow::Owned(headers)
    }

    /// Whether any key is needed.
    #[must_use]
    pub fn required(&self) -> bool {
        !self.keys().is_empty()
    }

    /// Puts other keys in force; requests already let in are not affected, and a key whose limits stay as they are has
    /// used what it has used.
    pub fn replace(&self, mut keys: Vec<Key>) {
        let before = self.keys();
        for key in &mut keys {
            let same = before.iter().find(|old| old.name == key.name);
            if let (Some(allowance), Some(old)) = (
                &mut key.allowance,
                same.and_then(|old| old.allowance.as_ref()),
            ) && allowance.limits() == old.limits()
            {
                *allowance = Arc::clone(old);
            }
        }
        *self
            .keys
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = keys.into();
        self.replaced.send_replace(());
    }

    /// Resolves when the key of `caller` may call functions no more; never for whoever has shown none (LM-108).
    pub(crate) async fn revoked(&self, caller: &Caller) {
        let Some(fingerprint) = caller.fingerprint else {
            return std::future::pending().await;
        };
        let mut replaced = self.replaced.subscribe();
        loop {
            let keys = self.keys();
            let mut keys = keys.iter();
            let stands =
                keys.any(|key| key.fingerprint == fingerprint && key.scopes.has(Scope::Infer));
            // Its sender is ours.
            if !stands || replaced.changed().await.is_err() {
                return;
            }
        }
    }

    fn keys(&self) -> Arc<[Key]> {
        Arc::clone(
            &self
                .keys
                .read()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }

    /// Who is asking for `path`, or why they may not. A key that is presented decides; without one, the certificate
    /// of the client (OA-907).
    ///
    /// # Errors
    /// `unauthenticated` without a valid key, `permission-denied` without the scope of the route.
    pub fn check(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        subject: Option<&Subject>,
    ) -> Result<Caller, Refusal> {
        let keys = self.keys();
        if keys.is_empty() || self.is_open(method, path, headers) {
            let name = subject.map_or_else(|| Arc::from(ANONYMOUS), |subject| subject.0.clone());
            let scopes = Scopes::ALL;
            return Ok(Caller {
                name,
                scopes,
                allowance: None,
                fingerprint: None,
            });
        }
        let caller = presented(headers)
            .map_or_else(
                || subject.map(|subject| certified(&keys, subject)),
                |secret| matching(&keys, secret),
            )
            .ok_or_else(|| {
                let message = "A valid API key is needed: send it as `Authorization: Bearer KEY`.";
                Refusal::new(Code::Unauthenticated, "invalid_api_key", message)
            })?;
        caller.require(if path == "/metrics" {
            Scope::Metrics
        } else {
            Scope::Infer
        })?;
        Ok(caller)
    }

    /// The routes that probes and browsers must reach without a key (OA-905).
    fn is_open(&self, method: &Method, path: &str, headers: &HeaderMap) -> bool {
        let preflight =
            method == Method::OPTIONS && headers.contains_key("access-control-request-method");
        preflight
            || matches!(path, "/health" | "/livez" | "/readyz" | "/ping")
            || path.starts_with("/v2/health/")
            || path.starts_with("/grpc.health.v1.Health/")
            || (path == "/metrics" && self.metrics_public)
    }
}

/// The caller whom a client's certificate names: what the key of that name may do, or call functions if there is none.
fn certified(keys: &[Key], subject: &Subject) -> Caller {
    let key = keys.iter().find(|key| key.name == subject.0);
    Caller {
        name: Arc::clone(&subject.0),
        scopes: key.map_or_else(|| [Scope::Infer].into_iter().collect(), |key| key.scopes),
        allowance: key.and_then(|key| key.allowance.clone()),
        fingerprint: None,
    }
}

/// The secret that the client presents, in any of the three accepted headers.
fn presented(headers: &HeaderMap) -> Option<&str> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, secret) = value.to_str().ok()?.split_once(' ')?;
        return scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim());
    }
    headers
        .get("x-api-key")
        .or_else(|| headers.get("api-key"))?
        .to_str()
        .ok()
}

/// Compares with every entry, so that the time taken does not tell which one, or how much of one, was right.
fn matching(keys: &[Key], secret: &str) -> Option<Caller> {
    let presented = Fingerprint::of(secret);
    let mut found = u32::MAX;
    for (index, key) in (0_u32..).zip(keys) {
        found.conditional_assign(&index, key.fingerprint.0.ct_eq(&presented.0));
    }
    let key = keys.get(usize::try_from(found).ok()?)?;
    Some(Caller {
        name: Arc::clone(&key.name),
        scopes: key.scopes,
        allowance: key.allowance.clone(),
        fingerprint: Some(key.fingerprint),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth() -> Auth {
        let key = |name: &str, secret, scopes: &[Scope]| Key {
            name: name.into(),
            fingerprint: Fingerprint::of(secret),
            scopes: scopes.iter().copied().collect(),
            allowance: None,
        };
        let keys = vec![
            key("anna", "one", &Scope::ALL),
            key("scraper", "two", &[Scope::Metrics]),
            key("app", "three", &[Scope::Infer]),
        ];
        Auth::new(keys, false)
    }

    fn ask(
        auth: &Auth,
        path: &str,
        name: &'static str,
        value: &'static str,
    ) -> Result<String, u16> {
        let mut headers = HeaderMap::new();
        if !name.is_empty() {
            headers.insert(name, value.parse().unwrap());
        }
        match auth.check(&Method::GET, path, &headers, None) {
            Ok(caller) => Ok(caller.name.to_string()),
            Err(refusal) => Err(refusal.code.http()),
        }
    }

    #[test]
    fn oa_905_keys_are_accepted_in_three_headers_and_carry_scopes() {
        let auth = auth();
        for (path, header, value, expect) in [
            ("/", "authorization", "Bearer one", Ok("anna")),
            ("/", "authorization", "bearer three", Ok("app")),
            ("/", "x-api-key", "three", Ok("app")),
            ("/", "api-key", "three", Ok("app")),
            ("/", "authorization", "Basic one", Err(401)),
            ("/", "authorization", "Bearer on", Err(401)),
            ("/", "x-api-key", "", Err(401)),
            ("/", "", "", Err(401)),
            ("/", "x-api-key", "two", Err(403)),
            ("/metrics", "x-api-key", "two", Ok("scraper")),
            ("/metrics", "x-api-key", "three", Err(403)),
            ("/metrics", "", "", Err(401)),
            ("/healthy", "", "", Err(401)),
            (
                "/evergreen.v2.EvergreenService/StartSession",
                "",
                "",
                Err(401),
            ),
        ] {
            let got = ask(&auth, path, header, value);
            assert_eq!(
                got.as_deref().map_err(|code| *code),
                expect,
                "{path} {header}: {value}"
            );
        }
    }

    #[test]
    fn oa_905_probes_need_no_key_and_preflights_neither() {
        let auth = auth();
        for path in [
            "/health",
            "/livez",
            "/readyz",
            "/ping",
            "/v2/health/live",
            "/grpc.health.v1.Health/Check",
        ] {
            assert_eq!(ask(&auth, path, "", ""), Ok("anonymous".into()), "{path}");
        }
        let mut headers = HeaderMap::new();
        assert!(
            auth.check(&Method::OPTIONS, "/v1/models", &headers, None)
                .is_err()
        );
        headers.insert("access-control-request-method", "POST".parse().unwrap());
        assert!(
            auth.check(&Method::OPTIONS, "/v1/models", &headers, None)
                .is_ok()
        );
    }

    #[test]
    fn oa_905_metrics_can_be_public_and_no_keys_means_no_check() {
        assert!(ask(&Auth::default(), "/", "", "").is_ok());
        let auth = Auth::new(auth().keys().to_vec(), true);
        assert!(ask(&auth, "/metrics", "", "").is_ok());
        auth.replace(Vec::new());
        assert!(!auth.required());
    }

    #[test]
    fn oa_907_a_certificate_names_the_caller_and_a_key_wins_over_it() {
        let auth = auth();
        let who = |path, header: Option<&'static str>, name: &str| {
            let mut headers = HeaderMap::new();
            if let Some(secret) = header {
                headers.insert("x-api-key", HeaderValue::from_static(secret));
            }
            let subject = Subject(name.into());
            auth.check(&Method::GET, path, &headers, Some(&subject))
                .map(|caller| caller.name.to_string())
                .map_err(|refusal| refusal.code.http())
        };
        for (path, secret, subject, expect) in [
            ("/", None, "robot", Ok("robot")),
            ("/metrics", None, "robot", Err(403)),
            ("/metrics", None, "scraper", Ok("scraper")),
            ("/", None, "scraper", Err(403)),
            ("/", Some("three"), "robot", Ok("app")),
            ("/", Some("wrong"), "robot", Err(401)),
        ] {
            let got = who(path, secret, subject);
            assert_eq!(
                got.as_deref().map_err(|code| *code),
                expect,
                "{path} {secret:?} {subject}"
            );
        }
        let open = Auth::default();
        let caller = open.check(
            &Method::GET,
            "/",
            &HeaderMap::new(),
            Some(&Subject("robot".into())),
        );
        assert_eq!(&*caller.unwrap().name, "robot");
    }

    #[test]
    fn a_fingerprint_reads_back_and_refuses_what_is_none() {
        let print = Fingerprint::of("secret");
        assert_eq!(Fingerprint::from_hex(&print.to_string()), Some(print));
        assert_eq!(Fingerprint::from_hex("00"), None);
        assert_eq!(Fingerprint::from_hex(&"g".repeat(64)), None);
        assert_eq!(Fingerprint::from_hex(&"é".repeat(32)), None);
    }
}
