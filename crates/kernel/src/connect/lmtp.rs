//! Models of LMTP servers as functions of this kernel (LM-712, D-5, D-40).
//!
//! With a tokenizer such a model reads like one that runs here; without, tokens go in, tokens come out in `inner` and
//! on their port, and a caller that wants text gets an error before anything is sent.

mod choice_streams;
mod peer_model;
mod request;

use std::sync::Arc;

use futures::Stream;
use sapwood_engine::Transcript;
use sapwood_engine::api::{Prompt, Sampling, SharedVocabulary, Tokens};
use sapwood_net::lmtp::pool::LmtpPool;
use sapwood_proto::lmtp::GenerateRequest;
use sapwood_proto::params::GenerationParams;

use self::choice_streams::ChoiceStreams;
use self::peer_model::PeerModel;
use self::request::LmtpRequest;
use crate::Result;
use crate::call::Call;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::facts::ModelFacts;
use crate::function::Fun;
use crate::handler::{raw, streamed};
use crate::model::{self, AnswerChunks, ModelCall, OutputFormat, OutputParsers, SamplingDefaults};
use crate::name::{Name, Port};
use crate::pool::BlockingPool;
use crate::spec::{Effect, InnerType, Spec};
use crate::token_charge::TokenCharge;

/// Facts of a model that the LMTP servers do not report.
#[derive(Clone, Default)]
pub struct LmtpModelTerms {
    /// The tokenizer. `None`: the model is served in tokens alone.
    pub vocabulary: Option<SharedVocabulary>,
    /// Whether the vocabulary renders conversations with a chat template.
    pub chat: bool,
    /// The context length, if the servers do not report it.
    pub context: Option<u32>,
    /// What finds reasoning and tool calls in the output, if there is a tokenizer.
    pub parsers: OutputParsers,
    /// The values of this server for parameters that a call leaves unset. They are sent to the servers, which are asked for
    /// nothing else than a call that sets them would ask for.
    pub defaults: SamplingDefaults,
}

/// The model of `pool` as function `name` of this kernel. It takes the inputs of a model; without a tokenizer these are
/// `prompt`, as token ids, and `config`.
pub fn function(pool: &LmtpPool, name: impl Into<Name>, terms: LmtpModelTerms) -> Fun {
    let known = pool.facts().map(PeerModel::of).unwrap_or_default();
    let name = name.into();
    let has_text = terms.vocabulary.is_some();
    let gives = if has_text { "text" } else { "tokens" };
    let description =
        format!("The model {name} of servers that speak LMTP; it takes and returns {gives}.");
    let mut spec = Spec::new(name, description.as_str()).effect(Effect::Idempotent);
    spec.inputs = model::inputs();
    spec.outputs = model::outputs();
    spec.finishes = true;
    spec.inner = Some(InnerType::of::<Tokens>());
    spec.model = true;
    let facts = Arc::new(known.facts(&spec.name, &terms));
    spec.sampling = facts.defaults.recommend(facts.info.sampling);
    // Faces of tokens check a request before they submit it, as far as the facts of the model are known.
    spec.facts = Some(Arc::clone(&facts));
    let peer = Arc::new(LmtpPeer {
        pool: pool.clone(),
        bounded: facts.context_tokens().is_some(),
        format: Arc::new(OutputFormat::new(terms.parsers, &*facts.vocabulary)),
        facts,
    });
    raw(spec, move |call| streamed(begin(call, Arc::clone(&peer))))
}

struct LmtpPeer {
    pool: LmtpPool,
    facts: Arc<ModelFacts>,
    format: Arc<OutputFormat>,
    /// The context length is known.
    bounded: bool,
}

/// Reads the inputs and requests the streams of the call.
async fn begin(
    call: Call,
    peer: Arc<LmtpPeer>,
) -> Result<impl Stream<Item = Result<Chunk>> + Send> {
    let has_text = peer.facts.vocabulary.has_text();
    // Before the inputs are read, which may take long (LM-712).
    if !has_text {
        refuse_text(&call)?;
    }
    let ModelCall {
        mut request,
        mut asked,
        steer,
    } = model::read(&call, &peer.facts, &peer.format).await?;
    // Steerers need the logits, which are at the peer (AI-827).
    steer.refuse()?;
    if asked.watched {
        let what = "watching the steps of a model on another server".into();
        return Err(Error::Unimplemented { what });
    }
    if !has_text && matches!(&request.prompt, Prompt::Chat(_)) {
        return Err(unimplemented("chat"));
    }
    // Without a known context length the output must be bounded here: by the default of LMTP.
    if !peer.bounded && request.params.max_tokens.is_none() {
        request.params.max_tokens = GenerateRequest::default().params.max_tokens;
    }
    // A seed that the peer chose is not reported back, so none can be named.
    asked.seeded = request.params.seed.is_some();
    let params = request.params.clone();
    let scored = request.scored.clone();
    let alternatives = request.params.top_logprobs.unwrap_or(0);
    let vocabulary = peer.facts.vocabulary.clone();
    let (turn, size) = (request.caller, model::size(&request.prompt, &params));
    let tokenizing = Arc::clone(&peer);
    let tokenize = move || Transcript::new(request, &tokenizing.facts.info, vocabulary);
    // Off the async workers, as an engine's own prompts are.
    let transcript = match size {
        None => tokenize()?,
        Some(size) => BlockingPool::global().run(turn, size, tokenize).await??,
    };
    let params = GenerationParams {
        // Texts among the biases were tokenised there: the protocol has biases by token id only.
        logit_bias: transcript.logit_bias(),
        logit_bias_texts: Vec::new(),
        ..params
    };
    let params = asked_of_peer(&params, has_text);
    let prompt = transcript.prompt();
    asked.output.continue_prompt(transcript.prompt_tail());
    asked.prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    // Before anything is sent: a caller above its rate limit must not cost the peer a prefill.
    if let Some(token_charge) = call.own.get::<Arc<dyn TokenCharge>>() {
        token_charge.prompt(asked.prompt_tokens)?;
    }
    let pool = peer.pool.clone();
    let asking = LmtpRequest::new(pool, params, &transcript, scored, call.deadline);
    Ok(AnswerChunks::new(
        asked,
        ChoiceStreams::new(asking, transcript, alternatives),
    ))
}

/// Refuses inputs and outputs that need a tokenizer.
fn refuse_text(call: &Call) -> Result<()> {
    if call.want.ports.has(&Port::MAIN) && !call.want.inner {
        return Err(unimplemented("text"));
    }
    for (name, what) in [("messages", "chat"), ("tools", "chat")] {
        if call.inputs.get(name).is_some() {
            return Err(unimplemented(what));
        }
    }
    Ok(())
}

/// The parameters of the LMTP requests, without their token limit. What this side does itself is left out, so that no
/// server has to support it (LM-704): choices, the text of tokens, and stop texts if there is a tokenizer.
fn asked_of_peer(params: &GenerationParams, has_text: bool) -> GenerationParams {
    let mut bias = params.logit_bias.to_vec();
    bias.sort_by_key(|(token, _)| *token);
    // Biases of one token add up (D-20), so they are sent as their sum.
    bias.dedup_by(|later, first| {
        let same = later.0 == first.0;
        first.1 += if same { later.1 } else { 0.0 };
        same
    });
    let mut asked = GenerationParams {
        // Where the defaults of LMTP are others than the core's.
        temperature: Some(Sampling::from(params).temperature),
        top_logprobs: params.top_logprobs.or(Some(0)),
        logit_bias: bias.into(),
        n: None,
        skip_special_tokens: None,
        include_stop_str_in_output: None,
        ..params.clone()
    };
    if has_text {
        asked.stop.clear();
    }
    asked
}

fn unimplemented(what: &str) -> Error {
    Error::Unimplemented {
        what: format!("{what} of a model on another server whose tokenizer is not known"),
    }
}

#[cfg(test)]
mod tests;
