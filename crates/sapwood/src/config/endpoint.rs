//! A server elsewhere, as `[[upstreams]]` and `models.upstream.endpoints` write it: its address alone, or a table that says
//! how we are let in there (D-46).

use std::fmt;
use std::path::{Path, PathBuf};

use sapwood_proto::secret::{Secret, SecretUrl};
use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Client;
use crate::failure::Failure;

/// A server elsewhere. What is not given of key and authorities is as `[client]` has it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, remote = "Self")]
pub(crate) struct Endpoint {
    /// Where it is.
    pub(crate) url: SecretUrl,
    /// The key to present there.
    #[serde(default, deserialize_with = "super::secret")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<Secret>,
    /// A file that holds this key and nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key_file: Option<PathBuf>,
    /// PEM file of authorities to trust beside the well-known ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    /// How much it takes beside the others that compute the same model; not given: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) weight: Option<u32>,
}

/// How we are let in at a server.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Access {
    pub(crate) key: Option<Secret>,
    /// PEM.
    pub(crate) authorities: Option<Vec<u8>>,
}

impl Endpoint {
    /// The server at `url`, with nothing of its own.
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

    /// Checks what the types cannot say; `at` is the list that it stands in.
    ///
    /// # Errors
    /// [`Failure::usage`].
    pub(crate) fn check(&self, at: &str) -> Result<(), Failure> {
        if self.key.is_some() && self.key_file.is_some() {
            return Err(Failure::usage(format!(
                "{at}: `{}`: there is one key: write `key` or `key_file`",
                self.url
            )));
        }
        Ok(())
    }

    /// Its own key and authorities, or those of `[client]`. A key within the address goes alone: whoever has a key of its own is
    /// shown no other.
    ///
    /// # Errors
    /// [`Failure::usage`] if a file cannot be read; never with what is in it.
    pub(crate) fn access(&self, client: &Client) -> Result<Access, Failure> {
        let own = match (&self.key, &self.key_file) {
            (Some(key), _) => Some(key.clone()),
            (None, Some(path)) => Some(key_in(path)?),
            (None, None) => None,
        };
        let shared = || client.key.clone().filter(|_| !self.has_key_in_url());
        Ok(Access {
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
}

impl Client {
    /// How the server of `chat`, `run` and `models` lets us in.
    ///
    /// # Errors
    /// [`Failure::usage`] if the authorities cannot be read.
    pub(crate) fn access(&self) -> Result<Access, Failure> {
        Ok(Access {
            key: self.key.clone(),
            authorities: authorities("client.ca", self.ca.as_deref())?,
        })
    }
}

fn key_in(path: &Path) -> Result<Secret, Failure> {
    let wrong = |why: String| Failure::usage(format!("key_file {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(wrong("it is empty".into())),
        key => Ok(Secret::from(key)),
    }
}

fn authorities(key: &str, path: Option<&Path>) -> Result<Option<Vec<u8>>, Failure> {
    let read = |path: &Path| {
        std::fs::read(path)
            .map_err(|error| Failure::usage(format!("{key} {}: {error}", path.display())))
    };
    path.map(read).transpose()
}

impl<'de> Deserialize<'de> for Endpoint {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = Endpoint;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the address of a server, or a table with its url")
            }

            fn visit_str<E: serde::de::Error>(self, url: &str) -> Result<Endpoint, E> {
                SecretUrl::deserialize(StrDeserializer::new(url)).map(Endpoint::new)
            }

            fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<Endpoint, A::Error> {
                Endpoint::deserialize(MapAccessDeserializer::new(table))
            }
        }

        from.deserialize_any(Either)
    }
}

impl Serialize for Endpoint {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.is_plain() {
            return self.url.serialize(to);
        }
        Self::serialize(self, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_46_a_key_of_its_own_wins_and_goes_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "from a file\n").unwrap();
        let client = Client {
            key: Some("shared".into()),
            ..Client::default()
        };
        let plain = |url: &str| Endpoint::new(url);
        for (endpoint, key) in [
            (plain("evergreen+http://h:1"), Some("shared")),
            (plain("lmtp://h:1/m?key=own"), None),
            (
                Endpoint {
                    key: Some("own".into()),
                    ..plain("lmtp://h:1/m?key=other")
                },
                Some("own"),
            ),
            (
                Endpoint {
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
        let empty = Endpoint {
            key_file: Some(file),
            ..plain("http://h:1")
        };
        assert!(empty.access(&client).is_err());
        let two = Endpoint {
            key: Some("hush".into()),
            ..empty
        };
        let failure = two.check("upstreams").unwrap_err();
        assert!(failure.message.contains("`key_file`"), "{failure}");
        assert!(!failure.message.contains("hush"), "{failure}");
    }
}
