//! Request extensions: typed values that travel from a call to the calls made within it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A layer's values for the request that a call belongs to. Clones share them.
#[derive(Clone)]
pub struct RequestContext(Arc<dyn Any + Send + Sync>);

impl RequestContext {
    /// Stores the value to pass down.
    #[must_use]
    pub fn of(what: impl Any + Send + Sync) -> Self {
        Self(Arc::new(what))
    }

    /// The value that was passed down, if it is of this type.
    #[must_use]
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for RequestContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Behalf")
    }
}
