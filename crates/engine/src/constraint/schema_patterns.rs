//! Regular expressions of a JSON schema that the compiler intersects with each other.
//!
//! The members of `allOf`, and the target of a `$ref` with what stands beside it, describe one value, so their patterns, formats
//! and lengths become one intersection; and so do those of a property that several of them have. Its cost grows as a power of the
//! number of its operands, without a limit of the library (`lark_work`).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value};

use super::lark_work;

/// Whether the patterns of a schema cost too much: one alone, or an intersection of some.
pub(super) fn are_too_many(schema: &Value) -> bool {
    let mut search = Search {
        schema,
        steps_left: STEPS_MAX,
        checked: HashSet::new(),
        own: HashMap::new(),
        alternatives: HashMap::new(),
    };
    search.walk(schema) || search.steps_left == 0
}

/// Parts of a schema that are looked at. A schema where more are combined with each other is refused.
const STEPS_MAX: usize = 1_000_000;
/// Bytes of a reference that are read in one step.
const STEP_BYTES: usize = 64;

struct Search<'s> {
    schema: &'s Value,
    steps_left: usize,
    /// Schemas that were looked at together.
    checked: HashSet<BTreeSet<*const Map<String, Value>>>,
    /// The operands of the schemas themselves: a pattern may be long, and many may refer to it.
    own: HashMap<*const Map<String, Value>, Operands>,
    /// What is known of the alternatives of a schema.
    alternatives: HashMap<*const Map<String, Value>, Operands>,
}

/// Operands of one intersection.
#[derive(Clone, Copy, Default)]
struct Operands {
    count: usize,
    width: f64,
}

impl Operands {
    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.width += other.width;
    }
}

impl<'s> Search<'s> {
    /// Looks for a value of which too many operands are intersected. Returns whether there is one.
    fn walk(&mut self, value: &'s Value) -> bool {
        match value {
            Value::Object(members) => {
                // Any other schema has nothing that another one is combined with.
                let combines = members.contains_key("allOf") || self.own(members).count > 0;
                (combines && self.is_too_much(vec![value], 0))
                    || members.values().any(|member| self.walk(member))
            }
            Value::Array(items) => items.iter().any(|item| self.walk(item)),
            _ => false,
        }
    }

    /// The same for the value that all of `parts` describe, and for its parts that several of them describe.
    fn is_too_much(&mut self, parts: Vec<&'s Value>, depth: usize) -> bool {
        if depth > DEPTH_MAX {
            // Not looked at, so it may be anything.
            self.steps_left = 0;
        }
        let combined = self.combined(parts);
        // Parts that refer to themselves come again.
        let set = combined.iter().map(|&members| std::ptr::from_ref(members));
        if !self.checked.insert(set.collect()) {
            return false;
        }
        let mut operands = Operands::default();
        let mut shared: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
        for &members in &combined {
            operands.add(self.own(members));
            operands.add(self.widest_alternative(members, depth));
            if combined.len() > 1 {
                self.steps_left = self.steps_left.saturating_sub(members.len());
                collect_parts(members, &mut shared);
            }
        }
        if lark_work::are_too_many(operands.width, operands.count) {
            return true;
        }
        shared
            .into_values()
            .any(|parts| parts.len() > 1 && self.step() && self.is_too_much(parts, depth + 1))
    }

    /// The schemas that describe one value together with `parts`, each once.
    fn combined(&mut self, parts: Vec<&'s Value>) -> Vec<&'s Map<String, Value>> {
        let mut seen = HashSet::new();
        let mut waiting = parts;
        let mut combined = Vec::new();
        while let Some(part) = waiting.pop() {
            let Value::Object(members) = part else {
                continue;
            };
            if !self.step() || !seen.insert(std::ptr::from_ref(part)) {
                continue;
            }
            combined.push(members);
            if let Some(Value::Array(all)) = members.get("allOf") {
                waiting.extend(all);
            }
            let target = members.get("$ref").and_then(Value::as_str);
            let read = target.map_or(0, str::len) / STEP_BYTES;
            self.steps_left = self.steps_left.saturating_sub(read);
            waiting.extend(target.and_then(|target| self.target(target)));
        }
        combined
    }

    /// What a reference refers to, as the library reads it: without the escapes of a JSON pointer.
    fn target(&self, reference: &str) -> Option<&'s Value> {
        if matches!(reference, "#" | "#/") {
            return Some(self.schema);
        }
        let mut segments = reference.strip_prefix("#/")?.split('/');
        segments.try_fold(self.schema, |part, segment| match part {
            Value::Array(items) => items.get(segment.parse::<usize>().ok()?),
            part => part.get(segment),
        })
    }

    /// The operands of the alternative of a schema that has most.
    fn widest_alternative(&mut self, members: &'s Map<String, Value>, depth: usize) -> Operands {
        if let Some(known) = self.alternatives.get(&std::ptr::from_ref(members)) {
            return *known;
        }
        if depth > DEPTH_MAX {
            // Not looked at, so it may be anything.
            self.steps_left = 0;
            return Operands::default();
        }
        // What refers to itself adds nothing.
        let mut widest = Operands::default();
        self.alternatives.insert(members, widest);
        for name in ["anyOf", "oneOf"] {
            let Some(Value::Array(options)) = members.get(name) else {
                continue;
            };
            for option in options {
                let mut operands = Operands::default();
                for members in self.combined(vec![option]) {
                    operands.add(self.own(members));
                    operands.add(self.widest_alternative(members, depth + 1));
                }
                widest.count = widest.count.max(operands.count);
                widest.width = widest.width.max(operands.width);
            }
        }
        self.alternatives.insert(members, widest);
        widest
    }

    /// What a schema itself intersects for a string. Reads each pattern once.
    fn own(&mut self, members: &'s Map<String, Value>) -> Operands {
        let known = self.own.entry(std::ptr::from_ref(members));
        *known.or_insert_with(|| own_operands(members))
    }

    /// Counts a step. Returns whether it may be made.
    const fn step(&mut self) -> bool {
        self.steps_left = self.steps_left.saturating_sub(1);
        self.steps_left > 0
    }
}

/// How deep it looks into parts that several schemas describe.
const DEPTH_MAX: usize = 64;

/// What a schema itself intersects for a string.
fn own_operands(members: &Map<String, Value>) -> Operands {
    let mut operands = Operands::default();
    if let Some(Value::String(pattern)) = members.get("pattern") {
        operands.count += 1;
        operands.width += lark_work::regex_width(pattern);
    }
    let has = |name| members.contains_key(name);
    let others = [has("format"), has("minLength") || has("maxLength")];
    let others = others.into_iter().filter(|&has| has).count();
    operands.count += others;
    operands.width += if others == 2 { 2.0 * OTHER_WIDTH } else { 0.0 };
    operands.width += if others == 1 { OTHER_WIDTH } else { 0.0 };
    operands
}

/// Members of the derivatives of a format, or of a string of some length.
const OTHER_WIDTH: f64 = 4.0;

fn collect_parts<'s>(
    members: &'s Map<String, Value>,
    parts: &mut BTreeMap<&'s str, Vec<&'s Value>>,
) {
    if let Some(Value::Object(properties)) = members.get("properties") {
        for (name, property) in properties {
            parts.entry(name).or_default().push(property);
        }
    }
    for (name, key) in [("items", "/items"), ("additionalProperties", "/additional")] {
        if let Some(part) = members.get(name) {
            parts.entry(key).or_default().push(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pattern(letter: &str) -> Value {
        json!({"type": "string", "pattern": format!("^(.*){letter}(.*)$")})
    }

    #[test]
    fn ai_841_patterns_of_one_value_are_counted() {
        let all = |count: usize| {
            let patterns: Vec<Value> = (0..count)
                .map(|index| pattern(&index.to_string()))
                .collect();
            json!({"allOf": patterns})
        };
        assert!(!are_too_many(&all(3)));
        assert!(are_too_many(&all(10)));
        // In a property of each, and by references.
        let parts: Vec<Value> = (0..10)
            .map(|index| json!({"properties": {"a": pattern(&index.to_string())}}))
            .collect();
        assert!(are_too_many(&json!({"items": {"allOf": parts}})));
        let mut definitions = Map::new();
        for index in 0..10 {
            let mut definition = pattern(&index.to_string());
            definition["$ref"] = json!(format!("#/$defs/{}", index + 1));
            definitions.insert(index.to_string(), definition);
        }
        assert!(are_too_many(
            &json!({"$defs": definitions, "$ref": "#/$defs/0"})
        ));
    }

    /// A long pattern, and a long reference, which many properties refer to.
    #[test]
    fn ai_841_what_many_refer_to_is_read_once() {
        let properties: Map<String, Value> = (0..4000)
            .map(|index| (index.to_string(), json!({"allOf": [{"$ref": "#/$defs/a"}]})))
            .collect();
        let refers = |target: Value| json!({"$defs": {"a": target}, "properties": properties});
        let begun = std::time::Instant::now();
        let long = json!({"pattern": "a".repeat(128 << 10)});
        assert!(!are_too_many(&refers(long)));
        let long = json!({"$ref": format!("#/{}", "a".repeat(128 << 10))});
        assert!(are_too_many(&refers(long)));
        let took = begun.elapsed();
        assert!(took.as_secs() < 5, "{took:?}");
    }

    #[test]
    fn ai_841_patterns_of_different_values_are_not() {
        let properties: Map<String, Value> = (0..300)
            .map(|index| (index.to_string(), pattern("a")))
            .collect();
        let one = json!({"properties": properties});
        assert!(!are_too_many(&one));
        let parts: Vec<Value> = (0..20)
            .map(|index| json!({"properties": {(index.to_string()): pattern("a")}}))
            .collect();
        assert!(!are_too_many(&json!({"allOf": parts})));
        let options: Vec<Value> = (0..300).map(|index| pattern(&index.to_string())).collect();
        assert!(!are_too_many(&json!({"anyOf": options})));
        let usual = json!({"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "format": "hostname",
            "minLength": 1, "maxLength": 63});
        assert!(!are_too_many(&usual));
        assert!(!are_too_many(
            &json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})
        ));
    }
}
