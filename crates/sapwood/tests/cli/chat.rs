//! `sapwood chat`, fed from a pipe.

use crate::process::{run_with, sapwood};
use crate::server::with_echo;

#[test]
fn a_conversation_goes_line_by_line_in_the_process() {
    let here = with_echo("chat-here", "");
    let ended = run_with(
        sapwood(&here, &["chat"]),
        "Hello!\n\n/help\n/nonsense\nAgain?\n/quit\nnever\n",
    );
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (0, "Hello!\nAgain?\n"),
        "{ended:?}"
    );
    assert!(
        ended.err.contains("/system TEXT") && ended.err.contains("There is no /nonsense"),
        "{ended:?}"
    );
}

#[test]
fn a_full_context_leaves_the_oldest_turn_out_and_says_so() {
    let here = with_echo("chat-full", "[engine]\nctx = 100");
    let lines = "The first question.\nThe second question.\nThe third question.\n";
    let ended = run_with(sapwood(&here, &["chat"]), lines);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(
        ended.err.contains("the oldest turn is left out"),
        "{ended:?}"
    );
    assert!(ended.out.ends_with("The third question.\n"), "{ended:?}");
    let long = "x".repeat(200);
    let ended = run_with(sapwood(&here, &["chat"]), &format!("{long}\nshort\n"));
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(
        ended.err.contains("ask a shorter one") && ended.out.ends_with("short\n"),
        "{ended:?}"
    );
}
