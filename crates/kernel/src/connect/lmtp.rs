//! Models of peers that speak LMTP, as functions of this kernel (LM-712, D-5, D-40).
//!
//! Owns: [`function`]: what a call of a model is toward such a peer, and what its items are here. Refuses to know: how a
//! peer is reached. Nothing here knows the peer's tokenizer: tokens go in, tokens come out in `inner` and on their port, and
//! whoever wants text is told so before anything is sent.

mod known;

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{FutureExt, Stream, StreamExt, TryStreamExt, stream};
use sapwood_engine::api::{Sampled, Tokens};
use sapwood_net::lmtp::pool::{Items, Pool};
use sapwood_proto::lmtp::{Fault, Finish, Generate, Received, Score};
use sapwood_proto::steer::Token;
use serde_json::{Map, Value};

use self::known::Known;
use crate::Result;
use crate::call::{Call, Instant, Want};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::function::Fun;
use crate::handler::raw;
use crate::limits;
use crate::meta::{Meta, Reason, Usage};
use crate::model::{self, GenerateConfig, PromptMode};
use crate::name::{Mime, Name, Port};
use crate::payer::Payer;
use crate::spec::{Effect, InnerType, Output, Spec};

/// The function `name` of this kernel that is the model of `pool`. It takes what a model takes: `prompt`, as token ids, and
/// `config`. What the peers do not say of the model is not known.
pub fn function(pool: &Pool, name: impl Into<Name>) -> Fun {
    let known = pool.facts().map(Known::of).unwrap_or_default();
    let name = name.into();
    let description =
        format!("The model {name} of servers that speak LMTP; it takes and gives tokens.");
    let mut spec = Spec::new(name, description.as_str()).effect(Effect::Idempotent);
    spec.inputs = model::inputs();
    spec.outputs = vec![
        Output::new(Port::MAIN, Mime::TEXT)
            .wire("response")
            .alias("text"),
        Output::new(Port::TOKENS, Mime::TOKENS),
    ];
    spec.finishes = true;
    spec.inner = Some(InnerType::of::<Tokens>());
    spec.model = true;
    spec.facts = known.facts(&spec.name).map(Arc::new);
    let peer = Arc::new(Peer {
        pool: pool.clone(),
        name: spec.name.clone(),
        known,
    });
    raw(spec, move |call| {
        begin(call, Arc::clone(&peer))
            .into_stream()
            .try_flatten()
            .boxed()
    })
}

struct Peer {
    pool: Pool,
    name: Name,
    known: Known,
}

/// Reads the inputs and asks the peer.
async fn begin(call: Call, peer: Arc<Peer>) -> Result<impl Stream<Item = Result<Chunk>> + Send> {
    let reads_text = call.want.ports.has(&Port::MAIN) && !call.want.inner;
    if reads_text {
        return Err(unimplemented(
            "text of a model elsewhere whose tokenizer is not known",
        ));
    }
    for name in ["messages", "tools"] {
        if call.inputs.get(name).is_some() {
            return Err(unimplemented(
                "chat with a model elsewhere whose tokenizer is not known",
            ));
        }
    }
    let config = read_config(&call).await?;
    if let Some(tokens) = peer.known.vocabulary {
        config.check_vocabulary(tokens)?;
    }
    let prompt = read_prompt(&call).await?;
    let count = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    if let Some(payer) = &call.payer {
        payer.prompt(count)?;
    }
    let alternatives = config.top_logprobs.unwrap_or(0);
    let items = ask(&peer, prompt, config, call.deadline)?;
    Ok(answer(Answer {
        items,
        peer,
        alternatives,
        want: call.want.clone(),
        payer: call.payer.clone(),
        prompt: count,
        output: 0,
        over: false,
    }))
}

fn ask(
    peer: &Peer,
    prompt: Vec<Token>,
    config: GenerateConfig,
    deadline: Option<Instant>,
) -> Result<Items> {
    if config.n.is_some_and(|n| n > 1) {
        return Err(unimplemented("several choices of a model elsewhere"));
    }
    if !config.bad_words.is_empty() {
        return Err(unimplemented("bad_words of a model elsewhere"));
    }
    if let Some(scored) = config.scored {
        let wanted = Score {
            prompt,
            scored,
            ..Score::default()
        };
        return Ok(peer.pool.score(wanted));
    }
    let room = peer.known.context.map(|context| {
        let left = context.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
        left.max(1)
    });
    let usual = Generate::default();
    let max_tokens = config.max_tokens.or(room).unwrap_or(usual.max_tokens);
    if max_tokens == 0 {
        let why = "must be at least 1 for a model elsewhere";
        return Err(Error::argument("max_tokens", why).because("BAD_CONFIG"));
    }
    let mut bias = config.logit_bias.to_vec();
    bias.sort_by_key(|(token, _)| *token);
    bias.dedup_by_key(|(token, _)| *token);
    let wanted = Generate {
        prompt,
        max_tokens,
        temperature: config.temperature.unwrap_or(USUAL_TEMPERATURE),
        top_logprobs: config.top_logprobs.unwrap_or(0),
        logit_bias: bias.into(),
        top_p: config.top_p.unwrap_or(usual.top_p),
        top_k: config.top_k.unwrap_or(usual.top_k),
        min_p: config.min_p.unwrap_or(usual.min_p),
        repetition_penalty: config
            .repetition_penalty
            .unwrap_or(usual.repetition_penalty),
        presence_penalty: config.presence_penalty.unwrap_or(usual.presence_penalty),
        frequency_penalty: config.frequency_penalty.unwrap_or(usual.frequency_penalty),
        seed: config.seed,
        stop_tokens: config.stop_sequences,
        stop: config.stop,
        min_tokens: config.min_tokens.unwrap_or(0),
        ignore_eos: config.ignore_eos.unwrap_or(false),
        priority: 0,
    };
    Ok(peer.pool.generate(wanted, deadline))
}

/// `config`, typed or as JSON.
async fn read_config(call: &Call) -> Result<GenerateConfig> {
    let Some(node) = call.inputs.get("config") else {
        return Ok(GenerateConfig::default());
    };
    if let Some(first) = node.main().read().try_next().await?
        && let Some(config) = first.inner::<GenerateConfig>()
    {
        return Ok(config.clone());
    }
    let data: Bytes = node.main().whole().await?;
    if data.iter().all(u8::is_ascii_whitespace) {
        return Ok(GenerateConfig::default());
    }
    let fields: Map<String, Value> = serde_json::from_slice(&data).map_err(|error| {
        Error::argument("config", format!("no JSON object: {error}")).because("BAD_CONFIG")
    })?;
    let config = GenerateConfig::from_json(fields)?;
    if config.prompt_mode == PromptMode::Chat {
        return Err(unimplemented(
            "chat with a model elsewhere whose tokenizer is not known",
        ));
    }
    Ok(config)
}

/// The leaves of `prompt`, all of token ids.
async fn read_prompt(call: &Call) -> Result<Vec<Token>> {
    if call.inputs.get("prompt").is_none() {
        let why = "a model needs this input";
        return Err(Error::argument("prompt", why).because("MISSING_INPUT"));
    }
    let mut chunks = call.read("prompt")?;
    let mut data = BytesMut::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if chunk.data.is_empty() {
            continue;
        }
        if !chunk.mime.matches(&Mime::TOKENS) {
            return Err(unimplemented(
                "a prompt of text for a model elsewhere whose tokenizer is not known",
            ));
        }
        if data.len() + chunk.data.len() > limits::PROMPT_BYTES {
            return Err(Error::Limit {
                name: "prompt_bytes",
                max: limits::PROMPT_BYTES as u64,
            });
        }
        data.extend_from_slice(&chunk.data);
    }
    let (words, rest) = data.as_chunks::<4>();
    if !rest.is_empty() {
        let why = "token ids are 4 bytes each";
        return Err(Error::argument("prompt", why).because("BAD_TOKENS"));
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// A stream of the peer's, on its way to be chunks. Dropping it abandons that.
struct Answer {
    items: Items,
    peer: Arc<Peer>,
    alternatives: u32,
    want: Want,
    payer: Option<Arc<dyn Payer>>,
    prompt: u32,
    output: u32,
    over: bool,
}

fn answer(answer: Answer) -> impl Stream<Item = Result<Chunk>> + Send {
    stream::try_unfold(answer, |mut answer| async move {
        while !answer.over {
            // The client's streams say themselves that they were lost.
            let Some(item) = answer.items.next().await else {
                return Err(Error::Truncated {
                    what: answer.peer.name.clone(),
                });
            };
            let chunks = answer.chunks(item.map_err(told)?);
            if !chunks.is_empty() {
                return Ok(Some((stream::iter(chunks.into_iter().map(Ok)), answer)));
            }
        }
        Ok(None)
    })
    .try_flatten()
}

impl Answer {
    fn chunks(&mut self, item: Received) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        let (finish, told_usage) = (item.finish.clone(), item.usage);
        if let Some(id) = item.token {
            self.output += 1;
            if let Some(payer) = &self.payer {
                payer.output(1);
            }
            if self.want.inner {
                let tokens = Tokens {
                    tokens: [self.sampled(id, item)].into_iter().collect(),
                    ..Tokens::default()
                };
                chunks.push(Chunk::empty().with_inner(tokens));
            }
            if self.want.ports.has(&Port::TOKENS) {
                let data = Bytes::copy_from_slice(&id.to_le_bytes());
                chunks.push(Chunk::bytes(data).with_mime(Mime::TOKENS).on(Port::TOKENS));
            }
        }
        if let Some(finish) = finish {
            self.over = true;
            let mut usage = Usage::of(u64::from(self.prompt), u64::from(self.output));
            usage.cached_tokens = told_usage.map_or(0, |told| told.cached_tokens);
            let mut meta = Meta::default()
                .with_role("ASSISTANT")
                .with_usage(0, usage)
                .with_finish(0, reason(&finish));
            meta.model = Some(self.peer.name.clone());
            let carrier = if self.want.ports.has(&Port::MAIN) {
                Chunk::empty()
            } else {
                Chunk::empty().on(Port::TOKENS).with_mime(Mime::TOKENS)
            };
            chunks.push(carrier.with_meta(meta));
        }
        chunks
    }

    /// A token as engines give it. Probabilities that are none are not passed on (LM-711).
    fn sampled(&self, id: Token, item: Received) -> Sampled {
        let raw = self.peer.pool.raw_logprobs();
        let mut top = if raw { Vec::new() } else { item.top };
        top.sort_by(|(a, p), (b, q)| q.total_cmp(p).then(a.cmp(b)));
        top.truncate(self.alternatives as usize);
        Sampled {
            id,
            logprob: item.logprob.filter(|_| !raw).unwrap_or(f32::NAN),
            top,
            special: false,
            forced: false,
        }
    }
}

fn reason(finish: &Finish) -> Reason {
    match finish {
        Finish::Stop => Reason::Stop,
        Finish::Length => Reason::Length,
        Finish::Cancelled => Reason::Cancelled,
        Finish::Deadline | Finish::Superseded | Finish::Other(_) => {
            Reason::Other(Name::shared(finish.name()))
        }
    }
}

/// A fault as every other failure of a peer.
fn told(fault: Fault) -> Error {
    Error::Remote {
        code: fault.reason.code(),
        reason: Name::shared(fault.reason.name()),
        retryable: fault.reason.is_retryable(),
        retry_after: fault.retry_after,
        message: fault.message.into_owned(),
    }
}

fn unimplemented(what: &str) -> Error {
    Error::Unimplemented { what: what.into() }
}

/// As a model here has it, where nothing is asked for.
const USUAL_TEMPERATURE: f32 = 1.0;

#[cfg(test)]
mod tests;
