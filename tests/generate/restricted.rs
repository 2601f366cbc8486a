//! Parts of the protocol that require a header (TR-210).

use sapwood_proto::generated::inference::{RepositoryIndexRequest, ServerLiveRequest};
use sapwood_server::faces::generate::{Category, Config, Restriction};
use sapwood_tests::http::{Wire, head, post};
use sapwood_tests::{Faces, Running, key};
use tonic::Request;

use super::grpc::Grpc;
use super::{error, kernel, script};
use sapwood_engine::scripted::Script;

fn config() -> Config {
    let restriction = Restriction::new("Admin-Key", "swordfish").unwrap();
    Config {
        restricted: [Category::ModelRepository, Category::Inference]
            .map(|category| (category, restriction.clone()))
            .into(),
        ..Config::default()
    }
}

#[tokio::test]
async fn tr_210_only_a_restricted_part_requires_the_header() {
    let server = Running::generating(kernel(&[("m", script(Script::Words))]), config()).await;
    let mut wire = Wire::connect(server.address).await;
    let body = br#"{"text_input":"x"}"#;
    let received = "This API is restricted, expecting header 'admin-key'";
    for (path, restricted) in [
        ("/v2/models/m/generate", true),
        ("/v2/models/m/generate_stream", true),
        ("/v2/models/m/infer", true),
        ("/v2/models/nobody/generate", true),
        ("/v2/repository/index", true),
        ("/v2/repository/models/m/load", true),
        ("/v2/logging", false),
    ] {
        for (header, opens) in [
            ("x-other: swordfish", false),
            ("admin-key: wrong", false),
            ("admin-key: swordfish", true),
        ] {
            let answer = wire.ask(post(path, &[header], body)).await;
            let refused = answer.summary().0 == 403;
            assert_eq!(refused, restricted && !opens, "{path} {header}");
            if refused {
                assert_eq!(error(&answer), received);
                let code = answer.head.header("sapwood-error");
                assert_eq!(code.as_deref(), Some("permission-denied"));
            }
        }
    }
    // The header is checked before the method.
    let get = wire.ask(head("GET", "/v2/models/m/generate", &[])).await;
    assert_eq!(get.summary().0, 403);
    assert_eq!(wire.get("/v2/health/live").await.summary().0, 200);
    assert_eq!(wire.get("/v2/models/m").await.summary().0, 200);
}

/// A server with keys and restrictions requires both.
#[tokio::test]
async fn tr_210_a_restricted_part_requires_the_key_and_the_header() {
    let faces = Faces {
        generate: config(),
        ..Faces::default()
    };
    let kernel = kernel(&[("m", script(Script::Words))]);
    let keys = vec![key("anna", "sesame")];
    let server = Running::start_faces(Default::default(), kernel, faces, keys).await;
    let mut wire = Wire::connect(server.address).await;
    let (bearer, header) = ("authorization: Bearer sesame", "admin-key: swordfish");
    let body = br#"{"text_input":"x"}"#;
    for (headers, status) in [
        (&[header][..], 401),
        (&[bearer], 403),
        (&[bearer, header], 200),
    ] {
        let asked = post("/v2/models/m/generate", headers, body);
        assert_eq!(wire.ask(asked).await.summary().0, status, "{headers:?}");
    }
}

#[tokio::test]
async fn tr_210_over_grpc_the_header_has_a_prefix_and_the_error_names_it() {
    let server = Running::generating(kernel(&[("m", script(Script::Words))]), config()).await;
    let mut grpc = Grpc::connect(&server).await;
    let index = RepositoryIndexRequest::default;
    let refused = grpc
        .send::<_, sapwood_proto::generated::inference::RepositoryIndexResponse>(
            "RepositoryIndex",
            Request::new(index()),
        )
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (
            tonic::Code::Unavailable,
            "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
        )
    );
    let mut request = Request::new(index());
    let value = "swordfish".parse().unwrap();
    request
        .metadata_mut()
        .insert("triton-grpc-protocol-admin-key", value);
    let listed: sapwood_proto::generated::inference::RepositoryIndexResponse =
        grpc.send("RepositoryIndex", request).await.unwrap();
    assert_eq!(listed.models.len(), 1);
    let live: sapwood_proto::generated::inference::ServerLiveResponse = grpc
        .send("ServerLive", Request::new(ServerLiveRequest::default()))
        .await
        .unwrap();
    assert!(live.live);
}
