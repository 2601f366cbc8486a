//! The report of received nodes and actions that each side sends on reconnecting (EV-942).
//!
//! It is untrusted input, so only the members in use are stored, and at most `max_nodes` nodes.

use std::collections::HashMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

/// The next seq of each node, and the number of actions.
#[derive(Debug, Default)]
pub(in crate::session) struct ReceivedSeqs {
    pub(in crate::session) nodes: HashMap<String, u64>,
    pub(in crate::session) actions: usize,
}

impl ReceivedSeqs {
    /// Parses `{"nodes":{"ID":SEQ},"actions":N}`, with at most `max_nodes` nodes.
    pub(in crate::session) fn parse(text: &[u8], max_nodes: usize) -> Option<Self> {
        // Not derived: a derived map has no bound while it is parsed (D-47).
        let mut json = serde_json::Deserializer::from_slice(text);
        let have = json.deserialize_map(Whole { max_nodes }).ok()?;
        json.end().ok()?;
        Some(have)
    }
}

struct Whole {
    max_nodes: usize,
}

impl<'de> Visitor<'de> for Whole {
    type Value = ReceivedSeqs;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object with nodes and actions")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ReceivedSeqs, A::Error> {
        let mut have = ReceivedSeqs::default();
        while let Some(name) = map.next_key::<String>()? {
            match &*name {
                "nodes" => {
                    have.nodes = map.next_value_seed(NodeSeqs {
                        max: self.max_nodes,
                    })?;
                }
                // Negative and fractional numbers fail here, as the types are unsigned.
                "actions" => have.actions = map.next_value()?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(have)
    }
}

struct NodeSeqs {
    max: usize,
}

impl<'de> DeserializeSeed<'de> for NodeSeqs {
    type Value = HashMap<String, u64>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for NodeSeqs {
    type Value = HashMap<String, u64>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an object of at most {} nodes", self.max)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut nodes = HashMap::new();
        while let Some(id) = map.next_key()? {
            let seq = map.next_value()?;
            if nodes.len() >= self.max {
                return Err(A::Error::invalid_length(nodes.len() + 1, &self));
            }
            nodes.insert(id, seq);
        }
        Ok(nodes)
    }
}
