//! With a host that compiles by copying, and counts.

mod finding;
mod managing;
mod tagging;
mod uploading;
mod wasm;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use sapwood_proto::code::Code;
use sapwood_proto::steer::{ControllerStore, SteerRefusal, SteerUser, TagInfo};
use tempfile::TempDir;

use super::{Controllers, ControllersOptions};
use crate::compiler::{ArtefactCompiler, CompilerOptions, CompilerPlace};
use crate::host::Artefact;
use crate::module::{CheckedModule, ModuleError};
use crate::store::{ArtefactKey, StoreOptions};

/// Compiles by copying.
#[derive(Default)]
struct Host {
    key: String,
    compiled: AtomicUsize,
    loaded: AtomicUsize,
    /// What `compile` answers instead.
    fails: Mutex<Option<ModuleError>>,
}

impl ArtefactCompiler for Arc<Host> {
    type Program = Arc<Vec<u8>>;

    fn key(&self) -> ArtefactKey {
        ArtefactKey::of(&self.key)
    }

    fn compile(&self, module: &CheckedModule) -> Result<Artefact, ModuleError> {
        self.compiled.fetch_add(1, Ordering::SeqCst);
        // Others that want the same module get the time to ask for it.
        for _ in 0..100 {
            std::thread::yield_now();
        }
        match &*self.fails.lock().unwrap() {
            Some(error) => Err(error.clone()),
            None => Ok(Artefact::vouched_for(module.instrumented.clone())),
        }
    }

    fn load(
        &self,
        module: &CheckedModule,
        artefact: &Artefact,
    ) -> Result<Arc<Vec<u8>>, ModuleError> {
        let artefact = artefact.as_ref();
        self.loaded.fetch_add(1, Ordering::SeqCst);
        assert_eq!(
            artefact, module.instrumented,
            "only what was compiled from it"
        );
        Ok(Arc::new(artefact.to_vec()))
    }

    fn in_use(program: &Arc<Vec<u8>>) -> bool {
        Arc::strong_count(program) > 1
    }
}

/// Controllers in a folder of their own, with a clock that the test moves.
struct Fixture {
    controllers: Controllers<Arc<Host>>,
    host: Arc<Host>,
    now: Arc<AtomicU64>,
    folder: TempDir,
}

const START: u64 = 1_790_000_000;

impl Fixture {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut ControllersOptions)) -> Self {
        Self::in_folder(tempfile::tempdir().unwrap(), "host 1", change)
    }

    fn in_folder(folder: TempDir, key: &str, change: impl FnOnce(&mut ControllersOptions)) -> Self {
        let host = Arc::new(Host {
            key: key.to_owned(),
            ..Host::default()
        });
        let now = Arc::new(AtomicU64::new(START));
        let mut options = ControllersOptions::new(
            StoreOptions::new(folder.path().join("cache")),
            CompilerOptions::new(CompilerPlace::InProcess),
        );
        let clock = Arc::clone(&now);
        options.clock = Arc::new(move || {
            SystemTime::UNIX_EPOCH + Duration::from_secs(clock.load(Ordering::SeqCst))
        });
        change(&mut options);
        Self {
            controllers: Controllers::open(Arc::clone(&host), options).unwrap(),
            host,
            now,
            folder,
        }
    }

    /// As after a restart, with another build of the host if the key differs.
    fn restarted(self, key: &str) -> Self {
        Self::in_folder(self.folder, key, |_| {})
    }

    fn upload(&self, user: SteerUser<'_>, module: &[u8]) -> String {
        let module = Bytes::copy_from_slice(module);
        self.controllers.upload(user, module).unwrap().module_id
    }

    fn tag(&self, user: SteerUser<'_>, id: &str, tags: &[&str]) -> Result<Vec<TagInfo>, String> {
        let tags: Vec<String> = tags.iter().map(|tag| (*tag).to_owned()).collect();
        let set = self.controllers.set_tags(user, id, &tags);
        set.map_err(|refusal| refusal.message)
    }

    fn find(&self, user: SteerUser<'_>, name: &str) -> Result<Arc<Vec<u8>>, SteerRefusal> {
        self.controllers.find(user, name)
    }

    #[track_caller]
    fn refused(&self, user: SteerUser<'_>, name: &str) -> (Code, String) {
        let refusal = self.find(user, name).unwrap_err();
        (refusal.code, refusal.message)
    }

    fn compiled(&self) -> usize {
        self.host.compiled.load(Ordering::SeqCst)
    }

    fn loaded(&self) -> usize {
        self.host.loaded.load(Ordering::SeqCst)
    }
}

const ADMIN: SteerUser<'_> = SteerUser {
    name: "root",
    is_admin: true,
    may_control: true,
};

/// With scope `control`.
const ANNA: SteerUser<'_> = SteerUser {
    name: "anna",
    is_admin: false,
    may_control: true,
};

const BERT: SteerUser<'_> = SteerUser {
    name: "bert",
    ..ANNA
};

/// With scope `infer` alone.
const INFER: SteerUser<'_> = SteerUser {
    name: "carl",
    is_admin: false,
    may_control: false,
};

/// A P2 controller; each number is another module.
fn module(number: u32) -> Vec<u8> {
    wat::parse_str(format!(
        r#"(module
            (import "env" "aici_host_eos_token" (func (result i32)))
            (memory (export "memory") 1)
            (global (mut i32) (i32.const {number}))
            (func (export "aici_create") (result i32) (i32.const 1))
            (func (export "aici_init_prompt") (param i32))
            (func (export "aici_mid_process") (param i32)))"#
    ))
    .unwrap()
}

fn names(tags: &[TagInfo]) -> Vec<&str> {
    tags.iter().map(|tag| &tag.tag[..]).collect()
}
