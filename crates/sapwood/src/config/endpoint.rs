//! An endpoint in `[[upstreams]]` and `models.upstream.endpoints`: an address, or a table with its credentials (D-46).

use std::fmt;
use std::path::{Path, PathBuf};

use sapwood_proto::secret::{Secret, SecretUrl};
use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::ClientConfig;
use super::remote_model::RemoteModel;
use crate::failure::CliError;

/// Another server. A key or authorities that are not set are those of `[client]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, remote = "Self")]
pub(crate) struct EndpointConfig {
    /// Its address.
    pub(crate) url: SecretUrl,
    /// The key to send to it.
    #[serde(default, deserialize_with = "super::secret")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<Secret>,
    /// A file that holds this key and nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key_file: Option<PathBuf>,
    /// PEM file of authorities to trust beside the well-known ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    /// Its share of the streams, relative to the other servers of the model. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) weight: Option<u32>,
}

/// The credentials for a server.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ServerAccess {
    pub(crate) key: Option<Secret>,
    /// The trusted authorities, as PEM.
    pub(crate) authorities: Option<Vec<u8>>,
}

impl EndpointConfig {
    /// An endpoint at `url`, without credentials of its own.
    pub(crate) fn new(url: impl Into<SecretUrl>) -> Self {
        Self {
            url: url.into(),
            key: None,
            key_file: None,
            ca: None,
            weight: None,
        }
    }

    fn is_plain(&self) -> bool {
        *self == Self::new(self.url.clone())
    }

    /// Checks the constraints that the types cannot express; `at` is the list with this entry.
    ///
    /// # Errors
    /// [`CliError::usage`].
    pub(crate) fn check(&self, at: &str) -> Result<(), CliError> {
        if self.key.is_some() && self.key_file.is_some() {
            return Err(CliError::usage(format!(
                "{at}: `{}`: there can be only one key: write `key` or `key_file`",
                self.url
            )));
        }
        Ok(())
    }

    /// Its own key and authorities, or those of `[client]`. A key in the address is the only one that is sent: an
    /// upstream with a key of its own never gets another one.
    ///
    /// # Errors
    /// [`CliError::usage`] if a file cannot be read; the message never contains the file's content.
    pub(crate) fn access(&self, client: &ClientConfig) -> Result<ServerAccess, CliError> {
        let own = match (&self.key, &self.key_file) {
            (Some(key), _) => Some(key.clone()),
            (None, Some(path)) => Some(key_in(path)?),
            (None, None) => None,
        };
        // Evaluated last: a key of the entry itself wins over all others.
        let shared = || client.key.clone().filter(|_| !self.has_key_in_url());
        Ok(ServerAccess {
            key: own.or_else(shared),
            authorities: authorities("ca", self.ca.as_deref().or(client.ca.as_deref()))?,
        })
    }

    fn has_key_in_url(&self) -> bool {
        let query = self
            .url
            .expose()
            .split_once('?')
            .map_or("", |(_, query)| query);
        query.split('&').any(|pair| pair.starts_with("key="))
    }

    /// D-40: checks an entry of `[[upstreams]]`. Its scheme must be one that is implemented.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the address.
    pub(super) fn check_joined(&self) -> Result<(), CliError> {
        self.check("upstreams")?;
        let url = &self.url;
        if self.weight.is_some() {
            return Err(CliError::usage(format!(
                "upstreams: `{url}`: `weight` is a key of models.upstream.endpoints, of which several compute one model"
            )));
        }
        let address = url.expose();
        let scheme = address.split_once("://").map_or("", |(scheme, _)| scheme);
        let there_are = "write evergreen+http://HOST:PORT for another Sapwood, triton+http://HOST:PORT or \
                         triton+grpc://HOST:PORT for a Triton server, lmtp://HOST:PORT/MODEL for a model of an LMTP server, \
                         or of several: lmtp://HOST:PORT,HOST:PORT/MODEL; with ?tokenizer=PATH appended if they do not offer theirs";
        match scheme {
            "evergreen+http" | "evergreen+https" | "evergreen+ws" | "evergreen+wss"
            | "triton+http" | "triton+https" | "triton+grpc" | "triton+grpcs" => Ok(()),
            "lmtp" => match RemoteModel::read(address) {
                Ok(_) => Ok(()),
                Err(error) => Err(CliError::usage(format!(
                    "upstreams: `{url}`: {}",
                    error.message
                ))),
            },
            "openai+http" | "openai+https" => Err(CliError::usage(format!(
                "upstreams: {scheme}:// is not built yet; {there_are}"
            ))),
            _ => Err(CliError::usage(format!(
                "upstreams: `{url}` is not the address of an upstream; {there_are}"
            ))),
        }
    }
}

impl ClientConfig {
    /// The credentials for the server of `chat`, `run` and `models`.
    ///
    /// # Errors
    /// [`CliError::usage`] if the authorities cannot be read.
    pub(crate) fn access(&self) -> Result<ServerAccess, CliError> {
        Ok(ServerAccess {
            key: self.key.clone(),
            authorities: authorities("client.ca", self.ca.as_deref())?,
        })
    }
}

fn key_in(path: &Path) -> Result<Secret, CliError> {
    let wrong = |why: String| CliError::usage(format!("key_file {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    // Only the line end of an editor is removed: a space may belong to the key.
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(wrong("it is empty".into())),
        key => Ok(Secret::from(key)),
    }
}

fn authorities(key: &str, path: Option<&Path>) -> Result<Option<Vec<u8>>, CliError> {
    let read = |path: &Path| {
        std::fs::read(path)
            .map_err(|error| CliError::usage(format!("{key} {}: {error}", path.display())))
    };
    path.map(read).transpose()
}

impl<'de> Deserialize<'de> for EndpointConfig {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = EndpointConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the address of a server, or a table with its url")
            }

            fn visit_str<E: serde::de::Error>(self, url: &str) -> Result<EndpointConfig, E> {
                SecretUrl::deserialize(StrDeserializer::new(url)).map(EndpointConfig::new)
            }

            fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<EndpointConfig, A::Error> {
                EndpointConfig::deserialize(MapAccessDeserializer::new(table))
            }
        }

        // An untagged enum would report only that nothing fits, and not which key of the table is wrong.
        from.deserialize_any(Either)
    }
}

impl Serialize for EndpointConfig {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.is_plain() {
            return self.url.serialize(to);
        }
        Self::serialize(self, to)
    }
}

/// Warns about an unencrypted connection: an eavesdropper learns the key (D-46).
pub(crate) fn warn_of_plain_text(server: &str) {
    tracing::warn!(
        server,
        "a key is sent there unencrypted: use TLS (https://, wss://, grpcs://)"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_46_an_endpoints_own_key_takes_precedence() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "from a file\n").unwrap();
        let client = ClientConfig {
            key: Some("shared".into()),
            ..ClientConfig::default()
        };
        let plain = |url: &str| EndpointConfig::new(url);
        for (endpoint, key) in [
            (plain("evergreen+http://h:1"), Some("shared")),
            (plain("lmtp://h:1/m?key=own"), None),
            (
                EndpointConfig {
                    key: Some("own".into()),
                    ..plain("lmtp://h:1/m?key=other")
                },
                Some("own"),
            ),
            (
                EndpointConfig {
                    key_file: Some(file.clone()),
                    ..plain("http://h:1")
                },
                Some("from a file"),
            ),
        ] {
            let access = endpoint.access(&client).unwrap();
            assert_eq!(access.key.as_ref().map(Secret::expose), key, "{endpoint:?}");
        }
        std::fs::write(&file, "\n").unwrap();
        let empty = EndpointConfig {
            key_file: Some(file),
            ..plain("http://h:1")
        };
        assert!(empty.access(&client).is_err());
        let two = EndpointConfig {
            key: Some("hush".into()),
            ..empty
        };
        let failure = two.check("upstreams").unwrap_err();
        assert!(failure.message.contains("`key_file`"), "{failure}");
        assert!(!failure.message.contains("hush"), "{failure}");
    }
}
