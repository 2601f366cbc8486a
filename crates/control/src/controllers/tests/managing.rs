//! Listing, describing and deleting (AI-1003).

use std::fs;

use sapwood_proto::steer::{ModuleInfo, ModulePage};

use super::*;

#[test]
fn ai_1003_modules_are_listed_to_their_owners_and_admins() {
    let fixture = Fixture::new();
    let mine = fixture.controllers.upload(ANNA, module(1).into()).unwrap();
    fixture.upload(BERT, &module(2));
    fixture.tag(ADMIN, &mine.module_id, &["z", "a"]).unwrap();
    let listed = |user| {
        fixture
            .controllers
            .modules(user, ModulePage::default())
            .unwrap()
    };
    assert_eq!((listed(ADMIN).len(), listed(INFER).len()), (2, 0));
    let expected = ModuleInfo {
        module_id: mine.module_id.clone(),
        dialect: "p2",
        imports: vec!["env.aici_host_eos_token".to_owned()],
        wasm_size: mine.wasm_size,
        compiled_size: mine.compiled_size,
        owner: "anna".to_owned(),
        created: START,
        tags: vec!["a".to_owned(), "z".to_owned()],
    };
    assert_eq!(listed(ANNA), std::slice::from_ref(&expected));
    let described = |user| fixture.controllers.module(user, &mine.module_id);
    assert_eq!(described(ANNA).as_ref(), Ok(&expected));
    assert_eq!(described(BERT).as_ref(), Ok(&expected));
    assert_eq!(described(INFER).unwrap_err().code, Code::PermissionDenied);
    let refused = |id: &str| fixture.controllers.module(ADMIN, id).unwrap_err().message;
    assert_eq!(refused("a"), "invalid module_id");
    assert_eq!(refused(&"0".repeat(64)), "module not found");
}

#[test]
fn ai_1003_modules_are_listed_in_pages() {
    let fixture = Fixture::new();
    let mut ids: Vec<_> = (1..=3)
        .map(|number| fixture.upload(ANNA, &module(number)))
        .collect();
    fixture.upload(BERT, &module(4));
    ids.sort_unstable();
    let page = |after, limit| {
        let page = ModulePage { limit, after };
        let listed = fixture.controllers.modules(ANNA, page)?;
        Ok(listed.into_iter().map(|info| info.module_id).collect())
    };
    let (first, rest) = ids.split_at(2);
    assert_eq!(page(None, 2), Ok(first.to_vec()));
    assert_eq!(page(Some(&first[1]), 2), Ok(rest.to_vec()));
    let wrong: Result<Vec<String>, SteerRefusal> = page(Some("a"), 2);
    assert_eq!(wrong.unwrap_err().message, "invalid module_id");
}

/// AI-321
#[test]
fn ai_1003_modules_of_the_reference_are_described_too() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    let before = fixture.controllers.module(ADMIN, &id).unwrap();
    let record = fixture.folder.path().join(format!("cache/{id}-sys.json"));
    fs::write(
        &record,
        r#"{"created":5,"auth":{"user":"dora","is_admin":false}}"#,
    )
    .unwrap();
    let described = fixture.controllers.module(ADMIN, &id).unwrap();
    assert_eq!(
        described,
        ModuleInfo {
            owner: "dora".to_owned(),
            created: 5,
            ..before.clone()
        }
    );
    // Without any record its owner is unknown, and an admin sees it alone.
    fs::remove_file(&record).unwrap();
    let described = fixture.controllers.module(ADMIN, &id).unwrap();
    assert_eq!(
        described,
        ModuleInfo {
            owner: String::new(),
            created: 0,
            ..before
        }
    );
    assert!(
        fixture
            .controllers
            .modules(ANNA, ModulePage::default())
            .unwrap()
            .is_empty()
    );
    // A file that is no module does not hide others.
    let other = fixture.upload(ANNA, &module(2));
    fs::write(fixture.folder.path().join(format!("cache/{id}.wasm")), "x").unwrap();
    let listed = fixture
        .controllers
        .modules(ADMIN, ModulePage::default())
        .unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].module_id, other);
}

#[test]
fn ai_1003_tags_are_deleted_by_those_who_may_set_them() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    fixture
        .tag(ADMIN, &id, &["public", "anna.a", "bert.b"])
        .unwrap();
    let delete = |user, tags: &[&str]| {
        let tags: Vec<String> = tags.iter().map(|tag| (*tag).to_owned()).collect();
        let deleted = fixture.controllers.delete_tags(user, &tags);
        deleted.map_err(|refusal| (refusal.code, refusal.message))
    };
    let denied = delete(ANNA, &["anna.a", "bert.b"]).unwrap_err();
    assert_eq!(denied.0, Code::PermissionDenied);
    assert!(
        denied
            .1
            .starts_with("permission denied for tag name bert.b")
    );
    let missing = delete(ANNA, &["anna.a", "anna.x"]).unwrap_err();
    assert_eq!(missing, (Code::NotFound, "tag anna.x not found".to_owned()));
    assert_eq!(
        delete(INFER, &["public"]).unwrap_err().0,
        Code::PermissionDenied
    );
    // None of these deleted any.
    assert!(
        ["public", "anna.a", "bert.b"]
            .iter()
            .all(|tag| fixture.find(ADMIN, tag).is_ok())
    );
    delete(ANNA, &["anna.a"]).unwrap();
    delete(ADMIN, &["bert.b", "public"]).unwrap();
    assert_eq!(fixture.refused(ADMIN, "public").1, "tag public not found");
}

#[test]
fn ai_1003_modules_are_deleted_and_running_requests_keep_them() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    fixture.tag(ANNA, &id, &["anna.t"]).unwrap();
    let running = fixture.find(ANNA, "anna.t").unwrap();
    let delete = |user, id: &str| {
        let deleted = fixture.controllers.delete_module(user, id);
        deleted.map_err(|refusal| (refusal.code, refusal.message))
    };
    assert_eq!(delete(INFER, &id).unwrap_err().0, Code::PermissionDenied);
    assert_eq!(
        delete(BERT, &id).unwrap_err().1,
        "permission denied: only its owner and admins delete a module"
    );
    assert_eq!(delete(ANNA, "x").unwrap_err().1, "invalid module_id");
    assert_eq!(
        delete(ANNA, &id).unwrap_err(),
        (
            Code::FailedPrecondition,
            "the module has tags: delete anna.t first".to_owned()
        )
    );
    fixture
        .controllers
        .delete_tags(ANNA, &["anna.t".to_owned()])
        .unwrap();
    delete(ANNA, &id).unwrap();
    assert!(!running.is_empty());
    assert_eq!(fixture.refused(ANNA, &id).1, "module not found");
    assert_eq!(delete(ANNA, &id).unwrap_err().1, "module not found");
    // Uploaded again it is another's.
    fixture.upload(BERT, &module(1));
    assert_eq!(fixture.compiled(), 2);
    delete(ADMIN, &id).unwrap();
}

/// A request that started before keeps its module; those after get the new one.
#[test]
fn ai_1003_a_tag_is_resolved_when_a_request_starts() {
    let fixture = Fixture::new();
    let (first, second) = (
        fixture.upload(ANNA, &module(1)),
        fixture.upload(ANNA, &module(2)),
    );
    fixture.tag(ANNA, &first, &["anna.t"]).unwrap();
    let before = fixture.find(ANNA, "anna.t").unwrap();
    fixture.tag(ANNA, &second, &["anna.t"]).unwrap();
    let after = fixture.find(ANNA, "anna.t").unwrap();
    assert_ne!(before, after);
    assert_eq!(after, fixture.find(ANNA, &second).unwrap());
}

/// What another process does is seen at once, since only the disk is shared.
#[test]
fn ai_322_another_process_is_noticed() {
    let ours = Fixture::new();
    let id = ours.upload(ANNA, &module(1));
    let options = ControllersOptions::new(
        StoreOptions::new(ours.folder.path().join("cache")),
        CompilerOptions::new(CompilerPlace::InProcess),
    );
    let host = Host {
        key: "host 1".to_owned(),
        ..Host::default()
    };
    let theirs = Controllers::open(Arc::new(host), options).unwrap();
    theirs.set_tags(ADMIN, &id, &["t".to_owned()]).unwrap();
    ours.find(INFER, "t").unwrap();
    theirs.delete_tags(ADMIN, &["t".to_owned()]).unwrap();
    assert_eq!(ours.refused(INFER, "t").1, "tag t not found");
    theirs.delete_module(ADMIN, &id).unwrap();
    assert_eq!(ours.refused(ANNA, &id).1, "module not found");
}
