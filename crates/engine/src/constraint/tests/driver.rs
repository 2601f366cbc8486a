//! Runs a constraint as an engine does, with a sampler that chooses at random among the allowed tokens.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use sapwood_proto::steer::{
    Appended, Branch, Mid, Post, Pre, SharedMask, Steer, SteerCall, SteerFailure, SteerRefusal,
    SteerSource, SteerUser, StepWaker, Token,
};

use super::super::{ConstraintConfig, ConstraintSource, MaskWorkers};
use super::vocabulary::small;
use crate::api::SharedVocabulary;

/// Longer than any mask takes, so that a test that waits for nothing fails instead of hanging.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A configuration with time enough for unoptimised code on a busy machine.
pub(super) fn config() -> ConstraintConfig {
    ConstraintConfig {
        compile_time: Duration::from_secs(30),
        ..ConstraintConfig::default()
    }
}

pub(super) fn source() -> ConstraintSource {
    source_of(small(), config())
}

pub(super) fn source_of(
    vocabulary: SharedVocabulary,
    config: ConstraintConfig,
) -> ConstraintSource {
    ConstraintSource::new(vocabulary, config, Arc::new(MaskWorkers::with_threads(1)))
}

pub(super) fn open(
    source: &ConstraintSource,
    controller: &str,
    arg: &str,
) -> Result<Box<dyn Steer>, SteerRefusal> {
    open_for(source, controller, arg, false)
}

/// The same for a request that has stops or not.
pub(super) fn open_for(
    source: &ConstraintSource,
    controller: &str,
    arg: &str,
    stops: bool,
) -> Result<Box<dyn Steer>, SteerRefusal> {
    source.open(SteerCall {
        user: SteerUser {
            name: "localhost",
            is_admin: false,
            may_control: false,
        },
        controller,
        arg,
        watched: false,
        stops,
        sharer: None,
    })
}

/// The refusal of a constraint that must not open.
pub(super) fn refusal(source: &ConstraintSource, controller: &str, arg: &str) -> SteerRefusal {
    open(source, controller, arg).err().expect("it is refused")
}

/// A small generator of pseudo-random numbers (SplitMix64).
#[derive(Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) >> 33).unwrap() % limit
    }
}

#[derive(Default)]
struct Wake {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl StepWaker for Wake {
    fn wake(&self) {
        *self.woken.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

/// What came of one `mid`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    Mask(SharedMask),
    Stop,
}

/// One constrained sequence.
pub(super) struct Sequence {
    pub(super) steer: Box<dyn Steer>,
    pub(super) tokens: Vec<Token>,
    pub(super) ended: bool,
    vocabulary: SharedVocabulary,
    wake: Arc<Wake>,
}

impl Sequence {
    pub(super) fn new(steer: Box<dyn Steer>) -> Self {
        Self::with_vocabulary(steer, small())
    }

    pub(super) fn with_vocabulary(mut steer: Box<dyn Steer>, vocabulary: SharedVocabulary) -> Self {
        let wake = Arc::new(Wake::default());
        let waker: Arc<dyn StepWaker> = wake.clone();
        steer.begin(&[1, 2, 3], &waker);
        assert_eq!(steer.begin_poll().unwrap().unwrap().prompt, None);
        steer.bind(0);
        Self {
            steer,
            tokens: Vec::new(),
            ended: false,
            vocabulary,
            wake,
        }
    }

    pub(super) fn fork(&mut self) -> Self {
        Self {
            steer: self.steer.fork(1).unwrap(),
            tokens: self.tokens.clone(),
            ended: self.ended,
            vocabulary: Arc::clone(&self.vocabulary),
            wake: Arc::clone(&self.wake),
        }
    }

    /// Calls `pre`, and appends what it forces.
    pub(super) fn pre(&mut self) -> Vec<Token> {
        let fast_forward = self.forced().unwrap();
        // As the engine does: what `pre` forces is not reported to `post`.
        self.tokens.extend_from_slice(&fast_forward);
        fast_forward
    }

    /// What `pre` forces, once it is there.
    pub(super) fn forced(&mut self) -> Result<Vec<Token>, SteerFailure> {
        loop {
            match self.steer.pre()? {
                Some(Pre::Run { fast_forward }) => return Ok(fast_forward),
                Some(other) => panic!("a constraint neither forks nor stops in `pre`: {other:?}"),
                None => self.sleep(),
            }
        }
    }

    /// Waits until the steerer wakes its engine.
    fn sleep(&self) {
        let woken = self.wake.woken.lock().unwrap();
        let waits = |woken: &mut bool| !*woken;
        let (mut woken, late) = self
            .wake
            .changed
            .wait_timeout_while(woken, WAIT_MAX, waits)
            .unwrap();
        assert!(!late.timed_out(), "nothing woke the engine");
        *woken = false;
    }

    /// Runs `mid` and waits for its result.
    pub(super) fn mid(&mut self) -> Result<Step, SteerFailure> {
        self.steer.mid_begin(&[0]);
        loop {
            if let Some(mid) = self.steer.mid_poll()? {
                return Ok(match mid {
                    Mid::One(Branch::Sample(sample)) => Step::Mask(sample.mask.unwrap()),
                    Mid::Stop => Step::Stop,
                    other => panic!("unexpected {other:?}"),
                });
            }
            self.sleep();
        }
    }

    pub(super) fn append(
        &mut self,
        backtrack: u32,
        tokens: &[Token],
        sampled: Option<Token>,
    ) -> Result<(), SteerFailure> {
        self.tokens.truncate(self.tokens.len() - backtrack as usize);
        self.tokens.extend_from_slice(tokens);
        let post = self.steer.post(Appended {
            backtrack,
            tokens,
            sampled,
        })?;
        self.ended = post == Post::Stop
            || tokens
                .iter()
                .any(|&token| self.vocabulary.is_end(token) && self.steer.ends_at_eos());
        Ok(())
    }

    /// One step: `pre`, `mid`, and a sampled token. `None`: the sequence has ended.
    pub(super) fn step(&mut self, choose: impl FnOnce(&[Token]) -> Token) -> Option<SharedMask> {
        self.pre();
        if self.ended {
            return None;
        }
        match self.mid().unwrap() {
            Step::Stop => {
                self.ended = true;
                None
            }
            Step::Mask(mask) => {
                let allowed: Vec<Token> = (0..)
                    .take(mask.vocabulary())
                    .filter(|&token| mask.allows(token))
                    .collect();
                let token = choose(&allowed);
                self.append(0, &[token], Some(token)).unwrap();
                Some(mask)
            }
        }
    }

    /// Samples until the end. After some tokens it prefers those that close something.
    pub(super) fn run(&mut self, random: &mut Random) {
        for round in 0..3000 {
            if self.ended {
                return;
            }
            let vocabulary = Arc::clone(&self.vocabulary);
            self.step(|allowed| choose(&vocabulary, allowed, round > 40, random));
        }
        panic!("no end: {:?}", self.text());
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let bytes = self
            .tokens
            .iter()
            .map(|&token| self.vocabulary.bytes(token));
        bytes.collect::<Vec<_>>().concat()
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }
}

fn choose(
    vocabulary: &SharedVocabulary,
    allowed: &[Token],
    closes: bool,
    random: &mut Random,
) -> Token {
    if closes {
        let end = allowed.iter().find(|&&token| vocabulary.is_end(token));
        let close =
            |token: &&Token| matches!(vocabulary.bytes(**token), b"\"" | b"}" | b"]" | b"0");
        let close = end.or_else(|| allowed.iter().find(close));
        if let Some(&token) = close
            && random.below(4) > 0
        {
            return token;
        }
    }
    allowed[random.below(allowed.len())]
}

/// The output of one run.
pub(super) fn output(source: &ConstraintSource, controller: &str, arg: &str, seed: u64) -> String {
    let steer = open(source, controller, arg).unwrap();
    let mut sequence = Sequence::new(steer);
    sequence.run(&mut Random::new(seed));
    String::from_utf8(sequence.bytes()).unwrap()
}
