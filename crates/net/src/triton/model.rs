//! Model metadata that a server reports (TR-702, TR-703, TR-705).

use sapwood_proto::generate::Datatype;
use sapwood_proto::generated::inference::model_metadata_response::TensorMetadata;
use sapwood_proto::generated::inference::repository_index_response::ModelIndex;
use sapwood_proto::generated::inference::{ModelConfig, ModelMetadataResponse};
use serde_json::Value;

use super::error::Error;

/// A model that a server lists as ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyModel {
    /// Its name.
    pub name: String,
    /// The versions that are ready, as the server writes them.
    pub versions: Vec<String>,
}

/// A model's inputs and outputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSignature {
    /// Its name.
    pub name: String,
    /// The platform or backend that runs it, as the server reports it.
    pub platform: String,
    /// Its inputs.
    pub inputs: Vec<Declared>,
    /// Its outputs.
    pub outputs: Vec<Declared>,
    /// It may return any number of responses, instead of exactly one.
    pub decoupled: bool,
}

/// A declared tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: Datatype,
    /// Its dimensions, including a batch dimension; -1 is variable.
    pub shape: Vec<i64>,
    /// A request may omit it.
    pub optional: bool,
}

impl ModelSignature {
    /// Returns the index of an input.
    #[must_use]
    pub fn input(&self, name: &str) -> Option<usize> {
        self.inputs.iter().position(|input| input.name == name)
    }

    /// Returns the index of an output.
    #[must_use]
    pub fn output(&self, name: &str) -> Option<usize> {
        self.outputs.iter().position(|output| output.name == name)
    }

    /// Parses the metadata as JSON.
    pub(super) fn from_json(metadata: &Value) -> Result<Self, Error> {
        let text = |key| metadata.get(key).and_then(Value::as_str);
        Ok(Self {
            name: text("name").ok_or(UNREAD)?.to_owned(),
            platform: text("platform").unwrap_or_default().to_owned(),
            inputs: tensors(metadata.get("inputs"))?,
            outputs: tensors(metadata.get("outputs"))?,
            // Assumed until the configuration says otherwise: a stream of responses is right for one response as well.
            decoupled: true,
        })
    }

    /// Converts the metadata message.
    pub(super) fn from_message(metadata: ModelMetadataResponse) -> Result<Self, Error> {
        let tensors = |list: Vec<_>| {
            let one =
                |tensor: TensorMetadata| declared(tensor.name, &tensor.datatype, tensor.shape);
            counted(list.len())?;
            list.into_iter().map(one).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            name: metadata.name,
            platform: metadata.platform,
            inputs: tensors(metadata.inputs)?,
            outputs: tensors(metadata.outputs)?,
            decoupled: true,
        })
    }

    /// Adds the information of the configuration, as JSON.
    pub(super) fn configure(&mut self, config: &Value) {
        for input in config
            .get("input")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let optional = input.get("optional").and_then(Value::as_bool);
            let name = input.get("name").and_then(Value::as_str);
            self.set_optional(name.unwrap_or_default(), optional == Some(true));
        }
        let decoupled = config.pointer("/model_transaction_policy/decoupled");
        // proto3 leaves a member out that has its default value, so its absence says `false`.
        self.decoupled = decoupled.and_then(Value::as_bool).unwrap_or(false);
    }

    /// Adds the information of the configuration message.
    pub(super) fn configure_by(&mut self, config: &ModelConfig) {
        for input in &config.input {
            self.set_optional(&input.name, input.optional);
        }
        let policy = config.model_transaction_policy.as_ref();
        self.decoupled = policy.is_some_and(|policy| policy.decoupled);
    }

    fn set_optional(&mut self, name: &str, optional: bool) {
        if let Some(target) = self.input(name) {
            self.inputs[target].optional = optional;
        }
    }
}

/// Returns the index's ready models, each once.
pub(super) fn listed(index: Vec<ModelIndex>) -> Vec<ReadyModel> {
    let mut all: Vec<ReadyModel> = Vec::new();
    // A server that lists only ready models may omit the state.
    let ready = index
        .into_iter()
        .filter(|model| matches!(&*model.state, "READY" | "") && !model.name.is_empty());
    // Bounded, because the search for a known name below makes this quadratic.
    for model in ready.take(MODELS_MAX) {
        let known = all.iter_mut().find(|known| known.name == model.name);
        match known {
            Some(known) => known.versions.push(model.version),
            None => all.push(ReadyModel {
                name: model.name,
                versions: vec![model.version],
            }),
        }
    }
    all
}

/// Parses the index as JSON.
pub(super) fn index_from_json(index: &Value) -> Result<Vec<ModelIndex>, Error> {
    let list = index.as_array().ok_or(UNREAD)?;
    let text = |model: &Value, key| {
        let value = model.get(key).and_then(Value::as_str);
        value.unwrap_or_default().to_owned()
    };
    let one = |model: &Value| ModelIndex {
        name: text(model, "name"),
        version: text(model, "version"),
        state: text(model, "state"),
        reason: String::new(),
    };
    Ok(list.iter().take(MODELS_MAX).map(one).collect())
}

fn tensors(list: Option<&Value>) -> Result<Vec<Declared>, Error> {
    let list = list.and_then(Value::as_array).ok_or(UNREAD)?;
    counted(list.len())?;
    let one = |tensor: &Value| {
        let text = |key| tensor.get(key).and_then(Value::as_str).ok_or(UNREAD);
        let shape = tensor
            .get("shape")
            .and_then(Value::as_array)
            .ok_or(UNREAD)?;
        // JSON encodes a 64-bit integer as a string.
        let size = |size: &Value| {
            let written = || size.as_str().and_then(|size| size.parse().ok());
            size.as_i64().or_else(written).ok_or(UNREAD)
        };
        let shape = shape.iter().map(size).collect::<Result<_, _>>()?;
        declared(text("name")?.to_owned(), text("datatype")?, shape)
    };
    list.iter().map(one).collect()
}

fn declared(name: String, datatype: &str, shape: Vec<i64>) -> Result<Declared, Error> {
    let datatype = Datatype::from_name(datatype)
        .ok_or(Error::Protocol("a tensor of the model has an unknown type"))?;
    Ok(Declared {
        name,
        datatype,
        shape,
        optional: false,
    })
}

const fn counted(tensors: usize) -> Result<(), Error> {
    if tensors <= TENSORS_MAX {
        return Ok(());
    }
    Err(Error::Limit {
        name: "tensors of a model",
        max: TENSORS_MAX as u64,
    })
}

const UNREAD: Error = Error::Protocol("its description of a model cannot be parsed");
const MODELS_MAX: usize = 1_000;
const TENSORS_MAX: usize = 256;
