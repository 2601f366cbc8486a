//! `https:` and `http:` references (EV-413, EV-414).
//!
//! Every web URL is fetched here whole, with its query, which an object store that takes the path as a key would lose
//! (EV-415).

use futures::{StreamExt, TryStreamExt, future};
use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, HOST, LOCATION, USER_AGENT};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyDataStream, Empty};
use hyper::body::{Body, Bytes};
use url::{Position, Url};

use super::error::{BadConfig, Error};
use super::exchange::{Dialler, Reach};
use super::hosts::Hosts;
use super::{Config, ResolvedContent};
use crate::http1::ResponseBody;
use crate::tls;

/// The allow lists of the web, and the client.
#[derive(Debug)]
pub(super) struct WebReferences {
    hosts: Hosts,
    private: Hosts,
    allow_http: bool,
    dialler: Dialler,
}

impl WebReferences {
    pub(super) fn new(config: &Config) -> Result<Self, BadConfig> {
        let mut tls = tls::client(config.authorities.as_deref())
            .map_err(|bad| BadConfig::new("ca", "PEM", bad))?;
        // The client has HTTP/1.1 only: a server without it fails the handshake, with an error that says so.
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            hosts: Hosts::read("hosts", &config.hosts)?,
            private: Hosts::read("private_hosts", &config.private_hosts)?,
            allow_http: config.allow_http,
            dialler: Dialler::new(tls),
        })
    }

    /// Opens the content of `uri`.
    pub(super) async fn open(&self, uri: &str) -> Result<ResolvedContent, Error> {
        // Before the URL is parsed: where the web is off, the answer is the same for every URL.
        if self.hosts.is_empty() && self.private.is_empty() {
            return Err(Error::Denied {
                what: "references to the web are",
                key: "hosts",
            });
        }
        let mut url = Url::parse(uri).map_err(|_| Error::Malformed("it is not a URL"))?;
        for _ in 0..=REDIRECTS_MAX {
            // In each round: a redirect must not lead to where the first URL could not (EV-414).
            let reach = self.check(&url)?;
            let answer = self.dialler.ask(&url, reach, request(&url)?).await?;
            match redirected(&url, &answer)? {
                None => return content(answer),
                Some(next) => url = next,
            }
        }
        Err(Error::Failed("it is redirected too often"))
    }

    /// Checks whether a URL is allowed; returns which addresses it may use.
    fn check(&self, url: &Url) -> Result<Reach, Error> {
        match url.scheme() {
            "https" => {}
            "http" if self.allow_http => {}
            "http" => {
                return Err(Error::Denied {
                    what: "a reference by http: is",
                    key: "allow_http",
                });
            }
            _ => return Err(Error::Refused("its redirect is not http: or https:")),
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(Error::Refused("it contains a user name or a password"));
        }
        if !url.has_host() {
            return Err(Error::Malformed("it has no host"));
        }
        // The private list first: a host on both may have a private address.
        if self.private.allow(url) {
            return Ok(Reach::Any);
        }
        if self.hosts.allow(url) {
            return Ok(Reach::Public);
        }
        Err(Error::Denied {
            what: "a reference to this host and port is",
            key: "hosts",
        })
    }
}

/// Builds a request without any information about the client.
fn request(url: &Url) -> Result<Request<Empty<Bytes>>, Error> {
    let malformed = |_: http::Error| Error::Malformed("it cannot be requested");
    // Neither cookies nor a referrer: a server must learn nothing of the client or of the pages before a redirect.
    Request::get(&url[Position::BeforePath..Position::AfterQuery])
        .header(HOST, &url[Position::BeforeHost..Position::AfterPort])
        .header(USER_AGENT, concat!("sapwood/", env!("CARGO_PKG_VERSION")))
        .header(ACCEPT, HeaderValue::from_static("*/*"))
        .header(ACCEPT_ENCODING, IDENTITY)
        .body(Empty::new())
        .map_err(malformed)
}

/// Returns the target of a redirect, if the response is one.
fn redirected(from: &Url, answer: &Response<ResponseBody>) -> Result<Option<Url>, Error> {
    if !REDIRECTS.contains(&answer.status()) {
        return Ok(None);
    }
    let nowhere = Error::Failed("its redirect has no valid target");
    let location = answer.headers().get(LOCATION).ok_or(nowhere)?;
    let location = location.to_str().map_err(|_| nowhere)?;
    let to = from.join(location).map_err(|_| nowhere)?;
    // Even where `allow_http` is on: what was asked for over TLS must not come in the clear (EV-414).
    if from.scheme() == "https" && to.scheme() != "https" {
        return Err(Error::Refused("its redirect downgrades https:"));
    }
    Ok(Some(to))
}

/// Returns the content of a response, if its status is a success.
fn content(answer: Response<ResponseBody>) -> Result<ResolvedContent, Error> {
    match answer.status() {
        // Not all of 2xx: a 206 without a range, for example, would be a part that is taken for the whole.
        StatusCode::OK | StatusCode::NON_AUTHORITATIVE_INFORMATION | StatusCode::NO_CONTENT => {}
        StatusCode::NOT_FOUND | StatusCode::GONE => return Err(Error::NotFound),
        other => return Err(Error::Answered(other.as_u16())),
    }
    let encoding = answer.headers().get(CONTENT_ENCODING);
    // Decompression is off (EV-416), or a small body could become a very large one.
    if encoding.is_some_and(|encoding| *encoding != IDENTITY) {
        return Err(Error::Failed("it is compressed, which was not requested"));
    }
    let body = answer.into_body();
    let bytes = body.size_hint().exact();
    let pieces = BodyDataStream::new(body)
        .map_err(|error| {
            tracing::debug!(%error, "an answer was cut off");
            Error::Failed("the answer was cut off")
        })
        .try_filter(|data| future::ready(!data.is_empty()));
    Ok(ResolvedContent {
        bytes,
        pieces: pieces.boxed(),
    })
}

/// The maximum of redirects (EV-414).
const REDIRECTS_MAX: u32 = 3;
const REDIRECTS: [StatusCode; 5] = [
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::FOUND,
    StatusCode::SEE_OTHER,
    StatusCode::TEMPORARY_REDIRECT,
    StatusCode::PERMANENT_REDIRECT,
];
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");
