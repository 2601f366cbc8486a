//! Local servers, which are in the list of private hosts.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

type Body = BoxBody<Bytes, Infallible>;

/// The requests of a server: target and headers.
pub(super) type Asked = Arc<Mutex<Vec<(String, HeaderMap)>>>;

/// Starts a server that answers with `answer`; returns its port and its requests.
pub(super) async fn serve(
    answer: impl Fn(&str, u16) -> Response<Body> + Clone + Send + Sync + 'static,
) -> (u16, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Asked::default();
    let noted = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (noted, answer) = (Arc::clone(&noted), answer.clone());
            let service = service_fn(move |request: Request<Incoming>| {
                let target = request.uri().to_string();
                let response = answer(&target, port);
                let headers = request.headers().clone();
                noted.lock().unwrap().push((target, headers));
                async move { Ok::<_, Infallible>(response) }
            });
            let serving = hyper::server::conn::http1::Builder::new();
            tokio::spawn(serving.serve_connection(TokioIo::new(tcp), service));
        }
    });
    (port, asked)
}

pub(super) fn answer(status: u16, headers: &[(&str, &str)], text: &'static str) -> Response<Body> {
    let builder = Response::builder().status(status);
    let builder = headers.iter().fold(builder, |builder, (name, value)| {
        builder.header(*name, *value)
    });
    builder.body(Full::from(text).boxed()).unwrap()
}

fn private(hosts: &[&str]) -> Config {
    Config {
        private_hosts: hosts.iter().map(|host| format!("{host}:*")).collect(),
        allow_http: true,
        ..Config::default()
    }
}

fn public(hosts: &[&str]) -> Config {
    Config {
        hosts: hosts.iter().map(ToString::to_string).collect(),
        allow_http: true,
        ..Config::default()
    }
}

fn text(text: &str) -> Result<(String, Option<u64>), Error> {
    Ok((text.to_owned(), Some(text.len() as u64)))
}

/// EV-413, EV-415
#[tokio::test]
async fn ev_415_a_url_is_requested_whole_and_without_client_data() {
    let (port, asked) = serve(|_, _| answer(200, &[], "content")).await;
    let uri = format!("http://127.0.0.1:{port}/a//b%2Fc/?q=1&r=%20#part");
    assert_eq!(fetch(&private(&["127.0.0.1"]), &uri).await, text("content"));
    let asked = asked.lock().unwrap();
    let [(target, headers)] = &asked[..] else {
        panic!("{asked:?}");
    };
    assert_eq!(target, "/a//b%2Fc/?q=1&r=%20");
    assert_eq!(headers["host"], format!("127.0.0.1:{port}"));
    assert_eq!(headers["accept-encoding"], "identity");
    let mut names: Vec<_> = headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["accept", "accept-encoding", "host", "user-agent"]);
}

#[tokio::test]
async fn ev_414_hosts_without_a_public_address_must_be_listed() {
    let (port, asked) = serve(|_, _| answer(200, &[], "inside")).await;
    for host in [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "0.0.0.0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[2001:0:7f00:1::]",
        "[fe80::1]",
    ] {
        let uri = format!("http://{host}:{port}/");
        let outcome = fetch(&public(&["*:*"]), &uri).await;
        assert_eq!(denied_by(outcome), "private_hosts", "{host}");
    }
    assert!(asked.lock().unwrap().is_empty());
    for host in ["127.0.0.1", "localhost", "2130706433"] {
        let config = private(&["127.0.0.1", "localhost"]);
        let uri = format!("http://{host}:{port}/");
        assert_eq!(fetch(&config, &uri).await, text("inside"), "{host}");
    }
}

#[tokio::test]
async fn ev_413_schemes_and_hosts_are_what_the_lists_allow() {
    let plain = Config {
        allow_http: false,
        ..public(&["example.com"])
    };
    for (config, uri, key) in [
        (&plain, "http://example.com/", "allow_http"),
        (&plain, "https://example.org/", "hosts"),
        (&plain, "https://a.example.com/", "hosts"),
        (&plain, "https://127.0.0.1/", "hosts"),
    ] {
        assert_eq!(denied_by(fetch(config, uri).await), key, "{uri}");
    }
    for uri in [
        "https://user@example.com/",
        "https://user:secret@example.com/",
        "https://:secret@example.com/",
    ] {
        let refused = fetch(&plain, uri).await.unwrap_err();
        assert!(matches!(refused, Error::Refused(_)), "{uri}: {refused:?}");
    }
    for uri in [
        "https://",
        "https:///",
        "http://[",
        "https://a b/",
        "https://example.com:99999/",
    ] {
        let refused = fetch(&plain, uri).await.unwrap_err();
        assert!(matches!(refused, Error::Malformed(_)), "{uri}: {refused:?}");
    }
}

#[tokio::test]
async fn ev_414_every_redirect_is_checked_again_and_there_are_three_at_most() {
    let (port, asked) = serve(|target, port| {
        let to = match target {
            "/end" => return answer(200, &[], "end"),
            "/1" => "/end".to_owned(),
            "/2" => "1".to_owned(),
            "/3" => format!("http://127.0.0.1:{port}/2"),
            "/4" => "//127.0.0.1/3".replacen("127.0.0.1", &format!("127.0.0.1:{port}"), 1),
            "/round" => "/round".to_owned(),
            "/private" => format!("http://localhost:{port}/end"),
            "/literal" => "http://169.254.169.254/latest/meta-data/".to_owned(),
            "/file" => "file:///etc/passwd".to_owned(),
            "/user" => format!("http://user:secret@127.0.0.1:{port}/end"),
            _ => return answer(302, &[], ""),
        };
        answer(302, &[("location", &to)], "not this")
    })
    .await;
    let config = Config {
        hosts: vec!["*:*".into()],
        ..private(&["127.0.0.1"])
    };
    for (path, expect) in [
        ("1", text("end")),
        ("2", text("end")),
        ("3", text("end")),
        ("4", Err(Error::Failed("it is redirected too often"))),
        ("round", Err(Error::Failed("it is redirected too often"))),
        (
            "file",
            Err(Error::Refused("its redirect is not http: or https:")),
        ),
        (
            "user",
            Err(Error::Refused("it contains a user name or a password")),
        ),
        (
            "nowhere",
            Err(Error::Failed("its redirect has no valid target")),
        ),
    ] {
        let uri = format!("http://127.0.0.1:{port}/{path}");
        assert_eq!(fetch(&config, &uri).await, expect, "{path}");
    }
    for path in ["private", "literal"] {
        let uri = format!("http://127.0.0.1:{port}/{path}");
        assert_eq!(
            denied_by(fetch(&config, &uri).await),
            "private_hosts",
            "{path}"
        );
    }
    let rounds = asked.lock().unwrap();
    let rounds = rounds.iter().filter(|(target, _)| target == "/round");
    assert_eq!(rounds.count(), 4);
}

#[tokio::test]
async fn ev_414_responses_are_content_or_an_error() {
    let (port, _) = serve(|target, _| match target {
        "/gzip" => answer(200, &[("content-encoding", "gzip")], "packed"),
        "/identity" => answer(200, &[("content-encoding", "identity")], "plain"),
        status => answer(status[1..].parse().unwrap(), &[], "text"),
    })
    .await;
    for (path, expect) in [
        ("200", text("text")),
        ("203", text("text")),
        ("204", text("")),
        ("identity", text("plain")),
        ("206", Err(Error::Answered(206))),
        ("304", Err(Error::Answered(304))),
        ("401", Err(Error::Answered(401))),
        ("404", Err(Error::NotFound)),
        ("410", Err(Error::NotFound)),
        ("500", Err(Error::Answered(500))),
    ] {
        let uri = format!("http://127.0.0.1:{port}/{path}");
        assert_eq!(
            fetch(&private(&["127.0.0.1"]), &uri).await,
            expect,
            "{path}"
        );
    }
    let uri = format!("http://127.0.0.1:{port}/gzip");
    let packed = fetch(&private(&["127.0.0.1"]), &uri).await;
    assert!(
        matches!(packed, Err(Error::Failed(_))),
        "EV-416: decompression is off"
    );
}

/// EV-416
#[tokio::test]
async fn ev_416_a_length_is_declared_or_not() {
    let (port, _) = serve(|target, _| {
        if target == "/declared" {
            return answer(200, &[], "four");
        }
        let frames = ["fo", "", "ur"].map(|text| Ok(Frame::data(Bytes::from(text))));
        let body = StreamBody::new(futures::stream::iter(frames));
        Response::new(BodyExt::boxed(body))
    })
    .await;
    for (path, bytes) in [("declared", Some(4)), ("streamed", None)] {
        let uri = format!("http://127.0.0.1:{port}/{path}");
        let read = fetch(&private(&["127.0.0.1"]), &uri).await;
        assert_eq!(read, Ok(("four".to_owned(), bytes)), "{path}");
    }
}

/// A server that sends these bytes and then closes.
async fn send(bytes: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut tcp, _) = listener.accept().await.unwrap();
        let mut head = [0; 1024];
        let _ = tcp.read(&mut head).await;
        let _ = tcp.write_all(bytes).await;
    });
    port
}

#[tokio::test]
async fn ev_414_truncated_and_invalid_responses_fail() {
    for bytes in [
        &b""[..],
        b"SSH-2.0-something\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n",
    ] {
        let port = send(bytes).await;
        let uri = format!("http://127.0.0.1:{port}/");
        let outcome = fetch(&private(&["127.0.0.1"]), &uri).await;
        assert!(matches!(outcome, Err(Error::Failed(_))), "{outcome:?}");
    }
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let uri = format!("http://127.0.0.1:{port}/");
    let outcome = fetch(&private(&["127.0.0.1"]), &uri).await;
    assert_eq!(outcome, Err(Error::Failed("its host does not answer")));
}

/// Dropping the content, or the future that opens it, closes the connection.
#[tokio::test]
async fn ev_416_dropping_ends_the_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let uri = format!("http://127.0.0.1:{port}/");
    let references = ReferenceResolver::new(&private(&["127.0.0.1"])).unwrap();
    let mut head = [0; 1024];
    for states in [
        &b""[..],
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
    ] {
        let asking = async {
            let found = references.open(&uri).await.unwrap();
            let mut pieces = found.pieces;
            assert_eq!(pieces.try_next().await.unwrap().unwrap(), "short");
            pieces.try_next().await.map(drop)
        };
        let removed = async {
            let (mut tcp, _) = listener.accept().await.unwrap();
            assert!(tcp.read(&mut head).await.unwrap() > 0);
            tcp.write_all(states).await.unwrap();
            tcp
        };
        let mut tcp = tokio::select! {
            tcp = removed => tcp,
            ended = asking => panic!("{ended:?}"),
        };
        // The client's side was dropped by now.
        assert!(matches!(tcp.read(&mut head).await, Ok(0) | Err(_)));
    }
}

#[tokio::test]
async fn ev_414_certificates_are_checked_and_redirects_never_lead_from_https_to_http() {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::Pkcs8(certified.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let Ok(io) = acceptor.accept(tcp).await else {
                continue;
            };
            let service = service_fn(|request: Request<Incoming>| async move {
                Ok::<_, Infallible>(match request.uri().path() {
                    "/down" => answer(302, &[("location", "http://localhost/")], ""),
                    _ => answer(200, &[], "secret"),
                })
            });
            let serving = hyper::server::conn::http1::Builder::new();
            tokio::spawn(serving.serve_connection(TokioIo::new(io), service));
        }
    });
    let trusting = Config {
        authorities: Some(certified.cert.pem().into_bytes()),
        ..private(&["localhost", "127.0.0.1"])
    };
    let uri = format!("https://localhost:{port}/");
    assert_eq!(fetch(&trusting, &uri).await, text("secret"));
    let down = fetch(&trusting, &format!("{uri}down")).await;
    assert_eq!(down, Err(Error::Refused("its redirect downgrades https:")));
    let bad = Err(Error::Failed("the TLS handshake with its server failed"));
    let other_name = format!("https://127.0.0.1:{port}/");
    assert_eq!(fetch(&trusting, &other_name).await, bad);
    let nobody = private(&["localhost"]);
    assert_eq!(fetch(&nobody, &uri).await, bad);
}
