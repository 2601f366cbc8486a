//! What is sent when, and what becomes of starts that nobody waits for.

use super::*;
use crate::host::tests::Bell;

const LIMIT: Duration = Duration::from_secs(60);

fn start(side: &SideQueue) -> Arc<StartingInstance> {
    let call = StartCall {
        user: NOBODY,
        module: "m",
        arg: "",
        prompt: &[],
    };
    let waker: Arc<dyn StepWaker> = Arc::new(Bell::default());
    side.start(call, LIMIT, &waker)
}

/// The ops that are to be sent now, each with the id of what it is about.
fn sent(side: &SideQueue) -> Vec<(String, String)> {
    let mut ops = Vec::new();
    while side.can_send() {
        let job = side.next(Duration::ZERO).unwrap().unwrap();
        let message: serde_json::Value = serde_json::from_slice(&job.message).unwrap();
        let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
        ops.push((text("op"), text("req_id") + &text("rid")));
    }
    ops
}

fn failure(starting: &StartingInstance) -> ErrorReason {
    starting.poll().unwrap().err().unwrap().reason
}

#[test]
fn ai_306_a_start_that_nobody_waits_for_is_not_sent() {
    let side = SideQueue::default();
    let (first, second) = (start(&side), start(&side));
    first.abandon();
    side.take_back(&first, true, LIMIT);
    let expect = ("instantiate".to_owned(), second.request.clone());
    assert_eq!(sent(&side), [expect]);
    // One that is sent already is stopped, in our own runtime.
    second.abandon();
    side.take_back(&second, false, LIMIT);
    assert_eq!(sent(&side), []);
    side.take_back(&second, true, LIMIT);
    let ops = sent(&side);
    assert_eq!(ops.len(), 1);
    assert_eq!(ops[0].0, "cancel");
    assert!(side.state().pending.contains_key(&ops[0].1), "{ops:?}");
}

#[test]
fn ai_306_a_full_queue_refuses_starts_and_takes_drops_which_go_first() {
    let side = SideQueue::default();
    let waiting: Vec<_> = (0..QUEUE_MAX).map(|_| start(&side)).collect();
    assert!(waiting.iter().all(|starting| starting.poll().is_none()));
    assert_eq!(failure(&start(&side)), ErrorReason::SERVER_OVERLOADED);
    for _ in 0..QUEUE_MAX {
        side.abandon("old", LIMIT);
    }
    let ops = sent(&side);
    assert_eq!(ops.len(), PENDING_MAX, "as many as may have no answer");
    assert!(ops.iter().all(|(op, id)| op == "drop" && id == "old"));
    side.close(&lost());
    assert_eq!(failure(&waiting[0]), ErrorReason::RUNTIME_LOST);
    assert_eq!(failure(&start(&side)), ErrorReason::RUNTIME_LOST);
}

#[test]
fn ai_851_an_overdue_start_is_not_yet_a_runtime_that_hangs() {
    let side = SideQueue::default();
    let starting = start(&side);
    assert_eq!(sent(&side).len(), 1);
    let begun = Instant::now();
    assert!(side.take_overdue(begun).starts.is_empty());
    let overdue = side.take_overdue(begun + 2 * LIMIT);
    assert!(!overdue.is_hung && Arc::ptr_eq(&overdue.starts[0].1, &starting));
    assert!(!side.is_asked(), "a late answer is for nobody");
    // Anything else that has no answer.
    side.ask_for_stats(LIMIT);
    assert_eq!(sent(&side).len(), 1);
    assert!(!side.take_overdue(begun).is_hung);
    assert!(side.take_overdue(Instant::now() + 2 * LIMIT).is_hung);
}
