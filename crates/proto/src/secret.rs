//! Values that must not be shown: [`Secret`] for keys and credentials, [`SecretUrl`] for addresses that may contain
//! one.
//!
//! Formatting and serialization yield a mask; the value itself is only returned by [`Secret::expose`], which is easy to
//! search for.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};

/// A key, password or token.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The value, for sending or comparing it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The value of an `authorization` header with this key.
    #[must_use]
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Whether it is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<&str> for Secret {
    fn from(value: &str) -> Self {
        Self(value.to_owned())
    }
}

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self(value)
    }
}

impl FromStr for Secret {
    type Err = Infallible;

    fn from_str(value: &str) -> Result<Self, Infallible> {
        Ok(Self::from(value))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(MASK)
    }
}

/// An address whose credentials are not shown: neither the part before an `@`, nor the values of its query, except a
/// few that are known to be harmless.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretUrl(String);

impl SecretUrl {
    /// The whole address, for connecting.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<&str> for SecretUrl {
    fn from(url: &str) -> Self {
        Self(url.to_owned())
    }
}

impl From<String> for SecretUrl {
    fn from(url: String) -> Self {
        Self(url)
    }
}

impl FromStr for SecretUrl {
    type Err = Infallible;

    fn from_str(url: &str) -> Result<Self, Infallible> {
        Ok(Self::from(url))
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        masked(&self.0).fmt(f)
    }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&masked(&self.0))
    }
}

impl Serialize for SecretUrl {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// Returns `url` for display and logs: possible credentials in it are masked.
#[must_use]
pub fn masked(url: &str) -> String {
    let (position, tail) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
    let (scheme, rest) = position.split_at(position.find("://").map_or(0, |at| at + 3));
    let mut shown = scheme.to_owned();
    // A password may contain characters that should have been encoded, so the last `@` counts, wherever it is.
    if tail.contains('@') {
        return shown + MASK;
    }
    match rest.rsplit_once('@') {
        Some((_, host)) => {
            shown.push_str(MASK);
            shown.push('@');
            shown.push_str(host);
        }
        None => shown.push_str(rest),
    }
    // The fragment first: a `?` within it begins no query.
    let (query, fragment) = tail
        .split_once('#')
        .map_or((tail, ""), |(query, _)| (query, "#***"));
    for (index, pair) in query
        .strip_prefix('?')
        .into_iter()
        .flat_map(|query| query.split('&'))
        .enumerate()
    {
        shown.push(if index == 0 { '?' } else { '&' });
        match pair.split_once('=') {
            // An allow list, because credentials have too many names in other servers' URLs to list those.
            Some((name, value)) if HARMLESS.contains(&name) => {
                shown.push_str(&format!("{name}={value}"));
            }
            Some((name, _)) => shown.push_str(&format!("{name}={MASK}")),
            // A value without a name may be the key itself.
            None if pair.is_empty() => {}
            None => shown.push_str(MASK),
        }
    }
    shown + fragment
}

const MASK: &str = "***";
/// Query parameters of our own addresses that are no credentials.
const HARMLESS: [&str; 2] = ["dialect", "tokenizer"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_46_no_formatting_shows_a_secret() {
        let secret = Secret::from("hush");
        let shown = format!(
            "{secret} {secret:?} {:#?} {}",
            Some(&secret),
            serde_json::to_string(&secret).unwrap()
        );
        assert!(!shown.contains("hush"), "{shown}");
        assert_eq!(
            (secret.expose(), &*secret.bearer()),
            ("hush", "Bearer hush")
        );
        // Only a JSON string is accepted.
        assert_eq!(
            serde_json::from_str::<Secret>("\"0123\"").unwrap().expose(),
            "0123"
        );
        assert!(serde_json::from_str::<Secret>("123").is_err());
    }

    #[test]
    fn d_46_a_url_is_shown_with_possible_credentials_masked() {
        for (url, shown) in [
            ("http://h:1/p", "http://h:1/p"),
            ("h:1", "h:1"),
            ("unix:/run/a b.sock", "unix:/run/a b.sock"),
            ("lmtp://h:1,i:2/m?key=hush", "lmtp://h:1,i:2/m?key=***"),
            (
                "lmtp://h/m?tokenizer=a/b&key=hush",
                "lmtp://h/m?tokenizer=a/b&key=***",
            ),
            ("ws://h/?hush", "ws://h/?***"),
            ("ws://h/?KEY=hush&a", "ws://h/?KEY=***&***"),
            ("http://hush@h", "http://***@h"),
            ("http://a:hu/sh@h/x?", "http://***@h/x?"),
            ("http://h/#hush", "http://h/#***"),
            ("h:1/lmtp?key=hush", "h:1/lmtp?key=***"),
            ("http://user:hu?sh@h", "http://***"),
            ("http://user:hu#sh@h", "http://***"),
            ("http://hu?dialect=sh@h/x", "http://***"),
            ("http://hu@sh#hu@h", "http://***"),
            ("user:hu?sh@h", "***"),
            // The `@` may also be part of a key, of which as little is shown.
            ("ws://h/?key=hu@sh", "ws://***"),
        ] {
            assert_eq!(masked(url), shown);
            let url = SecretUrl::from(url);
            let all = format!("{url} {url:?} {}", serde_json::to_string(&url).unwrap());
            assert!(!all.contains("hu") && !all.contains("sh"), "{all}");
        }
    }
}
