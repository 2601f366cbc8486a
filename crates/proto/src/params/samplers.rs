//! [`SamplerOrder`]: the steps of sampling that a request may name, and their order.

use std::fmt;

/// One step of sampling. The names are llama.cpp's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplerStep {
    /// `repetition_penalty`, `presence_penalty` and `frequency_penalty`.
    Penalties,
    /// The parameters `dry_*`.
    Dry,
    /// `temperature`, and the parameters `dynatemp_*`.
    Temperature,
    /// `top_n_sigma`.
    TopNSigma,
    /// `top_k`.
    TopK,
    /// `typical_p`.
    TypicalP,
    /// `top_p`.
    TopP,
    /// `min_p`.
    MinP,
    /// The parameters `xtc_*`.
    Xtc,
}

impl SamplerStep {
    /// Every step, in the default order. It is llama.cpp's but for the temperature, which comes before the steps that
    /// drop tokens, as in vLLM and Transformers.
    pub const ALL: [Self; 9] = [
        Self::Penalties,
        Self::Dry,
        Self::Temperature,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
    ];

    /// Returns the name in lists.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Penalties => "penalties",
            Self::Dry => "dry",
            Self::Temperature => "temperature",
            Self::TopNSigma => "top_n_sigma",
            Self::TopK => "top_k",
            Self::TypicalP => "typ_p",
            Self::TopP => "top_p",
            Self::MinP => "min_p",
            Self::Xtc => "xtc",
        }
    }

    /// Returns the step of a name; also of `typical_p`, which is what its parameter is called.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        if name == "typical_p" {
            return Some(Self::TypicalP);
        }
        Self::ALL.into_iter().find(|step| step.name() == name)
    }
}

/// Steps of sampling in their order, each at most once. Steps that are not in it are skipped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SamplerOrder {
    steps: [SamplerStep; SamplerStep::ALL.len()],
    len: usize,
}

impl SamplerOrder {
    /// The order of these steps; `None` if one of them occurs twice.
    #[must_use]
    pub fn new(steps: impl IntoIterator<Item = SamplerStep>) -> Option<Self> {
        let mut order = Self {
            steps: SamplerStep::ALL,
            len: 0,
        };
        for step in steps {
            if order.contains(step) {
                return None;
            }
            // Each step occurs once, so there are no more than all.
            order.steps[order.len] = step;
            order.len += 1;
        }
        Some(order)
    }

    /// The order of the steps with these names; `None` if a name is unknown or occurs twice.
    #[must_use]
    pub fn of_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        // Bounded by the steps that there are: the first name beyond them repeats one.
        let mut order = Self::new([])?;
        for name in names {
            let step = SamplerStep::named(name)?;
            order = Self::new(order.steps().iter().copied().chain([step]))?;
        }
        Some(order)
    }

    /// Returns the steps.
    #[must_use]
    pub fn steps(&self) -> &[SamplerStep] {
        &self.steps[..self.len]
    }

    /// Whether a step is part of it.
    #[must_use]
    pub fn contains(&self, step: SamplerStep) -> bool {
        self.steps().contains(&step)
    }

    /// Returns the steps that `keep` accepts, in their order.
    #[must_use]
    pub fn filtered(&self, mut keep: impl FnMut(SamplerStep) -> bool) -> Self {
        let kept = self.steps().iter().copied().filter(|&step| keep(step));
        Self::new(kept).unwrap_or(*self)
    }

    /// Whether the steps are in the same order as in the default.
    #[must_use]
    pub fn is_default_order(&self) -> bool {
        let place = |step: &SamplerStep| SamplerStep::ALL.iter().position(|all| all == step);
        self.steps().is_sorted_by_key(place)
    }
}

impl Default for SamplerOrder {
    fn default() -> Self {
        Self {
            steps: SamplerStep::ALL,
            len: SamplerStep::ALL.len(),
        }
    }
}

/// As a list of names.
impl fmt::Debug for SamplerOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.steps().iter().map(|step| step.name());
        f.debug_list().entries(names).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_each_known_name_once() {
        let order = SamplerOrder::of_names(["top_k", "typical_p", "temperature"]).unwrap();
        assert_eq!(format!("{order:?}"), r#"["top_k", "typ_p", "temperature"]"#);
        assert!(!order.is_default_order() && !order.contains(SamplerStep::Xtc));
        let rest = order.filtered(|step| step != SamplerStep::Temperature);
        assert!(rest.is_default_order() && rest.steps().len() == 2);
        let all = SamplerStep::ALL.map(SamplerStep::name);
        assert_eq!(SamplerOrder::of_names(all), Some(SamplerOrder::default()));
        assert_eq!(SamplerOrder::of_names([]).unwrap().steps(), []);
        for wrong in [
            &["top_k", "top_k"][..],
            &["typ_p", "typical_p"],
            &["infill"],
            &[""],
        ] {
            assert_eq!(
                SamplerOrder::of_names(wrong.iter().copied()),
                None,
                "{wrong:?}"
            );
        }
        // Whatever the length of a list, reading it ends at the first name too many.
        let endless = std::iter::repeat("dry");
        assert_eq!(SamplerOrder::of_names(endless), None);
    }
}
