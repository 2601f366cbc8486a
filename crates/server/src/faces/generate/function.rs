//! Kernel functions that are no text models: a signature derived from their ports, and one response per chunk
//! (TR-1308).

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use sapwood_kernel::{
    Args, Chunk, Error, InputSpec as Taken, Kernel, Mime, Port, RequestedPorts, Run, Spec, Want,
};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    Datatype, InputRole, InputTensor, OutputRole, OutputTensor, RequestParameter, ResponsePayload,
    Signature, Strings, Tensor, TensorData,
};
use serde_json::Value;
use tokio::time::Instant;

use super::call::{CallResponses, CheckedRequest};
use super::input_charge::InputCharge;
use super::request_error::RequestError;
use super::text::{PIECE_BYTES_MAX, too_much};

/// Bytes that a part of an output takes besides its content.
const PART_BYTES: usize = 64;
/// The response parameter with the mimetype of a chunk.
const MIME: &str = "sapwood-mime";

/// The signature of a function with these ports.
pub(super) fn signature(spec: &Spec) -> Signature {
    Signature {
        inputs: spec.inputs.iter().map(input).collect(),
        outputs: spec
            .outputs
            .iter()
            .map(|output| OutputTensor {
                name: output.wire.to_string(),
                datatype: Datatype::Bytes,
                shape: vec![-1],
                role: OutputRole::Port(output.port.to_string()),
            })
            .collect(),
        max_batch_size: 0,
        // A function may yield any number of chunks; what it really yields is not known before it runs.
        decoupled: true,
        lenient: false,
        tensorrt_llm: false,
    }
}

fn input(taken: &Taken) -> InputTensor {
    let kind = taken.schema.get("type").and_then(Value::as_str);
    let datatype = match kind {
        Some("integer") => Datatype::Int64,
        Some("number") => Datatype::Fp64,
        Some("boolean") => Datatype::Bool,
        _ => Datatype::Bytes,
    };
    // A schema of a string takes precedence: with both, an object would arrive as its JSON where the function wants
    // text.
    let says_text = kind == Some("string");
    let json = taken.mimes.iter().any(|mime| Mime::JSON.matches(mime));
    InputTensor {
        name: taken.name.to_string(),
        datatype,
        shape: vec![1],
        optional: !taken.required,
        role: InputRole::Port(taken.name.to_string()),
        accepts_json: datatype == Datatype::Bytes && json && !says_text,
    }
}

/// Calls the function.
pub(super) fn begin(
    call: CheckedRequest,
    kernel: &Kernel,
    pieces: bool,
) -> Result<CallResponses, RequestError> {
    // It was there when the request was checked, and may have been removed since.
    let Some(spec) = kernel.get(&call.found.function).ok() else {
        return Err(RequestError::new(
            Code::Unavailable,
            "the function was removed",
        ));
    };
    let args = args(&call, spec.spec())?;
    let left = call.deadline.saturating_duration_since(Instant::now());
    let run = kernel
        .run::<Chunk>(&call.found.function, args)
        .wanting(Want::from(RequestedPorts::Only(ports(&call, spec.spec()))))
        .timeout(left);
    let mut reporter = FunctionResponses {
        run,
        signature: Arc::clone(&call.found.signature),
        id: call.shown_id().to_owned(),
        charge: call.charge.clone(),
    };
    if !pieces {
        return Ok(stream::once(async move { reporter.whole().await }).boxed());
    }
    let reported = stream::unfold(Some(reporter), |reporter| async move {
        let mut reporter = reporter?;
        let response = reporter.next().await?;
        // Nothing follows an error.
        let rest = response.is_ok().then_some(reporter);
        Some((response, rest))
    });
    Ok(reported.boxed())
}

/// The ports that are read: those of the outputs that the request names; without any, the main one and the others that
/// may hold text, except [`REPEATED`].
fn ports(call: &CheckedRequest, spec: &Spec) -> Vec<Port> {
    // By position: a derived signature has the function's outputs in their order.
    let outputs = spec.outputs.iter().enumerate();
    let read = outputs.filter(|(registration, output)| match &call.mapped.outputs {
        Some(asked) => asked.contains(registration),
        None => *registration == 0 || (!REPEATED.contains(&output.port) && is_text(output)),
    });
    read.map(|(_, output)| output.port.clone()).collect()
}

/// Outputs that only who names them gets: log-probabilities are long, and events repeat what the others have.
const REPEATED: [Port; 2] = [Port::LOGPROBS, Port::EVENTS];

/// Whether an output may hold text.
fn is_text(output: &sapwood_kernel::OutputSpec) -> bool {
    let any = |mime: &Mime| *mime == Mime::ANY || mime.is_text();
    output.mimes.iter().any(any)
}

fn args(call: &CheckedRequest, spec: &Spec) -> Result<Args, RequestError> {
    let mut args = Args::new();
    for (registration, tensor) in &call.mapped.tensors {
        let Some(input) = call.found.signature.inputs.get(*registration) else {
            continue;
        };
        let InputRole::Port(port) = &input.role else {
            continue;
        };
        // An input that is not in the spec is refused by the kernel, in its own words.
        let mimes = spec.inputs.iter().find(|taken| *taken.name == **port);
        let mimes = mimes.map_or(&[][..], |taken| &taken.mimes);
        let chunk = chunk(input, tensor, mimes)?;
        args = args.with(port.clone(), chunk);
    }
    Ok(args)
}

/// The single element of a tensor as a chunk of a type that the function accepts.
fn chunk(input: &InputTensor, tensor: &Tensor, mimes: &[Mime]) -> Result<Chunk, RequestError> {
    let wrong = |why: &str| {
        RequestError::new(
            Code::InvalidRequest,
            format!("input '{}' {why}", input.name),
        )
    };
    // A port takes one value. The indexing below relies on it.
    if tensor.data.len() != 1 {
        return Err(wrong("must have exactly one element"));
    }
    let json = |value: Value| Chunk::json(&value).map_err(|_| wrong("cannot be written as JSON"));
    match &tensor.data {
        TensorData::Bool(list) => json(list[0].into()),
        TensorData::Int(list) => json(list[0].into()),
        TensorData::Uint(list) => json(list[0].into()),
        TensorData::Float(list) => json(list[0].into()),
        TensorData::Bytes(list) => {
            let data = Bytes::copy_from_slice(list.iter().next().unwrap_or_default());
            let takes = |mime: &Mime| mimes.iter().any(|pattern| mime.matches(pattern));
            // Guessed, because BYTES has no mimetype. Text comes before JSON: every JSON text is a text as well.
            let mime = match std::str::from_utf8(&data) {
                Ok(_) if takes(&Mime::TEXT) => Mime::TEXT,
                Ok(_) if takes(&Mime::JSON) => Mime::JSON,
                _ => Mime::BYTES,
            };
            Ok(Chunk::bytes(data).with_mime(mime))
        }
    }
}

struct FunctionResponses {
    run: Run<Chunk>,
    signature: Arc<Signature>,
    id: String,
    charge: InputCharge,
}

impl FunctionResponses {
    async fn chunk(&mut self) -> Option<Result<Chunk, Error>> {
        let chunk = self.run.next().await;
        // It runs, and may do so for days: what it keeps of its inputs is as little known as what else it makes.
        self.charge.release();
        chunk
    }

    /// The response of the next chunk.
    async fn next(&mut self) -> Option<Result<ResponsePayload, RequestError>> {
        loop {
            match self.chunk().await? {
                // Chunks that only carry metadata, or an end.
                Ok(chunk) if chunk.data.is_empty() => {}
                Ok(chunk) => {
                    if let Some(response) = self.piece(&chunk) {
                        return Some(Ok(response));
                    }
                }
                Err(error) => return Some(Err(RequestError::of(&error, &self.id))),
            }
        }
    }

    fn choice_of(&self, chunk: &Chunk) -> Option<usize> {
        let mine = |output: &OutputTensor| matches!(&output.role, OutputRole::Port(port) if chunk.port == **port);
        self.signature.outputs.iter().position(mine)
    }

    fn piece(&self, chunk: &Chunk) -> Option<ResponsePayload> {
        let registration = self.choice_of(chunk)?;
        let mut text = Strings::default();
        text.push(&chunk.data);
        Some(ResponsePayload {
            outputs: vec![(registration, Tensor::flat(TensorData::Bytes(text)))],
            parameters: vec![(MIME.into(), RequestParameter::Text(chunk.mime.to_string()))],
        })
    }

    /// Everything in one response: one element for each part of an output.
    async fn whole(&mut self) -> Result<ResponsePayload, RequestError> {
        let mut parts: Vec<Vec<(u32, Vec<u8>)>> = vec![Vec::new(); self.signature.outputs.len()];
        let mut mime = None;
        let mut retained = 0_usize;
        while let Some(chunk) = self.chunk().await {
            let chunk = chunk.map_err(|error| RequestError::of(&error, &self.id))?;
            let Some(registration) = self.choice_of(&chunk) else {
                continue;
            };
            let parts = &mut parts[registration];
            retained += chunk.data.len();
            // Chunks of one part are pieces of one value; another part is another element.
            match parts.last_mut() {
                Some((part, data)) if *part == chunk.part => data.extend_from_slice(&chunk.data),
                _ => {
                    retained += PART_BYTES;
                    parts.push((chunk.part, chunk.data.to_vec()));
                }
            }
            // Each part is charged beyond its bytes, or empty parts would grow the answer for nothing.
            if retained > PIECE_BYTES_MAX {
                return Err(too_much(&format!("{PIECE_BYTES_MAX} bytes")));
            }
            // A function that is always ready would keep this worker thread for itself.
            tokio::task::coop::consume_budget().await;
            if registration == 0 && mime.is_none() && !chunk.data.is_empty() {
                mime = Some(chunk.mime.to_string());
            }
        }
        let outputs = parts
            .iter()
            .enumerate()
            .filter(|(_, parts)| !parts.is_empty());
        let outputs = outputs.map(|(registration, parts)| {
            let texts = parts.iter().map(|(_, data)| data.as_slice());
            (
                registration,
                Tensor::flat(TensorData::Bytes(texts.collect())),
            )
        });
        Ok(ResponsePayload {
            outputs: outputs.collect(),
            parameters: mime
                .map(|mime| (MIME.into(), RequestParameter::Text(mime)))
                .into_iter()
                .collect(),
        })
    }
}
