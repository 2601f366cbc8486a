//! [`Callback`]: the calls into a controller, and their arguments as JSON (AI-604).

use std::fmt::Write as _;
use std::time::Duration;

use sapwood_proto::steer::Token;

use super::config::HostConfig;

/// A call into a controller. `Pre`, `Mid` and `Post` are for P1 modules, `Process` for P2 modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Callback {
    /// Start of a step.
    Pre,
    /// What to sample.
    Mid {
        /// Ids of the sequences that the last fork made, or of this one alone.
        fork_group: Vec<u32>,
    },
    /// What happened.
    Post {
        /// Committed tokens taken back.
        backtrack: u32,
        /// Tokens appended.
        tokens: Vec<Token>,
    },
    /// What happened, and what to sample.
    Process {
        /// Committed tokens taken back.
        backtrack: u32,
        /// Tokens appended.
        tokens: Vec<Token>,
        /// The token that was sampled.
        sampled: Option<Token>,
        /// As in `Mid`.
        fork_group: Vec<u32>,
    },
}

impl Callback {
    /// The argument, as the guest reads it from blob 4.
    pub(super) fn argument(&self) -> Vec<u8> {
        let mut json = Json(String::new());
        match self {
            Self::Pre => json.0.push_str("{}"),
            Self::Mid { fork_group } => {
                json.list("{\"fork_group\":", fork_group).0.push('}');
            }
            Self::Post { backtrack, tokens } => {
                json.list("{\"tokens\":", tokens);
                let _ = write!(json.0, ",\"backtrack\":{backtrack}}}");
            }
            Self::Process {
                backtrack,
                tokens,
                sampled,
                fork_group,
            } => {
                let _ = write!(json.0, "{{\"backtrack\":{backtrack}");
                json.list(",\"tokens\":", tokens);
                match sampled {
                    Some(token) => {
                        let _ = write!(json.0, ",\"sampled\":{token}");
                    }
                    None => json.0.push_str(",\"sampled\":null"),
                }
                json.list(",\"fork_group\":", fork_group).0.push('}');
            }
        }
        json.0.into_bytes()
    }

    /// Whether the model computes before the next callback.
    pub(super) const fn ends_round(&self) -> bool {
        matches!(self, Self::Mid { .. } | Self::Process { .. })
    }

    /// Whether it is the first of a step of its sequence.
    pub(super) const fn begins_step(&self) -> bool {
        matches!(self, Self::Pre | Self::Process { .. })
    }

    /// How long it may run before it is interrupted. Fuel ends it elsewhere, but not whatever a host function does, and
    /// there may be much of it, so there is a limit beside fuel, which is far away (AI-733).
    pub(super) fn time_limit(&self, config: &HostConfig) -> Duration {
        let time = self
            .step_time(config)
            .saturating_mul(config.late_steps.max(1))
            .saturating_add(config.grace_time);
        match config.fuel {
            Some(_) => time.saturating_mul(TIMES_BESIDE_FUEL),
            None => time,
        }
    }

    /// After how long it is late.
    pub(super) const fn step_time(&self, config: &HostConfig) -> Duration {
        match self {
            Self::Pre | Self::Post { .. } => config.pre_step_time,
            Self::Mid { .. } | Self::Process { .. } => config.step_time,
        }
    }
}

/// With fuel a callback may run for so many times its usual limit.
const TIMES_BESIDE_FUEL: u32 = 10;

/// The argument of `aici_init_prompt`.
pub(super) fn init_argument(prompt: &[Token]) -> Vec<u8> {
    let mut json = Json(String::with_capacity(prompt.len() * 6 + 16));
    json.list("{\"prompt\":", prompt).0.push('}');
    json.0.into_bytes()
}

struct Json(String);

impl Json {
    fn list(&mut self, name: &str, numbers: &[u32]) -> &mut Self {
        self.0.push_str(name);
        self.0.push('[');
        for (index, number) in numbers.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(self.0, "{comma}{number}");
        }
        self.0.push(']');
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_604_arguments_of_the_callbacks() {
        let check = |callback: Callback, expected: &str| {
            assert_eq!(String::from_utf8(callback.argument()).unwrap(), expected);
        };
        check(Callback::Pre, "{}");
        let fork_group = vec![4, 5];
        check(Callback::Mid { fork_group }, r#"{"fork_group":[4,5]}"#);
        let post = Callback::Post {
            backtrack: 2,
            tokens: vec![7],
        };
        check(post, r#"{"tokens":[7],"backtrack":2}"#);
        let process = |sampled| Callback::Process {
            backtrack: 0,
            tokens: Vec::new(),
            sampled,
            fork_group: vec![1],
        };
        check(
            process(None),
            r#"{"backtrack":0,"tokens":[],"sampled":null,"fork_group":[1]}"#,
        );
        check(
            process(Some(9)),
            r#"{"backtrack":0,"tokens":[],"sampled":9,"fork_group":[1]}"#,
        );
        assert_eq!(init_argument(&[1, 22]), br#"{"prompt":[1,22]}"#);
    }
}
