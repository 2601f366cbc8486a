//! Fuzz entry point: arbitrary text as a constraint of any kind, and any choices among the tokens that it allows.
//!
//! Invariants: a constraint opens or is refused with a short text; its masks take a bounded time, allow something, and
//! what they allow is accepted; and a fork may do what its parent may. Built for tests and fuzzing only.

use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Branch, Mid, Post, Pre, SharedMask, Steer, SteerCall, SteerFailure, SteerSource,
    SteerUser, StepWaker, Token,
};

use super::{ConstraintConfig, ConstraintSource, MaskWorkers};
use crate::model::Model;
use crate::scripted::{Config, Script, Scripted};

/// The names of all kinds.
const KINDS: [&str; 6] = [
    "sapwood:regex",
    "sapwood:json-schema",
    "sapwood:lark",
    "sapwood:gbnf",
    "sapwood:substring",
    "sapwood:options",
];

/// Opens the constraint of the kind that the first byte says, with the text after the choices, whose number is the second
/// byte, and makes these choices.
///
/// # Panics
/// If an invariant does not hold.
pub fn constraint(bytes: &[u8]) {
    let [kind, number, rest @ ..] = bytes else {
        return;
    };
    let number = usize::from(number % 32).min(rest.len());
    let (choices, text) = rest.split_at(number);
    let text = String::from_utf8_lossy(text);
    let source = if kind & 0x80 == 0 { &*QUICK } else { &*PLAIN };
    // One at a time, also in tests that share this process: a second one would find the compiler busy.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = source.open(SteerCall {
        user: SteerUser {
            name: "localhost",
            is_admin: false,
            may_control: false,
        },
        controller: KINDS[usize::from(*kind) % KINDS.len()],
        arg: &text,
        watched: false,
        stops: false,
        sharer: None,
    });
    match opened {
        Ok(steer) => Play::new(steer).run(choices),
        Err(refusal) => {
            assert_eq!(refusal.reason, ErrorReason::INVALID_GRAMMAR, "{refusal:?}");
            assert!(refusal.message.len() < MESSAGE_BYTES_MAX, "{refusal:?}");
        }
    }
    wait_for_compiler(source);
}

static TURN: Mutex<()> = Mutex::new(());
/// A source that appends what is forced, and one that does not.
static QUICK: LazyLock<ConstraintSource> = LazyLock::new(|| source(true));
static PLAIN: LazyLock<ConstraintSource> = LazyLock::new(|| source(false));

fn source(fast_forward: bool) -> ConstraintSource {
    let config = Config {
        script: Script::Words,
        vocab: 1024,
        ..Config::default()
    };
    let model = Scripted::new(config).expect("a valid script");
    let config = ConstraintConfig {
        compile_threads: 1,
        // Nothing is kept, so that an input does what it did the last time.
        cache_bytes: 0,
        fast_forward,
        ..ConstraintConfig::default()
    };
    let workers = Arc::new(MaskWorkers::with_threads(1));
    ConstraintSource::new(model.vocabulary(), config, workers)
}

/// Bytes of errors, which quote what they are about, but not all of it.
const MESSAGE_BYTES_MAX: usize = 2_000;
/// The time of one mask: hundreds of times what its limits allow on a quiet machine.
const MASK_TIME_MAX: Duration = Duration::from_secs(10);
/// The time of a compilation that nobody waits for any more.
const COMPILE_TIME_MAX: Duration = Duration::from_secs(60);

/// A refused grammar may still be compiled, which would cost the next input its time.
fn wait_for_compiler(source: &ConstraintSource) {
    let begun = Instant::now();
    while source.compiler.overruns() > 0 {
        assert!(begun.elapsed() < COMPILE_TIME_MAX, "it compiles for ever");
        std::thread::yield_now();
    }
}

#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl StepWaker for Bell {
    fn wake(&self) {
        *self.rung.lock().expect("no panic") = true;
        self.changed.notify_all();
    }
}

impl Bell {
    fn wait(&self) {
        let rung = self.rung.lock().expect("no panic");
        let waited = self
            .changed
            .wait_timeout_while(rung, MASK_TIME_MAX, |rung| !*rung);
        let (mut rung, late) = waited.expect("no panic");
        assert!(!late.timed_out(), "nothing woke the engine");
        *rung = false;
    }
}

/// One sequence under a constraint.
struct Play {
    steer: Box<dyn Steer>,
    bell: Arc<Bell>,
    /// Tokens after the prompt.
    committed: u32,
}

/// The sequence ends here.
struct Over;

impl From<SteerFailure> for Over {
    fn from(failure: SteerFailure) -> Self {
        let SteerFailure { reason, message } = failure;
        let known = [ErrorReason::CONSTRAINT_FAILED, ErrorReason::LIMIT];
        assert!(known.contains(&reason), "{reason:?}: {message}");
        assert!(message.len() < MESSAGE_BYTES_MAX, "{message}");
        Self
    }
}

impl Play {
    fn new(mut steer: Box<dyn Steer>) -> Self {
        let bell = Arc::new(Bell::default());
        let waker: Arc<dyn StepWaker> = bell.clone();
        steer.begin(&[1, 2, 3], &waker);
        let begun = steer.begin_poll().expect("a constraint that opened begins");
        assert_eq!(begun.expect("at once").prompt, None);
        steer.bind(0);
        Self {
            steer,
            bell,
            committed: 0,
        }
    }

    fn run(mut self, choices: &[u8]) {
        for &choice in choices {
            if self.step(choice).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, choice: u8) -> Result<(), Over> {
        let twin = (choice & 0x80 != 0).then(|| self.steer.fork(1));
        let forced = self.forced()?;
        let mask = self.mask()?;
        if let Some(twin) = twin {
            let mut twin = Self {
                steer: twin?,
                bell: Arc::clone(&self.bell),
                committed: self.committed,
            };
            twin.steer.bind(1);
            assert_eq!(twin.forced()?, forced, "a fork is forced otherwise");
            assert_eq!(twin.mask()?, mask, "a fork has another mask");
        }
        if choice & 0x60 == 0x60 && self.committed > 0 {
            self.committed -= 1;
            return self.append(1, &[], None);
        }
        let count = mask.count();
        assert!(count > 0, "no token is allowed");
        let allowed = (0..).take(mask.vocabulary());
        let mut allowed = allowed.filter(|token| mask.allows(*token));
        let token = allowed.nth(usize::from(choice & 0x1f) * 37 % count);
        let token: Token = token.expect("there are so many");
        assert!(self.steer.would_accept(0, &[token])?, "of its own mask");
        self.committed += 1;
        self.append(0, &[token], Some(token))
    }

    fn forced(&mut self) -> Result<Vec<Token>, Over> {
        loop {
            match self.steer.pre()? {
                Some(Pre::Run { fast_forward }) => {
                    self.committed += fast_forward.len() as u32;
                    return Ok(fast_forward);
                }
                Some(other) => panic!("a constraint neither forks nor stops in `pre`: {other:?}"),
                None => self.bell.wait(),
            }
        }
    }

    fn mask(&mut self) -> Result<SharedMask, Over> {
        let begun = Instant::now();
        self.steer.mid_begin(&[0]);
        let mid = loop {
            match self.steer.mid_poll()? {
                Some(mid) => break mid,
                None => self.bell.wait(),
            }
        };
        assert!(begun.elapsed() < MASK_TIME_MAX);
        match mid {
            Mid::One(Branch::Sample(sample)) => Ok(sample.mask.expect("a constraint has one")),
            Mid::Stop => Err(Over),
            other => panic!("a constraint does not: {other:?}"),
        }
    }

    fn append(
        &mut self,
        backtrack: u32,
        tokens: &[Token],
        sampled: Option<Token>,
    ) -> Result<(), Over> {
        let post = self.steer.post(Appended {
            backtrack,
            tokens,
            sampled,
        });
        match post {
            Ok(Post::Continue) => Ok(()),
            Ok(Post::Stop) => Err(Over),
            Err(failure) => {
                let text = "the constraint does not allow";
                assert!(!failure.message.starts_with(text), "{}", failure.message);
                Err(failure.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    #[test]
    fn the_corpus_is_replayed() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/constraint");
        let files = std::fs::read_dir(folder).expect("a committed corpus");
        let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty());
        for file in files {
            super::constraint(&std::fs::read(file).unwrap());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

        /// AI-841
        #[test]
        fn any_text_is_a_constraint_or_refused(
            kind in any::<u8>(),
            text in "([\\[\\](){}|*+?.:=\"/\\\\a-c0-9 \n]|start: |root ::= |\"type\"|\"a\"|%json ){0,16}",
        ) {
            let choices = [0x01, 0x85, 0x62, 0x13];
            let head = [kind, choices.len() as u8];
            super::constraint(&[&head[..], &choices, text.as_bytes()].concat());
        }
    }
}
