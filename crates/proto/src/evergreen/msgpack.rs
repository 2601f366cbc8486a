//! The dialect of Action Engine 0.4.0: msgpack structs, each wrapped in a bin (section 7.3).
//!
//! ```text
//!   WireMessage   [NodeFragment…] [ActionMessage…] headers
//!   NodeFragment  0 Chunk | 1 NodeRef, continued, id, seq
//!   Chunk         data, ref, ChunkMetadata | nil
//! ```

pub(super) mod action;
pub(super) mod calls;
#[cfg(test)]
pub(super) mod tests;
mod value;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use bytestring::ByteString;
use prost::Message as _;
use prost_types::{Any, Timestamp};

use self::value::{BadValue, ValueReader, put_int, put_text, text_len, wrapped};
use super::{Chunk, Fragment, Metadata, NodeId, Payload, Reason, Status, WireMessage, mimetype};
use crate::code::Code;
use crate::generated::sapwood::v1::Attributes;

/// The content of one message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedMsgpack {
    /// Fragments and actions. A fragment without a seq has the seq [`APPEND`].
    pub message: WireMessage,
    /// The id of each action.
    pub ids: Vec<NodeId>,
    /// Whether it has headers; without them, an empty message is the half-close (EV-738).
    pub headers: bool,
    /// Whether it uses the layout of 0.1 (EV-732).
    pub older: bool,
}

/// Context for encoding a message.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncodeContext<'a> {
    /// The id of each action.
    pub ids: &'a [NodeId],
    /// Unix time in microseconds, for statuses.
    pub now: i64,
    /// Whether to use the layout of 0.1.
    pub older: bool,
}

/// The seq of a fragment that is appended after the highest accepted one (EV-731).
pub const APPEND: i32 = -1;
/// The node whose final fragment ends the session (EV-739).
pub const ABORT: &str = "__abort__";
/// Maximum number of fragments, actions, ports, headers and attributes in one message, together.
pub const ENTRIES_MAX: usize = 131_072;

/// Decodes one message.
///
/// # Errors
/// `BAD_MESSAGE`, without quoting the sender's bytes; `FRAGMENT_LIMIT` above [`ENTRIES_MAX`].
pub fn decode(bytes: Bytes) -> Result<ParsedMsgpack, Status> {
    let wire_bytes = bytes.len();
    let mut budget = PartsBudget(ENTRIES_MAX);
    let mut read = wire_message(bytes, &mut budget).map_err(ParseStop::status)?;
    read.message.wire_bytes = wire_bytes;
    Ok(read)
}

/// Encodes one message.
pub fn encode(message: &WireMessage, context: EncodeContext<'_>, out: &mut BytesMut) {
    let fragments: Vec<FragmentView<'_>> = message
        .fragments
        .iter()
        .map(|fragment| FragmentView::new(fragment, context.now))
        .collect();
    let actions: Vec<action::ActionView<'_>> = message
        .actions
        .iter()
        .zip(context.ids)
        .map(|(action, id)| action::ActionView::new(action, id, context.older))
        .collect();
    // A bin states its length before its content, so all lengths are computed first; writing each struct into a buffer
    // of its own would allocate for every token.
    let mut len = value::list_len(fragments.len()) + value::list_len(actions.len());
    // The header count, one byte for 0, which the layout of 0.1 does not have (EV-732).
    len += usize::from(!context.older);
    len += fragments
        .iter()
        .map(|view| wrapped(view.len))
        .sum::<usize>();
    len += actions.iter().map(|view| wrapped(view.len)).sum::<usize>();
    out.reserve(wrapped(len));
    value::put_bin_head(out, len);
    value::put_list(out, fragments.len());
    for view in &fragments {
        view.put(out);
    }
    value::put_list(out, actions.len());
    for view in &actions {
        view.put(out);
    }
    if !context.older {
        value::put_count(out, 0);
    }
}

/// Metadata that this dialect represents as the attribute `name` (EV-740).
#[must_use]
pub fn attribute(name: &str, value: impl Into<Vec<u8>>) -> Any {
    let attributes = BTreeMap::from([(name.to_owned(), value.into())]);
    Any {
        type_url: ATTRIBUTES.to_owned(),
        value: Attributes { attributes }.encode_to_vec(),
    }
}

/// Number of further parts that may be read.
struct PartsBudget(usize);

/// Why decoding stopped.
enum ParseStop {
    Malformed,
    Limit,
}

impl From<BadValue> for ParseStop {
    fn from(BadValue: BadValue) -> Self {
        Self::Malformed
    }
}

impl ParseStop {
    fn status(self) -> Status {
        let max = ENTRIES_MAX as u64;
        match self {
            Self::Malformed => Status::new(
                Reason::BadMessage,
                "a message cannot be decoded as a WireMessage of Action Engine 0.4.0",
            ),
            Self::Limit => Status::limit(Reason::FragmentLimit, "entries_max", max + 1, max),
        }
    }
}

impl PartsBudget {
    fn take(&mut self, entries: usize) -> Result<usize, ParseStop> {
        // Charged by the stated count, before the first entry is built: an entry of a few bytes takes hundreds once it
        // is decoded.
        self.0 = self.0.checked_sub(entries).ok_or(ParseStop::Limit)?;
        Ok(entries)
    }
}

fn wire_message(bytes: Bytes, budget: &mut PartsBudget) -> Result<ParsedMsgpack, ParseStop> {
    let mut outer = ValueReader::new(bytes);
    let mut inner = outer.inner()?;
    // One message is one bin; trailing bytes are refused (EV-731).
    if !outer.is_empty() {
        return Err(ParseStop::Malformed);
    }
    let mut read = ParsedMsgpack::default();
    for _ in 0..budget.take(inner.list()?)? {
        read.message
            .fragments
            .push(fragment(inner.inner()?, budget)?);
    }
    for _ in 0..budget.take(inner.list()?)? {
        let called = action::read(inner.inner()?, budget)?;
        // The layout belongs to the peer's version, so one action without a header count decides for the session.
        read.older |= called.older;
        read.ids.push(called.id);
        read.message.actions.push(called.action);
    }
    // There is no version field: the missing header count is the only sign of the older layout (EV-732).
    if inner.is_empty() {
        read.older = true;
        return Ok(read);
    }
    read.headers = !pairs(&mut inner, budget)?.is_empty();
    ended(&inner)?;
    Ok(read)
}

fn fragment(mut from: ValueReader, budget: &mut PartsBudget) -> Result<Fragment, ParseStop> {
    let variant = from.int()?;
    let content = from.inner()?;
    let continued = from.bool()?;
    let id = from.text()?;
    // Absent and negative both mean "append" (EV-731); a value beyond int32 is malformed (EV-203).
    let seq = from.optional(ValueReader::int)?.unwrap_or(-1);
    ended(&from)?;
    let mut fragment = Fragment {
        id,
        seq: if seq < 0 {
            APPEND
        } else {
            i32::try_from(seq).map_err(|_| ParseStop::Malformed)?
        },
        last: !continued,
        ..Fragment::default()
    };
    match variant {
        0 => fragment.chunk = chunk(content, !continued, budget)?,
        1 => node_ref(content, &mut fragment)?,
        _ => return Err(ParseStop::Malformed),
    }
    Ok(fragment)
}

/// Reads a child, with its byte range if not all of it is selected.
fn node_ref(mut from: ValueReader, into: &mut Fragment) -> Result<(), ParseStop> {
    into.children = vec![from.text()?];
    let offset = from.int()?;
    let len = from.optional(ValueReader::int)?;
    ended(&from)?;
    let bytes = |value: i64| u64::try_from(value).map_err(|_| ParseStop::Malformed);
    let begin = bytes(offset)?;
    let end = match len {
        Some(len) => begin.saturating_add(bytes(len)?),
        None => u64::MAX,
    };
    // A reference to all bytes has no range here; the session's adapter makes an excerpt of the whole of it (EV-740).
    let part = begin > 0 || len.is_some();
    into.range = part.then(|| Box::new(begin..end));
    Ok(())
}

/// Reads a chunk; `None` is the null chunk, which marks the end of the content (EV-734).
fn chunk(
    mut from: ValueReader,
    last: bool,
    budget: &mut PartsBudget,
) -> Result<Option<Chunk>, ParseStop> {
    // If the data is absent, the first value is the reference.
    let data = if from.at_text() {
        Bytes::new()
    } else {
        from.bin()?
    };
    let uri = from.text()?;
    let described = from.optional(ValueReader::inner)?;
    ended(&from)?;
    let metadata = described.map(|from| metadata(from, budget)).transpose()?;
    let metadata = metadata.unwrap_or_default();
    // The null chunk of EV-734. A text/plain chunk without bytes is not one: it is an item of its own (EV-301).
    let untyped = metadata.mimetype.is_empty() || *metadata.mimetype == *mimetype::OCTET_STREAM;
    if data.is_empty() && uri.is_empty() && untyped {
        return Ok(None);
    }
    // A status ends its node (EV-735), so in a fragment that is not final the mimetype means nothing.
    if last && *metadata.mimetype == *STATUS_MIMETYPE {
        return Ok(Some(Chunk {
            metadata: None,
            payload: Some(Payload::Status(read_status(&data).map(Arc::new))),
        }));
    }
    let payload = match (data.is_empty(), uri.is_empty()) {
        (true, true) => None,
        (false, true) => Some(Payload::Data(data)),
        (true, false) => Some(Payload::Ref(own(&uri))),
        // The layout has room for both, the schema's `oneof` has not.
        (false, false) => return Err(ParseStop::Malformed),
    };
    Ok(Some(Chunk {
        metadata: Some(Arc::new(metadata)),
        payload,
    }))
}

fn metadata(mut from: ValueReader, budget: &mut PartsBudget) -> Result<Metadata, ParseStop> {
    let mimetype = own(&from.text()?);
    let time = from.optional(ValueReader::inner)?;
    let mut attributes = pairs(&mut from, budget)?;
    ended(&from)?;
    let micros = match time {
        None => None,
        Some(mut time) => {
            // An absent time may also come as a bin that holds nil (EV-731).
            let micros = time.optional(ValueReader::int)?;
            ended(&time)?;
            micros
        }
    };
    // This dialect has no fields for roles and file names: they are attributes.
    let mut named = |name: &str| -> Result<ByteString, ParseStop> {
        match attributes.remove(name) {
            Some(bytes) => ByteString::try_from(bytes)
                .map(|text| own(&text))
                .map_err(|_| ParseStop::Malformed),
            None => Ok(ByteString::new()),
        }
    };
    let (role, file_name) = (named(ROLE)?, named(FILE_NAME)?);
    let attributes: BTreeMap<String, Vec<u8>> = attributes
        .into_iter()
        .map(|(name, bytes)| (name, bytes.into()))
        .collect();
    let experimental = (!attributes.is_empty()).then(|| Any {
        type_url: ATTRIBUTES.to_owned(),
        value: Attributes { attributes }.encode_to_vec(),
    });
    Ok(Metadata {
        mimetype,
        role,
        file_name,
        capture_time: micros.map(time_of),
        experimental: experimental.into_iter().collect(),
    })
}

/// Reads headers or attributes. A name that is not UTF-8 is skipped: no lookup could match it.
fn pairs(
    from: &mut ValueReader,
    budget: &mut PartsBudget,
) -> Result<BTreeMap<String, Bytes>, ParseStop> {
    let mut pairs = BTreeMap::new();
    for _ in 0..budget.take(from.count()?)? {
        let name = from.raw_text()?;
        let value = from.raw_text()?;
        if let Ok(name) = String::from_utf8(name.into()) {
            pairs.insert(name, value);
        }
    }
    Ok(pairs)
}

/// Copies a text: metadata outlives the message by far, and must not pin its buffer (EV-805).
fn own(text: &str) -> ByteString {
    ByteString::from(text)
}

fn ended(from: &ValueReader) -> Result<(), ParseStop> {
    if from.is_empty() {
        Ok(())
    } else {
        Err(ParseStop::Malformed)
    }
}

/// Decodes a code and a message; `None` is OK.
fn read_status(data: &[u8]) -> Option<Status> {
    let (&code, message) = data.split_first().unwrap_or((&UNKNOWN, &[]));
    let message = String::from_utf8_lossy(message);
    // This dialect carries a gRPC number and a text, but no reason and no details.
    (code != 0).then(|| Status::other(Code::from_grpc(i32::from(code)), "", message))
}

/// A fragment to be encoded.
struct FragmentView<'a> {
    fragment: &'a Fragment,
    content: FragmentContent<'a>,
    /// Length of the content.
    content_len: usize,
    /// Length of the whole fragment, without its head.
    len: usize,
}

enum FragmentContent<'a> {
    Chunk {
        /// The first byte of a status chunk.
        code: Option<u8>,
        data: Cow<'a, [u8]>,
        uri: &'a str,
        metadata: DescribedChunk<'a>,
    },
    NodeRef {
        child: &'a NodeId,
        offset: i32,
        len: Option<i32>,
    },
}

struct DescribedChunk<'a> {
    mimetype: &'a str,
    micros: Option<i64>,
    attributes: Vec<(String, Vec<u8>)>,
    len: usize,
}

impl<'a> FragmentView<'a> {
    fn new(fragment: &'a Fragment, now: i64) -> Self {
        // A NodeRef has room for one child, and the session puts no more into a fragment for this dialect.
        let content = match fragment.children.first() {
            Some(child) => FragmentContent::of_child(child, fragment.range.as_deref()),
            None => FragmentContent::of_chunk(fragment, now),
        };
        let content_len = content.len();
        let len = 1
            + wrapped(content_len)
            + 1
            + text_len(fragment.id.as_bytes())
            + value::int_len(fragment.seq);
        Self {
            fragment,
            content,
            content_len,
            len,
        }
    }

    fn put(&self, out: &mut BytesMut) {
        value::put_bin_head(out, self.len);
        put_int(
            out,
            i32::from(matches!(self.content, FragmentContent::NodeRef { .. })),
        );
        value::put_bin_head(out, self.content_len);
        self.content.put(out);
        value::put_bool(out, !self.fragment.last);
        put_text(out, self.fragment.id.as_bytes());
        put_int(out, self.fragment.seq);
    }
}

impl<'a> FragmentContent<'a> {
    /// Values beyond the integers that 0.4.0 reads correctly (EV-730) are clipped, which selects the rest of the
    /// content.
    fn of_child(child: &'a NodeId, range: Option<&Range<u64>>) -> Self {
        let int = |bytes: u64| i32::try_from(bytes).unwrap_or(i32::MAX);
        let end = range.map(|range| range.end).filter(|end| *end < u64::MAX);
        let begin = range.map_or(0, |range| range.start);
        Self::NodeRef {
            child,
            offset: int(begin),
            len: end.map(|end| int(end.saturating_sub(begin))),
        }
    }

    fn of_chunk(fragment: &'a Fragment, now: i64) -> Self {
        let chunk = fragment.chunk.as_ref();
        let payload = chunk.and_then(|chunk| chunk.payload.as_ref());
        if let Some(Payload::Status(status)) = payload {
            let (code, message) = match status {
                Some(status) => (status.code.grpc(), message_of(status)),
                None => (0, Cow::Borrowed(&[][..])),
            };
            return Self::Chunk {
                code: Some(code),
                data: message,
                uri: "",
                // 0.4.0 expects a timestamp on every status (EV-735).
                metadata: DescribedChunk::new(STATUS_MIMETYPE, Some(now), Vec::new()),
            };
        }
        let (data, uri): (&[u8], &str) = match payload {
            Some(Payload::Data(data)) => (data, ""),
            Some(Payload::Ref(uri)) => (&[], uri),
            _ => (&[], ""),
        };
        let empty = data.is_empty() && uri.is_empty();
        // An end without content is written as the null chunk, the only form of it that 0.4.0 knows (EV-734): metadata
        // would turn it into an item.
        let metadata = chunk
            .and_then(|chunk| chunk.metadata.as_deref())
            .filter(|_| !(empty && fragment.last));
        let metadata = match metadata {
            Some(metadata) => {
                let micros = metadata.capture_time.as_ref().map(micros_of);
                // Empty, untyped and not final: this would be a null chunk, at which the client's reader ends (EV-734).
                let typed = if empty && metadata.mimetype() == mimetype::OCTET_STREAM {
                    NOT_NULL
                } else {
                    metadata.mimetype()
                };
                DescribedChunk::new(typed, micros, attributes_of(metadata))
            }
            None if empty && !fragment.last => DescribedChunk::new(NOT_NULL, None, Vec::new()),
            None => DescribedChunk::new(mimetype::OCTET_STREAM, None, Vec::new()),
        };
        Self::Chunk {
            code: None,
            data: Cow::Borrowed(data),
            uri,
            metadata,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::NodeRef { child, offset, len } => {
                text_len(child.as_bytes()) + value::int_len(*offset) + len.map_or(1, value::int_len)
            }
            Self::Chunk {
                code,
                data,
                uri,
                metadata,
            } => {
                let data = data.len() + usize::from(code.is_some());
                wrapped(data) + text_len(uri.as_bytes()) + wrapped(metadata.len)
            }
        }
    }

    fn put(&self, out: &mut BytesMut) {
        match self {
            Self::NodeRef { child, offset, len } => {
                put_text(out, child.as_bytes());
                put_int(out, *offset);
                match len {
                    Some(len) => put_int(out, *len),
                    None => value::put_nil(out),
                }
            }
            Self::Chunk {
                code,
                data,
                uri,
                metadata,
            } => {
                value::put_bin_head(out, data.len() + usize::from(code.is_some()));
                if let Some(code) = code {
                    out.put_u8(*code);
                }
                out.put_slice(data);
                put_text(out, uri.as_bytes());
                value::put_bin_head(out, metadata.len);
                metadata.put(out);
            }
        }
    }
}

impl<'a> DescribedChunk<'a> {
    fn new(mimetype: &'a str, micros: Option<i64>, attributes: Vec<(String, Vec<u8>)>) -> Self {
        let time = if micros.is_some() {
            wrapped(value::MICROS_LEN)
        } else {
            1
        };
        let pairs = attributes
            .iter()
            .map(|(name, value)| text_len(name.as_bytes()) + text_len(value));
        let len = text_len(mimetype.as_bytes())
            + time
            + value::count_len(attributes.len())
            + pairs.sum::<usize>();
        Self {
            mimetype,
            micros,
            attributes,
            len,
        }
    }

    fn put(&self, out: &mut BytesMut) {
        put_text(out, self.mimetype.as_bytes());
        match self.micros {
            Some(micros) => value::put_micros(out, micros),
            None => value::put_nil(out),
        }
        value::put_count(out, self.attributes.len());
        for (name, value) in &self.attributes {
            put_text(out, name.as_bytes());
            put_text(out, value);
        }
    }
}

fn attributes_of(metadata: &Metadata) -> Vec<(String, Vec<u8>)> {
    let named = [(ROLE, &metadata.role), (FILE_NAME, &metadata.file_name)]
        .into_iter()
        .filter(|(_, text)| !text.is_empty())
        .map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()));
    let retained = metadata
        .experimental
        .iter()
        // Attributes are named strings: other types of `experimental` have no form in this dialect.
        .filter(|any| any.type_url == ATTRIBUTES)
        .filter_map(|any| Attributes::decode(&*any.value).ok())
        .flat_map(|found| found.attributes);
    named.chain(retained).collect()
}

/// The message that a client shows. For an unknown action it is the text of 0.4.0's own registry (EV-737).
fn message_of(status: &Status) -> Cow<'_, [u8]> {
    match (status.known(), status.detail("action")) {
        (Some(Reason::UnknownAction), Some(name)) => {
            Cow::Owned(format!("Action not found in registry: {name}.").into())
        }
        _ => Cow::Borrowed(status.message.as_bytes()),
    }
}

fn time_of(micros: i64) -> Timestamp {
    // A protobuf timestamp counts its nanos forwards from `seconds`, before 1970 too.
    let nanos = micros.rem_euclid(1_000_000) * 1000;
    Timestamp {
        seconds: micros.div_euclid(1_000_000),
        nanos: i32::try_from(nanos).unwrap_or_default(),
    }
}

fn micros_of(time: &Timestamp) -> i64 {
    time.seconds
        .saturating_mul(1_000_000)
        .saturating_add(i64::from(time.nanos) / 1000)
}

/// The mimetype of a status chunk (EV-735).
const STATUS_MIMETYPE: &str = "__status__";
/// Replaces the default mimetype on a non-final piece without content: a null chunk there would end the client's
/// reader, or hang it (EV-734).
const NOT_NULL: &str = "application/x-empty";
const ATTRIBUTES: &str = "type.googleapis.com/sapwood.v1.Attributes";
const ROLE: &str = "role";
const FILE_NAME: &str = "original_file_name";
/// gRPC's UNKNOWN, for a status chunk without a code.
const UNKNOWN: u8 = 2;
