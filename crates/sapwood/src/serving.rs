//! A kernel with the configured models in it: what `serve` puts behind a port, and what `chat` and `run` use directly
//! when no server is there.
//!
//! Owns: which functions there are, and the loading of models beside whoever already asks for them. Refuses to know:
//! faces, terminals.
//!
//! ```text
//!   planned ─► placeholder (`unavailable`, OA-902) ─► engine loaded ─► the model's function in its place
//! ```

use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use sapwood_engine::Engine;
use sapwood_kernel::session::test_functions;
use sapwood_kernel::{Error, Fun, Kernel, Name, Spec, Targets, generate, model, raw};

use crate::config::Config;
use crate::failure::{Exit, Failure};
use crate::models::Planned;
use crate::progress::Bar;

/// A kernel that knows GENERATE, and the planned models as ones that are still loading.
///
/// # Errors
/// If a model's name cannot be a function's.
pub(crate) fn kernel(config: &Config, planned: &[Planned]) -> Result<Kernel, Failure> {
    let kernel = Kernel::new();
    let default = config.default_model.as_deref().map(Name::shared);
    let targets = Targets {
        default,
        ..Targets::default()
    };
    let refused = |error: Error| Failure::usage(format!("models: {error}"));
    kernel.add(generate(targets)).map_err(refused)?;
    if config.test_functions {
        kernel.add_all(test_functions()).map_err(refused)?;
    }
    for model in planned {
        kernel.add(loading(&model.name)).map_err(refused)?;
    }
    Ok(kernel)
}

/// Answers for a model that is not there yet.
fn loading(name: &str) -> Fun {
    let mut spec = Spec::new(Name::shared(name), "Still loading.");
    spec.model = true;
    spec.inputs = generate(Targets::default()).spec().inputs.clone();
    spec.outputs = generate(Targets::default()).spec().outputs.clone();
    let why = format!("the model {name} is still loading");
    raw(spec, move |_| {
        let error = Error::Unavailable {
            why: why.clone(),
            retry_after: Some(Duration::from_secs(1)),
        };
        stream::iter([Err(error)]).boxed()
    })
}

/// Loads every model, one after the other, and tells `loaded` of each, and how long it took.
///
/// # Errors
/// Of the first one that cannot be loaded: [`Exit::Model`].
pub(crate) async fn load(
    kernel: &Kernel,
    planned: Vec<Planned>,
    loaded: impl Fn(&str, &Engine, Duration),
) -> Result<(), Failure> {
    for one in planned {
        let name = one.name.clone();
        let (bar, stopper) = Bar::new(&name);
        let began = Instant::now();
        let loading = tokio::task::spawn_blocking(move || one.load(&mut |share| bar.show(share)));
        let engine = loading.await.map_err(|_| {
            Failure::exit(
                Exit::Model,
                format!("loading the model `{name}` failed unexpectedly"),
            )
        })??;
        drop(stopper);
        loaded(&name, &engine, began.elapsed());
        kernel.replace(model(Name::shared(&name), engine));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sapwood_kernel::args;

    use super::*;
    use crate::config::layers::{Flags, Layers};

    #[tokio::test]
    async fn oa_902_a_model_that_is_loading_says_when_to_come_back_and_others_serve() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sapwood.toml");
        let model = |name| format!("[[models]]\nname = \"{name}\"\nbackend = \"scripted\"\n");
        std::fs::write(&file, model("first") + &model("second")).unwrap();
        let layers = Layers::read(Some(&file), Flags::default()).unwrap();
        let config = layers.config().unwrap();
        let mut planned = crate::models::plan(&config).unwrap();
        let kernel = kernel(&config, &planned).unwrap();
        planned.truncate(1);
        load(&kernel, planned, |_, _, _| {}).await.unwrap();
        let ask = |model: &str| kernel.run::<String>(model, args! { prompt: "hello" });
        assert_eq!(ask("first").await.unwrap(), "hello");
        let error = ask("second").await.unwrap_err();
        assert_eq!(error.code().name(), "unavailable");
        assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
        assert!(
            error.to_string().contains("second is still loading"),
            "{error}"
        );
    }
}
