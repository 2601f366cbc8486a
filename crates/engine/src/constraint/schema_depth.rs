//! How deep the compiler recurses over a JSON schema.
//!
//! It recurses into the parts of a schema, and at the first reference to another part also into that one. The depth of
//! the text alone is bounded by its reader; a chain of references is not, and a stack that overflows ends the process.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::grammar::GrammarError;
use super::{lark_work, schema_patterns};

/// Levels of recursion, counted by [`recursion`].
pub(super) const LEVELS_MAX: usize = 2048;

/// Refuses a schema over which the compiler may recurse too deeply.
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let mut copies = Copies::default();
    copies.count(schema);
    let too_many = || {
        let why = "too many combinations of its parts: make the schema simpler";
        Err(GrammarError::new(why.to_owned()))
    };
    if copies.are_too_many() || copies.is_optional {
        return too_many();
    }
    if copies.properties > PROPERTIES_MAX {
        return Err(GrammarError::new(format!(
            "an object may have {PROPERTIES_MAX} properties"
        )));
    }
    if recursion(schema) > LEVELS_MAX {
        return Err(GrammarError::new(format!(
            "too many references: all that are referred to may have {LEVELS_MAX} levels in all"
        )));
    }
    if schema_patterns::are_too_many(schema) {
        return too_many();
    }
    Ok(())
}

/// What the compiler copies or compares without counting it against its own limits. It merges each alternative of a list
/// with what stands beside the list, and compares all patterns of properties with each other.
#[derive(Default)]
struct Copies {
    alternatives: usize,
    bytes: usize,
    patterns: usize,
    /// A pattern has too many parts that can be left out.
    is_optional: bool,
    /// Properties of the object that has most.
    properties: usize,
}

impl Copies {
    fn count(&mut self, value: &Value) {
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    match (name.as_str(), member) {
                        ("anyOf" | "oneOf" | "allOf" | "enum" | "type", Value::Array(items)) => {
                            self.alternatives += items.len();
                        }
                        ("required", Value::Array(items)) => {
                            self.bytes += REQUIRED_BYTES * items.len();
                        }
                        ("pattern", Value::String(text)) => {
                            self.bytes += text.len();
                            self.is_optional |= lark_work::check_regex(text).is_err();
                        }
                        ("patternProperties", Value::Object(items)) => {
                            self.patterns += items.len();
                            self.is_optional |= items
                                .keys()
                                .any(|text| lark_work::check_regex(text).is_err());
                        }
                        ("properties", Value::Object(items)) => {
                            self.properties = self.properties.max(items.len());
                        }
                        _ => {}
                    }
                    self.count(member);
                }
            }
            Value::Array(items) => items.iter().for_each(|item| self.count(item)),
            _ => {}
        }
    }

    /// Two lists multiply, and the compiler itself stops after 50,000 parts.
    fn are_too_many(&self) -> bool {
        let squared = self
            .alternatives
            .saturating_mul(self.alternatives.max(4) / 4);
        let merged = squared.min(50_000);
        self.patterns > PATTERNS_MAX || merged.saturating_mul(self.bytes) > COPIED_BYTES_MAX
    }
}

/// Properties of an object: the compiler takes the square of them as time, and this many take a second.
const PROPERTIES_MAX: usize = 2000;
/// Memory of one name in the list of required properties.
const REQUIRED_BYTES: usize = 80;
/// Patterns of properties, all together: each is compared with each.
const PATTERNS_MAX: usize = 64;
/// Bytes that merging may copy.
const COPIED_BYTES_MAX: usize = 256 << 20;

/// An upper bound: each target of a reference is entered once, and costs the levels within it.
fn recursion(schema: &Value) -> usize {
    let mut targets = HashSet::new();
    collect(schema, &mut targets);
    let whole = height(schema);
    let mut levels = whole;
    // By address, so that many spellings of one target cost one look at it.
    let mut heights: HashMap<*const Value, usize> = HashMap::new();
    for target in targets {
        let pointer = target
            .strip_prefix('#')
            .filter(|pointer| !pointer.contains('%'));
        levels += match pointer.and_then(|pointer| schema.pointer(pointer)) {
            Some(part) => *heights
                .entry(std::ptr::from_ref(part))
                .or_insert_with(|| height(part)),
            // Named in another way, so it may be any part.
            None => whole,
        };
        if levels > LEVELS_MAX {
            break;
        }
    }
    levels
}

fn collect<'a>(value: &'a Value, targets: &mut HashSet<&'a str>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match member {
                    // `$dynamicRef` and `$recursiveRef` too.
                    Value::String(target) if name.ends_with("ef") && name.starts_with('$') => {
                        targets.insert(target);
                    }
                    _ => collect(member, targets),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, targets)),
        _ => {}
    }
}

fn height(value: &Value) -> usize {
    match value {
        Value::Object(members) => 1 + members.values().map(height).max().unwrap_or(0),
        Value::Array(items) => 1 + items.iter().map(height).max().unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ai_841_each_target_costs_its_levels_once() {
        let plain = json!({"items": {"items": true}});
        assert_eq!(recursion(&plain), 2);
        let refers = json!({
            "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}},
            "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"$ref": "#elsewhere"}],
        });
        assert_eq!(recursion(&refers), 4 + 2 + 1 + 4);
    }

    #[test]
    fn ai_841_levels_are_bounded() {
        let chain = |definitions: usize| {
            let mut all = serde_json::Map::new();
            for index in 0..definitions {
                let next = format!("#/$defs/{}", index + 1);
                all.insert(index.to_string(), json!({ "$ref": next }));
            }
            all.insert(definitions.to_string(), json!({}));
            // Two levels of its own and one for each target, and the last target has none.
            json!({"$defs": all, "$ref": "#/$defs/0"})
        };
        let fits = LEVELS_MAX - 4;
        assert_eq!(recursion(&chain(fits)), LEVELS_MAX);
        assert!(check(&chain(fits)).is_ok());
        assert!(check(&chain(fits + 1)).is_err());
    }
}
