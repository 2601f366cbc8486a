//! Texts that take a tokenizer long (AI-731). A process that is late is killed whatever it does; these are of threads.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A tokenizer that does not return before it is let through, but for short texts.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    calls: AtomicU32,
}

impl Gate {
    fn pass(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let is_open = self.is_open.lock().unwrap();
        let closed = |is_open: &mut bool| !*is_open;
        drop(self.opened.wait_while(is_open, closed).unwrap());
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn model(self: &Arc<Self>) -> Arc<HostModel> {
        let gate = Arc::clone(self);
        let tokens = (0..128_u8).map(|byte| TokenEntry::text([byte]));
        Arc::new(HostModel::new(tokens.collect(), 0, move |text: &str| {
            assert!(!text.starts_with('!'), "a defect of the tokenizer");
            if text.len() > 4096 {
                gate.pass();
            }
            text.bytes().map(Token::from).collect::<Vec<_>>()
        }))
    }
}

/// Tokenises so many bytes from `at` on, and prints how many bytes the tokens have.
fn tokenize(host: &Host, model: &Arc<HostModel>, at: u32, bytes: u32) -> Outcome {
    let mid = format!(
        "(drop (call $tokenize (i32.const {at}) (i32.const {bytes})))
         (call $hex (call $blob (i32.const 2) (i32.const 0) (i32.const 0)))
         (call $ret (i32.const 64) (i32.const 21))"
    );
    let text = P1 {
        functions: "(data (i32.const 16384) \"!\")",
        mid: &mid,
        ..P1::default()
    }
    .text();
    let group = Group::new(16, VariablesLimits::default());
    let start = (Arc::clone(model), "");
    Sequence::start_of(host, &load(host, &text), &group, start)
        .begun()
        .mid()
}

#[test]
fn ai_731_a_callback_does_not_wait_for_its_tokenizer_beyond_its_time() {
    let gate = Arc::new(Gate::default());
    let model = gate.model();
    let host = Host::new(HostConfig {
        step_time: Duration::from_millis(20),
        late_steps: 1,
        ..small()
    })
    .unwrap();
    // On a busy machine a callback may be late before it comes to its text.
    Bell::default().wait(|| {
        let late = failure(tokenize(&host, &model, 1024, 5000));
        assert_eq!(late.reason, ErrorReason::TIMEOUT);
        (gate.calls.load(Ordering::Relaxed) == 1).then_some(())
    });
    // It still has the only thread, so the next one waits for that, and in vain too.
    let late = failure(tokenize(&host, &model, 1024, 5000));
    assert_eq!(late.reason, ErrorReason::TIMEOUT);
    assert_eq!(gate.calls.load(Ordering::Relaxed), 1);
    gate.open();
    // A busy machine may make a callback late once more.
    Bell::default().wait(|| {
        let outcome = tokenize(&host, &model, 1024, 5000);
        outcome.result.is_ok().then_some(())
    });
    wait_until_free(&host);
}

#[test]
fn ai_605_long_texts_have_the_same_tokens_and_defects_as_short_ones() {
    let gate = Arc::new(Gate::default());
    gate.open();
    let model = gate.model();
    let host = host();
    for (bytes, printed) in [
        (4096, "00004000 "),
        (4097, "00004004 "),
        (65536, "00040000 "),
    ] {
        let outcome = tokenize(&host, &model, 1024, bytes);
        assert!(outcome.result.is_ok(), "{outcome:?}");
        assert_eq!(outcome.report.logs, printed);
    }
    for bytes in [100, 10_000] {
        let failure = failure(tokenize(&host, &model, 16384, bytes));
        assert_eq!(failure.reason, ErrorReason::TRAP, "{failure}");
    }
    wait_until_free(&host);
}
