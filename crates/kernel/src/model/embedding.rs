//! Models that embed, or score documents, as functions.
//!
//! ```text
//!   call ── read text | query, documents, and config ──► tokenise, Embedder::embed | rerank ──► rows ──► one line, or so many
//!                                                                                                        numbers, for each
//! ```
//!
//! Dropping the stream drops the engine's handle, which cancels the request.

use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use sapwood_engine::embedding::{
    Embedder, EmbeddingHandle, EmbeddingInput, EmbeddingRequest, RerankRequest, TEXT_BYTES_MAX,
    Vectors,
};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use serde_json::{Map, Value, json};

use super::{offload, parse, read_json};
use crate::Result;
use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::facts::EmbeddingFacts;
use crate::from_chunks::Json;
use crate::function::Fun;
use crate::handler::{raw, streamed};
use crate::kernel::Kernel;
use crate::meta::{Meta, RunUsage};
use crate::name::{Mime, Name, Port};
use crate::node::Node;
use crate::pool::{BlockingPool, TaskSize};
use crate::spec::{Effect, InputSpec, OutputSpec, Spec};
use crate::token_charge::TokenCharge;

/// Texts of fewer bytes are tokenised inline: passing them to another thread would take about as long.
const INLINE_BYTES: usize = 2 << 10;
/// Bytes of a chunk of rows, unless a single row has more.
const PIECE_BYTES: usize = 64 << 10;

/// The function of a model that embeds: inputs `text`, which is one text or a JSON list, and `config`; or of one that scores
/// documents: inputs `query`, `documents` and `config`. The main output has a line of JSON for each, a list of numbers or one
/// number; port `vectors` has the same numbers as 32-bit floats.
pub fn embedding_model(name: impl Into<Name>, embedder: Embedder) -> Fun {
    let facts = Arc::new(EmbeddingFacts::of(&embedder));
    let spec = embedding_spec(name.into(), facts);
    raw(spec, move |call| streamed(begin(call, embedder.clone())))
}

/// The spec of a model with these facts.
fn embedding_spec(name: Name, facts: Arc<EmbeddingFacts>) -> Spec {
    let ranks = facts.info.ranks();
    let mut spec = Spec::new(name, facts.info.description.as_str()).effect(Effect::Pure);
    let texts = json!({
        "anyOf": [{"type": "string"}, {"type": "array"}],
    });
    let config = InputSpec::new("config")
        .taking([Mime::JSON, Mime::TEXT])
        .optional();
    let list = |name: &'static str| InputSpec::new(name).schema(texts.clone());
    spec.inputs = if ranks {
        let query = InputSpec::new("query").taking([Mime::TEXT]);
        vec![query, list("documents").alias("texts"), config]
    } else {
        vec![list("text").alias("input"), config]
    };
    let wire = if ranks { "score" } else { "embedding" };
    spec.outputs = vec![
        OutputSpec::new(Port::MAIN, Mime::NDJSON).wire(wire),
        OutputSpec::new(Port::VECTORS, Mime::FLOATS),
    ];
    spec.model = true;
    spec.embeds = true;
    spec.embedding = Some(facts);
    spec
}

/// Reads the inputs, submits the request and awaits its rows.
async fn begin(
    call: Call,
    embedder: Embedder,
) -> Result<impl Stream<Item = Result<Chunk>> + Send + 'static> {
    let config = EmbeddingConfig::read(&call).await?;
    let handle = if embedder.info().ranks() {
        rerank(&call, &embedder, config).await?
    } else {
        embed(&call, &embedder, config).await?
    };
    let tokens = handle.prompt_tokens();
    if let Some(token_charge) = call.own.get::<Arc<dyn TokenCharge>>() {
        // An error drops the handle, and with it the request.
        token_charge.prompt(tokens)?;
    }
    let vectors = Arc::new(handle.await?);
    let lines = call.want.ports.has(&Port::MAIN);
    let numbers = call.want.ports.has(&Port::VECTORS);
    let scores = embedder.info().ranks();
    let rows = vectors.rows().len();
    let each = (PIECE_BYTES / (vectors.width.max(1) * size_of::<f32>())).max(1);
    let pieces = (0..rows).step_by(each);
    let pieces = pieces.flat_map(move |first| {
        let last = rows.min(first + each);
        let vectors = Arc::clone(&vectors);
        let main = lines.then(|| as_lines(&vectors, first..last, scores));
        let packed = numbers.then(|| Ok(as_floats(&vectors, first..last)));
        main.into_iter().chain(packed)
    });
    let mut end = Chunk::empty().with_mime(Mime::NDJSON);
    let usage = RunUsage::of(tokens.into(), 0);
    let mut meta = Meta::default().with_usage(0, usage);
    meta.model = Some(Name::shared(&embedder.info().name));
    end = end.with_meta(meta);
    // Lazily: a reader that is slow holds the rows once, and not their text as well.
    Ok(stream::iter(pieces).chain(stream::iter([Ok(end)])))
}

/// Rows as lines of JSON.
fn as_lines(vectors: &Vectors, rows: std::ops::Range<usize>, scores: bool) -> Result<Chunk> {
    let mut text = Vec::new();
    for row in vectors.rows().skip(rows.start).take(rows.len()) {
        let written = match (scores, row) {
            (true, [score]) => serde_json::to_writer(&mut text, score),
            _ => serde_json::to_writer(&mut text, row),
        };
        // These are finite numbers, which can be written.
        written.map_err(|error| Error::Decode {
            wanted: "JSON".into(),
            why: error.to_string(),
        })?;
        text.push(b'\n');
    }
    Ok(Chunk::bytes(text).with_mime(Mime::NDJSON))
}

/// Rows as 32-bit floats.
fn as_floats(vectors: &Vectors, rows: std::ops::Range<usize>) -> Chunk {
    let numbers = &vectors.numbers[rows.start * vectors.width..rows.end * vectors.width];
    let bytes: Vec<u8> = numbers.iter().flat_map(|it| it.to_le_bytes()).collect();
    Chunk::bytes(bytes)
        .with_mime(Mime::FLOATS)
        .on(Port::VECTORS)
}

/// The input `config`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EmbeddingConfig {
    dimensions: Option<u32>,
    normalize: Option<bool>,
    truncate: bool,
}

impl EmbeddingConfig {
    async fn read(call: &Call) -> Result<Self> {
        let fields = match read_json(call, "config").await? {
            None => Map::new(),
            Some(Value::Object(fields)) => fields,
            Some(_) => return Err(bad("config", "must be a JSON object")),
        };
        let mut config = Self::default();
        for (name, value) in &fields {
            let flag = || {
                value
                    .as_bool()
                    .ok_or_else(|| bad(name, "must be true or false"))
            };
            match name.as_str() {
                _ if value.is_null() => {}
                "dimensions" => {
                    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
                    let number =
                        number.ok_or_else(|| bad(name, "must be a number of dimensions"))?;
                    config.dimensions = Some(number);
                }
                "normalize" => config.normalize = Some(flag()?),
                "truncate" => config.truncate = flag()?,
                _ => {
                    let known = "is not known here: there are dimensions, normalize and truncate";
                    return Err(bad(name, known));
                }
            }
        }
        Ok(config)
    }
}

fn bad(name: &str, why: &str) -> Error {
    Error::argument(Name::shared(name), why).because(ErrorReason::BAD_CONFIG)
}

async fn embed(
    call: &Call,
    embedder: &Embedder,
    config: EmbeddingConfig,
) -> Result<EmbeddingHandle> {
    let inputs = read_texts(call, "text").await?;
    let bytes = inputs.iter().map(size).sum();
    let request = EmbeddingRequest {
        inputs,
        dimensions: config.dimensions,
        normalize: config.normalize,
        truncate: config.truncate,
        caller: call.fair_share().caller,
        timeout: left(call),
    };
    submit(call, embedder, bytes, move |embedder| {
        embedder.embed(request)
    })
    .await
}

async fn rerank(
    call: &Call,
    embedder: &Embedder,
    config: EmbeddingConfig,
) -> Result<EmbeddingHandle> {
    for (field, given) in [
        ("dimensions", config.dimensions.is_some()),
        ("normalize", config.normalize.is_some()),
    ] {
        if given {
            return Err(bad(field, "is for embeddings, and this model gives scores"));
        }
    }
    let query: String = call.arg("query").await?;
    let mut documents = Vec::new();
    let mut bytes = 0_usize;
    for (index, document) in read_texts(call, "documents").await?.into_iter().enumerate() {
        let EmbeddingInput::Text(document) = document else {
            let why = format!("document {index} must be a text");
            return Err(Error::argument("documents", why));
        };
        bytes = bytes
            .saturating_add(document.len())
            .saturating_add(query.len());
        documents.push(document);
    }
    let request = RerankRequest {
        query,
        documents,
        truncate: config.truncate,
        caller: call.fair_share().caller,
        timeout: left(call),
    };
    submit(call, embedder, bytes, move |embedder| {
        embedder.rerank(request)
    })
    .await
}

fn size(input: &EmbeddingInput) -> usize {
    match input {
        EmbeddingInput::Text(text) => text.len(),
        EmbeddingInput::Tokens(_) => 0,
    }
}

fn left(call: &Call) -> Option<std::time::Duration> {
    let deadline = call.deadline?;
    Some(deadline.saturating_duration_since(Instant::now()))
}

/// Tokenises and submits: on the blocking pool, off the async workers, if there is much to tokenise.
async fn submit(
    call: &Call,
    embedder: &Embedder,
    bytes: usize,
    submit: impl FnOnce(&Embedder) -> Result<EmbeddingHandle, sapwood_engine::api::EngineError>
    + Send
    + 'static,
) -> Result<EmbeddingHandle> {
    if bytes < INLINE_BYTES {
        return Ok(submit(embedder)?);
    }
    let embedder = embedder.clone();
    let submitted =
        BlockingPool::global().run(call.fair_share().caller, TaskSize::of(bytes), move || {
            submit(&embedder)
        });
    Ok(submitted.await??)
}

/// One part of an input, which may arrive in pieces.
struct TextPart {
    part: u32,
    mime: Mime,
    data: Vec<u8>,
}

/// Reads texts: each part of the input is one text, or JSON: a text, a list of texts, a list of token ids, or a list of such
/// lists.
async fn read_texts(call: &Call, name: &'static str) -> Result<Vec<EmbeddingInput>> {
    let mut chunks = call.read(name)?;
    let mut parts: Vec<TextPart> = Vec::new();
    let mut room = TEXT_BYTES_MAX;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        // Bounded while it is read. A part is charged beyond its bytes, or empty ones would grow the list for nothing.
        let taken = chunk.data.len().saturating_add(1);
        room = room.checked_sub(taken).ok_or(Error::Limit {
            name: "text_bytes",
            max: TEXT_BYTES_MAX as u64,
        })?;
        match parts.last_mut() {
            Some(part) if part.part == chunk.part => part.data.extend_from_slice(&chunk.data),
            _ => parts.push(TextPart {
                part: chunk.part,
                mime: chunk.mime,
                data: chunk.data.to_vec(),
            }),
        }
    }
    let mut inputs = Vec::with_capacity(parts.len());
    for TextPart { mime, data, .. } in parts {
        if mime.matches(&Mime::JSON) {
            let turn = call.fair_share().caller;
            let data = Bytes::from(data);
            let parsed = offload(turn, data.len(), move || parse(name, &data)).await?;
            of_json(name, parsed.unwrap_or(Value::Null), &mut inputs)?;
        } else if mime.is_text() {
            let text = String::from_utf8(data).map_err(|error| {
                Error::argument(name, format!("not UTF-8: {}", error.utf8_error()))
            })?;
            inputs.push(EmbeddingInput::Text(text));
        } else {
            let why = format!("{mime} is neither text nor JSON");
            return Err(Error::argument(name, why).because(ErrorReason::UNSUPPORTED_MIMETYPE));
        }
    }
    Ok(inputs)
}

fn of_json(name: &'static str, value: Value, into: &mut Vec<EmbeddingInput>) -> Result<()> {
    let wrong = || {
        let why = "must be a text, a list of texts, or lists of token ids";
        Error::argument(name, why)
    };
    let list = match value {
        Value::String(text) => {
            into.push(EmbeddingInput::Text(text));
            return Ok(());
        }
        Value::Array(list) => list,
        _ => return Err(wrong()),
    };
    // A list of numbers is one text.
    if list.first().is_some_and(Value::is_number) {
        into.push(tokens(&list).ok_or_else(wrong)?);
        return Ok(());
    }
    for item in list {
        let input = match item {
            Value::String(text) => Some(EmbeddingInput::Text(text)),
            Value::Array(ids) => tokens(&ids),
            _ => None,
        };
        into.push(input.ok_or_else(wrong)?);
    }
    Ok(())
}

fn tokens(ids: &[Value]) -> Option<EmbeddingInput> {
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    ids.iter()
        .map(id)
        .collect::<Option<_>>()
        .map(EmbeddingInput::Tokens)
}

impl Kernel {
    /// Embeds texts with a model: one embedding for each, in their order, of length 1 unless the model is configured otherwise.
    ///
    /// # Errors
    /// `NotFound` if there is no such model; `failed-precondition` if it generates; those of its engine.
    pub async fn embed<T: Into<String>>(
        &self,
        model: &str,
        texts: impl IntoIterator<Item = T>,
    ) -> Result<Vec<Vec<f32>>> {
        self.no_generator(model)?;
        let texts = texts_node(texts);
        self.run::<Json<Vec<f32>>>(model, [("text", texts)]).await
    }

    /// Scores documents for a query with a model: one score for each, in their order. Higher is more relevant; what range scores
    /// have depends on the model.
    ///
    /// # Errors
    /// As [`Kernel::embed`].
    pub async fn rerank<T: Into<String>>(
        &self,
        model: &str,
        query: &str,
        documents: impl IntoIterator<Item = T>,
    ) -> Result<Vec<f32>> {
        self.no_generator(model)?;
        let args = [
            ("query", Node::from(query)),
            ("documents", texts_node(documents)),
        ];
        self.run::<Json<f32>>(model, args).await
    }

    /// Says what is wrong with a model that generates; its types and inputs alone would be a riddle.
    fn no_generator(&self, model: &str) -> Result<()> {
        let function = self.get(model)?;
        if !function.spec().generates() {
            return Ok(());
        }
        Err(Error::Engine {
            code: Code::FailedPrecondition,
            reason: ErrorReason::NONE,
            message: format!("the model {model} generates text, and gives no embeddings"),
            retry_after: None,
        })
    }
}

fn texts_node<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Node {
    Node::tree(texts.into_iter().map(|text| Node::from(text.into())))
}
