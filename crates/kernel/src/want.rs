//! What a caller requests of a call: ports, mimetypes, a schema.

use std::sync::Arc;

use serde_json::Value;

use crate::name::{Mime, Port};

/// The ports that a caller reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RequestedPorts {
    /// Every one.
    #[default]
    All,
    /// Only these. Others need not be produced, and are dropped (KE-135).
    Only(Vec<Port>),
}

impl RequestedPorts {
    /// Only the main port.
    #[must_use]
    pub fn main() -> Self {
        Self::Only(vec![Port::MAIN])
    }

    /// Whether `port` is requested.
    #[must_use]
    pub fn has(&self, port: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(ports) => ports.iter().any(|mine| *mine == *port),
        }
    }
}

/// What the caller requests of a call.
#[non_exhaustive]
#[derive(Clone, Debug, Default)]
pub struct Want {
    /// The ports it reads.
    pub ports: RequestedPorts,
    /// The mimetypes it accepts there; patterns allowed.
    pub mimes: Vec<Mime>,
    /// The JSON Schema it expects, if it expects JSON.
    pub schema: Option<Arc<Value>>,
    /// Whether it reads raw objects (KE-115).
    pub inner: bool,
}

impl Want {
    /// Requests these mimetypes on the main port.
    #[must_use]
    pub fn main(mimes: impl IntoIterator<Item = Mime>) -> Self {
        Self {
            ports: RequestedPorts::main(),
            mimes: mimes.into_iter().collect(),
            schema: None,
            inner: false,
        }
    }
}

/// Requests everything: all ports, any mimetype, no raw objects.
impl From<RequestedPorts> for Want {
    fn from(ports: RequestedPorts) -> Self {
        Self {
            ports,
            ..Self::main([Mime::ANY])
        }
    }
}
