//! [`Function`]: what a kernel calls by name.

use std::sync::Arc;

use crate::Chunks;
use crate::call::Call;
use crate::spec::Spec;

/// A function as kernels and layers share it.
pub type Fun = Arc<dyn Function>;

/// A named streaming function. Native code, models, remote actions and layered functions are all of this type.
pub trait Function: Send + Sync + 'static {
    /// Its spec. The same value for its whole life.
    fn spec(&self) -> &Spec;

    /// Calls it. Returns at once and does nothing observable before the stream is first polled; dropping the stream
    /// stops all work of the call before `drop` returns (KE-131, KE-501).
    fn call(&self, call: Call) -> Chunks;
}
