//! Resolver of references to external content (files, the web, object stores), as far as the operator allows it (EV-412
//! to EV-415).
//!
//! ```text
//!   URI ──scheme──┬─► files    below a root, regardless of links; regular files only
//!                 ├─► web      a listed host at a public address, each redirect checked again
//!                 └─► stores   a listed bucket and prefix, with the server's credentials
//! ```
//!
//! By default nothing is allowed. The error of a refused reference names the list that would allow it.

mod address;
mod error;
mod exchange;
mod files;
mod hosts;
#[cfg(feature = "stores")]
mod stores;
mod web;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use bytes::Bytes;
use futures::stream::BoxStream;
use sapwood_proto::secret::Secret;

use self::files::FileReferences;
#[cfg(feature = "stores")]
use self::stores::Stores;
use self::web::WebReferences;

pub use self::error::{BadConfig, Error};

/// Allow lists of what may be read. By default nothing.
#[derive(Clone, Default)]
pub struct Config {
    /// Directories whose regular files may be read.
    pub files: Vec<PathBuf>,
    /// Hosts that `https:` references may use: `example.com`, `*.example.com` for its subdomains, an address, `*` for
    /// all.
    pub hosts: Vec<String>,
    /// Whether `http:` references may use them too.
    pub allow_http: bool,
    /// Hosts that may be used although their addresses are not public. They need not be in `hosts` as well.
    pub private_hosts: Vec<String>,
    /// Authorities (PEM) to trust beside the well-known ones.
    pub authorities: Option<Vec<u8>>,
    /// Buckets with a prefix: `s3://BUCKET/PREFIX`, also `gs` and `az`.
    pub stores: Vec<String>,
    /// Options of the stores: credentials, regions, endpoints, by the names that `object_store` gives them.
    pub store_options: Vec<(String, Secret)>,
    /// The same options from the environment: `store_options` takes precedence, and names that no store knows are
    /// ignored.
    pub store_environment: Vec<(String, Secret)>,
}

/// Omits the options: they contain credentials.
impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("files", &self.files)
            .field("hosts", &self.hosts)
            .field("allow_http", &self.allow_http)
            .field("private_hosts", &self.private_hosts)
            .field("stores", &self.stores)
            .finish_non_exhaustive()
    }
}

/// Content that was found and can be streamed.
pub struct ResolvedContent {
    /// Number of bytes, if it was declared.
    pub bytes: Option<u64>,
    /// The bytes; after an error nothing follows. Dropping it stops the transfer.
    pub pieces: BoxStream<'static, Result<Bytes, Error>>,
}

impl std::fmt::Debug for ResolvedContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Found")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A resolver with its allow lists and clients.
#[derive(Debug)]
pub struct ReferenceResolver {
    files: FileReferences,
    web: WebReferences,
    #[cfg(feature = "stores")]
    stores: Stores,
}

impl ReferenceResolver {
    /// Opens the roots and parses the lists.
    ///
    /// # Errors
    /// Which entry cannot be used, and why.
    pub fn new(config: &Config) -> Result<Self, BadConfig> {
        #[cfg(not(feature = "stores"))]
        if let Some(entry) = config.stores.first() {
            let why = "this build has no object stores: build it with the cargo feature `stores`";
            return Err(BadConfig::new("stores", entry, why));
        }
        Ok(Self {
            files: FileReferences::new(&config.files)?,
            web: WebReferences::new(config)?,
            #[cfg(feature = "stores")]
            stores: Stores::new(config)?,
        })
    }

    /// Opens the content of `uri`. Nothing happens before the first poll; dropping the future cancels it.
    ///
    /// # Errors
    /// Why it cannot be read, as a text that is safe to send to clients.
    pub async fn open(&self, uri: &str) -> Result<ResolvedContent, Error> {
        // Only the scheme is taken from the text. Each resolver parses the rest by its own rules, and checks what it
        // has parsed.
        let scheme = uri.split_once(':').map_or("", |(scheme, _)| scheme);
        let opened = match scheme.to_ascii_lowercase().as_str() {
            "file" => self.files.open(uri).await,
            "http" | "https" => self.web.open(uri).await,
            #[cfg(feature = "stores")]
            "s3" | "gs" | "az" => self.stores.open(uri).await,
            #[cfg(not(feature = "stores"))]
            "s3" | "gs" | "az" => Err(Error::Denied {
                what: "references to object stores are",
                key: "stores",
            }),
            _ => Err(Error::Malformed("its scheme is not known")),
        };
        if let Err(error) = &opened {
            // Neither path nor query is logged: the client chose them, and they may be private.
            tracing::info!(scheme, %error, "a reference was not read");
        }
        opened
    }
}
