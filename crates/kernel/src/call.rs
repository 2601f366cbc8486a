//! One call of a function: its inputs, options and extensions.

use sapwood_proto::error_reason::ErrorReason;
use std::any::Any;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::BytesMut;
use futures::StreamExt;
use futures::future::try_join_all;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::cancel::Cancel;
use crate::error::Error;
use crate::extensions::{Context, Extensions};
use crate::limits;
use crate::name::{Mime, Name};
use crate::node::Node;
use crate::spec::{InputSpec, Spec};
use crate::want::Want;
use crate::{Chunks, Result};

pub use tokio::time::Instant;

/// The id of a call, tied to traces and logs; unique in this process, not part of the data (KE-R13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(u64);

impl CallId {
    pub(crate) fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The inputs of a call, under their declared names.
#[derive(Clone, Debug, Default)]
pub struct Inputs(Vec<(Name, Node)>);

impl Inputs {
    /// The input of this declared name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Node> {
        self.0
            .iter()
            .find(|(mine, _)| *mine == *name)
            .map(|(_, node)| node)
    }

    /// Sets an input, replacing its previous value.
    pub fn set(&mut self, name: impl Into<Name>, node: impl Into<Node>) {
        let (name, node) = (name.into(), node.into());
        match self.0.iter_mut().find(|(mine, _)| *mine == name) {
            Some((_, old)) => *old = node,
            None => self.0.push((name, node)),
        }
    }

    /// Removes an input.
    pub fn remove(&mut self, name: &str) -> Option<Node> {
        let index = self.0.iter().position(|(mine, _)| *mine == *name)?;
        Some(self.0.remove(index).1)
    }

    /// All inputs of the call, in the order in which they were set.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &Node)> {
        self.0.iter().map(|(name, node)| (name, node))
    }

    /// Adds arguments under their declared names.
    ///
    /// # Errors
    /// `Argument` for a name that is unknown (`UNKNOWN_PARAM`), given twice, an alias beside its name included
    /// (`DUPLICATE_PARAM`), or required and missing (`MISSING_INPUT`).
    pub(crate) fn of(spec: &Spec, args: Vec<(Name, Node)>) -> Result<Self> {
        let mut inputs = Self(Vec::with_capacity(args.len()));
        for (given, node) in args {
            let Some(input) = spec.input(&given) else {
                let names: Vec<&str> = spec.inputs.iter().map(|input| &*input.name).collect();
                let why = format!(
                    "{} has no such input; it has: {}",
                    spec.name,
                    names.join(", ")
                );
                return Err(Error::argument(given, why).because(ErrorReason::UNKNOWN_PARAM));
            };
            // Looked up by the declared name: an alias beside its name is the same input (EV-504).
            if inputs.get(&input.name).is_some() {
                return Err(
                    Error::argument(given, "given twice").because(ErrorReason::DUPLICATE_PARAM)
                );
            }
            inputs.0.push((input.name.clone(), node));
        }
        let missing = |input: &&InputSpec| input.required && inputs.get(&input.name).is_none();
        if let Some(input) = spec.inputs.iter().find(missing) {
            let why = format!("{} needs this input", spec.name);
            return Err(
                Error::argument(input.name.clone(), why).because(ErrorReason::MISSING_INPUT)
            );
        }
        Ok(inputs)
    }
}

/// An extension: the share of a queue that a call waits in. Callers take turns, and within a caller its connections or sessions do
/// (D-54). 0 stands for no caller in particular.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FairShare {
    /// Number of the caller.
    pub caller: u64,
    /// Number of the caller's connection or session.
    pub connection: u64,
}

/// A value of one call: the models that the caller may know of; without it, all. For functions that look models up by name, so
/// that their errors name no others.
#[derive(Clone, Debug)]
pub struct KnownModels(pub Arc<HashSet<Name>>);

/// The kernel that a call came from, and what calls made through it inherit (KE-138).
///
/// A kernel's functions and layers take calls, so a call cannot name the kernel's type without a circle; it carries the
/// registry as an opaque value, and [`Call::kernel`], which is defined with [`Kernel`](crate::Kernel), reads it.
#[derive(Clone)]
pub struct Caller {
    pub(crate) registry: Arc<dyn Any + Send + Sync>,
    pub(crate) inherited: Option<Arc<Inherited>>,
}

/// The values that the calls within a call inherit from it (KE-138).
pub(crate) struct Inherited {
    pub(crate) id: CallId,
    pub(crate) depth: u32,
    pub(crate) deadline: Option<Instant>,
    pub(crate) cancel: Cancel,
    pub(crate) extensions: Extensions,
}

impl Inherited {
    fn of(call: &Call) -> Self {
        Self {
            id: call.id,
            depth: call.depth,
            deadline: call.deadline,
            cancel: call.cancel.clone(),
            extensions: call.extensions.clone(),
        }
    }

    /// Whether nothing that `call` passes down has changed since.
    fn is_still(&self, call: &Call) -> bool {
        // A layer may replace the other three; the depth goes with the id.
        self.id == call.id
            && self.deadline == call.deadline
            && self.cancel.is(&call.cancel)
            && self.extensions.is(&call.extensions)
    }
}

/// One call.
#[non_exhaustive]
#[derive(Clone)]
pub struct Call {
    /// The kernel it came from; see [`Call::kernel`].
    pub(crate) caller: Caller,
    /// Its id.
    pub id: CallId,
    /// The id of the call that made it.
    pub parent: Option<CallId>,
    /// Its inputs.
    pub inputs: Inputs,
    /// What the caller requests.
    pub want: Want,
    /// Its deadline, on tokio's clock.
    pub deadline: Option<Instant>,
    /// Fires when the call or its caller is cancelled, or its run is dropped; inherited by the calls within this one. A layer that sets a child of it
    /// can cancel those alone.
    pub cancel: Cancel,
    /// Typed values that the calls within this one inherit; its caller's unless a layer sets others. Functions of models
    /// read a [`FairShare`] and [`SteerRights`](crate::SteerRights).
    pub extensions: Extensions,
    /// Typed values of this call alone: what a layer puts here ends with the call, also if the calls within it go on.
    /// Functions of models read an `Arc<dyn` [`TokenCharge`](crate::TokenCharge)`>` and an
    /// `Arc<dyn` [`CallObserver`](crate::CallObserver)`>`, those that look models up a [`KnownModels`].
    pub own: Extensions,
    pub(crate) spec: Arc<Spec>,
    pub(crate) depth: u32,
}

impl Call {
    /// Reads an input as it arrives: the main port's choice 0.
    ///
    /// # Errors
    /// `NotFound` if the call does not have this input.
    pub fn read(&self, input: &str) -> Result<Chunks> {
        Ok(self.given(input)?.main().read())
    }

    /// Reads an input whole and decodes it (KE-137).
    ///
    /// # Errors
    /// `NotFound` if the call does not have it; `Argument` if it does not decode; its own error if it failed.
    pub async fn arg<A: DeserializeOwned>(&self, input: &str) -> Result<A> {
        let node = self.given(input)?;
        let schema = self.spec.input(input).map(|input| &input.schema);
        let value = whole(input, node, schema.unwrap_or(&Value::Bool(true))).await?;
        serde_json::from_value(value)
            .map_err(|error| Error::argument(Name::shared(input), error.to_string()))
    }

    /// Reads all inputs concurrently and decodes them as one object (KE-137).
    ///
    /// # Errors
    /// `Argument` if they do not decode; an input's own error if it failed.
    pub async fn args<A: DeserializeOwned>(&self) -> Result<A> {
        let all = &Value::Bool(true);
        let reads = self.inputs.iter().map(|(name, node)| async move {
            let schema = self.spec.input(name).map_or(all, |input| &input.schema);
            Ok::<_, Error>((name.to_string(), whole(name, node, schema).await?))
        });
        // Together: two inputs may come from one bounded source, and reading them in turn would deadlock (KE-137).
        let object: Map<String, Value> = try_join_all(reads).await?.into_iter().collect();
        let none = object.is_empty();
        serde_json::from_value(Value::Object(object))
            // A function without inputs may take `()`, which decodes from null and not from an empty object.
            .or_else(|error| {
                if none {
                    serde_json::from_value(Value::Null)
                } else {
                    Err(error)
                }
            })
            .map_err(|error| Error::argument(self.spec.name.clone(), error.to_string()))
    }

    /// The named value `key` that this call's caller, or one around it, set with [`crate::Run::context`].
    #[must_use]
    pub fn context(&self, key: &str) -> Option<&Value> {
        self.extensions.get::<Context>()?.get(key)
    }

    /// Its share of queues.
    #[must_use]
    pub fn fair_share(&self) -> FairShare {
        self.extensions.get().copied().unwrap_or_default()
    }

    /// Passes the present deadline, cancel and extensions down to the calls made from here on: a layer may have changed
    /// them. Most do not, and then nothing is allocated.
    pub(crate) fn pass_down(&mut self) {
        let inherited = self.caller.inherited.as_ref();
        if !inherited.is_some_and(|inherited| inherited.is_still(self)) {
            self.caller.inherited = Some(Arc::new(Inherited::of(self)));
        }
    }

    fn given(&self, input: &str) -> Result<&Node> {
        self.inputs.get(input).ok_or_else(|| {
            Error::not_found(
                "input",
                input,
                self.inputs.iter().map(|(name, _)| name.clone()),
            )
        })
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("id", &self.id)
            .field("function", &self.spec.name)
            .field("inputs", &self.inputs)
            .field("want", &self.want)
            .finish_non_exhaustive()
    }
}

/// The whole content of an input as a value: a string if it is plain text and the schema admits strings, else JSON.
async fn whole(name: &str, node: &Node, schema: &Value) -> Result<Value> {
    let wrong = |why: String| Error::argument(Name::shared(name), why);
    let mut chunks = node.main().read();
    let mut data = BytesMut::new();
    let mut mime: Option<Mime> = None;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        data.extend_from_slice(&chunk.data);
        mime.get_or_insert(chunk.mime);
    }
    let mime = mime.unwrap_or(Mime::TEXT);
    if !mime.is_text() {
        return Err(wrong(format!("{mime} is neither text nor JSON")));
    }
    let plain = mime.matches(&Mime::TEXT);
    // Plain text stays text even if it looks like JSON: `42` for a string is "42" (KE-137).
    if plain && admits_string(schema, schema, 0) {
        return match String::from_utf8(data.into()) {
            Ok(text) => Ok(Value::String(text)),
            Err(error) => Err(wrong(format!("not UTF-8: {}", error.utf8_error()))),
        };
    }
    // As the JSON of an output: its values take many times its text.
    if data.len() > limits::JSON_VALUE_BYTES {
        return Err(Error::Limit {
            name: "json_value_bytes",
            max: limits::JSON_VALUE_BYTES as u64,
        });
    }
    serde_json::from_slice(&data).map_err(|error| wrong(format!("not JSON: {error}")))
}

/// Whether `schema` admits a string. References are followed within `root`; `depth` bounds the recursion.
fn admits_string(schema: &Value, root: &Value, depth: u32) -> bool {
    let Value::Object(object) = schema else {
        return *schema != Value::Bool(false);
    };
    // A schema may refer to itself.
    if depth > 32 {
        return false;
    }
    let some = |list: &Value| {
        list.as_array()
            .is_some_and(|list| list.iter().any(|item| admits_string(item, root, depth + 1)))
    };
    if let Some(target) = object.get("$ref").and_then(Value::as_str) {
        let pointer = target
            .strip_prefix('#')
            .and_then(|pointer| root.pointer(pointer));
        return pointer.is_some_and(|target| admits_string(target, root, depth + 1));
    }
    if let Some(kind) = object.get("type") {
        let named = |kind: &Value| kind.as_str() == Some("string");
        return named(kind) || kind.as_array().is_some_and(|kinds| kinds.iter().any(named));
    }
    if let Some(values) = object.get("enum").and_then(Value::as_array) {
        return values.iter().any(Value::is_string);
    }
    if let Some(value) = object.get("const") {
        return value.is_string();
    }
    match (
        object.get("anyOf").or_else(|| object.get("oneOf")),
        object.get("allOf"),
    ) {
        (Some(any), _) => some(any),
        (None, Some(all)) => all
            .as_array()
            .is_none_or(|all| all.iter().all(|item| admits_string(item, root, depth + 1))),
        // JSON Schema admits what it does not restrict.
        (None, None) => true,
    }
}

#[cfg(test)]
mod tests;
