//! The protobuf dialect: a message and the bytes of one `evergreen.v2.SessionMessage`, for gRPC and WebSocket alike.
//!
//! Owns: both directions, and where this dialect puts metadata and statuses (EV-404, EV-931). Refuses to know:
//! sessions, and framing of messages. Writing goes straight from the message into the caller's buffer, without the
//! generated structs in between, so that an outgoing token costs no allocation (EV-985).

use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes};
use prost::Message as _;
use prost::encoding::{
    WireType, decode_varint, encode_key, encode_varint, encoded_len_varint, key_len, message,
};

use super::wire::{self, SessionMessage};
use super::{Action, Chunk, Fragment, Message, Metadata, Param, Payload, Reason, Status, mimetype};

/// Reads one message.
///
/// # Errors
/// `BAD_MESSAGE`; what the decoder found is not repeated, because it may quote the sender's bytes. `FRAGMENT_LIMIT` for
/// a message of more than [`ENTRIES_MAX`] parts, because a part of two bytes takes two hundred once it is decoded.
pub fn decode(mut bytes: impl Buf) -> Result<Message, Status> {
    let wire_bytes = bytes.remaining();
    let bytes = bytes.copy_to_bytes(wire_bytes);
    let entries = count_entries(&bytes, &[FRAGMENTS, CHUNK, METADATA]);
    if entries > ENTRIES_MAX {
        let (value, max) = (entries as u64, ENTRIES_MAX as u64);
        return Err(Status::limit(
            Reason::FragmentLimit,
            "entries_max",
            value,
            max,
        ));
    }
    let message = SessionMessage::decode(bytes).map_err(|_| {
        let what = "a message is no evergreen.v2.SessionMessage; check the schema and the UTF-8 of strings";
        Status::new(Reason::BadMessage, what)
    })?;
    Ok(Message {
        wire_bytes,
        ..message.into()
    })
}

/// How many fragments, actions, children, parameters and configs, together, one message may hold.
pub const ENTRIES_MAX: usize = 131_072;

/// Counts length-delimited fields; within the fields of `path`, and within every action, those one level down too.
/// Stops at what is no protobuf: the decoder will say so.
fn count_entries(mut bytes: &[u8], path: &[u32]) -> usize {
    let mut entries = 0;
    while let Ok(key) = decode_varint(&mut bytes) {
        let skip = match key & 7 {
            0 => decode_varint(&mut bytes).map_or(usize::MAX, |_| 0),
            1 => 8,
            2 => decode_varint(&mut bytes)
                .map_or(usize::MAX, |len| usize::try_from(len).unwrap_or(usize::MAX)),
            5 => 4,
            _ => usize::MAX,
        };
        let Some((field, rest)) = bytes.split_at_checked(skip) else {
            return entries;
        };
        bytes = rest;
        if key & 7 != 2 {
            continue;
        }
        entries += 1;
        let is_action = path.first() == Some(&FRAGMENTS) && key >> 3 == u64::from(ACTIONS);
        match path.split_first() {
            Some((&next, rest)) if key >> 3 == u64::from(next) => {
                entries += count_entries(field, rest)
            }
            _ if is_action => entries += count_entries(field, &[]),
            _ => {}
        }
    }
    entries
}

/// How many bytes [`encode`] writes.
#[must_use]
pub fn encoded_len(message: &Message) -> usize {
    let fragments = message
        .fragments
        .iter()
        .map(|fragment| field_len(FRAGMENTS, fragment_len(fragment)));
    let actions = message
        .actions
        .iter()
        .map(|action| field_len(ACTIONS, wire_action(action).encoded_len()));
    fragments.sum::<usize>() + actions.sum::<usize>()
}

/// Writes one message.
pub fn encode(message: &Message, buf: &mut impl BufMut) {
    for fragment in &message.fragments {
        head(FRAGMENTS, fragment_len(fragment), buf);
        encode_fragment(fragment, buf);
    }
    for action in &message.actions {
        message::encode(ACTIONS, &wire_action(action), buf);
    }
}

impl From<SessionMessage> for Message {
    fn from(message: SessionMessage) -> Self {
        let fragments: Vec<Fragment> = message
            .node_fragments
            .into_iter()
            .map(read_fragment)
            .collect();
        let payload =
            |fragment: &Fragment| fragment.chunk.as_ref()?.payload.as_ref().map(Payload::len);
        let wire_bytes = fragments.iter().filter_map(payload).sum();
        let actions = message.actions.into_iter().map(read_action).collect();
        Self {
            fragments,
            actions,
            wire_bytes,
        }
    }
}

impl From<&Message> for SessionMessage {
    fn from(message: &Message) -> Self {
        let mut bytes = Vec::with_capacity(encoded_len(message));
        encode(message, &mut bytes);
        // What `encode` writes is this message by construction; were it not, the peer would see an empty one.
        Self::decode(Bytes::from(bytes)).unwrap_or_default()
    }
}

fn read_fragment(fragment: wire::NodeFragment) -> Fragment {
    let last = !fragment.continued;
    Fragment {
        id: fragment.id.into(),
        seq: fragment.seq,
        last,
        children: fragment.child_ids.into_iter().map(Into::into).collect(),
        chunk: fragment.chunk_fragment.map(|chunk| read_chunk(chunk, last)),
    }
}

fn read_chunk(chunk: wire::Chunk, last: bool) -> Chunk {
    let metadata = chunk
        .metadata
        .map(|metadata| Arc::new(read_metadata(metadata)));
    let payload = chunk.payload.map(|payload| match payload {
        wire::Payload::Ref(uri) => Payload::Ref(uri.into()),
        wire::Payload::Data(data) => Payload::Data(data),
    });
    // A failure is a final fragment; an OK status, or what is no status at all, is content like any other.
    if let (true, Some(meta), Some(Payload::Data(data))) = (last, &metadata, &payload)
        && mimetype::is_status(&meta.mimetype)
        && let Some(Some(status)) = Status::decode(data)
    {
        return Chunk {
            metadata,
            payload: Some(Payload::Status(Some(Arc::new(status)))),
        };
    }
    Chunk { metadata, payload }
}

fn read_metadata(metadata: wire::ChunkMetadata) -> Metadata {
    Metadata {
        mimetype: metadata.mimetype.into(),
        role: metadata.role.into(),
        file_name: metadata.original_file_name.into(),
        capture_time: metadata.capture_time,
        experimental: metadata.experimental,
    }
}

fn read_action(action: wire::Action) -> Action {
    let params = |list: Vec<wire::NamedParameter>| {
        list.into_iter()
            .map(|param| Param {
                name: param.name.into(),
                id: param.id.into(),
            })
            .collect()
    };
    Action {
        name: action.name.into(),
        target: action.target_spec.unwrap_or_default().id.into(),
        inputs: params(action.inputs),
        outputs: params(action.outputs),
        configs: action.configs,
    }
}

/// Actions are rare and small: the generated struct writes them.
fn wire_action(action: &Action) -> wire::Action {
    let params = |list: &[Param]| {
        let one = |param: &Param| wire::NamedParameter {
            name: param.name.to_string(),
            id: param.id.to_string(),
        };
        list.iter().map(one).collect()
    };
    wire::Action {
        name: action.name.to_string(),
        inputs: params(&action.inputs),
        outputs: params(&action.outputs),
        configs: action.configs.clone(),
        target_spec: (!action.target.is_empty()).then(|| wire::TargetSpec {
            id: action.target.to_string(),
        }),
    }
}

fn fragment_len(fragment: &Fragment) -> usize {
    let seq = if fragment.seq == 0 {
        0
    } else {
        key_len(SEQ) + encoded_len_varint(seq_varint(fragment.seq))
    };
    let continued = if fragment.last {
        0
    } else {
        key_len(CONTINUED) + 1
    };
    let children = fragment
        .children
        .iter()
        .map(|id| field_len(CHILD_IDS, id.len()))
        .sum::<usize>();
    let chunk = ChunkView::new(fragment).map_or(0, |chunk| field_len(CHUNK, chunk.len()));
    bytes_len(ID, fragment.id.len()) + seq + continued + children + chunk
}

fn encode_fragment(fragment: &Fragment, buf: &mut impl BufMut) {
    write_bytes(ID, fragment.id.as_bytes(), buf);
    if fragment.seq != 0 {
        encode_key(SEQ, WireType::Varint, buf);
        encode_varint(seq_varint(fragment.seq), buf);
    }
    if !fragment.last {
        encode_key(CONTINUED, WireType::Varint, buf);
        buf.put_u8(1);
    }
    for id in &fragment.children {
        head(CHILD_IDS, id.len(), buf);
        buf.put_slice(id.as_bytes());
    }
    if let Some(chunk) = ChunkView::new(fragment) {
        head(CHUNK, chunk.len(), buf);
        chunk.encode(buf);
    }
}

/// A fragment's chunk as this dialect writes it.
enum ChunkView<'a> {
    /// Metadata where it belongs, and the payload.
    Content {
        metadata: Option<&'a Metadata>,
        payload: Option<&'a Payload>,
    },
    /// How the node ended: the generated struct writes it.
    Status(wire::Chunk),
}

impl<'a> ChunkView<'a> {
    fn new(fragment: &'a Fragment) -> Option<Self> {
        let chunk = fragment.chunk.as_ref()?;
        if let Some(Payload::Status(status)) = &chunk.payload {
            return Some(Self::Status(status_chunk(status.as_deref())));
        }
        // Metadata stands at seq 0 only (EV-404).
        let metadata = chunk.metadata.as_deref().filter(|_| fragment.seq == 0);
        Some(Self::Content {
            metadata,
            payload: chunk.payload.as_ref(),
        })
    }

    fn len(&self) -> usize {
        match self {
            Self::Status(chunk) => chunk.encoded_len(),
            Self::Content { metadata, payload } => {
                let metadata =
                    metadata.map_or(0, |metadata| field_len(METADATA, metadata_len(metadata)));
                let payload = match payload {
                    Some(Payload::Data(data)) => field_len(DATA, data.len()),
                    Some(Payload::Ref(uri)) => field_len(REF, uri.len()),
                    Some(Payload::Status(_)) | None => 0,
                };
                metadata + payload
            }
        }
    }

    fn encode(&self, buf: &mut impl BufMut) {
        match self {
            Self::Status(chunk) => chunk.encode_raw(buf),
            Self::Content { metadata, payload } => {
                if let Some(metadata) = metadata {
                    head(METADATA, metadata_len(metadata), buf);
                    encode_metadata(metadata, buf);
                }
                match payload {
                    Some(Payload::Data(data)) => {
                        head(DATA, data.len(), buf);
                        buf.put_slice(data);
                    }
                    Some(Payload::Ref(uri)) => {
                        head(REF, uri.len(), buf);
                        buf.put_slice(uri.as_bytes());
                    }
                    Some(Payload::Status(_)) | None => {}
                }
            }
        }
    }
}

/// The encoded form of how a node ended; OK is the empty message.
pub(crate) fn status_bytes(status: Option<&Status>) -> Bytes {
    status.map_or_else(Bytes::new, Status::encode)
}

fn status_chunk(status: Option<&Status>) -> wire::Chunk {
    wire::Chunk {
        metadata: Some(wire::ChunkMetadata {
            mimetype: mimetype::STATUS.to_owned(),
            ..Default::default()
        }),
        payload: Some(wire::Payload::Data(status_bytes(status))),
    }
}

fn metadata_len(metadata: &Metadata) -> usize {
    bytes_len(MIMETYPE, metadata.mimetype.len())
        + bytes_len(ROLE, metadata.role.len())
        + bytes_len(FILE_NAME, metadata.file_name.len())
        + metadata
            .capture_time
            .as_ref()
            .map_or(0, |time| field_len(CAPTURE_TIME, time.encoded_len()))
        + metadata
            .experimental
            .iter()
            .map(|any| field_len(EXPERIMENTAL, any.encoded_len()))
            .sum::<usize>()
}

fn encode_metadata(metadata: &Metadata, buf: &mut impl BufMut) {
    write_bytes(MIMETYPE, metadata.mimetype.as_bytes(), buf);
    write_bytes(ROLE, metadata.role.as_bytes(), buf);
    write_bytes(FILE_NAME, metadata.file_name.as_bytes(), buf);
    if let Some(time) = &metadata.capture_time {
        message::encode(CAPTURE_TIME, time, buf);
    }
    for any in &metadata.experimental {
        message::encode(EXPERIMENTAL, any, buf);
    }
}

/// int32 is sign-extended to 64 bits on the wire.
const fn seq_varint(seq: i32) -> u64 {
    (seq as i64).cast_unsigned()
}

/// Key, length and content of a length-delimited field.
const fn field_len(tag: u32, len: usize) -> usize {
    key_len(tag) + encoded_len_varint(len as u64) + len
}

/// The same for an implicit field, which is absent when empty.
const fn bytes_len(tag: u32, len: usize) -> usize {
    if len == 0 { 0 } else { field_len(tag, len) }
}

fn head(tag: u32, len: usize, buf: &mut impl BufMut) {
    encode_key(tag, WireType::LengthDelimited, buf);
    encode_varint(len as u64, buf);
}

fn write_bytes(tag: u32, bytes: &[u8], buf: &mut impl BufMut) {
    if !bytes.is_empty() {
        head(tag, bytes.len(), buf);
        buf.put_slice(bytes);
    }
}

// Field numbers of evergreen.v2; a test compares every one with the generated code.
const FRAGMENTS: u32 = 1;
const ACTIONS: u32 = 2;
const ID: u32 = 1;
const SEQ: u32 = 2;
const CONTINUED: u32 = 3;
const CHILD_IDS: u32 = 4;
const CHUNK: u32 = 5;
const METADATA: u32 = 1;
const REF: u32 = 3;
const DATA: u32 = 10;
const MIMETYPE: u32 = 1;
const ROLE: u32 = 2;
const FILE_NAME: u32 = 3;
const CAPTURE_TIME: u32 = 6;
const EXPERIMENTAL: u32 = 100;
