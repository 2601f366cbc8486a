//! The op `hello`: what this runtime can do beyond the protocol (AI-1001).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use serde::Deserialize;
use serde_json::{Value, json};

use super::envelope::{Envelope, RequestError};

/// The features that an engine has asked for and got. Both channels share them.
///
/// They only grow: an engine that asks on both channels, each time for what it needs there, has all of them.
#[derive(Debug, Default)]
pub(crate) struct WireFeatures(AtomicU8);

impl WireFeatures {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// How answers are written from now on.
    pub(crate) fn format(&self) -> AnswerFormat {
        let bits = self.0.load(Ordering::Acquire);
        let has = |feature: u8| bits & feature != 0;
        AnswerFormat {
            bitmask: has(BITMASK),
            compact: has(COMPACT),
            wait: has(WAIT),
        }
    }

    fn accept(&self, bits: u8) {
        self.0.fetch_or(bits, Ordering::AcqRel);
    }
}

/// What features change in the answers of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerFormat {
    /// Rows of masks are bit sets (AI-1002).
    pub(crate) bitmask: bool,
    /// What is empty is left out (AI-1002).
    pub(crate) compact: bool,
    /// What suspended sequences wait for is shown (AI-1005).
    pub(crate) wait: bool,
}

/// Answers a `hello` of either channel.
pub(super) fn answer(envelope: Envelope, accepted: &WireFeatures) -> Result<Value, RequestError> {
    #[derive(Deserialize)]
    struct Hello {
        #[serde(default)]
        features: Vec<String>,
    }
    let Hello { features } = envelope.decode()?;
    let is_asked = |(name, _): &&(&str, u8)| features.iter().any(|asked| asked == name);
    let known: Vec<_> = FEATURES.iter().filter(is_asked).collect();
    for (_, bits) in &known {
        accepted.accept(*bits);
    }
    let names: Vec<_> = known.iter().map(|(name, _)| name).collect();
    Ok(json!({
        "runtime": "sapwood",
        "version": env!("CARGO_PKG_VERSION"),
        "dialects": ["p1", "p1i", "p2"],
        "features": names,
        "limits": {"side_pending": super::side::SIDE_PENDING_MAX},
    }))
}

const BITMASK: u8 = 1;
const COMPACT: u8 = 2;
const WAIT: u8 = 4;

/// The features of the wire that this runtime has. Those that only add ops need not be remembered.
const FEATURES: &[(&str, u8)] = &[
    ("bitmask", BITMASK),
    ("compact", COMPACT),
    ("wait", WAIT),
    ("cancel", 0),
    ("manage", 0),
];
