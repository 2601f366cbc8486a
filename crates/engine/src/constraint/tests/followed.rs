//! Constraints that controllers follow through the host's functions (AI-1007).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{HostConstraint, HostConstraintCall, HostConstraintSource, Token};

use super::driver::{Random, config, source, source_of};
use super::vocabulary::{CONTROL, END, END_OF_TURN, lacking, small};
use crate::api::{ChatRequest, EngineError, SharedVocabulary, Vocabulary};
use crate::constraint::{ConstraintConfig, ConstraintSource};

type Followed = Box<dyn HostConstraint>;

fn follow(source: &ConstraintSource, kind: &str, value: &str) -> Followed {
    let opened = HostConstraintSource::open(source, call(kind, value, Duration::MAX));
    opened.unwrap_or_else(|error| panic!("{kind} {value}: {error}"))
}

fn refused(source: &ConstraintSource, kind: &str, value: &str, time: Duration) -> String {
    let opened = HostConstraintSource::open(source, call(kind, value, time));
    opened.err().expect("it is refused")
}

fn call<'a>(kind: &'a str, value: &'a str, time: Duration) -> HostConstraintCall<'a> {
    HostConstraintCall {
        kind,
        value,
        user: "anna",
        time,
    }
}

fn text(tokens: &[Token]) -> String {
    let bytes = tokens
        .iter()
        .flat_map(|token| small().bytes(*token).to_vec());
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

fn allowed(followed: &mut Followed) -> Vec<Token> {
    let mask = followed.mask().unwrap();
    let ids = 0..Token::try_from(mask.vocabulary()).unwrap();
    ids.filter(|id| mask.allows(*id)).collect()
}

const CASES: [(&str, &str); 6] = [
    ("regex", "[ab]{2,4}(c|é)*x"),
    (
        "json-schema",
        r#"{"type":"object","properties":{"name":{"type":"string","maxLength":6}},"required":["name"]}"#,
    ),
    ("lark", "start: \"hel\" (\"lo\" | \"p\") \" world\"?"),
    ("gbnf", "root ::= [0-9]+ (\",\" [0-9]+)*"),
    ("substring", "true bananas"),
    ("options", r#"["hello world", "help", "hel"]"#),
];

/// Walks at random, with rollbacks and forks; after each step the mask is that of a fresh constraint which has consumed the
/// same tokens.
#[test]
fn ai_1007_what_was_rolled_back_and_forked_is_as_if_it_had_never_been() {
    let source = source();
    for (seed, (kind, value)) in (1..).zip(CASES) {
        let mut random = Random::new(seed);
        let mut followed = follow(&source, kind, value);
        let mut consumed: Vec<Token> = Vec::new();
        for _ in 0..60 {
            let ids = allowed(&mut followed);
            let mut fresh = follow(&source, kind, value);
            for token in &consumed {
                assert!(
                    fresh.consume(*token).unwrap(),
                    "{kind}: {}",
                    text(&consumed)
                );
            }
            assert_eq!(ids, allowed(&mut fresh), "{kind}: {}", text(&consumed));
            if random.below(4) == 0 || ids.is_empty() {
                let back = random.below(consumed.len() + 1);
                followed.rollback(u32::try_from(back).unwrap()).unwrap();
                consumed.truncate(consumed.len() - back);
            } else if random.below(5) == 0 {
                let fork = followed.fork().unwrap();
                // The other one goes its own way.
                let _allowed = followed.consume(ids[random.below(ids.len())]).unwrap();
                followed = fork;
            } else {
                let token = ids[random.below(ids.len())];
                assert!(followed.consume(token).unwrap(), "{kind}: {token}");
                consumed.push(token);
            }
        }
    }
}

/// AI-842
#[test]
fn ai_1007_a_token_that_is_not_allowed_changes_nothing() {
    let mut followed = follow(&source(), "regex", "ab|abc");
    let (a, b, c) = (u32::from(b'a'), u32::from(b'b'), u32::from(b'c'));
    for wrong in [b, END, CONTROL, 100_000, Token::MAX] {
        assert!(!followed.consume(wrong).unwrap(), "{wrong}");
    }
    assert!(followed.consume(a).unwrap() && !followed.consume(a).unwrap());
    assert!(followed.consume(b).unwrap());
    assert_eq!(allowed(&mut followed), [c, END, END_OF_TURN]);
    assert!(followed.consume(END_OF_TURN).unwrap());
    // Nothing follows an end, a second one neither.
    assert!(allowed(&mut followed).is_empty());
    assert!(!followed.consume(END).unwrap() && !followed.consume(c).unwrap());
    assert!(followed.forced().unwrap().is_empty());
    followed.rollback(1).unwrap();
    assert!(followed.consume(c).unwrap());
    assert_eq!(allowed(&mut followed), [END, END_OF_TURN]);
    let error = followed.rollback(4).unwrap_err();
    assert_eq!(error.message, "backtrack 4 past the beginning");
    followed.rollback(3).unwrap();
    assert!(followed.consume(a).unwrap());
}

#[test]
fn ai_1007_forced_tokens_are_the_models_own() {
    let mut followed = follow(&source(), "options", r#"["hello world"]"#);
    let forced = followed.forced().unwrap();
    assert_eq!((text(&forced).as_str(), forced.len()), ("hello world", 2));
    for token in forced {
        assert!(followed.consume(token).unwrap());
    }
    assert_eq!(allowed(&mut followed), [END, END_OF_TURN]);
}

/// Where no token can go on, the mask is empty, and what was consumed can still be taken back.
#[test]
fn ai_1007_a_dead_end_can_be_left() {
    let source = source_of(lacking(b"cd"), config());
    let mut followed = follow(&source, "regex", "ba(c|d)");
    let (a, b) = (u32::from(b'a'), u32::from(b'b'));
    assert!(followed.consume(b).unwrap() && followed.consume(a).unwrap());
    assert!(allowed(&mut followed).is_empty());
    assert!(!followed.consume(b).unwrap());
    followed.rollback(2).unwrap();
    assert!(followed.consume(b).unwrap());
}

/// AI-841
#[test]
fn ai_1007_what_is_no_pattern_is_refused() {
    let (source, time) = (source(), Duration::MAX);
    assert_eq!(
        refused(&source, "sapwood:regex", "a", time),
        "there is no constraint of this name; use one of regex, json-schema, lark, gbnf, substring, options"
    );
    assert!(refused(&source, "regex", "(", time).starts_with("invalid grammar: "));
    // The value is the pattern itself, so there is no form with members.
    let object = refused(&source, "options", r#"{"value":["a"]}"#, time);
    assert_eq!(
        object,
        "invalid grammar: at option 0: options are a list of strings"
    );
    let long = "a".repeat(ConstraintConfig::default().grammar_bytes + 1);
    assert!(refused(&source, "regex", &long, time).contains("an argument may have"));
}

/// AI-841
#[test]
fn ai_1007_a_constraint_does_not_compile_for_longer_than_its_caller_has() {
    let config = ConstraintConfig {
        compile_threads: 1,
        ..config()
    };
    let source = source_of(small(), config);
    let late = refused(&source, "regex", "a{1,90}b{1,90}", Duration::ZERO);
    assert_eq!(
        late,
        "invalid grammar: it takes too long to compile; make it simpler"
    );
    let permit = source.compiler.permit(None, Duration::MAX).unwrap();
    let short = Duration::from_millis(20);
    assert!(refused(&source, "regex", "abc", short).contains("too many grammars"));
    drop(permit);
    assert!(
        follow(&source, "regex", "abc")
            .consume(u32::from(b'a'))
            .unwrap()
    );
}

/// AI-841
#[test]
fn ai_1007_the_grammars_of_one_caller_leave_others_their_share() {
    let config = ConstraintConfig {
        compile_threads: 4,
        compile_overruns: 0,
        ..config()
    };
    let source = source_of(small(), config);
    // Her own is half of the threads.
    let own = || source.compiler.permit(Some("anna"), Duration::MAX);
    let permits = [own().unwrap(), own().unwrap()];
    let short = Duration::from_millis(20);
    assert!(refused(&source, "regex", "abc", short).contains("too many grammars"));
    let other = HostConstraintCall {
        user: "bert",
        ..call("regex", "abc", Duration::MAX)
    };
    assert!(HostConstraintSource::open(&source, other).is_ok());
    drop(permits);
}

/// The n-th byte costs as much as the square of n.
const AMBIGUOUS: &str = "start: s\ns: s s | \"a\"";

/// AI-731
#[test]
fn ai_1007_a_constraint_is_followed_no_longer_than_its_callback_lasts() {
    let source = source();
    let follow_for = |followed: &mut Followed, time: Duration| {
        let began = Instant::now();
        followed.limit_time(Some(time));
        let late = (0..4000).find_map(|_| followed.consume(u32::from(b'a')).err());
        let late = late.expect("each token takes longer than those before");
        assert_eq!(late.reason, ErrorReason::LIMIT, "{}", late.message);
        assert!(late.message.contains("takes too long to follow"));
        began.elapsed()
    };
    let mut followed = follow(&source, "lark", AMBIGUOUS);
    assert!(followed.consume(u32::from(b'a')).unwrap());
    let mut fork = followed.fork().unwrap();
    assert!(follow_for(&mut followed, Duration::from_millis(100)) >= Duration::from_millis(100));
    // A copy is cancelled on its own.
    assert!(fork.consume(u32::from(b'a')).unwrap());
    follow_for(&mut fork, Duration::from_millis(100));
    // Without a deadline nothing is cancelled, and what was stays so.
    followed.limit_time(None);
    assert!(followed.mask().is_err());
    drop((followed, fork));
    assert!(
        follow(&source, "lark", AMBIGUOUS)
            .consume(u32::from(b'a'))
            .unwrap()
    );
}

#[test]
fn ai_1007_what_a_constraint_takes_grows_with_its_use() {
    let mut followed = follow(&source(), "regex", "([a-z]+ ?)*");
    let before = followed.bytes();
    for token in "an and a ".repeat(50).bytes() {
        assert!(followed.consume(token.into()).unwrap());
    }
    let after = followed.bytes();
    assert!(after > before + 450 * 64, "{before} {after}");
    assert_eq!(followed.fork().unwrap().bytes(), after);
    followed.rollback(450).unwrap();
    assert!(followed.bytes() < after);
}

/// Notes whether it is read after its reader should have ended.
struct WatchedVocabulary {
    inner: SharedVocabulary,
    is_over: AtomicBool,
    was_read: AtomicBool,
}

impl Vocabulary for WatchedVocabulary {
    fn size(&self) -> usize {
        self.inner.size()
    }

    fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        self.inner.tokenize(text, special)
    }

    fn bytes(&self, token: Token) -> &[u8] {
        let is_over = self.is_over.load(Ordering::SeqCst);
        self.was_read.fetch_or(is_over, Ordering::SeqCst);
        self.inner.bytes(token)
    }

    fn is_special(&self, token: Token) -> bool {
        self.inner.is_special(token)
    }

    fn name(&self, token: Token) -> Option<String> {
        self.inner.name(token)
    }

    fn is_end(&self, token: Token) -> bool {
        self.inner.is_end(token)
    }

    fn bos(&self) -> Option<Token> {
        self.inner.bos()
    }

    fn end_of_turn(&self) -> Option<Token> {
        self.inner.end_of_turn()
    }

    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        self.inner.chat(chat)
    }
}

/// Although it is late at once, its thread has ended when it says so: the process may be cloned then.
#[test]
fn ai_702_a_source_of_cloned_processes_leaves_no_thread_behind() {
    let vocabulary = Arc::new(WatchedVocabulary {
        inner: small(),
        is_over: AtomicBool::new(false),
        was_read: AtomicBool::new(false),
    });
    let source = ConstraintSource::of_cloned_processes(Arc::clone(&vocabulary) as _, config());
    let late = refused(&source, "regex", "a{1,90}b{1,90}", Duration::ZERO);
    assert!(
        late.ends_with("it takes too long to compile; make it simpler"),
        "{late}"
    );
    vocabulary.is_over.store(true, Ordering::SeqCst);
    // Waits for a thread that makes it, or makes it.
    source.prepare();
    assert!(!vocabulary.was_read.load(Ordering::SeqCst));
    let mut followed = follow(&source, "options", r#"["hello world"]"#);
    followed.limit_time(Some(Duration::ZERO));
    assert_eq!(text(&followed.forced().unwrap()), "hello world");
    assert!(!source.workers.has_watchdog());
    let wrong = refused(&source, "regex", "(", Duration::MAX);
    assert!(wrong.starts_with("invalid grammar: "), "{wrong}");
}
