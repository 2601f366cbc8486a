//! Checks on names: public types that share one, and words that the glossary has replaced.

use std::collections::BTreeMap;
use std::str::FromStr as _;

use proc_macro2::{TokenStream, TokenTree};

use super::{Finding, Tree};

/// Public types that may share their name within a crate, because readers see them with the name of their module.
const SHARED: &[(&str, &str)] = &[
    (
        "Config",
        "the settings of its module: `tls::Config`, `drain::Config`",
    ),
    (
        "Error",
        "what the functions of its module fail with: `triton::Error`",
    ),
];

/// Words that identifiers must not contain, and the usual terms for them. `ARCHITECTURE.md` has the glossary.
const RETIRED: &[(&str, &str)] = &[
    ("behalf", "request context"),
    ("burden", "load report"),
    ("catalogue", "catalog"),
    ("departures", "write stall"),
    ("dismiss", "release"),
    ("doom", "mark for removal"),
    ("doomed", "marked for removal"),
    ("door", "connection"),
    ("doorbell", "waker"),
    ("elsewhere", "external, remote"),
    ("enrol", "enqueue"),
    ("estate", "detached state"),
    ("farewell", "close"),
    ("fault", "error"),
    ("forsake", "abandon"),
    ("guest", "client, connection"),
    ("handover", "upgrade"),
    ("headless", "score only"),
    ("hear", "receive"),
    ("heard", "received"),
    ("heed", "take, observe"),
    ("hire", "acquire"),
    ("house", "context"),
    ("knock", "notify"),
    ("lexicon", "token index"),
    ("lodge", "allocate"),
    ("manners", "capabilities"),
    ("news", "update"),
    ("patience", "timeout"),
    ("payer", "token charge"),
    ("reception", "dispatch"),
    ("rouse", "resume"),
    ("said", "sent, received"),
    ("seat", "slot"),
    ("shelf", "store"),
    ("sights", "client info"),
    ("silence", "idle timeout"),
    ("speak", "send"),
    ("spelling", "encoding"),
    ("spoken", "sent"),
    ("tally", "recorder"),
    ("tape", "replay buffer"),
    ("tell", "send, notify, report"),
    ("telling", "reporter"),
    ("tenant", "value, generation"),
    ("told", "sent, notified, reported"),
    ("trail", "request trace"),
    ("weigh", "score"),
    ("weighed", "scored"),
    ("wishes", "options"),
    ("witness", "observer"),
];
/// Longer names are test names, which are sentences; they are not checked.
const WORDS_MAX: usize = 4;
/// The crate for controllers. A program within a Wasm host is called its guest everywhere; the word is retired for
/// connections.
const SDK: &str = "sapwood_guest";

/// Checks that no two public types of a crate have the same name.
pub(super) fn unique_types(tree: &Tree) -> Vec<Finding> {
    let mut places: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
    for (path, text) in tree.rust() {
        let source = path
            .strip_prefix("crates/")
            .and_then(|rest| rest.split_once("/src/"));
        let (Some((package, _)), Some(tokens)) = (source, tokens(text)) else {
            continue;
        };
        for name in public_types(tokens) {
            places.entry((package, name)).or_default().push(path);
        }
    }
    let conventional = |name: &str| SHARED.iter().any(|(shared, _)| *shared == name);
    places
        .into_iter()
        .filter(|((_, name), paths)| paths.len() > 1 && !conventional(name))
        .map(|((package, name), paths)| {
            let advice = format!(
                "the crate {package} has {} public types called {name} ({}): name each by what it is",
                paths.len(),
                paths.join(", ")
            );
            Finding::new(paths[0], advice)
        })
        .collect()
}

/// Checks that no identifier contains a word that the glossary has replaced.
pub(super) fn retired_words(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.rust() {
        let mut names = Vec::new();
        if let Some(tokens) = tokens(text) {
            identifiers(tokens, &mut names);
        }
        names.sort_unstable();
        names.dedup();
        for name in names {
            let words = words(&name);
            if words.len() > WORDS_MAX || name == SDK {
                continue;
            }
            let found = RETIRED
                .iter()
                .find(|(word, _)| words.iter().any(|own| own == word));
            findings.extend(found.map(|(word, instead)| {
                Finding::new(path, format!("`{name}`: say {instead} for `{word}`"))
            }));
        }
    }
    findings
}

/// Checks that the protocol cores are values: no locks, wakers, tasks or clocks, which belong to the shells around them.
pub(super) fn pure_cores(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.rust() {
        let test = path.contains("/tests/") || path.ends_with("/tests.rs");
        if test || !path.starts_with("crates/proto/src/") {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let mut names = Vec::new();
        if let Some(tokens) = tokens(code) {
            identifiers(tokens, &mut names);
        }
        findings.extend(IMPURE.iter().filter_map(|word| {
            let advice = "is for the shell around a core (crates/session, net, server)";
            let found = names.iter().any(|name| name == word);
            found.then(|| Finding::new(path, format!("`{word}` {advice}")))
        }));
    }
    findings
}

/// What has no place in `crates/proto`.
const IMPURE: &[&str] = &[
    "Mutex",
    "RwLock",
    "Condvar",
    "Waker",
    "async",
    "await",
    "Instant",
    "SystemTime",
];

/// The text of a file without its comments, with its strings whole.
fn tokens(text: &str) -> Option<TokenStream> {
    TokenStream::from_str(text).ok()
}

/// The names after `pub struct` and its like. Types with restricted visibility are not included.
fn public_types(tokens: TokenStream) -> Vec<String> {
    let mut found = Vec::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Ident(word) if word == "pub" => {
                let keyword = tokens.next_if(|next| {
                    matches!(next, TokenTree::Ident(word) if ["struct", "enum", "union", "trait", "type"]
                        .iter()
                        .any(|keyword| word == keyword))
                });
                if let (Some(_), Some(TokenTree::Ident(name))) = (keyword, tokens.peek()) {
                    found.push(name.to_string());
                }
            }
            // Inline modules.
            TokenTree::Group(group) if group.delimiter() == proc_macro2::Delimiter::Brace => {
                found.extend(public_types(group.stream()));
            }
            _ => {}
        }
    }
    found
}

fn identifiers(tokens: TokenStream, found: &mut Vec<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(name) => found.push(name.to_string()),
            TokenTree::Group(group) => identifiers(group.stream(), found),
            _ => {}
        }
    }
}

/// The words of an identifier in any case style, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut before = '_';
    for letter in name.chars() {
        let begins = before == '_' || letter.is_uppercase() && !before.is_uppercase();
        if letter != '_' {
            if begins {
                words.push(String::new());
            }
            if let Some(word) = words.last_mut() {
                word.extend(letter.to_lowercase());
            }
        }
        before = letter;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_split_into_words_in_every_case_style() {
        for (name, expected) in [
            ("poll_next", &["poll", "next"][..]),
            ("ReplayBuffer", &["replay", "buffer"]),
            ("IDLE_TIMEOUT", &["idle", "timeout"]),
            ("_held", &["held"]),
        ] {
            assert_eq!(words(name), expected, "{name}");
        }
    }

    #[test]
    fn public_types_are_found_in_modules_too_and_others_are_not() {
        let text = "pub struct A; pub(crate) struct B; mod m { pub enum C {} struct D; } pub type E = u8; pub fn f() {}";
        assert_eq!(public_types(tokens(text).unwrap()), ["A", "C", "E"]);
    }

    #[test]
    fn a_type_that_exists_twice_and_a_retired_word_are_found() {
        let file = |path: &str, text: &str| super::super::File {
            path: path.to_owned(),
            bytes: 0,
            text: Some(text.to_owned()),
        };
        let tree = Tree {
            files: vec![
                file(
                    "crates/a/src/one.rs",
                    "pub struct Same; pub struct Config; fn told() {}",
                ),
                file(
                    "crates/a/src/two.rs",
                    "pub struct Same; pub struct Config; // told",
                ),
                file(
                    "crates/b/src/one.rs",
                    "pub struct Same; fn tr_1_a_stream_that_is_told() {}",
                ),
            ],
        };
        let found = unique_types(&tree);
        assert_eq!(found.len(), 1, "{}", found[0].advice);
        assert!(found[0].advice.contains("2 public types called Same"));
        let found = retired_words(&tree);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].location, "crates/a/src/one.rs");
    }
}
