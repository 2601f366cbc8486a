//! What a chat template takes at its peak, whatever it does: a model's file may contain any.
//!
//! A program of its own, because what is measured is the resident memory of the process.

#![cfg(target_os = "linux")]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a test's name says what it shows, and what it cannot do without is a failed test"
)]

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};
use std::{fs, thread};

use proptest::prelude::*;
use sapwood_engine::api::{ChatMessage, ChatRequest};
use sapwood_engine::template::{SpecialTexts, Template};
use serde_json::{Value as Json, json};

/// What all renderings together may take beyond what the process takes idle: four times what a template is charged for.
const MOST: usize = 256 << 20;
/// What one may take: its limit is 2 s, and this is a debug build beside which others run.
const LONGEST: Duration = Duration::from_secs(30);
/// The stack of a thread that renders: tokio's workers, on which a server does, have as much.
const STACK_BYTES: usize = 2 << 20;

/// Held by the test whose memory is measured.
static TURN: Mutex<()> = Mutex::new(());

/// Names that the expressions below use: texts and lists that are short in the source and long in memory.
const PRELUDE: &str = "{% set k = 1000 %}{% set s = 'xY ' * (k * 30) %}{% set big = 'xY ' * (k * k * 3) %}\
{% set e = 'ŉ' * (k * k // 2) %}{% set l = [s] * (k // 20) %}{% set n = range(5000)|list %}{% set t = (0, 'a') * k %}\
{% set d = dict(a=s, b=n) %}{% set ds = [d] * 9 %}{% set ns = namespace(x=s, l=[s]) %}";

/// The bytes of a line of the process's status.
fn status(name: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kibibytes = line.unwrap().trim_matches([':', '\t', ' ', 'k', 'B']);
    kibibytes.parse::<usize>().unwrap() << 10
}

/// Compiles and renders a template. Returns the number of its pieces, if it succeeds, which is its own business.
fn render(source: &str) -> Option<usize> {
    let message = |role: &str| ChatMessage {
        role: role.to_owned(),
        content: "What is <s>?".to_owned(),
        ..ChatMessage::default()
    };
    let chat = ChatRequest {
        messages: ["system", "user", "assistant", "user"].map(message).into(),
        ..ChatRequest::default()
    };
    render_chat(source, &chat)
}

fn render_chat(source: &str, chat: &ChatRequest) -> Option<usize> {
    let special = SpecialTexts {
        bos: "<s>".to_owned(),
        end: "</s>".to_owned(),
        all: vec!["<s>".to_owned(), "</s>".to_owned()],
    };
    let Ok(template) = Template::new(source, &special, || UNIX_EPOCH) else {
        return None;
    };
    template.render(chat).ok().map(|pieces| pieces.len())
}

/// Renders all of these and checks the peak of the process.
fn check<'a>(sources: impl IntoIterator<Item = &'a str> + Send) {
    // What is set up once.
    assert_eq!(render(PRELUDE), Some(0), "it has all that it needs");
    let name = |source: &str| source.replace(PRELUDE, "").chars().take(200).collect();
    let all: Vec<(String, &str)> = sources.into_iter().map(|it| (name(it), it)).collect();
    check_each(all, MOST, |source| {
        render(source);
    });
}

/// Does this with each, of which all have a name, and checks the peak of the process.
fn check_each<T: Send>(all: Vec<(String, T)>, most: usize, work: impl Fn(T) + Sync) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let idle = status("VmRSS");
    thread::scope(|scope| {
        let all = || {
            for (name, each) in all {
                let begun = Instant::now();
                work(each);
                let (peak, took) = (status("VmHWM").saturating_sub(idle), begun.elapsed());
                assert!(peak < most, "{} MiB after {name}", peak >> 20);
                assert!(took < LONGEST, "{took:?} for {name}");
            }
        };
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        let rendering = thread.spawn_scoped(scope, all).unwrap();
        rendering.join().unwrap();
    });
}

/// Expressions that would make gigabytes, take minutes or panic in one instruction if it had no bound.
const EXPRESSIONS: &[&str] = &[
    // Texts that are long, in lists that are.
    "[big] * (2 * k) ~ ''",
    "([big] * (2 * k))|upper",
    "([big] * (2 * k))|map('upper')|list|length",
    "([big] * (2 * k))|map('replace', 'x', 'y')|list|length",
    "([big] * (2 * k))|map('tojson')|list|length",
    "([n] * (100 * k))|map('list')|list|length",
    "([big] * (2 * k))|replace('a', 'b')|length",
    "([big] * (2 * k))|indent|length",
    "([big] * 300)|sum",
    "([big] * 300)|sum(start='')",
    "([n] * 300)|sum(start=[])|length",
    "([[0]] * (k * k))|sum(start=[])|length",
    "([(0,)] * (k * 100))|sum(start=())|length",
    "([big] * (2 * k)) in 'abc'",
    "(big ~ 'a') in ([big ~ 'b'] * (k * 500))",
    "([big ~ 'b'] * (k * 500)).index(big ~ 'a')",
    "([big ~ 'b'] * (k * 500)).count(big ~ 'a')",
    "([big ~ 'b'] * (k * 500)) == ([big ~ 'b'] * (k * 500))",
    "1 < ([big] * (2 * k)) in 'abc' in 'abc'",
    "raise_exception([big] * (2 * k))",
    "strftime_now('%c' * (15 * k * k))|length",
    "strftime_now([big] * (2 * k))",
    "([big] * (2 * k))|join",
    "([big] * (2 * k))|join(',', attribute='x')",
    "([big] * (2 * k))|string|length",
    "([big] * (2 * k))|title",
    "([big] * (2 * k))|capitalize",
    "([big] * (2 * k))|escape",
    "([big] * (2 * k))|safe",
    "([big] * (2 * k))|trim",
    "([big] * (2 * k))|tojson",
    "([big] * (2 * k))|unique|list",
    "([big] * (2 * k))|sort",
    "([d] * (2 * k))|groupby('a')",
    "([d] * k)|sort(attribute='a' ~ ',a' * (30 * k))|length",
    "([d] * k)|map(attribute='a' * (k * k))|list",
    "([d] * k)|unique(attribute='b')|list",
    "([big] * (2 * k))|select('startingwith', big)|list",
    "(l * (2 * k))|select('in', l * (2 * k))|list",
    "([big] * (2 * k)) is startingwith 'x'",
    "e|upper|length",
    "(e * 20)|upper|length",
    "(e * 20)|map('upper')|list|length",
    "('%s%s%s%s' * 500)|format(big)",
    "('%s%s' * 2)|safe|format(big, big, big, big)",
    "('{}' * 500).format(big)",
    "[big, big, big]|tojson",
    "('\u{1}' * (k * k * 9))|tojson",
    "('<' * (k * k * 9))|escape|length",
    "big|trim(big)",
    "big.strip(big)",
    "big.lstrip(s)",
    "('x' * (k * k * 30))|trim('y' * (k * k))",
    "big.split()|length",
    "big.split('')|length",
    "big.rsplit('x')|length",
    "big|list|length",
    "big|list|join(big)",
    "((big ~ '\n') * 4)|indent(k * k)",
    "'a'|indent(k * k * k * k)",
    "('\n' * k)|indent(k * k * k * k)",
    // Lists and tuples.
    "((0,) * (k * k * 100))|length",
    "([0] * (k * k * 100))|length",
    "(range(100000)|list) * 100000",
    "[[[n] * 1000] * 1000] * 1000",
    "{'a': [n] * 1000}|tojson",
    "[]|slice(100000000)|list|length",
    "[1]|batch(100000000, 0)|list|length",
    "(n|zip(n))|list",
    "dict(d, **d)",
    "range(*n)",
    "range(**d)",
    "[range] * (k * k) ~ ''",
    "[ns] * 1000 ~ ''",
    // Keys.
    "{big: 1}[big]",
    "{(big, big): 1}[[big] * (2 * k)]",
    "[[big] * (2 * k) == 1, l == l * 1, n == n * 1]",
    // Panics.
    "3 is divisibleby 0",
    "[1, 2]|select('divisibleby', 0)|list",
    "range(-9223372036854775807, 9223372036854775807, -9223372036854775807)|list",
    "range(0, 10, -9223372036854775807)|list",
    "1|round(2147483647)",
    "1.5|round(-2147483648)",
    "'%d' % 1",
    "9223372036854775807 * 9223372036854775807 * 9223372036854775807",
    "170141183460469231731687303715884105727 // -1",
    "''[::-1][5:1:-1]",
];

/// The same with statements.
fn statements() -> Vec<String> {
    let chains = |of: &str| {
        format!(
            "{{% set g = namespace(b=[1]) %}}{{% for i in range(20000) %}}{{% set g.b = {of} %}}{{% endfor %}}{{{{ g.b|length }}}}"
        )
    };
    let unrolled = |of: &str| format!("{{% set b = [1] %}}{}", of.repeat(SOURCE_BYTES / of.len()));
    vec![
        // Constants, which are computed before a rendering begins.
        "{% if false %}{{ 'x' * (100000000) }}{{ 'y' * (100000000) }}{{ 'z' * (100000000) }}{% endif %}".to_owned(),
        "{% if false %}{{ ((('a' * 1000) * 1000) * 1000) }}{{ (0,) * 100000000 }}{% endif %}".to_owned(),
        "{{ 'x' * (50000000 + 50000000) }}{{ 'x' * 10 ** 8 }}{{ 'x' * -(-100000000) }}".to_owned(),
        "{{ 'x' * 1000000 }}".repeat(1000),
        format!("{{{{ '{}' * 500 }}}}", "x".repeat(200_000)),
        // What a format or an option makes of what nobody has measured.
        "{% for x in [big ~ 'y', 1] %}{% if loop.last %}{{ ('{0.previtem}' * (k * 50)).format(loop) }}{% endif %}{% endfor %}".to_owned(),
        "{% for x in [big ~ 'y', 1] %}{% if loop.last %}{{ ('%(previtem)s' * (k * 50))|format(loop) }}{{ ('{a[0]}' * (k * 50)).format(a=[loop.previtem]) }}{% endif %}{% endfor %}".to_owned(),
        "{% set q = [] %}{% for i in range(9000) %}{% set _ = q.append(big) %}{% endfor %}{{ 1|tojson(separators=q) }}".to_owned(),
        format!("{{{{ 'a'|upper({}0) }}}}", "l,".repeat(1900)),
        format!("{{{{ 'a'|upper({}[big]) }}}}", "[big, big],".repeat(6)),
        format!("{{% macro m({}z) %}}{{% endmacro %}}{}", "a,".repeat(60_000), "{%set b=m.arguments%}".repeat(4000)),
        format!("{{% for i in range(100000) %}}{{% for j in [1] %}}{{% set n = namespace() %}}{{% macro m() %}}{{{{ n }}}}{{% endmacro %}}{{% set n.{} = 1 %}}{{% endfor %}}{{% endfor %}}", "n".repeat(100_000)),
        format!("{{% set t = range(60000)|list %}}{{% for i in [0] recursive %}}{{% set {}z = t %}}{{{{ loop([0]) }}}}{{% endfor %}}", (0..59_999).map(|i| format!("a{i},")).collect::<String>()),
        "{% set ns.d = {} %}{% for i in range(50) %}{% set ns.d = {'a': ns.d} %}{% endfor %}{% set m = [ns.d] * 500 %}{% set q = [] %}{% for i in range(99) %}{% set _ = q.append(m) %}{% endfor %}".to_owned(),
        "{% set a = big ~ '' %}{% set b = big ~ '' %}{% set p = [] %}{% set q = [] %}{% for i in range(50000) %}{% set _ = p.append(a) %}{% set _ = q.append(b) %}{% endfor %}{% for x in [1, 2] %}{% if loop.changed(*(p if loop.first else q)) %}{% endif %}{% endfor %}".to_owned(),
        format!("{}{{{{[{}a]}}}}{}", "{%macro m(b)%}".repeat(140), "a,".repeat(100_000), "{%endmacro%}".repeat(140)),
        // What a loop keeps.
        "{% for x in [1] %}{{ loop.cycle() }}{% endfor %}".to_owned(),
        "{% for i in range(500) %}{% for x in [1] %}{{ loop.changed(loop, big ~ 'y') }}{% endfor %}{% endfor %}".to_owned(),
        "{% for i in range(20000) %}{% for x in [ns.l] %}{% set ns.l = loop %}{% endfor %}{% endfor %}".to_owned(),
        "{% for x in [ns] %}{% set ns.l = [loop, big ~ 'y'] %}{% endfor %}".to_owned(),
        "{% set q = [] %}{% for x in [q] %}{% set _ = q.append(loop) %}{% endfor %}".to_owned(),
        format!("{}{{% for i in [0] recursive %}}{}{{{{ loop([0]) }}}}{{% endfor %}}", macro_of_arguments(), (0..5900).map(|i| format!("{{%set a{i}=m.arguments%}}")).collect::<String>()),
        format!("{}{{% set k = 'arg' ~ 'uments' %}}{{% for i in [0] recursive %}}{}{{{{ loop([0]) }}}}{{% endfor %}}", macro_of_arguments(), (0..5900).map(|i| format!("{{%set a{i}=m[k]%}}")).collect::<String>()),
        format!("{{% set t = range(5000)|list %}}{{% for i in range(3000) %}}{{% for j in [1] %}}{{% macro m() %}}{{{{ q }}}}{{% endmacro %}}{{% set {}z = t %}}{{% endfor %}}{{% endfor %}}", (0..4999).map(|i| format!("a{i},")).collect::<String>()),
        format!("{{% set g = (messages|groupby('role'))[0] %}}{{% set h = big * 6 %}}{{% for i in [0] recursive %}}{}{{{{ loop([0]) }}}}{{% endfor %}}", (0..5900).map(|i| format!("{{%set a{i}=g.list%}}")).collect::<String>()),
        // What a macro keeps.
        "{% for i in range(100000) %}{% for j in range(90) %}{% macro m() %}{{ i }}{% endmacro %}{% endfor %}{% endfor %}".to_owned(),
        format!(
            "{{% set q = [] %}}{{% for i in range(100000) %}}{{% macro m({}z) %}}{{% endmacro %}}{{% set _ = q.append(m) %}}{{% endfor %}}",
            (0..5000).map(|i| format!("a{i},")).collect::<String>()
        ),
        // Parts that are copies.
        format!("{{% set q = [{}0] %}}", "big|lines,".repeat(400)),
        format!("{{% set q = [{}0] %}}", "big.split('q'),".repeat(200)),
        format!("{{% set q = dict(a=1) %}}{}", "{% set q = [q, q.items(), q.items()] %}".repeat(3000)),
        "{% set q = [] %}{% for i in range(100000) %}{% set _ = q.append([{}, {}, {}, [], ()]) %}{% endfor %}".to_owned(),
        format!("{{{{ 'a'|map({}'upper') }}}}", "'map',".repeat(1000)),
        format!("{{% set o = {{ {}1: 0 }} %}}", "big: 0,".repeat(30_000)),
        format!("{{% set o = dict({}a=1) %}}", "**d,".repeat(200)),
        format!("{{% set n = range(100000)|list %}}{{{{ range({}) }}}}", "*n,".repeat(200)),
        format!("{{% macro {}() %}}{{% endmacro %}}{{{{ [{0}] * 100000 ~ '' }}}}", "m".repeat(100_000)),
        // A value that grows after it was measured.
        "{% set m = [ns] * 1000 %}{% set ns.x = big %}{{ m ~ '' }}{{ m|upper }}{{ m|tojson }}{{ m|sort }}".to_owned(),
        "{% set q = [] %}{% set m = [q] * 1000 %}{% for i in range(50) %}{% set _ = q.append(big) %}{% endfor %}{{ m ~ '' }}".to_owned(),
        "{% set q = [0] %}{% set b = (q * k) * k %}{% for i in range(2000) %}{% set _ = q.append(0) %}{% endfor %}{{ 1 in b }}{{ b.count(1) }}{{ (b|list)|length }}".to_owned(),
        "{% set q = [] %}{% for i in range(100000) %}{% set _ = q.append(big.split('q')) %}{% endfor %}".to_owned(),
        "{% set q = [] %}{% for i in range(100000) %}{% set _ = q.append(big.partition('q')) %}{% endfor %}".to_owned(),
        format!("{{% for i in range(3000) %}}{{% set g = [{}0] %}}{{% set _ = g.append(1) %}}{{% endfor %}}", "0,".repeat(80_000)),
        // Time.
        format!("{{% set o = big ~ '' %}}{{% set m = {{big: 0}} %}}{}", "{% if m[o] %}{% endif %}".repeat(9000)),
        format!("{{% set o = big ~ '' %}}{}", "{% if o == big %}{% endif %}".repeat(8000)),
        format!("{{% set o = [n] * 200 %}}{}", "{% if o == o * 1 %}{% endif %}".repeat(7000)),
        format!("{{% set o = big ~ '' %}}{}", "{% if 0 < 1 < o %}{% endif %}".repeat(7000)),
        // What is printed, and a mark that stands for the text of a control token.
        "{% for i in range(100000) %}{{ big }}{% endfor %}".to_owned(),
        "{% for i in range(100000) %}{% for j in range(99) %}{{ messages[0].content }}{% endfor %}{% endfor %}".to_owned(),
        "{{ messages[0].content * 500000 }}".to_owned(),
        chains("g.b * 1"),
        chains("(g.b + []) * 1"),
        chains("g.b|reverse"),
        chains("dict(x=g.b)"),
        chains("[g.b]"),
        unrolled("{%set b=b*1%}"),
        unrolled("{%set b=b+[]%}"),
        unrolled("{%set b=[b]%}"),
        unrolled("{%set b=b~b%}"),
    ]
}

/// The macro with the most arguments.
fn macro_of_arguments() -> String {
    let arguments: String = (0..63).map(|i| format!("a{i},")).collect();
    format!("{{% macro m({arguments}z) %}}{{% endmacro %}}")
}

/// A template may be as long.
const SOURCE_BYTES: usize = 250 << 10;

#[test]
fn expressions_that_would_grow_stay_below_the_limit() {
    let sources: Vec<String> = EXPRESSIONS
        .iter()
        .map(|it| format!("{PRELUDE}{{{{ {it} }}}}"))
        .collect();
    check(sources.iter().map(String::as_str));
}

#[test]
fn statements_that_would_grow_stay_below_the_limit() {
    let sources: Vec<String> = statements()
        .into_iter()
        .map(|source| format!("{PRELUDE}{source}"))
        .collect();
    check(sources.iter().map(String::as_str));
}

/// Each of them ends all blocks around it.
#[test]
fn breaks_in_many_blocks_stay_below_the_limit() {
    let source = |breaks: usize| {
        let (begin, end) = ("{%set a%}".repeat(145), "{%endset%}".repeat(145));
        let breaks = "{%break%}".repeat(breaks);
        format!("{{%for i in [1]%}}{begin}{breaks}{end}{{%endfor%}}")
    };
    let refused = |source: &str| {
        let made = Template::new(source, &SpecialTexts::default(), || UNIX_EPOCH);
        made.is_err_and(|why| why.to_string().contains("too many instructions"))
    };
    assert!(!refused(&source(500)));
    check_each(
        vec![("28,000 breaks".to_owned(), source(28_000))],
        64 << 20,
        |source| assert!(refused(&source)),
    );
}

/// Beyond a conversation of as many bytes.
const COVERED_MOST: usize = 128 << 20;

/// The texts of control tokens and of marks are covered before a template runs.
#[test]
fn covered_texts_stay_below_the_limit() {
    let chats = [4, 16].into_iter().flat_map(|mebibytes| {
        ["<s>", "</S>\n", "\u{fdd1}b"]
            .into_iter()
            .flat_map(move |unit| {
                let text = unit.repeat((mebibytes << 20) / unit.len());
                let content = ChatMessage {
                    role: "assistant".to_owned(),
                    content: text.clone(),
                    ..ChatMessage::default()
                };
                let reasoning = ChatMessage {
                    content: String::new(),
                    reasoning: Some(text),
                    ..content.clone()
                };
                [("content", content), ("reasoning", reasoning)].map(|(name, message)| {
                    let chat = ChatRequest {
                        messages: vec![message],
                        ..ChatRequest::default()
                    };
                    (format!("{mebibytes} MiB of {unit:?} as {name}"), chat)
                })
            })
    });
    let chats: Vec<(String, ChatRequest)> = chats.collect();
    let all = chats.iter().map(|(name, chat)| (name.clone(), chat));
    let source = "{% for m in messages %}{{ m.content }}{{ m.reasoning }}{% endfor %}";
    check_each(all.collect(), COVERED_MOST, |chat| {
        render_chat(source, chat);
    });
}

/// Values of few bytes each, in what a template is given.
#[test]
fn values_of_a_request_stay_below_the_limit() {
    let parsed = |json: &str| serde_json::from_str::<Json>(json).unwrap();
    let lists = |count: usize| format!("[{}0]", "[],".repeat(count));
    let dictionaries = format!("[{}0]", "{\"a\":0},".repeat(500_000));
    let call = |arguments: Json| ChatRequest {
        messages: vec![ChatMessage {
            role: "assistant".to_owned(),
            tool_calls: json!([{"id": "sapwood01", "function": {"name": "f", "arguments": arguments}}]),
            ..ChatMessage::default()
        }],
        ..ChatRequest::default()
    };
    let tools = |json: &str| ChatRequest {
        tools: parsed(json),
        ..ChatRequest::default()
    };
    let arguments = |json: &str| format!("{{\"a\":{json}}}");
    let chats = [
        ("lists", tools(&lists(1_000_000))),
        ("dictionaries", tools(&dictionaries)),
        ("arguments", call(parsed(&arguments(&lists(1_000_000))))),
        ("a text of lists", call(arguments(&lists(1_300_000)).into())),
        (
            "a text of dictionaries",
            call(arguments(&dictionaries).into()),
        ),
    ];
    let all = chats.iter().map(|(name, chat)| ((*name).to_owned(), chat));
    let source = "{% for m in messages %}{{ m.tool_calls|length }}{% endfor %}{{ tools|length }}";
    check_each(all.collect(), COVERED_MOST, |chat| {
        render_chat(source, chat);
    });
}

/// What a template makes of much that it is given.
#[test]
fn much_input_does_not_make_the_limit_higher() {
    let many = (0..100_000).map(|at| (format!("a{at}"), json!(0)));
    let chat = ChatRequest {
        messages: vec![ChatMessage {
            role: "user".to_owned(),
            content: "x".repeat(16 << 20),
            ..ChatMessage::default()
        }],
        template_args: json!({"many": Json::Object(many.collect())}),
        ..ChatRequest::default()
    };
    let namespace = |statement: &str| {
        let statements = statement.repeat(250_000 / statement.len());
        format!("{{% set n = namespace(**many) %}}{statements}")
    };
    let sources = [
        "{{ ('x' * (120 * k * k))|length }}",
        "{{ ('x' * (60 * k * k)) ~ ('x' * (60 * k * k)) }}",
        "{% set x = text * 3 %}{{ (x + x)|length }}",
        "{% set x = text * 3 %}{{ (x ~ x)|length }}{{ ([x] * 2)|join|length }}",
        "{{ raise_exception('x' * (60 * k * k)) }}",
        "{{ raise_exception([text] * 7) }}",
        "{% set y %}{% for i in range(7) %}{{ text }}{% endfor %}{% endset %}{{ y|length }}",
        "{% macro m() %}{% for i in range(7) %}{{ text }}{% endfor %}{% endmacro %}{{ m()|length }}",
        "{% filter length %}{% for i in range(7) %}{{ text }}{% endfor %}{% endfilter %}",
        "{{ ([text] * 7)|string|length }}",
        "{{ ([text] * 7)|tojson|length }}",
        "{{ (text * 2)[1:]|length }}",
        "{{ text|replace('x', 'xxxxxxx')|length }}",
        "{{ ('%s' * 7)|format(text, text, text, text, text, text, text)|length }}",
        "{{ (text * 3).upper()|length }}",
        "{{ text|list|length }}",
        "{{ ('é' * (20 * k * k))|tojson(ensure_ascii=true)|length }}",
        "{% set q = [] %}{% for i in range(5000) %}{% set _ = q.append(('é' * (2 * k)) ~ (i * 7919 % 5000)) %}{% endfor %}{{ q|sort|length }}{{ q|unique|length }}",
        // Whether it has members takes time in proportion to them.
        &namespace("{%if n%}{%endif%}"),
        &namespace("{%set b=not n%}"),
    ];
    let prelude = "{% set k = 1000 %}{% set text = messages[0].content %}";
    let all = sources.map(|source| {
        let name: String = source.chars().take(200).collect();
        (name, format!("{prelude}{source}"))
    });
    check_each(all.into(), MOST, |source: String| {
        render_chat(&source, &chat);
    });
}

/// Expressions by what they are, of everything that a template can name: `T` is a text, `L` a list, `D` a dictionary, `N` a number and
/// `A` anything.
const RULES: &[(char, &[&str])] = &[
    (
        'T',
        &[
            "s",
            "big",
            "e",
            "'a'",
            "''",
            "'\u{1}<é'",
            "messages[0].content",
            "T ~ A",
            "A ~ T",
            "T + T",
            "T * N",
            "T[N:]",
            "T[::-1]",
            "T|capitalize",
            "T|escape",
            "T|format(T, A)",
            "('%s' * N)|format(A, A)",
            "T|indent(N)",
            "T|indent(T)",
            "T|lower",
            "A|lower",
            "T|replace(T, T)",
            "A|replace(T, T)",
            "T|reverse",
            "T|safe",
            "A|string",
            "T|title",
            "A|title",
            "A|tojson",
            "A|tojson(indent=N)",
            "A|tojson(ensure_ascii=true)",
            "A|trim",
            "T|trim(T)",
            "T|upper",
            "A|upper",
            "L|join",
            "L|join(T)",
            "L|join(T, attribute='a')",
            "L|first",
            "L|last",
            "L|max",
            "L|min",
            "T.capitalize()",
            "T.format(A, A)",
            "T.join(L)",
            "T.lower()",
            "T.lstrip(T)",
            "T.replace(T, T)",
            "T.strip()",
            "T.strip(T)",
            "T.rstrip(T)",
            "T.title()",
            "T.upper()",
            "T.removeprefix(T)",
            "D.get(T, T)",
            "(T if A else T)",
            "m(A)",
            "(A or T)",
            "T|default(T)",
            "strftime_now(T)",
            "loop.cycle(A, A)",
        ],
    ),
    (
        'L',
        &[
            "l",
            "n",
            "t",
            "ds",
            "messages",
            "[]",
            "()",
            "[A, A]",
            "(A, A)",
            "[A] * N",
            "(A,) * N",
            "L + L",
            "L * N",
            "L[N:]",
            "L[::-1]",
            "range(N)",
            "A|list",
            "L|map('upper')",
            "L|map('list')",
            "L|map('string')",
            "L|map('tojson')",
            "L|map(attribute='a')",
            "L|map('map', 'upper')",
            "L|map('join', T)",
            "L|map('default', A)",
            "L|map('replace', T, T)",
            "L|map('indent', N)",
            "L|map('trim', T)",
            "L|map('sort')",
            "L|reject('in', L)",
            "L|select('eq', A)",
            "L|select('startingwith', T)",
            "L|selectattr('a', 'in', L)",
            "L|rejectattr('a')",
            "L|sort",
            "L|sort(attribute='a,b')",
            "L|sort(case_sensitive=true)",
            "L|unique",
            "L|unique(attribute='a')",
            "L|reverse",
            "L|groupby('a')",
            "L|groupby(attribute='b', default=A)",
            "L|sum(start=[])",
            "L|sum(start=())",
            "D|items",
            "D|dictsort",
            "D|dictsort(by='value')",
            "T|split",
            "T|split(T)",
            "T|lines",
            "T.split()",
            "T.split(T)",
            "T.rsplit(T)",
            "T.rsplit(maxsplit=N)",
            "T.splitlines()",
            "T.partition(T)",
            "D.keys()",
            "D.items()",
            "D.values()",
            "L.copy()",
            "ns.l",
        ],
    ),
    (
        'D',
        &[
            "d",
            "{}",
            "messages[0]",
            "{A: A}",
            "{'a': A, 'b': A}",
            "dict(a=A, b=A)",
            "dict(D, a=A)",
            "dict(**D)",
            "namespace(a=A, b=A)",
            "ds[0]",
            "D.copy()",
        ],
    ),
    (
        'N',
        &[
            "0",
            "1",
            "2",
            "9",
            "k",
            "-1",
            "1.5",
            "k * 100",
            "A|length",
            "N + N",
            "N * N",
            "N - N",
            "N // N",
            "N % N",
            "N ** 2",
            "T|int(default=2)",
            "T|float(default=2)",
            "N|round",
            "N|abs",
            "L|sum(attribute='a')",
            "T.count(T)",
            "T.find(T)",
            "L.count(A)",
            "L.index(A)",
            "T.index(T)",
        ],
    ),
    (
        'A',
        &[
            "T",
            "L",
            "D",
            "N",
            "none",
            "true",
            "undefined",
            "ns",
            "loop",
            "x",
            "A in L",
            "T in T",
            "A in T",
            "A in D",
            "L == L",
            "D == D",
            "A < A",
            "A >= A",
            "A < A in L",
            "A is in L",
            "A is divisibleby N",
            "T is startingwith T",
            "A is sameas A",
            "A is iterable",
            "L[N]",
            "D[A]",
            "A|attr(A)",
            "loop.changed(A)",
            "ns.l.append(A)",
            "ns.l.pop()",
            "not A",
            "A and A",
            "T.startswith(L)",
            "T.endswith(T)",
            "A|bool",
        ],
    ),
];

/// Expands a rule, each time by the next of the choices; when they run out, by the first forms, which are names.
fn expand(what: char, choices: &mut impl Iterator<Item = usize>, depth: u32, to: &mut String) {
    let rule = RULES.iter().find(|(name, _)| *name == what).unwrap().1;
    let form = match choices.next() {
        Some(choice) if depth < 6 => rule[choice % rule.len()],
        // A name, or a text in place of anything.
        _ if what == 'A' => "s",
        _ => rule[0],
    };
    to.push('(');
    let mut rest = form.chars().peekable();
    let mut before = ' ';
    while let Some(letter) = rest.next() {
        let alone =
            !before.is_alphanumeric() && !rest.peek().is_some_and(|it| it.is_alphanumeric());
        if alone && matches!(letter, 'T' | 'L' | 'D' | 'N' | 'A') {
            expand(letter, choices, depth + 1, to);
        } else {
            to.push(letter);
        }
        before = letter;
    }
    to.push(')');
}

/// A statement with an expression.
fn statement(kind: u8, choices: &mut impl Iterator<Item = usize>) -> String {
    let mut it = String::new();
    expand('A', choices, 0, &mut it);
    match kind {
        0 => format!("{{{{ {it} }}}}"),
        1 => format!("{{% set x = {it} %}}"),
        2 => format!("{{% set ns.x = {it} %}}"),
        3 => format!("{{% for x in {it} %}}{{{{ x }}}}{{% set ns.l = ns.l + [x] %}}{{% endfor %}}"),
        4 => format!(
            "{{% for x in range(99) %}}{{% set ns.x = [ns.x, {it}] %}}{{{{ loop.changed(ns.x) }}}}{{% endfor %}}"
        ),
        5 => format!(
            "{{% set x %}}{{% for i in range(k) %}}{{{{ {it} }}}}{{% endfor %}}{{% endset %}}"
        ),
        6 => format!("{{% for i in range(20) %}}{{% set _ = ns.l.append({it}) %}}{{% endfor %}}"),
        _ => format!(
            "{{% set x = [{it}] * k %}}{{% for i in range(k) %}}{{% set ns.l = [ns.l, {it}] %}}{{% endfor %}}"
        ),
    }
}

fn templates() -> impl Strategy<Value = String> {
    let choices = prop::collection::vec(any::<prop::sample::Index>(), 0..24);
    let statements = prop::collection::vec((0..8_u8, choices), 1..4);
    statements.prop_map(|statements| {
        let of = |(kind, choices): (u8, Vec<prop::sample::Index>)| {
            statement(kind, &mut choices.iter().map(|choice| choice.index(10_000)))
        };
        let statements: String = statements.into_iter().map(of).collect();
        format!("{PRELUDE}{{% macro m(x) %}}{{{{ x }}}}{{% endmacro %}}{statements}")
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_template_does_its_peak_stays_below_the_limit(source in templates()) {
        check([&source[..]]);
    }
}
