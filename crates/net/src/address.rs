//! The address of a server, and the credentials to use.

use std::fmt;
use std::time::Duration;

use http::{HeaderValue, Uri};
use sapwood_proto::secret::{Secret, masked};

use crate::connection::{is_loopback, is_secure};

/// The address of a server, and the credentials to use.
#[derive(Clone)]
pub struct ServerAddress {
    /// Its URL. Its client says which schemes there are.
    pub url: String,
    /// Sent as `authorization: Bearer KEY`; never logged.
    pub key: Option<Secret>,
    /// The time limit of connecting.
    pub connect_timeout: Duration,
    /// Authorities (PEM) to trust beside the well-known ones.
    pub authorities: Option<Vec<u8>>,
}

impl ServerAddress {
    /// The server at `url`, without a key.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            key: None,
            connect_timeout: Duration::from_secs(10),
            authorities: None,
        }
    }

    /// Sets a bearer key.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<Secret>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Returns whether a key of this address, set or part of its query, would be sent unencrypted to another machine.
    #[must_use]
    pub fn exposes_key(&self) -> bool {
        let uri = self.url.parse();
        uri.is_ok_and(|uri| exposes_key(&uri, self.key.is_some()))
    }

    /// The value of the `authorization` header, if there is a key.
    ///
    /// # Errors
    /// The key cannot be a header value.
    pub(crate) fn bearer(&self) -> Result<Option<HeaderValue>, &'static str> {
        self.key.as_ref().map(bearer).transpose()
    }
}

impl fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerAddress")
            .field("url", &masked(&self.url))
            .field("key", &self.key.is_some())
            .finish()
    }
}

/// Returns the value of the `authorization` header for a key.
///
/// # Errors
/// The key cannot be a header value.
pub(crate) fn bearer(key: &Secret) -> Result<HeaderValue, &'static str> {
    let value = HeaderValue::try_from(key.bearer());
    let mut value = value.map_err(|_| "the key has characters that a header cannot contain")?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns whether a key would be sent unencrypted to another machine; `has_key`: one is sent beside that of the query.
pub(crate) fn exposes_key(uri: &Uri, has_key: bool) -> bool {
    // On loopback no other machine can read it.
    let other = uri.host().is_some_and(|host| !is_loopback(host));
    (has_key || has_own_key(uri)) && !is_secure(uri) && other
}

/// Returns whether the query of a URL contains a key (EV-704, LM-108).
pub(crate) fn has_own_key(uri: &Uri) -> bool {
    let mut pairs = uri.query().unwrap_or_default().split('&');
    pairs.any(|pair| pair.starts_with("key="))
}

/// Refuses a URL with a user name or a password: URLs are shown and logged; keys are not.
pub(crate) fn without_credentials(uri: &Uri) -> Result<(), &'static str> {
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => Err(KEY_IN_URL),
        _ => Ok(()),
    }
}

pub(crate) const KEY_IN_URL: &str = "a key belongs in the key option, not in the URL";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_46_a_key_sent_unencrypted_is_detected() {
        for (url, key, exposed) in [
            ("http://host:1", true, true),
            ("evergreen+ws://10.0.0.1/p", true, true),
            ("triton+grpc://host/org%2Fm", true, true),
            ("ws://host?key=k", false, true),
            ("http://host:1", false, false),
            ("ws://host?dialect=json", false, false),
            ("https://host", true, false),
            ("evergreen+wss://host?key=k", true, false),
            ("triton+grpcs://host", true, false),
            ("http://localhost:1", true, false),
            ("ws://[::1]:1?key=k", false, false),
            ("triton+http://127.0.0.1", true, false),
            ("", true, false),
        ] {
            let mut address = ServerAddress::new(url);
            address.key = key.then(|| "k".into());
            assert_eq!(address.exposes_key(), exposed, "{url}");
        }
    }
}
