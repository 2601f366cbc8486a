//! Encodes a message into the caller's buffer.

use bytes::{BufMut, Bytes};
use prost::Message as _;
use prost::encoding::{WireType, encode_varint, encoded_len_varint, key_len, message};

use super::super::{
    Action, Fragment, Metadata, Param, Payload, Status, WireMessage, mimetype, wire,
};
use super::{
    ACTIONS, CAPTURE_TIME, CHILD_IDS, CHUNK, CONTINUED, DATA, EXPERIMENTAL, FILE_NAME, FRAGMENTS,
    ID, METADATA, MIMETYPE, REF, ROLE, SEQ,
};

/// Returns the number of bytes that [`encode`] writes.
#[must_use]
pub fn encoded_len(message: &WireMessage) -> usize {
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
pub fn encode(message: &WireMessage, buf: &mut impl BufMut) {
    for fragment in &message.fragments {
        head(FRAGMENTS, fragment_len(fragment), buf);
        encode_fragment(fragment, buf);
    }
    for action in &message.actions {
        message::encode(ACTIONS, &wire_action(action), buf);
    }
}

/// Actions are rare and small: the generated struct encodes them.
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
    // Must mirror `encode_fragment` field by field: the length is written before the fragment, and one byte of
    // difference spoils all that follows. proto3 omits fields at their defaults.
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
        key(SEQ, WireType::Varint, buf);
        varint(seq_varint(fragment.seq), buf);
    }
    if !fragment.last {
        key(CONTINUED, WireType::Varint, buf);
        buf.put_u8(1);
    }
    // A repeated field keeps empty elements, so these are not written as implicit fields are.
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
    /// Metadata, at the first fragment only, and the payload.
    Content {
        metadata: Option<&'a Metadata>,
        payload: Option<&'a Payload>,
    },
    /// The status at the end of a node: the generated struct encodes it. Boxed, because it is rare and would make each view
    /// of a chunk larger.
    Status(Box<wire::Chunk>),
}

impl<'a> ChunkView<'a> {
    fn new(fragment: &'a Fragment) -> Option<Self> {
        // Built once for the length and again for the bytes: it borrows everything except a status, which is rare.
        let chunk = fragment.chunk.as_ref()?;
        if let Some(Payload::Status(status)) = &chunk.payload {
            return Some(Self::Status(Box::new(status_chunk(status.as_deref()))));
        }
        // Metadata is written at seq 0 only (EV-404).
        let metadata = chunk.metadata.as_deref().filter(|_| fragment.seq == 0);
        let payload = chunk.payload.as_ref();
        (metadata.is_some() || payload.is_some()).then_some(Self::Content { metadata, payload })
    }

    fn len(&self) -> usize {
        match self {
            Self::Status(chunk) => chunk.encoded_len(),
            Self::Content { metadata, payload } => {
                let metadata =
                    metadata.map_or(0, |metadata| field_len(METADATA, metadata_len(metadata)));
                // Written even if it is empty: a `oneof` has presence, and an empty payload is not the same as none.
                // Statuses are never here, because `new` has separated them.
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

/// The encoded status at an end; OK is the empty message.
pub(crate) fn status_bytes(status: Option<&Status>) -> Bytes {
    status.map_or_else(Bytes::new, Status::encode)
}

fn status_chunk(status: Option<&Status>) -> wire::Chunk {
    wire::Chunk {
        // With metadata at any seq, also behind a leaf of another type: the one permitted change of mimetype (EV-931).
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
    key(tag, WireType::LengthDelimited, buf);
    varint(len as u64, buf);
}

fn key(tag: u32, kind: WireType, buf: &mut impl BufMut) {
    varint(u64::from(tag << 3 | kind as u32), buf);
}

/// Writes a varint. Nearly all are keys and lengths of one byte, for which the general encoder takes several times as long.
#[inline]
fn varint(value: u64, buf: &mut impl BufMut) {
    match u8::try_from(value) {
        Ok(byte @ ..0x80) => buf.put_u8(byte),
        _ => encode_varint(value, buf),
    }
}

fn write_bytes(tag: u32, bytes: &[u8], buf: &mut impl BufMut) {
    if !bytes.is_empty() {
        head(tag, bytes.len(), buf);
        buf.put_slice(bytes);
    }
}
