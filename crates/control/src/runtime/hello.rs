//! The op `hello`: what this runtime can do beyond the protocol (AI-1001).

use serde::Deserialize;
use serde_json::{Value, json};

use super::envelope::{Envelope, RequestError};

/// Answers a `hello` of either channel.
pub(super) fn answer(envelope: Envelope) -> Result<Value, RequestError> {
    #[derive(Deserialize)]
    struct Hello {
        #[serde(default)]
        features: Vec<String>,
    }
    let Hello { features } = envelope.decode()?;
    let accepted: Vec<_> = FEATURES
        .iter()
        .filter(|known| features.iter().any(|asked| asked == *known))
        .collect();
    Ok(json!({
        "runtime": "sapwood",
        "version": env!("CARGO_PKG_VERSION"),
        "dialects": ["p1", "p2"],
        "features": accepted,
        "limits": {"side_pending": super::side::SIDE_PENDING_MAX},
    }))
}

/// The features of the wire that this runtime has.
const FEATURES: &[&str] = &["cancel", "manage"];
