//! Specs of functions that a peer lists or offers (EV-810, EV-914, KE-706).
//!
//! A peer's specs are checked like any other before they are registered.

#[cfg(feature = "net")]
use std::collections::BTreeMap;

#[cfg(feature = "net")]
use sapwood_engine::recommended::RecommendedSampling;
use serde::Deserialize;
#[cfg(feature = "net")]
use serde_json::Map;
use serde_json::Value;

use super::remote;
use crate::name::{Mime, Name, Port};
use crate::spec::{InputSpec, OutputSpec, Spec};

/// The list of a peer.
#[derive(Deserialize)]
pub(crate) struct PeerListing {
    actions: Vec<ListedAction>,
    /// A server's models; a client's offer has none.
    #[cfg(feature = "net")]
    #[serde(default)]
    targets: Vec<String>,
    /// The default model, of calls that name none.
    #[cfg(feature = "net")]
    #[serde(default)]
    pub(crate) default_target: Option<String>,
    /// Sapwood's extension: the sampling values that models recommend (D-53).
    #[cfg(feature = "net")]
    #[serde(default)]
    sampling: BTreeMap<String, Map<String, Value>>,
}

#[derive(Deserialize)]
struct ListedAction {
    name: String,
    #[serde(default)]
    description: String,
    #[serde(default)]
    inputs: Vec<ListedParameter>,
    #[serde(default)]
    outputs: Vec<ListedParameter>,
    /// Sapwood's extension: it is a model that embeds, named as models are.
    #[serde(default)]
    model: bool,
}

#[derive(Deserialize)]
struct ListedParameter {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default)]
    mimetypes: Vec<String>,
    #[serde(default)]
    required: bool,
    schema: Option<Value>,
    /// Sapwood's extension; a server that implements only the protocol page omits it.
    port: Option<String>,
    #[serde(default)]
    many: bool,
}

impl PeerListing {
    /// Decodes a list. `None` if it is malformed.
    pub(crate) fn read(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    /// The listed functions.
    pub(crate) fn functions(&self) -> Vec<Spec> {
        let functions = self.actions.iter().filter(|action| !action.model);
        functions.map(spec).collect()
    }

    /// The listed models.
    #[cfg(feature = "net")]
    pub(crate) fn models(&self) -> Vec<Spec> {
        let embed = self.actions.iter().filter(|action| action.model);
        let embed = embed.map(|action| {
            let mut spec = spec(action);
            spec.model = true;
            spec.embeds = true;
            spec
        });
        self.targets().into_iter().chain(embed).collect()
    }

    /// The listed models that generate. Such a model is GENERATE with a fixed target.
    #[cfg(feature = "net")]
    fn targets(&self) -> Vec<Spec> {
        let generate = self
            .actions
            .iter()
            .find(|action| action.name == super::GENERATE);
        let Some(generate) = generate.map(spec) else {
            return Vec::new();
        };
        let models = self.targets.iter().map(|target| {
            let mut spec = generate.clone();
            spec.name = Name::shared(target);
            // The target is the name of this function, so callers do not choose one.
            spec.inputs.retain(|input| input.name != *"target");
            spec.model = true;
            spec.sampling = self
                .sampling
                .get(target)
                .map(recommended)
                .unwrap_or_default();
            spec
        });
        models.collect()
    }
}

/// The sampling values that the peer recommends for a model; unknown fields are ignored.
#[cfg(feature = "net")]
fn recommended(sent: &Map<String, Value>) -> RecommendedSampling {
    #[expect(clippy::cast_possible_truncation, reason = "parameters of 32 bits")]
    let float = |name: &str| sent.get(name)?.as_f64().map(|value| value as f32);
    let count = |name: &str| u32::try_from(sent.get(name)?.as_u64()?).ok();
    let window = |name: &str| i32::try_from(sent.get(name)?.as_i64()?).ok();
    let recommended = RecommendedSampling {
        temperature: float("temperature"),
        top_k: count("top_k"),
        top_p: float("top_p"),
        min_p: float("min_p"),
        repetition_penalty: float("repetition_penalty"),
        penalty_last_n: window("penalty_last_n"),
        xtc_probability: float("xtc_probability"),
        xtc_threshold: float("xtc_threshold"),
        mirostat: count("mirostat"),
        mirostat_tau: float("mirostat_tau"),
        mirostat_eta: float("mirostat_eta"),
        max_tokens: count("max_tokens"),
    };
    // A peer's values are not trusted: what is out of range is dropped, so that it cannot fail calls which set nothing.
    recommended.valid()
}

fn spec(action: &ListedAction) -> Spec {
    let mut spec = Spec::new(action.name.clone(), action.description.clone());
    spec.inputs = action.inputs.iter().map(input).collect();
    let outputs = action.outputs.iter().enumerate();
    spec.outputs = outputs
        .map(|(index, parameter)| output(index, parameter))
        .collect();
    spec
}

fn input(parameter: &ListedParameter) -> InputSpec {
    let mut input = InputSpec::new(parameter.name.clone()).taking(mimes(parameter));
    // A call forwards its inputs as they arrive; only the config is read here.
    input.streams = input.name != *remote::CONFIG;
    input.aliases = parameter
        .aliases
        .iter()
        .map(|alias| Name::shared(alias))
        .collect();
    input.required = parameter.required;
    if let Some(schema) = &parameter.schema {
        input.schema = schema.clone();
    }
    input
}

fn output(index: usize, parameter: &ListedParameter) -> OutputSpec {
    let port = match (&parameter.port, index) {
        (Some(port), _) => Port::shared(port),
        // By convention the first output of a list is the main one; without `port` nothing else shows which one it is.
        (None, 0) => Port::MAIN,
        (None, _) => Port::shared(&parameter.name),
    };
    let mut output = OutputSpec::new(port, Mime::ANY).wire(parameter.name.clone());
    output.mimes = mimes(parameter);
    output.aliases = parameter
        .aliases
        .iter()
        .map(|alias| Name::shared(alias))
        .collect();
    output.schema.clone_from(&parameter.schema);
    output.many = parameter.many;
    output
}

fn mimes(parameter: &ListedParameter) -> Vec<Mime> {
    if parameter.mimetypes.is_empty() {
        // A peer that lists no types promises none.
        return vec![Mime::ANY];
    }
    parameter
        .mimetypes
        .iter()
        .map(|mime| Mime::shared(mime))
        .collect()
}
