//! The ops on modules and tags (AI-311, AI-312, AI-1003).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use sapwood_proto::steer::{ControllerStore, ModuleInfo, ModulePage, SteerUser, TagInfo, TagPage};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::envelope::{Envelope, RequestError};

/// Runs one op. May wait for the disk and the compiler.
pub(super) fn run(
    store: &dyn ControllerStore,
    user: SteerUser<'_>,
    envelope: Envelope,
) -> Result<Value, RequestError> {
    let op = envelope.op.clone();
    match op.as_str() {
        "mk_module" => upload(store, user, envelope),
        "set_tags" => set_tags(store, user, envelope),
        "get_tags" => get_tags(store, envelope),
        "list_modules" => {
            let modules = store.modules(user, ModulePage::default())?;
            Ok(json!({"modules": modules.iter().map(module).collect::<Vec<_>>()}))
        }
        "describe_module" => {
            let ModuleName { module_id } = envelope.decode()?;
            Ok(module(&store.module(user, &module_id)?))
        }
        "delete_module" => {
            let ModuleName { module_id } = envelope.decode()?;
            store.delete_module(user, &module_id)?;
            Ok(json!({}))
        }
        "delete_tags" => {
            let TagNames { tags } = envelope.decode()?;
            store.delete_tags(user, &tags.list())?;
            Ok(json!({}))
        }
        _ => Err(RequestError::bad_op()),
    }
}

fn upload(
    store: &dyn ControllerStore,
    user: SteerUser<'_>,
    envelope: Envelope,
) -> Result<Value, RequestError> {
    #[derive(Deserialize)]
    struct Upload {
        binary: String,
    }
    let Upload { binary } = envelope.decode()?;
    let module = STANDARD
        .decode(binary)
        .map_err(|error| RequestError::user(format!("invalid module: not base64: {error}")))?;
    let uploaded = store.upload(user, Bytes::from(module))?;
    Ok(json!({
        "module_id": uploaded.module_id,
        "wasm_size": uploaded.wasm_size,
        "compiled_size": uploaded.compiled_size,
        "time": uploaded.time_ms,
    }))
}

fn set_tags(
    store: &dyn ControllerStore,
    user: SteerUser<'_>,
    envelope: Envelope,
) -> Result<Value, RequestError> {
    #[derive(Deserialize)]
    struct SetTags {
        module_id: String,
        tags: OneOrMany,
    }
    let SetTags { module_id, tags } = envelope.decode()?;
    Ok(tag_list(&store.set_tags(user, &module_id, &tags.list())?))
}

fn get_tags(store: &dyn ControllerStore, envelope: Envelope) -> Result<Value, RequestError> {
    #[derive(Deserialize)]
    struct GetTags {
        #[serde(default)]
        prefix: String,
        #[serde(default)]
        limit: usize,
        after: Option<String>,
    }
    let GetTags {
        prefix,
        limit,
        after,
    } = envelope.decode()?;
    Ok(tag_list(&store.tags(TagPage {
        prefix: &prefix,
        limit,
        after: after.as_deref(),
    })?))
}

#[derive(Deserialize)]
struct ModuleName {
    module_id: String,
}

#[derive(Deserialize)]
struct TagNames {
    tags: OneOrMany,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn list(self) -> Vec<String> {
        match self {
            Self::One(tag) => vec![tag],
            Self::Many(tags) => tags,
        }
    }
}

fn tag_list(tags: &[TagInfo]) -> Value {
    let tag = |info: &TagInfo| {
        json!({
            "tag": info.tag,
            "module_id": info.module_id,
            "updated_at": info.updated_at,
            "updated_by": info.updated_by,
            "wasm_size": info.wasm_size,
            "compiled_size": info.compiled_size,
        })
    };
    json!({"tags": tags.iter().map(tag).collect::<Vec<_>>()})
}

fn module(info: &ModuleInfo) -> Value {
    json!({
        "module_id": info.module_id,
        "dialect": info.dialect,
        "imports": info.imports,
        "wasm_size": info.wasm_size,
        "compiled_size": info.compiled_size,
        "owner": info.owner,
        "created": info.created,
        "tags": info.tags,
    })
}
