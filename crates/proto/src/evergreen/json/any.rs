//! `google.protobuf.Any` and `google.rpc.Status` in JSON, by the descriptors that are served for reflection.
//!
//! A type without a descriptor here is represented as `{"@type": …, "value": base64}`, in both directions, so that
//! opaque values stay intact.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use prost_reflect::{DescriptorPool, DeserializeOptions, DynamicMessage, MessageDescriptor};
use prost_types::Any;
use serde::Deserialize;
use serde_json::Deserializer;
use serde_json::value::RawValue;

use super::field::{Base64, SharedString};
use crate::code::Code;
use crate::evergreen::Status;

/// The result of reading an `Any`.
pub(crate) enum ParsedAny {
    /// A valid message.
    Fits(Any),
    /// JSON that is not a message of this type, whose URL this is.
    Unfit(String),
}

/// Reads an `Any`; the caller knows that the text is valid JSON.
pub(crate) fn read(json: &str) -> ParsedAny {
    let known = dynamic(ANY, json).and_then(|message| message.transcode_to::<Any>().ok());
    if let Some(any) = known {
        return ParsedAny::Fits(any);
    }
    let Ok(opaque) = serde_json::from_str::<Opaque<'_>>(json) else {
        return ParsedAny::Unfit(String::new());
    };
    let type_url = opaque
        .type_url
        .map(|url| url.0.to_string())
        .unwrap_or_default();
    let name = type_url.rsplit('/').next().unwrap_or_default();
    // With a descriptor, the JSON did not match its type: as opaque base64 it would pass unchecked.
    if type_url.is_empty() || descriptor(name).is_some() {
        return ParsedAny::Unfit(type_url);
    }
    let value = match opaque
        .value
        .map(|raw| serde_json::from_str::<Base64>(raw.get()))
    {
        Some(Ok(bytes)) => bytes.0.into(),
        // Plain JSON of a type without a descriptor: the name alone is passed on, which is enough to refuse it.
        Some(Err(_)) | None => Vec::new(),
    };
    ParsedAny::Fits(Any { type_url, value })
}

/// An `Any` with bytes that cannot be decoded as any message.
pub(crate) fn undecodable(type_url: String) -> Any {
    // A key that ends within its varint: every decoder fails on it.
    let value = vec![0xff];
    Any { type_url, value }
}

/// Writes an `Any`.
pub(crate) fn write(any: &Any) -> String {
    let known = descriptor(ANY).and_then(|any_type| {
        let mut message = DynamicMessage::new(any_type);
        message.transcode_from(any).ok()?;
        serde_json::to_string(&message).ok()
    });
    known.unwrap_or_else(|| {
        let value = STANDARD.encode(&any.value);
        serde_json::json!({"@type": any.type_url, "value": value}).to_string()
    })
}

/// Converts the JSON of a message of type `name` to its encoded bytes.
pub(crate) fn bytes_of(name: &str, json: &str) -> Option<Vec<u8>> {
    dynamic(name, json).map(|message| message.encode_to_vec())
}

/// Converts the encoded bytes of a message of type `name` to JSON.
pub(crate) fn json_of(name: &str, bytes: &[u8]) -> Option<String> {
    let message = DynamicMessage::decode(descriptor(name)?, bytes).ok()?;
    serde_json::to_string(&message).ok()
}

/// Reads a `google.rpc.Status`, possibly a peer's; `None` is OK.
pub(crate) fn read_status(json: &str) -> Option<Status> {
    let whole = bytes_of(STATUS, json).and_then(|bytes| Status::decode(&bytes));
    whole.unwrap_or_else(|| {
        // Its details may be of types without a descriptor here, so code and message are read alone. Text that is no
        // status gives `None` like OK: the callers treat both alike.
        let plain: Plain = serde_json::from_str(json).unwrap_or_default();
        let status = || Status::other(Code::from_grpc(plain.code), "", plain.message);
        (plain.code != 0).then(status)
    })
}

/// Writes the status at an end; success is the empty object.
pub(crate) fn write_status(status: Option<&Status>) -> String {
    let bytes = status.map(Status::encode).unwrap_or_default();
    json_of(STATUS, &bytes).unwrap_or_else(|| "{}".to_owned())
}

/// Writes the details of a status, as a JSON list.
pub(crate) fn write_details(status: &Status) -> String {
    // Taken from the JSON of the whole status, so that details have a single mapping.
    let whole = write_status(Some(status));
    let details = serde_json::from_str::<Details<'_>>(&whole).ok();
    details.map_or_else(|| "[]".to_owned(), |found| found.details.get().to_owned())
}

#[derive(Deserialize)]
struct Opaque<'a> {
    #[serde(rename = "@type")]
    type_url: Option<SharedString>,
    #[serde(borrow)]
    value: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Plain {
    code: i32,
    message: String,
}

#[derive(Deserialize)]
struct Details<'a> {
    #[serde(borrow)]
    details: &'a RawValue,
}

fn dynamic(name: &str, json: &str) -> Option<DynamicMessage> {
    // Unknown fields are ignored (EV-720); the library refuses them by default.
    let lenient = DeserializeOptions::new().deny_unknown_fields(false);
    let mut text = Deserializer::from_str(json);
    DynamicMessage::deserialize_with_options(descriptor(name)?, &mut text, &lenient).ok()
}

fn descriptor(name: &str) -> Option<MessageDescriptor> {
    POOL.as_ref()?.get_message_by_name(name)
}

/// Parsed once. If our own descriptors were invalid, every message would be opaque, and a test would fail.
static POOL: LazyLock<Option<DescriptorPool>> =
    LazyLock::new(|| DescriptorPool::decode(crate::generated::DESCRIPTORS).ok());

const ANY: &str = "google.protobuf.Any";
const STATUS: &str = "google.rpc.Status";
