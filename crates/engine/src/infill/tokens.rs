//! [`InfillTokens`]: what marks the parts of a prompt that is to be filled in.

use sapwood_proto::steer::Token;

/// The tokens of a model for fill in the middle, and the order in which it was trained with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfillTokens {
    /// Stands before the text before the place to fill in.
    pub prefix: Token,
    /// Stands before the text behind it.
    pub suffix: Token,
    /// Ends the prompt: what the model generates next belongs between the two.
    pub middle: Token,
    /// SPM order: the suffix comes first.
    pub suffix_first: bool,
}

impl InfillTokens {
    /// The tokens with these ids, in PSM order; `None` unless there are all three, as in llama-server, and they differ.
    #[must_use]
    pub(crate) fn of([prefix, suffix, middle]: [Option<Token>; 3]) -> Option<Self> {
        let infill = Self {
            prefix: prefix?,
            suffix: suffix?,
            middle: middle?,
            suffix_first: false,
        };
        infill.unless_any(|_| false)
    }

    /// These, unless two are the same token, or one has another meaning: such a prompt would be split at a wrong place.
    pub(crate) fn unless_any(self, is_taken: impl Fn(Token) -> bool) -> Option<Self> {
        let [prefix, suffix, middle] = self.all();
        let differ = prefix != suffix && suffix != middle && prefix != middle;
        (differ && !self.all().into_iter().any(is_taken)).then_some(self)
    }

    /// The tokens of a vocabulary that says nothing of their roles, by the texts that llama.cpp looks for.
    #[must_use]
    pub(crate) fn named(find: impl Fn(&str) -> Option<Token>) -> Option<Self> {
        Self::of(INFILL_TEXTS.map(|texts| texts.iter().find_map(|text| find(text))))
    }

    /// These, unless one is an ordinary token: every text may have that, and a wrong id would split prompts at words. Control
    /// tokens and added tokens are none (`is_added`). Nor are those with a well-known text: the files of CodeLlama have
    /// theirs as ordinary tokens.
    #[cfg(any(feature = "embedded", feature = "tokenizer"))]
    pub(crate) fn if_marks<T: AsRef<str>>(
        self,
        is_added: impl Fn(Token) -> bool,
        text: impl Fn(Token) -> T,
    ) -> Option<Self> {
        let is_mark = |(token, texts): (Token, &[&str])| {
            is_added(token) || texts.contains(&text(token).as_ref())
        };
        let mut tokens = self.all().into_iter().zip(INFILL_TEXTS);
        tokens.all(is_mark).then_some(self)
    }

    pub(super) fn all(self) -> [Token; 3] {
        [self.prefix, self.suffix, self.middle]
    }
}

/// The texts by which llama.cpp finds the tokens of a prefix, a suffix and the middle.
pub(crate) const INFILL_TEXTS: [&[&str]; 3] = [
    &[
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<\u{ff5c}fim\u{2581}begin\u{ff5c}>",
        "<PRE>",
        "\u{2581}<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ],
    &[
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<\u{ff5c}fim\u{2581}hole\u{ff5c}>",
        "<SUF>",
        "\u{2581}<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ],
    &[
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<\u{ff5c}fim\u{2581}end\u{ff5c}>",
        "<MID>",
        "\u{2581}<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ],
];
