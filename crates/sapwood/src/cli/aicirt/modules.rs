//! Installs, tags and runs one module, without an engine.

use std::path::Path;
use std::sync::Arc;

use sapwood_control::controllers::{Controllers, tag_of_release};
use sapwood_control::host::{Capabilities, Group, Host, Start, VariablesLimits};
use sapwood_proto::steer::{ControllerStore, SteerRefusal, SteerUser, StepWaker};

use super::vocabulary::LoadedVocabulary;
use crate::failure::CliError;
use crate::output;

/// What to do with a module.
pub(super) struct ModuleTask<'a> {
    /// A file, an id, or a tag.
    pub(super) module: &'a str,
    /// The `gh:` reference by which requests name it.
    pub(super) release: Option<&'a str>,
    pub(super) tags: &'a [String],
    pub(super) run: bool,
    /// The file with the argument for the run.
    pub(super) arg: Option<&'a Path>,
}

/// Carries out a task and prints the id of the module.
pub(super) fn run(
    controllers: &Controllers<Host>,
    task: &ModuleTask<'_>,
    vocabulary: impl FnOnce() -> Result<LoadedVocabulary, CliError>,
) -> Result<(), CliError> {
    // Whoever can write the folder can do everything with it anyway.
    let user = SteerUser {
        name: "local",
        is_admin: true,
        may_control: true,
    };
    let refused = |refusal: SteerRefusal| CliError::usage(refusal.message);
    let program = if Path::new(task.module).is_file() {
        let bytes = std::fs::read(task.module)
            .map_err(|error| CliError::usage(format!("--module {}: {error}", task.module)))?;
        let uploaded = controllers.upload(user, bytes.into()).map_err(refused)?;
        controllers.find_to_run(user, &uploaded.module_id)
    } else {
        controllers.find_to_run(user, task.module)
    };
    let program = program.map_err(refused)?;
    let id = program.id().to_string();
    let release = task.release.map(tag_of_release).transpose();
    let tags: Vec<_> = task
        .tags
        .iter()
        .cloned()
        .chain(release.map_err(refused)?)
        .collect();
    if !tags.is_empty() {
        controllers.set_tags(user, &id, &tags).map_err(refused)?;
    }
    if task.run {
        let arg = match task.arg {
            Some(file) => std::fs::read_to_string(file).map_err(|error| {
                CliError::usage(format!("--run-arg {}: {error}", file.display()))
            })?,
            None => String::new(),
        };
        let loaded = vocabulary()?;
        let start = Start {
            model: loaded.model,
            arg: arg.into(),
            prompt: Vec::new(),
            group: Group::new(1, VariablesLimits::default()),
            capabilities: Capabilities::ALL,
            waker: Arc::new(NobodyWaits),
        };
        let (result, report) = controllers.host().run_main(&program, start);
        output::foreign(&report.logs)?;
        result.map_err(|failure| CliError::new(failure.without_log().to_owned()))?;
    }
    output::data(format!("{id}\n"))
}

/// The run is on this thread.
struct NobodyWaits;

impl StepWaker for NobodyWaits {
    fn wake(&self) {}
}
