//! Models of Triton servers that are no text models, as functions of their tensors.
//!
//! An input of `BYTES` takes one string of text or bytes, or several as a JSON array if its shape allows it; any other
//! takes JSON: a value, or an array of values, nested or not. An output of `BYTES` is text, in which several strings of
//! a response are lines; one of a fixed number of strings, and any other, is JSON, one value for each response.

use std::sync::Arc;

use bytes::BytesMut;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use sapwood_net::triton::{
    Datatype, Declared, InferRequest, ModelResponse, ModelSignature, TensorData, TritonClient,
};
use serde_json::{Value, json};

use super::{elements, failure};
use crate::Result;
use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::function::Fun;
use crate::handler::{raw, streamed};
use crate::limits;
use crate::name::{Mime, Name, Port};
use crate::node::{Node, gather};
use crate::spec::{InputSpec, OutputSpec, Spec};
use crate::want::RequestedPorts;

/// The function of such a model, under its name with `_` for characters that a name cannot have (KE-132).
pub(super) fn function(client: TritonClient, model: Arc<ModelSignature>) -> Fun {
    let name = Name::from(name(&model.name));
    let mut spec = Spec::new(name.clone(), "A model of another server.");
    spec.inputs = model.inputs.iter().map(input).collect();
    let outputs = model.outputs.iter().enumerate();
    spec.outputs = outputs
        .map(|(target, declared)| output(target, declared, model.decoupled))
        .collect();
    let ports = spec
        .outputs
        .iter()
        .map(|output| output.port.clone())
        .collect();
    let remote = Arc::new(TritonTensorModel {
        client,
        model,
        name,
        ports,
    });
    raw(spec, move |call| streamed(begin(Arc::clone(&remote), call)))
}

struct TritonTensorModel {
    client: TritonClient,
    model: Arc<ModelSignature>,
    name: Name,
    /// The ports of the outputs, in order.
    ports: Vec<Port>,
}

async fn begin(
    remote: Arc<TritonTensorModel>,
    call: Call,
) -> Result<impl Stream<Item = Result<Chunk>> + Send> {
    let mut request = InferRequest::new(Arc::clone(&remote.model));
    for (target, declared) in remote.model.inputs.iter().enumerate() {
        if let Some(node) = call.inputs.get(&declared.name) {
            request.inputs.push((target, read(declared, node).await?));
        }
    }
    request.timeout = call
        .deadline
        .map(|deadline| deadline.saturating_duration_since(Instant::now()));
    // Only now, when every input is complete: a tensor request has no part that could be sent later.
    let responses = remote.client.generate(request).await;
    let responses = responses.map_err(|error| failure::error(error, &remote.name))?;
    let want = call.want.ports;
    let chunks = responses.map(move |response| match response {
        Ok(response) => Ok(stream::iter(remote.chunks(&response, &want)).map(Ok)),
        Err(error) => Err(failure::error(error, &remote.name)),
    });
    Ok(chunks.try_flatten())
}

impl TritonTensorModel {
    /// The outputs of a response that the caller reads.
    fn chunks(&self, response: &ModelResponse, want: &RequestedPorts) -> Vec<Chunk> {
        let outputs = response.outputs.iter();
        let outputs = outputs.filter(|(target, _)| want.has(&self.ports[*target]));
        let chunks = outputs.map(|(target, data)| {
            let declared = &self.model.outputs[*target];
            chunk(declared, data, self.model.decoupled).on(self.ports[*target].clone())
        });
        chunks.collect()
    }
}

fn chunk(declared: &Declared, data: &TensorData, decoupled: bool) -> Chunk {
    if let (true, TensorData::Bytes(strings)) = (is_text(declared), data) {
        let mut text = BytesMut::new();
        for (index, string) in strings.iter().enumerate() {
            if index > 0 {
                text.extend_from_slice(b"\n");
            }
            text.extend_from_slice(string);
        }
        return Chunk::bytes(text.freeze()).with_mime(Mime::TEXT);
    }
    let mut json = elements::to_json(data).to_string();
    // Each response is a value, and values that follow one another need a separator (KE-112).
    if decoupled {
        json.push('\n');
        return Chunk::bytes(json).with_mime(Mime::NDJSON);
    }
    Chunk::bytes(json).with_mime(Mime::JSON)
}

/// Reads a whole input.
async fn read(declared: &Declared, node: &Node) -> Result<TensorData> {
    // A tensor is sent as a whole, so the input has to fit memory.
    let (mime, bytes) = gather(node.main().read(), "prompt_bytes", limits::PROMPT_BYTES).await?;
    let wrong = |why: String| Error::argument(Name::shared(&declared.name), why);
    let json = || serde_json::from_slice::<Value>(&bytes);
    if declared.datatype == Datatype::Bytes {
        // One string of JSON text is a string; only an input with room for several takes an array apart.
        let several = mime.matches(&Mime::JSON) && size(declared) != Some(1);
        let list = several.then(json).and_then(std::result::Result::ok);
        let strings = list
            .filter(Value::is_array)
            .and_then(|list| elements::from_json(Datatype::Bytes, &list));
        return Ok(strings.unwrap_or_else(|| TensorData::Bytes([&bytes[..]].into_iter().collect())));
    }
    let value = json().map_err(|error| wrong(format!("not JSON: {error}")))?;
    let data = elements::from_json(declared.datatype, &value);
    data.ok_or_else(|| {
        wrong(format!(
            "must be {}, or an array of them",
            declared.datatype
        ))
    })
}

fn input(declared: &Declared) -> InputSpec {
    let mimes = if declared.datatype == Datatype::Bytes {
        vec![Mime::TEXT, Mime::JSON, Mime::BYTES, Mime::ANY]
    } else {
        vec![Mime::JSON, Mime::TEXT]
    };
    let mut input = InputSpec::new(Name::shared(&declared.name))
        .taking(mimes)
        .schema(schema(declared));
    input.required = !declared.optional;
    input
}

fn output(target: usize, declared: &Declared, decoupled: bool) -> OutputSpec {
    let wire = Name::shared(&declared.name);
    // Tensors have no main output, and a function needs one (KE-134).
    let port = if target == 0 {
        Port::MAIN
    } else {
        Port::from(port(&declared.name))
    };
    let mime = match (is_text(declared), decoupled) {
        (true, _) => Mime::TEXT,
        (false, true) => Mime::NDJSON,
        (false, false) => Mime::JSON,
    };
    let mut output = OutputSpec::new(port, mime).wire(wire);
    output.schema = (!is_text(declared)).then(|| schema(declared));
    output
}

fn schema(declared: &Declared) -> Value {
    let kind = match TensorData::empty(declared.datatype) {
        TensorData::Bool(_) => "boolean",
        TensorData::Int(_) | TensorData::Uint(_) => "integer",
        TensorData::Float(_) => "number",
        TensorData::Bytes(_) => "string",
    };
    match size(declared) {
        Some(1) => json!({"type": kind}),
        _ => json!({"type": [kind, "array"]}),
    }
}

/// Whether an output is read as one stream of text. With a fixed number of strings each is a value of its own.
fn is_text(declared: &Declared) -> bool {
    declared.datatype == Datatype::Bytes && size(declared).is_none_or(|size| size == 1)
}

/// The number of elements; `None` if it varies. A leading -1 before other dimensions is the batch dimension, and a call
/// is one item of a batch.
fn size(declared: &Declared) -> Option<i64> {
    let shape = match &declared.shape[..] {
        [-1, rest @ ..] if !rest.is_empty() => rest,
        shape => shape,
    };
    let fixed = shape.iter().all(|size| *size >= 0);
    // Saturating: the server may declare any dimensions, and only 0 and 1 are told apart from others.
    fixed.then(|| shape.iter().copied().fold(1, i64::saturating_mul))
}

/// A function's name: segments of letters, digits and `_`, none of which begins with a digit.
fn name(model: &str) -> String {
    let segment = |segment: &str| {
        let mut out = word(segment);
        if out.is_empty() || out.starts_with(|first: char| first.is_ascii_digit()) {
            out.insert(0, '_');
        }
        out
    };
    model.split('.').map(segment).collect::<Vec<_>>().join(".")
}

/// A port's name.
fn port(output: &str) -> String {
    let mut port = word(output).to_ascii_lowercase();
    if !port.starts_with(|first: char| first.is_ascii_lowercase()) {
        port.insert(0, 'o');
    }
    port
}

fn word(text: &str) -> String {
    let letter = |letter: char| {
        if letter.is_ascii_alphanumeric() {
            letter
        } else {
            '_'
        }
    };
    text.chars().map(letter).collect()
}
