//! With the real host.

use sapwood_proto::steer::ControllerStore;
use tempfile::TempDir;

use super::super::{Controllers, ControllersOptions};
use super::{ANNA, module};
use crate::compiler::{ArtefactCompiler, CompilerOptions, CompilerPlace};
use crate::host::{Host, HostConfig, compile};
use crate::module::{ModuleId, ModuleLimits, check};
use crate::store::StoreOptions;

fn open(folder: &TempDir, config: HostConfig) -> Controllers<Host> {
    let options = ControllersOptions::new(
        StoreOptions::new(folder.path().join("cache")),
        CompilerOptions::new(CompilerPlace::InProcess),
    );
    Controllers::open(Host::new(config).unwrap(), options).unwrap()
}

/// AI-321
#[test]
fn ai_311_an_uploaded_controller_is_ready_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let controllers = open(&folder, HostConfig::default());
    let bytes = module(1);
    let uploaded = controllers.upload(ANNA, bytes.clone().into()).unwrap();
    let id = ModuleId::of(&bytes);
    assert_eq!(uploaded.module_id, id.to_string());
    let program = controllers.find(ANNA, &uploaded.module_id).unwrap();
    assert!(program.id() == id && program.steers());
    assert!(Host::in_use(&program));
    drop(controllers);
    assert!(!Host::in_use(&program));
    // From the store, in another process.
    let controllers = open(&folder, HostConfig::default());
    assert!(artefact(&folder, &controllers, id).exists());
    let found = controllers.find(ANNA, &uploaded.module_id).unwrap();
    assert_eq!(found.id(), id);
    // A host with other options has artefacts of its own.
    let counting = HostConfig {
        fuel: Some(1000),
        ..HostConfig::default()
    };
    let controllers = open(&folder, counting);
    let path = artefact(&folder, &controllers, id);
    assert!(!path.exists());
    controllers.find(ANNA, &uploaded.module_id).unwrap();
    assert!(path.exists());
}

fn artefact(folder: &TempDir, controllers: &Controllers<Host>, id: ModuleId) -> std::path::PathBuf {
    let key = controllers.host().key();
    folder.path().join(format!("cache/{id}-{key}.cwasm"))
}

/// A compiler child makes artefacts without a host, so without a pool of instances.
#[test]
fn ai_732_artefacts_of_a_child_fit_the_host() {
    let checked = check(&module(1), &ModuleLimits::default()).unwrap();
    let config = HostConfig::default();
    let artefact = compile(&config, &checked).unwrap();
    let host = Host::new(config).unwrap();
    assert!(host.load(&checked, &artefact).unwrap().steers());
    // The key of a configuration is the same each time.
    assert_eq!(host.key(), Host::new(HostConfig::default()).unwrap().key());
}
