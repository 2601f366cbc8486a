//! The whole server on a loopback port, asked over real sockets.

use std::net::SocketAddr;

use http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::*;
use crate::auth::scopes::{KeyScope, RouteAccess, Scopes};
use crate::ops::drain::{DrainGuard, DrainPhase};

struct Running {
    address: SocketAddr,
    shared: ServerContext,
    stop: Option<oneshot::Sender<()>>,
    ended: JoinHandle<DrainOutcome>,
}

impl Running {
    async fn start(config: Config, keys: Vec<ApiKey>) -> Self {
        use axum::routing::get;
        let access = RouteAccess::Needs(KeyScope::Infer);
        let routes = vec![
            Route::http(
                "/panic",
                access,
                get(|| async { panic!("on purpose") as () }),
            ),
            Route::http("/work", access, get(|| async { "done" })),
            Route::http("/never", access, get(std::future::pending::<()>)),
            Route::http(
                "/take",
                access,
                axum::routing::post(|body: String| async move { body }),
            ),
        ];
        let builder = Server::builder(config, keys).unwrap();
        let face = Face {
            name: metrics::FaceLabel::Http,
            root: None,
            routes,
            descriptors: Vec::new(),
            services: vec!["test.Service"],
        };
        let server = builder.face(face).build().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = server.shared().clone();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(server.serve(listener, async {
            let _ = stopped.await;
        }));
        Self {
            address,
            shared,
            stop: Some(stop),
            ended,
        }
    }

    async fn plain() -> Self {
        Self::start(Config::default(), Vec::new()).await
    }

    fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    async fn get(&self, path: &str, headers: &str) -> (u16, String) {
        self.ask("GET", path, headers).await
    }

    async fn ask(&self, method: &str, path: &str, headers: &str) -> (u16, String) {
        ask(self.address, method, path, headers).await
    }
}

/// One request on a connection of its own; head and body as text.
async fn ask(address: SocketAddr, method: &str, path: &str, headers: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    let status = answer[9..12].parse().unwrap();
    (status, answer)
}

/// A drain that waits for events rather than for the clock.
fn drains(deadline: Duration) -> Config {
    let timeouts = Duration::from_secs(600);
    let drain = drain::Config {
        grace: Duration::from_millis(20),
        deadline,
        last_word: timeouts,
    };
    Config {
        drain,
        ..Config::default()
    }
}

#[tokio::test]
async fn oa_901_probes_metrics_version_and_page_answer() {
    let server = Running::plain().await;
    server
        .shared
        .health
        .running("demo", Box::new(|| Duration::ZERO));
    for (path, expect) in [
        ("/livez", "{\"status\":\"ok\"}"),
        ("/readyz", "{\"status\":\"ok\"}"),
        ("/health", "{\"status\":\"ok\"}"),
        ("/ping", "{\"status\":\"ok\"}"),
        (
            "/readyz?verbose",
            "{\"status\":\"ok\",\"parts\":{\"demo\":\"ok\"}}",
        ),
        (
            "/version",
            concat!("{\"version\":\"", env!("CARGO_PKG_VERSION"), "\""),
        ),
        ("/load", "{\"server_load\":0}"),
        ("/metrics", "sapwood_connections_open 1\n"),
        ("/metrics", "content-type: text/plain; version=0.0.4"),
        ("/", "<h1>Sapwood</h1>"),
    ] {
        let (status, answer) = server.get(path, "").await;
        assert!(status == 200 && answer.contains(expect), "{path}: {answer}");
        assert!(
            answer.contains("\r\nx-request-id: req_"),
            "{path}: {answer}"
        );
    }
}

/// TR-1001: the port for metrics. With a key like everything else, and with fewer slots than there are ports.
#[tokio::test]
async fn tr_908_a_port_for_grpc_and_one_for_metrics_serve_nothing_else() {
    let key = ApiKey::new("ops", "s3cret", [KeyScope::Metrics].into_iter().collect());
    let config = Config {
        listener: listener::Config {
            connections: 1,
            ..listener::Config::default()
        },
        ..Config::default()
    };
    let mut server = Server::builder(config, vec![key]).unwrap().build().unwrap();
    let mut addresses = Vec::new();
    let mut listeners = Vec::new();
    for _ in 0..3 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        addresses.push(listener.local_addr().unwrap());
        listeners.push(listener);
    }
    for purpose in [PortPurpose::Metrics, PortPurpose::Grpc] {
        server = server.also(listeners.pop().unwrap(), purpose);
    }
    let common = listeners.pop().unwrap();
    let _serving =
        AbortOnDropHandle::new(tokio::spawn(server.serve(common, std::future::pending())));
    let health = |address: SocketAddr| async move {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"));
        let mut health = HealthClient::new(endpoint.unwrap().connect().await.unwrap());
        let answer = health.check(HealthCheckRequest::default()).await;
        answer.map(|answer| answer.into_inner().status).is_ok()
    };
    assert!(health(addresses[1]).await);
    assert!(!health(addresses[2]).await);
    let with_key = "authorization: Bearer s3cret\r\n";
    for (port, path, headers, status) in [
        (1, "/metrics", with_key, 415),
        (1, "/livez", "", 415),
        (2, "/metrics", with_key, 200),
        (2, "/metrics", "", 401),
        (2, "/livez", "", 200),
        (2, "/", with_key, 404),
    ] {
        let (answered, text) = ask(addresses[port], "GET", path, headers).await;
        assert_eq!(answered, status, "{port} {path}: {text}");
    }
}

#[tokio::test]
async fn oa_903_the_load_counts_running_and_waiting_work() {
    let server = Running::plain().await;
    let (_, version) = server.get("/version", "").await;
    assert!(
        version.ends_with(&format!(",\"commit\":\"{}\"}}", crate::COMMIT)),
        "{version}"
    );
    let work = [server.shared.drain.hold(), server.shared.drain.hold()];
    for (expect, work) in [(2, Some(work)), (0, None)] {
        let (_, load) = server.get("/load", "").await;
        let expect = format!("{{\"server_load\":{expect}}}");
        assert!(load.ends_with(&expect), "{load}");
        drop(work);
    }
}

/// OA-913: a lost engine is found without waiting for the watchdog.
#[tokio::test]
async fn oa_901_a_lost_engine_fails_liveness_and_is_named_among_the_parts() {
    let server = Running::plain().await;
    let health = &server.shared.health;
    health.running("fine", Box::new(|| Duration::ZERO));
    health.running("gone", Box::new(|| Duration::MAX));
    for path in ["/livez", "/readyz"] {
        let (status, answer) = server.get(path, "").await;
        assert_eq!(status, 503, "{path}");
        assert!(answer.contains("\"code\":\"engine_dead\""), "{answer}");
    }
    let (status, answer) = server.get("/readyz?verbose", "").await;
    assert_eq!(status, 503);
    let parts = "{\"status\":\"engine_dead\",\"parts\":{\"fine\":\"ok\",\"gone\":\"stuck\"}}";
    assert!(answer.ends_with(parts), "{answer}");
}

#[tokio::test]
async fn oa_101_errors_are_objects_on_every_path() {
    let server = Running::plain().await;
    for (path, status, code) in [
        ("/nothing", 404, "unknown_url"),
        ("/panic", 500, "internal_error"),
    ] {
        let (got, answer) = server.get(path, "x-request-id: mine-1\r\n").await;
        assert_eq!(got, status, "{answer}");
        assert!(answer.contains(&format!("\"code\":\"{code}\"")), "{answer}");
        assert!(answer.contains("\r\nx-request-id: mine-1\r\n"), "{answer}");
    }
    assert_eq!(server.shared.metrics.panics.get(), 1);
    let (status, _) = server.get("/", "origin: https://evil.example\r\n").await;
    assert_eq!(status, 403);
}

#[tokio::test]
async fn oa_908_pages_of_allowed_origins_may_call_and_no_others() {
    let key = ApiKey::new("app", "one", Scopes::ALL);
    let config = |origins: &[&str]| Config {
        origin: origin::Config {
            origins: origins.iter().map(|&origin| origin.into()).collect(),
            ..origin::Config::default()
        },
        ..Config::default()
    };
    let from = |origin: &str| format!("origin: {origin}\r\n");
    let preflight =
        "access-control-request-method: POST\r\naccess-control-request-headers: x-api-key\r\n";
    let server = Running::start(config(&["https://app.example"]), vec![key.clone()]).await;
    let asked = from("https://app.example") + preflight;
    let (status, answer) = server.ask("OPTIONS", "/work", &asked).await;
    assert_eq!(status, 204, "{answer}");
    for line in [
        "access-control-allow-origin: https://app.example",
        "access-control-allow-methods: POST",
        "access-control-allow-headers: x-api-key",
    ] {
        assert!(answer.contains(line), "{line}: {answer}");
    }
    assert!(!answer.contains("access-control-allow-credentials"));
    // A refusal must be readable for the page that caused it.
    for (secret, expect) in [("one", 200), ("two", 401)] {
        let asked = from("https://app.example") + "x-api-key: " + secret + "\r\n";
        let (status, answer) = server.get("/work", &asked).await;
        assert_eq!(status, expect);
        assert!(
            answer.contains("\r\naccess-control-allow-origin: https://app.example\r\n"),
            "{answer}"
        );
        assert!(
            answer.contains("access-control-expose-headers: x-request-id,"),
            "{answer}"
        );
    }
    let (status, answer) = server
        .ask(
            "OPTIONS",
            "/work",
            &(from("https://evil.example") + preflight),
        )
        .await;
    assert!(
        status == 403 && !answer.contains("access-control-allow-origin"),
        "{answer}"
    );
    let off = Running::start(config(&[]), Vec::new()).await;
    let (_, answer) = off
        .ask("OPTIONS", "/work", &(from("http://localhost") + preflight))
        .await;
    assert!(!answer.contains("access-control-"), "{answer}");
    let any = Running::start(config(&["*"]), Vec::new()).await;
    let (status, answer) = any.get("/work", &from("https://any.example")).await;
    assert!(
        status == 200 && answer.contains("access-control-allow-origin: https://any.example"),
        "{answer}"
    );
}

#[tokio::test]
async fn oa_905_no_route_of_any_face_answers_without_a_key() {
    let key = ApiKey::new("anna", "one", Scopes::ALL);
    let server = Running::start(Config::default(), vec![key]).await;
    for path in ["/", "/work", "/version", "/load", "/metrics", "/nothing"] {
        let (status, answer) = server.get(path, "").await;
        assert_eq!(status, 401, "{path}");
        assert!(answer.contains("www-authenticate: Bearer"), "{answer}");
        assert!(answer.contains("\"code\":\"invalid_api_key\""), "{answer}");
        let (status, _) = server.get(path, "authorization: Bearer one\r\n").await;
        assert_ne!(status, 401, "{path}");
    }
    for path in ["/health", "/livez", "/readyz", "/ping"] {
        assert_eq!(server.get(path, "").await.0, 200, "{path}");
    }
    assert_eq!(server.shared.metrics.auth_failures.get(), 6);
    let reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let (_, answer) = server
        .ask("POST", reflection, "content-type: application/grpc\r\n")
        .await;
    assert!(answer.contains("grpc-status: 16"), "{answer}");
}

/// OA-107: HTTP/2 by prior knowledge on the same port.
#[tokio::test]
async fn oa_901_grpc_health_follows_readiness() {
    let mut server = Running::start(drains(Duration::ZERO), Vec::new()).await;
    server.shared.health.loading("big");
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", server.address));
    let channel = endpoint.unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(channel);
    let ask = |service: &str| HealthCheckRequest {
        service: service.into(),
    };
    let mut watch = client
        .watch(ask("test.Service"))
        .await
        .unwrap()
        .into_inner();
    let mut next = async || watch.message().await.unwrap().unwrap().status;
    // The first status may still be the one from before `loading`.
    while next().await != 2 {}
    server
        .shared
        .health
        .running("big", Box::new(|| Duration::ZERO));
    while next().await != 1 {}
    assert_eq!(client.check(ask("")).await.unwrap().into_inner().status, 1);
    let missing = client.check(ask("no.such.Service")).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::NotFound);
    server.stop();
    while next().await != 2 {}
}

/// A health watcher is notified of the shutdown and does not delay it.
#[tokio::test]
async fn oa_904_a_drain_ends_health_watchers() {
    let mut server = Running::start(drains(Duration::from_secs(600)), Vec::new()).await;
    let work: DrainGuard = server.shared.drain.admit().unwrap();
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", server.address));
    let channel = endpoint.unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(channel);
    let watch = client.watch(HealthCheckRequest::default()).await;
    let mut watch = watch.unwrap().into_inner();
    assert!(watch.message().await.unwrap().is_some());
    server.stop();
    server.shared.drain.reached(DrainPhase::Refusing).await;
    let rest = async {
        let mut last = None;
        loop {
            match watch.message().await {
                Ok(Some(answer)) => last = Some(answer.status),
                Ok(None) => panic!("an end without a word"),
                Err(status) => return (last, status.code()),
            }
        }
    };
    let rest = timeout(Duration::from_secs(20), rest).await;
    let unavailable = tonic::Code::Unavailable;
    assert_eq!(rest.expect("it ends"), (Some(2), unavailable));
    drop(work);
    let ended = timeout(Duration::from_secs(20), server.ended).await;
    assert_eq!(ended.expect("nothing is waited for").unwrap().cut, 0);
}

#[tokio::test]
async fn oa_904_a_drain_refuses_new_work_and_counts_what_it_cut() {
    for stubborn in [false, true] {
        let deadline = Duration::from_secs(if stubborn { 0 } else { 600 });
        let mut server = Running::start(drains(deadline), Vec::new()).await;
        let work: DrainGuard = server.shared.drain.admit().unwrap();
        // An idle connection kept open by a client must not hold the drain up.
        let _idle = TcpStream::connect(server.address).await.unwrap();
        server.stop();
        server.shared.drain.reached(DrainPhase::Grace).await;
        assert_eq!(server.get("/readyz", "").await.0, 503);
        assert_eq!(server.get("/livez", "").await.0, 200);
        assert_eq!(server.shared.metrics.draining.get(), 1);
        if stubborn {
            server.shared.drain.reached(DrainPhase::Cutting).await;
        } else {
            server.shared.drain.reached(DrainPhase::Refusing).await;
        }
        let (status, answer) = server.get("/work", "").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.contains("\"code\":\"draining\"") && answer.contains("retry-after: 1"));
        assert!(answer.contains("connection: close"), "{answer}");
        drop(work);
        let address = server.address;
        assert_eq!(
            server.ended.await.unwrap(),
            DrainOutcome {
                cut: u64::from(stubborn)
            }
        );
        assert!(
            TcpStream::connect(address).await.is_err(),
            "the port is closed"
        );
    }
}

/// Also one without a generation or a session, such as the upload of a body.
#[tokio::test]
async fn oa_904_a_drain_waits_for_requests_whose_response_has_not_begun() {
    let mut server = Running::start(drains(Duration::from_secs(600)), Vec::new()).await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let head = "POST /take HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 4\r\n\
        expect: 100-continue\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    // The handler reads the body.
    let mut waited = [0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
    socket.read_exact(&mut waited).await.unwrap();
    server.stop();
    server.shared.drain.reached(DrainPhase::Refusing).await;
    assert_eq!(server.shared.drain.phase(), DrainPhase::Refusing);
    socket.write_all(b"body").await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("body"),
        "{answer}"
    );
    assert_eq!(server.ended.await.unwrap(), DrainOutcome { cut: 0 });
}

#[tokio::test]
async fn oa_911_a_silent_connection_is_dropped() {
    let listener = listener::Config {
        handshake: Duration::from_millis(20),
        idle: Duration::from_millis(20),
        ..listener::Config::default()
    };
    let server = Running::start(
        Config {
            listener,
            ..Config::default()
        },
        Vec::new(),
    )
    .await;
    let mut silent = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn oa_911_a_request_whose_head_never_ends_is_dropped() {
    let listener = listener::Config {
        handshake: Duration::from_millis(20),
        ..listener::Config::default()
    };
    let config = Config {
        listener,
        ..Config::default()
    };
    let server = Running::start(config, Vec::new()).await;
    let mut trickling = TcpStream::connect(server.address).await.unwrap();
    trickling.write_all(b"GET / HTTP/1.1\r\nhos").await.unwrap();
    let mut rest = Vec::new();
    let _ = trickling.read_to_end(&mut rest).await;
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 4"));
}

/// OA-911: one connection more than allowed waits in the backlog instead of being refused.
#[tokio::test]
async fn d_31_accepting_pauses_at_the_limit_of_connections() {
    let listener = listener::Config {
        connections: 1,
        ..listener::Config::default()
    };
    let server = Running::start(
        Config {
            listener,
            ..Config::default()
        },
        Vec::new(),
    )
    .await;
    let mut first = TcpStream::connect(server.address).await.unwrap();
    first
        .write_all(b"GET /work HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await
        .unwrap();
    first.read_exact(&mut [0; 12]).await.unwrap();
    let waiting = server.get("/work", "");
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    drop(first);
    assert_eq!(waiting.await.0, 200);
}

#[tokio::test]
async fn oa_911_requests_that_time_out_are_answered() {
    let config = Config {
        timeouts: timeouts::Config {
            body_idle: Duration::from_millis(20),
            ..timeouts::Config::default()
        },
        ..Config::default()
    };
    let server = Running::start(config, Vec::new()).await;
    let half = "content-type: text/plain\r\ncontent-length: 9\r\n";
    for (method, path, headers, expect) in [
        (
            "GET",
            "/never",
            "x-request-timeout-ms: 20\r\n",
            (500, "\"code\":\"timeout\""),
        ),
        ("POST", "/take", half, (408, "\"code\":\"request_timeout\"")),
        (
            "GET",
            "/work",
            "x-request-timeout-ms: soon\r\n",
            (400, "\"code\":\"invalid_value\""),
        ),
        (
            "GET",
            "/work",
            "x-request-timeout-ms: 600000\r\n",
            (200, "done"),
        ),
    ] {
        let (status, answer) = server.ask(method, path, headers).await;
        assert_eq!(status, expect.0, "{answer}");
        assert!(answer.contains(expect.1), "{answer}");
    }
}

/// Single bytes end each pause, but must not let a client hold memory of the byte budget.
#[tokio::test]
async fn d_47_a_body_that_arrives_too_slowly_is_answered() {
    let config = Config {
        timeouts: timeouts::Config {
            body_idle: Duration::from_millis(500),
            ..timeouts::Config::default()
        },
        ..Config::default()
    };
    let server = Running::start(config, Vec::new()).await;
    let socket = TcpStream::connect(server.address).await.unwrap();
    let (mut reads, mut writes) = socket.into_split();
    let head = "POST /take HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n";
    let begun = [head.as_bytes(), &[b'x'; 8192]].concat();
    writes.write_all(&begun).await.unwrap();
    let dripping = async {
        while writes.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let mut answer = vec![0; 12];
    tokio::select! {
        read = reads.read_exact(&mut answer) => drop(read.unwrap()),
        () = dripping => panic!("closed without an answer"),
    }
    assert_eq!(answer, b"HTTP/1.1 408");
}

/// Section 13: `header_bytes` at the limit and one past it.
#[tokio::test]
async fn oa_911_a_head_may_be_up_to_its_limit_long() {
    let listener = listener::Config {
        header_bytes: 16 * 1024,
        ..listener::Config::default()
    };
    let config = Config {
        listener,
        ..Config::default()
    };
    let server = Running::start(config, Vec::new()).await;
    let around = "GET /work HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: \r\n\r\n".len();
    for (bytes, expect) in [(16 * 1024, 200), (16 * 1024 + 1, 431)] {
        let long = format!("x: {}\r\n", "a".repeat(bytes - around));
        let (status, answer) = server.get("/work", &long).await;
        assert_eq!(
            status,
            expect,
            "{bytes}: {}",
            &answer[..200.min(answer.len())]
        );
    }
}

/// Section 13: `streams_per_connection`. A client that keeps to what it is told never sees this, so the frames are made
/// by hand: preface, settings, and requests that are never answered.
#[tokio::test]
async fn oa_911_one_stream_more_than_a_connection_may_have_is_refused() {
    let listener = listener::Config {
        streams_per_connection: 2,
        ..listener::Config::default()
    };
    let config = Config {
        listener,
        ..Config::default()
    };
    let server = Running::start(config, Vec::new()).await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let mut asked = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    // GET, http, `:path: /never`, `:authority: localhost`, none of them indexed or compressed.
    let block = b"\x82\x86\x04\x06/never\x01\x09localhost";
    for stream in [1, 3, 5] {
        asked.extend([
            0,
            0,
            u8::try_from(block.len()).unwrap(),
            1,
            5,
            0,
            0,
            0,
            stream,
        ]);
        asked.extend(block);
    }
    socket.write_all(&asked).await.unwrap();
    loop {
        let mut head = [0; 9];
        socket.read_exact(&mut head).await.unwrap();
        let length = usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        socket.read_exact(&mut payload).await.unwrap();
        assert_ne!(head[3], 7, "the connection lives");
        if head[3] == 3 {
            // RST_STREAM of the third one, REFUSED_STREAM.
            assert_eq!((head[8], &payload[..]), (5, &[0, 0, 0, 7][..]));
            return;
        }
    }
}
