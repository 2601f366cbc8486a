//! The features of version 2 (section 9 of the specification).

/// One feature of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Feature {
    /// Text prompts and output, TOKENIZE, DETOKENIZE.
    Text = 1,
    /// BUFFER, `prefix`, `keep`.
    Buffers = 1 << 1,
    /// MASK, `mask`.
    Masks = 1 << 2,
    /// STATUS.
    Status = 1 << 3,
    /// CANCEL, deadlines, end items without a token.
    Cancel = 1 << 4,
    /// `usage` on the last item.
    Usage = 1 << 5,
    /// `seq`, RESUME, streams that outlive their connection.
    Resume = 1 << 6,
    /// `window`, ACK.
    Window = 1 << 7,
    /// `n`, `scored_many`, SCORE with `top_logprobs`.
    Samples = 1 << 8,
    /// `controller` and related members.
    Controllers = 1 << 9,
}

impl Feature {
    /// Every feature, in the order of the specification.
    pub const ALL: [Self; 10] = [
        Self::Text,
        Self::Buffers,
        Self::Masks,
        Self::Status,
        Self::Cancel,
        Self::Usage,
        Self::Resume,
        Self::Window,
        Self::Samples,
        Self::Controllers,
    ];

    /// The name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Buffers => "buffers",
            Self::Masks => "masks",
            Self::Status => "status",
            Self::Cancel => "cancel",
            Self::Usage => "usage",
            Self::Resume => "resume",
            Self::Window => "window",
            Self::Samples => "samples",
            Self::Controllers => "controllers",
        }
    }
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u16);

impl Features {
    /// No features: the base protocol.
    pub const NONE: Self = Self(0);

    /// Every feature.
    pub const ALL: Self = Self((1 << Feature::ALL.len()) - 1);

    /// The features that our sessions support: all except `controllers`.
    pub const BUILT: Self = Self::ALL.without(Feature::Controllers);

    /// Adds a feature.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | feature as u16)
    }

    /// Removes a feature.
    #[must_use]
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !(feature as u16))
    }

    /// The intersection of both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether the set contains a feature.
    #[must_use]
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & feature as u16 != 0
    }

    /// Whether the set is empty: the base protocol.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The names on the wire, in the order of the specification.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let own = Feature::ALL
            .into_iter()
            .filter(move |feature| self.has(*feature));
        own.map(Feature::name)
    }

    /// The features with these names; unknown names are ignored (LM-902).
    pub fn named<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut features = Self::NONE;
        for name in names {
            let known = Feature::ALL
                .into_iter()
                .find(|feature| feature.name() == name);
            features = known.map_or(features, |feature| features.with(feature));
        }
        features
    }
}
