//! The output of an engine, replayed token by token.

use std::sync::Arc;

use sapwood_proto::time::Time;

use super::*;
use crate::Engine;
use crate::api::Prompt;
use crate::model::Model;
use crate::scripted::{Config, Script, Scripted};

/// The events of a request at an engine, in order.
fn computed(request: GenerationRequest) -> Vec<EngineEvent> {
    let (mut owner, engine) = Engine::by_hand(
        Box::new(Scripted::new(config()).unwrap()),
        crate::Config::default(),
    );
    let mut handle = engine.submit(request).unwrap();
    let mut events = Vec::new();
    loop {
        owner.step(Time::ZERO);
        while let Some(event) = handle.try_next() {
            let over = matches!(event.kind, EventKind::Usage(_));
            events.push(event);
            if over {
                return events;
            }
        }
    }
}

fn config() -> Config {
    Config {
        script: Script::Echo,
        ..Config::default()
    }
}

/// The events of the same request, from the tokens of the engine.
fn received_events(request: GenerationRequest, tokens: &[Token]) -> Vec<EngineEvent> {
    let model = Scripted::new(config()).unwrap();
    let mut transcript = Transcript::new(request, &model.info(), model.vocabulary()).unwrap();
    let mut events = Vec::new();
    for &id in tokens {
        let token = Sampled {
            id,
            logprob: f32::NAN,
            rank: None,
            top: Vec::new(),
            special: false,
            forced: false,
        };
        events.extend(transcript.take(0, Some(token), None));
    }
    assert!(transcript.is_over(0));
    events
}

/// Collects text, ids and end of events.
fn collected(events: &[EngineEvent]) -> (String, Vec<Token>, Option<ChoiceEnd>) {
    let mut all = (String::new(), Vec::new(), None);
    for event in events {
        match &event.kind {
            EventKind::Tokens(tokens) => {
                all.0.push_str(&tokens.text);
                all.1.extend(tokens.tokens.iter().map(|token| token.id));
            }
            EventKind::Finish(finish) => all.2 = Some(finish.clone()),
            EventKind::Usage(_)
            | EventKind::Failed(_)
            | EventKind::Error(_)
            | EventKind::Report(_) => {}
        }
    }
    all
}

/// Each of these requests ends in a different way.
fn requests() -> Vec<GenerationRequest> {
    let echo = || GenerationRequest::new(Prompt::Text("wörter, and more: wörter".into()));
    let changed = |change: fn(&mut GenerationRequest)| {
        let mut request = echo();
        change(&mut request);
        request
    };
    vec![
        echo(),
        changed(|request| request.params.max_tokens = Some(2)),
        changed(|request| request.params.stop = vec!["more: x".into(), "mor".into()]),
        changed(|request| {
            request.params.stop = vec!["w".into(), "er".into()];
            request.params.min_tokens = Some(9);
        }),
        changed(|request| {
            request.params.stop_sequences = vec![vec![u32::from(b','), u32::from(b' ')]]
        }),
        changed(|request| request.params.max_tokens = Some(5)),
        // Text is held back at the end, which is EOG, or a stop token.
        changed(|request| request.params.stop = vec!["wörter!".into()]),
        changed(|request| {
            request.params.stop = vec![", and!".into()];
            request.params.stop_sequences = vec![b" m".iter().map(|&byte| byte.into()).collect()];
        }),
        changed(|request| request.scored = Some(b"er".iter().map(|&byte| byte.into()).collect())),
        // Nothing precedes the first scored token.
        changed(|request| {
            request.prompt = Prompt::Tokens(Vec::new());
            request.scored = Some(vec![b'e'.into(), b'r'.into()]);
        }),
    ]
}

/// LM-704
#[test]
fn lm_712_remote_tokens_give_the_events_of_a_local_engine() {
    for index in 0..requests().len() {
        let request = || requests().swap_remove(index);
        let near = computed(request());
        let (text, tokens, finish) = collected(&near);
        let whole = "wörter, and more: wörter";
        match index {
            0 | 6 => assert_eq!(text, whole, "request {index}"),
            7 => assert_eq!(text, "wörter, and ", "request {index}"),
            _ => {}
        }
        let far = received_events(request(), &tokens);
        assert_eq!(collected(&far), (text, tokens, finish), "request {index}");
        let usage = |events: &[EngineEvent]| match &events.last().unwrap().kind {
            EventKind::Usage(usage) => (usage.prompt_tokens, usage.completion_tokens),
            other => panic!("{other:?}"),
        };
        assert_eq!(usage(&far), usage(&near), "request {index}");
    }
}

#[test]
fn lm_712_either_side_may_end_a_choice_and_nothing_follows() {
    let model = Scripted::new(config()).unwrap();
    let vocabulary: SharedVocabulary = Arc::clone(&model.vocabulary());
    let mut request = GenerationRequest::new(Prompt::Text("x".into()));
    request.params.stop = vec!["held".into()];
    request.params.n = Some(2);
    let mut transcript = Transcript::new(request, &model.info(), vocabulary).unwrap();
    let token = |byte: u8| Sampled {
        id: byte.into(),
        logprob: 0.0,
        rank: None,
        top: Vec::new(),
        special: false,
        forced: false,
    };
    assert_eq!(
        collected(&transcript.take(0, Some(token(b'h')), None)).0,
        ""
    );
    let ended = transcript.take(0, Some(token(b'e')), Some(FinishReason::Length));
    let finish = ChoiceEnd {
        reason: FinishReason::Length,
        stop: None,
    };
    assert_eq!(
        collected(&ended),
        ("he".into(), vec![b'e'.into()], Some(finish))
    );
    assert_eq!(ended.len(), 2, "another choice runs");
    assert!(transcript.is_over(0) && !transcript.is_over(1) && transcript.is_over(2));
    assert!(transcript.take(0, Some(token(b'l')), None).is_empty());
    transcript.cached(1);
    let ended = transcript.take(1, None, Some(FinishReason::Stop));
    let [_, EngineEvent { kind, .. }] = &ended[..] else {
        panic!("{ended:?}");
    };
    let EventKind::Usage(usage) = kind else {
        panic!("{kind:?}");
    };
    assert_eq!((usage.completion_tokens, usage.cached_tokens), (2, 1));
}

#[test]
fn ai_827_a_model_on_another_server_refuses_a_controller() {
    let model = Scripted::new(config()).unwrap();
    let mut request = GenerationRequest::new(Prompt::Text("a".to_owned()));
    request.steer = Some(sapwood_proto::steer::Combined::new(Vec::new()));
    let refused = Transcript::new(request, &model.info(), model.vocabulary());
    let error = refused.err().unwrap();
    assert_eq!(error.code, Code::Unimplemented);
    assert!(error.message.contains("controllers"), "{error}");
}
