//! Tests of the checks of specs.

use super::*;
use crate::handler::function;

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[allow(dead_code, reason = "only its schema is looked at")]
struct Query {
    /// What to look for.
    text: String,
    limit: Option<u32>,
    tree: Tree,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[allow(dead_code, reason = "only its schema is looked at")]
struct Tree {
    children: Vec<Self>,
}

#[test]
fn ke_133_the_schema_of_all_inputs() {
    let fun = function("find", "Finds.", |_: Query| async {});
    let spec = fun.spec();
    assert_eq!(spec.inputs[0].name, "text", "the first is the main input");
    let schema = spec.schema();
    assert_eq!(schema.pointer("/type"), Some(&json!("object")));
    assert_eq!(schema.pointer("/required"), Some(&json!(["text", "tree"])));
    assert_eq!(schema.pointer("/additionalProperties"), Some(&json!(false)));
    assert_eq!(
        schema.pointer("/properties/text/description"),
        Some(&json!("What to look for."))
    );
    let defs = schema.get("$defs").and_then(Value::as_object);
    assert_eq!(
        defs.map(Map::len),
        Some(1),
        "only the recursive type is a definition"
    );
}

#[test]
fn outputs_are_found_by_port_and_by_wire_name() {
    let main = OutputSpec::new("", "text/plain")
        .wire("response")
        .alias("text");
    let spec = Spec::new("f", "").outputs([main, OutputSpec::new("meta", "application/json")]);
    for (wire, port) in [("", ""), ("response", ""), ("text", ""), ("meta", "meta")] {
        assert_eq!(
            spec.output_on_wire(wire).map(|output| output.port.as_str()),
            Some(port)
        );
    }
    assert!(spec.output_on_wire("output").is_none());
    assert!(
        InnerType::of::<u8>().name().contains("u8")
            && InnerType::of::<u8>() != InnerType::of::<u16>()
    );
}
