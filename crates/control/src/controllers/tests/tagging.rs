//! Tags (AI-312).

use sapwood_proto::steer::TagPage;

use super::*;

#[test]
fn ai_312_tags_are_checked_in_order() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    let unknown = "0".repeat(64);
    let set = |id: &str, tags: &[&str]| fixture.tag(ANNA, id, tags).unwrap_err();
    let (long, hex) = ("/".repeat(51), "1".repeat(21));
    // Each line breaks its own rule and all that follow.
    assert_eq!(set("xyz", &[&long]), "invalid module_id");
    assert_eq!(set(&id[1..], &[&long]), "invalid module_id");
    assert_eq!(
        set(&format!("{}g", &id[1..]), &["anna.t"]),
        "invalid module_id"
    );
    assert_eq!(set(&unknown, &[&long]), "module not found");
    assert_eq!(set(&id, &[&long]), "tag name too long");
    assert_eq!(set(&id, &[&"1".repeat(51)]), "tag name too long");
    assert_eq!(set(&id, &[&hex]), "tag name looks too hex");
    assert_eq!(set(&id, &["1"]), "tag name not identifier");
    assert_eq!(
        set(&id, &["bert.t"]),
        "permission denied for tag name bert.t: begin it with anna."
    );
    // Tag by tag: the first that fails decides, not the first rule.
    assert!(set(&id, &["anna.a", "bert.t", &long]).starts_with("permission denied for tag name"));
    assert_eq!(set(&id, &["anna.a", &long, "bert.t"]), "tag name too long");
    // One that fails: none is set.
    assert!(
        fixture
            .controllers
            .tags(TagPage::default())
            .unwrap()
            .is_empty()
    );
    let set = fixture
        .tag(ANNA, &id, &["anna.b", "anna.a", "anna.b"])
        .unwrap();
    assert_eq!(names(&set), ["anna.b", "anna.a", "anna.b"]);
}

#[test]
fn ai_312_who_may_set_which_tag() {
    let fixture = Fixture::new();
    let id = fixture.upload(ANNA, &module(1));
    let may = |user, tag: &str| fixture.tag(user, &id, &[tag]).is_ok();
    assert!(may(ANNA, "anna.x") && !may(ANNA, "anna") && !may(ANNA, "annax") && !may(ANNA, "x"));
    assert!(may(ADMIN, "x") && may(ADMIN, "anna.y"));
    assert!(!may(BERT, "anna.x") && may(BERT, "bert.x"));
    assert!(!may(INFER, "carl.x"));
    let nobody = SteerUser { name: "", ..ANNA };
    assert!(!may(nobody, "x") && !may(nobody, ".x"));
    let message = fixture.tag(INFER, "xyz", &[]).unwrap_err();
    assert_eq!(message, "changing tags needs a key with scope control");
}

#[test]
fn ai_312_what_is_noted_of_a_tag() {
    let fixture = Fixture::new();
    let uploaded = fixture.controllers.upload(ANNA, module(1).into()).unwrap();
    let id = uploaded.module_id;
    let set = fixture.tag(ANNA, &id.to_uppercase(), &["anna.x"]).unwrap();
    let expected = TagInfo {
        tag: "anna.x".to_owned(),
        module_id: id.clone(),
        updated_at: START,
        updated_by: "anna".to_owned(),
        wasm_size: uploaded.wasm_size,
        compiled_size: uploaded.compiled_size,
        public: false,
    };
    assert_eq!(set, std::slice::from_ref(&expected));
    assert_eq!(
        fixture.controllers.tags(TagPage::default()).unwrap(),
        [expected]
    );
    // An admin makes it public, its owner private again.
    assert!(fixture.tag(ADMIN, &id, &["anna.x"]).unwrap()[0].public);
    assert!(fixture.controllers.tags(TagPage::default()).unwrap()[0].public);
    assert!(!fixture.tag(ANNA, &id, &["anna.x"]).unwrap()[0].public);
}

/// AI-1090
#[test]
fn ai_312_a_call_sets_at_most_64_tags() {
    let fixture = Fixture::new();
    let id = fixture.upload(ADMIN, &module(1));
    let tags: Vec<String> = (0..65).map(|number| format!("t{number}")).collect();
    let set = |count| fixture.controllers.set_tags(ADMIN, &id, &tags[..count]);
    assert_eq!(
        set(65).unwrap_err().message,
        "more than 64 tags in one call"
    );
    assert_eq!(set(64).unwrap().len(), 64);
    assert_eq!(set(0).unwrap(), []);
    let delete = |count| fixture.controllers.delete_tags(ADMIN, &tags[..count]);
    assert_eq!(
        delete(65).unwrap_err().message,
        "more than 64 tags in one call"
    );
    delete(64).unwrap();
}

/// AI-1003
#[test]
fn ai_312_tags_are_listed_newest_first() {
    let fixture = Fixture::new();
    let id = fixture.upload(ADMIN, &module(1));
    fixture.tag(ADMIN, &id, &["old", "b.x"]).unwrap();
    fixture.now.fetch_add(1, Ordering::SeqCst);
    fixture.tag(ADMIN, &id, &["b.z", "a", "b.y"]).unwrap();
    let list = |page| fixture.controllers.tags(page).unwrap();
    let all = TagPage::default();
    assert_eq!(names(&list(all)), ["a", "b.y", "b.z", "b.x", "old"]);
    let page = TagPage { limit: 2, ..all };
    assert_eq!(names(&list(page)), ["a", "b.y"]);
    let page = TagPage {
        limit: 2,
        after: Some("b.y"),
        ..all
    };
    assert_eq!(names(&list(page)), ["b.z", "b.x"]);
    let page = TagPage {
        limit: 2,
        after: Some("b.x"),
        ..all
    };
    assert_eq!(names(&list(page)), ["old"]);
    assert!(
        list(TagPage {
            after: Some("old"),
            ..all
        })
        .is_empty()
    );
    let page = TagPage {
        prefix: "b.",
        limit: 1,
        after: Some("b.y"),
    };
    assert_eq!(names(&list(page)), ["b.z"]);
    let gone = TagPage {
        after: Some("gone"),
        ..all
    };
    let refusal = fixture.controllers.tags(gone).unwrap_err();
    assert_eq!(
        (refusal.code, &refusal.message[..]),
        (Code::NotFound, "tag gone not found")
    );
}
