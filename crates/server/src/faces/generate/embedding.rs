//! Models that embed texts or score documents: one row for each, in one response (TR-103).

use futures::{StreamExt, stream};
use sapwood_engine::embedding::TEXTS_MAX;
use sapwood_kernel::{Args, Chunk, Json, Kernel, Node, Port, RequestedPorts, Run, Spec, Want};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    InputRole, OutputRole, ResponsePayload, Signature, Tensor, TensorData,
};
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::call::{CallResponses, CheckedRequest, texts};
use super::request_error::RequestError;

/// The parameters of a request, which are the members of the function's input `config`.
pub(super) const PARAMETERS: [&str; 3] = ["dimensions", "normalize", "truncate"];

/// The signature of a model that embeds.
pub(super) fn signature(spec: &Spec) -> Signature {
    match &spec.embedding {
        Some(facts) if !facts.info.ranks() => Signature::embedding(facts.info.dimensions),
        _ => Signature::rerank(),
    }
}

/// Calls the model.
pub(super) fn begin(call: CheckedRequest, kernel: &Kernel) -> Result<CallResponses, RequestError> {
    // It was there when the request was checked, and may have been removed since.
    let function = kernel.get(&call.found.function).ok();
    let facts = function.and_then(|function| function.spec().embedding.clone());
    let Some(facts) = facts else {
        return Err(RequestError::new(
            Code::Unavailable,
            "the model was removed",
        ));
    };
    let (input, output) = if facts.info.ranks() {
        (InputRole::Documents, OutputRole::Score)
    } else {
        (InputRole::Texts, OutputRole::Embedding)
    };
    let given = only(&call, &input)?;
    let rows = given.len();
    let args = args(&call, given)?;
    let left = call.deadline.saturating_duration_since(Instant::now());
    let run = kernel
        .run::<Chunk>(&call.found.function, args)
        .wanting(Want::from(RequestedPorts::Only(vec![Port::VECTORS])))
        .timeout(left);
    let id = call.shown_id().to_owned();
    let place = call.found.signature.output_of(&output);
    let charge = call.charge.clone();
    let answer = async move {
        let numbers = read(run, &id).await?;
        drop(charge);
        // A configured signature may have no output for them.
        let outputs = place.map(|place| (place, tensor(numbers, rows, &output)));
        Ok(ResponsePayload {
            outputs: outputs.into_iter().collect(),
            parameters: Vec::new(),
        })
    };
    Ok(stream::once(answer).boxed())
}

/// The texts of the one input with this role.
fn only(call: &CheckedRequest, role: &InputRole) -> Result<Vec<String>, RequestError> {
    let wrong = |message: String| Err(RequestError::new(Code::InvalidRequest, message));
    let inputs = &call.found.signature.inputs;
    let given = call.mapped.tensors.iter().filter_map(|(place, tensor)| {
        let input = inputs.get(*place)?;
        (input.role == *role).then_some((&*input.name, &**tensor))
    });
    let given: Vec<(&str, &Tensor)> = given.collect();
    match given[..] {
        [(name, tensor)] if tensor.data.len() > TEXTS_MAX => wrong(format!(
            "input '{name}' may have {TEXTS_MAX} elements: send several requests"
        )),
        [(name, tensor)] => texts(name, tensor),
        [(first, _), (second, _), ..] => {
            wrong(format!("give either '{first}' or '{second}', not both"))
        }
        [] => {
            let names = inputs.iter().filter(|input| input.role == *role);
            let names: Vec<String> = names.map(|input| format!("'{}'", input.name)).collect();
            wrong(format!("the request has no input {}", names.join(" or ")))
        }
    }
}

/// The arguments of the function.
fn args(call: &CheckedRequest, given: Vec<String>) -> Result<Args, RequestError> {
    let texts = Node::tree(given.into_iter().map(Node::from));
    let is_query = |input: &InputRole| *input == InputRole::Query;
    let mut args = if call
        .found
        .signature
        .inputs
        .iter()
        .any(|it| is_query(&it.role))
    {
        let mut query = only(call, &InputRole::Query)?;
        let (Some(query), true) = (query.pop(), query.is_empty()) else {
            let message = "the query must have exactly one element";
            return Err(RequestError::new(Code::InvalidRequest, message));
        };
        Args::new().with("query", query).with("documents", texts)
    } else {
        Args::new().with("text", texts)
    };
    let config = PARAMETERS.iter().filter_map(|name| {
        let value = call.mapped.parameter(name)?;
        Some(((*name).to_owned(), value.to_json()))
    });
    let config: Map<String, Value> = config.collect();
    if !config.is_empty() {
        args = args.with("config", Json(config));
    }
    Ok(args)
}

/// Reads the rows to their end.
async fn read(mut run: Run<Chunk>, id: &str) -> Result<Vec<f64>, RequestError> {
    let mut numbers = Vec::new();
    while let Some(chunk) = run.next().await {
        let chunk = chunk.map_err(|error| RequestError::of(&error, id))?;
        if chunk.port != *Port::VECTORS {
            continue;
        }
        // Chunks are cut between numbers by the function, which is of this process.
        let each = chunk.data.chunks_exact(size_of::<f32>());
        let each = each.filter_map(|bytes| bytes.try_into().ok());
        numbers.extend(each.map(|bytes| f64::from(f32::from_le_bytes(bytes))));
        tokio::task::coop::consume_budget().await;
    }
    Ok(numbers)
}

fn tensor(numbers: Vec<f64>, rows: usize, output: &OutputRole) -> Tensor {
    let size = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    let width = numbers.len() / rows.max(1);
    let shape = match output {
        OutputRole::Score => vec![size(rows)],
        _ => vec![size(rows), size(width)],
    };
    let data = TensorData::Float(numbers);
    Tensor { shape, data }
}
