//! Maps generation parameters to the inputs of a Triton model.

use sapwood_net::triton::{InferRequest, ModelSignature, TensorData};
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
        sampling: request.model.input(SAMPLING).map(|_| Map::new()),
        request,
    };
    for (names, value) in single(config) {
        if let Some(value) = value {
            fields.put(names, value)?;
        }
    }
    if let Some(top_k) = config.top_k {
        fields.top_k(top_k)?;
    }
    if !config.stop.is_empty() {
        fields.stop(&config.stop)?;
    }
    if !config.bad_words.is_empty() {
        fields.bad_words(&config.bad_words)?;
    }
    if !config.stop_sequences.is_empty() {
        let single = |stop: &Vec<u32>| match stop[..] {
            [token] => Some(Value::from(token)),
            _ => None,
        };
        let tokens: Option<Vec<_>> = config.stop_sequences.iter().map(single).collect();
        let tokens = tokens.ok_or_else(|| unimplemented("a stop of several tokens"))?;
        fields.sample("stop_token_ids", tokens.into())?;
    }
    if !config.logit_bias.is_empty() {
        // Minus infinity is what -100 and below stand for (D-20).
        let bias = |(token, bias): &(u32, f32)| (token.to_string(), json!(bias.max(-100.0)));
        let biases: Map<_, _> = config.logit_bias.iter().map(bias).collect();
        fields.sample("logit_bias", biases.into())?;
    }
    fields.finish();
    Ok(())
}

/// Fields of a single value, each with the names of the inputs that may take it; the first name is also the one used in
/// JSON and among parameters.
fn single(config: &GenerateConfig) -> [(&'static [&'static str], Option<Value>); 11] {
    // Converts through the decimal text: 0.7 stays 0.7 instead of the nearest 32-bit value widened to 64 bits.
    let float = |x: Option<f32>| {
        x.and_then(|x| x.to_string().parse::<f64>().ok())
            .map(Value::from)
    };
    [
        (&["max_tokens"], config.max_tokens.map(Value::from)),
        (
            &["min_tokens", "min_length"],
            config.min_tokens.map(Value::from),
        ),
        (&["temperature"], float(config.temperature)),
        (&["top_p"], float(config.top_p)),
        (&["min_p"], float(config.min_p)),
        (&["repetition_penalty"], float(config.repetition_penalty)),
        (&["presence_penalty"], float(config.presence_penalty)),
        (&["frequency_penalty"], float(config.frequency_penalty)),
        (&["seed", "random_seed"], config.seed.map(Value::from)),
        (&["ignore_eos"], config.ignore_eos.map(Value::from)),
        (
            &["skip_special_tokens"],
            config.skip_special_tokens.map(Value::from),
        ),
    ]
}

struct Fields<'a> {
    request: &'a mut InferRequest,
    /// The content of `sampling_parameters`, if the model has that input.
    sampling: Option<Map<String, Value>>,
}

impl Fields<'_> {
    fn put(&mut self, names: &[&str], value: Value) -> Result<()> {
        let name = names[0];
        if let Some(target) = names.iter().find_map(|name| self.request.model.input(name)) {
            let data = element(&self.request.model, target, &value)?;
            self.request.inputs.push((target, data));
        } else if let Some(sampling) = &mut self.sampling {
            sampling.insert(name.into(), value);
        } else {
            self.request.parameters.push((name.into(), value));
        }
        Ok(())
    }

    /// "Off" is 0 as an input and -1 in JSON: some servers accept only that form there.
    fn top_k(&mut self, top_k: u32) -> Result<()> {
        match &mut self.sampling {
            Some(sampling) if top_k == 0 && self.request.model.input("top_k").is_none() => {
                sampling.insert("top_k".into(), json!(-1));
                Ok(())
            }
            _ => self.put(&["top_k"], top_k.into()),
        }
    }

    fn stop(&mut self, stop: &[String]) -> Result<()> {
        if let Some(target) = self.request.model.input("stop_words") {
            let data = element(&self.request.model, target, &json!(stop))?;
            self.request.inputs.push((target, data));
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
    fn bad_words(&mut self, words: &[String]) -> Result<()> {
        let Some(target) = self.request.model.input(BAD_WORDS) else {
            return self.sample(BAD_WORDS, json!(words));
        };
        let data = element(&self.request.model, target, &json!(words))?;
        self.request.inputs.push((target, data));
        Ok(())
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

/// A value as tensor elements of this input.
fn element(model: &ModelSignature, target: usize, value: &Value) -> Result<TensorData> {
    let input = &model.inputs[target];
    elements::from_json(input.datatype, value).ok_or_else(|| {
        let why = format!("the model's server takes {} here", input.datatype);
        Error::argument(Name::shared(&input.name), why).because("BAD_CONFIG")
    })
}

const SAMPLING: &str = "sampling_parameters";
const BAD_WORDS: &str = "bad_words";
