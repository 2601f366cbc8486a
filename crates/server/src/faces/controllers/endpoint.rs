//! Dispatches the requests of this face, and answers their errors.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{RawPathParams, Request};
use axum::response::IntoResponse;
use http::request::Parts;
use http::{Response, StatusCode, header};
use sapwood_kernel::pool::{BlockingPool, TaskSize};
use sapwood_kernel::{Kernel, SteerRights};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{ControllerStore, SteerRefusal};
use tokio::time::Instant;

use super::live_runs::LiveRuns;
use super::upload_turns::{UploadTurn, UploadTurns};
use super::{Config, models, modules, refusals, run, run_variables};
use crate::auth::caller::Caller;
use crate::auth::scopes::KeyScope;
use crate::context::ServerContext;
use crate::http::rejection::Rejection;
use crate::http::request_trace;

/// What every request of this face starts with.
pub(super) struct ControllersContext {
    pub(super) shared: ServerContext,
    pub(super) kernel: Kernel,
    pub(super) config: Config,
    /// When the models of this process were made, for clients that show it.
    pub(super) began: u64,
    pub(super) runs: Arc<LiveRuns>,
    uploads: UploadTurns,
}

/// What a route does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Info,
    Models,
    Run,
    RunVariables,
    RunVariable,
    SetRunVariable,
    Upload,
    Modules,
    Module,
    DeleteModule,
    Tags,
    SetTags,
    DeleteTag,
}

/// A request, with what its path names.
pub(super) struct AskedAction {
    pub(super) parts: Parts,
    pub(super) body: Body,
    pub(super) caller: Caller,
    pub(super) rights: SteerRights,
    /// The model whose prefix the path has.
    pub(super) model: Option<String>,
    /// The tag, module or run of the path.
    name: Option<String>,
    /// The variable of the path.
    variable: Option<String>,
}

impl ControllersContext {
    pub(super) fn new(shared: ServerContext, kernel: Kernel, config: Config) -> Self {
        Self {
            shared,
            kernel,
            config,
            began: models::unix_seconds(),
            runs: Arc::default(),
            uploads: UploadTurns::default(),
        }
    }

    /// Waits for the turn of an upload of the present caller.
    pub(super) async fn upload_turn(&self) -> Result<UploadTurn, Rejection> {
        let caller = request_trace::present_turn().caller;
        self.uploads.acquire(caller).await
    }

    /// Asks the store, on a thread where waiting is allowed.
    pub(super) async fn ask_store<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&dyn ControllerStore) -> Result<T, SteerRefusal> + Send + 'static,
    ) -> Result<T, Rejection> {
        self.ask_store_as(TaskSize::Large, ask).await
    }

    /// Asks the store in the turn of an upload. Not behind the other large work of its caller: that would keep everybody's
    /// turn. There is one upload at a time, and the thread for small work is free for it.
    pub(super) async fn ask_store_in_turn<T: Send + 'static>(
        &self,
        turn: UploadTurn,
        ask: impl FnOnce(&dyn ControllerStore) -> Result<T, SteerRefusal> + Send + 'static,
    ) -> Result<T, Rejection> {
        self.ask_store_as(TaskSize::Small, move |store| {
            // Until the compiler has ended, also where nobody waits for the answer any more.
            let _turn = turn;
            ask(store)
        })
        .await
    }

    async fn ask_store_as<T: Send + 'static>(
        &self,
        size: TaskSize,
        ask: impl FnOnce(&dyn ControllerStore) -> Result<T, SteerRefusal> + Send + 'static,
    ) -> Result<T, Rejection> {
        let store = self.config.store.clone().ok_or_else(no_store)?;
        let turn = request_trace::present_turn().caller;
        // Not that of prompts, which would wait for modules to compile.
        let pool = BlockingPool::compiling();
        let asked = pool.run(turn, size, move || ask(&*store)).await;
        let asked = asked.map_err(|error| refusals::of_call(&error))?;
        asked.map_err(|refusal| refusals::of_store(&refusal))
    }
}

impl AskedAction {
    /// Reads the path. Fails closed: a request that the middleware has not seen has no caller.
    fn new(params: &RawPathParams, request: Request) -> Result<Self, Rejection> {
        let (parts, body) = request.into_parts();
        let caller = Caller::of(&parts.extensions)?.clone();
        let named = |wanted: &str| {
            let mut params = params.iter();
            let found = params.find(|(name, _)| *name == wanted);
            found.map(|(_, value)| value.to_owned())
        };
        Ok(Self {
            rights: caller.steer_rights(),
            caller,
            model: named("model"),
            name: named("name"),
            variable: named("variable"),
            parts,
            body,
        })
    }

    /// The name in the path, without taking it.
    pub(super) fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// The variable of the path; its routes have one.
    pub(super) fn take_variable(&mut self) -> String {
        self.variable.take().unwrap_or_default()
    }

    /// The tag or module of the path; its routes have one.
    pub(super) fn take_name(&mut self) -> String {
        self.name.take().unwrap_or_default()
    }

    /// Fails unless the caller may manage controllers (AI-902).
    pub(super) fn require_control(&self) -> Result<(), Rejection> {
        if self.rights.may_control || self.rights.is_admin {
            return Ok(());
        }
        // Without keys every caller has all scopes, but controllers are managed from this machine alone.
        self.caller.require(KeyScope::Control)?;
        let message =
            "Without keys, controllers are managed from this machine only: configure keys.";
        Err(Rejection::new(
            Code::PermissionDenied,
            ErrorReason::INSUFFICIENT_SCOPE,
            message,
        ))
    }
}

/// Answers a request.
pub(super) async fn answer(
    context: Arc<ControllersContext>,
    action: Action,
    params: RawPathParams,
    request: Request,
) -> Response<Body> {
    // What an error's form depends on: the request is consumed.
    let (path, headers) = (request.uri().path().to_owned(), request.headers().clone());
    let answered = match AskedAction::new(&params, request) {
        Ok(asked) => act(&context, action, asked).await,
        Err(rejection) => Err(rejection),
    };
    answered.unwrap_or_else(|rejection| rejection.answer_at(&path, &headers))
}

async fn act(
    context: &ControllersContext,
    action: Action,
    mut asked: AskedAction,
) -> Result<Response<Body>, Rejection> {
    let answer = match action {
        Action::Run => return run::answer(context, asked).await,
        Action::RunVariables => run_variables::list(context, &asked)?,
        Action::RunVariable => return run_variables::read(context, asked),
        Action::SetRunVariable => return run_variables::write(context, asked).await,
        Action::Info => models::info(context, &asked),
        Action::Models => models::list(context, &asked)?,
        Action::Upload => modules::upload(context, asked).await?,
        Action::Modules => return modules::list(context, asked).await.map(json),
        Action::Module => return modules::describe(context, asked).await.map(json),
        Action::Tags => return modules::tags(context, asked).await.map(json),
        Action::SetTags => return modules::set_tags(context, asked).await.map(json),
        Action::DeleteTag => {
            let tag = asked.take_name();
            modules::delete_tag(context, asked, tag).await?;
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
        Action::DeleteModule => {
            modules::delete(context, asked).await?;
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
    };
    Ok(axum::Json(answer).into_response())
}

/// An answer whose JSON is there already.
fn json(bytes: Bytes) -> Response<Body> {
    ([(header::CONTENT_TYPE, "application/json")], bytes).into_response()
}

fn no_store() -> Rejection {
    let message =
        "This server stores no controllers; it runs native constraints, such as sapwood:regex.";
    refusals::unsupported(message)
}

/// The time that is left of a request, for what it calls.
pub(super) fn time_left(parts: &Parts) -> Duration {
    use crate::http::timeouts::Deadline;
    let deadline = parts.extensions.get::<Deadline>();
    deadline.map_or(Duration::MAX, |deadline| {
        deadline.0.saturating_duration_since(Instant::now())
    })
}
