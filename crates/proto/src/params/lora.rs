//! [`LoraUse`]: a LoRA adapter that a request names, and its scale.

use std::fmt;

use super::{LORA_NAME_BYTES_MAX, LORA_SCALES, LORA_USES_MAX};

/// How a request names one of the adapters of its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoraName {
    /// Its configured name.
    Name(String),
    /// Its place in the model's list, from 0; llama-server's `id`.
    Index(u32),
}

/// As people write it in messages: the name in quotes, or the number.
impl fmt::Display for LoraName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "{name:?}"),
            Self::Index(index) => write!(f, "{index}"),
        }
    }
}

/// One adapter that computes for a request.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraUse {
    /// Which one.
    pub adapter: LoraName,
    /// The factor of what it adds; `None`: the one that is configured.
    pub scale: Option<f32>,
}

impl LoraUse {
    /// An adapter by its name, with its configured scale.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            adapter: LoraName::Name(name.into()),
            scale: None,
        }
    }

    /// The same with this scale.
    #[must_use]
    pub fn scaled(self, scale: f32) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }

    fn is_sound(&self) -> bool {
        let is_named = match &self.adapter {
            LoraName::Name(name) => is_name(name),
            LoraName::Index(_) => true,
        };
        is_named && self.scale.is_none_or(|scale| LORA_SCALES.contains(scale))
    }
}

/// Returns whether an adapter can have this name: 1 to [`LORA_NAME_BYTES_MAX`] bytes that do not begin as JSON, which some
/// parameters have as text, without control characters, and without white space at its ends, which some clients trim.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=LORA_NAME_BYTES_MAX).contains(&name.len())
        && !name.starts_with(['[', '{'])
        && !name.contains(char::is_control)
        && name.trim() == name
}

/// Returns whether these are few enough, with names and scales in their ranges, each named once.
pub(super) fn are_sound(uses: &[LoraUse]) -> bool {
    let names_again = |(index, one): (usize, &LoraUse)| {
        let earlier = uses[..index].iter();
        earlier.clone().any(|other| other.adapter == one.adapter)
    };
    uses.len() <= LORA_USES_MAX
        && uses.iter().all(LoraUse::is_sound)
        && !uses.iter().enumerate().any(names_again)
}
