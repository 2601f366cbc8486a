//! Every way to reach a controller, and with whose rights (AI-902). That each route asks for a key at all is the matrix of
//! the gate (`tests/gate/`); here is what its key may do then.

use super::*;

/// A call of a model with the controller of this name.
struct Way {
    path: &'static str,
    body: fn(&str) -> String,
}

/// The routes that run controllers. Streams of LMTP over a WebSocket are in `lmtp.rs`.
const WAYS: &[Way] = &[
    Way {
        path: "/v1/run",
        body: |name| format!(r#"{{"controller":"{name}","controller_arg":"=a","prompt":"x"}}"#),
    },
    Way {
        path: "/aici/demo/v1/run",
        body: |name| format!(r#"{{"controller":"{name}","controller_arg":"=a","prompt":"x"}}"#),
    },
    Way {
        path: "/v2/models/demo/generate",
        body: generate,
    },
    Way {
        path: "/v2/models/demo/generate_stream",
        body: generate,
    },
    Way {
        path: "/v2/models/demo/infer",
        body: |name| {
            format!(
                r#"{{"inputs":[{{"name":"text_input","shape":[1],"datatype":"BYTES","data":["x"]}}],
                    "parameters":{{"controller":"{name}","controller_arg":"=a"}}}}"#
            )
        },
    },
    Way {
        path: "/lmtp",
        body: |name| {
            let asked = r#"{"stream_id":9,"model":"demo","data":{"lmtp":{"version":2,"features":["controllers"]}}}"#;
            let call = format!(
                r#"{{"stream_id":1,"model":"demo","prompt":[120],"controller":"{name}","controller_arg":"=a"}}"#
            );
            format!("MODEL_INFO {asked}\nGENERATE {call}\n")
        },
    },
];

fn generate(name: &str) -> String {
    format!(r#"{{"text_input":"x","parameters":{{"controller":"{name}","controller_arg":"=a"}}}}"#)
}

async fn call(server: &Running, who: &str, way: &Way, controller: &str) -> Answer {
    let body = (way.body)(controller);
    let kind = match way.path {
        "/lmtp" => "text/plain",
        _ => "application/json",
    };
    let headers = [
        format!("content-length: {}", body.len()),
        format!("content-type: {kind}"),
        format!("authorization: Bearer {who}"),
    ];
    let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
    let request = head("POST", way.path, &headers) + &body;
    Wire::connect(server.address).await.ask(request).await
}

#[tokio::test]
async fn ai_902_every_way_to_a_controller_has_the_rights_of_its_key() {
    let (server, source) = server(&["demo"], keys()).await;
    for way in WAYS {
        for (who, is_admin, may_control) in [
            ("root", true, true),
            ("anna", false, true),
            ("app", false, false),
        ] {
            let answer = call(&server, who, way, "moves").await;
            let text = answer.text();
            assert_eq!(answer.head.status, 200, "{} {text}", way.path);
            let asked = std::mem::take(&mut *source.users.lock().unwrap());
            let expect = [(who.to_owned(), is_admin, may_control)];
            assert_eq!(asked, expect, "{} {text}", way.path);
        }
        let answer = call(&server, "app", way, "private").await;
        let text = answer.text();
        assert!(
            text.contains("only its owner may run private"),
            "{} {text}",
            way.path
        );
        source.users.lock().unwrap().clear();
        // Not even asked for.
        let answer = call(&server, "nobody", way, "moves").await;
        assert_eq!(answer.head.status, 401, "{}", way.path);
        assert!(source.users.lock().unwrap().is_empty(), "{}", way.path);
    }
}

/// The routes that manage controllers.
#[tokio::test]
async fn ai_902_managing_controllers_needs_the_scope_control_before_a_byte_is_read() {
    let (server, _) = server(&["demo"], keys()).await;
    let id = "0".repeat(64);
    for prefix in ["", "/aici/demo"] {
        for (method, path) in [
            ("POST", "/v1/controllers".to_owned()),
            ("GET", "/v1/controllers".to_owned()),
            ("GET", format!("/v1/controllers/{id}")),
            ("DELETE", format!("/v1/controllers/{id}")),
            ("POST", "/v1/controllers/tags".to_owned()),
            ("DELETE", "/v1/controllers/tags/a".to_owned()),
        ] {
            let path = format!("{prefix}{path}");
            for (who, status) in [("nobody", 401), ("app", 403)] {
                // A body that is announced and never comes: whoever may not send it is told at once.
                let key = format!("api-key: {who}");
                let headers: &[&str] = match method {
                    "POST" => &[&key, "content-length: 1000000"],
                    _ => &[&key],
                };
                let request = head(method, &path, headers);
                let answer = Wire::connect(server.address).await.ask(request).await;
                assert_eq!(answer.head.status, status, "{who} {method} {path}");
            }
        }
    }
}
