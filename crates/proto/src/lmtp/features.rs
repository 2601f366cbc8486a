//! The features of version 2 (section 9 of the specification).

macro_rules! features {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// One feature of version 2.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Feature { $($(#[$doc])* $variant,)* }

        impl Feature {
            /// Every feature, in the order of the specification.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name on the wire.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

features! {
    /// Text prompts and output, TOKENIZE, DETOKENIZE.
    Text = "text";
    /// BUFFER, `prefix`, `keep`.
    Buffers = "buffers";
    /// MASK, `mask`.
    Masks = "masks";
    /// STATUS.
    Status = "status";
    /// CANCEL, deadlines, end items without a token.
    Cancel = "cancel";
    /// `usage` on the last item.
    Usage = "usage";
    /// `seq`, RESUME, streams that outlive their connection.
    Resume = "resume";
    /// `window`, ACK.
    Window = "window";
    /// `n`, `scored_many`, SCORE with `top_logprobs`.
    Samples = "samples";
    /// `controller`, forced tokens, backtracks and forks.
    Controllers = "controllers";
    /// `lora` of GENERATE and SCORE.
    Lora = "lora";
    /// `suffix` of GENERATE and SCORE.
    Infill = "infill";
}

/// A set of features: bit *i* is the feature at index *i* of [`Feature::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u16);

impl Features {
    /// No features: the base protocol.
    pub const NONE: Self = Self(0);

    /// Every feature.
    pub const ALL: Self = Self((1 << Feature::ALL.len()) - 1);

    /// The features that our sessions support.
    pub const BUILT: Self = Self::ALL;

    /// Adds a feature.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | (1 << feature as u16))
    }

    /// Removes a feature.
    #[must_use]
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !(1 << feature as u16))
    }

    /// The intersection of both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether the set contains a feature.
    #[must_use]
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u16) != 0
    }

    /// Whether the set is empty: the base protocol.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The names on the wire, in the order of the specification.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let own = Feature::ALL.iter().filter(move |one| self.has(**one));
        own.map(|feature| feature.name())
    }

    /// The features with these names; unknown names are ignored (LM-902).
    pub fn named<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let find = |name| Feature::ALL.iter().find(|one| one.name() == name);
        let known = names.into_iter().filter_map(find);
        known.fold(Self::NONE, |all, feature| all.with(*feature))
    }
}
