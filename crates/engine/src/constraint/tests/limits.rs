//! Limits, hostile grammars, and the cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use super::super::compile::{Compiler, CompilingThread};
use super::super::{ConstraintConfig, ConstraintSource, MaskWorkers};
use super::driver::{Random, Sequence, config, open, output, refusal, source, source_of};
use super::vocabulary::{END, small};

/// AI-1090
#[test]
fn ai_841_a_grammar_has_a_largest_size() {
    let source = source();
    let max = ConstraintConfig::default().grammar_bytes;
    assert_eq!(max, 256 << 10);
    // Comments do not make a grammar harder to compile.
    let grammar = |bytes: usize| format!("start: \"a\" //{}", "x".repeat(bytes - 13));
    assert_eq!(grammar(max).len(), max);
    assert!(open(&source, "sapwood:lark", &grammar(max)).is_ok());
    let refusal = refusal(&source, "sapwood:lark", &grammar(max + 1));
    assert_eq!(refusal.code, Code::InvalidRequest);
    assert!(
        refusal
            .message
            .starts_with("invalid grammar: at byte 262144"),
        "{}",
        refusal.message
    );
}

#[test]
fn ai_841_equal_grammars_compile_once() {
    let source = source();
    for _again in 0..3 {
        assert!(open(&source, "sapwood:regex", "a+").is_ok());
    }
    assert_eq!(source.cache.len(), 1);
    // What ends the sequence is no part of the grammar, the prefix is.
    assert!(open(&source, "sapwood:regex", r#"{"value":"a+","stop":"aa"}"#).is_ok());
    assert_eq!(source.cache.len(), 1);
    assert!(open(&source, "sapwood:regex", r#"{"value":"a+","prefix":"b"}"#).is_ok());
    assert_eq!(source.cache.len(), 2);
}

#[test]
fn ai_841_the_least_recently_used_grammar_is_dropped() {
    // Each takes 2 MiB for its idle automata and less than 1 MiB for itself.
    let room = |mib: usize| ConstraintConfig {
        cache_bytes: mib << 20,
        ..config()
    };
    let source = source_of(small(), room(7));
    for pattern in ["a", "b", "a", "c", "a", "d"] {
        assert!(open(&source, "sapwood:regex", pattern).is_ok());
    }
    assert!((2..=3).contains(&source.cache.len()));
    let text = |pattern| super::super::grammar::GrammarText::regex(pattern, "");
    assert!(source.cache.get(&text("a")).is_some() && source.cache.get(&text("d")).is_some());
    assert!(source.cache.get(&text("b")).is_none());
    // One that does not fit works, and is not kept.
    let source = source_of(small(), room(1));
    assert_eq!(output(&source, "sapwood:regex", "ab", 1), "ab");
    assert_eq!(source.cache.len(), 0);
}

/// A sequence that begins with the automaton of an ended one behaves as the first one did.
#[test]
fn ai_843_a_recycled_automaton_is_like_new() {
    let source = source();
    let pattern = "(hello|help|[a-c]{2,5})( world)?[0-9]*";
    let fresh: Vec<String> = (0..10)
        .map(|seed| output(&super::driver::source(), "sapwood:regex", pattern, seed))
        .collect();
    for _round in 0..2 {
        for (seed, expected) in fresh.iter().enumerate() {
            assert_eq!(
                &output(&source, "sapwood:regex", pattern, seed as u64),
                expected
            );
        }
    }
}

/// A token that it consumed and nobody counts, because there was no memory for it, would be the beginning of another
/// sequence.
#[test]
fn ai_843_an_automaton_that_is_not_at_its_start_is_not_recycled() {
    let source = source();
    assert!(open(&source, "sapwood:regex", "[a-c]{2,5}").is_ok());
    let text = super::super::grammar::GrammarText::regex("[a-c]{2,5}", "");
    let compiled = source.cache.get(&text).unwrap();
    let mut automaton = compiled.automaton().unwrap();
    automaton.consume(u32::from(b'a')).unwrap();
    assert!(automaton.reset(0).is_err());
    assert!(automaton.reset(1).is_ok());
}

/// Opens a hostile constraint and, if it compiles, takes some steps. All of it must be over soon.
#[track_caller]
fn survive(controller: &str, arg: &str) {
    survive_within(Duration::from_millis(300), controller, arg);
}

#[track_caller]
fn survive_within(compile_time: Duration, controller: &str, arg: &str) {
    let config = ConstraintConfig {
        compile_threads: 1,
        compile_time,
        ..ConstraintConfig::default()
    };
    let source = source_of(small(), config);
    let begun = Instant::now();
    let opened = open(&source, controller, arg);
    let waited = begun.elapsed();
    // The trie is built too, and the machine may be busy.
    let limit = compile_time + Duration::from_secs(5);
    assert!(waited < limit, "{controller} took {waited:?}");
    match opened {
        Err(refusal) => {
            assert_eq!(
                refusal.reason,
                ErrorReason::INVALID_GRAMMAR,
                "{}",
                refusal.message
            );
            assert!(refusal.message.len() < 700, "{}", refusal.message);
        }
        Ok(steer) => {
            let mut sequence = Sequence::new(steer);
            let mut random = Random::new(7);
            for _step in 0..10 {
                let begun = Instant::now();
                let failed = hostile_step(&mut sequence, &mut random).is_err();
                let took = begun.elapsed();
                assert!(
                    took < Duration::from_secs(10),
                    "a step of {controller} took {took:?}"
                );
                if failed || sequence.ended {
                    break;
                }
            }
        }
    }
}

fn hostile_step(
    sequence: &mut Sequence,
    random: &mut Random,
) -> Result<(), sapwood_proto::steer::SteerFailure> {
    use super::driver::Step;
    let forced = sequence.forced()?;
    sequence.tokens.extend_from_slice(&forced);
    if sequence.ended {
        return Ok(());
    }
    if let Step::Mask(mask) = sequence.mid()? {
        let allowed: Vec<u32> = (0..)
            .take(mask.vocabulary())
            .filter(|&token| mask.allows(token))
            .collect();
        let token = allowed[random.below(allowed.len())];
        sequence.append(0, &[token], Some(token))?;
    }
    Ok(())
}

#[test]
fn ai_841_hostile_regexes_are_bounded() {
    for pattern in [
        "a{1000000000}",
        "(x|y)a{100000000}",
        "((((a{1000}){1000}){1000}){1000}){1000}",
        "(a?){100000}a{100000}",
        "(a|aa|aaa)*b(a|b)*a(a|b){4000}",
        "(.*a){200}",
        "[^a]{10000}\\p{L}{5000}",
        "(?i)\\w{3000}é{3000}",
    ] {
        survive("sapwood:regex", pattern);
    }
    survive("sapwood:regex", &"(".repeat(100_000));
    survive(
        "sapwood:regex",
        &format!("{}a{}", "(".repeat(240), ")*".repeat(240)),
    );
    survive("sapwood:regex", &vec!["[a-z]+"; 10_000].join("|"));
    survive("sapwood:regex", &"(a|b)?".repeat(10_000));
    survive("sapwood:regex", &"x".repeat(60_000));
    // Gigabytes, before they were refused.
    survive("sapwood:regex", &"[a-z]?".repeat(40_000));
    survive("sapwood:regex", &"[a-z]?".repeat(2_000));
}

#[test]
fn ai_841_hostile_schemas_are_bounded() {
    let nested = |open: &str, close: &str, times| {
        format!("{}true{}", open.repeat(times), close.repeat(times))
    };
    survive("sapwood:json-schema", &nested(r#"{"items":"#, "}", 60));
    survive("sapwood:json-schema", &nested(r#"{"items":"#, "}", 20_000));
    survive("sapwood:json-schema", &nested(r#"{"allOf":["#, "]}", 60));
    survive(
        "sapwood:json-schema",
        &nested(r#"{"anyOf":[{"type":"null"},"#, "]}", 60),
    );
    survive("sapwood:json-schema", &"[".repeat(200_000));
    for schema in [
        r##"{"$ref":"#"}"##,
        r##"{"allOf":[{"$ref":"#"},{"$ref":"#"}]}"##,
        r##"{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}"##,
        r##"{"type":"array","items":{"$ref":"#"},"minItems":100000000}"##,
        r#"{"type":"string","minLength":1000000000,"maxLength":2000000000}"#,
        r#"{"type":"string","pattern":"^(a{1000}){1000}$"}"#,
        r#"{"type":"integer","multipleOf":999983,"minimum":-1e300,"maximum":1e300}"#,
        r#"{"type":"number","multipleOf":0.0000001,"allOf":[{"multipleOf":0.0000003}]}"#,
        r#"{"type":"array","minItems":1000000000,"items":{"const":1}}"#,
        r#"{"$ref":"https://example.invalid/schema.json"}"#,
    ] {
        survive("sapwood:json-schema", schema);
    }
    // Each level doubles: 2^40 alternatives if they are expanded.
    let mut doubled = r#"{"$defs":{"d0":{"type":"null"}"#.to_owned();
    for level in 1..=40 {
        let below = level - 1;
        doubled.push_str(&format!(
            r##","d{level}":{{"allOf":[{{"anyOf":[{{"$ref":"#/$defs/d{below}"}},{{"type":"object","properties":{{"p{level}":{{"$ref":"#/$defs/d{below}"}}}}}}]}},{{"anyOf":[{{"$ref":"#/$defs/d{below}"}},{{"type":"array"}}]}}]}}"##
        ));
    }
    doubled.push_str(r##"},"$ref":"#/$defs/d40"}"##);
    survive("sapwood:json-schema", &doubled);
    let patterns: Vec<String> = (0..300)
        .map(|part| format!(r#"{{"type":"string","pattern":"^.*{part}.*$"}}"#))
        .collect();
    survive(
        "sapwood:json-schema",
        &format!(r#"{{"allOf":[{}]}}"#, patterns.join(",")),
    );
    let members: Vec<String> = (0..2000)
        .map(|index| format!(r#""p{index}":{{"type":"string"}}"#))
        .collect();
    survive(
        "sapwood:json-schema",
        &format!(r#"{{"properties":{{{}}}}}"#, members.join(",")),
    );
}

/// Chains of references as long as they are let through, and longer.
#[test]
fn ai_841_chains_of_references_do_not_overflow_the_stack() {
    use super::super::schema_depth::LEVELS_MAX;
    for (levels, body) in [
        (1, r##"{"$ref":"#/$defs/dN"}"##),
        (
            3,
            r##"{"allOf":[{"$ref":"#/$defs/dN"},{"type":"object"}]}"##,
        ),
    ] {
        for definitions in [(LEVELS_MAX - 10) / levels, LEVELS_MAX / levels + 10] {
            let definition = |index: usize| {
                format!(
                    r#""d{index}":{},"#,
                    body.replace('N', &(index + 1).to_string())
                )
            };
            let chain: String = (0..definitions).map(definition).collect();
            let schema =
                format!(r##"{{"$defs":{{{chain}"d{definitions}":{{}}}},"$ref":"#/$defs/d0"}}"##);
            survive_within(LONG, "sapwood:json-schema", &schema);
        }
    }
}

#[test]
fn ai_841_hostile_grammars_are_bounded() {
    survive("sapwood:lark", "start: start | start start | \"a\" | ");
    survive("sapwood:lark", "start: a*\na: b*\nb: a* \"x\"?");
    survive("sapwood:lark", "start: (\"a\"? \"b\"?){1000000}");
    survive(
        "sapwood:lark",
        &format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000)),
    );
    survive(
        "sapwood:lark",
        "start: A\nA: B B B B\nB: C C C C\nC: D{1000}\nD: /.{1000}/ & /[^a]*/ & ~/b/",
    );
    survive(
        "sapwood:lark",
        "%llguidance {\"no_forcing\": true}\nstart: <[0-300]>*",
    );
    survive("sapwood:lark", "start: %json {\"items\": [[[[");
    // One derivative of each of these had no end.
    let intersected = |operands: Vec<String>| format!("start: A\nA: {}", operands.join(" & "));
    let counted = (1..60).map(|count| format!("/((?s:.){{{count}}})*/"));
    survive("sapwood:lark", &intersected(counted.collect()));
    let contained = (0..400).map(|part| format!("/(?s:.*){part}(?s:.*)/"));
    survive("sapwood:lark", &intersected(contained.collect()));
    survive(
        "sapwood:lark",
        "start: \"ok\" | B\nB: /x(.*)a(.*)/ & /x(.*)b(.*)/ & /x(.*)c(.*)/ & /x(.*)d(.*)/ & /x(.*)e(.*)/",
    );
    let bits = (0..60).map(|bit| format!("p::set_bit({bit}) p::_ %if bit_clear({bit})"));
    let bits: Vec<String> = bits.collect();
    survive(
        "sapwood:lark",
        &format!("start: p::0\np::_: {} | \"a\"", bits.join(" | ")),
    );
    survive("sapwood:gbnf", "root ::= root root | \"a\" | \"\"");
    survive(
        "sapwood:gbnf",
        "root ::= (((\"a\"{0,2000}){0,2000}){0,2000}){0,2000} root?",
    );
    survive("sapwood:gbnf", &format!("root ::= {}", "(".repeat(100_000)));
}

/// A chain of rules, each of which refers to the next one, at the limit and past it.
#[test]
fn ai_841_a_grammar_has_a_largest_number_of_rules() {
    use super::super::grammar::RULES_MAX;
    let source = source();
    let chain = |rules: usize, is: &str, name: &str| -> String {
        let rule = |index| {
            format!(
                "{name}{index}{is} {name}{} {name}{}\n",
                index + 1,
                index + 1
            )
        };
        (0..rules - 2).map(rule).collect::<String>() + &format!("{name}{}{is} \"a\"\n", rules - 2)
    };
    for (controller, is, name, first) in [
        ("sapwood:lark", ":", "r", "start: r0\n"),
        ("sapwood:lark", ":", "R", "start: R0\n"),
        ("sapwood:gbnf", " ::=", "r", "root ::= r0\n"),
        ("sapwood:gbnf", " ::=", "r", "root ::= r0 root?\n"),
    ] {
        // Compiled or too complex, and no stack overflows.
        survive(
            controller,
            &format!("{first}{}", chain(RULES_MAX, is, name)),
        );
        let over = format!("{first}{}", chain(RULES_MAX + 1, is, name));
        let refusal = refusal(&source, controller, &over);
        assert!(
            refusal.message.contains("a grammar may have 2000 rules"),
            "{}",
            refusal.message
        );
    }
}

/// Rules need no line of their own, groups recurse as rules do, and a grammar may contain a schema.
#[test]
fn ai_841_depth_is_bounded_however_it_is_written() {
    use super::super::grammar::PARTS_MAX;
    let source = source();
    let one_line = |rules: usize| -> String {
        let rule = |index| format!("a{index}: a{} -> x ", index + 1);
        format!(
            "start: a0 -> x {}a{rules}: \"a\"",
            (0..rules).map(rule).collect::<String>()
        )
    };
    survive("sapwood:lark", &one_line(PARTS_MAX - 2));
    let grouped =
        |groups: usize| format!("start: {}\"a\"{}", "(".repeat(groups), ")".repeat(groups));
    let references: Vec<String> = (1..3_000)
        .map(|next| format!("{{\"$ref\":\"#/a/{next}\"}}"))
        .collect();
    let schema = format!(
        "{{\"$ref\":\"#/a/0\",\"a\":[{},{{}}]}}",
        references.join(",")
    );
    for (grammar, why) in [
        (one_line(PARTS_MAX), "rules and groups"),
        (grouped(PARTS_MAX), "rules and groups"),
        (format!("start: %json {schema}"), "too many references"),
    ] {
        let refusal = refusal(&source, "sapwood:lark", &grammar);
        assert!(refusal.message.contains(why), "{}", refusal.message);
    }
}

/// What the compiler copies or compares without a limit of its own.
#[test]
fn ai_841_schemas_that_multiply_are_refused_before_they_are_compiled() {
    let source = source();
    let names: Vec<String> = (0..10_000).map(|name| format!("n{name}")).collect();
    let options = vec![serde_json::json!({"type": "object"}); 5_000];
    let copied = serde_json::json!({"type": "object", "required": names, "anyOf": options});
    let patterns: serde_json::Map<String, serde_json::Value> = (0..65)
        .map(|name| (format!("^a{name}$"), true.into()))
        .collect();
    let compared = serde_json::json!({"type": "object", "patternProperties": patterns});
    for schema in [copied, compared] {
        let refusal = refusal(&source, "sapwood:json-schema", &schema.to_string());
        assert!(
            refusal.message.contains("too many combinations"),
            "{}",
            refusal.message
        );
    }
}

#[test]
fn ai_841_hostile_lists_and_texts_are_bounded() {
    survive("sapwood:substring", &"a".repeat(50_000));
    survive("sapwood:substring", &"ab".repeat(30_000));
    let text: String = (0..10_000)
        .map(|number| format!("{} ", number * 7919 % 40_009))
        .collect();
    survive("sapwood:substring", &text[..40_000]);
    let many: Vec<String> = (0..20_000)
        .map(|number| format!("o{}", number * 7919 % 40_009))
        .collect();
    survive("sapwood:options", &serde_json::to_string(&many).unwrap());
    let long: Vec<String> = (0..100)
        .map(|number| format!("{number}{}", "é".repeat(1000)))
        .collect();
    survive("sapwood:options", &serde_json::to_string(&long).unwrap());
}

/// Long enough to compile to the end, where what is tested is what happens on the way.
const LONG: Duration = Duration::from_secs(60);

/// A caller that finds all permits taken waits for one, and is refused when its time is over.
#[test]
fn ai_841_a_full_compiler_refuses() {
    let config = ConstraintConfig {
        compile_threads: 1,
        compile_time: Duration::from_millis(50),
        ..config()
    };
    let source = ConstraintSource::new(small(), config, Arc::new(MaskWorkers::with_threads(1)));
    let permit = source.compiler.permit(None, Duration::MAX).unwrap();
    let refusal = refusal(&source, "sapwood:regex", "a");
    assert_eq!(
        (refusal.code, refusal.reason),
        (Code::Overloaded, ErrorReason::ENGINE_BUSY)
    );
    drop(permit);
    assert!(source.compiler.permit(None, Duration::MAX).is_ok());
}

/// A grammar that is late makes room for others, up to a number, and its caller waits until one of its own ends.
#[test]
fn ai_841_late_grammars_do_not_stop_those_of_others() {
    let config = ConstraintConfig {
        compile_threads: 1,
        compile_overruns: 4,
        compile_time: Duration::from_millis(50),
        ..config()
    };
    let compiler = Compiler::new(&config);
    let busy = |user| {
        compiler
            .permit(Some(user), Duration::MAX)
            .err()
            .map(|it| it.code)
    };
    let late = |user| {
        let permit = compiler.permit(Some(user), Duration::MAX).unwrap();
        let overrun = permit.overrun();
        (permit, overrun)
    };
    let overruns: Vec<_> = ["a", "a", "b", "c"]
        .into_iter()
        .map(|user| {
            let (permit, overrun) = late(user);
            // It is the only one, as long as somebody waits for it.
            assert_eq!(busy("d"), Some(Code::Overloaded));
            assert!(overrun.begin(&CompilingThread::default()));
            assert!(overrun.begin(&CompilingThread::default()));
            (permit, overrun)
        })
        .collect();
    assert_eq!(compiler.overruns(), 4);
    assert_eq!(busy("a"), Some(Code::Overloaded), "it has half of them");
    // One more keeps its place.
    let (permit, overrun) = late("b");
    assert!(!overrun.begin(&CompilingThread::default()));
    assert_eq!(busy("d"), Some(Code::Overloaded));
    drop(permit);
    assert!(!overrun.begin(&CompilingThread::default()), "it is over");
    assert_eq!(busy("d"), None);
    drop(overruns);
    assert_eq!(compiler.overruns(), 0);
    assert_eq!(busy("a"), None);
}

/// Those of one caller that wait for a place, and those that are not late yet, count as well.
#[test]
fn ai_841_one_caller_has_half_of_the_places() {
    let config = ConstraintConfig {
        compile_threads: 2,
        compile_overruns: 4,
        compile_time: Duration::from_secs(60),
        ..config()
    };
    let compiler = Compiler::new(&config);
    let permit = |user, time| compiler.permit(Some(user), time);
    let now = Duration::ZERO;
    // Staggered, so that one is late while the next ones are not.
    let mut held = Vec::new();
    for _late in 0..2 {
        let permit = permit("a", now).unwrap();
        assert!(permit.overrun().begin(&CompilingThread::default()));
        held.push(permit);
    }
    let third = permit("a", now).unwrap();
    let wait = |user| {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| permit(user, LONG).map(drop).map_err(|it| it.message));
            assert!(third.overrun().begin(&CompilingThread::default()));
            waiting.join().unwrap()
        })
    };
    assert_eq!(permit("a", now).err().unwrap().code, Code::Overloaded);
    // It waited for its third one, and that is late now.
    let refused = wait("a").unwrap_err();
    assert!(refused.contains("grammars of yours"), "{refused}");
    for _again in 0..3 {
        assert!(permit("a", now).is_err());
    }
    let other = [permit("b", now).unwrap(), permit("b", now).unwrap()];
    assert_eq!(compiler.overruns(), 3);
    drop(held);
    drop(other);
    assert!(permit("a", now).is_ok());
}

/// A caller whose grammar is late gets its error at once, and other grammars are compiled meanwhile.
#[test]
fn ai_841_a_late_grammar_is_replaced() {
    let config = ConstraintConfig {
        compile_threads: 1,
        // Nothing is compiled in no time.
        compile_time: Duration::ZERO,
        ..config()
    };
    let source = source_of(small(), config);
    let long = format!("start: {}", vec!["/[a-z]*/"; 500].join(" | "));
    let refusal = refusal(&source, "sapwood:lark", &long);
    assert!(
        refusal.message.contains("too long to compile"),
        "{}",
        refusal.message
    );
    let permit = source.compiler.permit(Some("other"), Duration::MAX);
    assert!(permit.is_ok(), "the place is free");
}

/// What a late grammar has cost is not lost: who asks again finds it.
#[test]
fn ai_841_a_late_grammar_is_kept() {
    let config = ConstraintConfig {
        compile_time: Duration::ZERO,
        ..config()
    };
    let source = source_of(small(), config);
    let late = refusal(&source, "sapwood:regex", "a{1,90}b{1,90}");
    assert!(late.message.contains("too long"), "{}", late.message);
    let begun = Instant::now();
    while source.compiler.overruns() > 0 && begun.elapsed() < LONG {
        std::thread::yield_now();
    }
    assert_eq!(source.cache.len(), 1);
    assert!(open(&source, "sapwood:regex", "a{1,90}b{1,90}").is_ok());
}

/// The clones of a process have little memory.
#[test]
fn ai_841_a_source_of_cloned_processes_keeps_little() {
    let source = ConstraintSource::of_cloned_processes(small(), ConstraintConfig::default());
    let config = source.config;
    assert_eq!(
        (config.cache_bytes, config.memory_bytes),
        (8 << 20, 64 << 20)
    );
    for pattern in ["a", "b", "c", "d", "e", "f"] {
        assert!(open(&source, "sapwood:regex", pattern).is_ok());
    }
    assert!((2..=4).contains(&source.cache.len()));
}

/// However many constraints are opened, what they take stays within the budget, and each works or is refused.
#[test]
fn ai_841_constraints_stay_within_their_memory() {
    let memory_bytes = 4 << 20;
    let config = ConstraintConfig {
        memory_bytes,
        ..config()
    };
    let source = source_of(small(), config);
    let mut live = Vec::new();
    let mut refused = 0;
    for number in 0..200 {
        match open(&source, "sapwood:regex", &format!("[a-z]+{number}")) {
            Ok(steer) => live.push(Sequence::new(steer)),
            Err(refusal) => {
                assert_eq!(
                    (refusal.code, refusal.reason),
                    (Code::Overloaded, ErrorReason::ENGINE_BUSY),
                    "{}",
                    refusal.message
                );
                refused += 1;
            }
        }
        assert!(source.budget.used() <= memory_bytes);
    }
    assert!(
        live.len() > 10 && refused > 10,
        "{} and {refused}",
        live.len()
    );
    assert_eq!(source.cache.len(), 0, "the cache makes room first");
    // A fork is charged as well.
    let mut forked = 0;
    while live[0]
        .steer
        .fork(1)
        .map(|fork| live.push(Sequence::new(fork)))
        .is_ok()
    {
        forked += 1;
    }
    assert!(forked < 100, "{forked}");
    // Those that have their memory go on.
    let mut random = Random::new(3);
    assert!(hostile_step(&mut live[0], &mut random).is_ok());
    drop(live);
    assert!(open(&source, "sapwood:regex", "[a-z]+").is_ok());
    drop(source);
}

/// Dropping grammars takes long, and the engine's thread forks.
#[test]
fn ai_841_forks_drop_no_kept_grammars() {
    let config = ConstraintConfig {
        memory_bytes: 4 << 20,
        ..config()
    };
    let source = source_of(small(), config);
    for pattern in ["a", "b", "c"] {
        assert!(open(&source, "sapwood:regex", pattern).is_ok());
    }
    let mut live = vec![Sequence::new(
        open(&source, "sapwood:regex", "[a-z]+").unwrap(),
    )];
    assert_eq!(source.cache.len(), 4);
    while let Ok(fork) = live[0].steer.fork(1) {
        live.push(Sequence::new(fork));
    }
    assert!(live.len() > 3, "{}", live.len());
    drop(live);
    assert_eq!(source.cache.len(), 4);
}

/// One whose states take more than its share ends, and not the others.
#[test]
fn ai_841_one_constraint_has_a_share_of_the_memory() {
    let config = ConstraintConfig {
        memory_bytes: 8 << 20,
        ..config()
    };
    let source = source_of(small(), config);
    let mut small = Sequence::new(open(&source, "sapwood:regex", "[ab]{1000}").unwrap());
    // Each state is another set of positions of `a`.
    let mut large = Sequence::new(open(&source, "sapwood:regex", "[ab]*a[ab]{60}c").unwrap());
    let mut random = Random::new(3);
    let failure = (0..20_000).find_map(|_step| {
        let token = u32::from(b'a') + u32::from(random.below(2) == 1);
        let mask = large.forced().and_then(|_forced| large.mid());
        let step = mask.and_then(|_mask| large.append(0, &[token], Some(token)));
        step.err()
    });
    let failure = failure.expect("it takes more and more");
    assert_eq!(failure.reason, ErrorReason::LIMIT, "{}", failure.message);
    assert!(
        failure.message.contains("too much memory"),
        "{}",
        failure.message
    );
    assert!(hostile_step(&mut small, &mut random).is_ok());
}

/// A sequence that ends while its mask is computed leaves nothing behind, and the pool goes on.
#[test]
fn a_dropped_sequence_stops_its_mask() {
    let source = source();
    let mut sequence = Sequence::new(open(&source, "sapwood:regex", "[ab]+").unwrap());
    sequence.pre();
    sequence.steer.mid_begin(&[0]);
    drop(sequence);
    assert!(!output(&source, "sapwood:regex", "[ab]+", 1).is_empty());
}

/// The engine may be in the middle of anything when another steerer appends a token.
#[test]
fn a_mask_that_nobody_collected_is_not_used_later() {
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "[ab]c?").unwrap());
    sequence.steer.mid_begin(&[0]);
    sequence.append(0, &[u32::from(b'a')], None).unwrap();
    let mask = sequence.step(|allowed| {
        assert_eq!(allowed, [u32::from(b'c'), END, END + 1]);
        END
    });
    assert!(mask.is_some() && sequence.ended);
}

/// What the documentation says that a schema may not have, with its errors.
#[test]
fn ai_841_what_is_left_out_of_schemas_is_refused_by_name() {
    let source = source();
    for (schema, why) in [
        (
            r#"{"not": {"type": "string"}}"#,
            r#"Unimplemented keys: ["not"]"#,
        ),
        (
            r#"{"type": "array", "uniqueItems": true}"#,
            r#"Unimplemented keys: ["uniqueItems"]"#,
        ),
        (
            r#"{"oneOf": [{"type": "integer"}, {"type": "number"}]}"#,
            "oneOf constraints are not supported",
        ),
        (
            r#"{"$ref": "https://example.invalid/schema.json"}"#,
            "https://example.invalid/schema.json",
        ),
        (
            r#"{"type": "integer", "minimum": 2, "maximum": 1}"#,
            "Unsatisfiable schema: ",
        ),
    ] {
        let refusal = refusal(&source, "sapwood:json-schema", schema);
        assert_eq!(refusal.code, Code::InvalidRequest);
        assert!(
            refusal.message.contains(why),
            "{schema}: {}",
            refusal.message
        );
    }
    let disjoint = r#"{"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}"#;
    assert!(open(&source, "sapwood:json-schema", disjoint).is_ok());
}
