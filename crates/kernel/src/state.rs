//! [`State`]: the argument through which a function gets a value that its program shares with it, as in axum.

use std::any::{TypeId, type_name};
use std::ops::{Deref, DerefMut};

use crate::error::Error;

/// A clone of the kernel's value of type `S`, as the first argument of a function's code:
/// `|State(db): State<Db>, args: Query| async move { … }`. [`Kernel::set_state`](crate::Kernel::set_state) sets it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State<S>(pub S);

impl<S> Deref for State<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.0
    }
}

impl<S> DerefMut for State<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.0
    }
}

/// The type of the state that a function's code takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededState {
    pub(crate) id: TypeId,
    name: &'static str,
}

impl NeededState {
    pub(crate) fn of<S: 'static>() -> Self {
        Self {
            id: TypeId::of::<S>(),
            name: type_name::<S>(),
        }
    }

    /// The error of a function whose kernel has no such state.
    pub(crate) fn missing(self, function: &crate::Name) -> Error {
        let why = format!(
            "needs the state {}: call Kernel::set_state before you add the function",
            self.name
        );
        Error::argument(function.clone(), why)
    }
}
