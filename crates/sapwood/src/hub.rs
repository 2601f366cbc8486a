//! Models by name: downloads them from a hub or a URL into a folder, and locks what is loaded (`docs/models.md`).
//!
//! ```text
//!   hf:OWNER/REPO:Q4_K_M ─► stored list of files ─► all there? ─► lock ─► path
//!                            ▲ missing                 │ no
//!                            └── the hub's list ◄──────┴─► download ─► lock ─► path
//! ```

mod download;
mod folder;
mod placement;
mod removal;
mod selection;
pub(crate) mod source;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use etcetera::BaseStrategy;
use sapwood_net::hub::{self, HubClient, HubError, HubListing};
use sapwood_proto::secret::Secret;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use url::Url;

use self::download::{DownloadError, RetryPolicy, WantedFile};
use self::folder::{CachedFile, FileLock, FileRecord, ModelFolder, NoLock};
use self::placement::download;
use self::selection::select;
use self::source::{HubSource, ModelChoice};
use crate::config::environment;
use crate::config::hub::HubConfig;
use crate::failure::CliError;

pub(crate) use self::download::shown_bytes;
pub(crate) use self::source::ModelSource;

/// The downloaded models, and those that this process has loaded. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct ModelCache(Arc<CacheInner>);

#[derive(Debug)]
struct CacheInner {
    config: HubConfig,
    /// The locks of loaded models, by the names under which they are served.
    loaded: Mutex<BTreeMap<String, Vec<FileLock>>>,
    /// Limits the downloads at the same time.
    downloads: Semaphore,
}

/// A downloaded model.
#[derive(Debug)]
pub(crate) struct CachedModel {
    /// What `--model` and `models rm` take.
    pub(crate) name: String,
    /// The bytes of all its files.
    pub(crate) bytes: u64,
    /// Whether all of it is there.
    pub(crate) is_complete: bool,
    /// When it was last loaded or written.
    pub(crate) used: SystemTime,
    /// Its first file.
    pub(crate) path: PathBuf,
}

impl ModelCache {
    /// The models of this configuration. Nothing is read yet.
    pub(crate) fn new(config: &HubConfig) -> Self {
        Self(Arc::new(CacheInner {
            config: config.clone(),
            loaded: Mutex::default(),
            downloads: Semaphore::new(DOWNLOADS_AT_ONCE),
        }))
    }

    /// The path of a model's first file, for the model that is served under `name`: downloaded if it is not there, and
    /// locked until [`Self::release`], together with what was acquired under this name before.
    ///
    /// # Errors
    /// Why it cannot be had, and a remedy.
    #[cfg_attr(
        not(feature = "embedded"),
        allow(dead_code, reason = "no model is loaded from a file")
    )]
    pub(crate) async fn acquire(
        &self,
        name: &str,
        source: &ModelSource,
    ) -> Result<PathBuf, CliError> {
        let (path, locks) = self.locked(source).await?;
        let mut loaded = self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.entry(name.to_owned()).or_default().extend(locks);
        Ok(path)
    }

    /// The first file of a model, and locks of all of them.
    async fn locked(&self, source: &ModelSource) -> Result<(PathBuf, Vec<FileLock>), CliError> {
        for _ in 0..LOCK_TRIES {
            let there = self.there(source)?;
            let files = match there {
                Some(files) => files,
                None => self.fetched(source).await?,
            };
            match files.iter().map(|file| FileLock::shared(file)).collect() {
                Ok(locks) => {
                    let first = files.into_iter().next().unwrap_or_default();
                    return Ok((first, locks));
                }
                // Somebody replaces or removes it: either takes no time.
                Err(NoLock::Held | NoLock::Gone) => sleep(LOCK_POLL).await,
                Err(NoLock::Io(error)) => {
                    return Err(CliError::new(format!("cannot read {source}: {error}")));
                }
            }
        }
        Err(CliError::new(format!(
            "{source} is being replaced or removed by another process; try again"
        )))
    }

    /// Unlocks the files of the model that is served under `name`.
    pub(crate) fn release(&self, name: &str) {
        let mut loaded = self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.remove(name);
    }

    /// Downloads a model that is to be loaded, or the usual one of those that are there if that is impossible.
    async fn fetched(&self, source: &ModelSource) -> Result<Vec<PathBuf>, CliError> {
        // Nobody closes it.
        let _permit = self.0.downloads.acquire().await;
        match (self.pull(source).await, source) {
            (Ok((files, _)), _) => Ok(files),
            (Err(why), ModelSource::Hub(hub)) if hub.choice == ModelChoice::Usual => {
                let Some(files) = self.of_those_there(hub)? else {
                    return Err(why);
                };
                let path = files.first().map(|first| first.display().to_string());
                tracing::warn!(%why, path, "a model that is there is loaded instead");
                Ok(files)
            }
            (Err(why), _) => Err(why),
        }
    }

    /// Whether a path is in the folder of downloaded models, where it may be replaced or removed while it is loaded.
    #[cfg_attr(
        not(feature = "embedded"),
        allow(dead_code, reason = "no model is loaded from a file")
    )]
    pub(crate) fn covers(&self, path: &Path) -> bool {
        let folder = self.folder().ok();
        let folder = folder.and_then(|folder| folder.0.canonicalize().ok());
        let path = path.canonicalize();
        folder.is_some_and(|folder| path.is_ok_and(|path| path.starts_with(folder)))
    }

    /// Whether a model is there, so that it can be loaded without a network.
    pub(crate) fn has(&self, source: &ModelSource) -> bool {
        matches!(self.there(source), Ok(Some(_)))
    }

    /// The first file of a model that is there. It is not locked: another process may replace or remove it.
    #[cfg_attr(
        not(feature = "embedded"),
        allow(dead_code, reason = "no model is loaded from a file")
    )]
    pub(crate) fn find(&self, source: &ModelSource) -> Option<PathBuf> {
        self.there(source).ok()??.into_iter().next()
    }

    /// Downloads the newest version of a model unless it is there; returns its files, and whether any was downloaded.
    ///
    /// # Errors
    /// Why it cannot be had, and a remedy.
    pub(crate) async fn pull(
        &self,
        source: &ModelSource,
    ) -> Result<(Vec<PathBuf>, bool), CliError> {
        let folder = self.folder()?;
        if self.0.config.offline {
            return Err(CliError::new(format!(
                "{source} is not in {}, and nothing is downloaded while hub.offline is set (SAPWOOD_HUB__OFFLINE, \
                 HF_HUB_OFFLINE)",
                folder.0.display()
            )));
        }
        let client = self.client()?;
        let (wanted, listing) = match source {
            ModelSource::File(path) => return Ok((vec![path.clone()], false)),
            ModelSource::Hub(hub) => {
                let (wanted, listing) = self.listed(&client, &folder, hub).await?;
                (wanted, Some((hub, listing)))
            }
            ModelSource::Url(url) => (wanted_of_url(&folder, url), None),
        };
        let downloaded = download(&client, self.policy(), &wanted).await;
        let is_new = downloaded.map_err(|error| {
            // Folders that were created for nothing.
            for parent in wanted.iter().filter_map(|file| file.path.parent()) {
                folder.prune(parent);
            }
            explained(source, &client, &error)
        })?;
        let paths: Vec<PathBuf> = wanted.into_iter().map(|file| file.path).collect();
        // Only now: what the repository's name stands for must be there.
        if let Some((hub, listing)) = listing {
            store_listing(&folder, hub, &listing, &paths)?;
        }
        Ok((paths, is_new))
    }

    /// All downloaded models, in the order of their names.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(crate) fn models(&self) -> Result<Vec<CachedModel>, CliError> {
        let folder = self.folder()?;
        let files = ModelFolder::files(&folder.0).map_err(|error| unreadable(&folder.0, &error))?;
        Ok(models(&folder, files))
    }

    /// The files of a model that is there.
    fn there(&self, source: &ModelSource) -> Result<Option<Vec<PathBuf>>, CliError> {
        let folder = self.folder()?;
        let whole = |files: Vec<PathBuf>| folder::are_whole(&files).then_some(files);
        let hub = match source {
            ModelSource::File(path) => {
                let siblings = folder::siblings(&path.to_string_lossy()).into_iter();
                let siblings: Vec<_> = siblings.map(PathBuf::from).collect();
                let all = siblings.iter().all(|path| path.is_file());
                return Ok(Some(if all { siblings } else { vec![path.clone()] }));
            }
            ModelSource::Url(url) => {
                let path = folder.of_url(url);
                let siblings = folder::siblings(&path.to_string_lossy());
                return Ok(whole(siblings.into_iter().map(PathBuf::from).collect()));
            }
            ModelSource::Hub(hub) => hub,
        };
        let below = folder.of_repo(hub);
        let joined = |selected: Vec<String>| -> Vec<PathBuf> {
            selected.iter().map(|path| below.join(path)).collect()
        };
        let is_usual = hub.choice == ModelChoice::Usual;
        // It stays the same one when a newer list is stored with another model.
        let usual = folder.usual(hub).filter(|_| is_usual);
        let usual = usual.map(|path| joined(folder::siblings(&path)));
        if let Some(files) = usual.and_then(whole) {
            return Ok(Some(files));
        }
        let listed = folder.listing(hub).and_then(|listing| {
            // A name that the stored list does not have may be in a newer one.
            select(&listed_paths(&listing), &hub.choice).ok()
        });
        if let Some(files) = listed.map(joined).and_then(whole) {
            return Ok(Some(files));
        }
        // What has left the repository, or was copied here without the list. Which quantisation is the usual one depends
        // on the others.
        if is_usual {
            return Ok(None);
        }
        self.of_those_there(hub)
    }

    /// The files of a choice among what is there, without the list of the repository.
    fn of_those_there(&self, hub: &HubSource) -> Result<Option<Vec<PathBuf>>, CliError> {
        let below = self.folder()?.of_repo(hub);
        let local = complete_below(&below)?;
        let local: Vec<&str> = local.iter().map(String::as_str).collect();
        let selected = select(&local, &hub.choice).unwrap_or_default();
        let files: Vec<PathBuf> = selected.iter().map(|path| below.join(path)).collect();
        Ok(folder::are_whole(&files).then_some(files))
    }

    /// Asks the hub for the files of a model, and all that the repository has.
    async fn listed(
        &self,
        client: &HubClient,
        folder: &ModelFolder,
        source: &HubSource,
    ) -> Result<(Vec<WantedFile>, HubListing), CliError> {
        let named = ModelSource::Hub(source.clone());
        let explain = |error: HubError| explained(&named, client, &error.into());
        // Fewer than for a transfer: nothing is lost yet, and without a network somebody waits for the error.
        let policy = RetryPolicy {
            retries: self.policy().retries.min(LISTING_RETRIES_MAX),
            ..self.policy()
        };
        let listing = download::retried(policy, || client.list(&source.repo, &source.revision));
        let listing = listing.await.map_err(explain)?;
        let wrong = |why: String| CliError::new(format!("{}: {why}", source.place()));
        let selected = select(&listed_paths(&listing), &source.choice).map_err(wrong)?;
        let below = folder.of_repo(source);
        let wanted = selected.iter().map(|path| {
            let file = listing.files.iter().find(|file| file.path == *path);
            let listed = file.and_then(|file| {
                Some(FileRecord {
                    bytes: file.bytes?,
                    sha256: file.sha256.clone(),
                    validator: None,
                    commit: Some(listing.commit.clone()),
                })
            });
            Ok(WantedFile {
                url: client.file(&source.repo, &listing.commit, path)?,
                path: below.join(path),
                listed,
            })
        });
        let wanted = wanted.collect::<Result<_, HubError>>().map_err(explain)?;
        Ok((wanted, listing))
    }

    fn client(&self) -> Result<HubClient, CliError> {
        let config = &self.0.config;
        let read = |path: &PathBuf| {
            std::fs::read(path)
                .map_err(|error| CliError::usage(format!("hub.ca {}: {error}", path.display())))
        };
        // A token from a file or a shell often has a line's end.
        let configured = config.token.as_ref();
        let configured = configured.map(|token| Secret::from(token.expose().trim()));
        let configured = configured.filter(|token| !token.is_empty());
        let login = || match config.is_foreign {
            true => None,
            false => environment::hub_token(),
        };
        let client = HubClient::new(&hub::Config {
            endpoint: config.endpoint.clone(),
            token: configured.or_else(login),
            authorities: config.ca.as_ref().map(read).transpose()?,
            proxies: config.proxies.clone(),
            stall_timeout: config.stall_timeout,
            ..hub::Config::default()
        });
        let client = client.map_err(|error| {
            CliError::usage(format!(
                "the hub cannot be used: {error}: see hub.endpoint (HF_ENDPOINT) and hub.token (HF_TOKEN)"
            ))
        })?;
        match client.reading_proxy() {
            Some(proxy) => tracing::warn!(
                server = config.endpoint,
                "the token is sent unencrypted to {proxy}, which can read it: use TLS (https://), or name the server in \
                 NO_PROXY"
            ),
            None if client.exposes_token() => {
                crate::config::endpoint::warn_of_plain_text(&config.endpoint);
            }
            None => {}
        }
        Ok(client)
    }

    fn policy(&self) -> RetryPolicy {
        RetryPolicy {
            retries: self.0.config.retries,
            wait: self.0.config.retry_wait,
        }
    }

    fn folder(&self) -> Result<ModelFolder, CliError> {
        let configured = self.0.config.dir.clone().or_else(default_folder);
        configured.map(ModelFolder).ok_or_else(|| {
            CliError::usage(
                "this user has no data folder: name one with hub.dir (SAPWOOD_HUB__DIR)",
            )
        })
    }

    fn unknown(&self, name: &str) -> CliError {
        let models = self.models().unwrap_or_default();
        let mut names: Vec<_> = models.iter().map(|model| model.name.as_str()).collect();
        names.truncate(NAMES_MAX);
        names.sort_by_cached_key(|known| selection::distance(known, name));
        names.truncate(SHOWN_MAX);
        CliError::new(match &names[..] {
            [] => format!("there is no downloaded model {name}, nor any other"),
            names => format!(
                "there is no downloaded model {name}; there are: {}",
                names.join(", ")
            ),
        })
    }
}

/// Stores the list of a repository, whose files `paths` were pulled.
fn store_listing(
    folder: &ModelFolder,
    hub: &HubSource,
    listing: &HubListing,
    paths: &[PathBuf],
) -> Result<(), CliError> {
    let below = folder.of_repo(hub);
    let usual = match (&hub.choice, paths.first()) {
        (ModelChoice::Usual, Some(first)) => {
            let first = first.strip_prefix(&below).unwrap_or(first);
            Some(first.to_string_lossy().into_owned())
        }
        _ => folder.usual(hub),
    };
    let stored = folder.store_listing(hub, listing, usual);
    stored.map_err(|error| CliError::new(format!("cannot write {}: {error}", below.display())))
}

/// All parts of the file of a URL.
fn wanted_of_url(folder: &ModelFolder, url: &Url) -> Vec<WantedFile> {
    let parts = folder::siblings(url.path()).into_iter().map(|path| {
        let mut url = url.clone();
        url.set_path(&path);
        WantedFile {
            path: folder.of_url(&url),
            url,
            listed: None,
        }
    });
    parts.collect()
}

/// Groups the files of split models.
fn models(folder: &ModelFolder, files: Vec<CachedFile>) -> Vec<CachedModel> {
    let mut models: BTreeMap<PathBuf, CachedModel> = BTreeMap::new();
    let there: BTreeMap<PathBuf, bool> = files
        .iter()
        .map(|file| (file.path.clone(), file.is_complete))
        .collect();
    for file in files {
        let parts = folder::siblings(&file.path.to_string_lossy());
        let first = PathBuf::from(parts.first().cloned().unwrap_or_default());
        let is_complete = || {
            let complete = |part: &String| there.get(Path::new(part)) == Some(&true);
            parts.iter().all(complete)
        };
        let model = models.entry(first.clone()).or_insert_with(|| CachedModel {
            name: folder.name(&first),
            bytes: 0,
            is_complete: is_complete(),
            used: file.used,
            path: first,
        });
        model.bytes += file.bytes;
        model.used = model.used.max(file.used);
    }
    models.into_values().collect()
}

/// The complete files below a folder, relative to it.
fn complete_below(folder: &Path) -> Result<Vec<String>, CliError> {
    let files = ModelFolder::files(folder).map_err(|error| unreadable(folder, &error))?;
    let complete = files.into_iter().filter(|file| file.is_complete);
    let relative = complete.map(|file| {
        let path = file.path.strip_prefix(folder).unwrap_or(&file.path);
        path.to_string_lossy().into_owned()
    });
    Ok(relative.collect())
}

fn listed_paths(listing: &HubListing) -> Vec<&str> {
    listing
        .files
        .iter()
        .map(|file| file.path.as_str())
        .collect()
}

/// An error with a remedy.
fn explained(source: &ModelSource, client: &HubClient, error: &DownloadError) -> CliError {
    let page = match source {
        ModelSource::Hub(hub) => client.page(&hub.repo).ok(),
        _ => None,
    };
    let page = page.map_or_else(|| "its page".to_owned(), |page| page.to_string());
    let hint = match error {
        DownloadError::Hub(HubError::Denied { gated: true, .. }) => format!(
            "; accept its terms at {page}, and set HF_TOKEN (hub.token) to a token of that account"
        ),
        DownloadError::Hub(HubError::Denied { .. }) => format!(
            "; check that {page} exists, and if it is private or gated, set HF_TOKEN (hub.token) to a token that may \
             read it"
        ),
        DownloadError::Hub(HubError::NotFound { .. }) => {
            format!("; check the name and the revision at {page}")
        }
        DownloadError::Hub(HubError::Unreachable { .. }) => {
            "; a model that is not downloaded yet needs a network. HF_ENDPOINT (hub.endpoint) names a mirror"
                .to_owned()
        }
        DownloadError::Hub(HubError::ProxyRefused { status: 407, .. }) => {
            "; put USER:PASSWORD@ before the proxy's host in HTTPS_PROXY or HTTP_PROXY".to_owned()
        }
        DownloadError::Hub(HubError::Proxy(_)) => {
            return CliError::usage(format!("{source}: {error}{PROXY_HINT}"));
        }
        DownloadError::Hub(error) if error.is_transient() => {
            "; what was received stays, and the next try goes on from there".to_owned()
        }
        _ => String::new(),
    };
    CliError::new(format!("{source}: {error}{hint}"))
}

fn unreadable(path: &Path, error: &io::Error) -> CliError {
    CliError::new(format!("cannot read {}: {error}", path.display()))
}

fn default_folder() -> Option<PathBuf> {
    let folders = etcetera::choose_base_strategy().ok()?;
    Some(folders.data_dir().join("sapwood").join("models"))
}

const PROXY_HINT: &str =
    ": see HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, and NO_PROXY for the hosts that need none";
/// Models that are downloaded at the same time; more would only share the network.
const DOWNLOADS_AT_ONCE: usize = 4;
/// How often a file that is being replaced is looked at again.
const LOCK_POLL: Duration = Duration::from_millis(50);
const LOCK_TRIES: u32 = 100;
/// The maximum of further attempts to get a list of files.
const LISTING_RETRIES_MAX: u32 = 2;
/// The maximum of names in an error.
const SHOWN_MAX: usize = 10;
/// The maximum of names that are compared for it.
const NAMES_MAX: usize = 1_000;

#[cfg(test)]
mod tests;
