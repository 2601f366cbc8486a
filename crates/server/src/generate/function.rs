//! Plain functions as models: a signature derived from ports, and one response for each chunk (TR-1308).
//!
//! Owns: the derivation, the call. Refuses to know: text models.

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use sapwood_kernel::{Args, Chunk, Input as Taken, Kernel, Mime, Port, Ports, Run, Spec, Want};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    Data, Datatype, Input, InputRole, Output, OutputRole, Parameter, Response, Signature, Strings,
    Tensor,
};
use serde_json::Value;
use tokio::time::Instant;

use super::call::{Call, Responses};
use super::failure::Failure;
use super::text::{PIECE_BYTES_MAX, too_much};

/// What a part of an output takes besides its bytes.
const PART_BYTES: usize = 64;
/// Where the mimetype of a chunk stands in its response.
const MIME: &str = "sapwood-mime";

/// The signature of a function with these ports.
pub(super) fn signature(spec: &Spec) -> Signature {
    Signature {
        inputs: spec.inputs.iter().map(input).collect(),
        outputs: spec
            .outputs
            .iter()
            .map(|output| Output {
                name: output.wire.to_string(),
                datatype: Datatype::Bytes,
                shape: vec![-1],
                role: OutputRole::Port(output.port.to_string()),
            })
            .collect(),
        max_batch_size: 0,
        decoupled: true,
        lenient: false,
        tensorrt_llm: false,
    }
}

fn input(taken: &Taken) -> Input {
    let datatype = match taken.schema.get("type").and_then(Value::as_str) {
        Some("integer") => Datatype::Int64,
        Some("number") => Datatype::Fp64,
        Some("boolean") => Datatype::Bool,
        _ => Datatype::Bytes,
    };
    let says_text = taken.schema.get("type").and_then(Value::as_str) == Some("string");
    let json = taken.mimes.iter().any(|mime| Mime::JSON.matches(mime));
    Input {
        name: taken.name.to_string(),
        datatype,
        shape: vec![1],
        optional: !taken.required,
        role: InputRole::Port(taken.name.to_string()),
        accepts_json: datatype == Datatype::Bytes && json && !says_text,
    }
}

/// Calls the function.
pub(super) fn begin(call: Call, kernel: &Kernel, pieces: bool) -> Result<Responses, Failure> {
    let Some(spec) = kernel.get(&call.found.function).ok() else {
        return Err(Failure::new(Code::Unavailable, "the function has gone"));
    };
    let args = args(&call, spec.spec())?;
    let left = call.deadline.saturating_duration_since(Instant::now());
    let run = kernel
        .run::<Chunk>(&call.found.function, args)
        .wanting(Want::from(Ports::Only(ports(&call, spec.spec()))))
        .timeout(left);
    let telling = Telling {
        run,
        signature: Arc::clone(&call.found.signature),
        id: call.shown_id().to_owned(),
        pieces,
        over: false,
    };
    let told = stream::unfold(telling, |mut telling| async move {
        let response = telling.next().await?;
        Some((response, telling))
    });
    Ok(told.boxed())
}

/// The ports that are read: those of the outputs that the request names; without any, the main one, and whatever else is text
/// and no detail of single tokens.
fn ports(call: &Call, spec: &Spec) -> Vec<Port> {
    // A signature that is derived has the function's outputs in their order.
    let outputs = spec.outputs.iter().enumerate();
    let read = outputs.filter(|(place, output)| match &call.mapped.outputs {
        Some(asked) => asked.contains(place),
        None => *place == 0 || (output.port != Port::LOGPROBS && is_text(output)),
    });
    read.map(|(_, output)| output.port.clone()).collect()
}

/// It may give text.
fn is_text(output: &sapwood_kernel::Output) -> bool {
    let any = |mime: &Mime| *mime == Mime::ANY || mime.is_text();
    output.mimes.iter().any(any)
}

fn args(call: &Call, spec: &Spec) -> Result<Args, Failure> {
    let mut args = Args::new();
    for (place, tensor) in &call.mapped.tensors {
        let Some(input) = call.found.signature.inputs.get(*place) else {
            continue;
        };
        let InputRole::Port(port) = &input.role else {
            continue;
        };
        let mimes = spec.inputs.iter().find(|taken| *taken.name == **port);
        let mimes = mimes.map_or(&[][..], |taken| &taken.mimes);
        let chunk = chunk(input, tensor, mimes)?;
        args = args.with(port.clone(), chunk);
    }
    Ok(args)
}

/// An element as what the function reads.
fn chunk(input: &Input, tensor: &Tensor, mimes: &[Mime]) -> Result<Chunk, Failure> {
    let wrong = |why: &str| {
        Failure::new(
            Code::InvalidRequest,
            format!("input '{}' {why}", input.name),
        )
    };
    if tensor.data.len() != 1 {
        return Err(wrong("must have exactly one element"));
    }
    let json = |value: Value| Chunk::json(&value).map_err(|_| wrong("has no JSON"));
    match &tensor.data {
        Data::Bool(list) => json(list[0].into()),
        Data::Int(list) => json(list[0].into()),
        Data::Uint(list) => json(list[0].into()),
        Data::Float(list) => json(list[0].into()),
        Data::Bytes(list) => {
            let data = Bytes::copy_from_slice(list.iter().next().unwrap_or_default());
            let takes = |mime: &Mime| mimes.iter().any(|pattern| mime.matches(pattern));
            let mime = match std::str::from_utf8(&data) {
                Ok(_) if takes(&Mime::TEXT) => Mime::TEXT,
                Ok(_) if takes(&Mime::JSON) => Mime::JSON,
                _ => Mime::BYTES,
            };
            Ok(Chunk::bytes(data).with_mime(mime))
        }
    }
}

struct Telling {
    run: Run<Chunk>,
    signature: Arc<Signature>,
    id: String,
    pieces: bool,
    over: bool,
}

impl Telling {
    async fn next(&mut self) -> Option<Result<Response, Failure>> {
        if self.over {
            return None;
        }
        if !self.pieces {
            self.over = true;
            return Some(self.whole().await);
        }
        loop {
            match self.run.next().await {
                Some(Ok(chunk)) if chunk.data.is_empty() => {}
                Some(Ok(chunk)) => {
                    if let Some(response) = self.piece(&chunk) {
                        return Some(Ok(response));
                    }
                }
                Some(Err(error)) => {
                    self.over = true;
                    return Some(Err(Failure::of(&error, &self.id)));
                }
                None => {
                    self.over = true;
                    return None;
                }
            }
        }
    }

    fn place(&self, chunk: &Chunk) -> Option<usize> {
        let mine = |output: &Output| matches!(&output.role, OutputRole::Port(port) if chunk.port == **port);
        self.signature.outputs.iter().position(mine)
    }

    fn piece(&self, chunk: &Chunk) -> Option<Response> {
        let place = self.place(chunk)?;
        let mut text = Strings::default();
        text.push(&chunk.data);
        Some(Response {
            outputs: vec![(place, Tensor::flat(Data::Bytes(text)))],
            parameters: vec![(MIME.into(), Parameter::Text(chunk.mime.to_string()))],
        })
    }

    /// Everything in one response: one element for each part of an output.
    async fn whole(&mut self) -> Result<Response, Failure> {
        let mut parts: Vec<Vec<(u32, Vec<u8>)>> = vec![Vec::new(); self.signature.outputs.len()];
        let mut mime = None;
        let mut held = 0_usize;
        while let Some(chunk) = self.run.next().await {
            let chunk = chunk.map_err(|error| Failure::of(&error, &self.id))?;
            let Some(place) = self.place(&chunk) else {
                continue;
            };
            let parts = &mut parts[place];
            held += chunk.data.len();
            match parts.last_mut() {
                Some((part, data)) if *part == chunk.part => data.extend_from_slice(&chunk.data),
                _ => {
                    held += PART_BYTES;
                    parts.push((chunk.part, chunk.data.to_vec()));
                }
            }
            if held > PIECE_BYTES_MAX {
                return Err(too_much(&format!("{PIECE_BYTES_MAX} bytes")));
            }
            // One that is faster than this would keep the worker for itself.
            tokio::task::coop::consume_budget().await;
            if place == 0 && mime.is_none() && !chunk.data.is_empty() {
                mime = Some(chunk.mime.to_string());
            }
        }
        let outputs = parts
            .iter()
            .enumerate()
            .filter(|(_, parts)| !parts.is_empty());
        let outputs = outputs.map(|(place, parts)| {
            let texts = parts.iter().map(|(_, data)| data.as_slice());
            (place, Tensor::flat(Data::Bytes(texts.collect())))
        });
        Ok(Response {
            outputs: outputs.collect(),
            parameters: mime
                .map(|mime| (MIME.into(), Parameter::Text(mime)))
                .into_iter()
                .collect(),
        })
    }
}
