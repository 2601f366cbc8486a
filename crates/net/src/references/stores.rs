//! `s3:`, `gs:` and `az:` references, through `object_store` (EV-413, EV-415).
//!
//! Requests to a store use the server's own credentials, so every bucket has to be listed. Endpoints are the operator's
//! choice and may be private, like the services of a cloud that issue credentials.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt, TryStreamExt};
use http::header::HOST;
use http::{HeaderValue, Uri};
use http_body_util::BodyExt;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig};
use sapwood_proto::secret::Secret;
use url::{Position, Url};

use super::error::{BadConfig, Error};
use super::exchange::{Dialler, Reach};
use super::{Config, ResolvedContent};
use crate::tls;

/// The listed buckets.
#[derive(Debug)]
pub(super) struct Stores(Vec<StoreEntry>);

#[derive(Debug)]
struct StoreEntry {
    scheme: String,
    bucket: String,
    prefix: Path,
    store: Arc<dyn ObjectStore>,
}

impl Stores {
    pub(super) fn new(config: &Config) -> Result<Self, BadConfig> {
        // Only those of the configuration: the environment may hold variables of other programs.
        check_options(&config.store_options)?;
        let tls = tls::client(config.authorities.as_deref())
            .map_err(|bad| BadConfig::new("ca", "PEM", bad))?;
        let connector = Connector(Dialler::new(tls));
        let options = [
            // In this order, because a later option replaces an earlier one of the same name.
            config.store_environment.as_slice(),
            config.store_options.as_slice(),
        ];
        let options = options.concat();
        let listed = config.stores.iter().map(|entry| {
            let bad = |why: &str| BadConfig::new("stores", entry, why);
            let target =
                ObjectUri::read(entry).map_err(|_| bad("write s3://BUCKET/PREFIX, gs: or az:"))?;
            let store = build(&target, &options, &connector);
            // The message of the error may contain options, and so credentials.
            let store = store
                .map_err(|_| bad("the store cannot be set up: check references.store_options"))?;
            Ok(StoreEntry {
                scheme: target.scheme,
                bucket: target.bucket,
                prefix: target.path,
                store,
            })
        });
        listed.collect::<Result<_, _>>().map(Self)
    }

    /// Opens the object of `uri`.
    pub(super) async fn open(&self, uri: &str) -> Result<ResolvedContent, Error> {
        let target = ObjectUri::read(uri)?;
        if target.path.as_ref().is_empty() {
            return Err(Error::Malformed("it does not name an object"));
        }
        // Parsed forms are compared: `Path` has resolved percent-encodings, and refuses `..`.
        let listed = self.0.iter().find(|listed| {
            listed.scheme == target.scheme
                && listed.bucket == target.bucket
                && target.path.prefix_matches(&listed.prefix)
        });
        let listed = listed.ok_or(Error::Denied {
            what: "a reference to this bucket is",
            key: "stores",
        })?;
        let found = listed
            .store
            .get(&target.path)
            .await
            .map_err(|error| rejection(&error))?;
        Ok(ResolvedContent {
            // The declared size; the caller limits what is read all the same.
            bytes: Some(found.meta.size),
            pieces: found
                .into_stream()
                .map_err(|error| rejection(&error))
                .boxed(),
        })
    }
}

fn rejection(error: &object_store::Error) -> Error {
    if matches!(error, object_store::Error::NotFound { .. }) {
        return Error::NotFound;
    }
    tracing::debug!(%error, "a store did not answer");
    Error::Failed("its store did not return it")
}

/// The parsed URI of an object.
#[derive(Debug)]
struct ObjectUri {
    scheme: String,
    bucket: String,
    path: Path,
}

impl ObjectUri {
    fn read(uri: &str) -> Result<Self, Error> {
        let malformed = Error::Malformed("write s3://BUCKET/KEY, without a query");
        let url = Url::parse(uri).map_err(|_| malformed)?;
        let plain = url.query().is_none()
            && url.fragment().is_none()
            && url.port().is_none()
            // Nothing that would be dropped silently, or select another object than the list was checked for.
            && url.username().is_empty()
            && url.password().is_none();
        if !plain || !SCHEMES.contains(&url.scheme()) {
            return Err(malformed);
        }
        let bucket = url.host_str().filter(|bucket| !bucket.is_empty());
        Ok(Self {
            scheme: url.scheme().to_owned(),
            bucket: bucket.ok_or(malformed)?.to_owned(),
            path: Path::from_url_path(url.path()).map_err(|_| malformed)?,
        })
    }
}

/// Checks the names of the options: they are those of `object_store`; a name that no store knows is an error.
fn check_options(options: &[(String, Secret)]) -> Result<(), BadConfig> {
    let known = |name: &str| {
        AmazonS3ConfigKey::from_str(name).is_ok()
            || GoogleConfigKey::from_str(name).is_ok()
            || AzureConfigKey::from_str(name).is_ok()
    };
    let unknown = options.iter().find(|(name, _)| !known(name));
    unknown.map_or(Ok(()), |(name, _)| {
        let why = "no store has such an option";
        Err(BadConfig::new("store_options", name, why))
    })
}

fn build(
    target: &ObjectUri,
    options: &[(String, Secret)],
    connector: &Connector,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let retry = RetryConfig {
        max_retries: RETRIES,
        retry_timeout: RETRY,
        ..RetryConfig::default()
    };
    // A macro, because the builders have the same methods but no trait.
    macro_rules! store {
        ($builder:ident, $with_bucket:ident) => {
            Arc::new(
                set(options, $builder::new(), $builder::with_config)
                    .$with_bucket(&target.bucket)
                    .with_http_connector(connector.clone())
                    .with_retry(retry)
                    .build()?,
            )
        };
    }
    Ok(match target.scheme.as_str() {
        "s3" => store!(AmazonS3Builder, with_bucket_name),
        "gs" => store!(GoogleCloudStorageBuilder, with_bucket_name),
        _ => store!(MicrosoftAzureBuilder, with_container_name),
    })
}

/// Sets the options that a store knows.
fn set<B, K: FromStr>(
    options: &[(String, Secret)],
    builder: B,
    with: impl Fn(B, K, String) -> B,
) -> B {
    let known = options
        .iter()
        .filter_map(|(name, value)| Some((name.parse().ok()?, value.expose().to_owned())));
    known.fold(builder, |builder, (key, value)| with(builder, key, value))
}

/// The HTTP client of this module, as `object_store` requires it.
#[derive(Clone, Debug)]
struct Connector(Dialler);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Connector {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let unusable = |_| HttpError::new(HttpErrorKind::Unknown, Error::Malformed("no URL"));
        let (mut parts, body) = request.into_parts();
        let url = Url::parse(&parts.uri.to_string()).map_err(unusable)?;
        // `exchange` sends a URI in origin form, and no `host` of its own.
        let target = &url[Position::BeforePath..Position::AfterQuery];
        parts.uri =
            Uri::try_from(target).map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let host = HeaderValue::from_str(&url[Position::BeforeHost..Position::AfterPort])
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        parts.headers.insert(HOST, host);
        let request = HttpRequest::from_parts(parts, body);
        // Endpoints come from the configuration alone, and credential services of clouds have link-local addresses
        // (EV-415).
        let answer = self.0.ask(&url, Reach::Any, request).await;
        let answer = answer.map_err(|error| HttpError::new(HttpErrorKind::Connect, error))?;
        let cut = |error| HttpError::new(HttpErrorKind::Interrupted, error);
        Ok(answer.map(|body| HttpResponseBody::new(body.map_err(cut))))
    }
}

const SCHEMES: [&str; 3] = ["s3", "gs", "az"];
/// More retries are useless, because a fetch has only ten seconds for its first byte.
const RETRIES: usize = 2;
const RETRY: Duration = Duration::from_secs(8);
