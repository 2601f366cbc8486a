//! Rollbacks of a long output, which end within characters and within what may become a stop string.

use sapwood_proto::params::GenerationParams;
use sapwood_proto::steer::Pre;

use super::harness::Bench;
use super::probe::{Probe, free, noop, run, splice};
use super::steering::{controller, steered};
use crate::scripted::Config as Script;

/// Each is one event, and an outbox of nobody who reads takes 256 of them.
const ROUNDS: u32 = 250;

/// What a client has at the end is the text of the tokens that are left.
#[test]
fn ai_822_the_text_of_a_long_output_follows_its_rollbacks() {
    let mut probe = Probe::new();
    probe.mid = |round| {
        let text: Vec<u32> = "é User: 😀€ Use".bytes().map(u32::from).collect();
        // Longer and shorter than what is appended, so that each place is the end of a rollback sometime.
        let backtrack = [0, 1, 9, 20, 3, 30, 2][round as usize % 7];
        let from = round as usize % text.len();
        Ok(Some(match round {
            0 => splice(0, &text.repeat(10)),
            1..ROUNDS => splice(backtrack, &text[from..]),
            _ => noop(),
        }))
    };
    probe.pre = |round| Ok(if round < ROUNDS { run() } else { Pre::Stop });
    let mut request = steered("ab", &probe);
    request.params.stop = vec!["User: 😀!".to_owned(), "Use more".to_owned()];
    let answer = Bench::new(Script {
        context_tokens: 16_384,
        ..Script::default()
    })
    .answer(request);
    let (_, ids, end) = &answer.choices[0];
    assert_eq!(*end, controller());
    let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap()).collect();
    assert!(bytes.len() > 100, "{}", bytes.len());
    assert_eq!(answer.text(), String::from_utf8_lossy(&bytes));
}

/// The penalties and DRY see the text that is left, not what was taken back.
#[test]
fn ai_822_penalties_follow_rollbacks() {
    const TEXT: &[u8] = b"one:two one:two one";
    let tokens = |text: &[u8]| text.iter().copied().map(u32::from).collect::<Vec<_>>();
    let mut straight = Probe::new();
    straight.mid = |round| {
        let text: Vec<u32> = TEXT.iter().copied().map(u32::from).collect();
        Ok(Some(if round == 0 { splice(0, &text) } else { free() }))
    };
    let mut winding = Probe::new();
    winding.mid = |round| {
        let text: Vec<u32> = TEXT.iter().copied().map(u32::from).collect();
        let wrong: Vec<u32> = b"two:one\n".iter().copied().map(u32::from).collect();
        Ok(Some(match round {
            0 => splice(0, &text[..9]),
            1 => splice(0, &wrong),
            // Takes back the wrong text, and some of what was right.
            2 => splice(11, &text[6..]),
            3 => splice(0, &wrong),
            4 => splice(8, &[]),
            _ => free(),
        }))
    };
    type Change = fn(&mut GenerationParams);
    let changes: [Change; 4] = [
        |params| params.dry_multiplier = Some(8.0),
        |params| (params.presence_penalty, params.penalty_last_n) = (Some(9.0), Some(5)),
        |params| (params.presence_penalty, params.penalty_last_n) = (Some(9.0), Some(12)),
        |params| params.frequency_penalty = Some(1.5),
    ];
    let plain = |_: &mut GenerationParams| ();
    let answer = |probe: &Probe, change: &dyn Fn(&mut GenerationParams)| {
        let mut request = steered("one:", probe);
        change(&mut request.params);
        request.params.temperature = Some(0.0);
        // What follows in this text is likely, so that a penalty on it shows.
        let likely = tokens(b"one:tw ").into_iter().map(|token| (token, 6.0));
        request.params.logit_bias = likely.collect();
        request.params.max_tokens = Some(120);
        request.params.ignore_eos = Some(true);
        let script = Script {
            script: crate::scripted::Script::Tokens,
            tokenizer: Some(crate::scripted::ScriptedTokenizer::Bytes),
            gap: 1.0,
            ..Script::default()
        };
        let answer = Bench::new(script).answer(request);
        let text = answer.text();
        // Both begin with the text; the winding one has fewer tokens after it, as those taken back count.
        text.chars().take(TEXT.len() + 40).collect::<String>()
    };
    let unchanged = answer(&straight, &plain);
    for (index, change) in changes.iter().enumerate() {
        let expected = answer(&straight, change);
        assert_eq!(answer(&winding, change), expected, "{index}");
        assert_ne!(expected, unchanged, "{index} changes nothing");
    }
}
