//! The environment as a layer of the configuration: the variables that it reads, and warnings about unknown ones.
//!
//! `SAPWOOD_ENGINE__THREADS=2` is `engine.threads = 2`; three names are shorter. A variable that begins with `SAPWOOD_`
//! and sets no key never prevents a start (D-46): Kubernetes defines several for each service, also for one that is
//! called `sapwood`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use etcetera::BaseStrategy;
use figment::providers::Env;
use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};
use sapwood_net::hub::ProxySettings;
use sapwood_proto::secret::Secret;

use super::layers::{nearest, nested};
use super::{Config, dotted, is_named_by_user, is_text};

/// The variables that set keys, and warnings about the others with our prefix.
#[derive(Clone, Default)]
pub(super) struct Environment {
    set: Vec<Variable>,
    strangers: Vec<String>,
    /// Variables that Kubernetes defines.
    passed_over: Vec<String>,
}

#[derive(Clone)]
struct Variable {
    name: String,
    /// The dotted key.
    key: String,
    value: Value,
}

/// The name of this layer, which marks its values.
pub(super) const SOURCE: &str = "environment";
const PREFIX: &str = "SAPWOOD_";
/// Variables that are read elsewhere: by the command line, and when the binary is built.
const OTHERS: [&str; 2] = ["SAPWOOD_CONFIG", "SAPWOOD_COMMIT"];
/// Names that are shorter than those derived from their keys.
const SHORT: [(&str, &str); 3] = [
    ("SAPWOOD_SERVER", "client.server"),
    ("SAPWOOD_API_KEY", "auth.key"),
    ("SAPWOOD_CLIENT_KEY", "client.key"),
];

/// Variables of the hub's own tools. A variable with our prefix takes precedence.
const OF_HUB: [(&str, &str); 3] = [
    ("HF_ENDPOINT", "hub.endpoint"),
    ("HF_HUB_OFFLINE", "hub.offline"),
    ("HF_TOKEN", "hub.token"),
];

impl Environment {
    /// The environment of this process.
    pub(super) fn read() -> Self {
        let all = Env::raw();
        let all: Vec<_> = all
            .iter()
            // Case does not matter, as in figment's own provider for the environment.
            .map(|(name, value)| (name.as_str().to_ascii_uppercase(), value))
            .collect();
        let ours = all.iter().filter(|(name, _)| name.starts_with(PREFIX));
        let mut read = Self::of(ours.cloned());
        read.add_of_hub(all.into_iter());
        read
    }

    /// Adds what the variables of the hub's tools set.
    fn add_of_hub(&mut self, variables: impl Iterator<Item = (String, String)>) {
        for (name, value) in variables {
            let known = OF_HUB.iter().find(|(known, _)| *known == name);
            let Some((_, key)) = known.filter(|_| !value.is_empty()) else {
                continue;
            };
            if self.set.iter().any(|variable| variable.key == *key) {
                continue;
            }
            let value = match *key {
                // As the tools read it.
                "hub.offline" => {
                    let yes = ["1", "on", "yes", "true"];
                    Value::from(yes.contains(&value.to_ascii_lowercase().as_str()))
                }
                _ => Value::from(value),
            };
            let key = (*key).to_owned();
            self.set.push(Variable { name, key, value });
        }
    }

    fn of(variables: impl Iterator<Item = (String, String)>) -> Self {
        let known = known();
        let mut read = Self::default();
        for (name, value) in variables {
            if OTHERS.contains(&name.as_str()) {
                continue;
            }
            let short = SHORT.iter().find(|(short, _)| *short == name);
            let key = match short {
                Some((_, key)) => (*key).to_owned(),
                None => name[PREFIX.len()..].to_ascii_lowercase().replace("__", "."),
            };
            if known.contains(&key) || is_named_by_user(&key) {
                // Without this, a key of digits only would be parsed as a number, and a server would then accept it
                // without its leading zeros.
                let value = if is_text(&key) {
                    Value::from(value)
                } else {
                    value.parse().unwrap_or_else(|never| match never {})
                };
                read.set.push(Variable { name, key, value });
            // Known keys come first: a variable of a Kubernetes service must not shadow one of ours.
            } else if is_of_kubernetes(&name, &value) {
                read.passed_over.push(name);
            } else {
                read.strangers.push(stranger(&name, &known));
            }
        }
        read
    }

    /// A warning for each variable with our prefix that sets no key.
    pub(super) fn strangers(&self) -> &[String] {
        &self.strangers
    }

    /// Variables that Kubernetes defines for a service called `sapwood`.
    pub(super) fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// The variable that sets a key or one of its parents.
    pub(super) fn name_of(&self, key: &str) -> Option<&str> {
        let of = |variable: &&Variable| super::is_within(key, &variable.key);
        self.set.iter().find(of).map(|variable| &*variable.name)
    }
}

impl Provider for Environment {
    fn metadata(&self) -> Metadata {
        Metadata::named(SOURCE)
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        let set = self.set.iter();
        Ok(nested(
            set.map(|variable| (&*variable.key, &variable.value)),
        ))
    }
}

/// Every dotted key, including those of tables.
fn known() -> BTreeSet<String> {
    // From the defaults themselves, so that no second list of keys has to be kept.
    let tree = serde_json::to_value(Config::default()).unwrap_or_default();
    dotted(tree).into_iter().map(|(key, _)| key).collect()
}

fn stranger(name: &str, known: &BTreeSet<String>) -> String {
    let usual = known
        .iter()
        .map(|key| key.replace('.', "__").to_uppercase());
    let short = SHORT
        .iter()
        .map(|(short, _)| short[PREFIX.len()..].to_owned());
    let names: Vec<String> = usual.chain(short).collect();
    match nearest(&name[PREFIX.len()..], names.iter().map(String::as_str)) {
        Some(best) => format!("{name} sets no key; did you mean {PREFIX}{best}?"),
        None => format!("{name} sets no key of the configuration"),
    }
}

/// Whether Kubernetes (or Docker, for links) defines it for a service whose name begins with `sapwood`:
/// `SAPWOOD_SERVICE_HOST`, `SAPWOOD_SERVICE_PORT_HTTP`, `SAPWOOD_PORT=tcp://10.0.0.1:8000`,
/// `SAPWOOD_PORT_8000_TCP_ADDR`, also with more of the service's name before these.
fn is_of_kubernetes(name: &str, value: &str) -> bool {
    let protocols = ["TCP", "UDP", "SCTP"];
    let is_url = || {
        let scheme = value.split_once("://").map_or("", |(scheme, _)| scheme);
        protocols.contains(&scheme.to_ascii_uppercase().as_str())
    };
    if name.ends_with("_SERVICE_HOST") || name.ends_with("_SERVICE_PORT") {
        return true;
    }
    if name.contains("_SERVICE_PORT_") {
        return value.parse::<u16>().is_ok();
    }
    if name.ends_with("_PORT") && is_url() {
        return true;
    }
    // NUMBER_PROTOCOL, and perhaps one of its parts.
    let Some((_, rest)) = name.split_once("_PORT_") else {
        return false;
    };
    let mut parts = rest.split('_');
    let number = parts.next().is_some_and(|port| port.parse::<u16>().is_ok());
    let protocol = parts.next().is_some_and(|name| protocols.contains(&name));
    let field = parts
        .next()
        .is_none_or(|field| ["PROTO", "PORT", "ADDR"].contains(&field));
    number && protocol && field && parts.next().is_none()
}

/// Whether the user wants no colours (the convention of `NO_COLOR`).
pub(crate) fn no_colour() -> bool {
    Env::raw()
        .only(&["no_color"])
        .iter()
        .any(|(_, value)| !value.is_empty())
}

/// The cloud settings of the environment, by the names that the clouds' own tools use. Used for listed stores only.
pub(crate) fn of_clouds() -> Vec<(String, Secret)> {
    let of_cloud = |name: &str| {
        let clouds = ["aws_", "google_", "azure_"];
        clouds.iter().any(|cloud| name.starts_with(cloud))
    };
    Env::raw()
        .iter()
        .map(|(name, value)| (name.as_str().to_ascii_lowercase(), Secret::from(value)))
        .filter(|(name, _)| of_cloud(name))
        .collect()
}

/// The proxies of the environment.
pub(super) fn proxies() -> ProxySettings {
    let all = Env::raw().lowercase(false);
    let all = all.iter();
    proxies_of(all.map(|(name, value)| (name.as_str().to_owned(), value)))
}

/// The proxies among these variables. As in pip, the lower-case name takes precedence: an empty one switches the other
/// off, and leaves `all_proxy`. Of `no_proxy` the first that is not empty counts, as in curl and pip.
fn proxies_of(variables: impl Iterator<Item = (String, String)>) -> ProxySettings {
    let all: BTreeMap<String, String> = variables.collect();
    let values = |name: &str| {
        let values = [all.get(name), all.get(&name.to_ascii_uppercase())];
        let values = values.into_iter().flatten();
        values.map(|value| value.trim()).collect::<Vec<_>>()
    };
    let proxy = |name| {
        let first = values(name).into_iter().next();
        first.filter(|value| !value.is_empty()).map(Secret::from)
    };
    let except = values("no_proxy")
        .into_iter()
        .find(|value| !value.is_empty());
    ProxySettings {
        http: proxy("http_proxy"),
        https: proxy("https_proxy"),
        all: proxy("all_proxy"),
        except: except.unwrap_or_default().to_owned(),
    }
}

/// The token in the file that the hub's own tools write at a login, if there is one.
pub(crate) fn hub_token() -> Option<Secret> {
    let variable = |name: &str| {
        let all = Env::raw().only(&[name]);
        let mut values = all.iter().map(|(_, value)| value);
        values.find(|value| !value.is_empty()).map(PathBuf::from)
    };
    let cache = || Some(etcetera::choose_base_strategy().ok()?.cache_dir());
    let of_home = || {
        let home = variable("hf_home").or_else(|| Some(cache()?.join("huggingface")));
        Some(home?.join("token"))
    };
    let path = variable("hf_token_path").or_else(of_home)?;
    let token = std::fs::read_to_string(path).ok()?;
    let token = token.trim();
    (!token.is_empty()).then(|| token.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Environment {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Environment::of(variables.iter().map(owned))
    }

    #[test]
    fn d_46_variables_of_a_kubernetes_service_are_ignored() {
        let environment = read(&[
            ("SAPWOOD_SERVICE_HOST", "10.96.0.7"),
            ("SAPWOOD_SERVICE_PORT", "8000"),
            ("SAPWOOD_SERVICE_PORT_HTTP", "8000"),
            ("SAPWOOD_PORT", "tcp://10.96.0.7:8000"),
            ("SAPWOOD_PORT_8000_TCP", "tcp://10.96.0.7:8000"),
            ("SAPWOOD_PORT_8000_TCP_PROTO", "tcp"),
            ("SAPWOOD_PORT_8000_TCP_PORT", "8000"),
            ("SAPWOOD_PORT_8000_TCP_ADDR", "10.96.0.7"),
            ("SAPWOOD_ADMIN_PORT_9_UDP_ADDR", "10.96.0.7"),
            ("SAPWOOD_ADMIN_SERVICE_PORT_GRPC_WEB", "1"),
        ]);
        assert!(environment.set.is_empty());
        assert_eq!(environment.strangers(), [""; 0]);
        assert_eq!(environment.passed_over().len(), 10);
    }

    #[test]
    fn the_lower_case_name_of_a_proxy_takes_precedence() {
        let read = |variables: &[(&str, &str)]| {
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            proxies_of(variables.iter().map(owned))
        };
        let settings = read(&[
            ("HTTP_PROXY", "http://a"),
            ("http_proxy", " http://b "),
            ("HTTPS_PROXY", "http://c"),
            ("https_proxy", ""),
            ("ALL_PROXY", "http://d"),
            ("NO_PROXY", "e"),
            ("no_proxy", ""),
            ("Http_Proxy", "http://f"),
        ]);
        let expected = ProxySettings {
            http: Some("http://b".into()),
            // So that the one for all is used.
            https: None,
            all: Some("http://d".into()),
            except: "e".to_owned(),
        };
        assert_eq!(settings, expected);
        assert_eq!(read(&[]), ProxySettings::default());
    }

    #[test]
    fn d_46_unknown_variables_are_reported_with_a_suggestion() {
        for (name, value, sent) in [
            ("SAPWOOD_PORT", "9000", "sets no key"),
            ("SAPWOOD_PORT_X_TCP", "1", "sets no key"),
            ("SAPWOOD_LISEN", "a:1", "did you mean SAPWOOD_LISTEN?"),
            ("SAPWOOD_APIKEY", "hush", "did you mean SAPWOOD_API_KEY?"),
            (
                "SAPWOOD_LIMITS__CONECTIONS",
                "1",
                "did you mean SAPWOOD_LIMITS__CONNECTIONS?",
            ),
            ("SAPWOOD_WHATEVER_THAT_IS", "hush", "sets no key"),
        ] {
            let environment = read(&[(name, value)]);
            let [reported] = environment.strangers() else {
                panic!("{name}: {:?}", environment.strangers());
            };
            assert!(
                reported.starts_with(name) && reported.contains(sent),
                "{reported}"
            );
            assert!(!reported.contains("hush"), "{reported}");
        }
    }

    #[test]
    fn d_46_the_key_of_the_server_is_not_that_of_its_clients() {
        let environment = read(&[("SAPWOOD_API_KEY", "0123"), ("SAPWOOD_CLIENT_KEY", "1e5")]);
        let of = |key: &str| {
            let all = environment.set.iter().filter(|one| one.key == key);
            all.map(|one| one.value.as_str().unwrap_or("no text"))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (of("auth.key"), of("client.key")),
            (vec!["0123"], vec!["1e5"])
        );
        assert_eq!(environment.name_of("auth.key"), Some("SAPWOOD_API_KEY"));
        assert_eq!(environment.name_of("auth"), None);
    }

    #[test]
    fn d_46_secrets_below_a_table_are_text_too() {
        for (name, key) in [
            (
                "SAPWOOD_REFERENCES__STORE_OPTIONS__AWS_SECRET_ACCESS_KEY",
                "references.store_options.aws_secret_access_key",
            ),
            (
                "SAPWOOD_GENERATE__RESTRICTED__TRACE__VALUE",
                "generate.restricted.trace.value",
            ),
            ("SAPWOOD_AUTH__KEY", "auth.key"),
        ] {
            let environment = read(&[(name, "00")]);
            let [variable] = &environment.set[..] else {
                panic!("{name}: {:?}", environment.strangers());
            };
            assert_eq!((&*variable.key, variable.value.as_str()), (key, Some("00")));
        }
    }
}
