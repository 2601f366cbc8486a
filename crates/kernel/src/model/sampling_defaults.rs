//! [`SamplingDefaults`]: a model's values for the parameters that a request leaves unset.

use std::sync::Arc;

use sapwood_engine::recommended::RecommendedSampling;
use sapwood_proto::params::{GenerationParams, ParamError, ParamRanges, SAMPLER_PARAMS};

/// A model's own defaults, as whoever serves it has chosen them. They hold for every face, because they are applied where
/// the inputs of a call are read; a request that sets a parameter wins. What a request neither sets nor finds here has the
/// default of its protocol.
///
/// Requests that score given tokens have none of them: nothing is sampled there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults(Arc<GenerationParams>);

impl SamplingDefaults {
    /// The parameters that may have a default. Not among them: what changes the form of an answer (`n`, `top_logprobs`,
    /// `skip_special_tokens`, `include_stop_str_in_output`), what a request could not take back (`logit_bias`, `bad_words`,
    /// `stop_token_ids`, `ignore_eos`), `min_tokens`, which would make short requests errors, and `lora`, whose default is
    /// part of the model.
    pub const NAMES: [&str; 11 + SAMPLER_PARAMS.len()] = names();

    /// Checks the values against the ranges of the core. A `max_tokens` of 0 is none: it would make every answer empty.
    ///
    /// # Errors
    /// The first parameter that is out of its range, or may have no default.
    pub fn new(mut params: GenerationParams) -> Result<Self, ParamError> {
        params.check(&Self::RANGES, u32::MAX)?;
        let name = params.set_beside(|name| Self::NAMES.contains(&name));
        let priority = params.priority.map(|_| "priority");
        let name = name.or(priority);
        match name {
            None => Ok(Self(Arc::new(params))),
            Some(name) => Err(ParamError {
                name,
                must: "set by requests: it has no default".to_owned(),
            }),
        }
    }

    /// The ranges of defaults.
    pub const RANGES: ParamRanges = ParamRanges {
        max_tokens_least: 1,
        ..ParamRanges::CORE
    };

    /// The values.
    #[must_use]
    pub fn params(&self) -> &GenerationParams {
        &self.0
    }

    /// These, and where they have none, those of `others`.
    #[must_use]
    pub fn or(&self, others: &Self) -> Self {
        let mut params = GenerationParams::clone(&self.0);
        complete(&mut params, &others.0);
        Self(Arc::new(params))
    }

    /// What programs that ask on behalf of a person send where that person sets nothing (D-53): these, and beside them
    /// what the file recommends. They send it by Evergreen, so a higher temperature than it has is its highest.
    #[must_use]
    pub fn recommend(&self, file: RecommendedSampling) -> RecommendedSampling {
        let params = &self.0;
        let temperature = params.temperature.or(file.temperature);
        let [_, hottest] = ParamRanges::EVERGREEN.temperature.ends();
        RecommendedSampling {
            temperature: temperature.map(|temperature| temperature.min(hottest)),
            top_k: params.top_k.or(file.top_k),
            top_p: params.top_p.or(file.top_p),
            min_p: params.min_p.or(file.min_p),
            repetition_penalty: params.repetition_penalty.or(file.repetition_penalty),
            penalty_last_n: params.penalty_last_n.or(file.penalty_last_n),
            xtc_probability: params.xtc_probability.or(file.xtc_probability),
            xtc_threshold: params.xtc_threshold.or(file.xtc_threshold),
            mirostat: params.mirostat.or(file.mirostat),
            mirostat_tau: params.mirostat_tau.or(file.mirostat_tau),
            mirostat_eta: params.mirostat_eta.or(file.mirostat_eta),
            max_tokens: params.max_tokens.or(file.max_tokens),
        }
    }

    /// Gives the parameters that a request has not set their defaults.
    ///
    /// # Errors
    /// The request's `min_tokens` is above the default `max_tokens`. The engine's own check would name a value that the
    /// caller has never seen.
    pub(super) fn fill(&self, request: &mut GenerationParams) -> Result<(), ParamError> {
        // Most models have none, and every request comes here.
        if *self.0 == GenerationParams::default() {
            return Ok(());
        }
        if let (Some(least), None, Some(most)) =
            (request.min_tokens, request.max_tokens, self.0.max_tokens)
            && least > most
        {
            return Err(ParamError {
                name: "min_tokens",
                must: format!(
                    "at most max_tokens, which is {most} for requests that do not set it"
                ),
            });
        }
        complete(request, &self.0);
        Ok(())
    }
}

/// Gives parameters what they lack. Mirostat takes the place of the steps that an order of samplers names, so that an order which is
/// set turns a mirostat of the defaults off: it would do nothing otherwise.
fn complete(params: &mut GenerationParams, defaults: &GenerationParams) {
    let has_order = params.samplers.is_some() && params.mirostat.is_none();
    params.fill_from(defaults);
    if has_order {
        params.mirostat = None;
    }
}

const fn names() -> [&'static str; 11 + SAMPLER_PARAMS.len()] {
    let first = [
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "penalty_last_n",
        "seed",
        "stop",
    ];
    let mut all = [""; 11 + SAMPLER_PARAMS.len()];
    // Constants cannot use iterators.
    let mut at = 0;
    while at < all.len() {
        all[at] = if at < first.len() {
            first[at]
        } else {
            SAMPLER_PARAMS[at - first.len()]
        };
        at += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use sapwood_proto::params::{JsonCoercion, ParamSpec};
    use serde_json::{Value, json};

    use super::*;

    fn params(values: &Value) -> GenerationParams {
        let mut params = GenerationParams::default();
        for (name, value) in values.as_object().unwrap() {
            let param = ParamSpec::named(name).unwrap();
            let (ranges, coercion) = (&ParamRanges::CORE, JsonCoercion::Strict);
            params.set_json(param, value, ranges, coercion).unwrap();
        }
        params
    }

    fn defaults(values: &Value) -> SamplingDefaults {
        SamplingDefaults::new(params(values)).unwrap()
    }

    #[test]
    fn a_request_wins_over_the_defaults_parameter_by_parameter() {
        let usual = json!({"temperature": 0.6, "top_k": 20, "min_p": 0.05});
        let chain = json!({"mirostat": 2, "mirostat_tau": 4.0});
        for (defaulted, request, expected) in [
            (json!({}), json!({"top_k": 3}), json!({"top_k": 3})),
            (usual.clone(), json!({}), usual.clone()),
            // Greedy and "off" are values too.
            (
                usual,
                json!({"temperature": 0, "min_p": 0}),
                json!({"temperature": 0, "top_k": 20, "min_p": 0}),
            ),
            (
                json!({"stop": ["END"], "samplers": ["top_k"], "dry_sequence_breakers": ["x"]}),
                json!({"stop": ["\n"], "dry_sequence_breakers": []}),
                json!({"stop": ["\n"], "samplers": ["top_k"], "dry_sequence_breakers": []}),
            ),
            (
                json!({"max_tokens": 8, "seed": 7, "stop": ["END"]}),
                json!({"min_tokens": 8, "n": 2}),
                json!({"max_tokens": 8, "seed": 7, "stop": ["END"], "min_tokens": 8, "n": 2}),
            ),
            (
                chain.clone(),
                json!({"top_p": 0.9}),
                json!({"mirostat": 2, "mirostat_tau": 4.0, "top_p": 0.9}),
            ),
            // Otherwise the order would do nothing.
            (
                chain.clone(),
                json!({"samplers": ["top_k"]}),
                json!({"mirostat_tau": 4.0, "samplers": ["top_k"]}),
            ),
            (
                chain,
                json!({"samplers": ["temperature"], "mirostat": 2}),
                json!({"mirostat": 2, "mirostat_tau": 4.0, "samplers": ["temperature"]}),
            ),
        ] {
            let mut merged = params(&request);
            defaults(&defaulted).fill(&mut merged).unwrap();
            assert_eq!(merged, params(&expected), "{defaulted} {request}");
        }
    }

    #[test]
    fn an_order_of_a_model_turns_the_mirostat_of_all_models_off() {
        let model = defaults(&json!({"samplers": ["top_k"], "top_k": 1}));
        let merged = model.or(&defaults(&json!({"mirostat": 2, "mirostat_tau": 4.0})));
        let expected = json!({"samplers": ["top_k"], "top_k": 1, "mirostat_tau": 4.0});
        assert_eq!(*merged.params(), params(&expected));
    }

    #[test]
    fn a_minimum_above_the_default_maximum_is_an_error_that_names_both() {
        let eight = defaults(&json!({"max_tokens": 8}));
        let error = eight.fill(&mut params(&json!({"min_tokens": 9})));
        let expected =
            "min_tokens must be at most max_tokens, which is 8 for requests that do not set it";
        assert_eq!(error.unwrap_err().to_string(), expected);
        let both = json!({"min_tokens": 9, "max_tokens": 9});
        assert_eq!(eight.fill(&mut params(&both)), Ok(()));
    }

    #[test]
    fn only_what_samples_or_ends_a_text_may_have_a_default() {
        for (values, name) in [
            (json!({"n": 2}), "n"),
            (json!({"top_logprobs": 1}), "top_logprobs"),
            (json!({"logit_bias": {"5": 1}}), "logit_bias"),
            (json!({"min_tokens": 1}), "min_tokens"),
            (json!({"max_tokens": 0}), "max_tokens"),
        ] {
            let error = SamplingDefaults::new(params(&values)).unwrap_err();
            assert_eq!(error.name, name);
        }
        let wild = GenerationParams {
            temperature: Some(f32::NAN),
            ..GenerationParams::default()
        };
        assert_eq!(SamplingDefaults::new(wild).unwrap_err().name, "temperature");
        for name in SamplingDefaults::NAMES {
            assert!(ParamSpec::named(name).is_some(), "{name}");
        }
    }

    #[test]
    fn d_53_defaults_are_recommended_before_those_of_the_file() {
        let file = RecommendedSampling {
            temperature: Some(1.0),
            top_k: Some(64),
            ..RecommendedSampling::default()
        };
        let hot = defaults(&json!({"temperature": 50})).recommend(file);
        assert_eq!(hot.temperature, Some(2.0));
        let recommended = defaults(&json!({"temperature": 0.2})).recommend(file);
        assert_eq!(
            (recommended.temperature, recommended.top_k),
            (Some(0.2), Some(64))
        );
    }
}
