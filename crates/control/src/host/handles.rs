//! [`HostHandles`]: what a controller has in the host beside its memory, constraints and masks (AI-1007), by number.
//!
//! Both share one table, because both are freed by one function and count against one limit.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{HostConstraint, SharedMask, Steered};

use super::failure::Abort;

/// The constraints and masks of one instance. A handle is a place in the list plus 1: 0 is what fails.
#[derive(Default)]
pub(super) struct HostHandles(Vec<Option<Held>>);

struct Held {
    object: Object,
    bytes: usize,
}

enum Object {
    Constraint(Box<dyn HostConstraint>),
    Mask(SharedMask),
}

impl HostHandles {
    /// Takes a constraint. Returns its handle.
    pub(super) fn add_constraint(
        &mut self,
        mut constraint: Box<dyn HostConstraint>,
    ) -> Result<u32, Abort> {
        let bytes = constraint.bytes();
        self.add(Object::Constraint(constraint), bytes)
    }

    /// Takes a mask. Returns its handle.
    pub(super) fn add_mask(&mut self, mask: SharedMask) -> Result<u32, Abort> {
        let bytes = size_of_val(mask.words());
        self.add(Object::Mask(mask), bytes)
    }

    fn add(&mut self, object: Object, bytes: usize) -> Result<u32, Abort> {
        let held = Some(Held { object, bytes });
        let place = match self.0.iter().position(Option::is_none) {
            Some(free) => {
                self.0[free] = held;
                free
            }
            None if self.0.len() < HANDLES_MAX => {
                self.0.push(held);
                self.0.len() - 1
            }
            None => return Err(too_many()),
        };
        Ok(u32::try_from(place + 1).unwrap_or(u32::MAX))
    }

    /// Whether there is room for one more; looked at before work is done for it.
    pub(super) fn check_room(&self) -> Result<(), Abort> {
        let live = self.0.iter().flatten().count();
        if live < HANDLES_MAX {
            Ok(())
        } else {
            Err(too_many())
        }
    }

    /// Uses the constraint of a handle, which may take more memory afterwards. `None`: the handle is none of a constraint.
    pub(super) fn with_constraint<T>(
        &mut self,
        handle: u32,
        call: impl FnOnce(&mut (dyn HostConstraint + 'static)) -> T,
    ) -> Option<T> {
        let held = self.place(handle)?.as_mut()?;
        let Object::Constraint(constraint) = &mut held.object else {
            return None;
        };
        let result = call(constraint.as_mut());
        held.bytes = constraint.bytes();
        Some(result)
    }

    /// The mask of a handle, if it is one of a mask.
    pub(super) fn mask(&mut self, handle: u32) -> Option<SharedMask> {
        match &self.place(handle)?.as_ref()?.object {
            Object::Mask(mask) => Some(Arc::clone(mask)),
            Object::Constraint(_) => None,
        }
    }

    /// Frees a handle. Returns whether it was one.
    pub(super) fn free(&mut self, handle: u32) -> bool {
        self.place(handle).and_then(Option::take).is_some()
    }

    /// A copy, for a fork.
    pub(super) fn fork(&mut self) -> Steered<Self> {
        let copies = self.0.iter_mut().map(|held| {
            let Some(Held { object, bytes }) = held else {
                return Ok(None);
            };
            let object = match object {
                Object::Constraint(constraint) => Object::Constraint(constraint.fork()?),
                Object::Mask(mask) => Object::Mask(Arc::clone(mask)),
            };
            let bytes = *bytes;
            Ok(Some(Held { object, bytes }))
        });
        copies.collect::<Steered<_>>().map(Self)
    }

    /// The bytes that all of them take.
    pub(super) fn bytes(&self) -> usize {
        let bytes = self.0.iter().flatten().map(|held| held.bytes);
        bytes.fold(0, usize::saturating_add)
    }

    fn place(&mut self, handle: u32) -> Option<&mut Option<Held>> {
        let place = usize::try_from(handle).ok()?.checked_sub(1)?;
        self.0.get_mut(place)
    }
}

fn too_many() -> Abort {
    let text = format!("more than {HANDLES_MAX} host handles; free those that are not needed");
    Abort::limit(ErrorReason::LIMIT, text)
}

/// Constraints and masks of one instance.
pub(super) const HANDLES_MAX: usize = 64;
