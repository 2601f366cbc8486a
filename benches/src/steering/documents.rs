//! Constraints of each kind, and documents that keep to them.

use super::vocabulary::Random;

/// One kind of constraint.
#[derive(Clone, Debug)]
pub struct Constraint {
    /// What the table calls it.
    pub title: &'static str,
    /// The name of the controller.
    pub controller: &'static str,
    /// Its argument.
    pub arg: String,
    /// Texts that it allows.
    pub documents: Vec<String>,
}

const DOCUMENTS: usize = 100;

/// All kinds, with documents made from `seed`.
#[must_use]
pub fn constraints(seed: u64) -> Vec<Constraint> {
    let mut random = Random(seed);
    let source = prose(&mut random, 400);
    let parts = substrings(&mut random, &source);
    let mut made = |document: fn(&mut Random) -> String| {
        std::iter::repeat_with(|| document(&mut random))
            .take(DOCUMENTS)
            .collect()
    };
    vec![
        Constraint {
            title: "regex: a line of a log",
            controller: "sapwood:regex",
            arg: LOG_LINE.to_owned(),
            documents: made(log_line),
        },
        Constraint {
            title: "JSON schema of ten fields",
            controller: "sapwood:json-schema",
            arg: SCHEMA.to_owned(),
            documents: made(person),
        },
        Constraint {
            title: "grammar: expressions",
            controller: "sapwood:lark",
            arg: GRAMMAR.to_owned(),
            documents: made(|random| expression(random, 4)),
        },
        Constraint {
            title: "substring of 400 words",
            controller: "sapwood:substring",
            arg: source,
            documents: parts,
        },
    ]
}

const LOG_LINE: &str = r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z (INFO|WARN|ERROR) [a-z]{1,12}(\.[a-z]{1,12})*: [^\n]{1,200}\n";

fn log_line(random: &mut Random) -> String {
    let (month, day, hour) = (random.below(12) + 1, random.below(28) + 1, random.below(24));
    let level = *random.pick(&["INFO", "WARN", "ERROR"]);
    let module: String = random.latin().chars().take(12).collect();
    let mut message = prose(random, 20);
    message.truncate(200);
    format!("2026-{month:02}-{day:02}T{hour:02}:05:09Z {level} {module}: {message}\n")
}

const SCHEMA: &str = r#"{"type":"object","additionalProperties":false,
    "required":["id","name","email","age","active","score","tags","address","role","created"],
    "properties":{"id":{"type":"integer","minimum":1},"name":{"type":"string","maxLength":60},"email":{"type":"string"},
    "age":{"type":"integer","minimum":0,"maximum":130},"active":{"type":"boolean"},"score":{"type":"number"},
    "tags":{"type":"array","items":{"type":"string"},"maxItems":8},
    "address":{"type":"object","additionalProperties":false,"required":["street","city"],
        "properties":{"street":{"type":"string"},"city":{"type":"string"}}},
    "role":{"enum":["admin","editor","viewer","guest"]},"created":{"type":"string","pattern":"^\\d{4}-\\d{2}-\\d{2}$"}}}"#;

fn person(random: &mut Random) -> String {
    let (name, city) = (prose(random, 2), prose(random, 1));
    let (user, host) = (random.latin(), random.latin());
    let tags: Vec<String> = (0..random.below(6))
        .map(|_| format!("\"{}\"", random.latin()))
        .collect();
    format!(
        "{{\"id\": {}, \"name\": \"{name}\", \"email\": \"{user}@{host}.org\", \"age\": {}, \"active\": {}, \"score\": {}.{}, \
         \"tags\": [{}], \"address\": {{\"street\": \"{} {}\", \"city\": \"{city}\"}}, \"role\": \"{}\", \
         \"created\": \"20{:02}-0{}-1{}\"}}",
        random.below(100_000) + 1,
        random.below(100),
        random.below(2) == 0,
        random.below(100),
        random.below(99) + 1,
        tags.join(", "),
        random.below(200) + 1,
        prose(random, 2),
        random.pick(&["admin", "editor", "viewer", "guest"]),
        random.below(100),
        random.below(9) + 1,
        random.below(10),
    )
}

const GRAMMAR: &str = r#"start: expression
expression: term (/[+\-]/ term)*
term: factor (/[*\/]/ factor)*
factor: NUMBER | NAME | NAME "(" expression ("," " " expression)* ")" | "(" expression ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z_][a-z0-9_]*/
"#;

fn expression(random: &mut Random, depth: usize) -> String {
    let choice = if depth == 0 {
        random.below(2)
    } else {
        random.below(6)
    };
    match choice {
        0 => format!("{}.{}", random.below(1_000), random.below(90) + 1),
        1 => random.latin(),
        2 => format!("({})", expression(random, depth - 1)),
        3 => format!(
            "{}({}, {})",
            random.latin(),
            expression(random, depth - 1),
            expression(random, depth - 1)
        ),
        _ => {
            let operator = *random.pick(&["+", "-", "*", "/"]);
            let (left, right) = (expression(random, depth - 1), expression(random, depth - 1));
            format!("{left}{operator}{right}")
        }
    }
}

fn prose(random: &mut Random, words: usize) -> String {
    let words: Vec<String> = (0..words).map(|_| random.latin()).collect();
    words.join(" ")
}

fn substrings(random: &mut Random, source: &str) -> Vec<String> {
    let words: Vec<&str> = source.split(' ').collect();
    let part = || {
        let from = random.below(words.len() - 40);
        words[from..from + 10 + random.below(30)].join(" ")
    };
    std::iter::repeat_with(part).take(DOCUMENTS).collect()
}
