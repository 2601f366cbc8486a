//! Finds the files of planned models and loads them.

use std::io;

#[cfg(feature = "embedded")]
use sapwood_engine::DraftModel;
#[cfg(feature = "embedded")]
use sapwood_engine::embedded;
use sapwood_engine::embedding::{Embedder, Pooling, ScriptedEmbedding, ScriptedEmbeddingConfig};
use sapwood_engine::{Engine, scripted};

#[cfg(feature = "embedded")]
use super::ModelSize;
use super::{PlannedModel, PlannedSource};
use crate::failure::{CliError, Exit};
use crate::hub::ModelCache;
#[cfg(feature = "embedded")]
use crate::hub::ModelSource;
use crate::loaded_model::LoadedModel;

impl PlannedModel {
    /// The same model with its file on this machine: downloaded if it is named otherwise and not there, and locked until
    /// the cache [releases](ModelCache::release) it.
    ///
    /// # Errors
    /// [`Exit::Model`] with one line that names a remedy.
    #[cfg(feature = "embedded")]
    pub(crate) async fn located(mut self, cache: &ModelCache) -> Result<Self, CliError> {
        let name = self.name.clone();
        // A load before this one may have left locks of other files.
        cache.release(&name);
        let failed = |why: CliError| {
            let what = format!("cannot load the model `{name}`: {why}");
            CliError::exit(Exit::Model, what)
        };
        let source = match &self.source {
            PlannedSource::Named(source) => Some(source.clone()),
            // `models pull` and `rm` may reach it.
            PlannedSource::File(path) if cache.covers(path) => {
                Some(ModelSource::File(path.clone()))
            }
            _ => None,
        };
        if let Some(source) = source {
            let path = cache.acquire(&name, &source).await.map_err(&failed)?;
            self.source = PlannedSource::File(path);
        }
        if let Some(draft) = &mut self.size.draft {
            let source =
                ModelSource::read(&draft.path).map_err(|why| failed(CliError::usage(why)))?;
            let is_outside = matches!(&source, ModelSource::File(path) if !cache.covers(path));
            if !is_outside {
                let path = cache.acquire(&name, &source).await;
                draft.path = path.map_err(&failed)?;
            }
        }
        Ok(self)
    }

    /// Without llama.cpp no model has a file.
    #[cfg(not(feature = "embedded"))]
    #[expect(clippy::unused_async, reason = "asynchronous where there are files")]
    pub(crate) async fn located(self, _: &ModelCache) -> Result<Self, CliError> {
        Ok(self)
    }

    /// The same model with its file, if that is on this machine already, for a look at it: nothing is downloaded or locked.
    #[cfg(feature = "embedded")]
    pub(crate) fn found(mut self, cache: &ModelCache) -> Self {
        if let PlannedSource::Named(source) = &self.source
            && let Some(path) = cache.find(source)
        {
            self.source = PlannedSource::File(path);
        }
        self
    }

    /// Without llama.cpp no model has a file.
    #[cfg(not(feature = "embedded"))]
    pub(crate) fn found(self, _: &ModelCache) -> Self {
        self
    }

    /// Loads the model and starts its engine. Slow: call it where blocking is allowed. `progress` gets the share done
    /// and stops the load by returning false.
    ///
    /// # Errors
    /// [`Exit::Model`] with one line that names a remedy.
    pub(crate) fn load(
        self,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<LoadedModel, CliError> {
        let name = self.name.clone();
        let failed = |why: String| {
            CliError::exit(
                Exit::Model,
                format!("cannot load the model `{name}`: {why}"),
            )
        };
        match self.source.clone() {
            PlannedSource::Scripted(script) => {
                progress(1.0);
                self.scripted(*script).map_err(failed)
            }
            #[cfg(feature = "demo-model")]
            PlannedSource::Demo => {
                let source = embedded::ModelSource::Bytes(sapwood_demo::MODEL);
                self.embedded(&source, progress).map_err(failed)
            }
            // Only a file is loaded: see `located`.
            #[cfg(feature = "embedded")]
            PlannedSource::Named(source) => Err(failed(format!("{source} is not downloaded"))),
            #[cfg(feature = "embedded")]
            PlannedSource::File(path) => {
                let source = embedded::ModelSource::File(path);
                self.embedded(&source, progress).map_err(failed)
            }
        }
    }

    fn scripted(self, script: scripted::Config) -> Result<LoadedModel, String> {
        if self.size.embedding == Some(true) {
            let model = ScriptedEmbedding::new(ScriptedEmbeddingConfig {
                name: script.name,
                pooling: self.size.pooling.map_or(Pooling::Mean, Into::into),
                context_tokens: script.context_tokens,
                parallel: script.parallel,
                normalize: self.size.normalize,
                ..ScriptedEmbeddingConfig::default()
            });
            return spawned(Embedder::spawn(Box::new(model), &self.limits));
        }
        let model = scripted::Scripted::new(script).map_err(|why| why.to_string())?;
        spawned(Engine::spawn(Box::new(model), self.limits))
    }

    #[cfg(feature = "embedded")]
    fn embedded(
        self,
        source: &embedded::ModelSource,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<LoadedModel, String> {
        let (name, options) = (&self.name, self.size.options());
        let to_text = |why: embedded::LoadError| why.to_string();
        if self.size.embeds(source).map_err(to_text)? {
            let embedding = self.size.embedding();
            let model = embedded::load_embedding(name, source, &options, embedding, progress);
            let model = Box::new(model.map_err(to_text)?);
            return spawned(Embedder::spawn(model, &self.limits));
        }
        let mut model = embedded::load(name, source, &options, progress).map_err(to_text)?;
        let draft = draft_of(&mut model, &self.size)?;
        spawned(Engine::spawn_drafting(Box::new(model), draft, self.limits))
    }
}

/// Loads a file, or the demo model, computes a few tokens and drops all of it.
///
/// # Errors
/// The reason that it cannot be used, for people.
#[cfg(feature = "embedded")]
pub(crate) fn try_out(file: Option<std::path::PathBuf>, size: &ModelSize) -> Result<(), String> {
    let source = match file {
        Some(file) => embedded::ModelSource::File(file),
        #[cfg(feature = "demo-model")]
        None => embedded::ModelSource::Bytes(sapwood_demo::MODEL),
        #[cfg(not(feature = "demo-model"))]
        None => return Err("this binary was built without the demo model".to_owned()),
    };
    let (options, mut go_on) = (size.options(), |_| true);
    let to_text = |why: embedded::LoadError| why.to_string();
    if size.embeds(&source).map_err(to_text)? {
        let embedding = size.embedding();
        let loaded = embedded::load_embedding("trial", &source, &options, embedding, &mut go_on);
        return loaded.map_err(to_text)?.try_out();
    }
    let loaded = embedded::load("trial", &source, &options, &mut go_on);
    let mut model = loaded.map_err(to_text)?;
    model.try_out()?;
    draft_of(&mut model, size).map(drop)
}

/// Returns the draft model that was loaded with a model, if its tokens are those of the model.
#[cfg(feature = "embedded")]
fn draft_of(
    model: &mut embedded::Embedded,
    size: &ModelSize,
) -> Result<Option<DraftModel>, String> {
    let p_min = size.draft.as_ref().map_or(0.0, |draft| draft.p_min);
    let draft = model.take_draft().map(Box::new);
    let draft = draft.map(|draft| DraftModel::new(draft, &*model, p_min));
    draft
        .transpose()
        .map_err(|why| format!("its draft model: {why}"))
}

fn spawned<E: Into<LoadedModel>>(engine: io::Result<E>) -> Result<LoadedModel, String> {
    engine
        .map(Into::into)
        .map_err(|why| format!("no thread for it ({why})"))
}
