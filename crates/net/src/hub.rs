//! A client of model hubs: the files of a repository and their content, over the HTTP interface of the Hugging Face hub.
//!
//! ```text
//!   list ─► GET ENDPOINT/api/models/OWNER/REPO/revision/REV?blobs=true ─► commit, names, sizes, SHA-256
//!   open ─► GET ENDPOINT/OWNER/REPO/resolve/COMMIT/FILE ─► redirect to a content network, without the token
//! ```
//!
//! Retries and files are the caller's. The source of the interface is <https://huggingface.co/docs/hub/api>.

mod content;
mod error;
mod exchange;
mod listing;
mod proxy;

use std::fmt;
use std::time::Duration;

use http::header::{ACCEPT, CONTENT_ENCODING, IF_RANGE, RANGE};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use sapwood_proto::secret::Secret;
use tokio::time::timeout;
use url::Url;

pub use self::content::FileContent;
pub use self::error::HubError;
use self::exchange::Exchange;
pub use self::listing::{HubFile, HubListing, is_safe_path};
use self::proxy::Proxies;
pub use self::proxy::ProxySettings;
use crate::address::{bearer, exposes_key};

/// Settings of a [`HubClient`].
#[derive(Clone, Debug)]
pub struct Config {
    /// The hub, for example `https://huggingface.co`, or a mirror.
    pub endpoint: String,
    /// Sent as a bearer token, to the endpoint alone: never to where it redirects.
    pub token: Option<Secret>,
    /// Authorities (PEM) to trust beside the well-known ones.
    pub authorities: Option<Vec<u8>>,
    /// The proxies to go through.
    pub proxies: ProxySettings,
    /// The time limit of connecting, also through a proxy.
    pub connect_timeout: Duration,
    /// The time limit of a response head, and of each pause of a body; at most 1 day.
    pub stall_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            endpoint: "https://huggingface.co".into(),
            token: None,
            authorities: None,
            proxies: ProxySettings::default(),
            connect_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
        }
    }
}

/// The part of a file that is still needed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Missing<'a> {
    /// The first byte that is needed; 0: the whole file.
    pub from: u64,
    /// The [validator](FileContent::validator) of the bytes before it: if the file is another one by now, the whole of it
    /// is sent.
    pub validator: Option<&'a str>,
}

/// A client of one hub, and of files at any URL.
pub struct HubClient {
    endpoint: Url,
    exchange: Exchange,
    stall_timeout: Duration,
    exposes_token: bool,
    reader: Option<String>,
}

impl HubClient {
    /// A client with these settings. Nothing is connected yet.
    ///
    /// # Errors
    /// [`HubError::Address`]: the endpoint, the token or the authorities are invalid. A proxy that is invalid is an error
    /// of the requests that need it.
    pub fn new(config: &Config) -> Result<Self, HubError> {
        let mut endpoint = web_url(&config.endpoint)?;
        if endpoint.query().is_some() || endpoint.fragment().is_some() {
            let why = "the endpoint has a query or a fragment";
            return Err(HubError::Address(why.into()));
        }
        // More than clocks can count would be too much.
        let stall_timeout = config.stall_timeout.min(STALL_TIMEOUT_MAX);
        // Without the slash, joining would replace the last part of a mirror's path.
        if !endpoint.path().ends_with('/') {
            let path = format!("{}/", endpoint.path());
            endpoint.set_path(&path);
        }
        let token = config.token.as_ref().map(bearer).transpose();
        let token = token.map_err(|why| HubError::Address(why.into()))?;
        let proxies = Proxies::new(&config.proxies);
        let uri: Option<Uri> = endpoint.as_str().parse().ok();
        // A proxy on another machine is not asked for an endpoint on this one.
        let exposed_at = uri.filter(|uri| exposes_key(uri, token.is_some()));
        let reader = exposed_at.as_ref().and_then(|uri| {
            let proxy = proxies.of(uri).ok().flatten();
            Some(proxy.filter(|proxy| !proxy.is_local())?.name())
        });
        Ok(Self {
            exchange: Exchange {
                origin: endpoint.origin(),
                token,
                authorities: config.authorities.clone(),
                proxies,
                connect_timeout: config.connect_timeout,
                head_timeout: stall_timeout,
            },
            endpoint,
            stall_timeout,
            exposes_token: exposed_at.is_some(),
            reader,
        })
    }

    /// Whether the token would be sent unencrypted to another machine.
    #[must_use]
    pub const fn exposes_token(&self) -> bool {
        self.exposes_token
    }

    /// The proxy on another machine that would read the token, without credentials.
    #[must_use]
    pub fn reading_proxy(&self) -> Option<&str> {
        self.reader.as_deref()
    }

    /// The page of a repository, for people.
    ///
    /// # Errors
    /// [`HubError::Address`]: `repo` is no name of a repository.
    pub fn page(&self, repo: &str) -> Result<Url, HubError> {
        self.at(&[], repo, &[])
    }

    /// The address of a file of a repository.
    ///
    /// # Errors
    /// [`HubError::Address`]: `repo` is no name of a repository.
    pub fn file(&self, repo: &str, revision: &str, path: &str) -> Result<Url, HubError> {
        let mut rest = vec!["resolve", revision];
        rest.extend(path.split('/'));
        self.at(&[], repo, &rest)
    }

    /// The files of `repo` (`OWNER/NAME`) at a branch, tag or commit. Files whose names are not [safe](is_safe_path) are
    /// left out.
    ///
    /// # Errors
    /// [`HubError`].
    pub async fn list(&self, repo: &str, revision: &str) -> Result<HubListing, HubError> {
        let mut url = self.at(&["api", "models"], repo, &["revision", revision])?;
        url.set_query(Some("blobs=true"));
        let headers =
            HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static("application/json"))]);
        let answer = self.exchange.get(&url, &headers).await?;
        if answer.response.status() != StatusCode::OK {
            return Err(error::refused(&answer));
        }
        let body = Limited::new(answer.response.into_body(), LISTING_BYTES_MAX).collect();
        // The time limit is for the whole listing: it is small.
        let body = timeout(self.stall_timeout, body).await;
        let body = body.map_err(|_| HubError::Stalled)?;
        let body = body.map_err(|why| match why.is::<http_body_util::LengthLimitError>() {
            true => HubError::Protocol("the list of its files is too long"),
            false => HubError::Cut,
        })?;
        HubListing::read(&body.to_bytes())
    }

    /// Opens the content of a file. Dropping it stops the transfer.
    ///
    /// # Errors
    /// [`HubError`].
    pub async fn open(&self, url: &Url, missing: Missing<'_>) -> Result<FileContent, HubError> {
        let mut headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static("*/*"))]);
        if missing.from > 0 {
            let range = format!("bytes={}-", missing.from);
            let range = HeaderValue::try_from(range).map_err(|_| HubError::RangeRefused)?;
            headers.insert(RANGE, range);
            if let Some(validator) = missing.validator {
                let validator = HeaderValue::try_from(validator);
                headers.insert(IF_RANGE, validator.map_err(|_| HubError::RangeRefused)?);
            }
        }
        let answer = self.exchange.get(url, &headers).await?;
        match answer.response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => {}
            StatusCode::RANGE_NOT_SATISFIABLE => return Err(HubError::RangeRefused),
            _ => return Err(error::refused(&answer)),
        }
        let encoding = answer.response.headers().get(CONTENT_ENCODING);
        if encoding.is_some_and(|encoding| *encoding != "identity") {
            return Err(HubError::Protocol(
                "the server compresses the file, which was not requested",
            ));
        }
        FileContent::new(answer, missing.from, self.stall_timeout)
    }

    fn at(&self, before: &[&str], repo: &str, after: &[&str]) -> Result<Url, HubError> {
        let (owner, name) = repo
            .split_once('/')
            .ok_or_else(|| HubError::Address("a repository is OWNER/NAME".into()))?;
        let mut url = self.endpoint.clone();
        let repo = [owner, name];
        let segments = before.iter().chain(&repo).chain(after);
        // Encodes what has a meaning in URLs; a slash in a revision is no separator.
        url.path_segments_mut()
            .map_err(|()| HubError::Address("the endpoint is not a web address".into()))?
            .pop_if_empty()
            .extend(segments);
        Ok(url)
    }
}

impl fmt::Debug for HubClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubClient")
            .field("endpoint", &self.endpoint.as_str())
            .finish_non_exhaustive()
    }
}

/// Parses the address of a file or of a hub: `https:` or `http:`, without a user name or a password.
///
/// # Errors
/// [`HubError::Address`], which does not quote it.
pub fn web_url(text: &str) -> Result<Url, HubError> {
    let wrong = |why: &str| HubError::Address(why.into());
    let url = Url::parse(text).map_err(|_| wrong("it is not a URL"))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(wrong("it must begin with https:// or http://"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong("it contains a user name or a password"));
    }
    Ok(url)
}

const STALL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// The maximum of bytes of a listing.
const LISTING_BYTES_MAX: usize = 16 << 20;
