use std::collections::BTreeMap;

use super::*;
use crate::constraint::Pattern;
use crate::native::Model as _;
use crate::testing::vocabulary::encode_trie;
use crate::{Decision, Matcher, Step, TokenTrie, TrieError, Vars};

/// AI-630, AI-631
#[test]
fn ai_630_walks_agree_with_the_list_of_tokens() {
    let model = ToyModel::new();
    let trie = model.trie();
    let automata: [fn(&[u8]) -> bool; 5] = [
        |_| true,
        |_| false,
        |bytes| bytes.iter().all(u8::is_ascii_lowercase),
        |bytes| b" the end".starts_with(bytes),
        |bytes| bytes.len() < 3 && !bytes.contains(&b'e'),
    ];
    for accepts in automata {
        let mask = trie.mask_of(Vec::new(), |taken: &Vec<u8>, byte| {
            let taken = [taken.as_slice(), &[byte]].concat();
            accepts(&taken).then_some(taken)
        });
        for (bytes, token) in model.tokens().iter().zip(0..) {
            assert_eq!(mask.allows(token), accepts(bytes), "{bytes:?}");
            assert_eq!(trie.token_bytes(token), bytes);
        }
    }
    assert_eq!(trie.token_bytes(100_000), b"");
    assert!(trie.is_special(ToyModel::EOS) && !trie.is_special(0));
}

/// AI-630: the worked example of the layout: tokens `a`, `ab`, `b`, an empty one, and end of sequence.
#[test]
fn ai_630_bytes_of_a_small_trie() {
    let tokens = [&b"a"[..], b"ab", b"b", b"", b"\xff/s"].map(<[u8]>::to_vec);
    let bytes = encode_trie(&tokens, 4);
    let words: Vec<u32> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&word| u32::from_le_bytes(word))
        .collect();
    assert_eq!(bytes[..4], [0xd3, 0x6f, 0x8b, 0x55]);
    assert_eq!(words[1..7], [28, 56, 20, 7, 5, 4]);
    let nodes: Vec<_> = words[7..21]
        .as_chunks::<2>()
        .0
        .iter()
        .map(|&[token, subtree]| (token >> 8, token as u8, subtree >> 8, subtree & 0xff))
        .collect();
    let none = 0xff_ffff;
    assert_eq!(
        nodes[..4],
        [
            (none, 0xff, 7, 0),
            (0, b'a', 2, 1),
            (1, b'b', 1, 2),
            (2, b'b', 1, 1)
        ]
    );
    assert_eq!(
        nodes[4..],
        [(none, 0xff, 3, 1), (none, b'/', 2, 2), (4, b's', 1, 3)]
    );
    assert!(TokenTrie::new(bytes).is_ok());
}

#[test]
fn bytes_that_are_no_trie_are_refused() {
    let good = encode_trie(&[b"a".to_vec(), b"b".to_vec()], 1);
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        TokenTrie::new(bytes).err()
    };
    assert_eq!(changed(0, 0), Some(TrieError));
    assert_eq!(changed(4, 24), Some(TrieError));
    // Node bytes: beyond the end, not a multiple of a node, none at all.
    assert_eq!(changed(11, 0xff), Some(TrieError));
    assert_eq!(changed(8, 25), Some(TrieError));
    assert_eq!(changed(8, 0), Some(TrieError));
    // More tokens than offsets.
    assert_eq!(changed(20, 3), Some(TrieError));
    assert_eq!(TokenTrie::new(good[..20].to_vec()).err(), Some(TrieError));
    // Counts within the nodes are not checked; a walk ends in any case.
    for at in 28..52 {
        for byte in [0, 1, 0xff] {
            let mut bytes = good.clone();
            bytes[at] = byte;
            let _ = TokenTrie::new(bytes).unwrap().mask_of((), |(), _| Some(()));
            let mut bytes = good.clone();
            bytes[at] = byte;
            let _ = TokenTrie::new(bytes)
                .unwrap()
                .mask_of((), |(), byte| (byte == b'b').then_some(()));
        }
    }
}

#[test]
fn the_tokenizer_takes_the_longest_token() {
    let model = ToyModel::new();
    let text = "yes, the end\u{e9}";
    let tokens = model.tokenize_text(text.as_bytes());
    assert_eq!(model.trie().decode(&tokens), text.as_bytes());
    assert_eq!(model.trie().token_bytes(tokens[0]), b"yes");
}

/// Says "Age: " and lets the model choose a number.
#[derive(Clone)]
struct Age(Matcher<Pattern>);

impl Default for Age {
    fn default() -> Self {
        let digits = crate::constraint::ByteClass::DIGIT;
        Self(Matcher::new(
            Pattern::new().text("Age: ").some_of(digits, 1..=3),
        ))
    }
}

impl Controller for Age {
    fn step(&mut self, step: Step<'_>) -> Decision {
        assert!(self.0.follow(&step), "not allowed: {:?}", step.tokens);
        self.0.decide()
    }
}

#[test]
fn matchers_force_text_and_end_at_the_end_of_the_sequence() {
    let run = run::<Age>("", "", "Age: 10 years");
    assert_eq!(
        (run.texts(), &run.sequences[0].end),
        (vec!["Age: 10"], &End::Stop)
    );
    let run = super::run::<Age>("", "", "Age: 1010");
    assert_eq!(
        (run.texts(), &run.sequences[0].end),
        (vec!["Age: 101"], &End::Stop)
    );
}

#[test]
fn an_end_that_is_taken_back_has_not_ended_the_text() {
    let variables = Arc::new(SharedVariables::default());
    let model = Arc::new(ToyModel::new());
    let mut age = NativeController::<Age>::new(model.clone(), "", variables).unwrap();
    let text = model.tokenize_text(b"Age: 1");
    let mut stops = |backtrack: u32, tokens: &[Token]| {
        let step = Step {
            backtrack,
            tokens,
            ..Step::default()
        };
        age.step(step).unwrap().is_empty()
    };
    assert!(!stops(0, &text));
    assert!(stops(0, &[ToyModel::EOS, ToyModel::EOS]));
    assert!(stops(1, &[]), "the first one is still there");
    assert!(!stops(1, &[]));
    assert!(!stops(0, &model.tokenize_text(b"2")));
    assert!(stops(1, &[ToyModel::EOS]));
    assert!(!stops(1, &model.tokenize_text(b"3")));
}

/// Forks into as many sequences as its argument is.
#[derive(Clone, Default)]
struct Forks {
    steps: u32,
}

impl Controller for Forks {
    fn step(&mut self, step: Step<'_>) -> Decision {
        self.steps += 1;
        crate::log!("{}: {:?}", crate::self_id(), step.fork_group);
        match self.steps {
            1 => Decision::Fork(vec![crate::Branch::Noop; crate::arg()]),
            2 => {
                let index = step.fork_index();
                Vars::append("members", index.to_string());
                Decision::fast_forward(crate::tokenize(index.to_string()))
            }
            3 => Decision::Noop,
            _ => Decision::Stop,
        }
    }
}

#[test]
fn forks_see_their_group_once() {
    let run = Scenario::new("").argument("3").run::<Forks>();
    assert_eq!(run.texts(), ["0", "1", "2"]);
    assert_eq!(run.variable("members"), "012");
    assert_eq!(
        run.sequences[0].logs,
        "0: [0]\n0: [0, 1, 2]\n0: [0]\n0: [0]\n"
    );
    assert_eq!(run.sequences[2].logs, "2: [0, 1, 2]\n2: [2]\n2: [2]\n");
    let failed = Scenario::new("").argument("65").run::<Forks>();
    assert_eq!(
        failed.sequences[0].end,
        End::Failed("too many forks".into())
    );
    let failed = Scenario::new("").argument("three").run::<Forks>();
    let message = "invalid controller argument: expected a natural number";
    assert_eq!(failed.sequences[0].end, End::Failed(message.into()));
}

/// Waits for ever.
#[derive(Clone, Default)]
struct Waits;

impl Controller for Waits {
    fn step(&mut self, _step: Step<'_>) -> Decision {
        Decision::Noop
    }
}

#[test]
fn waiting_for_nothing_is_a_deadlock() {
    let run = run::<Waits>("", "", "");
    assert_eq!(run.sequences[0].end, End::Deadlock);
    assert_eq!(run.variables, BTreeMap::new());
}

/// Takes back more than there is.
#[derive(Clone, Default)]
struct Backtracks;

impl Controller for Backtracks {
    fn step(&mut self, step: Step<'_>) -> Decision {
        match step.tokens.len() {
            0 => Decision::fast_forward(crate::tokenize("abc")),
            len => Decision::Splice {
                backtrack: len as u32 + crate::arg::<u32>(),
                tokens: crate::tokenize("d"),
            },
        }
    }
}

#[test]
fn tokens_before_the_prompt_end_cannot_be_taken_back() {
    let run = |argument| {
        Scenario::new("x")
            .argument(argument)
            .steps(2)
            .run::<Backtracks>()
    };
    assert_eq!(run("0").texts(), ["d"]);
    let failed = End::Failed("backtrack 4 past the beginning".into());
    assert_eq!(run("1").sequences[0].end, failed);
}
