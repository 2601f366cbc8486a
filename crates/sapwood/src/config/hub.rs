//! The keys of `[hub]`: where models that are named and not at a path come from, and where they are stored.

use std::path::PathBuf;
use std::time::Duration;

use sapwood_net::hub::{ProxySettings, web_url};
use sapwood_proto::secret::Secret;
use serde::{Deserialize, Serialize};

use crate::failure::CliError;

/// Downloads of models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HubConfig {
    /// The folder of downloaded models; default: `sapwood/models` in the user's data folder.
    pub(crate) dir: Option<PathBuf>,
    /// The hub, or a mirror of it.
    pub(crate) endpoint: String,
    /// The token to send to it; else that of the file which the hub's own tools write.
    #[serde(deserialize_with = "super::secret")]
    pub(crate) token: Option<Secret>,
    /// The endpoint comes from a file that was found and not named: the user's own token is not for it.
    #[serde(skip)]
    pub(crate) is_foreign: bool,
    /// The proxies of the environment.
    #[serde(skip)]
    pub(crate) proxies: ProxySettings,
    /// PEM file of authorities to trust beside the well-known ones.
    pub(crate) ca: Option<PathBuf>,
    /// Download nothing.
    pub(crate) offline: bool,
    /// A transfer that receives less than 16 KiB in this time is tried again.
    #[serde(with = "humantime_serde")]
    pub(crate) stall_timeout: Duration,
    /// How often in a row a transfer is tried again.
    pub(crate) retries: u32,
    /// The wait before the first of these; doubled for each further one.
    #[serde(with = "humantime_serde")]
    pub(crate) retry_wait: Duration,
}

impl Default for HubConfig {
    fn default() -> Self {
        Self {
            dir: None,
            endpoint: sapwood_net::hub::Config::default().endpoint,
            token: None,
            is_foreign: false,
            proxies: ProxySettings::default(),
            ca: None,
            offline: false,
            stall_timeout: Duration::from_secs(30),
            retries: 5,
            retry_wait: Duration::from_secs(1),
        }
    }
}

impl HubConfig {
    /// Checks what the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(super) fn check(&self) -> Result<(), CliError> {
        // Not the endpoint: a wrong HF_ENDPOINT is no reason for a command to fail that needs no hub.
        if self.stall_timeout.is_zero() || self.stall_timeout > STALL_TIMEOUT_MAX {
            return Err(CliError::usage(
                "hub.stall_timeout: must be more than 0 and at most 1 day",
            ));
        }
        Ok(())
    }

    /// Whether the endpoint is the default one, however it is written.
    pub(super) fn is_default_endpoint(&self) -> bool {
        let origin = |text: &str| web_url(text).ok().map(|url| url.origin());
        let default = origin(&Self::default().endpoint);
        origin(&self.endpoint) == default
    }
}

/// Far less than what clocks can count.
const STALL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);
