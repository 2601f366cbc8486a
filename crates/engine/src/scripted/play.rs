//! A script prepared for one prompt: which token is the n-th, when it is due, and which failures occur.
//!
//! Everything is a function of the index of the output token, so that forks, rewinds and preemptions need no
//! bookkeeping.

use std::sync::Arc;
use std::time::Duration;

use regex::Regex;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use super::config::{
    Config, InvalidScript, Script, ScriptFinish, ScriptStep, ScriptedTokenizer, TransportCut,
};
use super::vocabulary::{END, ScriptedVocabulary};
use crate::api::{EngineError, FinishReason, Vocabulary};
use crate::model::SlotPurpose;
use crate::ranking::mix;

/// What a script does at the n-th output token.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cue {
    Token(Token),
    End(FinishReason),
    Fail(EngineError),
    Hang,
    Panic,
}

/// A part of a script.
#[derive(Clone, Debug)]
enum ScriptPart {
    Emitted(Arc<[Token]>),
    /// Reported as one event, however many tokens the model usually reports together.
    Chunk(Arc<[Token]>),
    /// This many words, derived from the key.
    Random {
        count: usize,
        key: u64,
    },
    Pause(Duration),
    /// The script ends here.
    Last(Cue),
}

impl ScriptPart {
    fn tokens(&self) -> usize {
        match self {
            Self::Emitted(tokens) | Self::Chunk(tokens) => tokens.len(),
            Self::Random { count, .. } => *count,
            Self::Pause(_) | Self::Last(_) => 0,
        }
    }
}

/// A script for one prompt.
#[derive(Clone, Debug)]
pub(super) struct ScriptPlayback {
    parts: Vec<ScriptPart>,
    first: Duration,
    /// The time between two tokens; zero: no delay.
    pace: Duration,
    /// Number of tokens reported together; 1 or more.
    per_chunk: usize,
    vocabulary: Arc<ScriptedVocabulary>,
}

impl ScriptPlayback {
    /// Returns the cue of the `n`-th output token, from 0; the EOG token after the end of the script.
    #[inline]
    pub(super) fn cue(&self, n: usize) -> Cue {
        let mut left = n;
        for part in &self.parts {
            match part {
                ScriptPart::Emitted(tokens) | ScriptPart::Chunk(tokens) if left < tokens.len() => {
                    return Cue::Token(tokens[left]);
                }
                ScriptPart::Random { count, key } if left < *count => {
                    // Derived from the position, not from a generator with state: a preempted sequence repeats the same
                    // words.
                    return Cue::Token(self.vocabulary.word(mix(key ^ left as u64)));
                }
                ScriptPart::Last(cue) if left == 0 => return cue.clone(),
                _ => left = left.saturating_sub(part.tokens()),
            }
        }
        Cue::Token(END)
    }

    /// Returns whether the `n`-th output token is reported together with the one after it. Tokens reported together
    /// belong to one part, so that no token waits for a pause or an end.
    pub(super) fn joins(&self, n: usize) -> bool {
        let mut left = n;
        for part in &self.parts {
            let tokens = part.tokens();
            if left < tokens {
                let whole = matches!(part, ScriptPart::Chunk(_));
                // The last token of a part never waits: what follows may be a pause, and the reader would see it too
                // late.
                return left + 1 < tokens && (whole || !(left + 1).is_multiple_of(self.per_chunk));
            }
            left -= tokens;
        }
        false
    }

    /// Returns how long after the start the `n`-th output token is due: its pace and every pause before it.
    #[inline]
    pub(super) fn delay(&self, n: usize) -> Duration {
        self.pauses(n, true) + self.paced(n)
    }

    /// Returns the same without the pauses directly before the `n`-th token: the time that had passed when it became
    /// the next token.
    #[inline]
    pub(super) fn delay_before(&self, n: usize) -> Duration {
        if n == 0 {
            Duration::ZERO
        } else {
            self.pauses(n, false) + self.paced(n)
        }
    }

    fn paced(&self, n: usize) -> Duration {
        self.first
            + self
                .pace
                .saturating_mul(u32::try_from(n).unwrap_or(u32::MAX))
    }

    #[inline]
    fn pauses(&self, n: usize, inclusive: bool) -> Duration {
        let mut seen = 0;
        let mut total = Duration::ZERO;
        for part in &self.parts {
            // Pauses add up, and those before the token itself count only if it is to be emitted.
            if let ScriptPart::Pause(span) = part
                && (seen < n || inclusive && seen == n)
            {
                total = total.saturating_add(*span);
            }
            seen += part.tokens();
        }
        total
    }
}

#[derive(Debug)]
struct CheckedRule {
    pattern: Option<Regex>,
    steps: Vec<ScriptStep>,
}

/// The validated scripts of a model.
#[derive(Debug)]
pub(super) struct Library {
    config: Config,
    rules: Vec<CheckedRule>,
    pace: Duration,
    vocabulary: Arc<ScriptedVocabulary>,
}

impl Library {
    pub(super) fn new(
        mut config: Config,
        vocabulary: Arc<ScriptedVocabulary>,
    ) -> Result<Self, InvalidScript> {
        // Refused here rather than when it is parsed, so that the message can say what to use instead.
        if let Some(ScriptedTokenizer::File(path)) = &config.tokenizer {
            return Err(InvalidScript::Tokenizer(path.clone()));
        }
        let rate = config.tokens_per_s;
        let ranges = [
            ("tokens_per_s", "0 or more", rate.is_finite() && rate >= 0.0),
            ("gap", "from 0 to 80", (0.0..=80.0).contains(&config.gap)),
            ("tokens_per_chunk", "1 or more", config.tokens_per_chunk > 0),
        ];
        if let Some(&(field, range, _)) = ranges.iter().find(|(.., holds)| !holds) {
            return Err(InvalidScript::Range { field, range });
        }
        let mut rules = Vec::new();
        for rule in std::mem::take(&mut config.rules) {
            let pattern = rule.pattern.map(|pattern| {
                Regex::new(&pattern).map_err(|cause| InvalidScript::Pattern { pattern, cause })
            });
            for step in &rule.steps {
                if let ScriptStep::Error(failure) = step
                    && Code::from_name(&failure.code).is_none()
                {
                    return Err(InvalidScript::Code(failure.code.clone()));
                }
            }
            rules.push(CheckedRule {
                pattern: pattern.transpose()?,
                steps: rule.steps,
            });
        }
        let pace = match config.tokens_per_s {
            0.0 => Duration::ZERO,
            rate => Duration::try_from_secs_f64(rate.recip()).unwrap_or(Duration::MAX),
        };
        Ok(Self {
            config,
            rules,
            pace,
            vocabulary,
        })
    }

    /// Returns the script for a prompt.
    pub(super) fn play(&self, opening: &SlotPurpose<'_>) -> ScriptPlayback {
        let parts = match self.config.script {
            Script::Echo | Script::Words => {
                let subject = self.vocabulary.subject(opening.prompt);
                vec![ScriptPart::Emitted(subject.into())]
            }
            Script::Text => vec![self.text_part(&self.config.text)],
            Script::Tokens => {
                // As many as the request wants, so that load tests choose the length with `max_tokens`.
                let count = opening.max_tokens.unwrap_or(self.config.count) as usize;
                vec![ScriptPart::Random {
                    count,
                    key: self.key(opening, 0),
                }]
            }
            Script::Steps => self.steps(opening),
        };
        ScriptPlayback {
            parts,
            first: Duration::from_millis(self.config.ttft_ms),
            pace: self.pace,
            per_chunk: self.config.tokens_per_chunk as usize,
            vocabulary: Arc::clone(&self.vocabulary),
        }
    }

    fn steps(&self, opening: &SlotPurpose<'_>) -> Vec<ScriptPart> {
        let text = self.vocabulary.text(opening.prompt);
        // The first match wins, in the order of the configuration.
        let matching = self.rules.iter().find(|rule| {
            rule.pattern
                .as_ref()
                .is_none_or(|pattern| pattern.is_match(&text))
        });
        let Some(rule) = matching else {
            let error = EngineError::invalid(ErrorReason::NO_RULE, "no rule matches");
            return vec![ScriptPart::Last(Cue::Fail(error))];
        };
        let parts = rule.steps.iter().zip(0..).filter_map(|(step, index)| {
            Some(match step {
                ScriptStep::Text(text) => self.text_part(text),
                ScriptStep::Chunk(text) => ScriptPart::Chunk(self.tokens(text)),
                ScriptStep::Tokens(count) => ScriptPart::Random {
                    count: *count as usize,
                    key: self.key(opening, index),
                },
                ScriptStep::SleepMs(ms) => ScriptPart::Pause(Duration::from_millis(*ms)),
                ScriptStep::ToolCall(call) => {
                    let call = serde_json::json!({"name": call.name, "arguments": call.arguments});
                    self.text_part(&format!("<tool_call>\n{call}\n</tool_call>"))
                }
                ScriptStep::Reasoning(thought) => {
                    self.text_part(&format!("<think>\n{thought}\n</think>\n\n"))
                }
                ScriptStep::Finish(ScriptFinish::Stop | ScriptFinish::ToolCalls) => {
                    ScriptPart::Last(Cue::Token(END))
                }
                ScriptStep::Finish(ScriptFinish::Length) => {
                    ScriptPart::Last(Cue::End(FinishReason::Length))
                }
                ScriptStep::Error(failure) => ScriptPart::Last(Cue::Fail(to_engine_error(failure))),
                ScriptStep::Hang(true) => ScriptPart::Last(Cue::Hang),
                ScriptStep::Panic(true) => ScriptPart::Last(Cue::Panic),
                // The steps have a value only because of the format of configurations; `false` switches them off.
                ScriptStep::Hang(false) | ScriptStep::Panic(false) => return None,
                ScriptStep::Cut(cut) => ScriptPart::Last(Cue::Fail(cut_error(*cut))),
            })
        });
        parts.collect()
    }

    fn text_part(&self, text: &str) -> ScriptPart {
        ScriptPart::Emitted(self.tokens(text))
    }

    fn tokens(&self, text: &str) -> Arc<[Token]> {
        self.vocabulary.tokenize(text, false).into()
    }

    /// Returns the key from which pseudo-random words are derived: configuration, request and position.
    fn key(&self, opening: &SlotPurpose<'_>, position: u64) -> u64 {
        let prompt = opening
            .prompt
            .iter()
            .fold(0, |hash, &token| mix(hash ^ u64::from(token)));
        mix(prompt
            ^ mix(self.config.seed
                ^ mix(opening.seed ^ mix(u64::from(opening.choice) << 32 | position))))
    }
}

fn to_engine_error(failure: &super::config::ScriptedFailure) -> EngineError {
    // `Library::new` has checked the name.
    let code = Code::from_name(&failure.code).unwrap_or(Code::Internal);
    EngineError::new(code, ErrorReason::SCRIPTED, failure.message.clone())
}

fn cut_error(cut: TransportCut) -> EngineError {
    let reason = match cut {
        TransportCut::Close => ErrorReason::CUT_CLOSE,
        TransportCut::Reset => ErrorReason::CUT_RESET,
    };
    EngineError::new(Code::Truncated, reason, "the script cuts the stream here")
}
