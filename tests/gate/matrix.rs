//! The product of every route, method, credential, HTTP version and port.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Method, Request};
use http_body_util::Empty;
use sapwood_engine::scripted;
use sapwood_server::Server;
use sapwood_server::ServerContext;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::scopes::{KeyScope, RouteAccess, Scopes};
use sapwood_server::faces::controllers;
use sapwood_server::faces::evergreen;
use sapwood_server::faces::generate::{
    self, ExplicitRepository, ModelControlError, OnModelLoaded, Repository,
};
use sapwood_server::faces::lmtp;
use sapwood_server::faces::lmtp::LmtpService;
use sapwood_server::http::origin;
use sapwood_server::http::route::RouteKind;
use sapwood_server::listener::port_purpose::PortPurpose;
use sapwood_server::listener::tls::Mtls;
use sapwood_server::server;
use sapwood_tests::{spawned, with_model};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::client::{Authority, Client, Reported, Version, Way};
use super::table::{Target, targets};

/// The caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Nobody,
    WrongKey,
    RevokedKey,
    /// A key for metrics only.
    Scraper,
    User,
    Admin,
    /// No key, but a certificate that no key names, whatever its common name is.
    Certificate(&'static str),
}

impl Who {
    const fn secret(self) -> Option<&'static str> {
        match self {
            Self::Nobody | Self::Certificate(_) => None,
            Self::WrongKey => Some("wrong"),
            Self::RevokedKey => Some("old"),
            Self::Scraper => Some("scrape"),
            Self::User => Some("use"),
            Self::Admin => Some("manage"),
        }
    }

    /// The status with which authentication must refuse this caller; `None` if it must not.
    fn judged(self, access: RouteAccess) -> Option<u16> {
        let RouteAccess::Needs(scope) = access else {
            return None;
        };
        let scopes: &[KeyScope] = match self {
            Self::Nobody | Self::WrongKey | Self::RevokedKey => return Some(401),
            Self::Scraper => &[KeyScope::Metrics],
            Self::User | Self::Certificate(_) => &[KeyScope::Infer],
            Self::Admin => &KeyScope::ALL,
        };
        (!scopes.contains(&scope)).then_some(403)
    }
}

/// How a route is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Plain(&'static str),
    /// The origin of a preflight, if it is one.
    Preflight(Option<&'static str>),
    /// With the headers of a WebSocket.
    Upgrade(&'static str),
}

const ACTS: [Act; 14] = [
    Act::Plain("GET"),
    Act::Plain("HEAD"),
    Act::Plain("POST"),
    Act::Plain("PUT"),
    Act::Plain("PATCH"),
    Act::Plain("DELETE"),
    Act::Plain("OPTIONS"),
    Act::Plain("CONNECT"),
    Act::Plain("TRACE"),
    Act::Preflight(Some(ALLOWED)),
    Act::Preflight(Some("https://evil.example")),
    Act::Preflight(None),
    Act::Upgrade("GET"),
    Act::Upgrade("HEAD"),
];

/// The allowed origin.
const ALLOWED: &str = "https://app.example";

/// The expected result of one combination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    /// Authentication or the middleware answers with this status.
    Refused(u16),
    /// A preflight's answer.
    Allowed,
    /// A handler answers, with any status.
    Reached,
}

fn expect(purpose: PortPurpose, target: &Target, act: Act, who: Who, grpc: bool) -> Expect {
    let scraping = ["/metrics", "/livez", "/readyz", "/health", "/ping"];
    match purpose {
        PortPurpose::Metrics if !scraping.contains(&&*target.path) => return Expect::Refused(404),
        PortPurpose::Grpc if !grpc => return Expect::Refused(415),
        PortPurpose::Grpc if target.kind == RouteKind::Http => return Expect::Refused(501),
        PortPurpose::Everything | PortPurpose::Grpc | PortPurpose::Metrics => {}
    }
    match act {
        Act::Preflight(Some(ALLOWED)) => return Expect::Allowed,
        Act::Preflight(_) => return Expect::Refused(403),
        Act::Plain(_) | Act::Upgrade(_) => {}
    }
    if let Some(refused) = who.judged(target.access) {
        return Expect::Refused(refused);
    }
    let is_post = act == Act::Plain("POST");
    if target.kind == RouteKind::Grpc && is_post && !grpc {
        return Expect::Refused(415);
    }
    let taken = match (act, target.kind) {
        (Act::Plain(method), RouteKind::Grpc) => method == "POST",
        (Act::Plain(method), RouteKind::Http) => !matches!(method, "CONNECT" | "TRACE"),
        (Act::Upgrade(_), kind) => kind == RouteKind::Http,
        (Act::Preflight(_), _) => false,
    };
    if taken {
        Expect::Reached
    } else {
        Expect::Refused(405)
    }
}

/// Records loads and unloads of models.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Repository for Notes {
    fn load(
        &self,
        name: &str,
        _: Option<String>,
        _: OnModelLoaded,
    ) -> BoxFuture<'static, Result<(), ModelControlError>> {
        self.0.lock().unwrap().push(format!("load {name}"));
        async { Ok(()) }.boxed()
    }

    fn unload(&self, name: &str) -> BoxFuture<'static, Result<(), ModelControlError>> {
        self.0.lock().unwrap().push(format!("unload {name}"));
        async { Ok(()) }.boxed()
    }
}

/// The whole server on its three ports.
struct TestServer {
    ports: Vec<(PortPurpose, SocketAddr)>,
    targets: Vec<Target>,
    shared: ServerContext,
    notes: Arc<Notes>,
    _serving: AbortOnDropHandle<()>,
}

impl TestServer {
    async fn open(config: server::Config, keys: Vec<ApiKey>) -> Self {
        let kernel = with_model(spawned(scripted::Config::default()));
        let builder = Server::builder(config, keys).unwrap();
        let shared = builder.shared().clone();
        let notes = Arc::new(Notes::default());
        let generate = generate::Config {
            repository: Some(ExplicitRepository(Arc::clone(&notes) as Arc<dyn Repository>)),
            ..generate::Config::default()
        };
        let lmtp = LmtpService::new(shared.clone(), kernel.clone(), lmtp::Config::default());
        let evergreen = evergreen::Config::default();
        let builder = builder
            .face(evergreen::face(shared.clone(), kernel.clone(), evergreen))
            .face(lmtp.face())
            .face(controllers::face(
                shared.clone(),
                kernel.clone(),
                controllers::Config::default(),
            ))
            .face(generate::face(shared.clone(), kernel, generate));
        let mut server = builder.build().unwrap();
        let targets = targets(server.routes());
        let mut ports = Vec::new();
        for purpose in [PortPurpose::Grpc, PortPurpose::Metrics] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            ports.push((purpose, listener.local_addr().unwrap()));
            server = server.also(listener, purpose);
        }
        let common = TcpListener::bind("127.0.0.1:0").await.unwrap();
        ports.push((PortPurpose::Everything, common.local_addr().unwrap()));
        let serving = async move {
            server.serve(common, std::future::pending()).await;
        };
        Self {
            ports,
            targets,
            shared,
            notes,
            _serving: AbortOnDropHandle::new(tokio::spawn(serving)),
        }
    }

    /// Tests all combinations for one caller, and returns their number.
    async fn walk(&self, who: Who, tls: Option<&Authority>) -> usize {
        let mut cells = 0;
        let config = |authority: &Authority| match who {
            Who::Certificate(name) => authority.client(Some(name)),
            _ => authority.client(None),
        };
        let tls = tls.map(config);
        // TLS handshakes are slow, and which routes a port has does not depend on the caller.
        let common = tls.is_some();
        let ports = self.ports.iter().copied();
        for (purpose, address) in
            ports.filter(|(purpose, _)| !common || *purpose == PortPurpose::Everything)
        {
            for version in [Version::One, Version::Two] {
                let tls = tls.clone();
                let mut client = Client::new(Way {
                    address,
                    version,
                    tls,
                });
                for target in &self.targets {
                    for act in ACTS {
                        // Other requests are made only where they could make a difference.
                        let forms: &[bool] = match (purpose, target.kind) {
                            (PortPurpose::Everything, RouteKind::Http) => &[false],
                            _ => &[false, true],
                        };
                        for &grpc in forms {
                            let Some(request) = request(target, act, who, version, grpc) else {
                                continue;
                            };
                            let received = client.ask(request).await;
                            let expect = expect(purpose, target, act, who, grpc);
                            let at = (purpose, version, target, act, who, grpc);
                            check(expect, &received, &format!("{at:?}"));
                            cells += 1;
                        }
                    }
                }
            }
        }
        cells
    }
}

/// The request of one combination; `None` if its HTTP version has no such request.
fn request(
    target: &Target,
    act: Act,
    who: Who,
    version: Version,
    grpc: bool,
) -> Option<Request<Empty<Bytes>>> {
    let (method, two) = match act {
        Act::Plain(method) | Act::Upgrade(method) => (method, version == Version::Two),
        Act::Preflight(_) => ("OPTIONS", version == Version::Two),
    };
    // HTTP/2 has neither upgrades nor a path beside CONNECT.
    if two && (matches!(act, Act::Upgrade(_)) || method == "CONNECT") {
        return None;
    }
    let uri = if two {
        format!("http://localhost{}", target.path)
    } else {
        target.path.clone()
    };
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    let mut request = Request::builder().method(method).uri(uri);
    if !two {
        request = request.header("host", "localhost");
    }
    if let Some(secret) = who.secret() {
        request = request.header("authorization", format!("Bearer {secret}"));
    }
    if grpc {
        request = request
            .header("content-type", "application/grpc")
            .header("te", "trailers");
    }
    if let Act::Preflight(origin) = act {
        request = request.header("access-control-request-method", "POST");
        if let Some(origin) = origin {
            request = request.header("origin", origin);
        }
    }
    if let Act::Upgrade(_) = act {
        request = request
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==");
    }
    Some(request.body(Empty::new()).unwrap())
}

fn check(expect: Expect, received: &Reported, at: &str) {
    let Reported {
        class,
        headers,
        body,
    } = received;
    let body = String::from_utf8_lossy(body);
    assert!(headers.contains_key("x-request-id"), "{at}: {received:?}");
    match expect {
        Expect::Refused(status) => {
            assert_eq!(*class, status, "{at}: {body}");
        }
        Expect::Allowed => {
            assert_eq!(*class, 204, "{at}: {body}");
            assert_eq!(headers["access-control-allow-origin"], ALLOWED, "{at}");
        }
        Expect::Reached => {
            let rejection = body.contains("invalid_api_key") || body.contains("unchecked_caller");
            assert!(*class != 401 && !rejection, "{at}: {class}: {body}");
        }
    }
    if *class == 101 {
        assert!(at.contains("Upgrade(\"GET\")"), "{at}: {class}");
    }
}

fn config() -> server::Config {
    server::Config {
        origin: origin::Config {
            origins: vec![ALLOWED.into()],
            ..origin::Config::default()
        },
        ..server::Config::default()
    }
}

fn keys() -> Vec<ApiKey> {
    let key = |name, secret, scopes: &[KeyScope]| {
        ApiKey::new(name, secret, scopes.iter().copied().collect())
    };
    vec![
        key("scraper", "scrape", &[KeyScope::Metrics]),
        key("user", "use", &[KeyScope::Infer]),
        ApiKey::new("admin", "manage", Scopes::ALL),
    ]
}

/// All combinations without TLS, for one caller.
async fn walked(who: Who) {
    let before = [keys(), vec![ApiKey::new("gone", "old", Scopes::ALL)]].concat();
    let context = TestServer::open(config(), before).await;
    context.shared.auth.replace(keys());
    let cells = context.walk(who, None).await;
    assert!(cells > 4_000, "{cells} cells");
    let done = std::mem::take(&mut *context.notes.0.lock().unwrap());
    assert_eq!(done.is_empty(), who != Who::Admin, "{who:?}: {done:?}");
}

/// The same over TLS, for callers with a certificate.
async fn certified(keys: Vec<ApiKey>, who: Who) {
    let authority = Authority::new();
    let config = server::Config {
        tls: Some(authority.tls(Mtls::Optional)),
        ..config()
    };
    let context = TestServer::open(config, keys).await;
    context.walk(who, Some(&authority)).await;
    let done = std::mem::take(&mut *context.notes.0.lock().unwrap());
    assert!(done.is_empty(), "{done:?}");
}

#[tokio::test]
async fn d_45_every_route_is_closed_without_a_key() {
    walked(Who::Nobody).await;
}

#[tokio::test]
async fn d_45_every_route_is_closed_to_a_wrong_key() {
    walked(Who::WrongKey).await;
}

#[tokio::test]
async fn d_45_every_route_is_closed_to_a_revoked_key() {
    walked(Who::RevokedKey).await;
}

#[tokio::test]
async fn d_45_a_key_with_scope_metrics_opens_only_metrics() {
    walked(Who::Scraper).await;
}

#[tokio::test]
async fn d_45_a_key_with_scope_infer_opens_the_routes_that_call_functions() {
    walked(Who::User).await;
}

#[tokio::test]
async fn d_45_a_key_with_all_scopes_opens_every_route_to_its_methods() {
    walked(Who::Admin).await;
}

#[tokio::test]
async fn d_45_a_certificate_without_keys_has_infer_and_never_admin() {
    certified(Vec::new(), Who::Certificate("robot")).await;
}

#[tokio::test]
async fn d_45_a_certificate_beside_keys_has_infer() {
    certified(keys(), Who::Certificate("robot")).await;
}

#[tokio::test]
async fn d_45_a_certificate_with_the_name_of_a_key_has_none_of_its_scopes() {
    certified(keys(), Who::Certificate("admin")).await;
}

#[tokio::test]
async fn d_45_a_certificate_named_anonymous_is_not_an_anonymous_caller() {
    certified(keys(), Who::Certificate("anonymous")).await;
}
