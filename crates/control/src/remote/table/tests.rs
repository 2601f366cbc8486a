//! An engine asks, a runtime answers, and what goes over the wire is compared.

use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use sapwood_proto::steer::Token;
use serde_json::{Value, json};

use super::super::reply::read_step;
use super::super::reply::{ReplyData, ResultLimits, TokensReply};
use super::super::rows::RowSource;
use super::*;
use crate::host::{MidReturned, ReturnedBranch};

#[derive(Default)]
struct Wakes(AtomicU32);

impl StepWaker for Wakes {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct NoMasks;

impl RowSource for NoMasks {
    fn bytes(&self, _: usize, _: usize) -> Option<Vec<u8>> {
        None
    }

    fn size(&self) -> usize {
        0
    }
}

const LIMITS: ResultLimits = ResultLimits {
    vocabulary: 40,
    forks: 4,
};

/// A table with the clock in the test's hands.
struct Play {
    table: RemoteTable,
    now: Time,
    wakes: Arc<Wakes>,
}

impl Play {
    fn new(dialect: Abi, ops_max: usize) -> Self {
        Self {
            table: RemoteTable::new(dialect, ops_max, Arc::default()),
            now: Time::from_millis(1_000),
            wakes: Arc::default(),
        }
    }

    fn insert(&mut self, request: &str) -> u64 {
        let waker = Arc::clone(&self.wakes) as Arc<dyn StepWaker>;
        self.table.insert(request.to_owned(), waker)
    }

    fn pre(&mut self, id: u64) {
        self.table.ask_pre(id, self.now);
    }

    fn mid(&mut self, id: u64) {
        self.table.ask_mid(id, self.now);
    }

    fn sampled(&mut self, id: u64, token: Token) {
        let tokens = &[token];
        let appended = Appended {
            backtrack: 0,
            tokens,
            sampled: Some(token),
        };
        assert!(self.table.happened(id, appended));
    }

    fn free(&mut self, id: u64) {
        self.table.free(id, self.now);
    }

    /// The next message after a flush.
    fn sends(&mut self) -> Value {
        self.table.flush();
        self.sends_by_itself()
    }

    fn sends_by_itself(&mut self) -> Value {
        let request = self.table.next_request(self.now);
        request.map_or(Value::Null, |request| json!(request))
    }

    fn answers(&mut self, results: StepResults) {
        for waker in self.table.take_results(results, self.now) {
            waker.wake();
        }
    }

    fn pre_answers(&mut self, results: &[(u64, Returned)]) {
        let pre = results.iter().cloned();
        let pre = pre.map(|(id, returned)| (id, Some(Ok(returned))));
        self.answers(StepResults {
            pre: pre.collect(),
            ..StepResults::default()
        });
    }

    fn mid_answers(&mut self, ids: &[u64]) {
        let result = |&id: &u64| {
            let returned = match self.table.dialect() {
                Abi::P1 => Returned::Mid(MidReturned::Sample(None)),
                Abi::P2 => Returned::Branches(vec![branch()]),
            };
            (id, Ok(returned))
        };
        let mid = ids.iter().map(result).collect();
        self.answers(StepResults {
            mid,
            ..StepResults::default()
        });
    }

    /// Binds and answers a first step.
    fn live(&mut self, request: &str) -> u64 {
        let id = self.insert(request);
        match self.table.dialect() {
            Abi::P1 => {
                self.pre(id);
                self.sends();
                self.pre_answers(&[(id, run(&[]))]);
                assert!(self.table.poll_pre(id).is_some());
            }
            Abi::P2 => {
                self.mid(id);
                self.sends();
                self.mid_answers(&[id]);
                assert!(self.table.poll_mid(id).is_some());
            }
        }
        id
    }

    fn wakes(&self) -> u32 {
        self.wakes.0.load(Ordering::Relaxed)
    }
}

fn branch() -> ReturnedBranch {
    ReturnedBranch {
        mask: None,
        temperature: None,
        splices: Vec::new(),
        wait: None,
    }
}

fn run(tokens: &[Token]) -> Returned {
    Returned::Pre {
        num_forks: 1,
        suspend: false,
        ff_tokens: tokens.to_vec(),
        wait: None,
    }
}

fn op(id: u64, members: Value) -> Value {
    let mut op = json!({"id": id, "sampled": null, "tokens": [], "backtrack": 0});
    for (name, value) in members.as_object().unwrap() {
        op[name] = value.clone();
    }
    op
}

fn process(ops: &[Value], freed: &[u64]) -> Value {
    json!({"op": "mid_process", "ops": ops, "freed": freed})
}

/// AI-501: the transcript of P2.
#[test]
fn ai_854_all_sequences_of_a_step_travel_in_one_message() {
    let mut play = Play::new(Abi::P2, 9);
    let (first, second) = (play.insert("a"), play.insert("b"));
    play.mid(second);
    assert_eq!(
        play.sends_by_itself(),
        Value::Null,
        "the step is not complete"
    );
    play.mid(first);
    let bind = |id, request| op(id, json!({"req_id": request}));
    assert_eq!(
        play.sends(),
        process(&[bind(first, "a"), bind(second, "b")], &[])
    );
    assert_eq!(play.sends(), Value::Null, "one at a time");
    assert!(play.table.poll_mid(first).is_none());
    play.mid_answers(&[first, second]);
    assert_eq!(play.wakes(), 1, "once for all");
    assert!(play.table.poll_mid(first).is_some() && play.table.poll_mid(first).is_none());
    play.sampled(first, 17);
    play.mid(first);
    let sampled = op(first, json!({"sampled": 17, "tokens": [17]}));
    assert_eq!(play.sends(), process(&[sampled], &[]));
}

#[test]
fn asks_of_an_engine_that_never_flushes_are_sent_soon() {
    let mut play = Play::new(Abi::P2, 9);
    let id = play.insert("a");
    play.mid(id);
    assert_eq!(play.table.due(), Some(play.now + FLUSH_AFTER));
    play.now = play.now + FLUSH_AFTER;
    assert_ne!(play.sends_by_itself(), Value::Null);
}

#[test]
fn ai_854_freed_sequences_travel_with_the_next_message_or_soon_alone() {
    for dialect in [Abi::P1, Abi::P2] {
        let mut play = Play::new(dialect, 9);
        let (first, second) = (play.live("a"), play.live("b"));
        play.free(first);
        assert_eq!(play.sends(), Value::Null);
        assert_eq!(play.table.due(), Some(play.now + FREE_AFTER));
        assert!(FREE_AFTER < Duration::from_millis(100));
        play.now = play.now + FREE_AFTER;
        assert_eq!(play.sends()["freed"], json!([first]));
        play.answers(StepResults::default());
        assert_eq!(play.table.due(), None);
        play.free(second);
        let third = play.insert("c");
        play.pre(third);
        play.mid(third);
        if dialect == Abi::P1 {
            play.table.entries.get_mut(&third).unwrap().mid = AskState::None;
        }
        assert_eq!(play.sends()["freed"], json!([second]));
    }
}

/// AI-503: children go on with the logits of their parent, so they are made before it goes on.
#[test]
fn ai_505_clones_travel_with_the_next_op_of_their_parent() {
    let mut play = Play::new(Abi::P2, 9);
    let parent = play.live("a");
    let clones = [1, 2].map(|index| play.table.fork(parent, index).unwrap());
    for (id, token) in [(parent, 5), (clones[0], 6), (clones[1], 7)] {
        play.sampled(id, token);
    }
    // The engine has no place for the clones yet.
    play.mid(parent);
    let sampled = |id, token: Token, mut members: Value| {
        members["sampled"] = json!(token);
        members["tokens"] = json!([token]);
        op(id, members)
    };
    let expected = [
        sampled(parent, 5, json!({})),
        sampled(clones[0], 6, json!({"clone_id": parent, "clone_idx": 1})),
        sampled(clones[1], 7, json!({"clone_id": parent, "clone_idx": 2})),
    ];
    assert_eq!(play.sends(), process(&expected, &[]));
    play.mid_answers(&[parent, clones[0], clones[1]]);
    // Asked for later, it is there already.
    play.mid(clones[1]);
    assert_eq!(play.sends(), Value::Null);
    assert!(play.table.poll_mid(clones[1]).is_some());
    // Of a text that has changed meanwhile it is of no use.
    play.sampled(clones[0], 9);
    play.mid(clones[0]);
    assert!(play.table.poll_mid(clones[0]).is_none());
    assert_eq!(
        play.sends(),
        process(&[sampled(clones[0], 9, json!({}))], &[])
    );
}

#[test]
fn ai_503_a_parent_without_an_op_comes_along_with_its_clone_and_outlives_its_end() {
    let mut play = Play::new(Abi::P2, 9);
    let parent = play.insert("a");
    let clone = play.table.fork(parent, 1).unwrap();
    play.free(parent);
    assert_eq!(play.table.take_abandoned(), Vec::<String>::new());
    play.mid(clone);
    let expected = [
        op(parent, json!({"req_id": "a"})),
        op(clone, json!({"clone_id": parent, "clone_idx": 1})),
    ];
    assert_eq!(play.sends(), process(&expected, &[]));
    play.mid_answers(&[parent, clone]);
    play.now = play.now + FREE_AFTER;
    assert_eq!(play.sends(), process(&[], &[parent]));
}

#[test]
fn an_instance_that_was_never_bound_is_abandoned() {
    let mut play = Play::new(Abi::P2, 9);
    let parent = play.insert("a");
    let clone = play.table.fork(parent, 1).unwrap();
    play.free(clone);
    play.free(parent);
    assert_eq!(play.table.take_abandoned(), ["a"]);
    assert_eq!((play.sends(), play.table.due()), (Value::Null, None));
}

fn post_pre(post: &[Value], bind: &[Value]) -> Value {
    json!({"op": "post_pre_process", "post_ops": post, "pre_ops": bind, "freed": []})
}

fn mids(ops: &[Value]) -> Value {
    json!({"op": "mid_process", "ops": ops})
}

/// AI-406
#[test]
fn ai_401_the_transcript_of_p1() {
    let mut play = Play::new(Abi::P1, 9);
    let id = play.insert("r7");
    play.pre(id);
    let bind = json!({"id": id, "req_id": "r7"});
    assert_eq!(play.sends(), post_pre(&[], &[bind]));
    play.pre_answers(&[(id, run(&[]))]);
    assert_eq!(play.table.poll_pre(id), Some(Ok(run(&[]))));
    play.mid(id);
    assert_eq!(play.sends(), mids(&[json!({"id": id})]));
    play.mid_answers(&[id]);
    assert!(play.table.poll_mid(id).is_some());
    play.sampled(id, 35);
    play.pre(id);
    let post = json!({"id": id, "tokens": [35], "backtrack": 0});
    assert_eq!(play.sends(), post_pre(&[post], &[]));
    let stop = Ok(Returned::Post { stop: true });
    play.answers(StepResults {
        post: vec![(id, stop)],
        pre: vec![(id, Some(Ok(run(&[]))))],
        ..StepResults::default()
    });
    assert_eq!(play.table.poll_pre(id), Some(Ok(STOP)));
    let spliced = Appended {
        backtrack: 2,
        tokens: &[1],
        sampled: None,
    };
    assert!(play.table.happened(id, spliced));
    play.pre(id);
    let post = json!({"id": id, "tokens": [1], "backtrack": 3});
    assert_eq!(
        play.sends(),
        post_pre(&[post], &[]),
        "the sampled token is counted"
    );
}

/// AI-412
#[test]
fn ai_404_clones_of_p1_are_made_before_anything_else_happens() {
    let mut play = Play::new(Abi::P1, 9);
    let (parent, other) = (play.live("a"), play.live("b"));
    let clones = [1, 2].map(|index| play.table.fork(parent, index).unwrap());
    // Neither of the family has a place in the batch.
    play.pre(other);
    let clone = |id: u64| json!({"id": id, "clone_id": parent});
    let family = [json!({"id": parent}), clone(clones[0]), clone(clones[1])];
    assert_eq!(play.sends(), mids(&family));
    play.mid_answers(&[parent, clones[0], clones[1]]);
    assert_eq!(play.sends(), post_pre(&[], &[]));
    play.pre_answers(&[(other, run(&[]))]);
    play.mid(clones[0]);
    assert!(play.table.poll_mid(clones[0]).is_some());
}

#[test]
fn ai_412_more_clones_than_rows_come_before_their_parent() {
    let mut play = Play::new(Abi::P1, 2);
    let parent = play.live("a");
    let clones = [1, 2, 3].map(|index| play.table.fork(parent, index).unwrap());
    play.mid(parent);
    let clone = |id: u64| json!({"id": id, "clone_id": parent});
    assert_eq!(play.sends(), mids(&[clone(clones[0]), clone(clones[1])]));
    play.mid_answers(&clones[..2]);
    assert_eq!(
        play.sends(),
        mids(&[json!({"id": parent}), clone(clones[2])])
    );
}

/// AI-813: what happens unasked must not get lost.
#[test]
fn ai_401_unasked_results_of_pre_are_kept_if_they_change_something() {
    let mut play = Play::new(Abi::P1, 9);
    let (first, second) = (play.live("a"), play.live("b"));
    let suspended = Returned::Pre {
        num_forks: 1,
        suspend: true,
        ff_tokens: Vec::new(),
        wait: None,
    };
    for (unasked, kept) in [
        (run(&[]), None),
        (suspended, None),
        (run(&[7]), Some(Ok(run(&[7])))),
        (STOP, Some(Ok(STOP))),
    ] {
        play.pre(first);
        play.sends();
        play.pre_answers(&[(first, run(&[])), (second, unasked)]);
        assert!(play.table.poll_pre(first).is_some());
        assert_eq!(play.table.poll_pre(second), kept);
    }
}

#[test]
fn ai_441_a_late_pre_is_asked_for_again() {
    let mut play = Play::new(Abi::P1, 9);
    let id = play.live("a");
    play.pre(id);
    play.sends();
    play.answers(StepResults {
        pre: vec![(id, None)],
        ..StepResults::default()
    });
    assert!(play.table.poll_pre(id).is_none());
    assert_eq!(play.sends_by_itself(), Value::Null, "not at once");
    play.pre(id);
    assert_eq!(play.sends(), post_pre(&[], &[]));
    play.pre_answers(&[(id, run(&[]))]);
    assert!(play.table.poll_pre(id).is_some());
}

#[test]
fn ai_441_a_pre_is_not_late_for_ever() {
    let mut play = Play::new(Abi::P1, 9);
    let id = play.live("a");
    let mut late = || {
        play.pre(id);
        play.sends();
        play.answers(StepResults {
            pre: vec![(id, None)],
            ..StepResults::default()
        });
        play.now = play.now + Duration::from_secs(20);
        play.table.poll_pre(id)
    };
    for _ in 0..3 {
        assert_eq!(late(), None);
    }
    let failure = late().expect("it has ended").unwrap_err();
    assert_eq!(failure.reason, ErrorReason::TIMEOUT);
}

#[test]
fn ai_853_a_sequence_without_an_answer_fails_and_others_do_not() {
    for dialect in [Abi::P1, Abi::P2] {
        let mut play = Play::new(dialect, 9);
        let (first, second) = (play.live("a"), play.live("b"));
        play.mid(first);
        play.mid(second);
        play.sends();
        play.mid_answers(&[second]);
        let failure = play.table.poll_mid(first).unwrap().unwrap_err();
        assert_eq!(failure.reason, ErrorReason::BAD_RESULT);
        assert!(play.table.poll_mid(second).unwrap().is_ok());
    }
}

#[test]
fn ai_305_a_refused_request_costs_those_that_it_lists() {
    let mut play = Play::new(Abi::P2, 9);
    let (first, second, third) = (play.live("a"), play.live("b"), play.live("c"));
    play.free(third);
    play.mid(first);
    assert_eq!(play.sends()["freed"], json!([third]));
    let error = ReplyError {
        text: "shm size too small".into(),
        is_user: true,
    };
    let (somebodys, woken) = play.table.refused(&error, play.now);
    assert!(somebodys && woken.len() == 1);
    let failure = play.table.poll_mid(first).unwrap().unwrap_err();
    assert!(failure.message.contains("shm size"), "{failure}");
    // Nothing was freed either.
    play.mid(second);
    assert_eq!(play.sends()["freed"], json!([third]));
    play.mid_answers(&[second]);
    play.free(second);
    play.now = play.now + FREE_AFTER;
    play.sends();
    assert!(!play.table.refused(&error, play.now).0, "nobody's fault");
}

#[test]
fn ai_305_instances_of_a_refused_request_are_dropped() {
    for dialect in [Abi::P1, Abi::P2] {
        let mut play = Play::new(dialect, 9);
        let id = play.insert("a");
        match dialect {
            Abi::P1 => play.pre(id),
            Abi::P2 => play.mid(id),
        }
        assert_ne!(play.sends(), Value::Null);
        let error = ReplyError {
            text: "more than 65536 entries".into(),
            is_user: true,
        };
        play.table.refused(&error, play.now);
        play.free(id);
        assert_eq!(play.table.take_abandoned(), ["a"], "{dialect:?}");
    }
}

#[test]
fn ai_222_what_happened_to_a_sequence_fits_into_an_op_or_is_its_failure() {
    let mut play = Play::new(Abi::P2, 9);
    let id = play.live("a");
    let appended = |tokens| Appended {
        backtrack: 0,
        tokens,
        sampled: None,
    };
    let forced = vec![7; 65_536];
    assert!(play.table.happened(id, appended(&forced)));
    assert!(!play.table.happened(id, appended(&[7])));
}

#[test]
fn ai_852_every_sequence_of_a_lost_runtime_fails_with_that() {
    for dialect in [Abi::P1, Abi::P2] {
        let mut play = Play::new(dialect, 9);
        let ids = [play.live("a"), play.live("b"), play.insert("c")];
        play.mid(ids[0]);
        play.sends();
        let lost = CallFailure::new(ErrorReason::RUNTIME_LOST, "gone");
        assert_eq!(play.table.lose(lost).len(), 1);
        for id in ids {
            for result in [play.table.poll_pre(id), play.table.poll_mid(id)] {
                let failure = result.unwrap().unwrap_err();
                assert_eq!(failure.reason, ErrorReason::RUNTIME_LOST);
            }
            play.free(id);
        }
        assert!(play.table.entries.is_empty());
        assert_eq!((play.sends(), play.table.due()), (Value::Null, None));
    }
}

#[test]
fn ai_850_the_dialect_is_in_the_answer_to_tokens() {
    let read = |text: &str| serde_json::from_str::<TokensReply>(text).unwrap();
    assert_eq!(read(r#"{"vocab_size":4000}"#).eos_token_id, None);
    let p2 = read(r#"{"vocab_size":4000,"eos_token_id":2,"more":1}"#);
    assert_eq!((p2.vocab_size, p2.eos_token_id), (4000, Some(2)));
}

/// What may be done to a table, with an index of a sequence.
#[derive(Clone, Debug)]
enum Action {
    Insert,
    Fork(usize),
    Pre(usize),
    Mid(usize),
    Sampled(usize),
    Free(usize),
    Flush,
    Answer(Vec<u8>),
    Refuse,
    Pass(u64),
}

fn action() -> impl Strategy<Value = Action> {
    let index = || 0..8_usize;
    prop_oneof![
        Just(Action::Insert),
        index().prop_map(Action::Fork),
        index().prop_map(Action::Pre),
        index().prop_map(Action::Mid),
        index().prop_map(Action::Sampled),
        index().prop_map(Action::Free),
        Just(Action::Flush),
        prop::collection::vec(0..8_u8, 0..8).prop_map(Action::Answer),
        Just(Action::Refuse),
        (0..80_u64).prop_map(Action::Pass),
    ]
}

/// One result of each kind, also of the wrong kinds.
fn answer_of(kinds: &[u8], dialect: Abi, ids: &[u64]) -> Value {
    let result = |kind: u8| match kind {
        0 => json!(null),
        1 => json!({"suspend": false, "num_forks": 2, "ff_tokens": []}),
        2 => json!({"suspend": false, "num_forks": 1, "ff_tokens": [3]}),
        3 => json!({"stop": kinds.len().is_multiple_of(2)}),
        4 => json!({"branches": [{"splices": [{"ff_tokens": [1]}]}]}),
        5 => json!({"ff_tokens": [1], "backtrack": 0}),
        6 => json!({"suspend": true, "num_forks": 1, "ff_tokens": []}),
        _ => json!("?"),
    };
    let seqs = |offset: usize| {
        let seqs = ids.iter().enumerate().filter_map(|(index, id)| {
            let kind = *kinds.get((index + offset) % kinds.len().max(1))?;
            let logs = if kind == 6 {
                "⏲ timeout [deadline: 4ms]"
            } else {
                ""
            };
            let error = if kind == 7 { "Worker: timeout" } else { "" };
            let seq = json!({"error": error, "logs": logs, "result": result(kind)});
            (kind != 0 || offset == 0).then(|| (id.to_string(), seq))
        });
        Value::Object(seqs.collect())
    };
    match dialect {
        Abi::P1 => json!({"seqs": seqs(0), "post_seqs": seqs(1), "pre_seqs": seqs(2)}),
        Abi::P2 => {
            json!({"seqs": seqs(0), "dtype": "bool", "first_mask_byte_offset": 0, "mask_num_bytes": 8,
                          "mask_num_elts": 64, "num_masks": 1})
        }
    }
}

proptest! {
    /// Whatever order things happen in: no panic, one message at a time, no id twice in it, and at the end nothing is left
    /// that the runtime is not told to free.
    #[test]
    fn ai_853_any_order_of_asks_and_answers_ends_clean(
        is_p1 in any::<bool>(),
        actions in prop::collection::vec(action(), 0..120),
    ) {
        let dialect = if is_p1 { Abi::P1 } else { Abi::P2 };
        let mut play = Play::new(dialect, 3);
        let mut ids: Vec<u64> = Vec::new();
        let mut known = std::collections::BTreeSet::new();
        let mut open: Option<MainRequest> = None;
        for action in actions.into_iter().chain([Action::Answer(vec![4, 5])]) {
            let at = |index: usize| ids.get(index % ids.len().max(1)).copied();
            match action {
                Action::Insert => ids.push(play.insert("r")),
                Action::Fork(index) => {
                    let forked = at(index).and_then(|id| play.table.fork(id, 1));
                    ids.extend(forked);
                }
                Action::Pre(index) if is_p1 => if let Some(id) = at(index) { play.pre(id) },
                Action::Pre(_) => {}
                Action::Mid(index) => if let Some(id) = at(index) { play.mid(id) },
                Action::Sampled(index) => if let Some(id) = at(index) { play.sampled(id, 1) },
                Action::Free(index) => if let Some(id) = at(index) {
                    play.free(id);
                    ids.retain(|other| *other != id);
                },
                Action::Flush => drop(play.table.flush()),
                Action::Answer(kinds) => if let Some(request) = open.take() {
                    let live = play.table.sent_live().to_vec();
                    let data = answer_of(&kinds, dialect, &[&request.ids()[..], &live].concat());
                    let data = serde_json::value::to_raw_value(&data).unwrap();
                    let data = ReplyData::of_test(&data);
                    if let Ok(results) = read_step(&request, &live, data, &NoMasks, LIMITS) {
                        play.answers(results);
                    }
                },
                Action::Refuse => if open.take().is_some() {
                    let error = ReplyError { text: "no".into(), is_user: true };
                    play.table.refused(&error, play.now);
                },
                Action::Pass(ms) => play.now = play.now + Duration::from_millis(ms),
            }
            if let Some(request) = play.table.next_request(play.now) {
                prop_assert!(open.is_none());
                let mut listed = request.ids();
                known.extend(listed.iter().copied());
                listed.sort_unstable();
                let count = listed.len();
                listed.dedup();
                if !matches!(request, MainRequest::PostPre { .. }) {
                    prop_assert_eq!(listed.len(), count);
                }
                open = Some(request);
            }
        }
        for id in ids {
            play.free(id);
        }
        // What is left waits for a clone that nobody can ask for any more: there is none.
        prop_assert!(play.table.entries.values().all(|entry| entry.dropped));
    }
}
