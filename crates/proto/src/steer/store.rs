//! [`ControllerStore`]: uploaded controllers and their tags, as faces manage them (AI-311 to AI-331, AI-1003).

use bytes::Bytes;

use super::{SteerRefusal, SteerUser};

/// The answer to an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadedModule {
    /// Lower-case hex SHA-256 of the uploaded bytes.
    pub module_id: String,
    /// Bytes of the upload.
    pub wasm_size: u64,
    /// Bytes of the compiled form.
    pub compiled_size: u64,
    /// Milliseconds that it took.
    pub time_ms: u64,
}

/// One tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagInfo {
    /// The name.
    pub tag: String,
    /// The module that it names.
    pub module_id: String,
    /// When it was set last, in Unix seconds.
    pub updated_at: u64,
    /// The user that set it last.
    pub updated_by: String,
    /// Bytes of the module's upload.
    pub wasm_size: u64,
    /// Bytes of its compiled form.
    pub compiled_size: u64,
    /// An admin set it, so everybody may run it (AI-902).
    pub public: bool,
}

/// What is known of one module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleInfo {
    /// Lower-case hex SHA-256 of the uploaded bytes.
    pub module_id: String,
    /// The generation of the interface that it was built for: `p1` or `p2`.
    pub dialect: &'static str,
    /// The imports, as `module.name`, each once, in order.
    pub imports: Vec<String>,
    /// Bytes of the upload.
    pub wasm_size: u64,
    /// Bytes of the compiled form.
    pub compiled_size: u64,
    /// The user that uploaded it first.
    pub owner: String,
    /// When, in Unix seconds.
    pub created: u64,
    /// The tags that name it, sorted.
    pub tags: Vec<String>,
}

/// Which tags [`ControllerStore::tags`] lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagPage<'a> {
    /// Only those that begin with this.
    pub prefix: &'a str,
    /// At most this many; 0 for all.
    pub limit: usize,
    /// Only those after this one, in the order of the listing.
    pub after: Option<&'a str>,
}

/// Which modules [`ControllerStore::modules`] lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModulePage<'a> {
    /// At most this many; 0 for all.
    pub limit: usize,
    /// Only those after this id.
    pub after: Option<&'a str>,
}

/// Stores controllers and their tags. All methods may wait for the disk and the compiler, so they are called where
/// waiting is allowed.
pub trait ControllerStore: Send + Sync {
    /// Checks, compiles and stores a module.
    ///
    /// # Errors
    /// `invalid_module`, beginning `invalid module: `, or the user may not upload.
    fn upload(&self, user: SteerUser<'_>, module: Bytes) -> Result<UploadedModule, SteerRefusal>;

    /// Lets tags name a module, all or none (AI-312). Returns those set, in the order asked for.
    ///
    /// # Errors
    /// `invalid module_id`, `module not found`, an invalid or forbidden tag.
    fn set_tags(
        &self,
        user: SteerUser<'_>,
        module_id: &str,
        tags: &[String],
    ) -> Result<Vec<TagInfo>, SteerRefusal>;

    /// Lists tags, newest first, ties by name.
    ///
    /// # Errors
    /// The folder cannot be read.
    fn tags(&self, page: TagPage<'_>) -> Result<Vec<TagInfo>, SteerRefusal>;

    /// Lists the modules that the user may see, by id: all for an admin, their own otherwise.
    ///
    /// # Errors
    /// `after` is no module id, or the folder cannot be read.
    fn modules(
        &self,
        user: SteerUser<'_>,
        page: ModulePage<'_>,
    ) -> Result<Vec<ModuleInfo>, SteerRefusal>;

    /// Describes one module.
    ///
    /// # Errors
    /// There is no such module.
    fn module(&self, user: SteerUser<'_>, module_id: &str) -> Result<ModuleInfo, SteerRefusal>;

    /// Deletes tags, all or none.
    ///
    /// # Errors
    /// There is no such tag, or it is not the user's.
    fn delete_tags(&self, user: SteerUser<'_>, tags: &[String]) -> Result<(), SteerRefusal>;

    /// Deletes a module; running requests keep it.
    ///
    /// # Errors
    /// There is no such module, it is not the user's, or a tag names it.
    fn delete_module(&self, user: SteerUser<'_>, module_id: &str) -> Result<(), SteerRefusal>;
}
