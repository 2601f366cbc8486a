//! A script made ready for one prompt: which token comes n-th, when, and what happens instead.
//!
//! Owns: [`Library`] (the scripts of a model) and [`Play`] (one of them for one prompt).
//! Refuses to know: slots and rows. Everything is a function of the number of the output token, so that forks,
//! rewinds and preemptions need no bookkeeping.

use std::sync::Arc;
use std::time::Duration;

use regex::Regex;
use sapwood_proto::code::Code;
use sapwood_proto::steer::Token;

use super::config::{Config, Cut, Finish, Invalid, Script, Step, Tokenizer};
use super::vocabulary::{END, ScriptedVocabulary};
use crate::api::{CUT_CLOSE, CUT_RESET, Fault, Reason, Vocabulary};
use crate::model::Opening;
use crate::ranking::mix;

/// What comes as a sequence's n-th output token.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cue {
    Token(Token),
    End(Reason),
    Fail(Fault),
    Hang,
    Panic,
}

/// A stretch of a script.
#[derive(Clone, Debug)]
enum Part {
    Said(Arc<[Token]>),
    /// Told as one, whatever the model's pieces are.
    Chunk(Arc<[Token]>),
    /// So many words that follow from the key.
    Random {
        count: usize,
        key: u64,
    },
    Pause(Duration),
    /// The script does not go past this.
    Last(Cue),
}

impl Part {
    fn tokens(&self) -> usize {
        match self {
            Self::Said(tokens) | Self::Chunk(tokens) => tokens.len(),
            Self::Random { count, .. } => *count,
            Self::Pause(_) | Self::Last(_) => 0,
        }
    }
}

/// A script for one prompt.
#[derive(Clone, Debug)]
pub(super) struct Play {
    parts: Vec<Part>,
    first: Duration,
    /// Between two tokens; zero is no pace.
    pace: Duration,
    /// Tokens told together; 1 or more.
    per_chunk: usize,
    vocabulary: Arc<ScriptedVocabulary>,
}

impl Play {
    /// What comes as the `n`-th output token, from 0; the end-of-sequence token after the script.
    pub(super) fn cue(&self, n: usize) -> Cue {
        let mut left = n;
        for part in &self.parts {
            match part {
                Part::Said(tokens) | Part::Chunk(tokens) if left < tokens.len() => {
                    return Cue::Token(tokens[left]);
                }
                Part::Random { count, key } if left < *count => {
                    return Cue::Token(self.vocabulary.word(mix(key ^ left as u64)));
                }
                Part::Last(cue) if left == 0 => return cue.clone(),
                _ => left = left.saturating_sub(part.tokens()),
            }
        }
        Cue::Token(END)
    }

    /// Whether the `n`-th output token is told together with the one after it. What is told together begins and ends
    /// within one part, so that nothing waits for a pause or an end.
    pub(super) fn joins(&self, n: usize) -> bool {
        let mut left = n;
        for part in &self.parts {
            let tokens = part.tokens();
            if left < tokens {
                let whole = matches!(part, Part::Chunk(_));
                return left + 1 < tokens && (whole || !(left + 1).is_multiple_of(self.per_chunk));
            }
            left -= tokens;
        }
        false
    }

    /// How long after the start the `n`-th output token is due: its pace and every pause before it.
    pub(super) fn delay(&self, n: usize) -> Duration {
        self.pauses(n, true) + self.paced(n)
    }

    /// The same without the pauses directly before the `n`-th token: what had passed when it became next.
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

    fn pauses(&self, n: usize, inclusive: bool) -> Duration {
        let mut seen = 0;
        let mut total = Duration::ZERO;
        for part in &self.parts {
            if let Part::Pause(span) = part
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
    steps: Vec<Step>,
}

/// The scripts of a model, checked.
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
    ) -> Result<Self, Invalid> {
        if let Some(Tokenizer::File(path)) = &config.tokenizer {
            return Err(Invalid::Tokenizer(path.clone()));
        }
        if !config.tokens_per_s.is_finite() || config.tokens_per_s < 0.0 {
            return Err(Invalid::Range {
                field: "tokens_per_s",
                range: "0 or more",
            });
        }
        if !(0.0..=80.0).contains(&config.gap) {
            return Err(Invalid::Range {
                field: "gap",
                range: "from 0 to 80",
            });
        }
        if config.tokens_per_chunk == 0 {
            return Err(Invalid::Range {
                field: "tokens_per_chunk",
                range: "1 or more",
            });
        }
        let mut rules = Vec::new();
        for rule in std::mem::take(&mut config.rules) {
            let pattern = rule.pattern.map(|pattern| {
                Regex::new(&pattern).map_err(|cause| Invalid::Pattern { pattern, cause })
            });
            for step in &rule.steps {
                if let Step::Error(failure) = step
                    && Code::from_name(&failure.code).is_none()
                {
                    return Err(Invalid::Code(failure.code.clone()));
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

    /// The script for a prompt.
    pub(super) fn play(&self, opening: &Opening<'_>) -> Play {
        let parts = match self.config.script {
            Script::Echo | Script::Words => {
                let subject = self.vocabulary.subject(opening.prompt);
                vec![Part::Said(subject.into())]
            }
            Script::Text => vec![self.say(&self.config.text)],
            Script::Tokens => {
                let count = opening.max_tokens.unwrap_or(self.config.count) as usize;
                vec![Part::Random {
                    count,
                    key: self.key(opening, 0),
                }]
            }
            Script::Steps => self.steps(opening),
        };
        Play {
            parts,
            first: Duration::from_millis(self.config.ttft_ms),
            pace: self.pace,
            per_chunk: self.config.tokens_per_chunk as usize,
            vocabulary: Arc::clone(&self.vocabulary),
        }
    }

    fn steps(&self, opening: &Opening<'_>) -> Vec<Part> {
        let text = self.vocabulary.text(opening.prompt);
        let matching = self.rules.iter().find(|rule| {
            rule.pattern
                .as_ref()
                .is_none_or(|pattern| pattern.is_match(&text))
        });
        let Some(rule) = matching else {
            let fault = Fault::new(Code::InvalidRequest, "NO_RULE", "no rule matches");
            return vec![Part::Last(Cue::Fail(fault))];
        };
        let parts = rule.steps.iter().zip(0..).filter_map(|(step, index)| {
            Some(match step {
                Step::Text(text) => self.say(text),
                Step::Chunk(text) => Part::Chunk(self.tokens(text)),
                Step::Tokens(count) => Part::Random {
                    count: *count as usize,
                    key: self.key(opening, index),
                },
                Step::SleepMs(ms) => Part::Pause(Duration::from_millis(*ms)),
                Step::ToolCall(call) => {
                    let call = serde_json::json!({"name": call.name, "arguments": call.arguments});
                    self.say(&format!("<tool_call>\n{call}\n</tool_call>"))
                }
                Step::Reasoning(thought) => self.say(&format!("<think>\n{thought}\n</think>\n\n")),
                Step::Finish(Finish::Stop | Finish::ToolCalls) => Part::Last(Cue::Token(END)),
                Step::Finish(Finish::Length) => Part::Last(Cue::End(Reason::Length)),
                Step::Error(failure) => Part::Last(Cue::Fail(fault(failure))),
                Step::Hang(true) => Part::Last(Cue::Hang),
                Step::Panic(true) => Part::Last(Cue::Panic),
                Step::Hang(false) | Step::Panic(false) => return None,
                Step::Cut(cut) => Part::Last(Cue::Fail(cut_fault(*cut))),
            })
        });
        parts.collect()
    }

    fn say(&self, text: &str) -> Part {
        Part::Said(self.tokens(text))
    }

    fn tokens(&self, text: &str) -> Arc<[Token]> {
        self.vocabulary.tokenize(text, false).into()
    }

    /// What pseudo-random words follow from: configuration, request and place.
    fn key(&self, opening: &Opening<'_>, place: u64) -> u64 {
        let prompt = opening
            .prompt
            .iter()
            .fold(0, |hash, &token| mix(hash ^ u64::from(token)));
        mix(prompt
            ^ mix(
                self.config.seed ^ mix(opening.seed ^ mix(u64::from(opening.choice) << 32 | place))
            ))
    }
}

fn fault(failure: &super::config::Failure) -> Fault {
    // `Library::new` has checked the name.
    let code = Code::from_name(&failure.code).unwrap_or(Code::Internal);
    Fault::new(code, "scripted", failure.message.clone())
}

fn cut_fault(cut: Cut) -> Fault {
    let reason = match cut {
        Cut::Close => CUT_CLOSE,
        Cut::Reset => CUT_RESET,
    };
    Fault::new(Code::Truncated, reason, "the script cuts the stream here")
}
