//! Fetches external content that references name (files, the web, object stores), as far as the operator allows it
//! (EV-412 to EV-415).
//!
//! ```text
//!   URI ──scheme──┬─► files    below a root, whatever links say; regular files only
//!                 ├─► web      a listed host at a public address, each redirect checked again
//!                 └─► stores   a listed bucket and prefix, with the server's credentials
//! ```
//!
//! Everything is off until a list names it. What is refused says which list would allow it.

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

/// What may be read. By default nothing.
#[derive(Clone, Default)]
pub struct Config {
    /// Directories whose regular files may be read.
    pub files: Vec<PathBuf>,
    /// Hosts that may be asked by `https:`: `example.com`, `*.example.com` for what is below it, an address, `*` for all.
    pub hosts: Vec<String>,
    /// Whether they may be asked by `http:` too.
    pub allow_http: bool,
    /// Hosts that may be asked although their addresses are not public. They need not stand in `hosts` as well.
    pub private_hosts: Vec<String>,
    /// Authorities (PEM) to trust beside the well-known ones.
    pub authorities: Option<Vec<u8>>,
    /// Buckets with a prefix: `s3://BUCKET/PREFIX`, also `gs` and `az`.
    pub stores: Vec<String>,
    /// How the stores are reached: credentials, regions, endpoints, under the names that `object_store` gives them.
    pub store_options: Vec<(String, Secret)>,
    /// The same as the environment has it: options win, and what no store knows is passed over.
    pub store_environment: Vec<(String, Secret)>,
}

/// Says nothing of options: they hold credentials.
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

/// Content that was found and is about to come.
pub struct ResolvedContent {
    /// How many bytes there will be, where that was declared.
    pub bytes: Option<u64>,
    /// The bytes; after an error nothing follows. Dropping ends it.
    pub pieces: BoxStream<'static, Result<Bytes, Error>>,
}

impl std::fmt::Debug for ResolvedContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Found")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// What may be read, and the ways to it.
#[derive(Debug)]
pub struct ReferenceResolver {
    files: FileReferences,
    web: WebReferences,
    #[cfg(feature = "stores")]
    stores: Stores,
}

impl ReferenceResolver {
    /// Opens the roots and reads the lists.
    ///
    /// # Errors
    /// Which entry cannot be used, and why.
    pub fn new(config: &Config) -> Result<Self, BadConfig> {
        #[cfg(not(feature = "stores"))]
        if let Some(entry) = config.stores.first() {
            let why = "this build knows no stores: build it with the cargo feature `stores`";
            return Err(BadConfig::new("stores", entry, why));
        }
        Ok(Self {
            files: FileReferences::new(&config.files)?,
            web: WebReferences::new(config)?,
            #[cfg(feature = "stores")]
            stores: Stores::new(config)?,
        })
    }

    /// Opens what `uri` names. Nothing happens before the first poll; dropping ends it.
    ///
    /// # Errors
    /// Why it cannot be read, in words that are safe for strangers.
    pub async fn open(&self, uri: &str) -> Result<ResolvedContent, Error> {
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
            _ => Err(Error::Malformed("it has no scheme that is known")),
        };
        if let Err(error) = &opened {
            // Neither path nor query: those are the stranger's.
            tracing::info!(scheme, %error, "a reference was not read");
        }
        opened
    }
}
