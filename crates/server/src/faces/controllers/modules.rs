//! Uploads modules and manages their tags (AI-901, AI-902).

use axum::body::Bytes;
use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    ModuleInfo, ModulePage, SteerRefusal, TagInfo, TagPage, UploadedModule,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::endpoint::{AskedAction, ControllersContext};
use super::{body, refusals};
use crate::http::rejection::Rejection;

/// `POST /v1/controllers`: the body is the module, whatever its type is called.
pub(super) async fn upload(
    context: &ControllersContext,
    asked: AskedAction,
) -> Result<Value, Rejection> {
    // Before the body, which may be long.
    asked.require_control()?;
    let AskedAction {
        parts,
        body,
        rights,
        ..
    } = asked;
    let max = context.config.module_bytes;
    let module = body::whole(&parts, body, max, "invalid module: a module").await?;
    // After the body: a slow client delays no other.
    let turn = context.upload_turn().await?;
    let uploaded =
        context.ask_store_in_turn(turn, move |store| store.upload(rights.as_user(), module));
    let UploadedModule {
        module_id,
        wasm_size,
        compiled_size,
        time_ms,
    } = uploaded.await?;
    Ok(json!({
        "module_id": module_id, "wasm_size": wasm_size, "compiled_size": compiled_size, "time": time_ms,
    }))
}

/// `GET /v1/controllers`, with the optional `limit` and `after` of the query.
pub(super) async fn list(
    context: &ControllersContext,
    asked: AskedAction,
) -> Result<Bytes, Rejection> {
    asked.require_control()?;
    let page = AskedPage::of(asked.parts.uri.query().unwrap_or_default())?;
    let rights = asked.rights;
    let modules = context.ask_store(move |store| {
        let page = ModulePage {
            limit: page.limit,
            after: page.after.as_deref(),
        };
        module_list(&store.modules(rights.as_user(), page)?)
    });
    modules.await
}

/// `GET /v1/controllers/ID`.
pub(super) async fn describe(
    context: &ControllersContext,
    mut asked: AskedAction,
) -> Result<Bytes, Rejection> {
    asked.require_control()?;
    let id = asked.take_name();
    let rights = asked.rights;
    let module = context.ask_store(move |store| {
        let module = store.module(rights.as_user(), &id)?;
        encoded(&ShownModule::from(&module))
    });
    module.await
}

/// `DELETE /v1/controllers/ID`.
pub(super) async fn delete(
    context: &ControllersContext,
    mut asked: AskedAction,
) -> Result<(), Rejection> {
    asked.require_control()?;
    let id = asked.take_name();
    let rights = asked.rights;
    context
        .ask_store(move |store| store.delete_module(rights.as_user(), &id))
        .await
}

/// `GET /v1/controllers/tags`, with the optional `prefix`, `limit` and `after` of the query.
pub(super) async fn tags(
    context: &ControllersContext,
    asked: AskedAction,
) -> Result<Bytes, Rejection> {
    let page = AskedPage::of(asked.parts.uri.query().unwrap_or_default())?;
    let rights = asked.rights;
    let tags = context.ask_store(move |store| {
        if rights.is_admin || rights.may_control {
            return tag_list(&store.tags(page.asked())?);
        }
        tag_list(&page.of_user(store.tags(TagPage::default())?, &rights.user)?)
    });
    tags.await
}

/// `POST /v1/controllers/tags`.
pub(super) async fn set_tags(
    context: &ControllersContext,
    asked: AskedAction,
) -> Result<Bytes, Rejection> {
    asked.require_control()?;
    let AskedAction {
        parts,
        body,
        rights,
        ..
    } = asked;
    let max = context.config.body_bytes.min(TAGS_BYTES_MAX);
    let bytes = body::whole(&parts, body, max, "the request").await?;
    let members = body::object(&bytes)?;
    let module_id = text(&members, "module_id")?;
    let tags = names_of_tags(members.get("tags"))?;
    let set = context
        .ask_store(move |store| tag_list(&store.set_tags(rights.as_user(), &module_id, &tags)?));
    set.await
}

/// `DELETE /v1/controllers/tags/TAG`.
pub(super) async fn delete_tag(
    context: &ControllersContext,
    asked: AskedAction,
    tag: String,
) -> Result<(), Rejection> {
    asked.require_control()?;
    let rights = asked.rights;
    context
        .ask_store(move |store| store.delete_tags(rights.as_user(), &[tag]))
        .await
}

/// The page of tags or modules that a query asks for.
struct AskedPage {
    prefix: String,
    /// From 1 to [`PAGE_MAX`].
    limit: usize,
    after: Option<String>,
}

impl AskedPage {
    fn asked(&self) -> TagPage<'_> {
        TagPage {
            prefix: &self.prefix,
            limit: self.limit,
            after: self.after.as_deref(),
        }
    }

    /// The page of what a user may run, of all tags: public ones, and its own. Cut into pages here, so that those of others neither
    /// take places nor show by the tag that begins one.
    fn of_user(&self, mut tags: Vec<TagInfo>, user: &str) -> Result<Vec<TagInfo>, SteerRefusal> {
        let is_own = |tag: &str| {
            let rest = tag.strip_prefix(user).filter(|_| !user.is_empty());
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        tags.retain(|info| info.public || is_own(&info.tag));
        if let Some(after) = &self.after {
            let Some(position) = tags.iter().position(|info| info.tag == *after) else {
                return Err(SteerRefusal {
                    code: Code::NotFound,
                    reason: ErrorReason::UNKNOWN_CONTROLLER,
                    message: format!("tag {} not found", clip::shown(after)),
                });
            };
            tags.drain(..=position);
        }
        tags.retain(|info| info.tag.starts_with(&self.prefix));
        tags.truncate(self.limit);
        Ok(tags)
    }

    fn of(query: &str) -> Result<Self, Rejection> {
        let mut page = Self {
            prefix: String::new(),
            limit: PAGE_MAX,
            after: None,
        };
        for pair in query.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_encoding::percent_decode_str(value).decode_utf8();
            let value = value.map_err(|_| refusals::invalid(format!("{name} must be UTF-8")))?;
            match name {
                "prefix" => page.prefix = value.into_owned(),
                "after" => page.after = Some(value.into_owned()),
                "limit" => {
                    let limit = value.parse().ok();
                    let wrong = || refusals::invalid("limit must be a number, 0 or more");
                    page.limit = match limit.ok_or_else(wrong)? {
                        0 => PAGE_MAX,
                        limit => PAGE_MAX.min(limit),
                    };
                }
                _ => {}
            }
        }
        Ok(page)
    }
}

fn text(members: &Map<String, Value>, name: &str) -> Result<String, Rejection> {
    let value = members.get(name).and_then(Value::as_str);
    let text = value.map(str::to_owned);
    text.ok_or_else(|| refusals::invalid(format!("{name} is required: a string")))
}

/// A list of strings; one string also.
fn names_of_tags(value: Option<&Value>) -> Result<Vec<String>, Rejection> {
    let wrong = || refusals::invalid("tags is required: a list of strings");
    let tags = match value {
        Some(Value::String(tag)) => vec![tag.clone()],
        Some(Value::Array(tags)) => {
            let texts = tags.iter().map(|tag| tag.as_str().map(str::to_owned));
            texts.collect::<Option<_>>().ok_or_else(wrong)?
        }
        _ => return Err(wrong()),
    };
    if tags.len() > TAGS_MAX {
        let message = format!("too many tags: at most {TAGS_MAX} in one request");
        return Err(refusals::invalid(message));
    }
    Ok(tags)
}

/// The JSON of a list, made where waiting is allowed: it may have a megabyte.
fn tag_list(tags: &[TagInfo]) -> Result<Bytes, SteerRefusal> {
    let tags = tags.iter().map(ShownTag::from).collect();
    encoded(&TagList { tags })
}

fn module_list(modules: &[ModuleInfo]) -> Result<Bytes, SteerRefusal> {
    let modules = modules.iter().map(ShownModule::from).collect();
    encoded(&ModuleList { modules })
}

fn encoded(value: &impl Serialize) -> Result<Bytes, SteerRefusal> {
    let json = serde_json::to_vec(value).map_err(|error| SteerRefusal {
        code: Code::Internal,
        reason: ErrorReason::INTERNAL_ERROR,
        message: error.to_string(),
    });
    json.map(Bytes::from)
}

#[derive(Serialize)]
struct TagList<'a> {
    tags: Vec<ShownTag<'a>>,
}

#[derive(Serialize)]
struct ShownTag<'a> {
    tag: &'a str,
    module_id: &'a str,
    updated_at: u64,
    updated_by: &'a str,
    wasm_size: u64,
    compiled_size: u64,
    public: bool,
}

impl<'a> From<&'a TagInfo> for ShownTag<'a> {
    fn from(info: &'a TagInfo) -> Self {
        Self {
            tag: &info.tag,
            module_id: &info.module_id,
            updated_at: info.updated_at,
            updated_by: &info.updated_by,
            wasm_size: info.wasm_size,
            compiled_size: info.compiled_size,
            public: info.public,
        }
    }
}

#[derive(Serialize)]
struct ModuleList<'a> {
    modules: Vec<ShownModule<'a>>,
}

#[derive(Serialize)]
struct ShownModule<'a> {
    module_id: &'a str,
    dialect: &'a str,
    imports: &'a [String],
    wasm_size: u64,
    compiled_size: u64,
    owner: &'a str,
    created: u64,
    tags: &'a [String],
}

impl<'a> From<&'a ModuleInfo> for ShownModule<'a> {
    fn from(module: &'a ModuleInfo) -> Self {
        Self {
            module_id: &module.module_id,
            dialect: module.dialect,
            imports: &module.imports,
            wasm_size: module.wasm_size,
            compiled_size: module.compiled_size,
            owner: &module.owner,
            created: module.created,
            tags: &module.tags,
        }
    }
}

/// Tags or modules of one answer: a store may have a hundred thousand.
const PAGE_MAX: usize = 1_000;
/// Tags of one request.
const TAGS_MAX: usize = 64;
/// Bytes of such a request: 64 tags of 50 bytes need far less.
const TAGS_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_902_a_user_sees_public_tags_and_its_own() {
        let info = |(tag, public): (&str, bool)| TagInfo {
            tag: tag.to_owned(),
            module_id: String::new(),
            updated_at: 0,
            updated_by: String::new(),
            wasm_size: 0,
            compiled_size: 0,
            public,
        };
        let all = [
            ("ann.b", false),
            ("ben.x", false),
            ("all", true),
            ("anna.c", false),
            (".d", false),
            ("ann.a", true),
        ];
        let page = |user: &str, query: &str| {
            let page = AskedPage::of(query).ok().unwrap();
            let tags = page.of_user(all.map(info).to_vec(), user);
            let names = |tags: Vec<TagInfo>| tags.into_iter().map(|info| info.tag).collect();
            tags.map(names).map_err(|refusal| refusal.code)
        };
        for (user, query, expect) in [
            ("ann", "", Ok("ann.b all ann.a")),
            ("", "", Ok("all ann.a")),
            ("ann", "limit=2", Ok("ann.b all")),
            ("ann", "limit=1&after=ann.b", Ok("all")),
            ("ann", "prefix=ann&after=all", Ok("ann.a")),
            ("ann", "limit=0&after=all", Ok("ann.a")),
            // That it exists does not show either.
            ("ann", "after=ben.x", Err(Code::NotFound)),
            ("ben", "prefix=ben", Ok("ben.x")),
        ] {
            let found: Result<Vec<String>, Code> = page(user, query);
            let expect = expect.map(|names| names.split(' ').map(str::to_owned).collect());
            assert_eq!(found, expect, "{user} {query}");
        }
    }
}
