//! Models as functions: an engine's events with GENERATE's inputs and outputs (KE-611 to KE-614).
//!
//! ```text
//!   call ── read config, tools, prompt | messages ──► Request ── open steerers, Engine::submit ──► Handle ── Answer ──► chunks
//! ```
//!
//! Dropping the stream drops the engine's handle, which frees the sequence before the next step (EV-611).

mod answer;
mod choice_calls;
pub(crate) mod config;
mod embedding;
mod held_output;
pub(crate) mod output_parser;
mod prompt;
#[cfg(feature = "net")]
pub(crate) mod remote;
mod sampling_defaults;
mod steer_choice;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use bytes::Bytes;
use futures::future::try_join;
use futures::{Stream, StreamExt, TryStreamExt};
use sapwood_engine::api::{self, GenerationRequest, ModelInfo, Prompt};
use sapwood_engine::{Engine, RequestHandle};
use sapwood_proto::bounded_json;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::GenerationParams;
use serde_json::{Map, Value};

pub(crate) use self::answer::{AnswerChunks, AnswerEvent, SubmittedInfo};
pub(crate) use self::config::snake;
pub use self::config::{GenerateConfig, PromptMode, VariablesSharing};
pub use self::embedding::embedding_model;
pub(crate) use self::output_parser::{DeclaredTools, OutputFormat, OutputSettings};
pub use self::output_parser::{OutputParsers, ReasoningParser, ToolParser};
use self::prompt::PromptRoom;
pub use self::sampling_defaults::SamplingDefaults;
pub(crate) use self::steer_choice::SteerChoice;
use crate::Result;
use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::facts::ModelFacts;
use crate::function::Fun;
use crate::handler::{raw, streamed};
use crate::limits;
use crate::name::{Mime, Name, Port};
use crate::pool::{BlockingPool, TaskSize};
use crate::spec::{Effect, InnerType, InputSpec, OutputSpec, Spec};
use crate::steering::{SteerRights, Steering};
use crate::token_charge::TokenCharge;
use crate::want::RequestedPorts;

/// The key in a call's context for a base of input `config`, a JSON object. The input overrides it field by field
/// (EV-601).
pub const CONFIG_CONTEXT: &str = "config";

/// The function of a model: `engine` under `name`. Its chunks' `inner` is [`api::Tokens`]. A call with a controller or a
/// constraint is `unimplemented`.
pub fn model(name: impl Into<Name>, engine: Engine) -> Fun {
    model_with(name, engine, ModelOptions::default())
}

/// The function of a model whose calls may have a controller, a constraint, or both.
pub fn steered_model(name: impl Into<Name>, engine: Engine, steering: Steering) -> Fun {
    let options = ModelOptions {
        steering: Some(steering),
        ..ModelOptions::default()
    };
    model_with(name, engine, options)
}

/// Options of a model's function.
#[derive(Clone, Default)]
pub struct ModelOptions {
    /// Lets calls have a controller, a constraint, or both.
    pub steering: Option<Steering>,
    /// What finds reasoning and tool calls in the output.
    pub parsers: OutputParsers,
    /// Its values for the parameters that a call leaves unset.
    pub defaults: SamplingDefaults,
}

/// The function of a model with these options.
pub fn model_with(name: impl Into<Name>, engine: Engine, options: ModelOptions) -> Fun {
    let ModelOptions {
        steering,
        parsers,
        defaults,
    } = options;
    let name = name.into();
    let mut spec = Spec::new(name, engine.info().description.as_str()).effect(Effect::Idempotent);
    spec.inputs = inputs();
    spec.outputs = outputs();
    spec.finishes = true;
    spec.inner = Some(InnerType::of::<api::Tokens>());
    spec.model = true;
    spec.steers = steering.is_some();
    spec.sampling = defaults.recommend(engine.info().sampling);
    let facts = Arc::new(ModelFacts::of(&engine, defaults));
    spec.facts = Some(Arc::clone(&facts));
    let format = OutputFormat::new(parsers, &*facts.vocabulary);
    let local = Arc::new(LocalModel {
        engine,
        facts,
        format: Arc::new(format),
        steering,
    });
    raw(spec, move |call| streamed(begin(call, Arc::clone(&local))))
}

/// A model in this process.
struct LocalModel {
    engine: Engine,
    facts: Arc<ModelFacts>,
    format: Arc<OutputFormat>,
    steering: Option<Steering>,
}

/// GENERATE's inputs but for `target`.
pub(crate) fn inputs() -> Vec<InputSpec> {
    let json = |name: &'static str| {
        InputSpec::new(name)
            .taking([Mime::JSON, Mime::TEXT])
            .optional()
    };
    vec![
        // One of `prompt` and `messages` is required; a schema of single inputs cannot express that.
        InputSpec::new("prompt").alias("text").optional(),
        // Makes the prompt the text before a place to fill in.
        InputSpec::new("suffix").optional(),
        json("messages"),
        json("config"),
        json("tools"),
    ]
}

/// GENERATE's outputs.
pub(crate) fn outputs() -> Vec<OutputSpec> {
    vec![
        OutputSpec::new(Port::MAIN, Mime::TEXT)
            .wire("response")
            .alias("text"),
        OutputSpec::new(Port::REASONING, Mime::TEXT),
        OutputSpec::new(Port::TOOL_CALLS, Mime::NDJSON),
        OutputSpec::new(Port::TOKENS, Mime::TOKENS),
        OutputSpec::new(Port::LOGPROBS, Mime::NDJSON),
        OutputSpec::new(Port::EVENTS, Mime::NDJSON),
        OutputSpec::new(Port::META, Mime::JSON),
        OutputSpec::new(Port::CONTROLLER_LOG, Mime::TEXT),
    ]
}

/// Reads the inputs and submits the request.
async fn begin(
    call: Call,
    model: Arc<LocalModel>,
) -> Result<impl Stream<Item = Result<Chunk>> + Send> {
    let ModelCall {
        request,
        mut asked,
        steer,
    } = read(&call, &model.facts, &model.format).await?;
    let rights = call.extensions.get::<SteerRights>();
    let token_charge = call.own.get::<Arc<dyn TokenCharge>>();
    if let Some(token_charge) = token_charge.filter(|_| !steer.is_none()) {
        token_charge.prompt(STEER_TOKENS)?;
    }
    let hold = model.steering.as_ref().map(|steering| steering.hold);
    let writes_reasoning = steer
        .pattern()
        .map(|(kind, pattern)| asked.output.ends_reasoning(kind, pattern));
    let submitted = submit(model, request, steer, rights.cloned().unwrap_or_default()).await?;
    let handle = submitted.handle;
    asked.prompt_tokens = handle.prompt_tokens();
    match writes_reasoning {
        Some(false) => asked.output.begin_with_answer(),
        Some(true) | None => asked.output.continue_prompt(handle.prompt_tail()),
    }
    asked.hold = hold.filter(|_| submitted.backtracks);
    if let Some(token_charge) = token_charge {
        // An error drops the handle, and with it the request.
        token_charge.prompt(handle.prompt_tokens())?;
    }
    Ok(AnswerChunks::new(
        asked,
        handle.map(|event| Ok(AnswerEvent::Event(event))),
    ))
}

/// Tokens that a request with a steerer is charged before it is opened: a grammar that does not compile has cost a
/// processor all the same.
const STEER_TOKENS: u32 = 16;
/// A prompt below this many bytes is rendered and tokenised inline: passing it to another thread would take about as
/// long.
const INLINE_BYTES: usize = 2 << 10;
/// Messages of an inline prompt at most: each is one iteration of a template's loop.
const INLINE_MESSAGES: usize = 32;

/// A request that the engine has.
struct SubmittedRequest {
    handle: RequestHandle,
    /// Its steerer may take back tokens.
    backtracks: bool,
}

/// Opens the steerers of a request and submits it to the engine. A large prompt is rendered and tokenised on the blocking
/// pool, off the async workers. Steerers have a pool of their own, because a grammar may take seconds to compile.
async fn submit(
    model: Arc<LocalModel>,
    mut request: GenerationRequest,
    steer: SteerChoice,
    rights: SteerRights,
) -> Result<SubmittedRequest> {
    let turn = request.caller;
    let size = size(&request.prompt, &request.params);
    if steer.is_none() {
        let engine = model.engine.clone();
        let handle = match size {
            None => engine.submit(request)?,
            Some(size) => {
                let submitted =
                    BlockingPool::global().run(turn, size, move || engine.submit(request));
                submitted.await??
            }
        };
        return Ok(SubmittedRequest {
            handle,
            backtracks: false,
        });
    }
    // Before the pool, whose queue it need not wait for.
    if model.steering.is_none() {
        steer.refuse()?;
    }
    let opened = BlockingPool::compiling().run(turn, TaskSize::Large, move || {
        let steering = model.steering.as_ref();
        let params = &request.params;
        let stops = !params.stop.is_empty() || !params.stop_sequences.is_empty();
        let steerer = steering.map(|steering| steer.open(steering, &rights, stops));
        request.steer = steerer.transpose()?.flatten();
        let backtracks = request.steer.as_ref();
        let backtracks = backtracks.is_some_and(|steerer| steerer.may_backtrack());
        let handle = model.engine.submit(request)?;
        Ok(SubmittedRequest { handle, backtracks })
    });
    opened.await?
}

/// A prompt of tokens below so many is taken inline: penalties count them, and DRY looks for repetitions in them.
const INLINE_TOKENS: usize = 4 << 10;

/// The size of the work to prepare a request: its prompt and the texts among the biases are tokenised, its bad words are looked for in the
/// whole vocabulary, and penalties count the tokens of a prompt that comes as such. `None` if it is negligible.
pub(crate) fn size(prompt: &Prompt, params: &GenerationParams) -> Option<TaskSize> {
    if !params.bad_words.is_empty() {
        return Some(TaskSize::Large);
    }
    let biases = &params.logit_bias_texts;
    let bias_bytes: usize = biases.iter().map(|(text, _)| text.len()).sum();
    let (texts, is_plain) = match prompt {
        Prompt::Tokens(tokens) if biases.is_empty() => {
            return (tokens.len() >= INLINE_TOKENS).then_some(TaskSize::Small);
        }
        Prompt::Tokens(_) => (0, true),
        Prompt::Text(_) => (1, true),
        Prompt::Infill { .. } => (2, true),
        // Templates print tools and arguments in any way, so their output may be large.
        Prompt::Chat(chat) => (
            chat.messages.len(),
            chat.tools.is_null() && chat.template_args.is_null(),
        ),
    };
    let texts = texts.saturating_add(biases.len());
    let bytes = prompt.bytes().saturating_add(bias_bytes);
    if is_plain && bytes < INLINE_BYTES && texts < INLINE_MESSAGES {
        return None;
    }
    // A template adds about as much text around a message as a short message has.
    Some(TaskSize::of(bytes.saturating_add(texts.saturating_mul(32))))
}

/// The inputs of a call, decoded.
pub(crate) struct ModelCall {
    pub(crate) request: GenerationRequest,
    /// What [`AnswerChunks`] needs to know of it.
    pub(crate) asked: SubmittedInfo,
    pub(crate) steer: SteerChoice,
}

/// Reads the inputs of a call: the request for a model with these facts, local or remote.
pub(crate) async fn read(
    call: &Call,
    facts: &ModelFacts,
    format: &Arc<OutputFormat>,
) -> Result<ModelCall> {
    let began = Instant::now();
    let config = read_config(call, facts).await?;
    let tools = read_tools(call).await?;
    let declared = tools.as_array().filter(|tools| !tools.is_empty());
    let declared = declared.map(|_| Arc::new(DeclaredTools::of(&tools)));
    let turn = call.fair_share().caller;
    let prompt = read_prompt(call, facts, &config, tools, turn).await?;
    let output = match &prompt {
        // A watcher gets the text as it is.
        Prompt::Chat(chat) if !config.watched => {
            OutputSettings::of_chat(Arc::clone(format), declared, chat)
        }
        // In raw mode `<think>` and `<tool_call>` are ordinary text; only a conversation has them as markers.
        _ => OutputSettings::plain(),
    };
    // Reports cost a steerer its time, so they are made for readers only (KE-135).
    let reports = config.watched || call.want.ports.has(&Port::CONTROLLER_LOG);
    let steer = SteerChoice::of(&config, reports);
    let choices = config.params.n.unwrap_or(1);
    let asked = SubmittedInfo {
        model: Name::shared(&facts.info.name),
        vocabulary: facts.vocabulary.clone(),
        want: call.want.clone(),
        call: call.id,
        choices,
        tree: choices > 1 || config.controller.is_some(),
        watched: config.watched,
        // Set by the caller once the steerer is open.
        hold: None,
        logprobs: logprobs(call, &config).is_some(),
        output,
        // Set by the caller once the prompt is tokenised.
        prompt_tokens: 0,
        seeded: true,
        began,
        token_charge: call.own.get().cloned(),
        observer: call.own.get().cloned(),
    };
    let mut request = request(call, config, prompt);
    request.watched = reports && !steer.is_none();
    request.marked = asked.output.marked();
    if let Some(observer) = &asked.observer {
        observer.asked(&request);
    }
    Ok(ModelCall {
        request,
        asked,
        steer,
    })
}

fn request(call: &Call, config: GenerateConfig, prompt: Prompt) -> GenerationRequest {
    let mut request = GenerationRequest::new(prompt);
    let top_logprobs = logprobs(call, &config);
    request.timeout = call
        .deadline
        .map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let share = call.fair_share();
    (request.caller, request.connection) = (share.caller, share.connection);
    // Each token account has a prefix scope of its own; calls without one share scope 0.
    request.prefix_scope = call
        .own
        .get::<Arc<dyn TokenCharge>>()
        .map_or(0, |token_charge| token_charge.prefix_scope());
    config.apply(&mut request);
    // After `apply`, which sets what was configured: the ports that are read decide what is computed (EV-506).
    request.params.top_logprobs = top_logprobs;
    request
}

/// The number of alternatives to compute; `None` if log-probabilities are not read (EV-506).
fn logprobs(call: &Call, config: &GenerateConfig) -> Option<u32> {
    match &call.want.ports {
        RequestedPorts::Only(ports) if ports.contains(&Port::LOGPROBS) => {
            Some(config.params.top_logprobs.unwrap_or(0))
        }
        RequestedPorts::Only(_) if !call.want.inner => None,
        // A caller that reads all ports gets what was configured.
        RequestedPorts::Only(_) | RequestedPorts::All => config.params.top_logprobs,
    }
}

async fn read_config(call: &Call, facts: &ModelFacts) -> Result<GenerateConfig> {
    // A typed value has the ranges of the core, which the engine checks when the request is submitted (D-20).
    if let Some(config) = typed_config(call).await? {
        return config.settled(&facts.defaults);
    }
    let config = written_config(call).await?;
    config.check_vocabulary(facts.info.vocabulary_tokens)?;
    config.settled(&facts.defaults)
}

/// The input `config` as the typed value of a face in this process, before [`GenerateConfig::settled`].
pub(crate) async fn typed_config(call: &Call) -> Result<Option<GenerateConfig>> {
    let Some(node) = call.inputs.get("config") else {
        return Ok(None);
    };
    let first = node.main().read().try_next().await?;
    Ok(first.and_then(|first| first.inner::<GenerateConfig>().cloned()))
}

/// Whether the answers of a model with this config are a tree (D-25).
pub(crate) fn is_tree(config: &Map<String, Value>) -> bool {
    let several = config
        .get("n")
        .and_then(Value::as_u64)
        .is_some_and(|n| n > 1);
    several
        || config
            .get("controller")
            .is_some_and(|value| !value.is_null())
}

/// The input `config` as JSON, merged over the base in the call's context.
async fn written_config(call: &Call) -> Result<GenerateConfig> {
    let mut fields = match call.context(CONFIG_CONTEXT) {
        Some(Value::Object(base)) => base.clone(),
        _ => Map::new(),
    };
    if let Some(input) = read_json(call, "config").await? {
        let Value::Object(input) = input else {
            return Err(config::bad("config", "must be a JSON object"));
        };
        fields.extend(input.into_iter().map(|(key, value)| (snake(&key), value)));
    }
    GenerateConfig::from_json(fields)
}

async fn read_tools(call: &Call) -> Result<Value> {
    let wrong = |why: String| Error::argument("tools", why);
    let Some(tools) = read_json(call, "tools").await? else {
        return Ok(Value::Null);
    };
    let Some(list) = tools.as_array() else {
        return Err(wrong("must be an array of tool definitions".into()));
    };
    for (index, tool) in list.iter().enumerate() {
        let name = tool.pointer("/function/name").and_then(Value::as_str);
        // Templates print what they find, so an incomplete tool would go into the prompt as it is.
        if name.is_none_or(str::is_empty) {
            return Err(wrong(format!(
                "tool {index} needs {{\"type\": \"function\", \"function\": {{\"name\": ..}}}}"
            )));
        }
    }
    Ok(tools)
}

/// An input as JSON; `None` if it is absent or empty.
async fn read_json(call: &Call, name: &'static str) -> Result<Option<Value>> {
    let Some(data) = whole(call, name).await? else {
        return Ok(None);
    };
    let turn = call.fair_share().caller;
    offload(turn, data.len(), move || parse(name, &data)).await
}

/// The whole content of an input; `None` if it is absent.
async fn whole(call: &Call, name: &str) -> Result<Option<Bytes>> {
    match call.inputs.get(name) {
        Some(node) => Ok(Some(node.main().whole().await?)),
        None => Ok(None),
    }
}

/// Runs work on so many bytes: inline if they are few, else on the blocking pool.
async fn offload<T: Send + 'static>(
    turn: u64,
    bytes: usize,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    if bytes < INLINE_BYTES {
        return work();
    }
    BlockingPool::global()
        .run(turn, TaskSize::of(bytes), work)
        .await?
}

/// Parses JSON; `None` if there is nothing but white space.
pub(crate) fn parse(name: &'static str, data: &[u8]) -> Result<Option<Value>> {
    // An input that is bound and stays empty is as good as one that is absent.
    if data.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    match bounded_json::read(data, limits::JSON_BOUNDS) {
        Ok(value) => Ok(Some(value)),
        Err(error) => {
            let reason = if name == "config" {
                ErrorReason::BAD_CONFIG
            } else {
                ErrorReason::NONE
            };
            Err(Error::argument(name, error.to_string()).because(reason))
        }
    }
}

/// The one of these two inputs that a call has.
enum PromptInput {
    Prompt,
    Messages,
}

impl PromptInput {
    fn of(call: &Call) -> Result<Self> {
        match (call.inputs.get("prompt"), call.inputs.get("messages")) {
            (Some(_), None) => Ok(Self::Prompt),
            (None, Some(_)) => Ok(Self::Messages),
            (Some(_), Some(_)) => {
                let why = "give either prompt or messages, not both";
                Err(Error::argument("messages", why).because(ErrorReason::DUPLICATE_PARAM))
            }
            (None, None) => {
                let why = "a model needs this input, or messages";
                Err(Error::argument("prompt", why).because(ErrorReason::MISSING_INPUT))
            }
        }
    }
}

async fn read_prompt(
    call: &Call,
    facts: &ModelFacts,
    config: &GenerateConfig,
    tools: Value,
    turn: u64,
) -> Result<Prompt> {
    let mode = prompt_mode(config, &facts.info)?;
    let input = PromptInput::of(call)?;
    let room = PromptRoom::new();
    let read = async {
        match input {
            PromptInput::Prompt => prompt::read("prompt", call.read("prompt")?, &room).await,
            PromptInput::Messages => {
                let data = whole(call, "messages").await?.unwrap_or_default();
                let bytes = data.len();
                let read =
                    move || prompt::messages(parse("messages", &data)?.unwrap_or(Value::Null));
                let messages = offload(turn, bytes, read).await?;
                Ok(prompt::PromptInputs::Messages(messages))
            }
        }
    };
    let suffix = SuffixReader {
        call,
        config,
        tools: &tools,
        room: &room,
    };
    // Together: both may come from one bounded source, and reading them in turn would deadlock (KE-137).
    let suffix = suffix.read(|| prompt::check_infill(&*facts.vocabulary));
    let (suffix, turns) = try_join(suffix, read).await?;
    if let Some(suffix) = suffix {
        return turns.infill(suffix);
    }
    match mode {
        PromptMode::Raw => {
            let (bytes, vocabulary) = (turns.raw_bytes(), facts.vocabulary.clone());
            offload(turn, bytes, move || turns.raw(&*vocabulary)).await
        }
        _ => {
            let template_args = config.template_args.clone().unwrap_or(Value::Null);
            // The template itself runs when the request is submitted, on the pool if the conversation is large.
            turns.chat(tools, template_args)
        }
    }
}

/// Reads the text behind the place to fill in.
struct SuffixReader<'a> {
    call: &'a Call,
    config: &'a GenerateConfig,
    tools: &'a Value,
    /// Shared with the prompt.
    room: &'a PromptRoom,
}

impl SuffixReader<'_> {
    /// `None` if the input is absent or empty: the model continues the prompt then. `check` refuses any other.
    async fn read(self, check: impl FnOnce() -> Result<()>) -> Result<Option<String>> {
        let (call, config) = (self.call, self.config);
        if call.inputs.get("suffix").is_none() {
            return Ok(None);
        }
        let read = prompt::read("suffix", call.read("suffix")?, self.room).await?;
        let suffix = read.text(|| prompt::no_tokens("suffix"))?;
        if suffix.is_empty() {
            return Ok(None);
        }
        // A template has no place to fill in, and what only a template prints would be lost.
        let tools = self.tools.as_array();
        let why = if call.inputs.get("messages").is_some() {
            "goes with the input prompt, not with messages"
        } else if config.prompt_mode == PromptMode::Chat {
            "has no place in a conversation: leave it out, or prompt_mode \"chat\""
        } else if tools.is_some_and(|tools| !tools.is_empty()) {
            "goes without a chat template, which tools need: leave one of them out"
        } else if config
            .template_args
            .as_ref()
            .is_some_and(|args| !args.is_null())
        {
            "goes without a chat template: leave it out, or template_args"
        } else {
            check()?;
            return Ok(Some(suffix));
        };
        Err(Error::argument("suffix", why).because(ErrorReason::BAD_CONFIG))
    }
}

/// EV-607.
fn prompt_mode(config: &GenerateConfig, info: &ModelInfo) -> Result<PromptMode> {
    match config.prompt_mode {
        PromptMode::Chat if !info.chat => Err(api::EngineError::new(
            sapwood_proto::code::Code::FailedPrecondition,
            ErrorReason::NO_TEMPLATE,
            "this model has no chat template; use prompt_mode \"raw\"",
        )
        .into()),
        PromptMode::Auto if info.chat => Ok(PromptMode::Chat),
        PromptMode::Auto => Ok(PromptMode::Raw),
        mode => Ok(mode),
    }
}
