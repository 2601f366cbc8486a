//! Maps generation parameters to the inputs of a Triton model.

use sapwood_net::triton::{InferRequest, TensorData};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::{LoraName, LoraUse};
use serde_json::{Map, Value, json};

use super::elements;
use crate::Result;
use crate::error::Error;
use crate::model::GenerateConfig;
use crate::model::remote::unimplemented;
use crate::name::Name;

/// Sets the inputs and parameters of `request` that `config` sets.
///
/// # Errors
/// `Argument` with `BAD_CONFIG` for a value that the declared input cannot hold; `Unimplemented` for a field that the
/// model has no input for.
pub(super) fn fill(request: &mut InferRequest, config: &GenerateConfig) -> Result<()> {
    let mut fields = Fields {
        // vLLM's backend takes most parameters only within this input.
        sampling: request.model.input(SAMPLING).map(|_| Map::new()),
        request,
    };
    let params = config.params.to_json();
    let params = params.ok_or_else(|| unimplemented("a stop of several tokens"))?;
    for (name, value) in params {
        match name.as_str() {
            // Both are set by the outputs that are read, and one choice is all that a model without them has.
            "n" | "top_logprobs" => {}
            "top_k" => fields.top_k(value)?,
            "stop" => fields.stop(&config.params.stop)?,
            "bad_words" => fields.bad_words(value)?,
            "stop_token_ids" | "logit_bias" | "dry_sequence_breakers" | "samplers" => {
                fields.sample(&name, value)?;
            }
            "lora" => fields.lora(config.params.lora.as_deref().unwrap_or_default(), &value)?,
            "min_tokens" => fields.put(&["min_tokens", "min_length"], value)?,
            "seed" => fields.put(&["seed", "random_seed"], value)?,
            name => fields.put(&[name], value)?,
        }
    }
    fields.finish();
    Ok(())
}

struct Fields<'a> {
    request: &'a mut InferRequest,
    /// The content of `sampling_parameters`, if the model has that input.
    sampling: Option<Map<String, Value>>,
}

impl Fields<'_> {
    /// Sets the first input of these names that the model has; the first name is the one used in JSON and among
    /// parameters.
    fn put(&mut self, names: &[&str], value: Value) -> Result<()> {
        let name = names[0];
        if self.set_input(names, &value)? {
            return Ok(());
        }
        match &mut self.sampling {
            Some(sampling) => {
                sampling.insert(name.into(), value);
            }
            None => self.request.parameters.push((name.into(), value)),
        }
        Ok(())
    }

    /// Sets the first input of these names that the model has; `false` if it has none.
    fn set_input(&mut self, names: &[&str], value: &Value) -> Result<bool> {
        let model = &self.request.model;
        let Some(target) = names.iter().find_map(|name| model.input(name)) else {
            return Ok(false);
        };
        let input = &model.inputs[target];
        let Some(data) = elements::from_json(input.datatype, value) else {
            let why = format!("the model's server takes {} here", input.datatype);
            return Err(
                Error::argument(Name::shared(&input.name), why).because(ErrorReason::BAD_CONFIG)
            );
        };
        self.request.inputs.push((target, data));
        Ok(true)
    }

    /// "Off" is 0 as an input and -1 in JSON: some servers accept only that form there.
    fn top_k(&mut self, top_k: Value) -> Result<()> {
        match &mut self.sampling {
            Some(sampling) if top_k == 0 && self.request.model.input("top_k").is_none() => {
                sampling.insert("top_k".into(), json!(-1));
                Ok(())
            }
            _ => self.put(&["top_k"], top_k),
        }
    }

    fn stop(&mut self, stop: &[String]) -> Result<()> {
        if self.set_input(&["stop_words"], &json!(stop))? {
            return Ok(());
        }
        if self.sampling.is_some() {
            return self.sample("stop", json!(stop));
        }
        // A parameter holds one value (TR-307).
        let [stop] = stop else {
            return Err(unimplemented("more than one stop text"));
        };
        self.put(&["stop"], stop.as_str().into())
    }

    /// A model without an input for bad words would generate them, so they are refused.
    fn bad_words(&mut self, words: Value) -> Result<()> {
        if self.set_input(&["bad_words"], &words)? {
            return Ok(());
        }
        self.sample("bad_words", words)
    }

    /// A model without an input for adapters would compute with others, so they are refused. vLLM's backend takes one by
    /// its name, and refuses a name that it does not have.
    fn lora(&mut self, uses: &[LoraUse], list: &Value) -> Result<()> {
        let one = match uses {
            [
                LoraUse {
                    adapter: LoraName::Name(name),
                    scale: None,
                },
            ] => Some(json!(name)),
            _ => None,
        };
        if let Some(name) = &one
            && self.set_input(&["lora_name"], name)?
        {
            return Ok(());
        }
        if self.set_input(&["lora"], &list.to_string().into())? {
            return Ok(());
        }
        let name = one.ok_or_else(|| unimplemented("lora"))?;
        self.sample("lora_name", name)
    }

    /// Sets a field that is no plain value: only `sampling_parameters` can hold it.
    fn sample(&mut self, name: &str, value: Value) -> Result<()> {
        let sampling = self.sampling.as_mut().ok_or_else(|| unimplemented(name))?;
        sampling.insert(name.into(), value);
        Ok(())
    }

    fn finish(self) {
        let Some(sampling) = self.sampling.filter(|sampling| !sampling.is_empty()) else {
            return;
        };
        if let Some(target) = self.request.model.input(SAMPLING) {
            let text = Value::Object(sampling).to_string();
            let text = TensorData::Bytes([text.as_bytes()].into_iter().collect());
            self.request.inputs.push((target, text));
        }
    }
}

const SAMPLING: &str = "sampling_parameters";
