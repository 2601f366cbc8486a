//! The keys of `[engine.sampling]` and of `sampling` of `[[models]]`: values for parameters that a request leaves unset, by
//! the names that requests have for them.

use std::fmt;

use sapwood_kernel::SamplingDefaults;
use sapwood_proto::params::{GenerationParams, JsonCoercion, ParamSpec};
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::ServedModelConfig;
use crate::failure::CliError;

/// Sampling defaults as the configuration has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SamplingConfig(SamplingDefaults);

impl SamplingConfig {
    /// The defaults of a model of this server: its own, and where it has none, those of all.
    pub(crate) fn of(&self, all: &Self) -> SamplingDefaults {
        self.0.or(&all.0)
    }

    /// These alone.
    pub(crate) fn alone(&self) -> SamplingDefaults {
        self.0.clone()
    }

    fn is_empty(&self) -> bool {
        self.0 == SamplingDefaults::default()
    }

    /// Its keys that are set.
    pub(super) fn serialize_set<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.params().to_json().unwrap_or_default().serialize(to)
    }
}

/// Every key, because the names of the keys are taken from the configuration as it is written; null if it is not set.
impl Serialize for SamplingConfig {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let set = self.0.params().to_json().unwrap_or_default();
        let mut map = to.serialize_map(Some(SamplingDefaults::NAMES.len()))?;
        for name in SamplingDefaults::NAMES {
            map.serialize_entry(name, &set.get(name))?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for SamplingConfig {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(SamplingVisitor)
    }
}

struct SamplingVisitor;

impl<'de> Visitor<'de> for SamplingVisitor {
    type Value = SamplingConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of sampling parameters")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut params = GenerationParams::default();
        while let Some(name) = map.next_key::<String>()? {
            let known = SamplingDefaults::NAMES.contains(&name.as_str());
            let Some(param) = ParamSpec::named(&name).filter(|_| known) else {
                return Err(A::Error::unknown_field(&name, &SamplingDefaults::NAMES));
            };
            // As a seed, so that an error has the path of this key and not of its table.
            map.next_value_seed(ParamValue {
                param,
                params: &mut params,
            })?;
        }
        let defaults = SamplingDefaults::new(params).map_err(A::Error::custom)?;
        Ok(SamplingConfig(defaults))
    }
}

/// Reads the value of one parameter.
struct ParamValue<'a> {
    param: &'static ParamSpec,
    params: &'a mut GenerationParams,
}

impl<'de> DeserializeSeed<'de> for ParamValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        let value = Value::deserialize(from)?;
        if value.is_null() {
            return Ok(());
        }
        let (ranges, coercion) = (&SamplingDefaults::RANGES, JsonCoercion::Strict);
        let read = self.params.set_json(self.param, &value, ranges, coercion);
        read.map_err(|error| D::Error::custom(format_args!("must be {}, not {value}", error.must)))
    }
}

impl ServedModelConfig {
    /// A model that embeds has no sampling defaults: they would do nothing, and their author expects something of them.
    pub(super) fn check_sampling(&self) -> Result<(), CliError> {
        if self.embedding != Some(true) || self.sampling.is_empty() {
            return Ok(());
        }
        Err(CliError::usage(format!(
            "models.sampling: the model `{}` embeds, and samples nothing",
            self.name
        )))
    }
}
