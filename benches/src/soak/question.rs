//! [`SoakQuestion`]: what the clients ask. There are few different questions, because each is also answered alone.

use serde_json::{Value, json};

use crate::side::prompt;

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errand {
    /// The most probable tokens.
    Greedy,
    /// The same, after the answer to a first turn.
    SecondTurn,
    /// A prompt that fills most of the context.
    LongPrompt,
    /// Random tokens with a seed.
    Sampled,
    /// Several choices of one prompt, random with a seed.
    Choices,
    /// A regular expression or a JSON Schema.
    Constrained,
    /// A text that ends the answer.
    Stop,
    /// The client leaves in the middle of an answer.
    Cancel,
    /// The client leaves before there is an answer.
    Leave,
}

impl Errand {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Greedy,
        Self::SecondTurn,
        Self::LongPrompt,
        Self::Sampled,
        Self::Choices,
        Self::Constrained,
        Self::Stop,
        Self::Cancel,
        Self::Leave,
    ];
}

/// A request without what only concerns its response.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SoakQuestion {
    prompt: String,
    /// A JSON object, as text.
    sampling: String,
    sampled: bool,
}

impl SoakQuestion {
    fn new(prompt: String, sampling: &Value) -> Self {
        Self {
            prompt,
            sampling: sampling.to_string(),
            sampled: sampling.get("seed").is_some(),
        }
    }

    /// The body of the request, with so many log-probabilities for each token.
    #[must_use]
    pub fn body(&self, logprobs: Option<u32>) -> String {
        let mut sampling = self.sampling.clone();
        if let Some(count) = logprobs {
            // Before the closing brace of an object with members.
            sampling.truncate(sampling.len() - 1);
            sampling += &format!(",\"logprobs\":{count}}}");
        }
        json!({"text_input": self.prompt, "stream": true, "return_finish_reason": true,
            "return_logprobs": logprobs.is_some(), "sampling_parameters": sampling})
        .to_string()
    }

    /// Whether tokens are random.
    #[must_use]
    pub const fn is_sampled(&self) -> bool {
        self.sampled
    }

    /// The next turn, after this answer.
    #[must_use]
    pub fn next_turn(&self, answer: &str, dice: &mut Dice) -> Self {
        let prompt = format!("{}{answer}{}", self.prompt, dice.pick(&QUESTIONS[..2]));
        Self::new(prompt, &greedy(dice))
    }

    /// The same question, ended by a part of this answer.
    #[must_use]
    pub fn ended_by(&self, answer: &str) -> Self {
        let stop = answer.split_whitespace().nth(STOP_WORD).unwrap_or("the");
        let sampling = json!({"temperature": 0, "max_tokens": TOKENS_MAX, "stop": [stop]});
        Self::new(self.prompt.clone(), &sampling)
    }
}

/// Draws the question of an errand; that of a second turn or a stop text is the one before it.
#[must_use]
pub fn question(errand: Errand, dice: &mut Dice) -> SoakQuestion {
    // Few different beginnings, of which a cache of a few prefixes holds some.
    let system = dice.below(SYSTEMS);
    let text = prompt(1000 + system, SYSTEM_WORDS + 10 * system);
    let question = *dice.pick(&QUESTIONS);
    let text = text + question;
    match errand {
        Errand::Greedy | Errand::SecondTurn | Errand::Stop => {
            SoakQuestion::new(text, &greedy(dice))
        }
        Errand::LongPrompt => {
            let long = prompt(2000 + system, LONG_WORDS + system);
            SoakQuestion::new(long, &greedy(dice))
        }
        Errand::Sampled => SoakQuestion::new(text, &sampled(1, dice)),
        Errand::Choices => {
            let count = 2 + system % 2;
            SoakQuestion::new(prompt(3000 + system, SYSTEM_WORDS), &sampled(count, dice))
        }
        Errand::Constrained => SoakQuestion::new(text, &constrained(dice)),
        Errand::Cancel | Errand::Leave => {
            let sampling = json!({"temperature": 1.0, "max_tokens": 200, "ignore_eos": true});
            SoakQuestion::new(text, &sampling)
        }
    }
}

fn greedy(dice: &mut Dice) -> Value {
    let tokens = *dice.pick(&[8, TOKENS_MAX]);
    json!({"temperature": 0, "max_tokens": tokens})
}

fn sampled(choices: usize, dice: &mut Dice) -> Value {
    let seed = dice.below(2);
    json!({"temperature": 0.8, "top_p": 0.9, "seed": seed, "n": choices, "max_tokens": 12})
}

fn constrained(dice: &mut Dice) -> Value {
    let mut sampling = json!({"temperature": 0, "max_tokens": TOKENS_MAX});
    if dice.below(2) == 0 {
        sampling["regex"] = json!("[A-Z][a-z]{2,9}( [a-z]{2,7}){2,4}, [0-9]{2}\\.");
    } else {
        sampling["json_schema"] = json!({"type": "object", "additionalProperties": false,
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
            "required": ["name", "age"]});
    }
    sampling
}

/// Pseudo-random numbers from a seed.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The same seed gives the same numbers.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `count`.
    pub fn below(&mut self, count: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // The remainder is below `count`.
        usize::try_from((mixed ^ (mixed >> 31)) % count.max(1) as u64).unwrap_or(0)
    }

    /// One of these.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// Different beginnings of prompts.
const SYSTEMS: usize = 5;
/// Words of the shortest beginning, each about a token.
const SYSTEM_WORDS: usize = 50;
/// Words of a prompt that fills most of a context of 512 tokens.
const LONG_WORDS: usize = 400;
/// Tokens of an answer.
const TOKENS_MAX: usize = 32;
/// The word of an answer that ends it the next time.
const STOP_WORD: usize = 4;
/// What ends a prompt.
const QUESTIONS: [&str; 4] = [
    "\n\nWhat happened to the boat on the next day?\n\n",
    "\n\nAnd who wrote the letter from the town?\n\n",
    "\n\nWhy did the mill close?\n\n",
    "",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_questions() {
        let drawn = |seed| {
            let mut dice = Dice::new(seed);
            let questions = Errand::ALL.map(|errand| question(errand, &mut dice));
            questions.map(|it| it.body(None))
        };
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
    }

    #[test]
    fn log_probabilities_are_added_to_what_is_asked() {
        let mut dice = Dice::new(1);
        let question = question(Errand::Constrained, &mut dice);
        let body: Value = serde_json::from_str(&question.body(Some(6))).unwrap();
        let sampling = body["sampling_parameters"].as_str().unwrap();
        let sampling: Value = serde_json::from_str(sampling).unwrap();
        assert_eq!(sampling["logprobs"], 6);
        assert_eq!(sampling["max_tokens"], TOKENS_MAX);
    }

    #[test]
    fn an_answer_ends_with_one_of_its_words_and_has_a_next_turn() {
        let mut dice = Dice::new(3);
        let first = question(Errand::Stop, &mut dice);
        let ended = first.ended_by("one two three four five six");
        assert!(
            ended.sampling.contains(r#""stop":["five"]"#),
            "{}",
            ended.sampling
        );
        let next = first.next_turn(" yes.", &mut dice);
        assert!(next.prompt.starts_with(&(first.prompt + " yes.")));
    }
}
