//! Builds a kernel with the configured models, for `serve`, and for `chat` and `run` where no server runs.
//!
//! ```text
//!   planned ─► placeholder (`unavailable`, OA-902) ─► engine loaded ─► the model's function in its place
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use sapwood_kernel::session::test_functions;
use sapwood_kernel::{
    Error, Fun, InputSpec, Kernel, Mime, ModelFacts, ModelOptions, Name, OutputSpec, Port, Spec,
    Targets, embedding_model, generate, model_with, raw,
};
use tokio::sync::Semaphore;

use crate::config::Config;
use crate::controllers::ProcessControllers;
use crate::failure::{CliError, Exit};
use crate::hub::ModelCache;
use crate::loaded_model::LoadedModel;
use crate::models::PlannedModel;
use crate::progress::LoadingBar;
use crate::trial;

/// A kernel with GENERATE, and with a placeholder for each planned model that is still loading.
///
/// # Errors
/// If the name of a model is no legal function name.
pub(crate) fn kernel(config: &Config, planned: &[PlannedModel]) -> Result<Kernel, CliError> {
    let kernel = Kernel::new();
    let default = config.default_model.as_deref().map(Name::shared);
    let targets = Targets {
        default,
        ..Targets::default()
    };
    let refused = |error: Error| CliError::usage(format!("models: {error}"));
    kernel.add(generate(targets)).map_err(refused)?;
    if config.test_functions {
        kernel.add_all(test_functions()).map_err(refused)?;
    }
    for model in planned {
        let absent = absent_with(
            &model.name,
            "is still loading",
            model.is_configured_to_embed(),
            None,
        );
        kernel.add(absent).map_err(refused)?;
    }
    Ok(kernel)
}

/// A placeholder for a model that is not available; `what` is its state.
pub(crate) fn absent(name: &str, what: &'static str) -> Fun {
    absent_with(name, what, false, None)
}

/// The same in place of what `kernel` has under this name: of a model that embeds, if that did.
pub(crate) fn absent_instead(kernel: &Kernel, name: &str, what: &'static str) -> Fun {
    let embeds = kernel.get(name).is_ok_and(|known| known.spec().embeds);
    absent_with(name, what, embeds, None)
}

/// The specification of a model that is not loaded, with what is known of it.
pub(crate) fn placeholder_spec(
    name: &str,
    what: &str,
    embeds: bool,
    facts: Option<Arc<ModelFacts>>,
) -> Spec {
    let mut spec = Spec::new(Name::shared(name), format!("This model {what}."));
    spec.model = true;
    spec.embeds = embeds;
    // Programs that ask on behalf of a person send what is recommended, and have their own values where nothing is.
    spec.sampling = facts
        .as_ref()
        .map(|facts| facts.defaults.recommend(facts.info.sampling))
        .unwrap_or_default();
    spec.facts = facts;
    if embeds {
        // Those of both kinds: whether it embeds or scores is known when it is loaded.
        let inputs = ["text", "query", "documents", "config"];
        spec.inputs = inputs.map(|it| InputSpec::new(it).optional()).to_vec();
        spec.outputs = vec![
            OutputSpec::new(Port::MAIN, Mime::NDJSON),
            OutputSpec::new(Port::VECTORS, Mime::FLOATS),
        ];
        return spec;
    }
    // The same ports as the model will have, so that faces that list functions show them from the start.
    spec.inputs = generate(Targets::default()).spec().inputs.clone();
    spec.outputs = generate(Targets::default()).spec().outputs.clone();
    spec
}

/// The same, with what is known of the model.
fn absent_with(name: &str, what: &'static str, embeds: bool, facts: Option<ModelFacts>) -> Fun {
    let spec = placeholder_spec(name, what, embeds, facts.map(Arc::new));
    let error = Error::Unavailable {
        why: format!("the model {name} {what}"),
        retry_after: Some(Duration::from_secs(1)),
    };
    failing(spec, error)
}

/// A stand-in for a function that cannot be called now.
pub(crate) fn failing(spec: Spec, error: Error) -> Fun {
    raw(spec, move |_| stream::iter([Err(error.clone())]).boxed())
}

/// The facts in the model's file, if it can be read. Errors are not reported: the load that follows reports them.
pub(crate) async fn outline(planned: &PlannedModel) -> Option<ModelFacts> {
    let planned = planned.clone();
    let outline = tokio::task::spawn_blocking(move || planned.outline()).await;
    outline.ok().flatten()
}

/// Adds the facts in the model's file to the placeholder of a model that is being loaded (LM-332).
pub(crate) async fn announce(kernel: &Kernel, planned: &PlannedModel) {
    let (embeds, facts) = (embeds(planned).await, outline(planned).await);
    if embeds || facts.is_some() {
        let (name, what) = (&planned.name, "is still loading");
        kernel.replace(absent_with(name, what, embeds, facts));
    }
}

/// Whether a model embeds, as far as that is known before it is loaded.
pub(crate) async fn embeds(planned: &PlannedModel) -> bool {
    let planned = planned.clone();
    let embeds = tokio::task::spawn_blocking(move || planned.embeds());
    embeds.await.unwrap_or(false)
}

/// The engine of a model, and the function with which it is called.
pub(crate) struct StartedModel {
    pub(crate) engine: LoadedModel,
    pub(crate) function: Fun,
}

/// Loads a model whose file is on this machine, and makes its function.
///
/// # Errors
/// [`Exit::Model`].
pub(crate) async fn start(
    planned: PlannedModel,
    controllers: &ProcessControllers,
) -> Result<StartedModel, CliError> {
    let name = planned.name.clone();
    let options = ModelOptions {
        steering: None,
        parsers: planned.parsers,
        defaults: planned.defaults.clone(),
    };
    let engine = engine(planned).await?;
    let function = function(&name, &engine, controllers, options).await?;
    Ok(StartedModel { engine, function })
}

/// Loads the models concurrently into `kernel`.
///
/// # Errors
/// As [`load_with`].
pub(crate) async fn load(
    kernel: &Kernel,
    controllers: &ProcessControllers,
    cache: &ModelCache,
    planned: Vec<PlannedModel>,
) -> Result<(), CliError> {
    load_with(kernel, controllers, cache, planned, |_, loaded, _| {
        if let Ok(loaded) = loaded {
            kernel.replace(loaded.function);
        }
    })
    .await
}

/// Loads the models concurrently, and calls `loaded` for each with its engine or the error, and the loading time. It
/// registers the function.
///
/// # Errors
/// The error of the first required model that cannot be loaded: [`Exit::Model`]. The other loads are stopped.
pub(crate) async fn load_with(
    kernel: &Kernel,
    controllers: &ProcessControllers,
    cache: &ModelCache,
    planned: Vec<PlannedModel>,
    loaded: impl Fn(&str, Result<StartedModel, &CliError>, Duration),
) -> Result<(), CliError> {
    // Without models too: a limit of none would wait for ever.
    let at_once = planned.len().max(1);
    let loads = Semaphore::new(LOADED_AT_ONCE);
    let all = planned.into_iter().map(|one| async {
        let (name, required) = (one.name.clone(), one.required);
        let began = Instant::now();
        let loading = async {
            // Downloads have a limit of their own: what is there does not wait for them.
            let one = one.located(cache).await?;
            // More at a time would only compete for the disk. Nobody closes it.
            let _permit = loads.acquire().await;
            // First, because a client of LMTP gives up after 5 s, and loading takes longer (LM-332).
            announce(kernel, &one).await;
            // A required model needs no trial: without it the server does not start, so it may as well end with it.
            if !required {
                trial::pass(&one).await?;
            }
            start(one, controllers).await
        };
        match loading.await {
            Ok(model) => loaded(&name, Ok(model), began.elapsed()),
            // Dropping the other loads stops them (`Stopper`).
            Err(failure) if required => return Err(failure),
            Err(failure) => {
                cache.release(&name);
                kernel.replace(absent_instead(kernel, &name, "could not be loaded"));
                loaded(&name, Err(&failure), began.elapsed());
            }
        }
        Ok(())
    });
    let mut all = stream::iter(all).buffer_unordered(at_once);
    while let Some(loaded) = all.next().await {
        loaded?;
    }
    Ok(())
}

/// The function of a loaded model, with `options` and what steers it.
///
/// # Errors
/// If what steers it cannot be prepared.
async fn function(
    name: &str,
    model: &LoadedModel,
    controllers: &ProcessControllers,
    options: ModelOptions,
) -> Result<Fun, CliError> {
    let name = Name::shared(name);
    Ok(match model {
        LoadedModel::Generating(engine) => {
            let options = ModelOptions {
                steering: Some(controllers.steering(engine).await?),
                ..options
            };
            model_with(name, engine.clone(), options)
        }
        LoadedModel::Embedding(embedder) => embedding_model(name, embedder.clone()),
    })
}

/// Models that are loaded at the same time.
const LOADED_AT_ONCE: usize = 4;

/// Loads one model on a thread that may block.
///
/// # Errors
/// [`Exit::Model`].
async fn engine(planned: PlannedModel) -> Result<LoadedModel, CliError> {
    let name = planned.name.clone();
    let (bar, stopper) = LoadingBar::new(&name);
    let loading = tokio::task::spawn_blocking(move || planned.load(&mut |share| bar.show(share)));
    let loaded = loading.await.map_err(|_| {
        let what = format!("loading the model `{name}` failed unexpectedly");
        CliError::exit(Exit::Model, what)
    })?;
    // Held until here: if this future is dropped earlier, the thread stops loading.
    drop(stopper);
    loaded
}

#[cfg(test)]
mod tests {
    use sapwood_kernel::args;

    use super::*;

    fn controllers() -> ProcessControllers {
        ProcessControllers::new(&Config::default().controllers).unwrap()
    }
    use crate::config::layers::{Flags, Layers};

    fn cache() -> ModelCache {
        ModelCache::new(&Config::default().hub)
    }

    #[tokio::test]
    async fn oa_902_a_loading_model_is_unavailable_with_a_retry_time_and_others_serve() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sapwood.toml");
        let model = |name| format!("[[models]]\nname = \"{name}\"\nbackend = \"scripted\"\n");
        std::fs::write(&file, model("first") + &model("second")).unwrap();
        let layers = Layers::read(Some(&file), Flags::default()).unwrap();
        let config = layers.config().unwrap();
        let mut planned = crate::models::plan(&config).unwrap();
        let kernel = kernel(&config, &planned).unwrap();
        planned.truncate(1);
        load(&kernel, &controllers(), &cache(), planned)
            .await
            .unwrap();
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
    /// The slow one is listed first, and the quick one finishes first.
    #[tokio::test]
    async fn oa_902_models_are_loaded_concurrently() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sapwood.toml");
        let names: Vec<_> = (0..3 * LOADED_AT_ONCE).map(|at| format!("m{at}")).collect();
        let table =
            |name: &String| format!("[[models]]\nname = \"{name}\"\nbackend = \"scripted\"\n");
        let text: String = names.iter().map(table).collect();
        std::fs::write(&file, text).unwrap();
        let layers = Layers::read(Some(&file), Flags::default()).unwrap();
        let config = layers.config().unwrap();
        let planned = crate::models::plan(&config).unwrap();
        let kernel = kernel(&config, &planned).unwrap();
        let controllers = controllers();
        let cache = cache();
        let loading = load(&kernel, &controllers, &cache, planned);
        loading.await.unwrap();
        for name in &names {
            let sent = kernel.run::<String>(name, args! { prompt: "hello" }).await;
            assert_eq!(sent.unwrap(), "hello");
        }
    }

    #[cfg(feature = "embedded")]
    #[tokio::test]
    async fn a_model_that_is_there_does_not_wait_for_downloads() {
        // Accepts connections, and never answers.
        let hub = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sapwood.toml");
        let downloaded: String = (0..3 * LOADED_AT_ONCE)
            .map(|at| format!("[[models]]\nname = \"m{at}\"\npath = \"hf:o/r\"\n"))
            .collect();
        let text = format!("{downloaded}[[models]]\nname = \"there\"\nbackend = \"scripted\"\n");
        std::fs::write(&file, text).unwrap();
        let layers = Layers::read(Some(&file), Flags::default()).unwrap();
        let config = layers.config().unwrap();
        let planned = crate::models::plan(&config).unwrap();
        let kernel = kernel(&config, &planned).unwrap();
        let cache = ModelCache::new(&crate::config::hub::HubConfig {
            dir: Some(folder.path().to_owned()),
            endpoint: format!("http://{}", hub.local_addr().unwrap()),
            ..Config::default().hub
        });
        let done = tokio::sync::Notify::new();
        let controllers = controllers();
        let loading = load_with(&kernel, &controllers, &cache, planned, |name, _, _| {
            assert_eq!(name, "there");
            done.notify_one();
        });
        // In this order: the second would end first only if the first loaded nothing.
        tokio::select! {
            ended = loading => panic!("{:?}", ended.err()),
            () = done.notified() => {}
        }
    }

    /// A kernel with the models of a configuration.
    async fn loaded(text: &str, folder: &std::path::Path) -> Kernel {
        let file = folder.join("sapwood.toml");
        std::fs::write(&file, text).unwrap();
        let layers = Layers::read(Some(&file), Flags::default()).unwrap();
        let config = layers.config().unwrap();
        let planned = crate::models::plan(&config).unwrap();
        let kernel = kernel(&config, &planned).unwrap();
        load(&kernel, &controllers(), &cache(), planned)
            .await
            .unwrap();
        kernel
    }

    #[tokio::test]
    async fn scripted_models_embed_if_they_are_configured_to() {
        let folder = tempfile::tempdir().unwrap();
        let model = "backend = \"scripted\"\nembedding = true\n";
        let text = format!(
            "[[models]]\nname = \"e\"\n{model}normalize = false\n[[models]]\nname = \"r\"\n{model}pooling = \"rank\"\n"
        );
        let config = Layers::read(None, Flags::default()).unwrap().config();
        let mut config = config.unwrap();
        let model = crate::config::ServedModelConfig {
            name: "e".into(),
            backend: crate::config::BackendConfig::Scripted,
            embedding: Some(true),
            ..Default::default()
        };
        config.models.push(model);
        let planned = crate::models::plan(&config).unwrap();
        let early = kernel(&config, &planned).unwrap();
        let error = early.embed("e", ["one"]).await.unwrap_err();
        assert_eq!(error.code().name(), "unavailable", "{error}");
        let kernel = loaded(&text, folder.path()).await;
        let rows = kernel.embed("e", ["one", "two"]).await.unwrap();
        let length: f32 = rows[0].iter().map(|number| number * number).sum();
        assert!(rows.len() == 2 && (length - 1.0).abs() > 0.1, "{rows:?}");
        let scores = kernel.rerank("r", "ab", ["ab", "x"]).await.unwrap();
        assert_eq!(scores, [1.0, 0.0]);
    }

    /// Nothing is configured: what a model does is in its file.
    #[cfg(feature = "embedded")]
    #[tokio::test]
    async fn files_of_encoders_embed_and_others_do_if_they_are_configured_to() {
        use sapwood_engine::embedded::random::{RandomModelShape, write};
        let folder = tempfile::tempdir().unwrap();
        for (name, shape) in [
            ("mean", RandomModelShape::tiny_encoder(1)),
            ("rank", RandomModelShape::tiny_encoder(4)),
            ("llama", RandomModelShape::tiny()),
        ] {
            let file = std::fs::File::create(folder.path().join(format!("{name}.gguf"))).unwrap();
            write(std::io::BufWriter::new(file), &shape, 7).unwrap();
        }
        let table = |name: &str, file: &str, keys: &str| {
            let path = folder.path().join(file);
            format!("[[models]]\nname = \"{name}\"\npath = {path:?}\n{keys}\n")
        };
        let text = [
            table("mean", "mean.gguf", ""),
            table("first", "mean.gguf", "pooling = \"cls\""),
            table("rank", "rank.gguf", ""),
            table("llama", "llama.gguf", ""),
            table("decoder", "llama.gguf", "embedding = true"),
        ];
        let kernel = loaded(&text.concat(), folder.path()).await;
        let mut rows = Vec::new();
        for model in ["mean", "first", "decoder"] {
            rows.push(kernel.embed(model, ["the text"]).await.unwrap());
            assert_eq!(rows.last().unwrap()[0].len(), 64, "{model}");
        }
        assert!(rows[0] != rows[1] && rows[1] != rows[2]);
        let scores = kernel.rerank("rank", "the query", ["one", "other"]).await;
        assert_eq!(scores.unwrap().len(), 2);
        let args = args! { prompt: "x", config: serde_json::json!({"max_tokens": 2}) };
        assert!(kernel.run::<String>("llama", args).await.is_ok());
        let error = kernel.embed("llama", ["x"]).await.unwrap_err();
        assert_eq!(error.code().name(), "failed-precondition", "{error}");
    }

    /// TR-709: a model that is not required may be missing; calls of it fail with the reason.
    #[tokio::test]
    async fn tr_1101_the_others_serve_without_a_model_that_is_not_required() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sapwood.toml");
        for (keys, serves) in [("required = false\n", true), ("", false)] {
            let text = format!(
                "[[models]]\nname = \"bad\"\nbackend = \"mock\"\n{keys}mock = {{ gap = 99 }}\n[[models]]\nname = \
                 \"good\"\nbackend = \"mock\"\n"
            );
            std::fs::write(&file, text).unwrap();
            let layers = Layers::read(Some(&file), Flags::default()).unwrap();
            let config = layers.config().unwrap();
            let planned = crate::models::plan(&config).unwrap();
            let kernel = kernel(&config, &planned).unwrap();
            let reported = std::sync::Mutex::new(Vec::new());
            let controllers = controllers();
            let cache = cache();
            let loaded = load_with(&kernel, &controllers, &cache, planned, |name, loaded, _| {
                reported
                    .lock()
                    .unwrap()
                    .push((name.to_owned(), loaded.is_ok()));
            });
            assert_eq!(loaded.await.is_ok(), serves, "{keys}");
            let all = [("bad".to_owned(), false), ("good".to_owned(), true)];
            let expect = if serves { &all[..] } else { &[] };
            // They load concurrently, so the order of the reports is not defined.
            let mut reported = reported.lock().unwrap().clone();
            reported.sort();
            reported.retain(|(name, _)| serves || name == "bad");
            assert_eq!(reported, expect);
            let error = kernel.run::<String>("bad", args! { prompt: "x" }).await;
            let error = error.unwrap_err();
            assert_eq!(error.code().name(), "unavailable");
            assert_eq!(error.to_string().contains("could not be loaded"), serves);
        }
    }
}
