//! Uploads, tags and the routes that clients find their way with.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use sapwood_proto::steer::{ControllerStore, SteerUser};
use sapwood_tests::until;
use tokio::net::TcpStream;

use super::*;

const MODULE: &[u8] = b"\0asm0000";

fn id() -> String {
    format!("{:064x}", MODULE.len())
}

/// The face over this store.
fn over(store: MemoryStore) -> Config {
    Config {
        store: Some(Arc::new(store)),
        ..Config::default()
    }
}

/// A store with the module, and these tags of it.
fn filled(tags: &[String]) -> MemoryStore {
    let store = MemoryStore::default();
    let user = SteerUser {
        name: "localhost",
        is_admin: true,
        may_control: true,
    };
    store.upload(user, MODULE.into()).unwrap();
    store.set_tags(user, &id(), tags).unwrap();
    store
}

/// A server without keys that has the module.
async fn with_module() -> Running {
    configured(&["demo"], Vec::new(), over(filled(&[]))).await.0
}

fn tagging(tags: &str) -> Vec<u8> {
    format!(r#"{{"module_id":"{}","tags":{tags}}}"#, id()).into_bytes()
}

#[tokio::test]
async fn ai_901_an_upload_is_the_raw_module_and_is_answered_as_mk_module() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let answer = ask(&server, "", "POST", "/v1/controllers", MODULE).await;
    assert_eq!(answer.head.status, 200, "{}", answer.text());
    let expect = format!(
        r#"{{"module_id":"{}","wasm_size":8,"compiled_size":7,"time":3}}"#,
        id()
    );
    assert_eq!(answer.text(), expect);
    let answer = ask(&server, "", "POST", "/v1/controllers", b"no module").await;
    assert_eq!(error(&answer), (400, "invalid_module".into()));
    assert!(
        answer.json()["message"]
            .as_str()
            .unwrap()
            .starts_with("invalid module: ")
    );
}

/// D-54
#[tokio::test]
async fn ai_901_few_uploads_of_a_caller_wait_for_their_turn() {
    let (store, gate) = MemoryStore::gated();
    let (server, _) = configured(&["demo"], keys(), over(store)).await;
    let upload = async |who| ask(&server, who, "POST", "/v1/controllers", MODULE).await;
    let mut uploads: FuturesUnordered<_> = (0..6).map(|_| upload("anna")).collect();
    // One is compiled and four wait.
    let refused = uploads.next().await.unwrap();
    assert_eq!(error(&refused), (429, "server_overloaded".into()));
    // That is anna's limit, and not that of others.
    uploads.push(upload("root"));
    drop(gate);
    let answers: Vec<_> = uploads.map(|answer| answer.head.status).collect().await;
    assert_eq!(answers, [200; 6]);
}

/// AI-1090: the limit and one byte more.
#[tokio::test]
async fn ai_901_a_module_has_a_limit() {
    let config = Config {
        module_bytes: MODULE.len(),
        ..over(MemoryStore::default())
    };
    let (server, _) = configured(&["demo"], Vec::new(), config).await;
    let answer = ask(&server, "", "POST", "/v1/controllers", MODULE).await;
    assert_eq!(answer.head.status, 200);
    let more = [MODULE, b"x"].concat();
    let answer = ask(&server, "", "POST", "/v1/controllers", &more).await;
    assert_eq!(answer.head.status, 413);
    assert!(
        answer.json()["message"]
            .as_str()
            .unwrap()
            .starts_with("invalid module: ")
    );
    // Without a length in the head.
    let chunked = [
        head("POST", "/v1/controllers", &["transfer-encoding: chunked"]).into_bytes(),
        b"9\r\n\0asm00000\r\n0\r\n\r\n".to_vec(),
    ];
    let answer = Wire::connect(server.address)
        .await
        .ask(chunked.concat())
        .await;
    assert_eq!(answer.head.status, 413);
}

#[tokio::test]
async fn ai_901_tags_are_set_listed_and_removed() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let tags = "/v1/controllers/tags";
    let unknown = ask(&server, "", "POST", tags, &tagging(r#"["a"]"#)).await;
    assert_eq!(error(&unknown), (404, "controller_not_found".into()));
    ask(&server, "", "POST", "/v1/controllers", MODULE).await;
    let answer = ask(&server, "", "POST", tags, &tagging(r#"["b","a"]"#)).await;
    let set = answer.json();
    assert_eq!(set["tags"][0]["tag"], "b", "{set}");
    assert_eq!(set["tags"][1]["updated_by"], "localhost");
    assert_eq!(set["tags"][1]["public"], true);
    // One string also.
    ask(&server, "", "POST", tags, &tagging(r#""c""#)).await;
    let names = async |query: &str| {
        let listed = ask(&server, "", "GET", &format!("{tags}{query}"), b"")
            .await
            .json();
        let listed = listed["tags"].as_array().unwrap().iter();
        listed
            .map(|info| info["tag"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names("").await, ["a", "b", "c"]);
    assert_eq!(names("?limit=1&after=%61").await, ["b"]);
    assert_eq!(names("?prefix=c").await, ["c"]);
    let wrong = ask(&server, "", "GET", &format!("{tags}?limit=-1"), b"").await;
    assert_eq!(error(&wrong), (400, "invalid_value".into()));
    let removed = ask(&server, "", "DELETE", &format!("{tags}/c"), b"").await;
    assert_eq!((removed.head.status, removed.text()), (204, ""));
    let removed = ask(&server, "", "DELETE", &format!("{tags}/c"), b"").await;
    assert_eq!(error(&removed), (404, "controller_not_found".into()));
    assert_eq!(names("").await, ["a", "b"]);
}

#[tokio::test]
async fn ai_901_requests_to_tag_are_checked() {
    let server = with_module().await;
    let many = |count: usize| format!("[{}]", vec!["\"a\""; count].join(","));
    for (body, status, code) in [
        (b"{".to_vec(), 400, "invalid_json"),
        (b"[]".to_vec(), 400, "invalid_json"),
        (br#"{"tags":[]}"#.to_vec(), 400, "invalid_value"),
        (tagging("7"), 400, "invalid_value"),
        (tagging("[7]"), 400, "invalid_value"),
        (tagging(&many(65)), 400, "invalid_value"),
        (vec![b' '; (64 << 10) + 1], 413, "request_too_large"),
    ] {
        let answer = ask(&server, "", "POST", "/v1/controllers/tags", &body).await;
        assert_eq!(error(&answer), (status, code.into()));
    }
    let answer = ask(
        &server,
        "",
        "POST",
        "/v1/controllers/tags",
        &tagging(&many(64)),
    )
    .await;
    assert_eq!(answer.head.status, 200);
}

#[tokio::test]
async fn ai_901_modules_are_described_and_removed() {
    let server = with_module().await;
    ask(
        &server,
        "",
        "POST",
        "/v1/controllers/tags",
        &tagging(r#""a""#),
    )
    .await;
    let path = format!("/v1/controllers/{}", id());
    let described = ask(&server, "", "GET", &path, b"").await.json();
    assert_eq!(described["dialect"], "p1");
    assert_eq!(described["imports"][0], "env.aici_host_stop");
    assert_eq!(
        (&described["owner"], &described["tags"][0]),
        (&"localhost".into(), &"a".into())
    );
    let listed = ask(&server, "", "GET", "/v1/controllers", b"").await.json();
    assert_eq!(listed["modules"], Value::from(vec![described]));
    assert_eq!(
        ask(&server, "", "DELETE", &path, b"").await.head.status,
        204
    );
    let gone = ask(&server, "", "GET", &path, b"").await;
    assert_eq!(error(&gone), (404, "controller_not_found".into()));
}

#[tokio::test]
async fn ai_902_the_scope_control_uploads_and_the_name_of_the_key_is_the_user() {
    let (server, _) = server(&["demo"], keys()).await;
    let nobody = ask(&server, "", "POST", "/v1/controllers", MODULE).await;
    assert_eq!(error(&nobody), (401, "invalid_api_key".into()));
    let app = ask(&server, "app", "POST", "/v1/controllers", MODULE).await;
    assert_eq!(error(&app), (403, "insufficient_scope".into()));
    let anna = ask(&server, "anna", "POST", "/v1/controllers", MODULE).await;
    assert_eq!(anna.head.status, 200);
    let tags = "/v1/controllers/tags";
    let app = ask(&server, "app", "POST", tags, &tagging(r#""app.x""#)).await;
    assert_eq!(error(&app), (403, "insufficient_scope".into()));
    let foreign = ask(&server, "anna", "POST", tags, &tagging(r#""x""#)).await;
    assert_eq!(error(&foreign), (403, "insufficient_scope".into()));
    let own = ask(&server, "anna", "POST", tags, &tagging(r#""anna.x""#))
        .await
        .json();
    assert_eq!(own["tags"][0]["public"], false);
    let public = ask(&server, "root", "POST", tags, &tagging(r#""x""#))
        .await
        .json();
    assert_eq!(public["tags"][0]["public"], true);
    // Whoever runs controllers may list the tags that they may run.
    for (key, count) in [("app", 1), ("anna", 2)] {
        let listed = ask(&server, key, "GET", tags, b"").await.json();
        assert_eq!(listed["tags"].as_array().unwrap().len(), count, "{key}");
    }
    for (method, path) in [
        ("GET", "/v1/controllers".to_owned()),
        ("GET", format!("/v1/controllers/{}", id())),
        ("DELETE", format!("/v1/controllers/{}", id())),
        ("DELETE", format!("{tags}/x")),
    ] {
        let app = ask(&server, "app", method, &path, b"").await;
        assert_eq!(
            error(&app),
            (403, "insufficient_scope".into()),
            "{method} {path}"
        );
    }
}

/// AI-902: the reference believes these headers from anyone.
#[tokio::test]
async fn ai_902_headers_that_name_a_user_are_ignored() {
    let (server, source) = server(&["demo"], keys()).await;
    let body = r#"{"controller":"moves","controller_arg":"=a"}"#;
    let length = format!("content-length: {}", body.len());
    let headers = [
        "api-key: app",
        "x-user-id: root",
        "x-user-role: admin",
        &*length,
    ];
    let request = head("POST", "/v1/run", &headers) + body;
    let answer = Wire::connect(server.address).await.ask(request).await;
    assert_eq!(answer.head.status, 200, "{}", answer.text());
    assert_eq!(
        *source.users.lock().unwrap(),
        [("app".to_owned(), false, false)]
    );
}

#[tokio::test]
async fn ai_901_without_a_store_nothing_is_uploaded() {
    let (server, _) = configured(&["demo"], Vec::new(), Config::default()).await;
    for (method, path) in [("POST", "/v1/controllers"), ("GET", "/v1/controllers/tags")] {
        let answer = ask(&server, "", method, path, b"").await;
        assert_eq!(error(&answer), (400, "unsupported_operation".into()));
    }
}

#[tokio::test]
async fn ai_901_one_model_has_one_prefix_and_several_have_one_each() {
    let (one, _) = server(&["demo"], Vec::new()).await;
    let info = ask(&one, "", "GET", "/proxy/info", b"").await;
    assert_eq!(info.text(), r#"{"prefixes":["/"]}"#);
    let (several, _) = server(&["a", "b c"], Vec::new()).await;
    let info = ask(&several, "", "GET", "/proxy/info", b"").await.json();
    assert_eq!(
        info["prefixes"],
        serde_json::json!(["/aici/a/", "/aici/b%20c/"])
    );
    let listed = ask(&several, "", "GET", "/v1/models", b"").await.json();
    let names = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| &model["id"]);
    assert_eq!(names.collect::<Vec<_>>(), ["a", "b c"]);
    let listed = ask(&several, "", "GET", "/aici/b%20c/v1/models", b"")
        .await
        .json();
    assert_eq!(listed["data"][0]["id"], "b c");
    let unknown = ask(&several, "", "GET", "/aici/c/v1/models", b"").await;
    assert_eq!(error(&unknown), (404, "model_not_found".into()));
    // The routes of the store are the same below each.
    let uploaded = ask(&several, "", "POST", "/aici/a/v1/controllers", MODULE).await;
    assert_eq!(uploaded.head.status, 200);
    let listed = ask(&several, "", "GET", "/v1/controllers", b"")
        .await
        .json();
    assert_eq!(listed["modules"].as_array().unwrap().len(), 1);
}

/// A client that lets nothing through would otherwise keep each list that it asks for in the server's memory.
#[tokio::test(flavor = "multi_thread")]
async fn tr_609_a_long_list_that_an_http2_client_does_not_read_is_cut() {
    let tags: Vec<String> = (0..200).map(|number| format!("tag-{number:03}")).collect();
    let faces = Faces {
        controllers: over(filled(&tags)),
        ..Faces::default()
    };
    let mut config = server::Config::default();
    config.listener.stall = Duration::from_millis(100);
    let server = Running::start_faces(config, Kernel::new(), faces, Vec::new()).await;
    let cancelled = &server.shared.metrics.cancelled;
    let stalled = cancelled.with_label_values(&["stall"]);
    // A window for nothing, and one for a part.
    for (window, cut) in [(0, 1), (100, 2)] {
        let socket = TokioIo::new(TcpStream::connect(server.address).await.unwrap());
        let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(window)
            .handshake(socket)
            .await
            .unwrap();
        tokio::spawn(connection);
        let uri = format!("http://{}/v1/controllers/tags", server.address);
        let request = http::Request::get(uri).body(Empty::<Bytes>::new()).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.status().as_u16(), 200);
        until("the answer is let go", || stalled.get() == cut).await;
        // Without a window the stream itself ends with its connection: hyper asks for the rest only when there is room.
        if window > 0 {
            let read = answer.into_body().collect().await;
            assert!(read.is_err(), "it must not look whole");
        }
    }
}

/// A store may have a hundred thousand, and each answer is held in memory.
#[tokio::test]
async fn ai_902_lists_come_in_pages_of_a_thousand() {
    let tags: Vec<String> = (0..1_001)
        .map(|number| format!("tag-{number:04}"))
        .collect();
    let (server, _) = configured(&["demo"], Vec::new(), over(filled(&tags))).await;
    ask(&server, "", "POST", "/v1/controllers", b"\0asm00000").await;
    let count = async |path: &str, list: &str| {
        let listed = ask(&server, "", "GET", path, b"").await.json();
        listed[list].as_array().map(Vec::len)
    };
    let tags = "/v1/controllers/tags";
    for (query, expect) in [
        ("", 1_000),
        ("?limit=0", 1_000),
        ("?limit=5000", 1_000),
        ("?after=tag-0999", 1),
    ] {
        let path = format!("{tags}{query}");
        assert_eq!(count(&path, "tags").await, Some(expect), "{query}");
    }
    let modules = "/v1/controllers";
    assert_eq!(count(modules, "modules").await, Some(2));
    let first = format!("{modules}?limit=1");
    assert_eq!(count(&first, "modules").await, Some(1));
    let rest = format!("{modules}?after={}", id());
    assert_eq!(count(&rest, "modules").await, Some(1));
}
