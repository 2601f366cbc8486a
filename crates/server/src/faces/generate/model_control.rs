//! Loads and unloads models on request (TR-706).

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use http::{Extensions, StatusCode};
use sapwood_kernel::Name;
use sapwood_proto::code::Code;

use super::catalog::{ModelCatalog, foreign};
use super::options::ModelOptions;
use super::request_error::RequestError;
use crate::auth::caller::Caller;
use crate::auth::scopes::KeyScope;

/// Loads and unloads models. Both resolve when it is done; dropping the future does not undo what has begun.
pub trait Repository: Send + Sync {
    /// Loads a model, instead of the one of this name that may be there. `config`: what it is to be, as JSON, in place of what
    /// was configured, for this time.
    fn load(
        &self,
        name: &str,
        config: Option<String>,
    ) -> BoxFuture<'static, Result<ModelOptions, ModelControlError>>;

    /// Lets what runs finish, as long as that may take, and takes the model out.
    fn unload(&self, name: &str) -> BoxFuture<'static, Result<(), ModelControlError>>;
}

/// Why a model was neither loaded nor unloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelControlError {
    /// Nobody has configured one of that name.
    Unknown,
    /// The configuration that came with the request does not read, and why.
    Config(String),
    /// It could not be done; the log knows why.
    Broken,
}

/// A repository that clients may change.
#[derive(Clone)]
pub struct ExplicitRepository(pub Arc<dyn Repository>);

impl fmt::Debug for ExplicitRepository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Explicit")
    }
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum ControlAction {
    Load(LoadParameters),
    Unload,
}

/// What a request to load says beside the name.
#[derive(Debug, Default)]
pub(super) struct LoadParameters {
    config: Option<String>,
}

impl LoadParameters {
    /// One parameter of the request more, if it is a text. Others mean nothing.
    ///
    /// # Errors
    /// `unimplemented` for files.
    pub(super) fn take(&mut self, name: &str, value: Option<&str>) -> Result<(), RequestError> {
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

/// Who may change this model of the repository, and whether anybody may. A key for some models changes no others.
pub(super) fn allowed<'a>(
    catalog: &'a ModelCatalog,
    extensions: &Extensions,
    model: &str,
) -> Result<&'a ExplicitRepository, RequestError> {
    let caller = Caller::of(extensions)?;
    caller.require(KeyScope::Admin)?;
    if !caller.may_use(&Name::shared(model)) {
        return Err(foreign());
    }
    catalog.config.repository.as_ref().ok_or_else(|| {
        let message = "explicit model load / unload is not allowed if polling is enabled";
        RequestError::new(Code::Unavailable, message)
    })
}

/// Does it, and waits until it is done.
///
/// # Errors
/// What the repository says.
pub(super) async fn act(
    catalog: &ModelCatalog,
    explicit: &ExplicitRepository,
    name: &str,
    act: ControlAction,
) -> Result<(), RequestError> {
    let (verb, done) = match act {
        ControlAction::Load(asked) => ("load", explicit.0.load(name, asked.config).await.map(Some)),
        ControlAction::Unload => ("unload", explicit.0.unload(name).await.map(|()| None)),
    };
    let reported = done.map_err(|failed| {
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
    })?;
    if let Some(model) = reported {
        catalog.set_options(name, model);
    }
    Ok(())
}
