//! [`Spec`]: name, inputs, outputs and effects of a function.

use std::any::{Any, TypeId, type_name};
use std::sync::Arc;

use sapwood_engine::recommended::RecommendedSampling;
use serde_json::{Map, Value, json};

use crate::Result;
use crate::chunk::Text;
use crate::error::Error;
use crate::facts::{EmbeddingFacts, ModelFacts};
use crate::limits;
use crate::name::{Mime, Name, Port};
use crate::state::NeededState;

/// Names that Evergreen sessions reserve.
const RESERVED: [&str; 10] = [
    "CANCEL",
    "DROP",
    "FINISH",
    "LIST_ACTIONS",
    "OFFER_ACTIONS",
    "RESUME",
    "SESSION_INFO",
    "SET_TTL",
    "__abort__",
    "__status__",
];

/// The spec of a function: what it promises to its callers.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Spec {
    /// Its name: segments joined by `.`; a model's is its model id.
    pub name: Name,
    /// A description for people and models.
    pub description: Text,
    /// Its version. Rises when the meaning changes.
    pub version: u32,
    /// The inputs. The first is the main input.
    pub inputs: Vec<InputSpec>,
    /// The outputs. The first is the main output.
    pub outputs: Vec<OutputSpec>,
    /// The effect of a call.
    pub effect: Effect,
    /// It gives a finish reason for every choice that produced a chunk (KE-136).
    pub finishes: bool,
    /// The type of `inner` on its chunks.
    pub inner: Option<InnerType>,
    /// It is a model, named by its model id, and not offered as a tool: a target of GENERATE unless it embeds.
    pub model: bool,
    /// It is a model that embeds texts, or scores documents, instead of generating.
    pub embeds: bool,
    /// The facts of that model, if it is loaded in this process.
    pub embedding: Option<Arc<EmbeddingFacts>>,
    /// Its calls may have a controller or a constraint.
    pub steers: bool,
    /// The facts of that model, if it is loaded in this process, or is served in tokens by another server that reports
    /// enough of them.
    pub facts: Option<Arc<ModelFacts>>,
    /// The sampling values that the model recommends; for programs that call it for a person (D-53).
    pub sampling: RecommendedSampling,
    /// Why it cannot be registered, if that was found while it was built.
    pub(crate) defect: Option<String>,
    /// The state that its code takes; the kernel has it before the function is added.
    pub(crate) state: Option<NeededState>,
}

/// One named input.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct InputSpec {
    /// Its name.
    pub name: Name,
    /// Other names of the same input.
    pub aliases: Vec<Name>,
    /// Mimetypes it accepts; patterns allowed.
    pub mimes: Vec<Mime>,
    /// JSON Schema 2020-12 of its value; `true` admits everything.
    pub schema: Value,
    /// Whether a call without it fails.
    pub required: bool,
    /// Whether it is read while it arrives.
    pub streams: bool,
}

/// One named output.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct OutputSpec {
    /// Its port; `""` is the main one.
    pub port: Port,
    /// Its name on the wire.
    pub wire: Name,
    /// Other names on the wire.
    pub aliases: Vec<Name>,
    /// Mimetypes it can have, preferred first; patterns allowed.
    pub mimes: Vec<Mime>,
    /// JSON Schema of its values, if they are JSON.
    pub schema: Option<Value>,
    /// Whether it may have several parts (KE-113).
    pub many: bool,
}

/// The effect of calling a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Effect {
    /// None; equal inputs give equal outputs.
    Pure,
    /// It changes something, but calling twice has the effect of calling once.
    Idempotent,
    /// It changes something with each call.
    #[default]
    Effect,
}

/// The type of the raw objects on a function's chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InnerType {
    id: TypeId,
    name: &'static str,
}

impl InnerType {
    /// The type `X`.
    #[must_use]
    pub fn of<X: Any>() -> Self {
        Self {
            id: TypeId::of::<X>(),
            name: type_name::<X>(),
        }
    }

    /// Its name, for people.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl InputSpec {
    /// A required text input that accepts everything.
    pub fn new(name: impl Into<Name>) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            mimes: vec![Mime::ANY],
            schema: Value::Bool(true),
            required: true,
            streams: false,
        }
    }

    /// Sets the accepted mimetypes.
    #[must_use]
    pub fn taking(mut self, mimes: impl IntoIterator<Item = Mime>) -> Self {
        self.mimes = mimes.into_iter().collect();
        self
    }

    /// Adds an alias.
    #[must_use]
    pub fn alias(mut self, alias: impl Into<Name>) -> Self {
        self.aliases.push(alias.into());
        self
    }

    /// Sets the schema.
    #[must_use]
    pub fn schema(mut self, schema: Value) -> Self {
        self.schema = schema;
        self
    }

    /// Makes it optional.
    #[must_use]
    pub const fn optional(mut self) -> Self {
        self.required = false;
        self
    }

    /// Makes it streaming: read while it arrives, and not gathered. Content of a session that a function gathers counts
    /// against the session's limit of retained bytes.
    #[must_use]
    pub const fn streaming(mut self) -> Self {
        self.streams = true;
        self
    }

    fn names(&self) -> impl Iterator<Item = &Name> {
        std::iter::once(&self.name).chain(&self.aliases)
    }
}

impl OutputSpec {
    /// An output on `port` of this mimetype. Its wire name is the name of the port, or `output` for the main one.
    pub fn new(port: impl Into<Port>, mime: impl Into<Mime>) -> Self {
        let port = port.into();
        let wire = match port.as_str() {
            "" => Name::new("output"),
            name => Name::shared(name),
        };
        Self {
            port,
            wire,
            aliases: Vec::new(),
            mimes: vec![mime.into()],
            schema: None,
            many: false,
        }
    }

    /// Sets the wire name.
    #[must_use]
    pub fn wire(mut self, wire: impl Into<Name>) -> Self {
        self.wire = wire.into();
        self
    }

    /// Adds an alias of the wire name.
    #[must_use]
    pub fn alias(mut self, alias: impl Into<Name>) -> Self {
        self.aliases.push(alias.into());
        self
    }

    /// Allows several parts.
    #[must_use]
    pub const fn many(mut self) -> Self {
        self.many = true;
        self
    }

    fn names(&self) -> impl Iterator<Item = &Name> {
        std::iter::once(&self.wire).chain(&self.aliases)
    }
}

impl Spec {
    /// A function without inputs and with one text output, as a start for the methods below.
    pub fn new(name: impl Into<Name>, description: impl Into<Text>) -> Self {
        Self {
            name: name.into(),
            description: description.into(),
            version: 1,
            inputs: Vec::new(),
            outputs: vec![OutputSpec::new(Port::MAIN, Mime::TEXT)],
            effect: Effect::default(),
            finishes: false,
            inner: None,
            model: false,
            embeds: false,
            embedding: None,
            steers: false,
            facts: None,
            sampling: RecommendedSampling::default(),
            defect: None,
            state: None,
        }
    }

    /// Sets the inputs.
    #[must_use]
    pub fn inputs(mut self, inputs: impl IntoIterator<Item = InputSpec>) -> Self {
        self.inputs = inputs.into_iter().collect();
        self
    }

    /// Sets the outputs.
    #[must_use]
    pub fn outputs(mut self, outputs: impl IntoIterator<Item = OutputSpec>) -> Self {
        self.outputs = outputs.into_iter().collect();
        self
    }

    /// Sets the effect.
    #[must_use]
    pub const fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    /// Whether it is a target of GENERATE.
    #[must_use]
    pub const fn generates(&self) -> bool {
        self.model && !self.embeds
    }

    /// The input of this name or alias.
    #[must_use]
    pub fn input(&self, name: &str) -> Option<&InputSpec> {
        let named = |input: &&InputSpec| input.names().any(|mine| *mine == *name);
        self.inputs.iter().find(named)
    }

    /// The output on this port.
    #[must_use]
    pub fn output(&self, port: &str) -> Option<&OutputSpec> {
        self.outputs.iter().find(|output| output.port == *port)
    }

    /// The output with this wire name or alias; `""` is the main one.
    #[must_use]
    pub fn output_on_wire(&self, wire: &str) -> Option<&OutputSpec> {
        let named = |output: &&OutputSpec| output.names().any(|mine| *mine == *wire);
        match wire {
            "" => self.outputs.first(),
            _ => self.outputs.iter().find(named),
        }
    }

    /// The JSON Schema of an object of all inputs (KE-133).
    #[must_use]
    pub fn schema(&self) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        let mut defs = Map::new();
        for input in &self.inputs {
            let mut schema = input.schema.clone();
            if let Some(object) = schema.as_object_mut()
                && let Some(Value::Object(found)) = object.remove("$defs")
            {
                // Definitions are moved to the root, where `#/$defs/…` of all properties looks for them.
                defs.extend(found);
            }
            properties.insert(input.name.to_string(), schema);
            if input.required {
                required.push(Value::from(input.name.as_str()));
            }
        }
        let mut schema = json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        });
        if let (Some(object), false) = (schema.as_object_mut(), defs.is_empty()) {
            object.insert("$defs".into(), Value::Object(defs));
        }
        schema
    }

    /// Whether a function with this spec may be registered (KE-132 to KE-134, KE-213).
    ///
    /// # Errors
    /// `Argument`, naming what is wrong.
    pub fn check(&self) -> Result<()> {
        if let Some(defect) = &self.defect {
            return Err(Error::argument(self.name.clone(), defect.clone()));
        }
        check_name(&self.name, self.model)?;
        let why = self.bad_inputs().or_else(|| self.bad_outputs());
        why.map_or(Ok(()), |why| Err(Error::argument(self.name.clone(), why)))
    }

    fn bad_inputs(&self) -> Option<String> {
        if self.inputs.len() > limits::INPUTS {
            return Some(format!("at most {} inputs", limits::INPUTS));
        }
        bad_names(self.inputs.iter().flat_map(InputSpec::names), "input")
    }

    fn bad_outputs(&self) -> Option<String> {
        if self.outputs.len() > limits::PORTS {
            return Some(format!("at most {} ports", limits::PORTS));
        }
        let mut outputs = self.outputs.iter().enumerate();
        // Readers of the main output, and peers that list outputs without ports, rely on this position (KE-134).
        if outputs.any(|(index, output)| (output.port == *"") != (index == 0)) {
            return Some("the main output, port \"\", comes first and once".into());
        }
        let bad_port = self
            .outputs
            .iter()
            .skip(1)
            .find(|output| !is_port(&output.port));
        if let Some(output) = bad_port {
            return Some(format!(
                "the port {:?} is not of the form [a-z][a-z0-9_]*",
                output.port
            ));
        }
        let ports: Vec<&Port> = self.outputs.iter().map(|output| &output.port).collect();
        if let Some(port) = first_twice(&ports) {
            return Some(format!("the port {port:?} is declared twice"));
        }
        bad_names(self.outputs.iter().flat_map(OutputSpec::names), "output")
    }
}

fn bad_names<'a>(names: impl Iterator<Item = &'a Name>, what: &str) -> Option<String> {
    let names: Vec<&Name> = names.collect();
    if let Some(name) = names
        .iter()
        .find(|name| name.is_empty() || name.len() > limits::NAME_BYTES)
    {
        return Some(format!(
            "the {what} name {name:?} is not 1 to {} bytes long",
            limits::NAME_BYTES
        ));
    }
    first_twice(&names).map(|name| format!("the {what} name {name:?} is used twice"))
}

fn first_twice<'a, T: PartialEq>(list: &[&'a T]) -> Option<&'a T> {
    list.iter()
        .enumerate()
        .find(|(index, item)| list[..*index].contains(item))
        .map(|(_, item)| *item)
}

fn is_port(port: &str) -> bool {
    let mut bytes = port.bytes();
    port.len() <= limits::NAME_BYTES
        && bytes.next().is_some_and(|first| first.is_ascii_lowercase())
        && bytes.all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// KE-132.
fn check_name(name: &Name, model: bool) -> Result<()> {
    let refuse = |why: &str| Err(Error::argument(name.clone(), why));
    // Ids of models come from repositories, with `/`, `:` and `-`; they are targets and not identifiers.
    if model {
        return match name.len() {
            1..=limits::MODEL_NAME_BYTES if !name.chars().any(char::is_control) => Ok(()),
            _ => refuse("a model's name is 1 to 256 bytes without control characters"),
        };
    }
    let segment = |text: &str| {
        let mut bytes = text.bytes();
        bytes
            .next()
            .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    if name.len() > limits::NAME_BYTES || !name.split('.').all(segment) {
        return refuse("a name is 1 to 64 bytes: segments [A-Za-z_][A-Za-z0-9_]* joined by dots");
    }
    // `fn.` is the prefix with which faces name a function beside a model of the same name (D-17).
    if name.split('.').next() == Some("fn") || RESERVED.contains(&name.as_str()) {
        return refuse("this name is reserved; choose another");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
