//! [`ControllerStore`] for [`Controllers`]: what faces and the runtime's side channel call (AI-312, AI-1003).

use std::cmp::Reverse;
use std::collections::HashMap;

use bytes::Bytes;
use sapwood_proto::code::Code;
use sapwood_proto::steer::{
    ControllerStore, ModuleInfo, ModulePage, SteerRefusal, SteerUser, TagInfo, TagPage,
    UploadedModule,
};

use super::{Controllers, access, name};
use crate::compiler::ArtefactCompiler;
use crate::module::{self, ModuleId};
use crate::store::{FoundInModule, ModuleRecord, StoreError, TagChange, check_tag_name};

impl<C: ArtefactCompiler> ControllerStore for Controllers<C> {
    fn upload(&self, user: SteerUser<'_>, module: Bytes) -> Result<UploadedModule, SteerRefusal> {
        self.upload_module(user, &module)
    }

    fn set_tags(
        &self,
        user: SteerUser<'_>,
        module_id: &str,
        tags: &[String],
    ) -> Result<Vec<TagInfo>, SteerRefusal> {
        access::may_change_tags(user)?;
        limit_tags(tags)?;
        // The order of these checks is AI-312's.
        let module_id = name::module_id(module_id)?;
        if self.store.module_size(module_id)?.is_none() {
            return Err(StoreError::ModuleNotFound.into());
        }
        for tag in tags {
            check_tag_name(tag)
                .map_err(|error| name::refused(Code::InvalidRequest, &error.to_string()))?;
            access::may_change_tag(user, tag)?;
        }
        Ok(self.store.set_tags(TagChange {
            tags,
            module_id,
            updated_by: user.name,
            updated_at: self.unix_seconds(),
            public: user.is_admin,
            key: self.key,
        })?)
    }

    fn tags(&self, page: TagPage<'_>) -> Result<Vec<TagInfo>, SteerRefusal> {
        let mut tags = self.store.listed_tags()?;
        tags.sort_by(|a, b| {
            let newest_first = Reverse(a.updated_at).cmp(&Reverse(b.updated_at));
            newest_first.then_with(|| a.tag.cmp(&b.tag))
        });
        if let Some(after) = page.after {
            let position = tags.iter().position(|tag| tag.tag == after);
            // From the beginning it would never end.
            let position = position.ok_or_else(|| name::unknown_tag(after))?;
            tags.drain(..=position);
        }
        tags.retain(|tag| tag.tag.starts_with(page.prefix));
        if page.limit > 0 {
            tags.truncate(page.limit);
        }
        Ok(tags)
    }

    fn modules(
        &self,
        user: SteerUser<'_>,
        page: ModulePage<'_>,
    ) -> Result<Vec<ModuleInfo>, SteerRefusal> {
        let after = page.after.map(name::module_id).transpose()?;
        let limit = if page.limit == 0 {
            usize::MAX
        } else {
            page.limit
        };
        let tags = NamedModules::of(self.store.listed_tags()?);
        let mut infos = Vec::new();
        for id in self.store.module_ids()? {
            if after.is_some_and(|after| id <= after) {
                continue;
            }
            if infos.len() >= limit {
                break;
            }
            let record = self.store.record(id)?;
            if !access::sees(user, &record.owner) {
                continue;
            }
            match self.describe(id, record, &tags) {
                Ok(info) => infos.push(info),
                // One that is damaged, or was deleted meanwhile, does not hide the others.
                Err(error) => tracing::warn!(%id, %error, "a module cannot be listed"),
            }
        }
        Ok(infos)
    }

    fn module(&self, user: SteerUser<'_>, module_id: &str) -> Result<ModuleInfo, SteerRefusal> {
        let id = name::module_id(module_id)?;
        let record = self.store.record(id)?;
        access::may_describe(user, &record.owner)?;
        self.describe(id, record, &NamedModules::of(self.store.listed_tags()?))
    }

    fn delete_tags(&self, user: SteerUser<'_>, tags: &[String]) -> Result<(), SteerRefusal> {
        access::may_change_tags(user)?;
        limit_tags(tags)?;
        for tag in tags {
            if self.store.tag(tag)?.is_none() {
                return Err(name::unknown_tag(tag));
            }
            access::may_change_tag(user, tag)?;
        }
        Ok(self.store.remove_tags(tags)?)
    }

    fn delete_module(&self, user: SteerUser<'_>, module_id: &str) -> Result<(), SteerRefusal> {
        access::may_change_tags(user)?;
        let id = name::module_id(module_id)?;
        if self.store.module_size(id)?.is_none() {
            return Err(StoreError::ModuleNotFound.into());
        }
        access::may_delete(user, &self.store.record(id)?.owner)?;
        self.store.remove_module(id)?;
        self.loaded().remove(&id);
        Ok(())
    }
}

/// The tags of each module, by its id: a listing looks them up for thousands of modules.
struct NamedModules(HashMap<String, Vec<String>>);

impl NamedModules {
    fn of(tags: Vec<TagInfo>) -> Self {
        let mut named: HashMap<_, Vec<_>> = HashMap::new();
        for TagInfo { module_id, tag, .. } in tags {
            named.entry(module_id).or_default().push(tag);
        }
        Self(named)
    }
}

impl<C: ArtefactCompiler> Controllers<C> {
    fn describe(
        &self,
        id: ModuleId,
        record: ModuleRecord,
        tags: &NamedModules,
    ) -> Result<ModuleInfo, SteerRefusal> {
        let wasm_size = self.store.module_size(id)?;
        let wasm_size = wasm_size.ok_or(StoreError::ModuleNotFound)?;
        let found = match record.found {
            Some(found) => found,
            None => self.examine(id)?,
        };
        let module_id = id.to_string();
        let mut tags = tags.0.get(&module_id).cloned().unwrap_or_default();
        tags.sort_unstable();
        Ok(ModuleInfo {
            dialect: found.abi.name(),
            imports: found.imports,
            wasm_size,
            compiled_size: self.store.artefact_size(id, self.key)?.unwrap_or_default(),
            owner: record.owner,
            created: record.created,
            tags,
            module_id,
        })
    }

    /// Checks a module that another program has stored.
    fn examine(&self, id: ModuleId) -> Result<FoundInModule, SteerRefusal> {
        let stored = self
            .store
            .read_module(id, self.limits.module_bytes as u64)?;
        let bytes = stored.ok_or(StoreError::ModuleNotFound)?;
        Ok((&module::check(&bytes, &self.limits)?).into())
    }
}

fn limit_tags(tags: &[String]) -> Result<(), SteerRefusal> {
    if tags.len() > TAGS_PER_CALL_MAX {
        let message = format!("more than {TAGS_PER_CALL_MAX} tags in one call");
        return Err(name::refused(Code::InvalidRequest, &message));
    }
    Ok(())
}

/// Tags set or deleted at once.
const TAGS_PER_CALL_MAX: usize = 64;
