//! Immutable names of inputs, ports and mimetypes, whose clone never allocates.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// An immutable string. A clone is at most one increment of a reference count.
#[derive(Clone)]
pub struct Name(Repr);

#[derive(Clone)]
enum Repr {
    Static(&'static str),
    Shared(Arc<str>),
}

impl Name {
    /// A name from a literal; allocates nothing.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self(Repr::Static(name))
    }

    /// A name from any text; allocates once.
    #[must_use]
    pub fn shared(name: &str) -> Self {
        Self(Repr::Shared(Arc::from(name)))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Repr::Static(name) => name,
            Repr::Shared(name) => name,
        }
    }
}

impl Default for Name {
    fn default() -> Self {
        Self::new("")
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        let (left, right) = (self.as_str(), other.as_str());
        // Most comparisons on the hot path are between clones of one name, so the pointers are compared first.
        std::ptr::eq(left, right) || left == right
    }
}

impl Eq for Name {}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // As its text, because `Borrow<str>` promises equal hashes.
        self.as_str().hash(state);
    }
}

impl Deref for Name {
    type Target = str;
    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl From<&'static str> for Name {
    fn from(name: &'static str) -> Self {
        Self::new(name)
    }
}

impl From<String> for Name {
    fn from(name: String) -> Self {
        Self(Repr::Shared(name.into()))
    }
}

impl From<Arc<str>> for Name {
    fn from(name: Arc<str>) -> Self {
        Self(Repr::Shared(name))
    }
}

macro_rules! name_newtype {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Name);

        impl $type {
            /// From a literal; allocates nothing.
            #[must_use]
            pub const fn new(name: &'static str) -> Self {
                Self(Name::new(name))
            }

            /// From any text; allocates once.
            #[must_use]
            pub fn shared(name: &str) -> Self {
                Self(Name::shared(name))
            }

            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                self.0.as_str()
            }
        }

        impl Deref for $type {
            type Target = str;
            fn deref(&self) -> &str {
                self.as_str()
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.as_str(), f)
            }
        }

        impl PartialEq<str> for $type {
            fn eq(&self, other: &str) -> bool {
                self.as_str() == other
            }
        }

        impl PartialEq<&str> for $type {
            fn eq(&self, other: &&str) -> bool {
                self.as_str() == *other
            }
        }

        impl<N: Into<Name>> From<N> for $type {
            fn from(name: N) -> Self {
                Self(name.into())
            }
        }
    };
}

name_newtype! {
    /// A named output of a function; `""` is the main one.
    Port
}

name_newtype! {
    /// A mimetype, or, where that is allowed, a pattern of mimetypes (`text/*`, `*+json`, `*/*`).
    Mime
}

impl Port {
    /// The main output.
    pub const MAIN: Self = Self::new("");
    /// Reasoning of a model that marks it.
    pub const REASONING: Self = Self::new("reasoning");
    /// Completed tool calls, one NDJSON line each.
    pub const TOOL_CALLS: Self = Self::new("tool_calls");
    /// Everything that a model writes, in order, one [`Delta`](crate::Delta) on each NDJSON line (KE-307).
    pub const EVENTS: Self = Self::new("events");
    /// Metadata of the request at its end, one JSON object.
    pub const META: Self = Self::new("meta");
    /// Token ids, u32 little-endian.
    pub const TOKENS: Self = Self::new("tokens");
    /// Log-probabilities, one NDJSON line per token.
    pub const LOGPROBS: Self = Self::new("logprobs");
    /// The rows of a model that embeds, or its scores: 32-bit floats, little-endian.
    pub const VECTORS: Self = Self::new("vectors");
    /// Output of a controller.
    pub const CONTROLLER_LOG: Self = Self::new("controller_log");
}

impl Mime {
    /// Plain text in UTF-8.
    pub const TEXT: Self = Self::new("text/plain");
    /// Bytes of unknown type.
    pub const BYTES: Self = Self::new("application/octet-stream");
    /// One JSON value.
    pub const JSON: Self = Self::new("application/json");
    /// JSON values, each compact and ended by a line feed (KE-112).
    pub const NDJSON: Self = Self::new("application/x-ndjson");
    /// Token ids, u32 little-endian.
    pub const TOKENS: Self = Self::new("application/x-sapwood-tokens");
    /// 32-bit floats, little-endian.
    pub const FLOATS: Self = Self::new("application/x-sapwood-f32");
    /// The pattern that matches everything.
    pub const ANY: Self = Self::new("*/*");

    /// The mimetype without its parameters.
    #[must_use]
    pub fn essence(&self) -> &str {
        let text = self.as_str();
        text.split_once(';').map_or(text, |(head, _)| head).trim()
    }

    /// Whether this mimetype matches `pattern`. Case and parameters do not matter.
    #[must_use]
    pub fn matches(&self, pattern: &Self) -> bool {
        let (mine, theirs) = (self.essence(), pattern.essence());
        if theirs == "*/*" || mine.eq_ignore_ascii_case(theirs) {
            return true;
        }
        if let Some(kind) = theirs.strip_suffix("/*") {
            return mine
                .split_once('/')
                .is_some_and(|(head, _)| head.eq_ignore_ascii_case(kind));
        }
        theirs.strip_prefix("*+").is_some_and(|suffix| {
            mine.rsplit_once('+')
                .is_some_and(|(_, tail)| tail.eq_ignore_ascii_case(suffix))
        })
    }

    /// Whether some mimetype matches both; each of the two may be a pattern.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let open = |mime: &Self| mime.essence().contains('*');
        self.matches(other)
            || other.matches(self)
            // A type pattern and a suffix pattern always overlap: `application/*` and `*+json`.
            || (open(self) && open(other) && self.starts_with('*') != other.starts_with('*'))
    }

    /// Whether this is text by the list of EV-608: `text/*`, JSON, XML, LaTeX, and types built on them.
    #[must_use]
    pub fn is_text(&self) -> bool {
        const TEXTS: [Mime; 7] = [
            Mime::new("text/*"),
            Mime::JSON,
            Mime::NDJSON,
            Mime::new("application/xml"),
            Mime::new("application/x-latex"),
            Mime::new("*+json"),
            Mime::new("*+xml"),
        ];
        TEXTS.iter().any(|pattern| self.matches(pattern))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mimetypes_match_patterns() {
        for (mime, pattern, expect) in [
            ("text/plain", "text/*", true),
            ("TEXT/Plain; charset=utf-8", "text/plain", true),
            ("image/svg+xml", "*+xml", true),
            ("application/json", "*+json", false),
            ("application/json", "*/*", true),
            ("text", "text/*", false),
            ("textual/plain", "text/*", false),
        ] {
            let (mime, pattern) = (Mime::new(mime), Mime::new(pattern));
            assert_eq!(mime.matches(&pattern), expect, "{mime} {pattern}");
        }
    }

    #[test]
    fn patterns_overlap_where_a_mimetype_may_match_both() {
        for (left, right, expect) in [
            ("text/*", "text/plain", true),
            ("text/plain", "text/*", true),
            ("application/*", "*+json", true),
            ("text/*", "image/*", false),
            ("image/png", "text/*", false),
            ("*/*", "image/png", true),
        ] {
            assert_eq!(
                Mime::new(left).overlaps(&Mime::new(right)),
                expect,
                "{left} {right}"
            );
        }
    }

    #[test]
    fn names_are_equal_by_text() {
        assert_eq!(Name::new("a"), Name::shared("a"));
        assert_ne!(Name::new("a"), Name::new("b"));
        assert!(std::collections::BTreeSet::from([Name::new("k")]).contains("k"));
    }
}
