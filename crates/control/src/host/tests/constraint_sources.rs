//! Sources of constraints that are hostile, or that there are none of, and what an engine shows (AI-1007, AI-1009). Their
//! models are not those of the template, so these run on threads alone.

use std::sync::mpsc::sync_channel;

use sapwood_proto::steer::{
    HostConstraint, HostConstraintCall, HostConstraintSource, Mask, SharedMask, SteerFailure,
    Steered,
};

use super::constraints::{logs, module, returning, start};
use super::*;

#[test]
fn ai_1007_without_constraints_a_module_starts_and_is_told() {
    let body = "(call $hex (call $open)) (call $blob_text (i32.const 6))
        (call $hex (call $prefix (i32.const 3160) (i32.const 1)))";
    let outcome = start(&host(), &model(), &module(body)).process();
    assert_eq!(
        logs(outcome),
        "00000000 this runtime has no constraints00000001 "
    );
}

/// AI-1009: what the engine shows outlasts a callback, and forks have it.
#[test]
fn ai_1009_a_controller_sees_the_best_tokens_of_the_last_row() {
    let body = r#"
        (call $hex (call $top (i32.const 3) (i32.const 5000)))
        (call $hex (i32.load (i32.const 5000))) (call $hex (i32.load (i32.const 5004)))
        (call $hex (i32.load (i32.const 5008))) (call $hex (i32.load (i32.const 5012)))
        (call $hex (call $top (i32.const 1) (i32.const 131064)))
        (call $hex (call $top (i32.const -1) (i32.const 131056)))
        (call $hex (call $config (i32.const 3200) (i32.const 6)))"#;
    let text = module(body).replacen(
        "(data (i32.const 3160)",
        "(data (i32.const 3200) \"logits\") (data (i32.const 3160)",
        1,
    );
    let host = host();
    let mut sequence = start(&host, &model(), &text);
    let nothing = "00000000 00000000 00000000 00000000 00000000 ";
    assert_eq!(
        logs(sequence.process()),
        format!("{nothing}00000000 00000000 00000001 ")
    );
    sequence.instance.show_best_tokens(&[(7, -0.5), (9, -1.5)]);
    let both = "00000002 00000007 bf000000 00000009 bfc00000 00000001 00000002 00000001 ";
    assert_eq!(logs(sequence.process()), both);
    let mut fork = sequence.fork();
    sequence.instance.show_best_tokens(&[]);
    assert!(logs(sequence.process()).starts_with("00000000 "));
    assert_eq!(logs(fork.process()), both);
    let mut sequence = start(
        &host,
        &model(),
        &module("(drop (call $top (i32.const 2) (i32.const 131057)))"),
    );
    sequence.instance.show_best_tokens(&[(7, -0.5), (9, -1.5)]);
    let failure = failure(sequence.process());
    let text = "out of bounds pointer passed to top_logits";
    assert!(failure.message.ends_with(text), "{failure}");
}

/// Behaves as a source of grammars whose memory or time a guest controls.
struct HostileSource {
    /// What each constraint takes.
    bytes: usize,
    /// Compiles for as long as it may.
    endless: bool,
}

struct HostileConstraint(usize);

/// A constraint of so many bytes has a defect that shows when it is copied.
const UNFORKABLE: usize = 13;

impl HostConstraintSource for HostileSource {
    fn open(&self, call: HostConstraintCall<'_>) -> Result<Box<dyn HostConstraint>, String> {
        if self.endless {
            let (_sender, receiver) = sync_channel::<()>(0);
            let _late = receiver.recv_timeout(call.time);
            return Err("it takes too long to compile".to_owned());
        }
        Ok(Box::new(HostileConstraint(self.bytes)))
    }
}

impl HostConstraint for HostileConstraint {
    fn consume(&mut self, token: Token) -> Steered<bool> {
        self.0 += token as usize;
        Ok(true)
    }

    fn rollback(&mut self, tokens: u32) -> Steered<()> {
        self.0 -= tokens as usize;
        Ok(())
    }

    fn mask(&mut self) -> Steered<SharedMask> {
        // Of a vocabulary that lacks the padding of the host's.
        Ok(Arc::new(Mask::all(40)))
    }

    fn forced(&mut self) -> Steered<Vec<Token>> {
        panic!("a defect in the library")
    }

    fn fork(&mut self) -> Steered<Box<dyn HostConstraint>> {
        assert_ne!(self.0, UNFORKABLE, "a defect in the library");
        Ok(Box::new(Self(self.0)))
    }

    fn bytes(&mut self) -> usize {
        self.0
    }
}

/// Its masks take as long as they may. Refuses all callers but one.
struct SlowSource;

struct SlowConstraint(Option<Duration>);

impl HostConstraintSource for SlowSource {
    fn open(&self, call: HostConstraintCall<'_>) -> Result<Box<dyn HostConstraint>, String> {
        match call.user {
            "anna" => Ok(Box::new(SlowConstraint(None))),
            other => Err(format!("of {other:?}")),
        }
    }
}

impl HostConstraint for SlowConstraint {
    fn limit_time(&mut self, left: Option<Duration>) {
        self.0 = left;
    }

    fn consume(&mut self, _token: Token) -> Steered<bool> {
        Ok(true)
    }

    fn rollback(&mut self, _tokens: u32) -> Steered<()> {
        Ok(())
    }

    fn mask(&mut self) -> Steered<SharedMask> {
        let (_sender, receiver) = sync_channel::<()>(0);
        let _late = receiver.recv_timeout(self.0.unwrap());
        Err(SteerFailure {
            reason: ErrorReason::LIMIT,
            message: "it takes too long to follow".to_owned(),
        })
    }

    fn forced(&mut self) -> Steered<Vec<Token>> {
        Ok(Vec::new())
    }

    fn fork(&mut self) -> Steered<Box<dyn HostConstraint>> {
        Ok(Box::new(Self(self.0)))
    }

    fn bytes(&mut self) -> usize {
        0
    }
}

/// AI-731
#[test]
fn ai_1007_a_mask_that_takes_too_long_ends_with_the_callback() {
    let host = Host::new(HostConfig {
        step_time: Duration::from_millis(20),
        late_steps: 1,
        ..small()
    })
    .unwrap();
    let model = Arc::new(bare_model().with_constraints(Arc::new(SlowSource)));
    let program = load(&host, &module("(drop (call $mask (call $open)))"));
    let group = Group::new(4, VariablesLimits::default());
    group.set_caller("anna");
    let around = (Arc::clone(&model), "arg");
    let mut sequence = Sequence::start_of(&host, &program, &group, around).begun();
    // Of the time, and not of the constraint, which has failed for the lack of it.
    assert_eq!(failure(sequence.process()).reason, ErrorReason::TIMEOUT);
}

/// AI-841
#[test]
fn ai_1007_a_source_of_constraints_knows_whose_request_it_is() {
    let host = host();
    let model = Arc::new(bare_model().with_constraints(Arc::new(SlowSource)));
    let body = "(call $hex (call $open)) (call $blob_text (i32.const 6))";
    let program = load(&host, &module(body));
    for (caller, expected) in [("anna", "00000001 "), ("bert", "00000000 of \"bert\"")] {
        let group = Group::new(4, VariablesLimits::default());
        group.set_caller(caller);
        let around = (Arc::clone(&model), "arg");
        let mut sequence = Sequence::start_of(&host, &program, &group, around).begun();
        assert_eq!(logs(sequence.process()), expected);
    }
}

fn hostile_model(bytes: usize, endless: bool) -> Arc<HostModel> {
    let source = HostileSource { bytes, endless };
    Arc::new(bare_model().with_constraints(Arc::new(source)))
}

/// AI-741: a page is 64 KiB, and a test's instance has 4 MiB.
#[test]
fn ai_1007_constraints_count_against_the_memory_of_the_instance() {
    let host = host();
    let run =
        |bytes, body: &str| start(&host, &hostile_model(bytes, false), &module(body)).process();
    let room = (4 << 20) - (2 << 16);
    assert!(run(room, "(drop (call $open))").result.is_ok());
    assert_eq!(
        failure(run(room + 1, "(drop (call $open))")).reason,
        ErrorReason::MEMORY
    );
    // The memory of the guest has less room.
    let grow = "(drop (call $open)) (drop (memory.grow (i32.const 1)))";
    assert!(run(room - (1 << 16), grow).result.is_ok());
    assert_eq!(failure(run(room, grow)).reason, ErrorReason::MEMORY);
    // It grows while it is used, and shrinks.
    let consume = "(call $start (i32.const 0)) (drop (call $consume (global.get $h) (i32.const 90)))
        (call $rollback (global.get $h) (i32.const 80)) (drop (call $consume (global.get $h) (i32.const 90)))";
    assert!(run(room - 100, consume).result.is_ok());
    assert_eq!(failure(run(room - 99, consume)).reason, ErrorReason::MEMORY);
    let free = "(call $free (call $open)) (call $free (call $open))";
    assert!(run(room, free).result.is_ok());
    wait_until_free(&host);
}

/// AI-714
#[test]
fn ai_1007_a_fork_that_there_is_no_memory_for_fails_alone() {
    let host = Host::new(HostConfig {
        memory_total_bytes: 5 << 20,
        ..small()
    })
    .unwrap();
    let body = "(call $start (i32.const 0)) (call $hex (global.get $h))";
    let mut parent = start(&host, &hostile_model(3 << 20, false), &module(body));
    assert_eq!(logs(parent.process()), "00000001 ");
    let mut child = parent.fork();
    let failure = failure(child.outcome());
    assert_eq!(
        (failure.reason, &failure.message[..]),
        (ErrorReason::MEMORY, "controller memory exhausted")
    );
    assert_eq!(logs(parent.process()), "00000001 ");
    drop((parent, child));
    wait_until_free(&host);
}

/// AI-731
#[test]
fn ai_1007_an_endless_compilation_ends_with_the_callback() {
    let host = Host::new(HostConfig {
        step_time: Duration::from_millis(20),
        late_steps: 1,
        ..small()
    })
    .unwrap();
    let body = "(loop $l (drop (call $open)) (br $l))";
    let mut sequence = start(&host, &hostile_model(0, true), &module(body));
    assert_eq!(failure(sequence.process()).reason, ErrorReason::TIMEOUT);
    // Calls that are quick do not go on for ever either: 100,000 in a row have no loop between them that could be interrupted.
    let body = "(loop $l (call $free (call $open)) (br $l))";
    let mut sequence = start(&host, &hostile_model(0, false), &module(body));
    assert_eq!(failure(sequence.process()).reason, ErrorReason::TIMEOUT);
}

/// AI-742
#[test]
fn ai_1007_a_defect_in_a_constraint_ends_its_sequence_alone() {
    let host = host();
    let model = hostile_model(0, false);
    let mut sequence = start(&host, &model, &module("(drop (call $ff (call $open)))"));
    assert_eq!(failure(sequence.process()).reason, ErrorReason::TRAP);
    // A mask is as wide as the vocabulary of the host.
    let wide = "(drop (call $return (call $mask (call $open))))
        (drop (call $return (call $not (call $mask (i32.const 1)))))";
    let json = r#"{"branches":[{"sample_mask":0},{"sample_mask":1}]}"#;
    let outcome = start(&host, &model, &returning(wide, json)).process();
    let Ok(Returned::Branches(branches)) = outcome.result else {
        panic!("{outcome:?}");
    };
    let count = |branch: &ReturnedBranch| branch.mask.as_ref().unwrap().count();
    assert_eq!((count(&branches[0]), count(&branches[1])), (40, 60));
}

/// AI-742
#[test]
fn ai_714_a_defect_in_the_copy_of_a_constraint_fails_the_fork_and_is_no_outcome_of_its_parent() {
    let host = host();
    let model = hostile_model(UNFORKABLE, false);
    let body = "(call $start (i32.const 0)) (call $hex (global.get $h))";
    let mut parent = start(&host, &model, &module(body));
    assert_eq!(logs(parent.process()), "00000001 ");
    let mut child = parent.fork();
    assert_eq!(failure(child.outcome()).reason, ErrorReason::TRAP);
    assert!(parent.instance.poll().is_none());
    // Its state is lost with the copy.
    assert!(parent.process().result.is_err());
    drop((parent, child));
    wait_until_free(&host);
}
