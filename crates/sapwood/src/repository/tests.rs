//! Loading and unloading on scripted models.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, sync_channel};

use futures::StreamExt;
use futures::future::join_all;
use sapwood_kernel::{Chunk, Node, args};
use sapwood_server::Server;
use sapwood_server::faces::generate::ModelOptions;
use sapwood_server::ops::health::HealthState;
use sapwood_server::ops::metrics::Format;
use sapwood_server::server;
use tokio::sync::oneshot;

use super::*;
use crate::config::layers::{Flags, Layers};
use crate::loaded_model::LoadedModel;

const FILE: &str = r#"
    [generate]
    model_control = "explicit"
    unload_timeout = "100ms"
    [[models]]
    name = "m"
    backend = "mock"
    mock = { script = "text", text = "one" }
    [[models]]
    name = "slow"
    backend = "mock"
    mock = { script = "steps", rules = [{ steps = [{ text = "a" }, { hang = true }] }] }
"#;

/// Models that are planned and not yet loaded.
fn planned(text: &str) -> (ServedModels, Vec<PlannedModel>, Kernel, ServerContext) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sapwood.toml");
    std::fs::write(&file, text).unwrap();
    let layers = Layers::read(Some(&file), Flags::default()).unwrap();
    let config = layers.config().unwrap();
    let planned = models::plan(&config).unwrap();
    let kernel = model_loading::kernel(&config, &planned).unwrap();
    let builder = Server::builder(server::Config::default(), Vec::new()).unwrap();
    let shared = builder.shared().clone();
    let controllers = ProcessControllers::new(&config.controllers).unwrap();
    // Scripted models need no memory, unless their description says so.
    let lacks_memory = |model: &PlannedModel| {
        let name = model.name.as_str();
        let gate = GATE.lock().unwrap().take_if(|_| name == "stalled");
        if let Some(gate) = gate {
            // Until the other end is dropped.
            let _ = gate.recv();
        }
        LACKING.contains(&name)
    };
    let models = ServedModels::with_memory(
        &kernel,
        &shared,
        &config,
        &controllers,
        &planned,
        lacks_memory,
    );
    (models, planned, kernel, shared)
}

/// The models for which the memory is always too little.
const LACKING: [&str; 2] = ["large", "huge"];
/// Holds up the load of the model `stalled`.
static GATE: Mutex<Option<Receiver<()>>> = Mutex::new(None);

async fn begun() -> (ServedModels, Kernel, ServerContext) {
    let (models, planned, kernel, shared) = planned(FILE);
    models.begin(planned).await.unwrap();
    (models, kernel, shared)
}

/// The port answers before the first model begins to load: a probe must not take that for a server without models.
#[tokio::test]
async fn oa_902_a_server_is_not_ready_before_its_models_begin_to_load() {
    let (models, planned, _, shared) = planned(FILE);
    assert_eq!(shared.health.ready().unwrap_err().reason, "model_loading");
    assert_eq!(shared.health.state("m"), Some(HealthState::Loading));
    models.begin(planned).await.unwrap();
    assert!(shared.health.ready().is_ok());
}

/// Loads a model, and returns the options that it is loaded with.
async fn load(
    models: &ServedModels,
    name: &str,
    config: Option<&str>,
) -> Result<ModelOptions, ModelControlError> {
    let (sender, mut options) = oneshot::channel();
    let loaded = Box::new(|options| sender.send(options).unwrap());
    let result = models.load(name, config.map(str::to_owned), loaded).await;
    result.map(|()| options.try_recv().unwrap())
}

async fn states(kernel: &Kernel) -> Result<String, &'static str> {
    let run = kernel.run::<String>("m", args! { prompt: "x" });
    run.await.map_err(|error| error.code().name())
}

#[tokio::test]
async fn tr_706_a_model_is_unloaded_and_loaded_with_its_own_or_a_given_configuration() {
    let (models, kernel, shared) = begun().await;
    assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
    assert!(shared.health.ready().is_ok());
    models.unload("m").await.unwrap();
    assert_eq!(states(&kernel).await, Err("unavailable"));
    assert_eq!(shared.health.ready().unwrap_err().reason, "model_unloaded");
    // Unloading again changes nothing.
    models.unload("m").await.unwrap();
    let other = r#"{"mock": {"script": "text", "text": "two"}, "versions": [3]}"#;
    let reported = load(&models, "m", Some(other)).await.unwrap();
    assert_eq!(reported.versions, [3]);
    assert_eq!(states(&kernel).await.as_deref(), Ok("two"));
    assert!(shared.health.ready().is_ok());
    // The next load uses the configured table again, and there is one version.
    let reported = load(&models, "m", None).await.unwrap();
    assert_eq!(reported.versions, [1]);
    assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
    for (name, config, expect) in [
        ("nobody", None, "Unknown"),
        ("m", Some("{"), "EOF while parsing"),
        ("m", Some("[]"), "must be the text of a JSON object"),
        (
            "m",
            Some(r#"{"path": "/etc/passwd"}"#),
            "`path` can not be changed",
        ),
        ("m", Some(r#"{"odd": 1}"#), "unknown field `odd`"),
        (
            "m",
            Some(r#"{"idle_unload": "1m"}"#),
            "`idle_unload` can not be changed",
        ),
        (
            "m",
            Some(r#"{"load": "first_use"}"#),
            "`load` can not be changed",
        ),
        (
            "m",
            Some(r#"{"versions": [0]}"#),
            "versions must be integers",
        ),
    ] {
        let failed = load(&models, name, config).await;
        let failed = format!("{:?}", failed.unwrap_err());
        assert!(failed.contains(expect), "{failed}");
    }
    assert_eq!(
        states(&kernel).await.as_deref(),
        Ok("one"),
        "it was left alone"
    );
    assert_eq!(
        models.unload("nobody").await,
        Err(ModelControlError::Unknown)
    );
}

/// Scrapers refuse all metrics if one engine of a model is among them that another one has replaced.
fn is_valid(shared: &ServerContext) {
    let text = shared.metrics.render(Format::Text);
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<_> = samples.filter_map(|line| line.rsplit_once(' ')).collect();
    let unique: BTreeSet<_> = names.iter().map(|(name, _)| name).collect();
    assert!(names.len() > 20 && names.len() == unique.len(), "{text}");
}

/// The server answers before its models are loaded.
#[tokio::test]
async fn tr_706_a_request_before_the_start_loads_no_model_twice() {
    let (models, planned, kernel, shared) = planned(FILE);
    let mut loading = models.load("m", None, Box::new(drop));
    assert!(futures::poll!(&mut loading).is_pending());
    let (begun, loaded) = futures::join!(models.begin(planned), loading);
    begun.unwrap();
    loaded.unwrap();
    assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
    is_valid(&shared);
    // Whoever registers a second one ends the first.
    let plan = models.0.planned["m"].clone();
    let _change = models.0.locks.change("m").await;
    let first = models.0.engines.get("m");
    models.0.bring_up(&plan).await.unwrap();
    first.wait_ended();
    is_valid(&shared);
}

#[tokio::test]
async fn the_end_waits_for_changes_and_no_model_is_loaded_after_it() {
    let (models, kernel, _) = begun().await;
    let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
    let engine = models.0.engines.get("slow");
    let mut unloading = models.unload("slow");
    assert!(futures::poll!(&mut unloading).is_pending());
    while models.0.engines.contains("slow") {
        tokio::task::yield_now().await;
    }
    models.end().await;
    assert!(engine.is_lost(), "the unload was not awaited");
    unloading.await.unwrap();
    assert_eq!(
        load(&models, "slow", None).await.unwrap_err(),
        ModelControlError::Broken
    );
    assert!(models.0.engines.all().is_empty());
}

/// A request that does not end in time is ended, and its caller gets the reason.
#[tokio::test]
async fn tr_706_running_requests_are_ended_after_the_unload_timeout() {
    let (models, kernel, _) = begun().await;
    let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
    models.unload("slow").await.unwrap();
    let error = run.next().await.unwrap().unwrap_err();
    assert_eq!(error.code().name(), "unavailable");
    assert!(error.to_string().contains("was unloaded"), "{error}");
    load(&models, "slow", None).await.unwrap();
    let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
}

/// No counter of the engine has a request whose prompt is still being read.
#[tokio::test]
async fn tr_706_requests_that_are_being_prepared_may_finish_as_well() {
    let (models, planned, kernel, _) = planned(&FILE.replace("100ms", "1m"));
    models.begin(planned).await.unwrap();
    let (mut writer, prompt) = Node::channel(64);
    let mut run = kernel.run::<String>("m", args! { prompt: prompt });
    assert!(futures::poll!(run.next()).is_pending());
    let unloading = tokio::spawn(models.unload("m"));
    while models.0.engines.contains("m") {
        tokio::task::yield_now().await;
    }
    writer.send(Chunk::text("x")).await.unwrap();
    writer.finish();
    assert_eq!(run.await.unwrap(), "one");
    unloading.await.unwrap().unwrap();
}

/// A change continues to its end even if its caller disconnects.
#[tokio::test]
async fn tr_706_a_change_continues_after_its_caller_is_gone() {
    let (models, kernel, shared) = begun().await;
    let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
    let mut unloading = models.unload("slow");
    assert!(futures::poll!(&mut unloading).is_pending());
    drop(unloading);
    let error = run.next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("was unloaded"), "{error}");
    let mut changes = shared.health.changes();
    let (sender, mut options) = oneshot::channel();
    let loaded = Box::new(|options| sender.send(options).unwrap());
    let mut loading = models.load("slow", None, loaded);
    assert!(futures::poll!(&mut loading).is_pending());
    drop(loading);
    while shared.health.ready().is_err() {
        changes.changed().await.unwrap();
    }
    // Faces know what they serve now.
    assert!(options.try_recv().is_ok());
    let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
    assert_eq!(run.next().await.unwrap().unwrap(), "a");
}

mod residence {
    //! Models that are loaded by their first call, unloaded when idle, and loaded again after their engine has ended.

    use std::sync::Weak;

    use sapwood_engine::api::Vocabulary;
    use sapwood_kernel::ModelFacts;

    use super::*;

    const ON_DEMAND: &str = r#"
        [generate]
        model_control = "explicit"
        unload_timeout = "100ms"
        [limits]
        queue_requests = 2
        [engine]
        load = "first_use"
        [[models]]
        name = "m"
        backend = "mock"
        mock = { script = "text", text = "one" }
        [[models]]
        name = "slow"
        backend = "mock"
        idle_unload = "5m"
        mock = { script = "steps", rules = [{ steps = [{ text = "a" }, { hang = true }] }] }
        [[models]]
        name = "bad"
        backend = "mock"
        mock = { gap = 99 }
        [[models]]
        name = "large"
        backend = "mock"
        mock = { gap = 99 }
        [[models]]
        name = "stalled"
        backend = "mock"
        [[models]]
        name = "eager"
        backend = "mock"
        load = "start"
        idle_unload = "5m"
        [[models]]
        name = "embeds"
        backend = "mock"
        embedding = true
        idle_unload = "5m"
        [[models]]
        name = "kept"
        backend = "mock"
        load = "start"
        [[models]]
        name = "huge"
        backend = "mock"
    "#;

    async fn begun() -> (ServedModels, Kernel, ServerContext) {
        let (models, planned, kernel, shared) = planned(ON_DEMAND);
        models.begin(planned).await.unwrap();
        (models, kernel, shared)
    }

    async fn reached(shared: &ServerContext, name: &str, state: HealthState) {
        let mut changes = shared.health.changes();
        while shared.health.state(name) != Some(state) {
            changes.changed().await.unwrap();
        }
    }

    async fn pass(seconds: u64) {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        tokio::time::resume();
    }

    /// Some models can never fit, and must not keep the others out of the memory.
    #[tokio::test]
    async fn models_are_unloaded_for_another_one_that_lacks_memory_but_not_in_vain_again_and_again()
    {
        let (models, kernel, _) = begun().await;
        let inner = &models.0;
        let huge = inner.planned["huge"].clone();
        let is_loaded = |name: &str| inner.engines.contains(name);
        inner.make_room(&huge).await;
        assert!(is_loaded("eager"), "it was used just now");
        pass(11).await;
        inner.make_room(&huge).await;
        assert!(!is_loaded("eager") && is_loaded("kept"));
        // In vain: not again for a while.
        assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
        let now = Instant::now();
        assert!(inner.history.eviction_wait("huge", now).is_some());
        inner.history.evicted_in_vain("huge", later(1));
        pass(11).await;
        inner.make_room(&huge).await;
        assert!(is_loaded("m"));
        let run = kernel.run::<String>("huge", args! { prompt: "x" });
        run.await.unwrap();
        let wait = inner.history.eviction_wait("huge", Instant::now());
        assert_eq!(wait, None, "it has been loaded");
    }

    #[tokio::test]
    async fn a_call_that_waits_at_the_end_loads_nothing() {
        let (models, kernel, _) = begun().await;
        let change = models.0.locks.change("m").await;
        let mut call = Box::pin(states(&kernel));
        assert!(futures::poll!(&mut call).is_pending());
        let mut end = Box::pin(models.end());
        assert!(futures::poll!(&mut end).is_pending());
        drop(change);
        end.await;
        assert_eq!(call.await, Err("unavailable"));
        assert!(models.0.engines.all().is_empty());
    }

    /// Whoever disconnects must leave nothing that waits on.
    #[tokio::test]
    async fn however_many_calls_come_and_go_one_task_loads_the_model() {
        let (models, kernel, _) = begun().await;
        let change = models.0.locks.change("m").await;
        let alive = || Handle::current().metrics().num_alive_tasks();
        let before = alive();
        for _ in 0..100 {
            let mut call = Box::pin(states(&kernel));
            assert!(futures::poll!(&mut call).is_pending());
        }
        assert!(alive() <= before + 1, "{} tasks", alive());
        drop(change);
        assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
    }

    #[tokio::test]
    async fn a_model_of_another_kind_than_was_known_is_called_again() {
        let (models, planned, kernel, _) = planned(ON_DEMAND);
        // Known by its configuration: the call waits.
        let embedded = kernel.embed("embeds", ["one"]);
        let (rows, begun) = futures::join!(embedded, models.begin(planned));
        begun.unwrap();
        assert_eq!(rows.unwrap().len(), 1);
        let unknown = OnDemand::new(&models.0.planned["m"], 1);
        let function = unknown.function(|| async { Ok(()) });
        unknown.loaded(kernel.get("embeds").unwrap());
        kernel.replace(function);
        let error = kernel.run::<String>("m", args! { prompt: "x" }).await;
        let error = error.unwrap_err();
        assert_eq!(error.code().name(), "unavailable", "{error}");
        assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
    }

    fn later(minutes: u64) -> Instant {
        Instant::now() + Duration::from_mins(minutes)
    }

    fn vocabulary(models: &ServedModels, name: &str) -> Weak<dyn Vocabulary> {
        let LoadedModel::Generating(engine) = models.0.engines.get(name) else {
            panic!("it generates");
        };
        Arc::downgrade(engine.vocabulary())
    }

    #[tokio::test]
    async fn a_model_is_loaded_by_its_first_call_and_the_server_is_ready_before() {
        let (models, kernel, shared) = begun().await;
        assert!(shared.health.ready().is_ok());
        assert_eq!(shared.health.state("m"), Some(HealthState::OnDemand));
        assert_eq!(shared.health.state("eager"), Some(HealthState::Ok));
        assert!(!models.0.engines.contains("m"));
        // Listed with its ports from the start.
        let spec = kernel.get("m").unwrap().spec().clone();
        assert!(spec.model && !spec.inputs.is_empty());
        let calls = (0..2).map(|_| states(&kernel));
        for answer in join_all(calls).await {
            assert_eq!(answer.as_deref(), Ok("one"));
        }
        assert_eq!(shared.health.state("m"), Some(HealthState::Ok));
        assert!(kernel.get("m").unwrap().spec().facts.is_some());
        // One engine has answered both calls.
        let stats = Arc::clone(models.0.engines.get("m").stats());
        let finished = || stats.finished.iter().map(|it| it.get()).sum::<u64>();
        while finished() < 2 {
            tokio::task::yield_now().await;
        }
        // Without `idle_unload` it stays.
        models.0.look(later(60 * 24));
        assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
        assert!(models.0.engines.contains("m"));
    }

    #[tokio::test]
    async fn an_idle_model_leaves_the_memory_and_the_next_call_loads_it_again() {
        let (models, kernel, shared) = begun().await;
        let held = vocabulary(&models, "eager");
        models.0.look(later(4));
        assert_eq!(shared.health.state("eager"), Some(HealthState::Ok));
        models.0.look(later(6));
        reached(&shared, "eager", HealthState::OnDemand).await;
        // The lock is free when all of it is gone.
        drop(models.0.locks.change("eager").await);
        assert!(held.upgrade().is_none(), "something holds its vocabulary");
        assert!(shared.health.ready().is_ok());
        let answer = kernel.run::<String>("eager", args! { prompt: "x" }).await;
        assert_eq!(answer.unwrap(), "x");
        assert_eq!(shared.health.state("eager"), Some(HealthState::Ok));
        // One that is neither idle-unloaded nor loaded on demand stays.
        models.0.look(later(60 * 24));
        assert!(models.0.engines.contains("kept"));
    }

    /// Its inputs are others than those of a model that generates, and callers see them before it is loaded.
    #[tokio::test]
    async fn a_model_that_embeds_keeps_its_inputs_while_it_is_not_loaded() {
        let (models, kernel, shared) = begun().await;
        let rows = kernel.embed("embeds", ["one", "two"]).await.unwrap();
        models.0.look(later(6));
        reached(&shared, "embeds", HealthState::OnDemand).await;
        assert!(kernel.get("embeds").unwrap().spec().embedding.is_some());
        let again = kernel.embed("embeds", ["one", "two"]).await.unwrap();
        assert_eq!(again, rows);
    }

    #[tokio::test]
    async fn a_model_with_a_running_call_is_not_idle() {
        let (models, kernel, shared) = begun().await;
        let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
        assert_eq!(run.next().await.unwrap().unwrap(), "a");
        let now = Instant::now();
        let recent = models.0.withdraw_longest_unused("embeds", now);
        assert!(recent.is_none(), "used just now");
        let unused = std::iter::from_fn(|| models.0.withdraw_longest_unused("embeds", later(1)));
        let unused: Vec<_> = unused.map(|(model, _)| model.name().to_owned()).collect();
        assert_eq!(unused, ["eager"]);
        models.0.look(later(60));
        assert!(models.0.engines.contains("slow"));
        drop(run);
        // From the end of the call on it is.
        let idle = &models.0.on_demand["slow"];
        while idle.unused_since().is_none() {
            tokio::task::yield_now().await;
        }
        models.0.look(later(6));
        reached(&shared, "slow", HealthState::OnDemand).await;
    }

    #[tokio::test]
    async fn a_model_that_cannot_be_loaded_is_not_tried_for_each_call() {
        let (models, kernel, shared) = begun().await;
        let ask = async |name: &str| {
            let run = kernel.run::<String>(name, args! { prompt: "x" });
            run.await.unwrap_err()
        };
        let first = ask("bad").await;
        assert_eq!(first.code().name(), "unavailable");
        assert_eq!(first.retry_after(), Some(Duration::from_secs(1)));
        assert_eq!(shared.health.state("bad"), Some(HealthState::Failed));
        let second = ask("bad").await;
        assert!(second.retry_after().unwrap() < Duration::from_secs(1));
        assert!(shared.health.ready().is_ok());
        models.0.look(Instant::now() + Duration::from_millis(300));
        assert_eq!(shared.health.state("bad"), Some(HealthState::Failed));
        // A look before the end of the wait: the retry at its end finds a model.
        models.0.look(Instant::now() + Duration::from_millis(700));
        assert_eq!(shared.health.state("bad"), Some(HealthState::OnDemand));
        assert!(ask("bad").await.retry_after().is_some());
    }

    #[tokio::test]
    async fn a_model_that_lacks_memory_is_asked_again_and_found() {
        let (models, kernel, shared) = begun().await;
        // It is no fault of its own: it does not wait longer each time, and faces pass every call on.
        for _ in 0..3 {
            let run = kernel.run::<String>("large", args! { prompt: "x" });
            let refused = run.await.unwrap_err();
            assert_eq!(refused.retry_after(), Some(Duration::from_secs(1)));
            assert_eq!(shared.health.state("large"), Some(HealthState::OnDemand));
            // Streams of LMTP are not called again, and demand it when its state changes.
            let mut changes = shared.health.changes();
            changes.mark_unchanged();
            models.0.look(Instant::now());
            assert!(!changes.has_changed().unwrap());
            pass(1).await;
            models.0.look(Instant::now());
            assert!(changes.has_changed().unwrap());
            changes.mark_unchanged();
            models.0.look(Instant::now());
            assert!(!changes.has_changed().unwrap(), "once");
        }
    }

    /// It may be a download of hours.
    #[tokio::test]
    async fn tr_706_an_unload_stops_the_load_for_a_call() {
        let (models, kernel, shared) = begun().await;
        let (open, gate) = sync_channel::<()>(0);
        *GATE.lock().unwrap() = Some(gate);
        let mut call = Box::pin(kernel.run::<String>("stalled", args! { prompt: "x" }));
        assert!(futures::poll!(call.next()).is_pending());
        while GATE.lock().unwrap().is_some() {
            tokio::task::yield_now().await;
        }
        let unloading = timeout(CHANGES_MAX, models.unload("stalled"));
        unloading.await.expect("it waits for the load").unwrap();
        let refused = call.next().await.unwrap().unwrap_err();
        assert!(refused.to_string().contains("is unloaded"), "{refused}");
        assert_eq!(shared.health.state("stalled"), Some(HealthState::Unloaded));
        drop(open);
        load(&models, "stalled", None).await.unwrap();
        assert_eq!(shared.health.state("stalled"), Some(HealthState::Ok));
    }

    #[tokio::test]
    async fn calls_that_wait_for_a_load_have_a_limit_and_may_leave() {
        let (models, kernel, _) = begun().await;
        // As long as this is held nothing is loaded.
        let change = models.0.locks.change("m").await;
        let mut calls: Vec<_> = (0..2).map(|_| Box::pin(states(&kernel))).collect();
        for call in &mut calls {
            assert!(futures::poll!(call).is_pending());
        }
        assert_eq!(states(&kernel).await, Err("overloaded"));
        calls.pop();
        let mut third = Box::pin(states(&kernel));
        assert!(futures::poll!(&mut third).is_pending());
        drop(change);
        assert_eq!(third.await.as_deref(), Ok("one"));
        assert_eq!(calls.remove(0).await.as_deref(), Ok("one"));
    }

    #[tokio::test]
    async fn a_model_that_was_unloaded_by_request_waits_for_a_request() {
        let (models, kernel, shared) = begun().await;
        models.unload("m").await.unwrap();
        assert_eq!(states(&kernel).await, Err("unavailable"));
        assert_eq!(shared.health.state("m"), Some(HealthState::Unloaded));
        let other = r#"{"mock": {"script": "text", "text": "two"}}"#;
        load(&models, "m", Some(other)).await.unwrap();
        assert_eq!(states(&kernel).await.as_deref(), Ok("two"));
        // It is loaded again with what it was loaded with.
        let mut unused = std::iter::from_fn(|| models.0.withdraw_longest_unused("eager", later(1)));
        let (model, change) = unused.find(|(model, _)| model.name() == "m").unwrap();
        models.0.retire(&model, "memory", change).await;
        assert_eq!(states(&kernel).await.as_deref(), Ok("two"));
    }

    /// The context that a face compares a prompt with, while the model is not loaded, may be another one now.
    #[tokio::test]
    async fn what_a_file_says_is_read_again_with_another_configuration() {
        let (models, kernel, _) = begun().await;
        assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
        let facts = kernel.get("m").unwrap().spec().facts.clone().unwrap();
        let model = &models.0.on_demand["m"];
        model.describe(ModelFacts::clone(&facts));
        load(&models, "m", Some(r#"{"ctx": 64}"#)).await.unwrap();
        // A scripted model has no file.
        assert!(!model.is_described());
    }

    /// LMTP asks for metadata, and cannot wait within a request.
    #[tokio::test]
    async fn lm_332_a_model_is_loaded_by_a_question_that_needs_its_tokenizer() {
        let (models, _, shared) = begun().await;
        for _ in 0..3 {
            // Long messages are read on threads without a runtime.
            let health = Arc::clone(&shared.health);
            let asked = std::thread::spawn(move || health.demand("m"));
            asked.join().unwrap();
        }
        reached(&shared, "m", HealthState::Ok).await;
        assert!(models.0.engines.contains("m"));
        // Of a model that is loaded nothing is demanded.
        shared.health.demand("m");
        shared.health.demand("nobody");
        assert_eq!(shared.health.state("m"), Some(HealthState::Ok));
    }

    #[tokio::test]
    async fn oa_913_an_engine_that_has_ended_is_loaded_again() {
        let (models, kernel, shared) = begun().await;
        let end = |name: &str| {
            let engine = models.0.engines.get(name);
            engine.end();
            while !engine.is_lost() {
                std::thread::yield_now();
            }
            assert!(shared.health.live().is_err());
        };
        end("kept");
        models.0.look(Instant::now());
        reached(&shared, "kept", HealthState::Loading).await;
        let ask = |name: &str| kernel.run::<String>(name, args! { prompt: "x" });
        assert_eq!(ask("kept").await.unwrap_err().code().name(), "unavailable");
        assert!(shared.health.live().is_ok());
        drop(models.0.locks.change("kept").await);
        models.0.look(later(1));
        reached(&shared, "kept", HealthState::Ok).await;
        assert_eq!(ask("kept").await.unwrap(), "x");
        // One that is loaded on demand waits for a call.
        end("eager");
        models.0.look(Instant::now());
        reached(&shared, "eager", HealthState::OnDemand).await;
        let refused = ask("eager").await.unwrap_err();
        assert!(refused.retry_after().is_some(), "{refused}");
    }

    /// A model that embeds has other inputs than one that generates, and its first call must be right.
    #[cfg(feature = "embedded")]
    #[tokio::test]
    async fn what_is_downloaded_already_is_looked_at_before_its_first_call() {
        use sapwood_engine::embedded::random::{RandomModelShape, write};
        let folder = tempfile::tempdir().unwrap();
        for (path, shape) in [
            ("hf/o/r/main/e.gguf", RandomModelShape::tiny_encoder(1)),
            ("web/https/h/g.gguf", RandomModelShape::tiny()),
        ] {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let file = std::fs::File::create(path).unwrap();
            write(std::io::BufWriter::new(file), &shape, 7).unwrap();
        }
        let text = format!(
            "[hub]\ndir = {:?}\noffline = true\n[engine]\nload = \"first_use\"\n[[models]]\nname = \"e\"\npath = \
             \"hf:o/r:e.gguf\"\n[[models]]\nname = \"g\"\npath = \"https://h/g.gguf\"\n",
            folder.path()
        );
        let (models, planned, kernel, _) = planned(&text);
        models.begin(planned).await.unwrap();
        assert!(models.0.engines.contains("e") && !models.0.engines.contains("g"));
        let rows = kernel.embed("e", ["the text"]).await.unwrap();
        assert_eq!(rows[0].len(), 64);
        assert!(kernel.get("g").unwrap().spec().facts.is_some());
        models.0.engines.get("e").end();
    }
}
