//! Decodes a message in one pass.

use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use prost::Message as _;
use prost::encoding::{DecodeContext, WireType, decode_varint, skip_field};

use super::super::{
    Action, Chunk, Fragment, Metadata, Param, Payload, Status, WireMessage, mimetype, wire,
};
use super::{
    ACTIONS, CAPTURE_TIME, CHILD_IDS, CHUNK, CONTINUED, DATA, ENTRIES_MAX, EXPERIMENTAL, FILE_NAME,
    FRAGMENTS, ID, METADATA, MIMETYPE, REF, ROLE, SEQ,
};

/// Why bytes cannot be decoded as a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ProtobufError {
    /// They do not match the schema.
    Malformed,
    /// There are more parts than [`ENTRIES_MAX`].
    TooMany,
}

type ReadResult<T> = Result<T, ProtobufError>;

/// Reads one message.
pub(super) fn message(bytes: &Bytes) -> ReadResult<WireMessage> {
    let mut reader = MessageReader { bytes, entries: 0 };
    let mut message = WireMessage {
        wire_bytes: bytes.len(),
        ..WireMessage::default()
    };
    let mut rest = &bytes[..];
    while let Some((tag, value)) = reader.field(&mut rest)? {
        match (tag, value) {
            (FRAGMENTS, FieldValue::Bytes(bytes)) => {
                message.fragments.push(reader.fragment(bytes)?)
            }
            (ACTIONS, FieldValue::Bytes(bytes)) => message.actions.push(reader.action(bytes)?),
            // A known field of another wire type is an error in the generated decoder too; unknown fields are skipped.
            (FRAGMENTS | ACTIONS, _) => return Err(ProtobufError::Malformed),
            _ => {}
        }
    }
    Ok(message)
}

/// A field's value, by its wire type.
enum FieldValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of a wire type that the schema does not use.
    Other,
}

/// Reads a varint. Nearly all are keys and lengths of one byte, for which the general decoder takes several times as long.
#[inline]
fn varint(rest: &mut &[u8]) -> ReadResult<u64> {
    match **rest {
        [byte @ ..0x80, ref after @ ..] => {
            *rest = after;
            Ok(byte.into())
        }
        _ => decode_varint(rest).map_err(malformed),
    }
}

/// The message being read, with the number of parts read so far.
struct MessageReader<'a> {
    bytes: &'a Bytes,
    entries: usize,
}

impl MessageReader<'_> {
    /// Reads the next field of a message.
    fn field<'a>(&mut self, rest: &mut &'a [u8]) -> ReadResult<Option<(u32, FieldValue<'a>)>> {
        if rest.is_empty() {
            return Ok(None);
        }
        let key = u32::try_from(varint(rest)?).map_err(malformed)?;
        let tag = key >> 3;
        if tag == 0 {
            return Err(ProtobufError::Malformed);
        }
        let value = match WireType::try_from(u64::from(key & 7)).map_err(malformed)? {
            WireType::Varint => FieldValue::Number(varint(rest)?),
            WireType::LengthDelimited => {
                // Every length-delimited field counts, known or not: each part of a message is one, and this needs no
                // list of fields.
                self.entries += 1;
                if self.entries > ENTRIES_MAX {
                    return Err(ProtobufError::TooMany);
                }
                let len = varint(rest)?;
                let len = usize::try_from(len).map_err(malformed)?;
                let (field, after) = rest.split_at_checked(len).ok_or(ProtobufError::Malformed)?;
                *rest = after;
                FieldValue::Bytes(field)
            }
            other => {
                // Groups may be nested; the context's recursion limit bounds how deeply.
                skip_field(other, tag, rest, DecodeContext::default()).map_err(malformed)?;
                FieldValue::Other
            }
        };
        Ok(Some((tag, value)))
    }

    /// Returns a text as a view of the message.
    fn text(&self, bytes: &[u8]) -> ReadResult<ByteString> {
        ByteString::try_from(self.bytes.slice_ref(bytes)).map_err(malformed)
    }

    fn fragment(&mut self, mut rest: &[u8]) -> ReadResult<Fragment> {
        let mut fragment = Fragment {
            last: true,
            ..Fragment::default()
        };
        while let Some((tag, value)) = self.field(&mut rest)? {
            match (tag, value) {
                (ID, FieldValue::Bytes(bytes)) => fragment.id = self.text(bytes)?,
                (SEQ, FieldValue::Number(number)) => fragment.seq = int32(number),
                (CONTINUED, FieldValue::Number(number)) => fragment.last = number == 0,
                (CHILD_IDS, FieldValue::Bytes(bytes)) => fragment.children.push(self.text(bytes)?),
                (CHUNK, FieldValue::Bytes(bytes)) => {
                    // A message field that occurs twice is merged, as protobuf requires.
                    self.chunk(bytes, fragment.chunk.get_or_insert_default())?;
                }
                (ID | SEQ | CONTINUED | CHILD_IDS | CHUNK, _) => {
                    return Err(ProtobufError::Malformed);
                }
                _ => {}
            }
        }
        // Only here are all fields known: they may come in any order, `continued` after the chunk.
        if fragment.last
            && let Some(chunk) = &mut fragment.chunk
            && let Some(status) = failure(chunk)
        {
            chunk.payload = Some(Payload::Status(Some(Arc::new(status))));
        }
        Ok(fragment)
    }

    fn chunk(&mut self, mut rest: &[u8], chunk: &mut Chunk) -> ReadResult<()> {
        while let Some((tag, value)) = self.field(&mut rest)? {
            match (tag, value) {
                (METADATA, FieldValue::Bytes(bytes)) => {
                    let metadata = chunk.metadata.get_or_insert_default();
                    // Not shared with anyone yet, so `make_mut` copies nothing.
                    self.metadata(bytes, Arc::make_mut(metadata))?;
                }
                // `ref` and `data` are a `oneof`: the last one on the wire wins.
                (REF, FieldValue::Bytes(bytes)) => {
                    chunk.payload = Some(Payload::Ref(own(self.text(bytes)?)));
                }
                (DATA, FieldValue::Bytes(bytes)) => {
                    chunk.payload = Some(Payload::Data(self.bytes.slice_ref(bytes)));
                }
                (METADATA | REF | DATA, _) => return Err(ProtobufError::Malformed),
                _ => {}
            }
        }
        Ok(())
    }

    fn metadata(&mut self, mut rest: &[u8], metadata: &mut Metadata) -> ReadResult<()> {
        while let Some((tag, value)) = self.field(&mut rest)? {
            match (tag, value) {
                (MIMETYPE, FieldValue::Bytes(bytes)) => metadata.mimetype = own(self.text(bytes)?),
                (ROLE, FieldValue::Bytes(bytes)) => metadata.role = own(self.text(bytes)?),
                (FILE_NAME, FieldValue::Bytes(bytes)) => {
                    metadata.file_name = own(self.text(bytes)?)
                }
                (CAPTURE_TIME, FieldValue::Bytes(bytes)) => {
                    let time = metadata.capture_time.get_or_insert_default();
                    time.merge(bytes).map_err(malformed)?;
                }
                (EXPERIMENTAL, FieldValue::Bytes(bytes)) => {
                    let any = prost_types::Any::decode(bytes).map_err(malformed)?;
                    metadata.experimental.push(any);
                }
                (MIMETYPE | ROLE | FILE_NAME | CAPTURE_TIME | EXPERIMENTAL, _) => {
                    return Err(ProtobufError::Malformed);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Actions are rare and small: the generated struct decodes them, once their parts are counted.
    fn action(&mut self, bytes: &[u8]) -> ReadResult<Action> {
        let mut rest = bytes;
        while self.field(&mut rest)?.is_some() {}
        let action = wire::Action::decode(bytes).map_err(malformed)?;
        let params = |list: Vec<wire::NamedParameter>| {
            list.into_iter()
                .map(|param| Param::new(param.name, param.id))
                .collect()
        };
        Ok(Action {
            name: action.name.into(),
            target: action.target_spec.unwrap_or_default().id.into(),
            inputs: params(action.inputs),
            outputs: params(action.outputs),
            configs: action.configs,
        })
    }
}

/// The error status in a final chunk, if its producer failed (EV-931). An OK status, or bytes that are no status, are
/// ordinary content.
pub(in crate::evergreen) fn failure(chunk: &Chunk) -> Option<Status> {
    let Some(Payload::Data(data)) = &chunk.payload else {
        return None;
    };
    let metadata = chunk.metadata.as_ref()?;
    if !mimetype::is_status(&metadata.mimetype) {
        return None;
    }
    Status::decode(data).flatten()
}

/// Copies a text: metadata outlives the message by far, and must not pin its buffer (EV-805).
fn own(text: ByteString) -> ByteString {
    ByteString::from(&*text)
}

/// An int32 is encoded as the 64 bits that it is sign-extended to.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the upper half is ignored, as by the protobuf library"
)]
const fn int32(number: u64) -> i32 {
    number as i32
}

/// Drops the decoder's error, because its text would quote the sender's bytes.
fn malformed<E>(_: E) -> ProtobufError {
    ProtobufError::Malformed
}
