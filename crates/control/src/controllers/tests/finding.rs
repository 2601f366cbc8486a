//! Finding controllers by name (AI-313, AI-331, AI-902).

use std::fs;

use super::*;
use crate::module::ModuleId;

#[test]
fn ai_313_a_controller_is_found_by_id_and_by_tag() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    fixture.tag(ADMIN, &id, &["t"]).unwrap();
    let found = fixture.find(ANNA, &id).unwrap();
    assert!(Arc::ptr_eq(&found, &fixture.find(ANNA, "t").unwrap()));
    assert!(Arc::ptr_eq(
        &found,
        &fixture.find(ANNA, &id.to_uppercase()).unwrap()
    ));
    // From memory: nothing was loaded since the upload.
    assert_eq!((fixture.compiled(), fixture.loaded()), (1, 1));
}

#[test]
fn ai_313_unknown_names() {
    let fixture = Fixture::new();
    let refused = |name: &str| fixture.refused(ANNA, name);
    let not_found = |message: &str| (Code::NotFound, message.to_owned());
    let invalid = |message: &str| (Code::InvalidRequest, message.to_owned());
    assert_eq!(refused("nice"), not_found("tag nice not found"));
    assert_eq!(refused(""), not_found("tag  not found"));
    assert_eq!(refused("../x"), not_found("tag ../x not found"));
    assert_eq!(refused("a\0"), not_found("tag a\0 not found"));
    assert_eq!(
        refused("abcdefabcdefabcdefab"),
        not_found("tag abcdefabcdefabcdefab not found")
    );
    assert_eq!(
        refused("abcdefabcdefabcdefabc"),
        invalid("invalid module_id")
    );
    assert_eq!(refused(&"0".repeat(63)), invalid("invalid module_id"));
    assert_eq!(refused(&"0".repeat(65)), invalid("invalid module_id"));
    assert_eq!(refused(&"0".repeat(64)), not_found("module not found"));
    assert!(refused(&"x".repeat(100_000)).1.len() < 300);
}

#[test]
fn ai_331_github_references_stand_for_tags() {
    let fixture = Fixture::new();
    let (first, second) = (
        fixture.upload(ADMIN, &module(1)),
        fixture.upload(ADMIN, &module(2)),
    );
    fixture.tag(ADMIN, &first, &["repo-latest"]).unwrap();
    fixture.tag(ADMIN, &second, &["jsctrl-latest"]).unwrap();
    let (first, second) = (
        fixture.find(ADMIN, &first).unwrap(),
        fixture.find(ADMIN, &second).unwrap(),
    );
    let found = |name: &str| fixture.find(INFER, name).unwrap();
    for name in [
        "gh:user/repo",
        "gh:user/repo/v1.2",
        "gh:user/repo/v0",
        "gh:user/repo/v1.2-rc1",
        "gh:user/repo/latest",
    ] {
        assert!(Arc::ptr_eq(&found(name), &first), "{name}");
    }
    for name in ["gh:user/repo/jsctrl", "gh:user/other/jsctrl/v1.2.3"] {
        assert!(Arc::ptr_eq(&found(name), &second), "{name}");
    }
    let invalid = |message: &str| (Code::InvalidRequest, message.to_owned());
    for name in [
        "gh:user/other",
        "gh:user/repo/pyctrl",
        "gh:user/repo/vx",
        "gh:user/repo/v1-",
        "gh:u/../x",
    ] {
        assert_eq!(
            fixture.refused(ANNA, name),
            invalid("gh: modules are disabled"),
            "{name}"
        );
    }
    for name in [
        "gh:",
        "gh:user",
        "gh:/repo",
        "gh:user/",
        "gh:user/repo/",
        "gh:user/repo/a/b",
        "gh:user/repo/a/v1/v2",
    ] {
        let expected = "gh: expected gh:USER/REPO[/SELECTOR][/vX.Y]";
        assert_eq!(fixture.refused(ANNA, name), invalid(expected), "{name}");
    }
}

#[test]
fn ai_902_who_may_run_what() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    fixture.tag(ADMIN, &id, &["public", "carl.public"]).unwrap();
    fixture.tag(ANNA, &id, &["anna.private"]).unwrap();
    let may = |user, name: &str| fixture.find(user, name).is_ok();
    for name in ["public", "carl.public", "anna.private", &id] {
        assert!(
            may(ADMIN, name) && may(ANNA, name) && may(BERT, name),
            "{name}"
        );
    }
    assert!(may(INFER, "public") && may(INFER, "carl.public"));
    let denied = |name: &str| fixture.refused(INFER, name);
    let expected = "permission denied for tag anna.private".to_owned();
    assert_eq!(denied("anna.private"), (Code::PermissionDenied, expected));
    assert_eq!(denied(&id).0, Code::PermissionDenied);
    // Whether such a module exists is not shown either.
    assert_eq!(denied(&"0".repeat(64)), denied(&id));
    // Its own tags, also those that are not public.
    let carl = SteerUser {
        may_control: true,
        ..INFER
    };
    fixture.tag(carl, &id, &["carl.private"]).unwrap();
    assert!(may(INFER, "carl.private"));
    // One that loses its public mark.
    fixture.tag(ANNA, &id, &["anna.private"]).unwrap();
    fixture.tag(ADMIN, &id, &["anna.private"]).unwrap();
    assert!(may(INFER, "anna.private"));
    fixture.tag(ANNA, &id, &["anna.private"]).unwrap();
    assert!(!may(INFER, "anna.private"));
}

#[test]
fn ai_321_an_artefact_is_loaded_from_the_store_or_made_again() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    let fixture = fixture.restarted("host 1");
    fixture.find(ANNA, &id).unwrap();
    assert_eq!((fixture.compiled(), fixture.loaded()), (0, 1));
    // Another engine.
    let fixture = fixture.restarted("host 2");
    fixture.find(ANNA, &id).unwrap();
    assert_eq!((fixture.compiled(), fixture.loaded()), (1, 1));
    let fixture = fixture.restarted("host 2");
    fixture.find(ANNA, &id).unwrap();
    assert_eq!((fixture.compiled(), fixture.loaded()), (0, 1));
    // Damage.
    let files = fs::read_dir(fixture.folder.path().join("cache")).unwrap();
    for path in files.map(|entry| entry.unwrap().path()) {
        if path
            .extension()
            .is_some_and(|extension| extension == "cwasm")
        {
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    }
    let fixture = fixture.restarted("host 2");
    fixture.find(ANNA, &id).unwrap();
    assert_eq!((fixture.compiled(), fixture.loaded()), (1, 1));
    // Many requests at once prepare it once.
    let fixture = fixture.restarted("host 3");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| fixture.find(ANNA, &id).unwrap());
        }
    });
    assert_eq!(fixture.compiled(), 1);
}

#[test]
fn ai_604_a_module_without_callbacks_can_only_be_run() {
    let fixture = Fixture::new();
    let wat = r#"(module (memory (export "memory") 1)
        (func (export "main") (param i32 i32) (result i32) (i32.const 0)))"#;
    let id = fixture.upload(ANNA, &wat::parse_str(wat).unwrap());
    let expected = "invalid module: it has no callbacks, so it can only be run by itself";
    assert_eq!(
        fixture.refused(ANNA, &id),
        (Code::InvalidRequest, expected.to_owned())
    );
    assert!(fixture.controllers.find_to_run(ANNA, &id).is_ok());
}

/// AI-1090
#[test]
fn ai_313_programs_that_nothing_uses_leave_memory() {
    let fixture = Fixture::with(|options| options.loaded_bytes_max = 0);
    let (first, second) = (
        fixture.upload(ANNA, &module(1)),
        fixture.upload(ANNA, &module(2)),
    );
    assert_eq!(fixture.loaded(), 2);
    // One is always kept: the newest.
    drop(fixture.find(ANNA, &second).unwrap());
    assert_eq!(fixture.loaded(), 2);
    let running = fixture.find(ANNA, &first).unwrap();
    assert_eq!(fixture.loaded(), 3);
    // What runs stays, however many others come.
    drop(fixture.find(ANNA, &second).unwrap());
    assert_eq!(fixture.loaded(), 4);
    assert!(Arc::ptr_eq(&running, &fixture.find(ANNA, &first).unwrap()));
    assert_eq!(fixture.loaded(), 4);
    assert_eq!(fixture.compiled(), 2);
}

/// AI-1090
#[test]
fn ai_313_programs_in_use_take_at_most_so_many_bytes_together() {
    let bytes = Fixture::new()
        .controllers
        .upload(ANNA, module(1).into())
        .unwrap()
        .compiled_size;
    let fixture = Fixture::with(|options| options.used_bytes_max = 2 * bytes);
    let ids = [1, 2, 3].map(|number| fixture.upload(ANNA, &module(number)));
    let overloaded = (
        Code::Overloaded,
        "the controllers that run leave no memory for another: try again later".to_owned(),
    );
    let [first, second] = [0, 1].map(|place: usize| fixture.find(ANNA, &ids[place]).unwrap());
    assert_eq!(fixture.refused(ANNA, &ids[2]), overloaded);
    // What runs has its memory already.
    drop(fixture.find(ANNA, &ids[0]).unwrap());
    drop(second);
    drop(fixture.find(ANNA, &ids[2]).unwrap());
    // One that is deleted while it runs stays in memory too.
    let second = fixture.find(ANNA, &ids[1]).unwrap();
    fixture.controllers.delete_module(ADMIN, &ids[0]).unwrap();
    fixture.upload(ANNA, &module(1));
    assert_eq!(fixture.refused(ANNA, &ids[0]), overloaded);
    drop(first);
    drop(fixture.find(ANNA, &ids[0]).unwrap());
    drop(second);
}

/// AI-1090
#[test]
fn ai_313_programs_that_are_loaded_take_memory_twice() {
    let fixture = Fixture::new();
    let uploaded = fixture.controllers.upload(ANNA, module(1).into()).unwrap();
    let second = fixture.upload(ANNA, &module(2));
    let limited = |folder, bytes| {
        Fixture::in_folder(folder, "host 1", move |options| {
            options.used_bytes_max = bytes;
        })
    };
    let fixture = limited(fixture.folder, 2 * uploaded.compiled_size - 1);
    let refused = fixture.refused(ANNA, &uploaded.module_id);
    assert_eq!((refused.0, fixture.loaded()), (Code::Overloaded, 0));
    let fixture = limited(fixture.folder, 2 * uploaded.compiled_size);
    drop(fixture.find(ANNA, &uploaded.module_id).unwrap());
    drop(fixture.find(ANNA, &second).unwrap());
}

#[test]
fn ai_323_uses_are_noted_in_the_store() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    let path = fixture.folder.path().join(format!("cache/{id}.wasm"));
    let used = || {
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs()
    };
    fixture.find(ANNA, &id).unwrap();
    assert_eq!(used(), START);
    // Not at each request.
    fixture.now.store(START + 59, Ordering::SeqCst);
    fixture.find(ANNA, &id).unwrap();
    assert_eq!(used(), START);
    fixture.now.store(START + 60, Ordering::SeqCst);
    fixture.find(ANNA, &id).unwrap();
    assert_eq!(used(), START + 60);
}

/// What another process that shares the folder then loads needs no compiler.
#[test]
fn ai_852_a_prepared_module_has_its_artefact_and_stays_in_use() {
    let fixture = Fixture::new();
    let id = ModuleId::parse(&fixture.upload(ANNA, &module(1))).unwrap();
    let server = fixture.restarted("host 2");
    let program = server.controllers.prepare(id).unwrap();
    assert_eq!(server.compiled(), 1);
    assert!(server.controllers.loaded().in_use(&id));
    let host = Arc::new(Host {
        key: "host 2".to_owned(),
        ..Host::default()
    });
    let store = StoreOptions::new(server.folder.path().join("cache"));
    let options = ControllersOptions::new(store, CompilerOptions::new(CompilerPlace::InProcess));
    let runtime = Controllers::open(Arc::clone(&host), options).unwrap();
    runtime.find(ANNA, &id.to_string()).unwrap();
    assert_eq!(host.compiled.load(Ordering::SeqCst), 0);
    drop(program);
    assert!(!server.controllers.loaded().in_use(&id));
}
