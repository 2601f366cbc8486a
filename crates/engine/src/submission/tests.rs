use sapwood_proto::params::SamplerOrder;

use super::*;
use crate::model::Model;
use crate::scripted::{Config, Scripted};

fn refused(change: impl FnOnce(&mut GenerationRequest)) -> Option<(&'static str, String)> {
    let mut request = GenerationRequest::new(Prompt::Text("hello".to_owned()));
    change(&mut request);
    let model = Scripted::new(Config {
        context_tokens: 32,
        ..Config::default()
    })
    .unwrap();
    let token_index = || Arc::new(TokenIndex::new(model.vocabulary(), 258));
    let prepared = prepare(
        request,
        &model.info(),
        &*model.vocabulary(),
        8,
        token_index,
        || 7,
    );
    prepared
        .err()
        .map(|rejection| (rejection.reason.name(), rejection.message))
}

/// A field, a value at its limit, and one past it.
type Case = (
    &'static str,
    fn(&mut GenerationRequest),
    fn(&mut GenerationRequest),
);

const CASES: &[Case] = &[
    (
        "temperature",
        |r| r.params.temperature = Some(100.0),
        |r| r.params.temperature = Some(100.5),
    ),
    (
        "temperature",
        |r| r.params.temperature = Some(0.0),
        |r| r.params.temperature = Some(-0.1),
    ),
    (
        "temperature",
        |_| (),
        |r| r.params.temperature = Some(f32::NAN),
    ),
    (
        "top_p",
        |r| r.params.top_p = Some(1.0),
        |r| r.params.top_p = Some(1.1),
    ),
    (
        "top_p",
        |r| r.params.top_p = Some(0.01),
        |r| r.params.top_p = Some(0.0),
    ),
    (
        "min_p",
        |r| r.params.min_p = Some(0.0),
        |r| r.params.min_p = Some(1.0),
    ),
    (
        "repetition_penalty",
        |r| r.params.repetition_penalty = Some(10.0),
        |r| r.params.repetition_penalty = Some(0.0),
    ),
    (
        "presence_penalty",
        |r| r.params.presence_penalty = Some(-100.0),
        |r| r.params.presence_penalty = Some(-101.0),
    ),
    (
        "frequency_penalty",
        |r| r.params.frequency_penalty = Some(100.0),
        |r| r.params.frequency_penalty = Some(f32::NAN),
    ),
    (
        "logit_bias",
        |r| r.params.logit_bias = [(257, f32::NEG_INFINITY)].into(),
        |r| r.params.logit_bias = [(258, 0.0)].into(),
    ),
    (
        "logit_bias",
        |_| (),
        |r| r.params.logit_bias = [(1, f32::INFINITY)].into(),
    ),
    ("n", |r| r.params.n = Some(64), |r| r.params.n = Some(65)),
    ("n", |r| r.params.n = Some(1), |r| r.params.n = Some(0)),
    (
        "stop",
        |r| r.params.stop = vec!["x".to_owned(); 64],
        |r| r.params.stop = vec!["x".to_owned(); 65],
    ),
    (
        "stop",
        |r| r.params.stop = vec!["x".repeat(1024)],
        |r| r.params.stop = vec!["x".repeat(1025)],
    ),
    ("stop", |_| (), |r| r.params.stop = vec![String::new()]),
    (
        "bad_words",
        |r| r.params.bad_words = vec!["x".to_owned(); 64],
        |r| r.params.bad_words = vec!["x".to_owned(); 65],
    ),
    (
        "bad_words",
        |r| r.params.bad_words = vec!["x".repeat(1024)],
        |r| r.params.bad_words = vec!["x".repeat(1025)],
    ),
    (
        "bad_words",
        |_| (),
        |r| r.params.bad_words = vec![String::new()],
    ),
    (
        "stop_sequences",
        |r| r.params.stop_sequences = vec![vec![257; 64]; 256],
        |r| r.params.stop_sequences = vec![vec![257; 64]; 257],
    ),
    (
        "stop_sequences",
        |_| (),
        |r| r.params.stop_sequences = vec![vec![1; 65]],
    ),
    (
        "stop_sequences",
        |_| (),
        |r| r.params.stop_sequences = vec![vec![]],
    ),
    (
        "stop_sequences",
        |_| (),
        |r| r.params.stop_sequences = vec![vec![1, 258]],
    ),
    (
        "scored",
        |r| r.scored = Some(vec![1]),
        |r| r.scored = Some(vec![]),
    ),
    (
        "scored",
        |_| (),
        |r| (r.scored, r.params.n) = (Some(vec![1]), Some(2)),
    ),
    (
        "top_logprobs",
        |r| r.params.top_logprobs = Some(1000),
        |r| r.params.top_logprobs = Some(1001),
    ),
    (
        "min_tokens",
        |r| (r.params.min_tokens, r.params.max_tokens) = (Some(4), Some(4)),
        |r| (r.params.min_tokens, r.params.max_tokens) = (Some(5), Some(4)),
    ),
];

/// D-20.
#[test]
fn ev_603_each_field_is_taken_at_its_limit_and_refused_past_it_by_name() {
    for (field, at_limit, past_it) in CASES {
        assert_eq!(refused(at_limit), None, "{field}");
        let (reason, message) = refused(past_it).unwrap();
        assert_eq!(reason, "BAD_CONFIG");
        assert!(message.starts_with(&format!("{field} ")), "{message}");
    }
}

/// EV-609.
#[test]
fn d_23_a_prompt_is_refused_iff_it_fills_the_context() {
    assert_eq!(refused(|r| r.prompt = Prompt::Tokens(vec![1; 31])), None);
    let (reason, message) = refused(|r| r.prompt = Prompt::Tokens(vec![1; 32])).unwrap();
    assert_eq!(reason, "PROMPT_TOO_LONG");
    let received = "prompt of 32 tokens exceeds the model's context of 32 tokens";
    assert_eq!(message, received);
    // With BOS.
    assert_eq!(refused(|r| r.prompt = Prompt::Text("x".repeat(30))), None);
    assert_eq!(
        refused(|r| r.prompt = Prompt::Text("x".repeat(31)))
            .unwrap()
            .0,
        "PROMPT_TOO_LONG"
    );
}

#[test]
fn lm_313_prompt_and_scored_are_refused_iff_they_are_longer_than_the_context() {
    let scoring = |prompt: usize, scored: usize| {
        refused(|r| {
            r.prompt = Prompt::Tokens(vec![1; prompt]);
            r.scored = Some(vec![1; scored]);
        })
    };
    assert_eq!(scoring(12, 20), None);
    assert_eq!(scoring(0, 32), None);
    for (prompt, scored) in [(13, 20), (0, 33), (32, 1)] {
        assert_eq!(scoring(prompt, scored).unwrap().0, "PROMPT_TOO_LONG");
    }
    let outside = refused(|r| r.scored = Some(vec![258])).unwrap();
    assert_eq!(outside.0, "BAD_TOKENS");
}

fn infill(prefix: &str, suffix: &str) -> Prompt {
    Prompt::Infill {
        prefix: prefix.to_owned(),
        suffix: suffix.to_owned(),
    }
}

#[test]
fn a_prompt_to_fill_in_has_its_tokens_and_their_limits() {
    let refused = refused(|r| r.prompt = infill("a", "b")).unwrap();
    assert_eq!(refused.0, "NO_INFILL");
    let model = Scripted::new(Config {
        context_tokens: 32,
        infill: true,
        ..Config::default()
    })
    .unwrap();
    let prepared = |prefix: &str, suffix: &str| {
        let token_index = || unreachable!("the request has no bad words");
        let (info, vocabulary) = (model.info(), model.vocabulary());
        let request = GenerationRequest::new(infill(prefix, suffix));
        let prepared = prepare(request, &info, &*vocabulary, 8, token_index, || 7);
        prepared.map(|submission| (submission.prompt, submission.prompt_tail))
    };
    let (tokens, tail) = prepared("a", "b</s>").unwrap();
    let suffix = b"b</s>".map(Token::from);
    let expected = [&[256, 258, 97, 259][..], &suffix, &[260]].concat();
    assert_eq!((tokens, tail.as_str()), (expected, ""));
    // Four tokens around the texts, and one must fit behind them.
    let (first, second) = ("x".repeat(13), "y".repeat(14));
    assert_eq!(prepared(&first, &second).unwrap().0.len(), 31);
    for suffix in ["y".repeat(15), "y".repeat(2000)] {
        let error = prepared(&first, &suffix).unwrap_err();
        assert_eq!(error.reason, ErrorReason::PROMPT_TOO_LONG);
    }
}

#[test]
fn token_prompts_are_checked_and_an_empty_one_becomes_bos() {
    assert_eq!(
        refused(|r| r.prompt = Prompt::Tokens(vec![1, 258]))
            .unwrap()
            .0,
        "BAD_TOKENS"
    );
    assert_eq!(refused(|r| r.prompt = Prompt::Tokens(Vec::new())), None);
}

#[test]
fn oa_203_max_tokens_is_limited_by_the_context_and_a_seed_is_chosen() {
    let model = Scripted::new(Config {
        context_tokens: 32,
        ..Config::default()
    })
    .unwrap();
    let terms = |max_tokens, seed| {
        let mut request = GenerationRequest::new(Prompt::Tokens(vec![1; 12]));
        (request.params.max_tokens, request.params.seed) = (max_tokens, seed);
        let token_index = || unreachable!("the request has no bad words");
        let submission = prepare(
            request,
            &model.info(),
            &*model.vocabulary(),
            8,
            token_index,
            || 7,
        )
        .unwrap();
        (submission.terms.max_tokens, submission.terms.seed)
    };
    assert_eq!(terms(None, None), (20, 7));
    assert_eq!(terms(Some(5), Some(3)), (5, 3));
    assert_eq!(
        terms(Some(500), None),
        (20, 7),
        "never more than the context leaves"
    );
}

/// The tokens of a long prompt are counted before the owner receives it, and once for all choices.
#[test]
fn d_8_the_history_of_a_prompt_is_made_with_the_submission() {
    let model = Scripted::new(Config::default()).unwrap();
    let is_made = |change: fn(&mut GenerationRequest)| {
        let mut request = GenerationRequest::new(Prompt::Tokens(vec![1; 12]));
        change(&mut request);
        let token_index = || unreachable!("the request has no bad words");
        let (info, vocabulary) = (model.info(), model.vocabulary());
        let submission = prepare(request, &info, &*vocabulary, 8, token_index, || 7);
        submission.unwrap().history.is_some()
    };
    assert!(!is_made(|_| ()));
    assert!(is_made(|r| r.params.repetition_penalty = Some(1.1)));
    assert!(is_made(|r| r.params.presence_penalty = Some(0.5)));
    assert!(is_made(|r| r.params.dry_multiplier = Some(0.8)));
    assert!(!is_made(|r| {
        (r.params.dry_multiplier, r.params.dry_penalty_last_n) = (Some(0.8), Some(0));
        (r.params.repetition_penalty, r.params.penalty_last_n) = (Some(1.1), Some(0));
    }));
    // A step that the order leaves out is off.
    assert!(!is_made(|r| {
        (r.params.dry_multiplier, r.params.repetition_penalty) = (Some(0.8), Some(1.1));
        r.params.samplers = SamplerOrder::of_names(["top_k", "temperature"]);
    }));
    assert!(!is_made(|r| {
        r.params.repetition_penalty = Some(1.1);
        r.scored = Some(vec![1]);
    }));
}

/// Every step adds every entry, so there is one for each token, however many texts contain it.
#[test]
fn biases_by_text_are_summed_for_each_token() {
    let model = Scripted::new(Config::default()).unwrap();
    let mut request = GenerationRequest::new(Prompt::Tokens(vec![1]));
    let a = model.vocabulary().tokenize("a", false)[0];
    request.params.logit_bias = [(a, 0.25), (3, 1.0), (3, f32::NEG_INFINITY)].into();
    request.params.logit_bias_texts = vec![("aaaa".into(), 0.5), ("a".into(), -1.0)];
    let token_index = || unreachable!("the request has no bad words");
    let (info, vocabulary) = (model.info(), model.vocabulary());
    let submission = prepare(request, &info, &*vocabulary, 8, token_index, || 7).unwrap();
    let mut expected = [(a, 1.25), (3, f32::NEG_INFINITY)];
    expected.sort_by_key(|(token, _)| *token);
    assert_eq!(submission.terms.sampling.logit_bias[..], expected);
}

/// D-10: control tokens that mark something in an output are written with their names, and no others are.
#[test]
fn d_10_marked_tokens_have_a_text_and_the_prompt_a_tail() {
    let model = Scripted::new(Config::default()).unwrap();
    let vocabulary = model.vocabulary();
    let begin = vocabulary.bos().unwrap();
    let end = vocabulary.end_of_turn().unwrap();
    let submission = |prompt: Prompt, marked: &[Token]| {
        let mut request = GenerationRequest::new(prompt);
        request.marked = marked.into();
        let token_index = || Arc::new(TokenIndex::new(model.vocabulary(), 258));
        let longest = vocabulary.token_bytes_max();
        prepare(
            request,
            &model.info(),
            &*vocabulary,
            longest,
            token_index,
            || 7,
        )
        .unwrap()
    };
    let chat = || {
        Prompt::Chat(crate::api::ChatRequest {
            messages: vec![ChatMessage {
                role: "user".to_owned(),
                content: "x".repeat(100) + "<s>",
                ..ChatMessage::default()
            }],
            ..Default::default()
        })
    };
    let marked = submission(chat(), &[begin]);
    let text = |token| {
        let bytes = marked.terms.bytes(&*vocabulary, token).into_owned();
        String::from_utf8(bytes).unwrap()
    };
    assert_eq!(text(begin), format!("{MARK_OPEN}<s>{MARK_CLOSE}"));
    assert_eq!((text(end).as_str(), text(97).as_str()), ("", "a"));
    let tail = format!("{MARK_OPEN}<s>{MARK_CLOSE}assistant\n");
    assert_eq!(
        marked.prompt_tail, tail,
        "and nothing of the message, which a control token ended"
    );
    let mut text = ChoiceText::default();
    let (shown, _) = marked
        .terms
        .push_text(&mut text, 97, "\u{fdd0}<s>\u{fdd1}".as_bytes(), 1);
    assert_eq!(shown, "\u{fffd}<s>\u{fffd}", "other tokens forge no mark");
    let (shown, _) = marked.terms.push_text(
        &mut text,
        begin,
        format!("{MARK_OPEN}<s>{MARK_CLOSE}").as_bytes(),
        2,
    );
    assert_eq!(shown, format!("{MARK_OPEN}<s>{MARK_CLOSE}"));
    let plain = submission(chat(), &[]);
    assert_eq!(plain.prompt_tail, "assistant\n");
    assert_eq!(
        submission(Prompt::Text("a".to_owned()), &[begin]).prompt_tail,
        ""
    );
}

#[test]
fn prompts_that_cannot_fit_are_refused_before_tokenising() {
    // 32 tokens of at most 8 bytes, if a tokenizer drops three quarters of the text.
    let text = |bytes: usize| refused(|r| r.prompt = Prompt::Text("x".repeat(bytes)));
    let (reason, why) = text(33 * 32).unwrap();
    assert_eq!(reason, "PROMPT_TOO_LONG");
    assert!(why.contains("1056 bytes, at least 33 tokens"), "{why}");
    let (_, why) = text(33 * 32 - 1).unwrap();
    assert!(
        why.contains("exceeds") && !why.contains("at least"),
        "tokenised and counted: {why}"
    );
    let message = || ChatMessage {
        role: "user".to_owned(),
        ..Default::default()
    };
    let chat = |count| {
        let messages = (0..count).map(|_| message()).collect();
        refused(|r| {
            r.prompt = Prompt::Chat(crate::api::ChatRequest {
                messages,
                ..Default::default()
            })
        })
    };
    let (_, why) = chat(33).unwrap();
    assert!(why.contains("33 messages cannot fit"), "{why}");
    assert!(chat(32).is_none_or(|(_, why)| !why.contains("messages cannot fit")));
}

/// Roles and names are names: templates print them, but they are not measured with the content.
#[test]
fn overlong_names_are_refused_before_rendering() {
    let long = |bytes: usize| "u".repeat(bytes);
    for set in [
        |message: &mut ChatMessage, text| message.role = text,
        |message: &mut ChatMessage, text| message.name = Some(text),
        |message: &mut ChatMessage, text| message.tool_call_id = Some(text),
    ] {
        for (bytes, expect) in [(1024, false), (1025, true)] {
            let mut message = ChatMessage::default();
            set(&mut message, long(bytes));
            let why = refused(|r| {
                r.prompt = Prompt::Chat(crate::api::ChatRequest {
                    messages: vec![message],
                    ..Default::default()
                });
            });
            assert_eq!(
                why.is_some_and(|(reason, _)| reason == "NAME_TOO_LONG"),
                expect
            );
        }
    }
}

/// The work for a conversation is estimated from everything that a template may print.
#[test]
fn prompt_bytes_include_all_that_a_template_may_print() {
    let text = "x".repeat(1000);
    let tools = serde_json::json!([{"function": {"name": text}}]);
    let chats = [
        crate::api::ChatRequest {
            tools: tools.clone(),
            ..Default::default()
        },
        crate::api::ChatRequest {
            template_args: serde_json::json!({"a": [text]}),
            ..Default::default()
        },
        crate::api::ChatRequest {
            messages: vec![ChatMessage {
                tool_calls: tools,
                ..Default::default()
            }],
            ..Default::default()
        },
        crate::api::ChatRequest {
            messages: vec![ChatMessage {
                role: text,
                ..Default::default()
            }],
            ..Default::default()
        },
    ];
    for chat in chats {
        let prompt = Prompt::Chat(chat);
        assert!((1000..1100).contains(&prompt.bytes()), "{prompt:?}");
        assert_eq!(prompt.text_bytes(), 0);
    }
}

#[test]
fn an_abandoned_prompt_is_not_submitted() {
    let flag = Arc::new(std::sync::atomic::AtomicBool::new(true));
    assert!(stop::with(&flag, || refused(|_| {})).is_some());
    assert_eq!(refused(|_| {}), None);
}
