//! The JSON dialect: proto3-JSON as the TypeScript client sends and reads it (section 7.2).
//!
//! Our own messages within `Any` are mapped by descriptor (`any`).

pub(super) mod any;
pub(super) mod field;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, BytesMut};
use prost_types::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;

use self::any::ParsedAny as AnyRead;
use self::field::{Base64, Int32, Object, SharedString, absent};
use super::{
    Action, Chunk, Fragment, Metadata, Param, Payload, Reason, Status, WireMessage, mimetype,
    protobuf,
};
use crate::code::Code;
use crate::session::Side;

/// The content of one text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedJson {
    /// The message.
    pub message: WireMessage,
    /// The error with which the sender has aborted the session, if any (EV-903).
    pub error: Option<Status>,
}

/// Decodes one message that `side` has received.
///
/// # Errors
/// `BAD_MESSAGE` for text that is not proto3-JSON of a SessionMessage, or is nested deeper than [`DEPTH_MAX`];
/// `FRAGMENT_LIMIT` for a message of more than [`ENTRIES_MAX`] parts, or [`ANY_ENTRIES_MAX`] within `Any`, because a
/// part of three bytes takes two hundred once it is decoded.
pub fn decode(text: &[u8], side: Side) -> Result<ParsedJson, Status> {
    // Before the parser, which allocates as it goes.
    measure(text)?;
    let Object(wire): Object<SessionMessage<'_>> = serde_json::from_slice(text).map_err(|_| {
        // The parser's error is not repeated, because it may quote the sender's bytes.
        bad("a message is not an evergreen.v2.SessionMessage in JSON; check names, types and base64")
    })?;
    let mut anys = ParsedAnys::default();
    let fragments = wire.node_fragments.into_iter();
    let fragments = fragments.map(|fragment| read_fragment(fragment, &mut anys));
    let fragments = fragments.collect::<Result<_, _>>()?;
    let actions = wire.actions.into_iter();
    let actions = actions.map(|action| read_action(action, &mut anys));
    let message = WireMessage {
        fragments,
        actions: actions.collect::<Result<_, _>>()?,
        wire_bytes: text.len(),
    };
    // An error that cannot be read still ends the session.
    let unknown = || {
        Status::other(
            Code::Internal,
            "",
            "the server ended the session with an error that cannot be decoded",
        )
    };
    // Only a server ends a session this way (EV-903). From a client, `error` is an unknown field, and those are ignored
    // (EV-720).
    let error = wire.error.filter(|_| side == Side::Client);
    let error = error.map(|raw| {
        anys.count(entries(raw.get().as_bytes()).unwrap_or_default())?;
        Ok(any::read_status(raw.get()).unwrap_or_else(unknown))
    });
    Ok(ParsedJson {
        message,
        error: error.transpose()?,
    })
}

/// Encodes one message. A server repeats metadata on every fragment of a leaf, because the TypeScript client types each
/// fragment by itself (EV-721); a client sends it once, because for a server each repetition begins a new chunk
/// (EV-405).
pub fn encode(message: &WireMessage, side: Side, out: &mut BytesMut) {
    // Written by hand: `seq` and `continued` always have to be there and an empty `childIds` never (EV-721), and a
    // token should not cost a tree of values.
    out.put_slice(b"{");
    if !message.fragments.is_empty() {
        out.put_slice(b"\"nodeFragments\":[");
        join(out, &message.fragments, |out, fragment| {
            write_fragment(out, fragment, side);
        });
        out.put_slice(b"]");
    }
    if !message.actions.is_empty() {
        if !message.fragments.is_empty() {
            out.put_slice(b",");
        }
        out.put_slice(b"\"actions\":[");
        join(out, &message.actions, write_action);
        out.put_slice(b"]");
    }
    out.put_slice(b"}");
}

/// Encodes the last message of an aborted session (EV-903).
pub fn encode_error(status: &Status, out: &mut BytesMut) {
    let name = status.code.grpc_name();
    let number = status.code.grpc();
    out.put_slice(
        format!("{{\"error\":{{\"code\":{number},\"status\":\"{name}\",\"message\":").as_bytes(),
    );
    string(out, &status.message);
    out.put_slice(b",\"details\":");
    out.put_slice(any::write_details(status).as_bytes());
    out.put_slice(b"}}");
}

/// Maximum number of parts of one message: each brace counts four, each comma one.
pub const ENTRIES_MAX: usize = 524_288;
/// Maximum nesting depth of a message (EV-720).
pub const DEPTH_MAX: usize = 64;

/// The same for all `Any` and statuses in a message, each of which counts eight for itself: they are built value by value from
/// descriptors, which takes a hundred times as long.
pub const ANY_ENTRIES_MAX: usize = 32_768;

/// Checks nesting and number of parts of a text before it is parsed. Invalid JSON is left to the parser.
fn measure(text: &[u8]) -> Result<(), Status> {
    let entries = entries(text).ok_or_else(|| bad("a message is nested deeper than 64 levels"))?;
    within("entries_max", entries, ENTRIES_MAX)
}

fn within(limit: &'static str, entries: usize, max: usize) -> Result<(), Status> {
    if entries <= max {
        return Ok(());
    }
    let (value, max) = (entries as u64, max as u64);
    Err(Status::limit(Reason::FragmentLimit, limit, value, max))
}

/// State of reading the `Any` values and the statuses of a message.
#[derive(Default)]
struct ParsedAnys {
    entries: usize,
}

impl ParsedAnys {
    /// Reads one more value, after it was counted.
    fn read(&mut self, raw: &RawValue) -> Result<AnyRead, Status> {
        let text = raw.get();
        // It is part of the text that was measured, so its depth is within the limit.
        self.count(entries(text.as_bytes()).unwrap_or_default())?;
        Ok(any::read(text))
    }

    fn count(&mut self, entries: usize) -> Result<(), Status> {
        self.entries += 8 + entries;
        within("any_entries_max", self.entries, ANY_ENTRIES_MAX)
    }
}

/// Parts of a text: braces and brackets count four, commas one; `None` if it is nested too deep.
pub(super) fn entries(text: &[u8]) -> Option<usize> {
    let (mut depth, mut entries) = (0_usize, 0_usize);
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => {
                // Braces within a string are text. A string without an end is left to the parser, as all invalid JSON
                // is.
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'"' => break,
                        b'\\' => {
                            bytes.next();
                        }
                        _ => {}
                    }
                }
            }
            b'{' | b'[' => {
                depth += 1;
                entries += 4;
            }
            // More closing than opening brackets are invalid JSON, which the parser reports.
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' => entries += 1,
            _ => {}
        }
        if depth > DEPTH_MAX {
            return None;
        }
    }
    Some(entries)
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "a session message")]
struct SessionMessage<'a> {
    // camelCase, snake_case and `null` for an absent member are all part of the mapping (EV-720).
    #[serde(borrow, alias = "node_fragments", deserialize_with = "absent")]
    node_fragments: Vec<Object<NodeFragment<'a>>>,
    #[serde(borrow, deserialize_with = "absent")]
    actions: Vec<Object<WireAction<'a>>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct NodeFragment<'a> {
    #[serde(deserialize_with = "absent")]
    id: SharedString,
    #[serde(deserialize_with = "absent")]
    seq: Int32,
    #[serde(deserialize_with = "absent")]
    continued: bool,
    #[serde(alias = "child_ids", deserialize_with = "absent")]
    child_ids: Vec<SharedString>,
    #[serde(borrow, alias = "chunk_fragment")]
    chunk_fragment: Option<Object<WireChunk<'a>>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireChunk<'a> {
    #[serde(borrow)]
    metadata: Option<Object<ChunkMetadata<'a>>>,
    #[serde(rename = "ref")]
    uri: Option<SharedString>,
    data: Option<Base64>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ChunkMetadata<'a> {
    #[serde(deserialize_with = "absent")]
    mimetype: SharedString,
    #[serde(deserialize_with = "absent")]
    role: SharedString,
    #[serde(alias = "original_file_name", deserialize_with = "absent")]
    original_file_name: SharedString,
    #[serde(alias = "capture_time")]
    capture_time: Option<SharedString>,
    #[serde(borrow, deserialize_with = "absent")]
    experimental: Vec<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireAction<'a> {
    #[serde(deserialize_with = "absent")]
    name: SharedString,
    #[serde(deserialize_with = "absent")]
    inputs: Vec<Object<NamedParameter>>,
    #[serde(deserialize_with = "absent")]
    outputs: Vec<Object<NamedParameter>>,
    #[serde(borrow, deserialize_with = "absent")]
    configs: Vec<&'a RawValue>,
    #[serde(alias = "target_spec", deserialize_with = "absent")]
    target_spec: Object<TargetSpec>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NamedParameter {
    #[serde(deserialize_with = "absent")]
    name: SharedString,
    #[serde(deserialize_with = "absent")]
    id: SharedString,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TargetSpec {
    #[serde(deserialize_with = "absent")]
    id: SharedString,
}

fn read_fragment(
    Object(wire): Object<NodeFragment<'_>>,
    anys: &mut ParsedAnys,
) -> Result<Fragment, Status> {
    let last = !wire.continued;
    let chunk = wire.chunk_fragment;
    let chunk = chunk.map(|chunk| read_chunk(chunk, last, anys));
    Ok(Fragment {
        id: wire.id.0,
        seq: wire.seq.0,
        last,
        children: wire.child_ids.into_iter().map(|id| id.0).collect(),
        range: None,
        chunk: chunk.transpose()?,
    })
}

fn read_chunk(
    Object(wire): Object<WireChunk<'_>>,
    last: bool,
    anys: &mut ParsedAnys,
) -> Result<Chunk, Status> {
    let metadata = wire.metadata.map(|metadata| read_metadata(metadata, anys));
    let metadata = metadata.transpose()?.map(Arc::new);
    let payload = match (wire.data, wire.uri) {
        (None, None) => None,
        (Some(data), None) => Some(Payload::Data(data.0)),
        (None, Some(uri)) => Some(Payload::Ref(uri.0)),
        (Some(_), Some(_)) => return Err(bad("a chunk has data and ref; it may have one of them")),
    };
    let mut chunk = Chunk { metadata, payload };
    // Only a final fragment can carry its producer's status (EV-931).
    let failed = if last { failure(&chunk, anys)? } else { None };
    if let Some(status) = failed {
        chunk.payload = Some(Payload::Status(Some(Arc::new(status))));
    }
    Ok(chunk)
}

/// The error status in a final chunk, in either form (EV-931).
fn failure(chunk: &Chunk, anys: &mut ParsedAnys) -> Result<Option<Status>, Status> {
    let (Some(Payload::Data(data)), Some(metadata)) = (&chunk.payload, &chunk.metadata) else {
        return Ok(None);
    };
    if !mimetype::is_json_status(&metadata.mimetype) {
        return Ok(protobuf::failure(chunk));
    }
    // `measure` has not seen this text: in the message it was base64. One that is larger than any that we send is
    // ordinary content.
    let parts = entries(data).filter(|parts| *parts <= ANY_ENTRIES_MAX);
    match (std::str::from_utf8(data), parts) {
        (Ok(text), Some(parts)) => {
            anys.count(parts)?;
            Ok(any::read_status(text))
        }
        _ => Ok(None),
    }
}

fn read_metadata(
    Object(wire): Object<ChunkMetadata<'_>>,
    anys: &mut ParsedAnys,
) -> Result<Metadata, Status> {
    let time = wire.capture_time.map(|text| text.0.parse::<Timestamp>());
    let experimental = wire
        .experimental
        .into_iter()
        .map(|raw| match anys.read(raw)? {
            AnyRead::Fits(any) => Ok(any),
            // Unlike a config, it belongs to no action that could fail in the session's place.
            AnyRead::Unfit(_) => Err(bad("a message in experimental does not match its @type")),
        });
    Ok(Metadata {
        mimetype: wire.mimetype.0,
        role: wire.role.0,
        file_name: wire.original_file_name.0,
        capture_time: time
            .transpose()
            .map_err(|_| bad("captureTime is not an RFC 3339 timestamp"))?,
        experimental: experimental.collect::<Result<_, _>>()?,
    })
}

fn read_action(
    Object(wire): Object<WireAction<'_>>,
    anys: &mut ParsedAnys,
) -> Result<Action, Status> {
    let params = |list: Vec<Object<NamedParameter>>| {
        let one = |Object(param): Object<NamedParameter>| Param {
            name: param.name.0,
            id: param.id.0,
        };
        list.into_iter().map(one).collect()
    };
    // A config that does not match its type fails the action with BAD_CONFIG, not the session (EV-509).
    let config = |raw: &RawValue| {
        Ok(match anys.read(raw)? {
            AnyRead::Fits(any) => any,
            AnyRead::Unfit(type_url) => any::undecodable(type_url),
        })
    };
    Ok(Action {
        name: wire.name.0,
        target: wire.target_spec.0.id.0,
        inputs: params(wire.inputs),
        outputs: params(wire.outputs),
        configs: wire
            .configs
            .into_iter()
            .map(config)
            .collect::<Result<_, _>>()?,
    })
}

fn write_fragment(out: &mut BytesMut, fragment: &Fragment, side: Side) {
    out.put_slice(b"{\"id\":");
    string(out, &fragment.id);
    // Both are written at their defaults too, which proto3-JSON otherwise omits (EV-721).
    let (seq, continued) = (fragment.seq, !fragment.last);
    out.put_slice(format!(",\"seq\":{seq},\"continued\":{continued}").as_bytes());
    // An empty list would make the node a tree for the TypeScript client (EV-721).
    if !fragment.children.is_empty() {
        out.put_slice(b",\"childIds\":[");
        join(out, &fragment.children, |out, id| string(out, id));
        out.put_slice(b"]");
    }
    if let Some(chunk) = &fragment.chunk {
        write_chunk(
            out,
            chunk,
            fragment.seq == 0 || side == Side::Server,
            fragment.seq == 0,
        );
    }
    out.put_slice(b"}");
}

fn write_chunk(out: &mut BytesMut, chunk: &Chunk, described: bool, first: bool) {
    if let Some(Payload::Status(status)) = &chunk.payload {
        out.put_slice(b",\"chunkFragment\":{\"metadata\":{\"mimetype\":");
        string(out, mimetype::JSON_STATUS);
        out.put_slice(b"},\"data\":\"");
        base64(out, any::write_status(status.as_deref()).as_bytes());
        out.put_slice(b"\"}");
        return;
    }
    let metadata = chunk.metadata.as_deref().filter(|_| described);
    if metadata.is_none() && chunk.payload.is_none() {
        return;
    }
    out.put_slice(b",\"chunkFragment\":{");
    if let Some(metadata) = metadata {
        write_metadata(out, metadata, first);
    }
    if metadata.is_some() && chunk.payload.is_some() {
        out.put_slice(b",");
    }
    match &chunk.payload {
        Some(Payload::Data(data)) => {
            out.put_slice(b"\"data\":\"");
            base64(out, data);
            out.put_slice(b"\"");
        }
        Some(Payload::Ref(uri)) => {
            out.put_slice(b"\"ref\":");
            string(out, uri);
        }
        Some(Payload::Status(_)) | None => {}
    }
    out.put_slice(b"}");
}

/// Every fragment needs mimetype and role; the other members are written at the first only.
fn write_metadata(out: &mut BytesMut, metadata: &Metadata, whole: bool) {
    out.put_slice(b"\"metadata\":{\"mimetype\":");
    string(out, mimetype::parsable(&metadata.mimetype));
    for (name, text, sent) in [
        ("role", &metadata.role, true),
        ("originalFileName", &metadata.file_name, whole),
    ] {
        if sent && !text.is_empty() {
            out.put_slice(format!(",\"{name}\":").as_bytes());
            string(out, text);
        }
    }
    if let Some(time) = metadata.capture_time.as_ref().filter(|_| whole) {
        out.put_slice(format!(",\"captureTime\":\"{time}\"").as_bytes());
    }
    if whole && !metadata.experimental.is_empty() {
        out.put_slice(b",\"experimental\":[");
        join(out, &metadata.experimental, |out, any| {
            out.put_slice(any::write(any).as_bytes());
        });
        out.put_slice(b"]");
    }
    out.put_slice(b"}");
}

fn write_action(out: &mut BytesMut, action: &Action) {
    out.put_slice(b"{\"name\":");
    string(out, &action.name);
    for (key, list) in [("inputs", &action.inputs), ("outputs", &action.outputs)] {
        if list.is_empty() {
            continue;
        }
        out.put_slice(format!(",\"{key}\":[").as_bytes());
        join(out, list, |out, param| {
            out.put_slice(b"{\"name\":");
            string(out, &param.name);
            out.put_slice(b",\"id\":");
            string(out, &param.id);
            out.put_slice(b"}");
        });
        out.put_slice(b"]");
    }
    if !action.configs.is_empty() {
        out.put_slice(b",\"configs\":[");
        join(out, &action.configs, |out, any| {
            out.put_slice(any::write(any).as_bytes());
        });
        out.put_slice(b"]");
    }
    if !action.target.is_empty() {
        out.put_slice(b",\"targetSpec\":{\"id\":");
        string(out, &action.target);
        out.put_slice(b"}");
    }
    out.put_slice(b"}");
}

fn join<T>(out: &mut BytesMut, items: &[T], mut write: impl FnMut(&mut BytesMut, &T)) {
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.put_slice(b",");
        }
        write(out, item);
    }
}

fn string(out: &mut BytesMut, text: &str) {
    // This cannot fail: a string is always valid JSON, and the writer is memory.
    let _ = serde_json::to_writer(out.writer(), text);
}

fn base64(out: &mut BytesMut, data: &[u8]) {
    let start = out.len();
    let len = base64::encoded_len(data.len(), true).unwrap_or_default();
    // Encoded in place: a payload may have megabytes, and a string in between would be a second copy.
    out.resize(start + len, 0);
    // The length was computed by the same engine.
    let written = STANDARD.encode_slice(data, &mut out[start..]);
    out.truncate(start + written.unwrap_or_default());
}

fn bad(what: &str) -> Status {
    Status::new(Reason::BadMessage, what)
}
