//! JSON Schema 2020-12 of a model's requests and responses (TR-1312).

use serde_json::{Map, Value, json};

use super::datatype::Datatype;
use super::signature::{InputRole, InputTensor, OutputTensor, Signature};

impl Signature {
    /// The schema of a request of generate. `$defs` has the schemas of what it is answered with: `response`, which is
    /// also that of every event of a stream, and `error`.
    #[must_use]
    pub fn schema(&self, model: &str) -> Value {
        let inputs = self.inputs.iter();
        let inputs = inputs.filter(|input| input.role != InputRole::Unsupported);
        let members = inputs.map(|input| (input.name.clone(), self.input_schema(input)));
        let mut properties = Map::from_iter([("id".to_owned(), json!({"type": "string"}))]);
        properties.extend(members);
        let nested = json!({"type": "object", "description": "more members, one level down"});
        properties.insert("parameters".into(), nested);
        let mut schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": model,
            "type": "object",
            "properties": properties,
            // An undeclared member is a parameter.
            "additionalProperties": {"type": ["string", "integer", "number", "boolean"]},
            "$defs": {
                "response": self.response_schema(),
                "error": {
                    "type": "object",
                    "properties": {"error": {"type": "string"}},
                    "required": ["error"],
                    "additionalProperties": false,
                },
            },
        });
        self.require(&mut schema);
        schema
    }

    /// Adds the required members. One of two members may give the prompt, and members may be nested one level down in
    /// `parameters`, where a schema that reads from the top cannot require them; so each is required here or there.
    fn require(&self, schema: &mut Value) {
        let inputs = self.inputs.iter();
        let converses = inputs.filter(|input| input.role == InputRole::Messages);
        let converses: Vec<&str> = converses.map(|input| input.name.as_str()).collect();
        let required = self.inputs.iter().filter(|input| !input.optional);
        let rules: Vec<Value> = required
            .map(|input| {
                let mut ways = vec![input.name.as_str()];
                if input.role == InputRole::Prompt {
                    ways.extend(&converses);
                }
                let here = ways.iter().map(|name| json!({"required": [name]}));
                let nested = ways.iter().map(|name| {
                    json!({"required": ["parameters"], "properties": {"parameters": {"required": [name]}}})
                });
                json!({"anyOf": here.chain(nested).collect::<Vec<_>>()})
            })
            .collect();
        if let Some(object) = schema.as_object_mut().filter(|_| !rules.is_empty()) {
            object.insert("allOf".into(), rules.into());
        }
    }

    fn input_schema(&self, input: &InputTensor) -> Value {
        if input.accepts_json {
            return json!({"description": "any JSON value, or its text"});
        }
        let element = element(input.datatype, self.lenient);
        let one = input.shape.iter().all(|size| matches!(size, -1 | 1));
        let list = json!({"type": "array", "items": element});
        if one {
            json!({"anyOf": [element, list]})
        } else {
            list
        }
    }

    fn response_schema(&self) -> Value {
        let fixed = [
            ("id", json!({"type": "string"})),
            ("model_name", json!({"type": "string"})),
            ("model_version", json!({"type": "string"})),
        ];
        let mut properties: Map<String, Value> = fixed
            .into_iter()
            .map(|(name, schema)| (name.to_owned(), schema))
            .collect();
        let outputs = self.outputs.iter();
        properties.extend(outputs.map(|output| (output.name.clone(), output_schema(output))));
        json!({
            "type": "object",
            "properties": properties,
            "required": ["model_name", "model_version"],
        })
    }
}

/// TR-503: one element is a scalar, any other number of elements a list.
fn output_schema(output: &OutputTensor) -> Value {
    let mut element = element(output.datatype, false);
    if output.datatype.range().is_none()
        && !matches!(output.datatype, Datatype::Bytes | Datatype::Bool)
    {
        // `null` stands for numbers that are not finite.
        element = json!({"type": ["number", "null"]});
    }
    json!({"anyOf": [element, {"type": "array", "items": element}]})
}

fn element(datatype: Datatype, lenient: bool) -> Value {
    let kind = match datatype {
        Datatype::Bytes => return json!({"type": "string"}),
        Datatype::Bool => "boolean",
        Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64 => "number",
        _ => "integer",
    };
    let mut schema = if lenient {
        json!({"type": [kind, "string"]})
    } else {
        json!({"type": kind})
    };
    if let (Some((least, most)), Some(object)) = (datatype.range(), schema.as_object_mut()) {
        let number = |value: i128| {
            let signed = i64::try_from(value).map(Value::from);
            signed.or_else(|_| u64::try_from(value).map(Value::from))
        };
        if let (Ok(least), Ok(most)) = (number(least), number(most)) {
            object.insert("minimum".into(), least);
            object.insert("maximum".into(), most);
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_1312_a_signature_has_its_schema() {
        let signature = Signature::union();
        let schema = signature.schema("demo");
        let at = |pointer: &str| schema.pointer(pointer).cloned().unwrap_or_default();
        let text = json!({"type": "string"});
        let many = json!({"anyOf": [text, {"type": "array", "items": text}]});
        let number =
            json!({"type": ["integer", "string"], "minimum": i32::MIN, "maximum": i32::MAX});
        for (pointer, expect) in [
            ("/title", json!("demo")),
            ("/properties/text_input", many.clone()),
            ("/properties/stop_words", many.clone()),
            ("/properties/max_tokens/anyOf/0", number),
            (
                "/properties/stream/anyOf/0",
                json!({"type": ["boolean", "string"]}),
            ),
            ("/properties/lora_name", Value::Null),
            ("/$defs/response/properties/text_output", many),
            (
                "/$defs/response/properties/cumulative_logprob/anyOf/0",
                json!({"type": ["number", "null"]}),
            ),
            ("/$defs/error/required", json!(["error"])),
            (
                "/allOf/0/anyOf",
                json!([
                    {"required": ["text_input"]},
                    {"required": ["messages"]},
                    {"required": ["parameters"], "properties": {"parameters": {"required": ["text_input"]}}},
                    {"required": ["parameters"], "properties": {"parameters": {"required": ["messages"]}}},
                ]),
            ),
        ] {
            assert_eq!(at(pointer), expect, "{pointer}");
        }
    }
}
