//! LoRA adapters of a model, and which of them compute for a request.
//!
//! One decode call computes with one `AdapterSet`, because llama.cpp has one set per context, so the owner decodes
//! sequences with different sets in different steps. What is computed with one set is of no use to another: the prefixes of
//! each set have scopes of their own.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::{LoraName, LoraUse};
use sha2::{Digest as _, Sha256};

pub use crate::api::AdapterInfo;
use crate::api::EngineError;

/// Returns the scales of a model's adapters for requests that choose none, in the order of its list; 0 is off.
pub(crate) fn default_scales(adapters: &[AdapterInfo]) -> Vec<f32> {
    let scales = adapters.iter();
    scales
        .map(|it| if it.applied { it.scale } else { 0.0 })
        .collect()
}

/// The adapters that compute for a request, where they are not those that the model applies by default.
#[derive(Clone, Debug)]
pub(crate) struct AdapterSet {
    /// One for each adapter of the model; 0 is off.
    scales: Arc<[f32]>,
    key: u64,
}

impl AdapterSet {
    /// The set that a request has chosen; `None` if that is the model's default. The choice is sound
    /// ([`GenerationParams::check`](sapwood_proto::params::GenerationParams::check)).
    ///
    /// # Errors
    /// `BAD_CONFIG` for an adapter that the model does not have, with the names of those that it has.
    pub(crate) fn of(
        chosen: &[LoraUse],
        adapters: &[AdapterInfo],
    ) -> Result<Option<Self>, EngineError> {
        let mut scales: Vec<Option<f32>> = vec![None; adapters.len()];
        for LoraUse { adapter, scale } in chosen {
            let at = match adapter {
                LoraName::Name(name) => adapters.iter().position(|it| it.name == *name),
                LoraName::Index(index) => Some(*index as usize),
            };
            let Some((slot, info)) =
                at.and_then(|at| Some((scales.get_mut(at)?, adapters.get(at)?)))
            else {
                return Err(unknown(adapter, adapters));
            };
            // By its name and by its number.
            if slot.is_some() {
                let message = format!("lora: the adapter {:?} is named twice", info.name);
                return Err(EngineError::invalid(ErrorReason::BAD_CONFIG, message));
            }
            *slot = Some(scale.unwrap_or(info.scale));
        }
        let scales: Vec<f32> = scales.into_iter().map(Option::unwrap_or_default).collect();
        // Compared as numbers: a scale of -0 is off as well.
        if scales == default_scales(adapters) {
            return Ok(None);
        }
        Ok(Some(Self::new(scales)))
    }

    fn new(mut scales: Vec<f32>) -> Self {
        for scale in scales.iter_mut().filter(|scale| **scale == 0.0) {
            // One form for "off": -0 has other bits.
            *scale = 0.0;
        }
        Self {
            key: digest(None, &scales),
            scales: scales.into(),
        }
    }

    /// The scales of the model's adapters, in the order of its list.
    pub(crate) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Equal for equal sets; never [`DEFAULT_ADAPTERS`].
    pub(crate) const fn key(&self) -> u64 {
        self.key
    }

    /// Returns the scope of this set's prefixes within another scope. It is the same in the next process, for prefixes in
    /// files.
    pub(crate) fn prefix_scope(&self, within: u64) -> u64 {
        digest(Some(within), &self.scales)
    }
}

/// The key of the adapters that a model applies by default.
pub(crate) const DEFAULT_ADAPTERS: u64 = 0;

/// Cryptographic, because callers choose the scales: nobody can find those whose prefixes would be another caller's.
fn digest(scope: Option<u64>, scales: &[f32]) -> u64 {
    let mut digest = Sha256::new();
    digest.update(b"lora");
    if let Some(scope) = scope {
        digest.update(scope.to_le_bytes());
    }
    for scale in scales {
        digest.update(scale.to_le_bytes());
    }
    let digest = digest.finalize();
    let first = digest.first_chunk().copied().unwrap_or([1; 8]);
    u64::from_le_bytes(first).max(DEFAULT_ADAPTERS + 1)
}

/// The adapters that an error lists; the model's configuration lists all.
const NAMES_SHOWN: usize = 8;

fn unknown(asked: &LoraName, adapters: &[AdapterInfo]) -> EngineError {
    let message = if adapters.is_empty() {
        "lora: this model has no adapters: leave the parameter out".to_owned()
    } else {
        let named = adapters.iter().take(NAMES_SHOWN);
        let names: Vec<_> = named.map(|it| format!("{:?}", it.name)).collect();
        let names = names.join(", ");
        let more = match adapters.len().saturating_sub(NAMES_SHOWN) {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        format!("lora: this model has no adapter {asked}; by number from 0 it has: {names}{more}")
    };
    EngineError::invalid(ErrorReason::BAD_CONFIG, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapters() -> Vec<AdapterInfo> {
        let adapter = |name: &str, scale, applied| AdapterInfo {
            name: name.to_owned(),
            scale,
            applied,
        };
        vec![
            adapter("style", 1.0, true),
            adapter("facts", 0.5, true),
            adapter("code", 2.0, false),
        ]
    }

    fn by_number(index: u32) -> LoraUse {
        LoraUse {
            adapter: LoraName::Index(index),
            scale: None,
        }
    }

    fn scales(chosen: &[LoraUse]) -> Option<Vec<f32>> {
        let set = AdapterSet::of(chosen, &adapters()).unwrap();
        set.map(|set| set.scales().to_vec())
    }

    #[test]
    fn a_request_chooses_by_name_or_number_and_the_rest_is_off() {
        let code = LoraUse::named("code");
        for (chosen, expected) in [
            (vec![], [0.0, 0.0, 0.0]),
            (vec![code.clone()], [0.0, 0.0, 2.0]),
            (
                vec![by_number(1), code.clone().scaled(-1.0)],
                [0.0, 0.5, -1.0],
            ),
            (vec![LoraUse::named("style").scaled(0.25)], [0.25, 0.0, 0.0]),
        ] {
            assert_eq!(scales(&chosen), Some(expected.to_vec()), "{chosen:?}");
        }
        let default = [by_number(0), LoraUse::named("facts"), code.scaled(-0.0)];
        assert_eq!(scales(&default), None, "what the model applies anyway");
        assert_eq!(AdapterSet::of(&[], &[]).unwrap().map(|set| set.key), None);
    }

    #[test]
    fn what_a_model_does_not_have_is_refused_with_what_it_has() {
        let error = |chosen: &[LoraUse], adapters: &[AdapterInfo]| {
            let error = AdapterSet::of(chosen, adapters).unwrap_err();
            assert_eq!(error.reason, ErrorReason::BAD_CONFIG);
            error.message
        };
        for chosen in [by_number(3), by_number(u32::MAX), LoraUse::named("Style")] {
            let message = error(std::slice::from_ref(&chosen), &adapters());
            assert!(message.contains(r#""style", "facts", "code""#), "{message}");
            assert!(!message.contains("more"), "{message}");
            assert!(message.contains(&chosen.adapter.to_string()), "{message}");
            let message = error(&[chosen], &[]);
            assert!(message.contains("no adapters"), "{message}");
        }
        let longest = |at| AdapterInfo {
            name: format!("{at:0>128}"),
            scale: 1.0,
            applied: true,
        };
        let many: Vec<_> = (0..64).map(longest).collect();
        let message = error(&[LoraUse::named("style")], &many);
        assert!(message.ends_with(", and 56 more"), "{message}");
        assert!(message.len() < 1200, "{message}");
        let twice = error(&[LoraUse::named("facts"), by_number(1)], &adapters());
        assert!(twice.contains("\"facts\" is named twice"), "{twice}");
    }

    #[test]
    fn equal_sets_have_one_key_and_others_have_other_scopes() {
        let set = |chosen: &[LoraUse]| AdapterSet::of(chosen, &adapters()).unwrap().unwrap();
        let (none, silent) = (set(&[]), set(&[LoraUse::named("code").scaled(-0.0)]));
        assert_eq!(none.key(), silent.key());
        assert_eq!(none.prefix_scope(7), silent.prefix_scope(7));
        let code = set(&[LoraUse::named("code")]);
        let scopes = [&none, &code].map(|set| [0, 7].map(|scope| set.prefix_scope(scope)));
        let mut all = scopes.concat();
        all.extend([0, 7, none.key(), code.key()]);
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!(all.len(), count, "{all:?}");
        // Written into files of prefixes.
        assert_eq!(none.prefix_scope(7), 9_848_374_549_084_150_866);
    }
}
