//! Opens the steerers that a request asks for.

use sapwood_proto::steer::{
    Combined, ConstraintChoice, ConstraintKind, ControllerChoice, Steer, SteerCall, SteerRefusal,
    VariablesSharer,
};

use super::config::{GenerateConfig, VariablesSharing};
use crate::Result;
use crate::error::Error;
use crate::steering::{SteerRights, Steering};

/// The steerers that a request asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SteerChoice {
    controller: Option<ControllerChoice>,
    constraint: Option<ConstraintChoice>,
    /// What they print and write is read.
    watched: bool,
    sharer: Option<VariablesSharing>,
}

impl SteerChoice {
    pub(super) fn of(config: &GenerateConfig, watched: bool) -> Self {
        Self {
            controller: config.controller.clone(),
            constraint: config.constraint.clone(),
            watched,
            sharer: config.sharer.clone(),
        }
    }

    /// Whether there is nothing to open.
    pub(crate) const fn is_none(&self) -> bool {
        self.controller.is_none() && self.constraint.is_none()
    }

    /// The kind and the pattern of a native constraint, which gives the form of the output; it may be named as a controller too.
    pub(super) fn pattern(&self) -> Option<(ConstraintKind, &str)> {
        let constraint = self.constraint.as_ref();
        let pattern = constraint.map(|choice| (choice.kind, &*choice.value));
        pattern.or_else(|| {
            let controller = self.controller.as_ref()?;
            Some((controller.native()?, &*controller.arg))
        })
    }

    /// Fails if there is something to open, where nothing can be steered (AI-827).
    ///
    /// # Errors
    /// `Unimplemented`.
    pub(crate) fn refuse(&self) -> Result<()> {
        let what = match (&self.controller, &self.constraint) {
            (None, None) => return Ok(()),
            (Some(_), _) => "a controller of this model",
            (None, Some(_)) => "a response_format of this model",
        };
        Err(Error::Unimplemented { what: what.into() })
    }

    /// Opens them, for a request that has `stops` or not; `None` if there is nothing to open. May take as long as a grammar takes to
    /// compile.
    ///
    /// # Errors
    /// There is no such controller, the caller may not run it, or its argument is wrong.
    pub(super) fn open(
        &self,
        steering: &Steering,
        rights: &SteerRights,
        stops: bool,
    ) -> Result<Option<Box<dyn Steer>>> {
        let open = |controller: &str, arg: &str, sharer: Option<&dyn VariablesSharer>| {
            let call = SteerCall {
                user: rights.as_user(),
                controller,
                arg,
                watched: self.watched,
                stops,
                sharer,
            };
            steering.source.open(call).map_err(refusal)
        };
        // The controller first: who may not run it learns nothing of how long a grammar takes.
        let controller = self.controller.as_ref();
        let sharer = self.sharer.as_ref().map(|sharing| &*sharing.0);
        let controller = controller.map(|choice| open(&choice.id, &choice.arg, sharer));
        let controller = controller.transpose()?;
        let constraint = self.constraint.as_ref();
        let constraint =
            constraint.map(|choice| open(&choice.kind.controller(), &choice.argument(), None));
        let steerers: Vec<_> = controller
            .into_iter()
            .chain(constraint.transpose()?)
            .collect();
        // Of both the masks are intersected (D-38). The controller decides first where both could.
        Ok((!steerers.is_empty()).then(|| Combined::new(steerers)))
    }
}

fn refusal(refusal: SteerRefusal) -> Error {
    Error::Engine {
        code: refusal.code,
        reason: refusal.reason,
        message: refusal.message,
        retry_after: None,
    }
}
