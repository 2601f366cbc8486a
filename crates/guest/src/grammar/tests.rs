//! Grammars as they are computed here. The host's are tested by running modules.

use super::*;
use crate::testing::{End, Scenario};
use crate::{Controller, arg, tokenize};

/// Follows the kind before the colon of its argument, with the pattern after it.
#[derive(Clone)]
struct Follower {
    grammar: Grammar,
    step: usize,
}

impl Default for Follower {
    fn default() -> Self {
        let argument: String = arg();
        let (kind, pattern) = argument.split_once(':').unwrap();
        let grammar = Grammar::new(kind, pattern).unwrap_or_else(|error| panic!("{error}"));
        Self { grammar, step: 0 }
    }
}

impl Controller for Follower {
    fn step(&mut self, step: Step<'_>) -> Decision {
        assert!(self.grammar.follow(&step));
        self.step += 1;
        self.grammar.decide()
    }
}

#[test]
fn ai_1007_options_and_pieces_are_computed_without_a_host() {
    // Where nothing but the end is allowed, the sequence ends; where it is one of several, the controller sees it.
    for (argument, preferred, text, end) in [
        (
            r#"options:["red","green","grey"]"#,
            "grass",
            "green",
            End::Eos,
        ),
        (r#"options:["red","redder"]"#, "redder", "redder", End::Eos),
        (r#"options:["red","redder"]"#, "red", "red", End::Stop),
        ("substring:all the leaves", "the le", "the le", End::Stop),
        (
            "substring:all the leaves",
            "leaves fall",
            "leaves",
            End::Eos,
        ),
    ] {
        let scenario = Scenario::new("").argument(argument).prefers([preferred]);
        let run = scenario.run::<Follower>();
        assert_eq!(
            (run.texts(), &run.sequences[0].end),
            (vec![text], &end),
            "{argument}"
        );
    }
}

#[test]
fn ai_1007_what_is_no_grammar_fails_the_request() {
    for (argument, why) in [
        ("options:{}", "options are a JSON list"),
        ("options:[1]", "options are a JSON list"),
        ("options:[]", "1 to 64 options"),
        (r#"options:["a",""]"#, "no empty one"),
        ("regex:a", "the feature `host`"),
    ] {
        let run = Scenario::new("").argument(argument).run::<Follower>();
        let end = &run.sequences[0].end;
        assert!(
            matches!(end, End::Failed(text) if text.contains(why)),
            "{argument}: {end}"
        );
    }
}

/// Walks one way and back, then the other.
#[derive(Clone, Default)]
struct Walker;

impl Controller for Walker {
    fn step(&mut self, _step: Step<'_>) -> Decision {
        let mut grammar = Grammar::new("options", r#"["no","nope"]"#).unwrap();
        let (no, end) = (tokenize("no")[0], eos_token());
        assert!(!grammar.push(end) && grammar.push(no));
        let other = grammar.clone();
        assert!(grammar.push(end) && grammar.has_ended() && !grammar.push(end));
        assert!(Allowed::from(grammar.allowed()).mask().is_empty() && grammar.forced().is_empty());
        assert_eq!(grammar.decide(), Decision::Stop);
        let back = |backtrack| Step {
            backtrack,
            ..Step::default()
        };
        assert!(grammar.follow(&back(1)) && !grammar.has_ended());
        assert_eq!(grammar.allowed(), other.allowed());
        // More than there are: back to the start.
        assert!(grammar.follow(&back(9)));
        assert_eq!(grammar.forced(), tokenize("no"));
        // Words that begin with an n, and all others but them.
        let n = TokenSet::prefix("n");
        let both = n.clone().and(&grammar.allowed());
        assert_eq!(both, grammar.allowed());
        let all = Allowed::from(n.clone().or(&n.clone().not()));
        assert_eq!(all.mask(), &Mask::all());
        assert!(Allowed::from(n.clone().and(&n.not())).mask().is_empty());
        let long = Allowed::from(TokenSet::prefix("the"));
        let words = ["t", "th", "the"].map(|word| tokenize(word)[0]);
        assert_eq!(long.mask(), &Mask::of(&words));
        Decision::Stop
    }
}

#[test]
fn ai_1007_a_grammar_follows_what_is_taken_back() {
    let run = Scenario::new("").run::<Walker>();
    assert_eq!(run.sequences[0].end, End::Stop);
}
