//! The keys of `models.upstream`: a model that other servers run (LM-712, LM-801).

use std::path::PathBuf;

use sapwood_net::lmtp::PeerAddress;
use sapwood_net::lmtp::pool;
use sapwood_proto::lmtp::{LmtpError, LmtpReason};
use serde::{Deserialize, Serialize};

use super::endpoint::EndpointConfig;
use super::remote_model::RemoteModel;
use crate::failure::CliError;

/// Servers that compute one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UpstreamConfig {
    /// Their protocol.
    #[serde(default)]
    pub(crate) kind: UpstreamKind,
    /// Their addresses.
    pub(crate) endpoints: Vec<EndpointConfig>,
    /// The name of the model at the servers. Default: its name here.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// `tokenizer.json`, or its folder with the files that belong to it, if the servers do not offer theirs.
    #[serde(default)]
    pub(crate) tokenizer: Option<PathBuf>,
    #[serde(default)]
    pub(crate) failover: Failover,
}

/// The protocol of the servers of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum UpstreamKind {
    #[default]
    Lmtp,
}

/// Handling of streams whose server is lost after their first token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Failover {
    /// Streams with a seed also continue at another server: they are computed there again from the beginning, and fail if
    /// a token differs (LM-806).
    pub(crate) seeded: bool,
}

impl Default for Failover {
    fn default() -> Self {
        Self { seeded: true }
    }
}

impl UpstreamConfig {
    /// The servers of the model that is called `name` here, each with its configuration entry.
    ///
    /// # Errors
    /// An address cannot be used.
    pub(crate) fn peers(
        &self,
        name: &str,
    ) -> Result<Vec<(pool::PoolEndpoint, &EndpointConfig)>, LmtpError> {
        let mut peers = Vec::new();
        for endpoint in &self.endpoints {
            let url = endpoint.url.expose();
            let weight = endpoint.weight.unwrap_or(1);
            let (addresses, model) = if url.starts_with("lmtp://") {
                let named = RemoteModel::read(url)?;
                // Several endpoints could name several tokenizers, and a model has one.
                if named.tokenizer.is_some() {
                    let why =
                        "the tokenizer of a configured model is set in models.upstream.tokenizer";
                    return Err(LmtpError::new(LmtpReason::InvalidValue, why));
                }
                (named.peers, named.model)
            } else {
                let model = self.model.as_deref().unwrap_or(name);
                (vec![PeerAddress::parse(url)?], model.to_owned())
            };
            peers.extend(addresses.into_iter().map(|address| {
                let model = model.clone();
                let peer = pool::PoolEndpoint {
                    address,
                    model,
                    weight,
                };
                (peer, endpoint)
            }));
        }
        Ok(peers)
    }

    /// Checks the constraints that the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(crate) fn check(&self, name: &str) -> Result<(), CliError> {
        let wrong = |why: &str| {
            CliError::usage(format!(
                "models.upstream.endpoints: the model `{name}`: {why}"
            ))
        };
        for endpoint in &self.endpoints {
            endpoint.check("models.upstream.endpoints")?;
        }
        match self.peers(name) {
            Ok(peers) if peers.is_empty() => Err(wrong("at least one server must compute it")),
            Ok(peers) if peers.iter().any(|(peer, _)| peer.weight == 0) => {
                Err(wrong("a weight is at least 1"))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(wrong(&error.message)),
        }
    }
}
