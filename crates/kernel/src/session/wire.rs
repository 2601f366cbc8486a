//! Converts metadata between chunks of the kernel and leaves on the wire (section 14 of the kernel page).

use prost_types::Timestamp;
use sapwood_proto::evergreen::Metadata;
use serde_json::{Map, Value, json};

use crate::chunk::Chunk;
use crate::meta::Meta;
use crate::name::{Mime, Name, Port};
use crate::spec::OutputSpec;

/// The port and the output for the metadata at the end of a run (KE-305).
pub(super) const META: &str = "meta";

/// The output `meta`, for functions that do not declare it.
pub(super) fn meta_output() -> OutputSpec {
    OutputSpec::new(Port::META, Mime::JSON)
}

/// The document on it, for functions that do not write their own: in GENERATE's format, with the known fields.
pub(super) fn trailing(meta: &Meta) -> Value {
    let mut document = Map::new();
    for key in ["model", "usage"] {
        if let Some(value) = meta.get(key) {
            document.insert(key.into(), value);
        }
    }
    // GENERATE's document has the finish of the first answer at the top, and all of them in `choices` if there are
    // several.
    if let Some(reason) = meta.finish.get(&0) {
        document.insert("finish_reason".into(), reason.name().into());
    }
    if meta.finish.len() > 1 {
        let ends = meta.finish.iter();
        let ends = ends.map(|(index, end)| json!({"index": index, "finish_reason": end.name()}));
        document.insert("choices".into(), ends.collect());
    }
    for (key, value) in &meta.extra {
        document.insert(key.to_string(), value.clone());
    }
    Value::Object(document)
}

/// Role, file name and capture time; `None` if there are none.
pub(crate) fn meta(metadata: &Metadata) -> Option<Meta> {
    let mut meta = Meta::default();
    if !metadata.role.is_empty() {
        meta.role = Some(Name::shared(&metadata.role));
    }
    if !metadata.file_name.is_empty() {
        meta = meta.with_extra(FILE_NAME, metadata.file_name.to_string());
    }
    if let Some(time) = &metadata.capture_time {
        meta = meta.with_extra(CAPTURE_TIME, serde_json::json!([time.seconds, time.nanos]));
    }
    (meta != Meta::default()).then_some(meta)
}

/// The metadata for seq 0 of a leaf.
pub(crate) fn metadata(chunk: &Chunk) -> Metadata {
    let mut metadata = Metadata::of(chunk.mime.as_str());
    if let Some(meta) = &chunk.meta {
        describe(meta, &mut metadata);
    }
    metadata
}

fn describe(meta: &Meta, metadata: &mut Metadata) {
    if let Some(role) = &meta.role {
        metadata.role = role.as_str().into();
    }
    if let Some(name) = meta.extra.get(FILE_NAME).and_then(|name| name.as_str()) {
        metadata.file_name = name.into();
    }
    if let Some(time) = meta.extra.get(CAPTURE_TIME) {
        let part = |index: usize| time.get(index).and_then(Value::as_i64);
        let nanos = part(1).and_then(|nanos| i32::try_from(nanos).ok());
        // Functions can write anything under this key, so a value of another form is left out.
        metadata.capture_time = part(0)
            .zip(nanos)
            .map(|(seconds, nanos)| Timestamp { seconds, nanos });
    }
}

/// Key of `Meta::extra`: the name that the producer gave, for people.
const FILE_NAME: &str = "file_name";
/// Key of `Meta::extra`: seconds and nanoseconds since 1970.
const CAPTURE_TIME: &str = "capture_time";
