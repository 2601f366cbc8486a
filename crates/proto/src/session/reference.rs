//! References to external content, as readers reach them (EV-410).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use bytestring::ByteString;

use super::port::NodeKey;
use crate::evergreen::Metadata;

/// A reference that a reader has reached (EV-410).
#[derive(Clone, Debug)]
pub struct Referenced {
    /// Index of the item, from 0.
    pub item: u32,
    /// Whether it begins the item.
    pub first: bool,
    /// The leaf that it is part of.
    pub node: NodeKey,
    /// The item's metadata; it does not describe the URI.
    pub metadata: Arc<Metadata>,
    /// The external content that it refers to.
    pub content: Arc<ExternalContent>,
}

/// External content, with a slot for what the shell has fetched of it. All readers share that slot; it is dropped when
/// the fragment with the reference is released.
pub struct ExternalContent {
    uri: ByteString,
    fetched: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl ExternalContent {
    /// Creates external content at `uri`. The URI is copied: it may be a view of a receive buffer (EV-805).
    #[must_use]
    pub fn new(uri: &str) -> Self {
        Self {
            uri: ByteString::from(uri.to_owned()),
            fetched: OnceLock::new(),
        }
    }

    /// Its URI. It may contain credentials: never logged, never sent.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Returns the shell's data for this content, created on the first call. Each shell uses one type.
    pub fn keep<T: Any + Send + Sync>(&self, make: impl Fn() -> T) -> Arc<T> {
        let retained = self.fetched.get_or_init(|| Arc::new(make()));
        let retained = Arc::clone(retained).downcast();
        // A second type cannot share the slot, so its value is not retained.
        retained.unwrap_or_else(|_| Arc::new(make()))
    }
}

impl fmt::Debug for ExternalContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the URI, which may contain credentials.
        f.write_str("ExternalContent")
    }
}
