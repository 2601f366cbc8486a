//! The variables of a run, from outside (AI-1006).

use sapwood_tests::http::Head;

use super::*;

/// A run that goes on until the variable `go` is written.
struct OpenRun {
    wire: Wire,
    id: String,
}

/// A server whose runs last until they are told to stop.
async fn slow(keys: Vec<ApiKey>) -> Running {
    let kernel = Kernel::new();
    let (steering, _) = steering();
    let config = scripted::Config {
        script: scripted::Script::Tokens,
        count: 1 << 20,
        tokens_per_s: 100.0,
        ..scripted::Config::default()
    };
    kernel
        .add(steered_model("demo", spawned(config), steering))
        .unwrap();
    Running::start(kernel, Default::default(), keys).await
}

impl OpenRun {
    async fn begin(server: &Running, who: &str, vars: &str) -> Self {
        let body = format!(
            r#"{{"controller":"until","controller_arg":"go","prompt":"ab","max_tokens":4000{vars}}}"#
        );
        let length = format!("content-length: {}", body.len());
        let key = format!("api-key: {who}");
        let mut headers = vec![&*length];
        headers.extend((!who.is_empty()).then_some(&*key));
        let mut wire = Wire::connect(server.address).await;
        wire.send(head("POST", "/v1/run", &headers) + &body).await;
        let Head { status, .. } = wire.head().await;
        assert_eq!(status, 200);
        let first = String::from_utf8(wire.chunk().await.unwrap()).unwrap();
        let first = first
            .lines()
            .next()
            .unwrap()
            .strip_prefix("data: ")
            .unwrap();
        let initial: Value = serde_json::from_str(first).unwrap();
        let id = initial["id"].as_str().unwrap().to_owned();
        Self { wire, id }
    }

    fn path(&self, rest: &str) -> String {
        format!("/v1/run/{}/vars{rest}", self.id)
    }

    /// Reads the rest of the stream; it ended because the controller stopped it.
    async fn end(mut self) {
        let mut rest = Vec::new();
        while let Some(chunk) = self.wire.chunk().await
            && !chunk.is_empty()
        {
            rest.extend(chunk);
        }
        let rest = String::from_utf8(rest).unwrap();
        assert!(rest.contains(r#""finish_reason":"aici-stop""#), "{rest}");
    }
}

/// A PUT of the variable `name`, with the version that it must have.
async fn put(server: &Running, path: &str, value: &[u8], version: Option<&str>) -> Answer {
    let length = format!("content-length: {}", value.len());
    let required = version.map(|version| format!("if-match: {version}"));
    let mut headers = vec![&*length];
    headers.extend(required.as_deref());
    let mut request = head("PUT", path, &headers).into_bytes();
    request.extend_from_slice(value);
    Wire::connect(server.address).await.ask(request).await
}

#[tokio::test]
async fn ai_1006_variables_are_set_read_and_written_while_a_run_lasts() {
    let server = slow(Vec::new()).await;
    let run = OpenRun::begin(&server, "", r#","vars":{"b":"é","a":""}"#).await;
    let listed = ask(&server, "", "GET", &run.path(""), b"").await;
    let expected = r#"{"vars":{"a":{"version":1,"bytes":0,"value":""},"b":{"version":1,"bytes":2,"value":"é"}}}"#;
    let expected: Value = serde_json::from_str(expected).unwrap();
    assert_eq!(listed.json(), expected);
    let b = run.path("/b");
    let written = put(&server, &b, &[0xff, 0], Some("1")).await;
    assert_eq!(written.text(), r#"{"version":2}"#);
    assert_eq!(written.head.header("etag").as_deref(), Some("\"2\""));
    // Quoted as well, as the header is written elsewhere.
    assert_eq!(
        put(&server, &b, &[0xfe], Some("\"2\"")).await.head.status,
        200
    );
    let stale = put(&server, &b, b"x", Some("1")).await;
    assert_eq!(error(&stale), (412, "version_conflict".into()));
    assert_eq!(stale.json()["message"], "The variable has version 3.");
    let missing = put(&server, &run.path("/new"), b"x", Some("1")).await;
    assert_eq!(error(&missing), (412, "version_conflict".into()));
    for wrong in ["*", "W/\"1\"", "-1", ""] {
        let refused = put(&server, &b, b"x", Some(wrong)).await;
        assert_eq!(error(&refused), (400, "invalid_value".into()), "{wrong}");
    }
    let read = ask(&server, "", "GET", &b, b"").await;
    assert_eq!(read.body, [0xfe]);
    assert_eq!(read.head.header("etag").as_deref(), Some("\"3\""));
    let listed = ask(&server, "", "GET", &run.path(""), b"").await.json();
    assert_eq!(listed["vars"]["b"]["hex"], "fe");
    // A name may have any byte.
    let odd = run.path("/a%2Fb%20");
    assert_eq!(
        put(&server, &odd, b"1", None).await.text(),
        r#"{"version":1}"#
    );
    let listed = ask(&server, "", "GET", &run.path(""), b"").await.json();
    assert_eq!(listed["vars"]["a/b "]["value"], "1");
    let unknown = ask(&server, "", "GET", &run.path("/no"), b"").await;
    assert_eq!(error(&unknown), (404, "variable_not_found".into()));
    let (list, go) = (run.path(""), run.path("/go"));
    put(&server, &go, b"", None).await;
    run.end().await;
    // It has ended: nobody finds it any more.
    for (method, path) in [("GET", &list), ("GET", &go), ("PUT", &go)] {
        let gone = ask(&server, "", method, path, b"").await;
        assert_eq!(
            error(&gone),
            (404, "run_not_found".into()),
            "{method} {path}"
        );
    }
}

#[tokio::test]
async fn ai_1006_a_run_is_its_own_keys_business() {
    let server = slow(keys()).await;
    let run = OpenRun::begin(&server, "app", "").await;
    let (list, go) = (run.path(""), run.path("/go"));
    // An admin neither: what a controller keeps is for those who run it.
    for who in ["anna", "root"] {
        for (method, path) in [("GET", &list), ("GET", &go), ("PUT", &go)] {
            let refused = ask(&server, who, method, path, b"").await;
            assert_eq!(
                error(&refused),
                (404, "run_not_found".into()),
                "{who} {method}"
            );
        }
    }
    let nobody = ask(&server, "", "PUT", &go, b"").await;
    assert_eq!(nobody.head.status, 401);
    assert_eq!(
        ask(&server, "app", "GET", &list, b"").await.text(),
        r#"{"vars":{}}"#
    );
    assert_eq!(ask(&server, "app", "PUT", &go, b"").await.head.status, 200);
    run.end().await;
}

/// AI-1090
#[tokio::test]
async fn ai_1006_a_value_has_a_limit_and_a_list_shows_a_mebibyte() {
    let server = slow(Vec::new()).await;
    let run = OpenRun::begin(&server, "", "").await;
    let most = vec![b'x'; 1 << 20];
    for name in ["/a", "/b"] {
        let written = put(&server, &run.path(name), &most, None).await;
        assert_eq!(written.text(), r#"{"version":1}"#);
    }
    let over = [&most[..], b"x"].concat();
    let over = put(&server, &run.path("/a"), &over, None).await;
    assert_eq!(error(&over), (413, "request_too_large".into()));
    let listed = ask(&server, "", "GET", &run.path(""), b"").await.json();
    assert_eq!(
        listed["vars"]["a"]["value"].as_str().map(str::len),
        Some(1 << 20)
    );
    assert_eq!(
        listed["vars"]["b"],
        serde_json::json!({"version": 1, "bytes": 1 << 20})
    );
    assert_eq!(
        ask(&server, "", "GET", &run.path("/b"), b"").await.body,
        most
    );
    let long = put(&server, &run.path("/123456789"), b"", None).await;
    assert_eq!(error(&long), (400, "invalid_value".into()));
    assert_eq!(long.json()["message"], "storage limit: name");
}

#[tokio::test]
async fn ai_1006_vars_are_strings_of_a_controller_that_has_variables() {
    let server = slow(Vec::new()).await;
    for body in [
        r#"{"controller":"until","vars":[]}"#,
        r#"{"controller":"until","vars":{"a":1}}"#,
        r#"{"controller":"none","vars":{"a":"b"}}"#,
        r#"{"controller":"sapwood:regex","controller_arg":"a","vars":{"a":"b"}}"#,
    ] {
        let answer = ask(&server, "", "POST", "/v1/run", body.as_bytes()).await;
        assert_eq!(error(&answer), (400, "invalid_value".into()), "{body}");
    }
    // A run of another kind of controller has no variables.
    let body = r#"{"controller":"moves","controller_arg":"*","max_tokens":4000}"#;
    let mut wire = Wire::connect(server.address).await;
    wire.send(sapwood_tests::http::post("/v1/run", &[], body.as_bytes()))
        .await;
    wire.head().await;
    let first = String::from_utf8(wire.chunk().await.unwrap()).unwrap();
    let id = first
        .split('"')
        .find(|word| word.starts_with("run-"))
        .unwrap();
    let answer = ask(&server, "", "GET", &format!("/v1/run/{id}/vars"), b"").await;
    assert_eq!(error(&answer), (409, "no_variables".into()));
}
