//! Loads and unloads models on request (TR-706).

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use http::{Extensions, StatusCode};
use sapwood_kernel::Name;
use sapwood_proto::code::Code;

use super::catalog::{ModelCatalog, foreign};
use super::options::OnModelLoaded;
use super::request_error::RequestError;
use crate::auth::caller::Caller;
use crate::auth::scopes::KeyScope;

/// Loads and unloads models. Both resolve when it is done; dropping the future does not undo what has begun.
pub trait Repository: Send + Sync {
    /// Loads a model, in place of the one of this name, if there is one. `config`: its configuration as JSON, in place
    /// of the server's, for this load. `loaded` is called when it is loaded, whether or not the future is still there, and
    /// before the model can be changed again.
    fn load(
        &self,
        name: &str,
        config: Option<String>,
        loaded: OnModelLoaded,
    ) -> BoxFuture<'static, Result<(), ModelControlError>>;

    /// Waits until running requests have finished, or their time is over, and removes the model.
    fn unload(&self, name: &str) -> BoxFuture<'static, Result<(), ModelControlError>>;
}

/// Why a model was neither loaded nor unloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelControlError {
    /// No model of this name is configured.
    Unknown,
    /// The configuration in the request is invalid, and why.
    Config(String),
    /// It failed; the log says why.
    Broken,
}

/// A repository whose models clients may load and unload.
#[derive(Clone)]
pub struct ExplicitRepository(pub Arc<dyn Repository>);

impl fmt::Debug for ExplicitRepository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Explicit")
    }
}

/// An action on a model of the repository.
#[derive(Debug)]
pub(super) enum ControlAction {
    Load(LoadParameters),
    Unload,
}

/// The parameters of a request to load.
#[derive(Debug, Default)]
pub(super) struct LoadParameters {
    config: Option<String>,
}

impl LoadParameters {
    /// Takes one more parameter; `value` is its text, if it is one. Unknown parameters are ignored.
    ///
    /// # Errors
    /// `unimplemented` for files; `invalid-request` for a configuration that is no text.
    pub(super) fn take(&mut self, name: &str, value: Option<&str>) -> Result<(), RequestError> {
        // Refused and not ignored: the client would believe that the model it sent was loaded.
        if name.starts_with("file:") {
            let message = "files of a model can not be sent with a request to load it";
            return Err(RequestError::new(Code::Unimplemented, message));
        }
        if name == "config" {
            let wrong = || {
                let message = "parameter 'config' must be the text of a JSON object";
                RequestError::new(Code::InvalidRequest, message)
            };
            self.config = Some(value.ok_or_else(wrong)?.to_owned());
        }
        Ok(())
    }
}

/// Checks that the caller may change this model, and that models can be changed at all.
pub(super) fn allowed<'a>(
    catalog: &'a ModelCatalog,
    extensions: &Extensions,
    model: &str,
) -> Result<&'a ExplicitRepository, RequestError> {
    let caller = Caller::of(extensions)?;
    // Here and not by the route alone: a path that is encoded in another way has the scope of a wildcard route.
    caller.require(KeyScope::Admin)?;
    // A key for some models changes no others.
    if !caller.may_use(&Name::shared(model)) {
        return Err(foreign());
    }
    catalog.config.repository.as_ref().ok_or_else(|| {
        // The text of the reference, which clients know; there is no polling here (TR-706).
        let message = "explicit model load / unload is not allowed if polling is enabled";
        RequestError::new(Code::Unavailable, message)
    })
}

/// Carries out the action, and waits until it is done.
///
/// # Errors
/// Those of the repository.
pub(super) async fn act(
    catalog: &ModelCatalog,
    explicit: &ExplicitRepository,
    name: &str,
    act: ControlAction,
) -> Result<(), RequestError> {
    let (verb, done) = match act {
        ControlAction::Load(asked) => {
            // Handed down and not set here: a load goes on when its caller is gone, or its time is over.
            let loaded = catalog.on_loaded(name);
            ("load", explicit.0.load(name, asked.config, loaded).await)
        }
        ControlAction::Unload => ("unload", explicit.0.unload(name).await),
    };
    done.map_err(|failed| {
        let refuse =
            |code, why: &str| RequestError::new(code, format!("failed to {verb} '{name}', {why}"));
        match failed {
            ModelControlError::Unknown => {
                refuse(Code::NotFound, "no such model in the configuration")
                    .with_status(StatusCode::BAD_REQUEST)
            }
            ModelControlError::Config(why) => refuse(Code::InvalidRequest, &why),
            ModelControlError::Broken => refuse(Code::Internal, "the server's log says why"),
        }
    })
}
