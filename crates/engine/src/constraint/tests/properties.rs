//! Properties: a constrained output fits its constraint whatever the constraint and the sampler are, and no argument
//! does harm.

use proptest::prelude::*;
use regex::Regex;
use serde_json::{Value, json};

use super::driver::{open, output, source};

/// A regex, and never one that a random sampler cannot end.
fn pattern() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        "[a-c]{1,3}",
        Just("[^a-y]".to_owned()),
        Just("é".to_owned()),
        Just("日本".to_owned()),
        Just("\\d".to_owned()),
        Just("hello world".to_owned()),
        Just("\\.\"/".to_owned()),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.concat()),
            prop::collection::vec(inner.clone(), 1..4)
                .prop_map(|parts| format!("({})", parts.join("|"))),
            (inner.clone(), 0..3_u8, 0..3_u8)
                .prop_map(|(part, min, more)| format!("({part}){{{min},{}}}", min + more)),
            inner.prop_map(|part| format!("({part})?")),
        ]
    })
}

/// A schema with what [`fits`] can check.
fn schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({"type": "null"})),
        Just(json!({"type": "boolean"})),
        Just(json!({"type": "integer", "minimum": -5, "maximum": 120})),
        (0..4_u8, 0..4_u8).prop_map(
            |(min, more)| json!({"type": "string", "minLength": min, "maxLength": min + more})
        ),
        prop::collection::vec("[a-z\"\\\\é ]{0,6}", 1..4).prop_map(|texts| json!({"enum": texts})),
        Just(json!({"const": {"a": [1, "é"]}})),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let members =
            prop::collection::btree_map("[a-d\"é]{1,3}", (inner.clone(), any::<bool>()), 0..4);
        prop_oneof![
            (inner.clone(), 0..2_u8, 0..3_u8).prop_map(|(items, min, more)| {
                json!({"type": "array", "items": items, "minItems": min, "maxItems": min + more})
            }),
            members.prop_map(|members| {
                let required: Vec<&String> = members
                    .iter()
                    .filter(|(_, (_, required))| *required)
                    .map(|(key, _)| key)
                    .collect();
                let properties: serde_json::Map<String, Value> = members
                    .iter()
                    .map(|(key, (schema, _))| (key.clone(), schema.clone()))
                    .collect();
                json!({"type": "object", "properties": properties, "required": required,
                    "additionalProperties": false})
            }),
            prop::collection::vec(inner, 1..3).prop_map(|options| json!({"anyOf": options})),
        ]
    })
}

/// An independent check of the part of JSON schema that [`schema`] makes.
fn fits(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema.get("anyOf") {
        return options
            .as_array()
            .unwrap()
            .iter()
            .any(|option| fits(option, value));
    }
    if let Some(options) = schema.get("enum") {
        return options.as_array().unwrap().contains(value);
    }
    if let Some(constant) = schema.get("const") {
        return constant == value;
    }
    let bound = |name: &str| schema[name].as_u64().unwrap() as usize;
    match schema["type"].as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value
            .as_f64()
            .is_some_and(|n| n.fract() == 0.0 && (-5.0..=120.0).contains(&n)),
        "string" => value.as_str().is_some_and(|text| {
            (bound("minLength")..=bound("maxLength")).contains(&text.chars().count())
        }),
        "array" => value.as_array().is_some_and(|items| {
            (bound("minItems")..=bound("maxItems")).contains(&items.len())
                && items.iter().all(|item| fits(&schema["items"], item))
        }),
        "object" => value.as_object().is_some_and(|members| {
            let required = schema["required"].as_array().unwrap();
            required
                .iter()
                .all(|key| members.contains_key(key.as_str().unwrap()))
                && members.iter().all(|(key, member)| {
                    schema["properties"]
                        .get(key)
                        .is_some_and(|schema| fits(schema, member))
                })
        }),
        other => panic!("unexpected {other}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// AI-842
    #[test]
    fn ai_840_any_regex_matches_its_output(pattern in pattern(), seed in 0..1000_u64) {
        let checker = Regex::new(&format!("^(?:{pattern})$")).unwrap();
        let text = output(&source(), "sapwood:regex", &pattern, seed);
        prop_assert!(checker.is_match(&text), "{pattern}: {text:?}");
    }

    #[test]
    fn ai_840_any_schema_fits_its_output(schema in schema(), seed in 0..1000_u64) {
        let text = output(&source(), "sapwood:json-schema", &schema.to_string(), seed);
        let value: Value = serde_json::from_str(&text).unwrap();
        prop_assert!(fits(&schema, &value), "{schema}: {text}");
    }

    #[test]
    fn ai_840_any_options_contain_their_output(
        options in prop::collection::vec("[a-c\"\\\\\né日\u{7f} ]{0,8}", 1..12),
        seed in 0..1000_u64,
    ) {
        let text = output(&source(), "sapwood:options", &json!(options).to_string(), seed);
        prop_assert!(options.contains(&text), "{options:?}: {text:?}");
    }

    #[test]
    fn ai_840_any_text_contains_its_substring(text in "[ab\"\\\\\né日 ]{1,30}", seed in 0..1000_u64) {
        let piece = output(&source(), "sapwood:substring", &text, seed);
        prop_assert!(!piece.is_empty() && text.contains(&piece), "{text:?}: {piece:?}");
    }

    /// Whatever comes as an argument is compiled or refused, and no thread dies of it.
    #[test]
    fn ai_841_no_argument_does_harm(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        shaped in "[a-c:|\"/\\\\(){}\\[\\]*+?.~@<>%&_=\n rootsa-c0-9-]{0,60}",
    ) {
        let source = source();
        let texts = [
            String::from_utf8_lossy(&bytes).into_owned(),
            shaped.clone(),
            format!("start: {shaped}"),
            format!("root ::= {shaped}"),
            format!("{{\"type\":\"object\",{shaped}}}"),
            json!({"type": "string", "pattern": shaped}).to_string(),
        ];
        for text in &texts {
            for kind in ["regex", "json-schema", "lark", "gbnf", "substring", "options"] {
                if let Err(refusal) = open(&source, &format!("sapwood:{kind}"), text) {
                    prop_assert!(refusal.message.starts_with("invalid grammar: "), "{}", refusal.message);
                    prop_assert!(!refusal.message.contains("panic"), "{text:?}: {}", refusal.message);
                }
            }
        }
    }
}
