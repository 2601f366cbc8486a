//! Reads the body of `POST /v1/run` (AI-911).

use sapwood_proto::params::{GenerationParams, JsonCoercion, PARAMS, ParamRanges};
use sapwood_proto::steer::ControllerChoice;
use serde_json::{Map, Value};

use super::refusals;
use crate::http::rejection::Rejection;

/// A request for a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RunRequest {
    pub(super) model: Option<String>,
    /// `None` completes the prompt without a controller.
    pub(super) controller: Option<ControllerChoice>,
    pub(super) prompt: String,
    /// Variables that are set before the controller starts.
    pub(super) vars: Vec<(String, Vec<u8>)>,
    pub(super) params: GenerationParams,
}

/// The name that stands for no controller.
const NONE: &str = "none";

/// The generation parameters that runs do not have, and why.
const REFUSED: [(&str, &str); 2] = [
    (
        "n",
        "n is not a parameter of runs: a controller forks by itself, or send several requests",
    ),
    (
        "top_logprobs",
        "top_logprobs is not a parameter of runs: their events have no place for log-probabilities",
    ),
];
/// The temperature of a run that sets none.
pub(super) const TEMPERATURE: f32 = 0.0;

impl RunRequest {
    /// Reads the members; null is absent, and unknown ones are ignored.
    pub(super) fn read(members: &Map<String, Value>) -> Result<Self, Rejection> {
        let given = |name: &str| members.get(name).filter(|value| !value.is_null());
        if let Some((_, why)) = REFUSED.iter().find(|(name, _)| given(name).is_some()) {
            return Err(refusals::unsupported(why));
        }
        let text = |name: &str| match given(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(refusals::invalid(format!("{name} must be a string"))),
        };
        let mut prompt = text("prompt")?.unwrap_or_default();
        let name = text("controller")?.ok_or_else(|| {
            refusals::invalid("controller is required: the name of a controller, or none")
        })?;
        let controller = if name == NONE {
            // `aici infer` sends its prompt so, and may send another one, which counts for controllers alone.
            if let Some(text) = text("controller_arg")? {
                prompt = text;
            }
            None
        } else {
            let choice = ControllerChoice::from_json(&name.into(), given("controller_arg"));
            Some(choice.map_err(|error| refusals::invalid(error.to_string()))?)
        };
        let vars = match given("vars") {
            None => Vec::new(),
            Some(_) if controller.as_ref().is_none_or(is_native) => {
                return Err(refusals::invalid(
                    "vars needs a controller that has variables: an uploaded one",
                ));
            }
            Some(vars) => variables(vars)?,
        };
        let params = params(given)?;
        Ok(Self {
            model: text("model")?,
            controller,
            prompt,
            vars,
            params,
        })
    }
}

/// Reads the generation parameters: all of the table, by the names and within the ranges of the core.
fn params<'a>(given: impl Fn(&str) -> Option<&'a Value>) -> Result<GenerationParams, Rejection> {
    let mut params = GenerationParams::default();
    for param in PARAMS {
        let Some(value) = given(param.name) else {
            continue;
        };
        let read = params.set_json(param, value, &ParamRanges::CORE, JsonCoercion::Strict);
        read.map_err(|error| refusals::invalid(error.to_string()))?;
    }
    Ok(params)
}

/// Whether it is one of the constraints of this server, which have no variables.
fn is_native(controller: &ControllerChoice) -> bool {
    controller.id.starts_with("sapwood:")
}

fn variables(value: &Value) -> Result<Vec<(String, Vec<u8>)>, Rejection> {
    let invalid = || refusals::invalid("vars must be an object of strings");
    let members = value.as_object().ok_or_else(invalid)?;
    let read = |(name, value): (&String, &Value)| {
        let text = value.as_str().ok_or_else(invalid)?;
        Ok((name.clone(), text.as_bytes().to_vec()))
    };
    members.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<RunRequest, Rejection> {
        let Value::Object(members) = body else {
            panic!("an object");
        };
        RunRequest::read(&members)
    }

    #[test]
    fn ai_911_defaults_and_null_members() {
        let request =
            read(json!({"controller": "t", "prompt": null, "max_tokens": null, "n": null}))
                .unwrap();
        assert_eq!(request.prompt, "");
        assert_eq!(request.params.temperature, None);
        assert_eq!(
            (request.params.max_tokens, request.params.top_k),
            (None, None)
        );
        let choice = ControllerChoice {
            id: "t".into(),
            arg: String::new(),
        };
        assert_eq!((request.controller, request.model), (Some(choice), None));
    }

    #[test]
    fn ai_911_the_members_of_the_client_are_read() {
        let request = read(json!({
            "controller": "sapwood:regex", "controller_arg": {"b": 1, "a": [2, 3.0]}, "prompt": "x", "model": "m",
            "temperature": 0.5, "top_p": 0.9, "top_k": -1, "max_tokens": 8, "seed": 7, "later": true,
        }))
        .unwrap();
        let arg = request.controller.map(|choice| choice.arg);
        assert_eq!(arg.as_deref(), Some(r#"{"b":1,"a":[2,3.0]}"#));
        let params = request.params;
        assert_eq!((params.temperature, params.top_p), (Some(0.5), Some(0.9)));
        assert_eq!((params.max_tokens, params.seed), (Some(8), Some(7)));
    }

    /// Each parameter of the table is read or refused by its name; none is ignored.
    #[test]
    fn d_20_a_run_has_every_generation_parameter() {
        for param in PARAMS {
            let mut body = json!({"controller": "none"});
            body[param.name] = json!({"no": ["parameter", "has", "this"]});
            let rejection = read(body).unwrap_err();
            assert!(
                rejection.message.starts_with(param.name),
                "{}: {}",
                param.name,
                rejection.message
            );
        }
        let request = read(json!({
            "controller": "none", "min_p": 0.1, "repetition_penalty": 1.5, "stop": "end", "stop_token_ids": [3],
            "logit_bias": {"7": -100}, "ignore_eos": true, "lora": null,
        }));
        let params = request.unwrap().params;
        assert_eq!(
            (params.min_p, params.repetition_penalty),
            (Some(0.1), Some(1.5))
        );
        assert_eq!(
            (&*params.stop, &*params.stop_sequences),
            (&["end".to_owned()][..], &[vec![3]][..])
        );
        assert_eq!(*params.logit_bias, [(7, f32::NEG_INFINITY)]);
        assert_eq!((params.ignore_eos, params.lora), (Some(true), None));
    }

    #[test]
    fn ai_911_none_completes_the_argument() {
        let request =
            read(json!({"controller": "none", "controller_arg": "tell", "prompt": "a "})).unwrap();
        assert_eq!((request.controller, &*request.prompt), (None, "tell"));
        let request = read(json!({"controller": "none", "prompt": "a "})).unwrap();
        assert_eq!((request.controller, &*request.prompt), (None, "a "));
        assert!(read(json!({"controller": "none", "controller_arg": 7})).is_err());
    }

    #[test]
    fn ai_911_what_is_wrong_is_refused_by_name() {
        for (body, code, names) in [
            (json!({}), "invalid_value", "controller"),
            (json!({"controller": null}), "invalid_value", "controller"),
            (json!({"controller": 7}), "invalid_value", "controller"),
            (json!({"controller": ""}), "invalid_value", "controller"),
            (
                json!({"controller": "t", "n": 2}),
                "unsupported_operation",
                "n ",
            ),
            (
                json!({"controller": "t", "top_logprobs": 2}),
                "unsupported_operation",
                "top_logprobs ",
            ),
            (
                json!({"controller": "t", "prompt": [1]}),
                "invalid_value",
                "prompt",
            ),
            (
                json!({"controller": "t", "temperature": "hot"}),
                "invalid_value",
                "temperature",
            ),
            (
                json!({"controller": "t", "top_p": 0}),
                "invalid_value",
                "top_p",
            ),
            (
                json!({"controller": "t", "min_p": 1}),
                "invalid_value",
                "min_p",
            ),
            (
                json!({"controller": "t", "repetition_penalty": 0}),
                "invalid_value",
                "repetition_penalty",
            ),
            (
                json!({"controller": "t", "max_tokens": -1}),
                "invalid_value",
                "max_tokens",
            ),
            (
                json!({"controller": "t", "model": 1}),
                "invalid_value",
                "model",
            ),
            (
                json!({"controller": "t", "controller_arg": "x".repeat((1 << 20) + 1)}),
                "invalid_value",
                "controller_arg",
            ),
        ] {
            let rejection = read(body).unwrap_err();
            assert_eq!(rejection.reason.name(), code);
            assert!(rejection.message.contains(names), "{}", rejection.message);
        }
        assert!(read(json!({"controller": "t", "controller_arg": "x".repeat(1 << 20)})).is_ok());
    }
}
