//! API keys, from the configuration and the key file (OA-905).

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use sapwood_kernel::Name;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::rate_limit::{self, TokenMeter};
use sapwood_server::auth::scopes::{KeyFingerprint, KeyScope, Scopes};

use super::AuthConfig;
use crate::failure::CliError;

/// A file of keys: `[[keys]]` entries.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    #[serde(default)]
    keys: Vec<KeyEntry>,
}

/// One entry; without scopes it may only `infer`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyEntry {
    name: String,
    #[serde(default)]
    sha256: Option<String>,
    /// The subject of a client certificate that authenticates as this key.
    #[serde(default)]
    certificate: Option<String>,
    #[serde(default)]
    scopes: Option<Vec<String>>,
    /// Names of the models that it may call; without them, all.
    #[serde(default)]
    models: Option<Vec<String>>,
    #[serde(default)]
    limits: KeyLimits,
}

/// Limits of a key; absent: none.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyLimits {
    requests_running: Option<u32>,
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u32>,
}

/// All keys that `auth` configures.
///
/// # Errors
/// [`CliError::usage`] if the file cannot be read or an entry is wrong; the message never contains the key.
pub(crate) fn load(auth: &AuthConfig) -> Result<Vec<ApiKey>, CliError> {
    let mut keys = Vec::new();
    if let Some(secret) = &auth.key {
        keys.push(ApiKey {
            allowance: Some(Arc::new(TokenMeter::new(
                DEFAULT,
                rate_limit::RateLimits::default(),
            ))),
            ..ApiKey::new(DEFAULT, secret.expose(), Scopes::ALL)
        });
    }
    if let Some(path) = &auth.key_file {
        read(path, &mut keys)?;
    }
    Ok(keys)
}

/// Adds the keys of a file. A name identifies a caller, so two keys of one name could not be told apart.
fn read(path: &Path, keys: &mut Vec<ApiKey>) -> Result<(), CliError> {
    let wrong = |what: String| CliError::usage(format!("auth.key_file {}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    for key in parse(&text).map_err(wrong)? {
        // Also against `auth.key`, which is in the list already.
        if keys.iter().any(|other| other.name == key.name) {
            let name = &key.name;
            let ours = if **name == *DEFAULT {
                "; `auth.key` has this name"
            } else {
                ""
            };
            return Err(wrong(format!(
                "two keys are called `{name}`: give each a name of its own{ours}"
            )));
        }
        // The tags of a controller's owner begin with its name and a dot (AI-312).
        let within = |one: &str, two: &str| {
            one.strip_prefix(two)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        let nested =
            |other: &&ApiKey| within(&key.name, &other.name) || within(&other.name, &key.name);
        if let Some(other) = keys.iter().find(nested) {
            let (one, two) = (&other.name, &key.name);
            return Err(wrong(format!(
                "the tags of `{one}` and `{two}` could not be told apart: no key may be named after another one and a dot"
            )));
        }
        let named =
            |other: &&ApiKey| key.certificate.is_some() && other.certificate == key.certificate;
        if let Some(other) = keys.iter().find(named) {
            let (one, two) = (&other.name, &key.name);
            return Err(wrong(format!(
                "`{one}` and `{two}` name the same certificate: only one of them may"
            )));
        }
        let equal =
            |other: &&ApiKey| key.fingerprint.is_some() && other.fingerprint == key.fingerprint;
        if let Some(other) = keys.iter().find(equal) {
            // A caller with this secret would have the scopes of one of them, and be revoked by the other.
            let (one, two) = (&other.name, &key.name);
            return Err(wrong(format!(
                "`{one}` and `{two}` have the same secret: give each one of its own"
            )));
        }
        keys.push(key);
    }
    Ok(())
}

fn parse(text: &str) -> Result<Vec<ApiKey>, String> {
    use figment::providers::{Format, Toml};
    let file: KeyFile = figment::Figment::from(Toml::string(text))
        .extract()
        .map_err(|error| format!("{} ({})", error.kind, error.path.join(".")))?;
    if file.keys.is_empty() {
        return Err("it has no [[keys]] entry".into());
    }
    file.keys.into_iter().map(KeyEntry::into_key).collect()
}

impl KeyEntry {
    fn into_key(self) -> Result<ApiKey, String> {
        let scopes = self
            .scopes
            .unwrap_or_else(|| vec![KeyScope::Infer.name().into()]);
        let scopes = scopes.iter().map(|name| {
            KeyScope::from_name(name).ok_or_else(|| {
                let known = KeyScope::ALL.map(KeyScope::name).join(", ");
                format!(
                    "key `{}`: no scope is called `{name}`; there are: {known}",
                    self.name
                )
            })
        });
        // The name of a key appears in logs, metrics and quotas, where these names have a meaning.
        if RESERVED.contains(&self.name.as_str()) {
            return Err(format!(
                "the key name `{}` is reserved: it means a caller without a key",
                self.name
            ));
        }
        let hex = |digits: &String| {
            KeyFingerprint::from_hex(digits)
                .ok_or_else(|| format!("key `{}`: sha256 must be 64 hex digits", self.name))
        };
        let fingerprint = self.sha256.as_ref().map(hex).transpose()?;
        let certificate = self.certificate.filter(|subject| !subject.is_empty());
        if fingerprint.is_none() && certificate.is_none() {
            return Err(format!(
                "key `{}`: it needs sha256, certificate, or both",
                self.name
            ));
        }
        let scopes = scopes.collect::<Result<_, _>>()?;
        let limits = rate_limit::RateLimits {
            models: self
                .models
                .map(|models| Arc::new(models.into_iter().map(Name::from).collect())),
            requests_running: self.limits.requests_running,
            requests_per_minute: self.limits.requests_per_minute,
            tokens_per_minute: self.limits.tokens_per_minute,
        };
        let allowance = TokenMeter::new(&self.name, limits);
        Ok(ApiKey {
            name: self.name.into(),
            fingerprint,
            certificate: certificate.map(Into::into),
            scopes,
            allowance: Some(Arc::new(allowance)),
        })
    }
}

/// A new secret of 32 random bytes, and its entry for the key file.
///
/// # Errors
/// If the operating system provides no randomness.
pub(crate) fn new(name: &str, scopes: &[String]) -> Result<(String, String), CliError> {
    let mut random = [0_u8; 32];
    // From the system, because this is a credential: `RandomState` is not made for that.
    getrandom::fill(&mut random)
        .map_err(|_| CliError::new("the operating system provides no randomness"))?;
    let secret = random.iter().fold(String::from("sw_"), |secret, byte| {
        format!("{secret}{byte:02x}")
    });
    let scopes: Vec<_> = scopes.iter().map(|scope| format!("\"{scope}\"")).collect();
    let entry = format!(
        "[[keys]]\nname = \"{name}\"\nsha256 = \"{}\"\nscopes = [{}]\n",
        KeyFingerprint::of(&secret),
        scopes.join(", ")
    );
    // The printed entry must parse again, whatever characters the name has.
    parse(&entry).map_err(CliError::usage)?;
    Ok((secret, entry))
}

/// The name of the key of `auth.key`.
const DEFAULT: &str = "default";
/// Names of callers without a key, in the log and as owners of controllers.
const RESERVED: [&str; 3] = ["anonymous", "-", "localhost"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_905_a_new_key_can_be_parsed_and_wrong_entries_are_explained() {
        let (secret, entry) = new("anna", &["infer".into(), "metrics".into()]).unwrap();
        let keys = parse(&entry).unwrap();
        assert_eq!(keys[0].fingerprint, Some(KeyFingerprint::of(&secret)));
        assert!(keys[0].scopes.has(KeyScope::Metrics) && !keys[0].scopes.has(KeyScope::Admin));
        assert!(new("an\"na", &[]).is_err());
        for (text, why) in [
            ("", "no [[keys]]"),
            ("[[keys]]\nname = \"a\"", "certificate, or both"),
            (
                "[[keys]]\nname = \"a\"\ncertificate = \"\"",
                "certificate, or both",
            ),
            (
                "[[keys]]\nname = \"anonymous\"\ncertificate = \"x\"",
                "is reserved",
            ),
            (
                "[[keys]]\nname = \"localhost\"\ncertificate = \"x\"",
                "is reserved",
            ),
            ("[[keys]]\nname = \"a\"\nsha256 = \"12\"", "64 hex digits"),
            (
                "[[keys]]\nname = \"a\"\nsha256 = \"12\"\nsecret = \"x\"",
                "secret",
            ),
            (
                &format!(
                    "{}scopes = [\"all\"]",
                    entry.split("scopes").next().unwrap()
                ),
                "infer, control",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn d_45_an_entry_names_the_certificate_of_its_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        let auth = AuthConfig {
            key_file: Some(path.clone()),
            ..AuthConfig::default()
        };
        let entry = |name: &str, subject: &str| {
            format!("[[keys]]\nname = \"{name}\"\ncertificate = \"{subject}\"\n")
        };
        std::fs::write(&path, entry("ops", "monitor") + &entry("robot", "robot-7")).unwrap();
        let keys = load(&auth).unwrap();
        let named = keys
            .iter()
            .map(|key| (key.certificate.as_deref(), key.fingerprint));
        let expect = [(Some("monitor"), None), (Some("robot-7"), None)];
        assert_eq!(named.collect::<Vec<_>>(), expect);
        std::fs::write(&path, entry("ops", "monitor") + &entry("robot", "monitor")).unwrap();
        let failure = load(&auth).unwrap_err();
        assert!(
            failure.message.contains("the same certificate"),
            "{failure}"
        );
    }

    #[test]
    fn two_keys_of_one_secret_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        let (secret, entry) = new("anna", &["infer".into()]).unwrap();
        let again = entry.replace("anna", "ben");
        for (text, key) in [(entry.clone() + &again, None), (entry, Some(secret.into()))] {
            std::fs::write(&path, text).unwrap();
            let auth = AuthConfig {
                key,
                key_file: Some(path.clone()),
                ..AuthConfig::default()
            };
            let failure = load(&auth).unwrap_err();
            assert!(failure.message.contains("the same secret"), "{failure}");
        }
    }

    #[test]
    fn two_keys_of_one_name_or_within_one_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        let entry = |name| new(name, &[]).unwrap().1;
        for (names, beside, fails) in [
            (&["anna", "ben"][..], true, None),
            (&["anna", "ben", "anna"], false, Some("`anna`")),
            (&["default"], false, None),
            (&["ann", "ann.b"], false, Some("`ann` and `ann.b`")),
            (&["ann.b", "ann"], false, Some("`ann.b` and `ann`")),
            (&["ann.b", "ann.c", "annb"], false, None),
            (&["default.x"], true, Some("`default` and `default.x`")),
            (&["default"], true, Some("`auth.key`")),
        ] {
            let text: Vec<_> = names.iter().copied().map(entry).collect();
            std::fs::write(&path, text.join("\n")).unwrap();
            let auth = AuthConfig {
                key: beside.then(|| "secret".into()),
                key_file: Some(path.clone()),
                ..AuthConfig::default()
            };
            match (load(&auth), fails) {
                (Ok(keys), None) => assert_eq!(keys.len(), names.len() + usize::from(beside)),
                (Err(failure), Some(why)) => {
                    let sent = format!("{failure:?}");
                    assert!(sent.contains(why), "{sent}");
                }
                (Ok(_), Some(why)) => panic!("{names:?}: {why} is accepted"),
                (Err(failure), None) => panic!("{names:?}: {failure:?}"),
            }
        }
    }
}
