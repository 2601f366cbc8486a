//! Uploads (AI-311).

use std::fs;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::ModulePage;

use super::*;

#[test]
fn ai_311_an_upload_is_checked_compiled_and_stored_once() {
    let fixture = Fixture::new();
    let bytes = module(1);
    let upload = || {
        fixture
            .controllers
            .upload(ANNA, bytes.clone().into())
            .unwrap()
    };
    let first = upload();
    assert_eq!(
        first.module_id,
        crate::module::ModuleId::of(&bytes).to_string()
    );
    assert_eq!(first.wasm_size, bytes.len() as u64);
    // The double's compiled form is the instrumented one, which is longer.
    assert!(first.compiled_size > first.wasm_size);
    // The same again is answered from the store.
    let second = upload();
    assert_eq!(
        (second.module_id, second.compiled_size),
        (first.module_id, first.compiled_size)
    );
    assert_eq!(fixture.compiled(), 1);
    // After a restart too.
    let fixture = fixture.restarted("host 1");
    assert_eq!(
        fixture
            .controllers
            .upload(BERT, bytes.clone().into())
            .unwrap()
            .compiled_size,
        first.compiled_size
    );
    assert_eq!(fixture.compiled(), 0);
    // With another engine it is compiled again.
    let fixture = fixture.restarted("host 2");
    fixture.upload(BERT, &bytes);
    assert_eq!(fixture.compiled(), 1);
}

#[test]
fn ai_311_uploads_of_one_module_at_once_compile_once() {
    let fixture = Fixture::new();
    let bytes = Bytes::from(module(1));
    let upload = || {
        fixture
            .controllers
            .upload(ANNA, bytes.clone())
            .unwrap()
            .module_id
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(upload)).collect();
        let ids: Vec<String> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect();
        assert!(ids.iter().all(|id| *id == ids[0]));
    });
    assert_eq!(fixture.compiled(), 1);
    assert_eq!(fixture.loaded(), 1);
}

#[test]
fn ai_311_a_refused_module_is_not_stored() {
    let fixture = Fixture::new();
    let refused = |bytes: Vec<u8>| fixture.controllers.upload(ADMIN, bytes.into()).unwrap_err();
    let refusal = refused(b"text".to_vec());
    assert_eq!(
        refusal.message,
        "invalid module: not a Wasm module in binary form"
    );
    assert_eq!(
        (refusal.code, refusal.reason),
        (Code::InvalidRequest, ErrorReason::INVALID_MODULE)
    );
    for (number, error) in [
        (1, ModuleError::CompileFailed),
        (2, ModuleError::CompileTimeout { seconds: 10 }),
    ] {
        *fixture.host.fails.lock().unwrap() = Some(error.clone());
        let refusal = refused(module(number));
        assert_eq!(refusal.message, error.to_string());
        assert!(refusal.message.starts_with("invalid module: comp"));
        assert_eq!(refusal.code, Code::InvalidRequest);
    }
    *fixture.host.fails.lock().unwrap() = Some(ModuleError::Busy);
    assert_eq!(refused(module(1)).code, Code::Overloaded);
    assert!(
        fixture
            .controllers
            .modules(ADMIN, ModulePage::default())
            .unwrap()
            .is_empty()
    );
    // Of these failures one is remembered: a module that took too long would take as long again.
    *fixture.host.fails.lock().unwrap() = None;
    fixture.upload(ADMIN, &module(1));
    let compiled = fixture.compiled();
    let refusal = refused(module(2));
    assert_eq!(
        refusal.message,
        "invalid module: compilation took longer than 10 s"
    );
    assert_eq!(fixture.compiled(), compiled);
}

/// AI-1090
#[test]
fn ai_311_a_module_has_at_most_so_many_bytes() {
    let bytes = module(1);
    let limited = |limit| Fixture::with(move |options| options.limits.module_bytes = limit);
    limited(bytes.len()).upload(ANNA, &bytes);
    let fixture = limited(bytes.len() - 1);
    let refusal = fixture
        .controllers
        .upload(ANNA, bytes.clone().into())
        .unwrap_err();
    assert_eq!(refusal.code, Code::LimitExceeded);
    let expected = format!("invalid module: larger than {} bytes", bytes.len() - 1);
    assert_eq!(refusal.message, expected);
}

#[test]
fn ai_902_uploading_needs_the_scope_control() {
    let fixture = Fixture::new();
    let refusal = fixture
        .controllers
        .upload(INFER, module(1).into())
        .unwrap_err();
    assert_eq!(refusal.code, Code::PermissionDenied);
    assert_eq!(
        refusal.message,
        "uploading controllers needs a key with scope control"
    );
    assert_eq!(fixture.compiled(), 0);
    fixture.upload(ANNA, &module(1));
    fixture.upload(ADMIN, &module(2));
}

#[test]
fn ai_321_uploading_again_repairs_what_is_damaged() {
    let fixture = Fixture::new();
    let bytes = module(1);
    let id = fixture.upload(ANNA, &bytes);
    let path = fixture.folder.path().join(format!("cache/{id}.wasm"));
    let mut damaged = bytes.clone();
    damaged[20] ^= 1;
    fs::write(&path, damaged).unwrap();
    let fixture = fixture.restarted("host 1");
    let message = fixture.refused(ANNA, &id).1;
    assert_eq!(message, "module not found");
    fixture.upload(BERT, &bytes);
    fixture.find(ANNA, &id).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(fixture.controllers.module(ANNA, &id).unwrap().owner, "anna");
}

/// A load that has read the damaged file does not end the upload that repairs it.
#[test]
fn ai_321_a_load_that_finds_nothing_does_not_fail_an_upload() {
    let fixture = Fixture::new();
    let bytes = module(1);
    let id = crate::module::ModuleId::of(&bytes);
    let found = fixture.controllers.loading.get(id, || {
        // The upload would have the result of this load, and wait for it.
        fixture.upload(ANNA, &bytes);
        Err(crate::store::StoreError::ModuleNotFound.into())
    });
    assert_eq!(found.err().unwrap().message, "module not found");
    fixture.find(ANNA, &id.to_string()).unwrap();
}

#[test]
fn ai_323_a_module_in_use_is_not_evicted() {
    let stored = |bytes: &[u8]| {
        let fixture = Fixture::new();
        let uploaded = fixture
            .controllers
            .upload(ANNA, bytes.to_vec().into())
            .unwrap();
        uploaded.wasm_size + uploaded.compiled_size + 112
    };
    let room = stored(&module(1)) + stored(&module(2));
    let fixture = Fixture::with(|options| options.store.bytes_max = room);
    // As an admin, who may have all of it.
    let first = fixture.upload(ADMIN, &module(1));
    let second = fixture.upload(ADMIN, &module(2));
    // The first was used before the second, and is in use.
    let running = fixture.find(ANNA, &first).unwrap();
    fixture.now.fetch_add(1000, Ordering::SeqCst);
    drop(fixture.find(ANNA, &second).unwrap());
    fixture.upload(ADMIN, &module(3));
    fixture.find(ANNA, &first).unwrap();
    assert_eq!(fixture.refused(ANNA, &second).1, "module not found");
    drop(running);
    fixture.now.fetch_add(1000, Ordering::SeqCst);
    fixture.upload(ADMIN, &module(4));
    assert_eq!(
        fixture
            .controllers
            .modules(ADMIN, ModulePage::default())
            .unwrap()
            .len(),
        2
    );
}
