//! Sends GET requests and follows redirects. The token goes to the hub alone.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, HOST, LOCATION, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::Empty;
use tokio::time::timeout;
use url::{Origin, Position, Url};

use super::error::HubError;
use super::proxy::{Proxies, Proxy};
use crate::connection::{ConnectError, Io, connect, distrust, is_secure};
use crate::http1::{ResponseBody, exchange};

/// How requests are sent.
pub(super) struct Exchange {
    /// The scheme, host and port that the token is for.
    pub(super) origin: Origin,
    pub(super) token: Option<HeaderValue>,
    pub(super) authorities: Option<Vec<u8>>,
    pub(super) proxies: Proxies,
    pub(super) connect_timeout: Duration,
    pub(super) head_timeout: Duration,
}

/// The answer at the end of all redirects.
pub(super) struct HubAnswer {
    pub(super) response: Response<ResponseBody>,
    /// The host that it came from.
    pub(super) host: String,
    /// `x-linked-etag`: the hub's own name of the content, on whichever of its answers it is.
    pub(super) linked_etag: Option<HeaderValue>,
    /// `x-linked-size`: its bytes.
    pub(super) linked_size: Option<HeaderValue>,
}

impl Exchange {
    /// The answer to a GET of `url`.
    ///
    /// # Errors
    /// No server answers, or it does not speak HTTP, or it redirects too often or to where it must not. Every status is
    /// an answer.
    pub(super) async fn get(&self, url: &Url, headers: &HeaderMap) -> Result<HubAnswer, HubError> {
        let first = url.origin();
        let mut url = url.clone();
        let (mut linked_etag, mut linked_size) = (None, None);
        for _ in 0..=REDIRECTS_MAX {
            let response = self.ask(&url, headers).await?;
            // Only from where the caller has asked: a content network knows nothing of the hub's names.
            if url.origin() == first {
                let linked = |name| response.headers().get(name).cloned();
                linked_etag = linked_etag.or_else(|| linked("x-linked-etag"));
                linked_size = linked_size.or_else(|| linked("x-linked-size"));
            }
            match redirected(&url, response.status(), response.headers())? {
                Some(next) => url = next,
                None => {
                    return Ok(HubAnswer {
                        response,
                        host: host(&url),
                        linked_etag,
                        linked_size,
                    });
                }
            }
        }
        Err(HubError::Protocol("it is redirected too often"))
    }

    async fn ask(
        &self,
        url: &Url,
        headers: &HeaderMap,
    ) -> Result<Response<ResponseBody>, HubError> {
        let bad = || HubError::Address("it cannot be requested".into());
        let uri: Uri = url.as_str().parse().map_err(|_| bad())?;
        let path = &url[Position::BeforePath..Position::AfterQuery];
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.uri_mut() = path.parse().map_err(|_| bad())?;
        *request.headers_mut() = headers.clone();
        let authority = &url[Position::BeforeHost..Position::AfterPort];
        let authority = HeaderValue::from_str(authority).map_err(|_| bad())?;
        let mut header = |name, value| request.headers_mut().insert(name, value);
        header(HOST, authority);
        header(USER_AGENT, HeaderValue::from_static(AGENT));
        // Sizes and ranges are those of the file, which would not hold for a compressed one.
        header(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(token) = &self.token
            && url.origin() == self.origin
        {
            header(AUTHORIZATION, token.clone());
        }
        let host = host(url);
        let proxy = self.proxies.of(&uri)?;
        // Over TLS it is the host that answers.
        let answering = proxy.as_ref().filter(|_| !is_secure(&uri));
        if let Some(proxy) = answering {
            proxy.address(&mut request, &host).map_err(|_| bad())?;
        }
        let io = self.dial(&uri, &host, proxy.as_ref()).await?;
        match timeout(self.head_timeout, exchange(io, request)).await {
            Ok(Ok(response)) => match answering {
                Some(proxy) if response.status() == StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                    Err(proxy.refused(&host, response.status()))
                }
                _ => Ok(response),
            },
            Ok(Err(error)) if error.is_parse() => {
                Err(HubError::Protocol("the server does not speak HTTP"))
            }
            Ok(Err(_)) => Err(HubError::Cut),
            Err(_) => Err(HubError::Stalled),
        }
    }

    /// Connects to the host of `uri`, directly or through a proxy.
    async fn dial(
        &self,
        uri: &Uri,
        host: &str,
        proxy: Option<&Proxy>,
    ) -> Result<Box<dyn Io>, HubError> {
        let authorities = self.authorities.as_deref();
        let dialled = async {
            match proxy {
                Some(proxy) => proxy.connect(uri, host, authorities).await,
                None => {
                    let io = connect(uri, authorities).await;
                    io.map_err(|error| unreachable(host, error))
                }
            }
        };
        match timeout(self.connect_timeout, dialled).await {
            Ok(dialled) => dialled,
            Err(_) => Err(HubError::Unreachable {
                host: match proxy {
                    Some(proxy) => format!("{host} through {}", proxy.name()),
                    None => host.to_owned(),
                },
                why: "it did not accept a connection in time".into(),
            }),
        }
    }
}

/// The error of a connection that failed.
pub(super) fn unreachable(host: &str, error: ConnectError) -> HubError {
    match error {
        ConnectError::Bad(why) => HubError::Address(why.into()),
        ConnectError::Unreachable(error) => HubError::Unreachable {
            host: host.to_owned(),
            why: distrust(&error).map_or_else(|| error.to_string(), str::to_owned),
        },
    }
}

/// The target of a redirect, if the response is one.
fn redirected(
    from: &Url,
    status: StatusCode,
    headers: &HeaderMap,
) -> Result<Option<Url>, HubError> {
    if !REDIRECTS.contains(&status) {
        return Ok(None);
    }
    let nowhere = HubError::Protocol("its redirect has no valid target");
    let location = headers.get(LOCATION);
    let location = location.and_then(|location| location.to_str().ok());
    let to = location.and_then(|location| from.join(location).ok());
    let to = to.ok_or(nowhere)?;
    if !matches!(to.scheme(), "http" | "https") {
        return Err(HubError::Protocol(
            "it is redirected to something that is not the web",
        ));
    }
    // What was asked for over TLS must not come in plain text.
    if from.scheme() == "https" && to.scheme() != "https" {
        return Err(HubError::Protocol("it is redirected from https: to http:"));
    }
    Ok(Some(to))
}

fn host(url: &Url) -> String {
    url[Position::BeforeHost..Position::AfterPort].to_owned()
}

pub(super) const AGENT: &str = concat!("sapwood/", env!("CARGO_PKG_VERSION"));
/// The maximum of redirects of one request.
const REDIRECTS_MAX: u32 = 5;
const REDIRECTS: [StatusCode; 5] = [
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::FOUND,
    StatusCode::SEE_OTHER,
    StatusCode::TEMPORARY_REDIRECT,
    StatusCode::PERMANENT_REDIRECT,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_leads_to_the_web_and_not_out_of_tls() {
        for (from, location, to) in [
            (
                "https://h/a/b",
                "https://cdn/x?sig=1",
                Some("https://cdn/x?sig=1"),
            ),
            ("https://h/a/b", "/c", Some("https://h/c")),
            ("https://h/a/b", "c", Some("https://h/a/c")),
            ("http://h/a", "https://h/a", Some("https://h/a")),
            ("https://h/a", "http://h/a", None),
            ("https://h/a", "//cdn/a", Some("https://cdn/a")),
            ("http://h/a", "file:///etc/passwd", None),
            ("http://h/a", "data:,x", None),
            ("http://h/a", "http://[", None),
        ] {
            let from = Url::parse(from).unwrap();
            let headers = HeaderMap::from_iter([(LOCATION, location.parse().unwrap())]);
            let redirect = redirected(&from, StatusCode::FOUND, &headers);
            let redirect = redirect.ok().flatten();
            assert_eq!(redirect.as_ref().map(Url::as_str), to, "{location}");
            // What it says does not count on another status.
            assert_eq!(redirected(&from, StatusCode::OK, &headers), Ok(None));
        }
        let from = Url::parse("https://h/").unwrap();
        assert!(redirected(&from, StatusCode::FOUND, &HeaderMap::new()).is_err());
    }
}
