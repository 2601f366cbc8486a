//! The names of control tokens: which texts look like one, and how one in a text is kept from becoming the token.

/// Whether a text has the form of a control token's name: `<|user|>`, or `<\u{ff5c}User\u{ff5c}>`.
///
/// Files do not always say that such a token is a control token, and llama.cpp takes some of gpt-oss for user-defined ones, so that
/// they are part of outputs. There they stay what they are; but they would be found in any text too, also in that of users, who could
/// write messages of other roles with them.
pub(crate) fn looks_like_one(text: &[u8]) -> bool {
    let is_between = |(open, close): (&str, &str)| {
        let inner = text.strip_prefix(open.as_bytes());
        let inner = inner.and_then(|inner| inner.strip_suffix(close.as_bytes()));
        inner.is_some_and(|inner| !inner.is_empty())
    };
    [("<|", "|>"), ("<\u{ff5c}", "\u{ff5c}>")]
        .into_iter()
        .any(is_between)
}

/// Cuts each occurrence of a name in two: neither part is found as the token.
pub(crate) fn cut<'a>(text: &'a str, names: &[String]) -> Vec<&'a str> {
    if names.is_empty() {
        return vec![text];
    }
    let mut parts = Vec::new();
    let (mut start, mut at) = (0, 0);
    while let Some(letter) = text[at..].chars().next() {
        let found = names.iter().find(|name| {
            // A name of one letter cannot be cut.
            name.chars().nth(1).is_some() && text[at..].starts_with(name.as_str())
        });
        at += match found {
            Some(name) => {
                let half = name.chars().count() / 2;
                let half: usize = name.chars().take(half).map(char::len_utf8).sum();
                parts.push(&text[start..at + half]);
                start = at + half;
                half
            }
            None => letter.len_utf8(),
        };
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_between_brackets() {
        for name in ["<|user|>", "<|a b|>", "<\u{ff5c}User\u{ff5c}>"] {
            assert!(looks_like_one(name.as_bytes()), "{name}");
        }
        for text in [
            "",
            "<||>",
            "<|>",
            "<think>",
            "<|user>",
            "a<|user|>",
            "<|user\u{ff5c}>",
        ] {
            assert!(!looks_like_one(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn names_are_cut_in_two() {
        let names = ["<|end|>".to_owned(), "x".to_owned()];
        assert_eq!(cut("a<|end|>b x", &names), ["a<|e", "nd|>b x"]);
        assert_eq!(cut("", &names), [""]);
    }
}
