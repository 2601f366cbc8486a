//! The keys of `[references]`: which external content clients may name by a URI (EV-412 to EV-415).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use sapwood_net::references;
use sapwood_proto::secret::Secret;
use serde::{Deserialize, Serialize};

use super::environment;
use crate::failure::CliError;

/// Allow lists of external content. By default they are empty, and only `data:` references are read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ReferencesConfig {
    /// Directories whose regular files may be read by `file:`.
    pub(crate) files: Vec<PathBuf>,
    /// Hosts with public addresses that `https:` references may use.
    pub(crate) hosts: Vec<String>,
    /// Whether `http:` references may use them too.
    pub(crate) allow_http: bool,
    /// Hosts that may be used although their addresses are not public.
    pub(crate) private_hosts: Vec<String>,
    /// PEM file of authorities to trust beside the well-known ones.
    pub(crate) ca: Option<PathBuf>,
    /// Buckets with a prefix that may be read with this server's credentials.
    pub(crate) stores: Vec<String>,
    /// Options of the stores; take precedence over the environment.
    pub(crate) store_options: BTreeMap<String, Secret>,
}

impl ReferencesConfig {
    /// The resolver with these lists.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the entry that cannot be used.
    pub(crate) fn clients(&self) -> Result<Arc<references::ReferenceResolver>, CliError> {
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|error| {
                CliError::usage(format!("references.ca {}: {error}", path.display()))
            })
        };
        // Credentials of clouds are not even read where no store is listed.
        let environment = if self.stores.is_empty() {
            Vec::new()
        } else {
            environment::of_clouds()
        };
        let config = references::Config {
            files: self.files.clone(),
            hosts: self.hosts.clone(),
            allow_http: self.allow_http,
            private_hosts: self.private_hosts.clone(),
            authorities: self.ca.as_ref().map(read).transpose()?,
            stores: self.stores.clone(),
            store_options: self.store_options.clone().into_iter().collect(),
            store_environment: environment,
        };
        references::ReferenceResolver::new(&config)
            .map(Arc::new)
            .map_err(|error| CliError::usage(error.to_string()))
    }
}
