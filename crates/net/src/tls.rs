//! TLS for all clients.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// Returns the client configuration: TLS 1.2 and 1.3 with the well-known authorities, and those of `authorities` (PEM).
///
/// # Errors
/// Why TLS cannot be used.
pub(crate) fn client(authorities: Option<&[u8]>) -> Result<ClientConfig, &'static str> {
    let mut roots = RootCertStore {
        roots: webpki_roots::TLS_SERVER_ROOTS.to_vec(),
    };
    for certificate in CertificateDer::pem_slice_iter(authorities.unwrap_or_default()) {
        let certificate = certificate.map_err(|_| AUTHORITIES)?;
        roots.add(certificate).map_err(|_| AUTHORITIES)?;
    }
    // Named here: by itself rustls panics where dependencies enable two providers.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(|_| VERSIONS)?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

pub(crate) const AUTHORITIES: &str = "the authorities to trust are not PEM certificates";
const VERSIONS: &str = "no version of TLS is available";
