//! The keys of `[tls]`.

use std::path::PathBuf;

use sapwood_server::listener::tls;
use serde::{Deserialize, Serialize};

use crate::failure::CliError;

/// TLS on the listener: with certificate and key it is on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TlsConfig {
    /// PEM file of the server's certificate and its chain.
    pub(crate) certificate: Option<PathBuf>,
    /// PEM file of its private key.
    pub(crate) key: Option<PathBuf>,
    /// PEM file of the authority that signs clients' certificates; if it is set, clients are asked for one.
    pub(crate) client_ca: Option<PathBuf>,
    /// Whether a client without a certificate is refused.
    pub(crate) mtls: ClientCertificates,
}

/// Whether clients must have a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ClientCertificates {
    Optional,
    #[default]
    Required,
}

impl TlsConfig {
    /// The TLS settings of the server; `None` without TLS.
    ///
    /// # Errors
    /// [`CliError::usage`] if only some of the files are given that belong together.
    pub(crate) fn files(&self) -> Result<Option<tls::Config>, CliError> {
        let clients = self.client_ca.clone().map(|authority| tls::Clients {
            authority,
            mtls: match self.mtls {
                ClientCertificates::Optional => tls::Mtls::Optional,
                ClientCertificates::Required => tls::Mtls::Required,
            },
        });
        match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Ok(Some(tls::Config {
                certificate: certificate.clone(),
                key: key.clone(),
                clients,
            })),
            (None, None) if clients.is_none() => Ok(None),
            _ => Err(CliError::usage(
                "tls: TLS needs both tls.certificate (--tls-cert) and tls.key (--tls-key)",
            )),
        }
    }
}
