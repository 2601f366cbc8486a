//! Chat templates: renders a conversation as the text format that its model was trained on.
//!
//! A [`Template`] yields [`TemplatePiece`]s, which [`tokens`] tokenises with a vocabulary.
//!
//! ```text
//!   values ──► shield covers texts of control tokens ──► render ──► pieces: the template's text, and covered text
//! ```

mod allowed;
mod bounds;
mod calendar;
mod calls;
mod constants;
mod context;
#[cfg(test)]
mod families;
mod guard;
mod json;
mod jumps;
mod list;
mod names;
mod program;
#[cfg(test)]
mod published;
mod python;
mod rerank;
mod scopes;
mod shield;
mod slice;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::SystemTime;

use minijinja::machinery::{Instructions, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use crate::api::{ChatMessage, ChatRequest, EngineError, Vocabulary};
use crate::stop;
use calls::CallArguments;
use context::ContextBuilder;
pub use rerank::RerankTemplate;
use shield::{CoveredTexts, SpecialTextShield};

/// Instructions of one rendering, in addition to a multiple of the bytes of its input, and the maximum of both together. Some templates
/// look through all messages for each of them.
const FUEL: u64 = 10_000_000;
const FUEL_TIMES: u64 = 1024;
const FUEL_MAX: u64 = 100_000_000;
/// The maximum nesting of macros and loops; minijinja counts a macro as several. A thread has a stack of 2 MiB.
const RECURSION_MAX: usize = 150;
/// The maximum of bytes of a template; the longest in use have some 30,000.
const SOURCE_BYTES_MAX: usize = 256 << 10;
/// The maximum of bytes that one rendering may yield.
const RENDERED_BYTES_MAX: usize = 16 << 20;
/// The maximum of bytes of an error message that are passed on.
const MESSAGE_BYTES_MAX: usize = 300;

/// The texts of a vocabulary's control tokens.
#[derive(Clone, Debug, Default)]
pub struct SpecialTexts {
    /// The text of the BOS token (`bos_token`), or empty.
    pub bos: String,
    /// The text of the EOS token (`eos_token`), or empty.
    pub end: String,
    /// The texts of all control tokens.
    pub all: Vec<String>,
}

/// A part of a rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplatePiece {
    /// Text in which the texts of control tokens become those tokens.
    Template(String),
    /// Text that came from a value and only looks like a control token: plain text.
    Plain(String),
}

/// Tokenises a rendered conversation. Most templates print the BOS token themselves; it is added only if it is missing.
/// The result is incomplete if the caller no longer waits for it ([`stop`]).
#[must_use]
pub fn tokens(pieces: &[TemplatePiece], vocabulary: &(impl Vocabulary + ?Sized)) -> Vec<Token> {
    let of = |piece: &TemplatePiece| match piece {
        TemplatePiece::Template(text) => vocabulary.tokenize(text, true),
        TemplatePiece::Plain(text) => vocabulary.tokenize(text, false),
    };
    // Between pieces as well as within them: a conversation may have thousands of short ones.
    let wanted = pieces.iter().take_while(|_| !stop::stopped());
    let mut tokens: Vec<Token> = wanted.flat_map(of).collect();
    // Two BOS tokens in a row are not what the model was trained on.
    if let Some(bos) = vocabulary.bos()
        && tokens.first() != Some(&bos)
    {
        tokens.insert(0, bos);
    }
    tokens
}

/// Why a template is not usable, or a conversation cannot be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template itself does not parse.
    #[error("the chat template does not parse: {0}")]
    Syntax(String),
    /// The template rejected the conversation, with its own message.
    #[error("the chat template rejects this conversation: {0}")]
    Rejected(String),
    /// The template failed.
    #[error("the chat template failed on this conversation: {0}")]
    Failed(String),
    /// The rendering took too long or became too long.
    #[error(
        "the chat template needed more than {FUEL_MAX} steps, {} bytes or {} s: send less, or use another template",
        bounds::MADE_BYTES_MAX, bounds::RENDER_TIME_MAX.as_secs()
    )]
    TooLong,
    /// There is no unfinished assistant message to continue.
    #[error("there is no assistant message at the end of the conversation to continue")]
    NothingToContinue,
}

impl From<TemplateError> for EngineError {
    fn from(error: TemplateError) -> Self {
        let reason = match &error {
            // Templates raise free texts. The usual ones about roles ("Conversation roles must alternate ...") contain
            // the word.
            TemplateError::Rejected(why) if why.to_ascii_lowercase().contains("role") => {
                ErrorReason::BAD_ROLE
            }
            _ => ErrorReason::CHAT_TEMPLATE_ERROR,
        };
        Self::new(Code::InvalidRequest, reason, error.to_string())
    }
}

/// The error for a model that has no template.
#[must_use]
pub fn no_template() -> EngineError {
    let message = "this model has no chat template: send raw text instead of messages";
    EngineError::new(Code::FailedPrecondition, ErrorReason::NO_TEMPLATE, message)
}

/// A compiled chat template; shared, renders from any thread.
pub struct Template {
    environment: Environment<'static>,
    syntax: SyntaxConfig,
    source: String,
    /// The source compiled; `None` if it cannot be kept, so that each rendering compiles it.
    program: Option<Instructions<'static>>,
    shield: SpecialTextShield,
    bos: String,
    end: String,
    /// How it expects the arguments of calls; found out when the first one is rendered.
    arguments: OnceLock<CallArguments>,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").finish_non_exhaustive()
    }
}

impl Template {
    /// Compiles a template. `clock` supplies the time of `strftime_now`, as UTC.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(
        source: &str,
        special: &SpecialTexts,
        clock: fn() -> SystemTime,
    ) -> Result<Self, TemplateError> {
        let syntax = |error: Error| TemplateError::Syntax(clipped(&error.to_string()));
        let mut environment = Environment::empty();
        let blocks = SyntaxConfig::builder()
            // Both as in Transformers, for which chat templates are written.
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        let blocks = blocks.map_err(syntax)?;
        // A prompt is not HTML.
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_recursion_limit(RECURSION_MAX);
        // Errors would contain the variables.
        environment.set_debug(false);
        bounds::install(&mut environment);
        allowed::install(&mut environment);
        environment.add_function("raise_exception", |why: &Value| -> Result<Value, Error> {
            let why = clipped(&bounds::printed(why)?);
            Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(why)))
        });
        environment.add_function("strftime_now", move |format: &Value| {
            let format = bounds::printed(format)?;
            if format.len() > calendar::FORMAT_BYTES_MAX {
                let message = "the format of a time is too long";
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
            Ok(calendar::format(clock(), &format))
        });
        // Before it is parsed: parsing takes time and memory in proportion to it.
        if source.len() > SOURCE_BYTES_MAX {
            let why = format!("it is longer than {SOURCE_BYTES_MAX} bytes");
            return Err(TemplateError::Syntax(why));
        }
        let source = without_generation_tags(&with_line_feeds(source));
        let program = caught(|| program::compile(NAME, &source, &blocks)).map_err(syntax)?;
        let program = names::kept(&program);
        let shield = SpecialTextShield::new(&special.all)?;
        let (bos, end) = (special.bos.clone(), special.end.clone());
        Ok(Self {
            environment,
            syntax: blocks,
            source,
            program,
            shield,
            bos,
            end,
            arguments: OnceLock::new(),
        })
    }

    /// Returns the source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation of one short message. A template that takes too long for it takes too long for every
    /// conversation.
    ///
    /// # Errors
    /// [`TemplateError::TooLong`]. Other errors are ignored: they may not apply to other conversations.
    pub fn try_out(&self) -> Result<(), TemplateError> {
        let message = ChatMessage {
            role: "user".to_owned(),
            content: "Hello".to_owned(),
            ..ChatMessage::default()
        };
        let chat = ChatRequest {
            messages: vec![message],
            ..ChatRequest::default()
        };
        match self.render(&chat) {
            Err(TemplateError::TooLong) => Err(TemplateError::TooLong),
            Err(why) => {
                tracing::debug!(%why, "the chat template rejects a single short message");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Renders a conversation up to the point where the model continues.
    ///
    /// # Errors
    /// [`TemplateError`], but for its first variant.
    pub fn render(&self, chat: &ChatRequest) -> Result<Vec<TemplatePiece>, TemplateError> {
        let has_calls = chat.messages.iter().any(|it| !it.tool_calls.is_null());
        let arguments = if has_calls {
            self.arguments()?
        } else {
            CallArguments::Objects
        };
        self.render_with(chat, arguments)
    }

    /// Returns the form in which it expects the arguments of calls.
    fn arguments(&self) -> Result<CallArguments, TemplateError> {
        if let Some(known) = self.arguments.get() {
            return Ok(*known);
        }
        // Not kept if it took too long: its caller may have left, which says nothing about the template.
        let found = calls::expected(self)?;
        Ok(*self.arguments.get_or_init(|| found))
    }

    /// Renders with the arguments of calls in this form.
    fn render_with(
        &self,
        chat: &ChatRequest,
        arguments: CallArguments,
    ) -> Result<Vec<TemplatePiece>, TemplateError> {
        let continues = |last: &ChatMessage| last.role == "assistant";
        if chat.continue_last && !chat.messages.last().is_some_and(continues) {
            return Err(TemplateError::NothingToContinue);
        }
        let (text, covered) = self.run(chat, arguments)?;
        let pieces = |text: &str| {
            let pieces = covered.pieces_within(text, RENDERED_BYTES_MAX);
            pieces.ok_or(TemplateError::TooLong)
        };
        if !chat.continue_last {
            return pieces(&text);
        }
        // The last one: a template may print a message twice, and the model continues at the end.
        let Some(at) = text.rfind(shield::TAIL) else {
            return Err(TemplateError::NothingToContinue);
        };
        // A template that trims contents has removed the space after the mark; then the text before the mark is trimmed
        // too.
        let kept_space = text[at + shield::TAIL.len()..].starts_with(' ');
        let text = if kept_space {
            &text[..at]
        } else {
            text[..at].trim_end()
        };
        pieces(text)
    }

    /// Returns the text that the template renders, and what its marks stand for.
    fn run(
        &self,
        chat: &ChatRequest,
        arguments: CallArguments,
    ) -> Result<(String, CoveredTexts), TemplateError> {
        let mut text = String::new();
        let input = input_bytes(chat);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel(input)));
        let mut context = ContextBuilder::new(&self.shield, arguments);
        let render = || {
            let variables = context.variables(chat, &self.bos, &self.end)?;
            let compiled;
            let program = match &self.program {
                Some(program) => program,
                None => {
                    compiled = program::compile(NAME, &self.source, &self.syntax)?;
                    &compiled
                }
            };
            guard::install(&self.shield, context.take_covered());
            let mut out = make_string_output(&mut text);
            let blocks = BTreeMap::new();
            let escape = AutoEscape::None;
            eval(&environment, program, variables, &blocks, &mut out, escape).map(drop)
        };
        let rendered = bounds::within(input, || caught(render));
        let covered = guard::remove();
        rendered.map_err(failure)?;
        if text.len() > RENDERED_BYTES_MAX {
            return Err(TemplateError::TooLong);
        }
        Ok((text, covered))
    }
}

const NAME: &str = "chat";

/// What minijinja does on a template that it panics on is an error of the template: it ends this rendering, and nothing else. What a
/// rendering changes is its own, so nothing is left half done.
fn caught<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        let message = "the template engine panicked";
        Err(Error::new(ErrorKind::InvalidOperation, message))
    })
}

/// The maximum of instructions of a rendering of as many bytes of input.
fn fuel(input_bytes: usize) -> u64 {
    let more = FUEL_TIMES.saturating_mul(input_bytes as u64);
    FUEL.saturating_add(more).min(FUEL_MAX)
}

/// The bytes of all texts of a conversation.
fn input_bytes(chat: &ChatRequest) -> usize {
    let message = |message: &ChatMessage| {
        let reasoning = message.reasoning.as_ref().map_or(0, String::len);
        message.content.len() + reasoning + json_bytes(&message.tool_calls)
    };
    let messages: usize = chat.messages.iter().map(message).sum();
    messages + json_bytes(&chat.tools) + json_bytes(&chat.template_args)
}

fn json_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value as Json;
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(json_bytes).sum(),
        Json::Object(members) => {
            let member = |(key, value): (&String, &Json)| key.len() + json_bytes(value);
            members.iter().map(member).sum()
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => size_of::<Json>(),
    }
}

/// Replaces other ends of lines by line feeds, as Jinja does: `trim_blocks` removes only those.
fn with_line_feeds(source: &str) -> Cow<'_, str> {
    if source.contains('\r') {
        Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n"))
    } else {
        Cow::Borrowed(source)
    }
}

/// Removes `{% generation %}` tags, with which some templates mark assistant output for training; here they are no-ops.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag
            .trim_start_matches("{%")
            .trim_end_matches("%}")
            .trim_matches(['-', '+', ' ']);
        match word {
            // Replaced by a block rather than removed, so that its trimming of white space stays.
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The message of a template's `raise_exception`, clipped.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn failure(error: Error) -> TemplateError {
    // minijinja converts an error of a bounded writer into a `WriteFailure`.
    if matches!(error.kind(), ErrorKind::OutOfFuel | ErrorKind::WriteFailure) {
        return TemplateError::TooLong;
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(inner) = cause {
        if let Some(Raised(why)) = inner.downcast_ref() {
            return TemplateError::Rejected(why.clone());
        }
        cause = inner.source();
    }
    TemplateError::Failed(clipped(&error.to_string()))
}

fn clipped(message: &str) -> String {
    // A template may quote a value in its error, of any length, and marks are internal.
    let message = &message[..message.floor_char_boundary(4 * MESSAGE_BYTES_MAX)];
    let message = shield::without_marks(message);
    match message
        .char_indices()
        .find(|&(at, _)| at >= MESSAGE_BYTES_MAX)
    {
        Some((at, _)) => format!("{}…", &message[..at]),
        None => message,
    }
}
