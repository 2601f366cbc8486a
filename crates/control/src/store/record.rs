//! [`ModuleRecord`]: what is noted beside a module, `ID-sys.json` (AI-321).

use serde::{Deserialize, Serialize};

use crate::module::{Abi, CheckedModule};

/// What is noted beside a module when it is uploaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleRecord {
    /// When it was uploaded, in Unix seconds; 0 if that is unknown.
    pub created: u64,
    /// Who uploaded it; empty if that is unknown.
    pub owner: String,
    /// That was an admin.
    pub by_admin: bool,
    /// What the check found, so that listings need not check again; absent in files of the reference.
    pub found: Option<FoundInModule>,
}

/// What listings show of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundInModule {
    /// The interface of its callbacks.
    pub abi: Abi,
    /// Its imports, as `module.name`, in order.
    pub imports: Vec<String>,
}

impl From<&CheckedModule> for FoundInModule {
    fn from(module: &CheckedModule) -> Self {
        Self {
            abi: module.abi,
            imports: module.imports.clone(),
        }
    }
}

/// `created` and `auth` are the reference's, which ignores the others.
#[derive(Serialize, Deserialize)]
struct RecordFile {
    created: u64,
    auth: AuthFile,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dialect: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    imports: Option<Vec<String>>,
}

#[derive(Serialize, Deserialize)]
struct AuthFile {
    user: String,
    #[serde(default)]
    is_admin: bool,
}

impl ModuleRecord {
    pub(super) fn parse(json: &[u8]) -> Option<Self> {
        let file: RecordFile = serde_json::from_slice(json).ok()?;
        let abi = file.dialect.and_then(|name| {
            [Abi::P1, Abi::P2]
                .into_iter()
                .find(|abi| abi.name() == name)
        });
        Some(Self {
            created: file.created,
            owner: file.auth.user,
            by_admin: file.auth.is_admin,
            found: abi
                .zip(file.imports)
                .map(|(abi, imports)| FoundInModule { abi, imports }),
        })
    }

    pub(super) fn json(&self) -> serde_json::Result<Vec<u8>> {
        let found = self.found.as_ref();
        serde_json::to_vec(&RecordFile {
            created: self.created,
            auth: AuthFile {
                user: self.owner.clone(),
                is_admin: self.by_admin,
            },
            dialect: found.map(|found| found.abi.name().to_owned()),
            imports: found.map(|found| found.imports.clone()),
        })
    }
}
