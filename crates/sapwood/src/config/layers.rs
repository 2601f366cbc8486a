//! Merges the layers of configuration once: defaults < file < environment < flags (OA-912), and records which layer a
//! value came from. The names of the variables are in [`environment`](super::environment).

use std::path::{Path, PathBuf};

use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Tag, Value};
use figment::{Figment, Metadata, Profile, Provider, Source};
use sapwood_proto::secret::Secret;

use super::environment::{self, Environment, SOURCE};
use super::{Config, is_within, may_hold_secret};
use crate::failure::CliError;

/// The values that flags set, by dotted key. Must not be printed: some are secrets.
#[derive(Clone, Default)]
pub(crate) struct Flags(Vec<(&'static str, &'static str, Value)>);

impl Flags {
    /// Records that `flag` sets `key`, if it was given.
    pub(crate) fn set(
        &mut self,
        key: &'static str,
        flag: &'static str,
        value: Option<impl Into<Value>>,
    ) {
        if let Some(value) = value {
            self.0.push((key, flag, value.into()));
        }
    }

    fn name_of(&self, key: &str) -> Option<&'static str> {
        let within = |(of, ..): &&(&str, _, _)| is_within(key, of);
        self.0.iter().find(within).map(|(_, flag, _)| *flag)
    }
}

impl Provider for Flags {
    fn metadata(&self) -> Metadata {
        Metadata::named(FLAGS)
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(nested(self.0.iter().map(|(key, _, value)| (*key, value))))
    }
}

/// The tables with these values, by dotted key.
pub(super) fn nested<'a>(values: impl Iterator<Item = (&'a str, &'a Value)>) -> Map<Profile, Dict> {
    let tables = values.map(|(key, value)| figment::util::nest(key, value.clone()));
    let tables = tables.filter_map(Value::into_dict);
    Profile::Default.collect(tables.fold(Dict::new(), merge))
}

fn merge(mut into: Dict, from: Dict) -> Dict {
    for (key, value) in from {
        let merged = match (into.remove(&key), value) {
            (Some(Value::Dict(tag, old)), Value::Dict(_, new)) => Value::Dict(tag, merge(old, new)),
            (_, value) => value,
        };
        into.insert(key, merged);
    }
    into
}

/// The layer that a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ValueOrigin {
    Default,
    File(PathBuf),
    Environment(String),
    Flag(&'static str),
}

impl std::fmt::Display for ValueOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// What a file says that the user did not name.
#[derive(Clone)]
struct FoundFile {
    hub_token: Option<Secret>,
}

/// The merged layers. Must not be printed: they hold secrets in plain text.
#[derive(Clone)]
pub(crate) struct Layers {
    figment: Figment,
    flags: Flags,
    environment: Environment,
    /// A file that was found in the working directory, and not named by the user.
    found: Option<FoundFile>,
}

impl Layers {
    /// Merges the layers. Without `file`, `sapwood.toml` of the current directory is used if it is there.
    ///
    /// # Errors
    /// [`CliError::usage`] if `file` cannot be read.
    pub(crate) fn read(file: Option<&Path>, flags: Flags) -> Result<Self, CliError> {
        let mut figment = Figment::from(Serialized::defaults(Config::default()));
        let path = file.unwrap_or_else(|| Path::new("sapwood.toml"));
        let mut found = None;
        // A file that was named must exist; the one in the working directory need not.
        if file.is_some() || path.is_file() {
            let text = std::fs::read_to_string(path).map_err(|error| {
                CliError::usage(format!(
                    "cannot read the configuration file {}: {error}",
                    path.display()
                ))
            })?;
            // The text is handed over, because figment takes a missing file for an empty one.
            let read = || File {
                path: path.into(),
                toml: Toml::string(&text),
            };
            figment = figment.merge(read());
            if file.is_none() {
                // What it lacks or cannot say is reported when everything is read.
                let token = Figment::from(read()).extract_inner::<String>("hub.token");
                let token = token.ok().filter(|token| !token.is_empty());
                found = Some(FoundFile {
                    hub_token: token.map(Secret::from),
                });
            }
        }
        let environment = Environment::read();
        // In this order: what is merged later wins.
        let figment = figment.merge(environment.clone()).merge(flags.clone());
        Ok(Self {
            figment,
            flags,
            environment,
            found,
        })
    }

    /// Warnings about environment variables with our prefix that set no key.
    pub(crate) fn strangers(&self) -> &[String] {
        self.environment.strangers()
    }

    /// Logs these warnings.
    pub(crate) fn warn_unknown_keys(&self) {
        for stranger in self.strangers() {
            tracing::warn!("{stranger}");
        }
        for name in self.environment.passed_over() {
            tracing::debug!(name, "ignored a variable of a Kubernetes service");
        }
    }

    /// The effective configuration, checked.
    ///
    /// # Errors
    /// [`CliError::usage`], with the key and the origin of the wrong value.
    pub(crate) fn config(&self) -> Result<Config, CliError> {
        let mut config: Config = self
            .figment
            .extract()
            .map_err(|error| self.explain(error))?;
        self.withhold_token(&mut config);
        config.hub.proxies = environment::proxies();
        config.check()?;
        Ok(config)
    }

    /// Keeps the user's token of the hub from an endpoint that a file names which merely lies in the working directory:
    /// it may have come with somebody else's project. Only a token in the same file is for it.
    fn withhold_token(&self, config: &mut Config) {
        let of_file = matches!(self.origin("hub.endpoint"), ValueOrigin::File(_));
        let Some(found) = self.found.as_ref().filter(|_| of_file) else {
            return;
        };
        if config.hub.is_default_endpoint() {
            return;
        }
        config.hub.is_foreign = true;
        config.hub.token.clone_from(&found.hub_token);
    }

    /// The layer that the value of a dotted key came from.
    pub(crate) fn origin(&self, key: &str) -> ValueOrigin {
        let Some(metadata) = self.figment.find_metadata(key) else {
            return ValueOrigin::Default;
        };
        self.name(metadata, key)
    }

    fn name(&self, metadata: &Metadata, key: &str) -> ValueOrigin {
        match &metadata.source {
            Some(Source::File(path)) => ValueOrigin::File(path.clone()),
            _ if metadata.name == FLAGS => {
                ValueOrigin::Flag(self.flags.name_of(key).unwrap_or("on the command line"))
            }
            _ if metadata.name == SOURCE => ValueOrigin::Environment(
                self.environment.name_of(key).unwrap_or_default().to_owned(),
            ),
            _ => ValueOrigin::Default,
        }
    }

    /// One line: the error, its key, and where the value was written.
    fn explain(&self, error: figment::Error) -> CliError {
        // Only the first of several errors, because a command that fails ends with one line.
        let first = error.into_iter().next();
        let Some(first) = first else {
            return CliError::usage("the configuration cannot be read");
        };
        let mut path = first.path.clone();
        if let figment::error::Kind::UnknownField(name, _) = &first.kind
            && path.last() != Some(name)
        {
            // figment names the table of an unknown key, and not always the key.
            path.push(name.clone());
        }
        // The error's own text would name the profile of figment, which no user knows.
        let key = path.join(".");
        let origin = first
            .metadata
            .as_ref()
            .map(|metadata| format!(" ({})", self.name(metadata, &key)));
        let key = if key.is_empty() {
            String::new()
        } else {
            format!("{key}: ")
        };
        let what = match &first.kind {
            figment::error::Kind::UnknownField(name, known) => unknown(name, known),
            // Other errors print the value that they found.
            _ if may_hold_secret(&path.join(".")) => NOT_SHOWN.to_owned(),
            other => unquoted(&other.to_string()),
        };
        let origin = origin.unwrap_or_default();
        CliError::usage(format!("configuration: {key}{what}{origin}"))
    }
}

/// A hint for an unknown key: the nearest known one, or all of them.
fn unknown(name: &str, known: &[&str]) -> String {
    match nearest(name, known.iter().copied()) {
        Some(best) => format!("unknown field; did you mean `{best}`?"),
        None => format!("unknown field; there are: {}", known.join(", ")),
    }
}

/// The known name that is nearest to `name`.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = |known: &&str| strsim::damerau_levenshtein(name, known);
    known
        .min_by_key(near)
        // A suggestion that is far off is worse than the list of all names.
        .filter(|best| near(best) <= 1 + name.len() / 4)
}

/// A parse error of a file, without the quoted line, because that may hold a secret.
fn unquoted(error: &str) -> String {
    let is_quoted = |line: &&str| {
        let rest = line.trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit());
        rest.starts_with('|') || rest.is_empty()
    };
    let reported: Vec<&str> = error.lines().filter(|line| !is_quoted(line)).collect();
    reported.join(": ")
}

/// A configuration file that was read already, so that a missing file is never taken for an empty one.
struct File {
    path: PathBuf,
    toml: figment::providers::Data<Toml>,
}

impl Provider for File {
    fn metadata(&self) -> Metadata {
        Metadata::from("file", Source::File(self.path.clone()))
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        self.toml.data()
    }
}

/// A list value for [`Flags::set`].
pub(crate) fn list(values: impl IntoIterator<Item = Value>) -> Value {
    Value::Array(Tag::Default, values.into_iter().collect())
}

const FLAGS: &str = "command line";
/// The error text for a secret that cannot be parsed.
const NOT_SHOWN: &str = "it cannot be parsed; write it as config.example.toml does";
