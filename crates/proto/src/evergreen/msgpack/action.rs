//! Action Engine's actions with their ports and headers, mapped to ours (EV-741, EV-742).

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;
use prost::Message as _;
use prost_types::{Any, Duration};

use super::value::{self, ValueReader, put_text, text_len, wrapped};
use super::{ENTRIES_MAX, ParseStop, PartsBudget, ended, pairs};
use crate::evergreen::json::{self, any};
use crate::evergreen::{Action, NodeId, Param};
use crate::generated::sapwood::v1::ActionOptions;

/// An action as decoded.
pub(super) struct ParsedAction {
    pub(super) id: NodeId,
    pub(super) action: Action,
    pub(super) older: bool,
}

pub(super) fn read(
    mut from: ValueReader,
    budget: &mut PartsBudget,
) -> Result<ParsedAction, ParseStop> {
    let id = from.text()?;
    let name = from.text()?;
    let inputs = ports(&mut from, &id, budget)?;
    let outputs = ports(&mut from, &id, budget)?;
    // The layout of 0.1 ends before the header count (EV-732).
    let older = from.is_empty();
    let headers = if older {
        BTreeMap::new()
    } else {
        pairs(&mut from, budget)?
    };
    ended(&from)?;
    let target = headers
        .get(TARGET)
        .map(|target| ByteString::try_from(target.clone()));
    let action = Action {
        name,
        target: target
            .transpose()
            .map_err(|_| ParseStop::Malformed)?
            .unwrap_or_default(),
        inputs,
        outputs,
        configs: configs(&headers, budget)?,
    };
    Ok(ParsedAction { id, action, older })
}

/// Reads ports; a port without an id has the default one (EV-734).
fn ports(
    from: &mut ValueReader,
    action: &str,
    budget: &mut PartsBudget,
) -> Result<Vec<Param>, ParseStop> {
    let mut ports = Vec::new();
    for _ in 0..budget.take(from.list()?)? {
        let mut port = from.inner()?;
        let (name, id) = (port.text()?, port.text()?);
        ended(&port)?;
        // In no other dialect is an id built from another one (EV-202); 0.4.0 reads and writes the port under this name.
        let id = if id.is_empty() {
            // Each port repeats the action's id, whose length only the session checks (D-47).
            budget.take((action.len() + 1 + name.len()) / ENTRY_BYTES)?;
            format!("{action}#{name}").into()
        } else {
            id
        };
        ports.push(Param { name, id });
    }
    Ok(ports)
}

/// Reads configs from headers. Invalid values become a config that cannot be decoded: the action fails with BAD_CONFIG,
/// not the session.
fn configs(
    headers: &BTreeMap<String, Bytes>,
    budget: &mut PartsBudget,
) -> Result<Vec<Any>, ParseStop> {
    let text = |name| {
        let bytes = headers.get(name)?;
        // Bytes that are not UTF-8 become an empty text, which is neither JSON nor a number, so the config is
        // undecodable.
        Some(std::str::from_utf8(bytes).unwrap_or_default())
    };
    let packed = |name: &str, value: Option<Vec<u8>>| {
        let type_url = format!("type.googleapis.com/{name}");
        match value {
            Some(value) => Any { type_url, value },
            None => any::undecodable(type_url),
        }
    };
    // JSON headers are read as a Struct, which every action accepts in place of its own config type (EV-509).
    let mut configs = Vec::new();
    if let Some(json) = text(CONFIG) {
        // Before it is built value by value, which takes far more than its bytes (D-47). As in the JSON dialect, a
        // message may have ANY_ENTRIES_MAX of them.
        let entries = json::entries(json.as_bytes());
        budget.take(entries.unwrap_or_default() * (ENTRIES_MAX / json::ANY_ENTRIES_MAX))?;
        let value = entries.and_then(|_| any::bytes_of(STRUCT, json));
        configs.push(packed(STRUCT, value));
    }
    configs.extend(text(TIMEOUT).map(|ms| packed(OPTIONS, ms.parse().ok().map(options))));
    Ok(configs)
}

fn options(ms: u32) -> Vec<u8> {
    let timeout = Duration {
        seconds: i64::from(ms / 1000),
        nanos: i32::try_from(ms % 1000 * 1_000_000).unwrap_or_default(),
    };
    ActionOptions {
        timeout: Some(timeout),
    }
    .encode_to_vec()
}

/// An action to be encoded.
pub(super) struct ActionView<'a> {
    id: &'a NodeId,
    action: &'a Action,
    /// `None` in the older layout, which has no headers.
    headers: Option<Vec<(&'static str, String)>>,
    pub(super) len: usize,
}

impl<'a> ActionView<'a> {
    pub(super) fn new(action: &'a Action, id: &'a NodeId, older: bool) -> Self {
        // Lengths come first in this format, so the headers are built here and written by `put`.
        let headers = (!older).then(|| headers(action));
        let ports = |list: &[Param]| {
            let each = list.iter().map(|param| wrapped(port_len(param)));
            value::list_len(list.len()) + each.sum::<usize>()
        };
        let sent = headers.as_ref().map_or(0, |headers| {
            let each = headers
                .iter()
                .map(|(name, value)| text_len(name.as_bytes()) + text_len(value.as_bytes()));
            value::count_len(headers.len()) + each.sum::<usize>()
        });
        let len = text_len(id.as_bytes())
            + text_len(action.name.as_bytes())
            + ports(&action.inputs)
            + ports(&action.outputs)
            + sent;
        Self {
            id,
            action,
            headers,
            len,
        }
    }

    pub(super) fn put(&self, out: &mut BytesMut) {
        value::put_bin_head(out, self.len);
        put_text(out, self.id.as_bytes());
        put_text(out, self.action.name.as_bytes());
        for list in [&self.action.inputs, &self.action.outputs] {
            value::put_list(out, list.len());
            for param in list {
                value::put_bin_head(out, port_len(param));
                put_text(out, param.name.as_bytes());
                put_text(out, param.id.as_bytes());
            }
        }
        if let Some(headers) = &self.headers {
            value::put_count(out, headers.len());
            for (name, text) in headers {
                put_text(out, name.as_bytes());
                put_text(out, text.as_bytes());
            }
        }
    }
}

fn port_len(param: &Param) -> usize {
    text_len(param.name.as_bytes()) + text_len(param.id.as_bytes())
}

/// Writes configs as headers. Configs of other types cannot be represented in this dialect and are omitted.
fn headers(action: &Action) -> Vec<(&'static str, String)> {
    let mut headers = Vec::new();
    if !action.target.is_empty() {
        headers.push((TARGET, action.target.to_string()));
    }
    for config in &action.configs {
        let name = config.type_url.rsplit('/').next().unwrap_or_default();
        if name == OPTIONS {
            // A timeout that is negative or cannot be decoded is omitted, as a config of an unknown type is: the header
            // can only hold milliseconds.
            let timeout = ActionOptions::decode(&*config.value)
                .ok()
                .and_then(|options| options.timeout)
                .and_then(|timeout| std::time::Duration::try_from(timeout).ok());
            headers.extend(timeout.map(|timeout| (TIMEOUT, timeout.as_millis().to_string())));
        } else if name == STRUCT || name == GENERATE {
            // Either type becomes the JSON from which the receiver makes a Struct: the member names are the same.
            headers.extend(any::json_of(name, &config.value).map(|json| (CONFIG, json)));
        }
    }
    headers
}

/// Bytes of a built id that count as one more entry; a shorter id counts none.
const ENTRY_BYTES: usize = 256;
const TARGET: &str = "target";
const CONFIG: &str = "sapwood-config";
const TIMEOUT: &str = "sapwood-timeout-ms";
const STRUCT: &str = "google.protobuf.Struct";
const OPTIONS: &str = "sapwood.v1.ActionOptions";
const GENERATE: &str = "sapwood.v1.GenerateConfig";
