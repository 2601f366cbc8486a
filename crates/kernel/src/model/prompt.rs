//! The prompt of a model: leaves of an input or messages, as turns of a conversation or as tokens.
//!
//! The whole prompt is read before anything is submitted (D-9).

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::BytesMut;
use futures::StreamExt;
use sapwood_engine::api::{ChatMessage, ChatRequest, Prompt, Vocabulary};
use sapwood_engine::infill::no_infill;
use sapwood_proto::clip::shown;
use sapwood_proto::error_reason::ErrorReason;
use serde_json::Value;

use crate::chunk::Chunk;
use crate::error::Error;
use crate::limits;
use crate::meta::{ChoiceFinish, Meta};
use crate::name::{Mime, Name};
use crate::{Chunks, Result};

/// The prompt inputs of the call.
#[derive(Debug)]
pub(super) enum PromptInputs {
    /// Leaves of the input `prompt`.
    Items(Vec<PromptLeaf>),
    /// The input `messages`.
    Messages(Vec<ChatMessage>),
}

/// One leaf.
#[derive(Debug)]
pub(super) struct PromptLeaf {
    role: Name,
    content: LeafContent,
    /// Written by an action that came to its end: it is not continued (D-51).
    closed: bool,
}

#[derive(Debug)]
enum LeafContent {
    Text(String),
    Tokens(Vec<u32>),
    EndOfTurn,
}

/// The bytes that the inputs of a prompt may still have, together.
pub(super) struct PromptRoom(AtomicUsize);

impl PromptRoom {
    pub(super) const fn new() -> Self {
        Self(AtomicUsize::new(limits::PROMPT_BYTES))
    }

    fn charge(&self, bytes: usize) -> Result<()> {
        let left = |room: usize| room.checked_sub(bytes);
        let charged = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        charged.map(drop).map_err(|_| Error::Limit {
            name: "prompt_bytes",
            max: limits::PROMPT_BYTES as u64,
        })
    }
}

/// Reads the leaves of the input of this name.
pub(super) async fn read(
    input: &'static str,
    mut chunks: Chunks,
    room: &PromptRoom,
) -> Result<PromptInputs> {
    let mut items = Vec::new();
    let mut leaf: Option<OpenLeaf> = None;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        // Bounded while it is read: a flattened tree can be far larger than what was sent (EV-306).
        room.charge(chunk.data.len())?;
        match &mut leaf {
            // Leaves and not chunks are the items: a character or a token id may be cut between chunks (KE-111).
            Some(leaf) if leaf.part == chunk.part => leaf.extend(&chunk),
            _ => {
                let before = leaf.replace(OpenLeaf::new(chunk));
                let before = before.map(|leaf| leaf.item(input)).transpose()?;
                items.extend(before.flatten());
            }
        }
    }
    let last = leaf.map(|leaf| leaf.item(input)).transpose()?;
    items.extend(last.flatten());
    Ok(PromptInputs::Items(items))
}

/// A leaf being read.
struct OpenLeaf {
    part: u32,
    mime: Mime,
    role: Name,
    /// The id of the node it came from, if the maker of the chunk set it.
    node: Option<String>,
    /// How the action that wrote it ended.
    finish: Option<ChoiceFinish>,
    data: BytesMut,
}

impl OpenLeaf {
    fn new(chunk: Chunk) -> Self {
        let meta = chunk.meta.as_deref();
        let node = meta.and_then(|meta| meta.extra.get("node"));
        Self {
            part: chunk.part,
            role: meta.and_then(|meta| meta.role.clone()).unwrap_or_default(),
            node: node.and_then(Value::as_str).map(str::to_owned),
            finish: meta.and_then(finish),
            mime: chunk.mime,
            data: BytesMut::from(&chunk.data[..]),
        }
    }

    fn extend(&mut self, chunk: &Chunk) {
        self.data.extend_from_slice(&chunk.data);
        let finish = chunk.meta.as_deref().and_then(finish);
        // The finish comes with the last chunk of a leaf; later metadata without one erases nothing.
        self.finish = finish.or_else(|| self.finish.take());
    }

    /// `None` for a leaf without content.
    fn item(self, input: &'static str) -> Result<Option<PromptLeaf>> {
        let wrong = |why: String, reason| Err(Error::argument(input, why).because(reason));
        let position = self
            .node
            .map_or_else(String::new, |node| format!(" (node {node:?})"));
        let content = if is_end_of_turn(&self.mime) {
            LeafContent::EndOfTurn
        } else if self.mime.matches(&Mime::TOKENS) {
            match tokens(&self.data) {
                Some(tokens) => LeafContent::Tokens(tokens),
                None => {
                    return wrong(
                        format!("token ids are 4 bytes each{position}"),
                        "BAD_TOKENS",
                    );
                }
            }
        // A suffix is optional: JSON's `null` is none, as in other inputs.
        } else if input == "suffix"
            && self.mime.matches(&Mime::JSON)
            && self.data.trim_ascii() == b"null"
        {
            return Ok(None);
        } else if is_text(&self.mime) {
            match String::from_utf8(self.data.into()) {
                Ok(text) => LeafContent::Text(text),
                Err(_) => return wrong(format!("text that is not UTF-8{position}"), "BAD_TEXT"),
            }
        // An empty node of any type adds nothing, and is no reason to refuse the prompt (EV-301).
        } else if self.data.is_empty() {
            return Ok(None);
        } else {
            // The mimetype is the client's text, so it is cut.
            let mime = shown(&self.mime);
            let why = format!("this model does not take {mime:?}{position}; it takes text");
            return wrong(why, "UNSUPPORTED_MIMETYPE");
        };
        let closed = self
            .finish
            // An answer that was cut at a limit may be continued, like text that the client wrote itself.
            .is_some_and(|finish| finish != ChoiceFinish::Length);
        Ok(Some(PromptLeaf {
            role: self.role,
            content,
            closed,
        }))
    }
}

/// How the answer ended that this metadata belongs to. A prompt reads one choice, whatever its index was.
fn finish(meta: &Meta) -> Option<ChoiceFinish> {
    let first = || meta.finish.values().next();
    meta.finish.get(&0).or_else(first).cloned()
}

fn tokens(data: &[u8]) -> Option<Vec<u32>> {
    let (words, rest) = data.as_chunks::<4>();
    rest.is_empty()
        .then(|| words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// EV-608: text types, in UTF-8 or a subset of it.
fn is_text(mime: &Mime) -> bool {
    let charset = parameter(mime, "charset");
    let utf8 = charset.is_none_or(|charset| {
        ["utf-8", "utf8", "us-ascii"]
            .iter()
            .any(|known| charset.eq_ignore_ascii_case(known))
    });
    utf8 && mime.is_text()
}

/// EV-606.
fn is_end_of_turn(mime: &Mime) -> bool {
    let named = |kind: &str| kind == "EndOfTurn" || kind.ends_with(".EndOfTurn");
    mime.essence()
        .eq_ignore_ascii_case("application/x-protobuf")
        && parameter(mime, "type").is_some_and(named)
}

fn parameter<'a>(mime: &'a Mime, name: &str) -> Option<&'a str> {
    mime.as_str().split(';').skip(1).find_map(|parameter| {
        let (key, value) = parameter.split_once('=')?;
        key.trim()
            .eq_ignore_ascii_case(name)
            .then(|| value.trim().trim_matches('"'))
    })
}

/// The role under the name that templates use (EV-605). `context` is resolved later, when its position is known.
fn canonical(role: &str) -> Name {
    const ROLES: [(&str, &str); 9] = [
        ("", "user"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("model", "assistant"),
        ("system", "system"),
        ("developer", "system"),
        ("tool", "tool"),
        ("function", "tool"),
        ("context", "context"),
    ];
    let known = ROLES
        .iter()
        .find(|(name, _)| role.eq_ignore_ascii_case(name));
    known.map_or_else(|| Name::shared(role), |(_, role)| Name::new(role))
}

/// Reads the input `messages`, in OpenAI's format.
pub(super) fn messages(value: Value) -> Result<Vec<ChatMessage>> {
    let wrong = |why: &str| Error::argument("messages", why);
    let Value::Array(list) = value else {
        return Err(wrong("must be an array of messages"));
    };
    let mut messages = Vec::with_capacity(list.len());
    for entry in list {
        let Value::Object(mut entry) = entry else {
            return Err(wrong(
                "every message must be an object with role and content",
            ));
        };
        let text = |value: Option<Value>| match value {
            Some(Value::String(text)) => Some(text),
            _ => None,
        };
        let role = text(entry.remove("role")).ok_or_else(|| wrong("a message has no role"))?;
        messages.push(ChatMessage {
            role: canonical(&role).to_string(),
            content: content(entry.remove("content"))?,
            // The second is the newer name, which answers of vLLM have.
            reasoning: text(entry.remove("reasoning_content"))
                .or_else(|| text(entry.remove("reasoning"))),
            name: text(entry.remove("name")),
            tool_calls: entry.remove("tool_calls").unwrap_or(Value::Null),
            tool_call_id: text(entry.remove("tool_call_id")),
        });
    }
    insert_context(&mut messages);
    Ok(messages)
}

/// A string, nothing, or a list of text parts.
fn content(value: Option<Value>) -> Result<String> {
    let wrong =
        |why: &str| Error::argument("messages", why).because(ErrorReason::UNSUPPORTED_MIMETYPE);
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => parts
            .iter()
            .map(|part| {
                let text = part.get("text").and_then(Value::as_str);
                text.ok_or_else(|| wrong("this model takes text parts only"))
            })
            .collect(),
        Some(_) => Err(wrong("content must be a string or a list of text parts")),
    }
}

/// `context` is given to the model as `system` before the first user turn, else as `user`.
fn insert_context(messages: &mut [ChatMessage]) {
    let mut seen_user = false;
    for message in messages {
        if message.role == "context" {
            // Many templates accept `system` only in front (EV-605).
            message.role = if seen_user { "user" } else { "system" }.into();
        } else if message.role == "user" {
            seen_user = true;
        }
    }
}

impl PromptInputs {
    /// Bytes of text that [`Self::raw`] tokenises.
    pub(super) fn raw_bytes(&self) -> usize {
        let of = |item: &PromptLeaf| match &item.content {
            LeafContent::Text(text) => text.len(),
            LeafContent::Tokens(_) | LeafContent::EndOfTurn => 0,
        };
        let is_text = |item: &PromptLeaf| matches!(item.content, LeafContent::Text(_));
        match self {
            Self::Items(items) if !items.iter().all(is_text) => items.iter().map(of).sum(),
            Self::Items(_) | Self::Messages(_) => 0,
        }
    }

    /// A conversation for the chat template.
    pub(super) fn chat(self, tools: Value, template_args: Value) -> Result<Prompt> {
        let (messages, continue_last) = match self {
            // `messages` has no way to leave a turn open, so the last one is always complete.
            Self::Messages(messages) => (messages, false),
            Self::Items(items) => turns(items)?,
        };
        Ok(Prompt::Chat(ChatRequest {
            messages,
            tools,
            template_args,
            continue_last,
        }))
    }

    /// The text of all items, concatenated; an end of turn adds nothing. The error of token ids among them is `refused`.
    pub(super) fn text(self, refused: impl Fn() -> Error) -> Result<String> {
        let Self::Items(items) = self else {
            let why = "this model takes the input prompt instead";
            return Err(Error::argument("messages", why));
        };
        let text = items.into_iter().map(|item| match item.content {
            LeafContent::Text(text) => Ok(text),
            LeafContent::EndOfTurn => Ok(String::new()),
            LeafContent::Tokens(_) => Err(refused()),
        });
        text.collect()
    }

    /// The prompt that is to be filled in between these items and `suffix`.
    pub(super) fn infill(self, suffix: String) -> Result<Prompt> {
        let prefix = self.text(|| no_tokens("prompt"))?;
        Ok(Prompt::Infill { prefix, suffix })
    }

    /// The prompt without a template: the concatenated text of all items, or tokens if not all items are text.
    pub(super) fn raw(self, vocabulary: &dyn Vocabulary) -> Result<Prompt> {
        let Self::Items(items) = self else {
            let why = "a model without chat template, or prompt_mode raw, takes the input prompt";
            return Err(Error::argument("messages", why));
        };
        let states = |item: &PromptLeaf| matches!(&item.content, LeafContent::Text(text) if !text.is_empty());
        // Such a vocabulary tokenises everything to nothing, which would silently drop the text.
        if !vocabulary.has_text() && items.iter().any(states) {
            return Err(unknown_tokenizer());
        }
        if items
            .iter()
            .all(|item| matches!(item.content, LeafContent::Text(_)))
        {
            let text = items.into_iter().map(|item| match item.content {
                LeafContent::Text(text) => text,
                LeafContent::Tokens(_) | LeafContent::EndOfTurn => String::new(),
            });
            // Joined before it is tokenised: a token may span two items.
            return Ok(Prompt::Text(text.collect()));
        }
        raw_tokens(items, vocabulary).map(Prompt::Tokens)
    }
}

/// Refuses a suffix for a vocabulary that has no tokens for it.
pub(super) fn check_infill(vocabulary: &dyn Vocabulary) -> Result<()> {
    if !vocabulary.has_text() {
        return Err(unknown_tokenizer());
    }
    match vocabulary.infill() {
        Some(_) => Ok(()),
        None => Err(no_infill().into()),
    }
}

fn unknown_tokenizer() -> Error {
    let what = "a text prompt for a model on another server whose tokenizer is not known";
    Error::Unimplemented { what: what.into() }
}

/// The error of token ids in an input that is part of a prompt for fill in the middle.
pub(super) fn no_tokens(input: &'static str) -> Error {
    let why = "with a suffix, both are text: with token ids, put those for fill in the middle into the prompt";
    Error::argument(input, why).because(ErrorReason::BAD_TOKENS)
}

/// Tokenises raw items of which some are tokens or ends of turns. BOS is added only if the first item is text: a caller
/// that sends tokens chooses its own start.
fn raw_tokens(items: Vec<PromptLeaf>, vocabulary: &dyn Vocabulary) -> Result<Vec<u32>> {
    let mut out = Vec::new();
    if let Some(LeafContent::Text(_)) = items.first().map(|item| &item.content) {
        out.extend(vocabulary.bos());
    }
    for item in items {
        match item.content {
            // `false`: special tokens in a client's text are text (EV-607).
            LeafContent::Text(text) => out.extend(vocabulary.tokenize(&text, false)),
            LeafContent::EndOfTurn => out.extend(vocabulary.end_of_turn()),
            LeafContent::Tokens(tokens) => {
                // Ids come from the client, and a model has no embedding for others.
                if let Some(id) = tokens.iter().find(|id| **id as usize >= vocabulary.size()) {
                    let why = format!("token {id} is outside the vocabulary");
                    return Err(Error::argument("prompt", why).because(ErrorReason::BAD_TOKENS));
                }
                out.extend(tokens);
            }
        }
    }
    Ok(out)
}

/// Groups items into turns (EV-605, EV-606, D-51). Also returns whether the last turn is to be continued: an
/// assistant's that the client wrote itself, or that was truncated at a limit.
fn turns(items: Vec<PromptLeaf>) -> Result<(Vec<ChatMessage>, bool)> {
    let has_output = |item: &PromptLeaf| !matches!(item.content, LeafContent::EndOfTurn);
    let mut dialect = items.iter().filter(|item| has_output(item));
    // Without a user turn, the earlier answers are the question: their role becomes `user`.
    let asked = dialect.any(|item| canonical(&item.role) == "user");
    let mut turns: Vec<ChatMessage> = Vec::new();
    let mut open = false;
    for item in items {
        let text = match item.content {
            LeafContent::Text(text) => text,
            LeafContent::EndOfTurn => {
                open = false;
                continue;
            }
            LeafContent::Tokens(_) => {
                let why = "token ids are taken with prompt_mode raw only";
                return Err(
                    Error::argument("prompt", why).because(ErrorReason::UNSUPPORTED_MIMETYPE)
                );
            }
        };
        let mut role = canonical(&item.role);
        let answers = role == "assistant";
        if answers && !asked {
            role = Name::new("user");
        }
        match turns.last_mut() {
            Some(turn) if open && turn.role == *role => turn.content.push_str(&text),
            _ => turns.push(ChatMessage {
                role: role.to_string(),
                content: text,
                ..ChatMessage::default()
            }),
        }
        // An answer that ended by itself is complete without an EndOfTurn (D-51).
        open = !(answers && asked && item.closed);
    }
    insert_context(&mut turns);
    let last_is_ours = turns.last().is_some_and(|turn| turn.role == "assistant");
    Ok((turns, open && last_is_ours))
}
