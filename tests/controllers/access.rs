//! Every way to reach a controller, and with whose rights (AI-902). That each route asks for a key at all is the matrix of
//! the gate (`tests/gate/`); here is what its key may do then.

use futures::future::join_all;
use sapwood_kernel::args;
use sapwood_kernel::connect::evergreen::import;
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_proto::code::Code;
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_proto::generated::inference::model_infer_request::InferInputTensor;
use sapwood_proto::generated::inference::{InferParameter, ModelInferRequest, ModelInferResponse};

use super::*;
use crate::generate::grpc::Grpc;

/// A call of a model with the controller of this name.
struct Way {
    path: &'static str,
    body: fn(&str) -> String,
}

/// The routes that run controllers by one request. Streams of LMTP over a WebSocket are in `lmtp.rs`.
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
    let routes = [
        ("POST", "/v1/controllers".to_owned()),
        ("GET", "/v1/controllers".to_owned()),
        ("GET", format!("/v1/controllers/{id}")),
        ("DELETE", format!("/v1/controllers/{id}")),
        ("POST", "/v1/controllers/tags".to_owned()),
        ("DELETE", "/v1/controllers/tags/a".to_owned()),
    ];
    let asked = ["", "/aici/demo"].into_iter().flat_map(|prefix| {
        let routes = routes.iter();
        routes.flat_map(move |(method, path)| {
            let path = format!("{prefix}{path}");
            [("nobody", 401), ("app", 403)]
                .map(|(who, status)| (path.clone(), *method, who, status))
        })
    });
    // All at once: an answer waits a moment for the rest of a body, for clients that read nothing before they have sent it.
    join_all(asked.map(async |(path, method, who, status)| {
        // A body that is announced and never comes.
        let key = format!("api-key: {who}");
        let headers: &[&str] = match method {
            "POST" => &[&key, "content-length: 1000000"],
            _ => &[&key],
        };
        let request = head(method, &path, headers);
        let answer = Wire::connect(server.address).await.ask(request).await;
        assert_eq!(answer.head.status, status, "{who} {method} {path}");
    }))
    .await;
}

/// The same at sessions of Evergreen, over gRPC and WebSockets.
#[tokio::test]
async fn ai_902_sessions_have_the_rights_of_their_key() {
    let (server, source) = server(&["demo"], keys()).await;
    for scheme in ["http", "ws"] {
        let at = ServerAddress::new(format!("{scheme}://{}", server.address));
        for (who, is_admin, may_control) in [("anna", false, true), ("app", false, false)] {
            let address = at.clone().with_key(who);
            let session = ClientSession::connect(&address, ClientSessionOptions::default());
            let session = session.await.unwrap();
            let kernel = Kernel::new();
            kernel.add_all(import(&session).await.unwrap()).unwrap();
            let run = |module: &str| {
                let controller = serde_json::json!({"module": module, "arg": "=a"});
                let config = serde_json::json!({"controller": controller});
                kernel.run::<String>("demo", args! { prompt: "x", config: config })
            };
            assert_eq!(run("moves").await.unwrap(), "a", "{scheme} {who}");
            let asked = std::mem::take(&mut *source.users.lock().unwrap());
            let expect = [(who.to_owned(), is_admin, may_control)];
            assert_eq!(asked, expect, "{scheme}");
            if who == "app" {
                let refused = run("private").await.unwrap_err().to_string();
                assert!(
                    refused.contains("only its owner may run private"),
                    "{refused}"
                );
            }
            source.users.lock().unwrap().clear();
        }
        for address in [at.clone(), at.with_key("nobody")] {
            let refused = ClientSession::connect(&address, ClientSessionOptions::default()).await;
            assert_eq!(refused.err().unwrap().code, Code::Unauthenticated);
        }
    }
}

/// The same at Triton's gRPC.
#[tokio::test]
async fn ai_902_inference_over_grpc_has_the_rights_of_its_key() {
    let (server, source) = server(&["demo"], keys()).await;
    let mut grpc = Grpc::connect(&server).await;
    for (who, is_admin, may_control) in [("anna", false, true), ("app", false, false)] {
        let asking = |controller: &str| {
            let mut request = tonic::Request::new(steered(controller));
            let key = format!("Bearer {who}").parse().unwrap();
            request.metadata_mut().insert("authorization", key);
            request
        };
        let answer: ModelInferResponse = grpc.send("ModelInfer", asking("moves")).await.unwrap();
        let raw = answer.raw_output_contents.iter();
        assert!(raw.into_iter().any(|raw| raw.ends_with(b"a")), "{answer:?}");
        let asked = std::mem::take(&mut *source.users.lock().unwrap());
        assert_eq!(asked, [(who.to_owned(), is_admin, may_control)]);
        if who == "app" {
            let refused = grpc.send::<_, ModelInferResponse>("ModelInfer", asking("private"));
            let refused = refused.await.unwrap_err();
            assert!(
                refused.message().contains("only its owner may run private"),
                "{refused}"
            );
        }
        source.users.lock().unwrap().clear();
    }
    let without = tonic::Request::new(steered("moves"));
    let refused = grpc.send::<_, ModelInferResponse>("ModelInfer", without);
    assert_eq!(
        refused.await.unwrap_err().code(),
        tonic::Code::Unauthenticated
    );
    assert!(source.users.lock().unwrap().is_empty());
}

/// A request of Triton's gRPC with this controller.
fn steered(controller: &str) -> ModelInferRequest {
    let text = |value: &str| InferParameter {
        parameter_choice: Some(ParameterChoice::StringParam(value.into())),
    };
    let parameters = [("controller", controller), ("controller_arg", "=a")];
    ModelInferRequest {
        model_name: "demo".into(),
        inputs: vec![InferInputTensor {
            name: "text_input".into(),
            datatype: "BYTES".into(),
            shape: vec![1],
            ..InferInputTensor::default()
        }],
        raw_input_contents: vec![[&1_u32.to_le_bytes()[..], b"x"].concat().into()],
        parameters: parameters
            .map(|(name, value)| (name.to_owned(), text(value)))
            .into(),
        ..ModelInferRequest::default()
    }
}
