//! [`RemoteControllers`]: opens steerers in the runtime of another process.

use std::fmt;
use std::sync::Arc;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    CONTROLLER_ARG_BYTES_MAX, Steer, SteerCall, SteerRefusal, SteerSource, SteerUser,
};

use super::epoch::Epoch;
use super::options::{RemoteOptions, RemoteStart};
use super::request::WireAuth;
use super::runtime::{RemoteRuntime, unavailable};
use super::side::UploadError;
use super::steerer::RemoteSteer;
use crate::host::Program;
use crate::module::ModuleId;

/// Finds modules by a controller's name, with the permissions of the user.
pub trait FindModule: Send + Sync {
    /// The module that `name` means now.
    ///
    /// # Errors
    /// There is none, or the user may not run it.
    fn find(&self, user: SteerUser<'_>, name: &str) -> Result<ModuleId, SteerRefusal>;

    /// Prepares a module for a runtime of this program, so that the runtime finds it compiled. It is in use as long as the
    /// program that is returned.
    ///
    /// # Errors
    /// It cannot steer, or cannot be compiled any more.
    fn prepare(&self, id: ModuleId) -> Result<Program, SteerRefusal>;

    /// Its bytes, for a runtime that does not have it.
    ///
    /// # Errors
    /// It cannot be read, or was deleted meanwhile.
    fn bytes(&self, id: ModuleId) -> Result<Vec<u8>, SteerRefusal>;
}

/// The controllers of one model, in the runtime of another process.
pub struct RemoteControllers {
    runtime: RemoteRuntime,
    modules: Arc<dyn FindModule>,
}

impl RemoteControllers {
    /// Controllers in a runtime that is started with `options`.
    ///
    /// # Errors
    /// It was to be started now, and is no runtime for this model; for people.
    pub fn new(
        options: RemoteOptions,
        modules: Arc<dyn FindModule>,
        start: RemoteStart,
    ) -> Result<Self, String> {
        let runtime = RemoteRuntime::new(options);
        if start == RemoteStart::Now {
            runtime.started()?;
        }
        Ok(Self { runtime, modules })
    }

    /// Lets the runtime have a module, which is uploaded at most once to each process.
    fn mirror(
        &self,
        epoch: &Epoch,
        user: WireAuth<'_>,
        module: ModuleId,
    ) -> Result<(), NotMirrored> {
        let id = module.to_string();
        if self.runtime.options().command.own || epoch.uploaded().contains(&id) {
            return Ok(());
        }
        // One after the other: each is in memory three times while it is sent, and requests that come together often want
        // the same one.
        let _turn = epoch.upload_turn();
        if epoch.uploaded().contains(&id) {
            return Ok(());
        }
        let bytes = self.modules.bytes(module).map_err(NotMirrored::Refused)?;
        let answer = epoch.side.upload(user, &bytes, epoch.limits.upload);
        let stored = match answer {
            Ok(stored) => stored,
            Err(UploadError::Lost) => return Err(NotMirrored::Lost),
            Err(UploadError::Busy) => return Err(NotMirrored::Refused(busy())),
            Err(UploadError::Refused(error)) => {
                return Err(NotMirrored::Refused(refusal(&error.text, error.is_user)));
            }
        };
        if stored.module_id.as_ref() != Some(&id) {
            let text = "the runtime stored the module under another id";
            return Err(NotMirrored::Refused(refusal(text, false)));
        }
        epoch.uploaded().insert(id);
        Ok(())
    }
}

/// Why the runtime does not have a module.
enum NotMirrored {
    Refused(SteerRefusal),
    /// The process ended meanwhile.
    Lost,
}

fn refusal(text: &str, is_user: bool) -> SteerRefusal {
    let (code, reason) = if is_user {
        (Code::InvalidRequest, ErrorReason::INVALID_MODULE)
    } else {
        (Code::Unavailable, ErrorReason::CONTROLLERS_UNAVAILABLE)
    };
    SteerRefusal {
        code,
        reason,
        message: text.to_owned(),
    }
}

fn busy() -> SteerRefusal {
    SteerRefusal {
        code: Code::Overloaded,
        reason: ErrorReason::SERVER_OVERLOADED,
        message: "too many controllers are waiting to be started".to_owned(),
    }
}

impl SteerSource for RemoteControllers {
    fn open(&self, call: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal> {
        if call.arg.len() > CONTROLLER_ARG_BYTES_MAX {
            return Err(SteerRefusal {
                code: Code::InvalidRequest,
                reason: ErrorReason::BAD_CONFIG,
                message: format!(
                    "the argument of the controller has {} bytes, the limit is {CONTROLLER_ARG_BYTES_MAX}",
                    call.arg.len(),
                ),
            });
        }
        // They are where the controllers run, and the protocol has no op for them.
        if call
            .sharer
            .as_ref()
            .is_some_and(|sharer| !sharer.take_initial().is_empty())
        {
            return Err(SteerRefusal {
                code: Code::Unimplemented,
                reason: ErrorReason::NONE,
                message:
                    "variables cannot be set with a run here: controllers run in another process"
                        .to_owned(),
            });
        }
        let module = self.modules.find(call.user, call.controller)?;
        let program = match self.runtime.options().command.own {
            // Here and not there: the runtime has to start it in a time that others' controllers wait too.
            true => Some(self.modules.prepare(module)?),
            false => None,
        };
        let user = WireAuth {
            user: call.user.name,
            is_admin: call.user.is_admin,
        };
        // Twice: the process may end between the two, and its successor has no modules.
        for _ in 0..2 {
            let epoch = self.runtime.epoch()?;
            match self.mirror(&epoch, user, module) {
                Ok(()) => return Ok(Box::new(RemoteSteer::new(epoch, module, program, call))),
                Err(NotMirrored::Refused(refusal)) => return Err(refusal),
                Err(NotMirrored::Lost) => {}
            }
        }
        Err(unavailable())
    }
}

impl fmt::Debug for RemoteControllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteControllers")
            .field("runtime", &self.runtime)
            .finish_non_exhaustive()
    }
}
