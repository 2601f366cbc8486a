//! Loading and unloading of models by clients, over HTTP and gRPC (TR-706).

use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::future::BoxFuture;
use sapwood_engine::scripted::Script;
use sapwood_kernel::Name;
use sapwood_proto::generated::inference::model_repository_parameter::ParameterChoice;
use sapwood_proto::generated::inference::{
    ModelRepositoryParameter, RepositoryModelLoadRequest, RepositoryModelUnloadRequest,
};
use sapwood_server::auth::rate_limit::{RateLimits, TokenMeter};
use sapwood_server::auth::scopes::{KeyScope, Scopes};
use sapwood_server::faces::generate::{
    Config, ExplicitRepository, ModelControlError, ModelOptions, OnModelLoaded, Repository,
};
use sapwood_tests::http::{Wire, post};
use sapwood_tests::{Faces, Running, key};
use serde_json::json;
use tonic::{Code, Request};

use super::grpc::Grpc;
use super::{error, kernel, script};

/// Records the requests to the repository.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Repository for Notes {
    fn load(
        &self,
        name: &str,
        config: Option<String>,
        loaded: OnModelLoaded,
    ) -> BoxFuture<'static, Result<(), ModelControlError>> {
        let config = config.as_deref().unwrap_or("as configured");
        self.0.lock().unwrap().push(format!("load {name} {config}"));
        let received = match name {
            "m" => {
                loaded(ModelOptions {
                    versions: vec![7],
                    ..ModelOptions::default()
                });
                Ok(())
            }
            "bad" => Err(ModelControlError::Config("it does not read".into())),
            "broken" => Err(ModelControlError::Broken),
            _ => Err(ModelControlError::Unknown),
        };
        async move { received }.boxed()
    }

    fn unload(&self, name: &str) -> BoxFuture<'static, Result<(), ModelControlError>> {
        self.0.lock().unwrap().push(format!("unload {name}"));
        async { Ok(()) }.boxed()
    }
}

async fn server() -> (Running, Arc<Notes>) {
    let notes = Arc::new(Notes::default());
    let faces = Faces {
        generate: Config {
            repository: Some(ExplicitRepository(Arc::clone(&notes) as Arc<dyn Repository>)),
            ..Config::default()
        },
        ..Faces::default()
    };
    let mut keys = vec![
        key("admin", "sesame"),
        key("user", "barley"),
        key("some", "rye"),
    ];
    keys[1].scopes = Scopes::from_iter([KeyScope::Infer]);
    keys[2].allowance = Some(Arc::new(TokenMeter::new(
        "key",
        RateLimits {
            models: Some(Arc::new([Name::new("other")].into())),
            ..RateLimits::default()
        },
    )));
    let kernel = kernel(&[("m", script(Script::Echo))]);
    let server = Running::start_faces(Default::default(), kernel, faces, keys).await;
    (server, notes)
}

#[tokio::test]
async fn tr_706_load_and_unload_report_their_results() {
    let (server, notes) = server().await;
    let mut wire = Wire::connect(server.address).await;
    let config = json!({"parameters": {"config": "{}", "unload_dependents": true}}).to_string();
    let file = json!({"parameters": {"file:1/model.gguf": "AAAA"}}).to_string();
    let unknown = "failed to load 'x', no such model in the configuration";
    for (path, key, body, status, received) in [
        ("m/load", "sesame", "", 200, ""),
        ("m/load", "sesame", config.as_str(), 200, ""),
        ("m/unload", "sesame", config.as_str(), 200, ""),
        ("x/load", "sesame", "", 400, unknown),
        (
            "bad/load",
            "sesame",
            "",
            400,
            "failed to load 'bad', it does not read",
        ),
        (
            "broken/load",
            "sesame",
            "",
            500,
            "failed to load 'broken', the server's log says why",
        ),
        (
            "m/load",
            "sesame",
            file.as_str(),
            501,
            "files of a model can not be sent with a request to load it",
        ),
        (
            "m/load",
            "barley",
            "",
            403,
            "This caller does not have the scope `admin`.",
        ),
    ] {
        let path = format!("/v2/repository/models/{path}");
        let key = format!("authorization: Bearer {key}");
        let answer = wire.ask(post(&path, &[&key], body.as_bytes())).await;
        assert_eq!(answer.summary().0, status, "{path} {body}");
        if received.is_empty() {
            assert_eq!(answer.text(), "");
        } else {
            assert_eq!(error(&answer), received);
        }
    }
    let asked = [
        "load m as configured",
        "load m {}",
        "unload m",
        "load x as configured",
        "load bad as configured",
        "load broken as configured",
    ];
    assert_eq!(*notes.0.lock().unwrap(), asked);
    // The model's metadata is now what the load returned.
    let index = post(
        "/v2/repository/index",
        &["authorization: Bearer sesame"],
        b"",
    );
    assert_eq!(wire.ask(index).await.json()[0]["version"], "7");
}

#[tokio::test]
async fn tr_706_load_and_unload_over_grpc_report_the_same_results() {
    let (server, notes) = server().await;
    let mut grpc = Grpc::connect(&server).await;
    let allowed = |message| {
        let mut request = Request::new(message);
        let value = "Bearer sesame".parse().unwrap();
        request.metadata_mut().insert("authorization", value);
        request
    };
    let load = |name: &str, text: &str| {
        let choice = ParameterChoice::StringParam(text.into());
        let parameter = ModelRepositoryParameter {
            parameter_choice: Some(choice),
        };
        allowed(RepositoryModelLoadRequest {
            model_name: name.into(),
            parameters: [("config".to_owned(), parameter)].into(),
            ..RepositoryModelLoadRequest::default()
        })
    };
    let () = grpc
        .send("RepositoryModelLoad", load("m", "{}"))
        .await
        .unwrap();
    let failed = grpc
        .send::<_, ()>("RepositoryModelLoad", load("x", "{}"))
        .await;
    let failed = failed.unwrap_err();
    assert_eq!(
        (failed.code(), failed.message()),
        (
            Code::InvalidArgument,
            "failed to load 'x', no such model in the configuration"
        )
    );
    let mut unload = Request::new(RepositoryModelUnloadRequest {
        model_name: "m".into(),
        ..RepositoryModelUnloadRequest::default()
    });
    let value = "Bearer sesame".parse().unwrap();
    unload.metadata_mut().insert("authorization", value);
    let () = grpc.send("RepositoryModelUnload", unload).await.unwrap();
    assert_eq!(
        *notes.0.lock().unwrap(),
        ["load m {}", "load x {}", "unload m"]
    );
}

#[tokio::test]
async fn d_45_an_admin_of_some_models_changes_no_others() {
    let (server, notes) = server().await;
    let mut wire = Wire::connect(server.address).await;
    for (name, does, status) in [
        ("m", "load", 403),
        ("m", "unload", 403),
        ("nosuch", "unload", 403),
        ("other", "unload", 200),
    ] {
        let path = format!("/v2/repository/models/{name}/{does}");
        let answer = wire
            .ask(post(&path, &["authorization: Bearer rye"], b"{}"))
            .await;
        assert_eq!(answer.head.status, status, "{does} {name}");
    }
    let mut grpc = Grpc::connect(&server).await;
    let mut unload = Request::new(RepositoryModelUnloadRequest {
        model_name: "m".into(),
        ..RepositoryModelUnloadRequest::default()
    });
    let value = "Bearer rye".parse().unwrap();
    unload.metadata_mut().insert("authorization", value);
    let refused = grpc.send::<_, ()>("RepositoryModelUnload", unload).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(*notes.0.lock().unwrap(), ["unload other"]);
}
