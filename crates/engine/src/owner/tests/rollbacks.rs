//! Rollbacks of a long output, which end within characters and within what may become a stop string.

use sapwood_proto::steer::Pre;

use super::harness::Bench;
use super::probe::{Probe, noop, run, splice};
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
