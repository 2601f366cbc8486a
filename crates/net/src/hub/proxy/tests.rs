//! A proxy and a hub in the test, on sockets of this machine. Nothing but the proxy knows where `hub.test` is.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::super::{Config, HubClient, HubListing};
use super::*;

type Heads = Arc<Mutex<Vec<String>>>;

/// Reads the head of a request.
async fn head(io: &mut (impl tokio::io::AsyncBufRead + Unpin)) -> Option<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if io.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

/// A server of one request per connection, which records the heads of all.
async fn serving(tls: Option<TlsAcceptor>, answer: Answer) -> (SocketAddr, Heads) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let heads = Heads::default();
    let seen = Arc::clone(&heads);
    // Ends with the runtime of the test.
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (tls, seen, answer) = (tls.clone(), Arc::clone(&seen), answer.clone());
            tokio::spawn(async move {
                let io: Box<dyn Io> = match tls {
                    Some(tls) => Box::new(tls.accept(tcp).await.ok()?),
                    None => Box::new(tcp),
                };
                let mut io = BufReader::new(io);
                let head = head(&mut io).await?;
                seen.lock().unwrap().push(head.clone());
                answer.send(&head, io).await
            });
        }
    });
    (address, heads)
}

/// What a server does with a request.
#[derive(Clone)]
enum Answer {
    Text(String),
    /// Connects to this address, whichever it is asked for.
    Tunnel(SocketAddr),
    /// Keeps the connection open.
    Nothing,
}

impl Answer {
    async fn send(&self, head: &str, mut io: BufReader<Box<dyn Io>>) -> Option<()> {
        match self {
            Self::Text(text) => io.write_all(text.as_bytes()).await.ok()?,
            Self::Tunnel(to) => {
                assert!(head.starts_with("CONNECT "), "{head}");
                let mut host = TcpStream::connect(to).await.ok()?;
                io.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.ok()?;
                copy_bidirectional(&mut io, &mut host).await.ok()?;
            }
            Self::Nothing => std::future::pending().await,
        }
        io.shutdown().await.ok()
    }

    fn status(status: &str) -> Self {
        Self::Text(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n"))
    }

    fn listing() -> Self {
        let body = format!(r#"{{"sha": "{}", "siblings": []}}"#, "0".repeat(40));
        let length = body.len();
        Self::Text(format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
    }
}

/// TLS for `hub.test` and `localhost`, and the authority to trust.
fn tls() -> (TlsAcceptor, Vec<u8>) {
    let names = ["hub.test", "localhost"].map(str::to_owned);
    let certified = rcgen::generate_simple_self_signed(names).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::Pkcs8(certified.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .unwrap();
    let pem = certified.cert.pem().into_bytes();
    (TlsAcceptor::from(Arc::new(tls)), pem)
}

fn settings(http: &str, https: &str, except: &str) -> ProxySettings {
    ProxySettings {
        http: Some(http.into()),
        https: Some(https.into()),
        all: None,
        except: except.to_owned(),
    }
}

fn config(endpoint: &str, proxies: ProxySettings) -> Config {
    Config {
        endpoint: endpoint.to_owned(),
        token: Some("hf_hush".into()),
        proxies,
        ..Config::default()
    }
}

async fn list(config: &Config) -> Result<HubListing, HubError> {
    HubClient::new(config)?.list("o/r", "main").await
}

#[tokio::test]
async fn https_addresses_are_tunnelled() {
    let (acceptor, pem) = tls();
    let (hub, at_hub) = serving(Some(acceptor.clone()), Answer::listing()).await;
    for tls in [None, Some(acceptor)] {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let (proxy, at_proxy) = serving(tls, Answer::Tunnel(hub)).await;
        let proxy = format!("{scheme}://user:p%40ss@localhost:{}", proxy.port());
        let config = Config {
            authorities: Some(pem.clone()),
            ..config("https://hub.test", settings("", &proxy, ""))
        };
        list(&config).await.unwrap();
        let heads = at_proxy.lock().unwrap().concat();
        assert!(
            heads.starts_with("CONNECT hub.test:443 HTTP/1.1\r\n"),
            "{heads}"
        );
        assert!(heads.contains("host: hub.test:443\r\n"), "{heads}");
        assert!(
            heads.contains("proxy-authorization: Basic dXNlcjpwQHNz\r\n"),
            "{heads}"
        );
        // What is for the hub goes to the hub alone, and what is for the proxy to the proxy.
        assert!(!heads.contains("hf_hush"), "{heads}");
        let heads = std::mem::take(&mut *at_hub.lock().unwrap()).concat();
        assert!(
            heads.contains("authorization: Bearer hf_hush\r\n"),
            "{heads}"
        );
        assert!(!heads.contains("proxy-authorization"), "{heads}");
    }
}

#[tokio::test]
async fn http_addresses_are_requested_from_the_proxy() {
    let (proxy, at_proxy) = serving(None, Answer::listing()).await;
    let proxy = format!("user:pass@{proxy}");
    list(&config(
        "http://hub.test:81/mirror",
        settings(&proxy, "", ""),
    ))
    .await
    .unwrap();
    let heads = at_proxy.lock().unwrap().concat();
    let first =
        "GET http://hub.test:81/mirror/api/models/o/r/revision/main?blobs=true HTTP/1.1\r\n";
    assert!(heads.starts_with(first), "{heads}");
    assert!(heads.contains("host: hub.test:81\r\n"), "{heads}");
    assert!(
        heads.contains("proxy-authorization: Basic dXNlcjpwYXNz\r\n"),
        "{heads}"
    );
}

#[tokio::test]
async fn what_has_no_proxy_is_requested_directly() {
    let (hub, at_hub) = serving(None, Answer::listing()).await;
    let endpoint = format!("http://{hub}");
    // Nothing listens at port 9, which is reserved for `discard`.
    for (http, https, except) in [
        ("http://127.0.0.1:9", "", "127.0.0.0/8"),
        ("", "http://127.0.0.1:9", ""),
    ] {
        list(&config(&endpoint, settings(http, https, except)))
            .await
            .unwrap();
    }
    let heads = at_hub.lock().unwrap().clone();
    assert_eq!(heads.len(), 2);
    assert!(
        heads.iter().all(|head| head.starts_with("GET /api/")),
        "{heads:?}"
    );
}

#[tokio::test]
async fn what_a_proxy_does_wrong_is_an_error_without_its_password() {
    let garbage = Answer::Text("SSH-2.0-x\r\n\r\n".to_owned());
    let long = Answer::Text(format!(
        "HTTP/1.1 200 OK\r\nx: {}\r\n\r\n",
        "y".repeat(HEAD_BYTES_MAX)
    ));
    let of_https = "https://hub.test";
    for (endpoint, answer, part, transient) in [
        (
            of_https,
            Answer::status("407 X"),
            "does not connect to hub.test (407)",
            false,
        ),
        (
            of_https,
            Answer::status("403 X"),
            "does not connect to hub.test (403)",
            false,
        ),
        (
            of_https,
            Answer::status("502 X"),
            "does not connect to hub.test (502)",
            true,
        ),
        (of_https, garbage, "the proxy does not speak HTTP", false),
        (of_https, long, "the proxy does not speak HTTP", false),
        (
            of_https,
            Answer::Text(String::new()),
            "does not answer (the connection was lost)",
            true,
        ),
        (
            of_https,
            Answer::Nothing,
            "hub.test through the proxy 127.0.0.1:",
            true,
        ),
        // No TLS comes through the tunnel.
        (
            of_https,
            Answer::Text("HTTP/1.1 200 OK\r\n\r\nhello, this is no TLS".to_owned()),
            "hub.test does not answer (it does not speak TLS)",
            true,
        ),
        (
            "http://hub.test",
            Answer::status("407 X"),
            "does not connect to hub.test (407)",
            false,
        ),
    ] {
        let connect_timeout = match answer {
            Answer::Nothing => Duration::from_millis(100),
            _ => Duration::from_secs(60),
        };
        let (proxy, _) = serving(None, answer).await;
        let proxy = format!("http://user:hush@{proxy}");
        let config = Config {
            connect_timeout,
            ..config(endpoint, settings(&proxy, &proxy, ""))
        };
        let error = list(&config).await.unwrap_err();
        let shown = format!("{error} {error:?} {config:?}");
        assert!(shown.contains(part), "{part}: {shown}");
        assert!(!shown.contains("hush"), "{shown}");
        assert_eq!(error.is_transient(), transient, "{shown}");
    }
}

#[tokio::test]
async fn a_proxy_that_is_not_there_is_an_error_without_its_password() {
    let nobody = settings("", "http://user:hush@127.0.0.1:9", "");
    let error = list(&config("https://hub.test", nobody)).await.unwrap_err();
    let shown = error.to_string();
    assert!(
        shown.starts_with("the proxy 127.0.0.1:9 does not answer"),
        "{shown}"
    );
}

#[test]
fn a_proxy_is_chosen_as_curl_and_pip_do() {
    let (http, https) = ("http://a:1", "b:2");
    let except = ".internal, example.com,10.0.0.0/8 ,fd00::1";
    for (uri, chosen) in [
        ("http://host/", Some("the proxy a:1")),
        ("https://host/", Some("the proxy b:2")),
        ("https://x.internal/", None),
        ("https://internal/", None),
        ("https://EXAMPLE.com:8443/", None),
        ("https://www.example.com/", None),
        ("https://notexample.com/", Some("the proxy b:2")),
        ("http://10.1.2.3/", None),
        ("http://11.1.2.3/", Some("the proxy a:1")),
        ("http://[fd00::1]:8/", None),
    ] {
        let chosen = chosen.map(str::to_owned);
        assert_eq!(of(&settings(http, https, except), uri), Ok(chosen), "{uri}");
    }
    let all = ProxySettings {
        all: Some("http://c:3".into()),
        http: Some("".into()),
        ..ProxySettings::default()
    };
    for uri in ["http://host/", "https://host/"] {
        let chosen = of(&all, uri);
        assert_eq!(chosen, Ok(Some("the proxy c:3".to_owned())), "{uri}");
    }
}

/// The name of the proxy for an address.
fn of(settings: &ProxySettings, uri: &str) -> Result<Option<String>, HubError> {
    let proxy = Proxies::new(settings).of(&uri.parse().unwrap())?;
    Ok(proxy.map(|it| it.name()))
}

#[test]
fn exceptions_are_read_however_they_are_written() {
    for (except, uri) in [
        ("*", "http://host/"),
        ("*", "http://192.0.2.1/"),
        ("*", "http://[2001:db8::1]/"),
        ("a b\thost", "http://host/"),
        ("a,,\n host ,", "http://host/"),
        ("host.", "http://host/"),
        ("host", "http://host./"),
        (".host.", "http://x.host.:80/"),
        ("[2001:db8::1]", "http://[2001:db8::1]:8080/"),
        ("[2001:db8::]/32", "http://[2001:db8::1]/"),
    ] {
        let settings = settings("http://a:1", "", except);
        assert_eq!(of(&settings, uri), Ok(None), "{except}: {uri}");
        let other = of(&settings, "http://other:80/");
        assert_eq!(other.unwrap().is_none(), except == "*", "{except}");
    }
}

#[test]
fn this_machine_is_reached_through_no_other() {
    for host in [
        "127.0.0.1:8080",
        "127.9.9.9",
        "[::1]",
        "localhost",
        "LOCALHOST.",
    ] {
        for scheme in ["http", "https"] {
            let uri = format!("{scheme}://{host}/");
            for far in ["http://corp:3128", "http://", "socks5://corp:1"] {
                assert_eq!(of(&settings(far, far, ""), &uri), Ok(None), "{uri} {far}");
            }
            let near = "http://[::1]:3128";
            let chosen = of(&settings(near, near, ""), &uri);
            assert_eq!(chosen, Ok(Some("the proxy [::1]:3128".to_owned())), "{uri}");
        }
    }
}

#[test]
fn a_proxy_that_cannot_be_used_is_refused_without_its_password() {
    for wrong in [
        "http://",
        "ftp://user:hush@p",
        "http://user:hush@[",
        "hush hush",
        "/hush",
        "http://user:p@hush@host:3128",
        "http://user:hush@h@h:1",
        "http://user:hush/ss@host:3128",
        "http://user:hush?ss@host:3128",
        "http://user:hush#ss@host:3128",
        "http://user:1/hush@host:3128",
        "user:1/hush@host:3128",
        "user:hush://ss@host:3128",
        "http://host:3128/hush",
        "http://host:3128/?hush",
        "http://host:3128//",
        "http://user:hush@host:",
        "http://user:hush@host:abc",
        "http://user:hush@host:99999",
        "http://user:hush@[::1]:99999",
        "http://user:hush",
    ] {
        for (settings, needed, other) in [
            (settings(wrong, "", ""), "http://far/", "https://far/"),
            (settings("", wrong, ""), "https://far/", "http://far/"),
        ] {
            // Whoever does not need it is not stopped by it.
            assert_eq!(of(&settings, other), Ok(None), "{wrong}");
            HubClient::new(&config(needed, settings.clone())).unwrap();
            let error = of(&settings, needed).unwrap_err();
            assert!(matches!(error, HubError::Proxy(_)), "{wrong}: {error:?}");
            assert!(!error.to_string().contains("hush"), "{error}");
            assert!(error.to_string().contains("HOST:PORT"), "{error}");
        }
    }
    let usable = [
        ("http://host:3128/", "the proxy host:3128"),
        ("http://user:p%40%2F%23%3F@host:3128", "the proxy host:3128"),
        ("user:pass@[::1]:1", "the proxy [::1]:1"),
        ("http://user@host", "the proxy host"),
        ("https://host", "the proxy host"),
    ];
    for (proxy, name) in usable {
        let chosen = of(&settings(proxy, "", ""), "http://far/");
        assert_eq!(chosen, Ok(Some(name.to_owned())), "{proxy}");
    }
    let socks = ProxySettings {
        all: Some("socks5h://user:hush@p:1080".into()),
        except: "near".to_owned(),
        ..ProxySettings::default()
    };
    assert_eq!(of(&socks, "https://near/"), Ok(None));
    let error = of(&socks, "https://far/").unwrap_err().to_string();
    assert!(
        error.contains("SOCKS") && !error.contains("hush"),
        "{error}"
    );
}

#[test]
fn a_token_that_a_proxy_reads_is_exposed() {
    for (endpoint, proxy, exposed, reader) in [
        ("http://127.0.0.1", "http://far:1", false, None),
        ("http://127.0.0.1", "http://127.0.0.1:1", false, None),
        ("http://127.0.0.1", "", false, None),
        ("https://far", "http://far:1", false, None),
        ("http://far", "", true, None),
        ("http://far", "http://127.0.0.1:1", true, None),
        (
            "http://far",
            "user:hush@corp:1",
            true,
            Some("the proxy corp:1"),
        ),
    ] {
        let mut config = config(endpoint, settings(proxy, proxy, ""));
        let client = HubClient::new(&config).unwrap();
        assert_eq!(client.exposes_token(), exposed, "{endpoint} {proxy}");
        assert_eq!(client.reading_proxy(), reader, "{endpoint} {proxy}");
        config.token = None;
        let client = HubClient::new(&config).unwrap();
        assert!(!client.exposes_token() && client.reading_proxy().is_none());
    }
}
