//! gRPC, message by message.

use std::collections::BTreeMap;
use std::pin::Pin;

use ::http::Request as HttpRequest;
use bytes::Bytes;
use futures::stream;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use prost::Message;
use sapwood_proto::code::Code;
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_proto::generated::inference::model_infer_response::InferOutputTensor;
use sapwood_proto::generated::inference::model_metadata_response::TensorMetadata;
use sapwood_proto::generated::inference::repository_index_response::ModelIndex;
use sapwood_proto::generated::inference::*;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use tonic::server::{StreamingService, UnaryService};
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

use super::*;

/// The messages of a call's stream, and whether it then ends or waits for the client to disconnect.
#[derive(Clone, Default)]
struct Script {
    items: Vec<Result<ModelStreamInferResponse, Status>>,
    waits: bool,
}

struct Server {
    address: ServerAddress,
    /// Requests, and `None` when a client has dropped a stream that waits.
    received: mpsc::Receiver<Option<(ModelInferRequest, bool)>>,
    _task: AbortOnDropHandle<()>,
}

type Received = mpsc::Sender<Option<(ModelInferRequest, bool)>>;

/// One method with one answer.
struct Says<T>(Result<T, Status>);

impl<Q, T: Clone + Send + 'static> UnaryService<Q> for Says<T> {
    type Response = T;
    type Future = futures::future::Ready<Result<tonic::Response<T>, Status>>;
    fn call(&mut self, _: tonic::Request<Q>) -> Self::Future {
        futures::future::ready(self.0.clone().map(tonic::Response::new))
    }
}

struct Streams(Script, Received);
type Items = Pin<Box<dyn futures::Stream<Item = Result<ModelStreamInferResponse, Status>> + Send>>;

/// Notifies when a stream is dropped.
struct Left(Option<Received>);
impl Drop for Left {
    fn drop(&mut self) {
        if let Some(received) = &self.0 {
            let _ = received.try_send(None);
        }
    }
}

impl StreamingService<ModelInferRequest> for Streams {
    type Response = ModelStreamInferResponse;
    type ResponseStream = Items;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<Items>, Status>> + Send>>;
    fn call(&mut self, request: tonic::Request<Streaming<ModelInferRequest>>) -> Self::Future {
        let (script, received) = (self.0.clone(), self.1.clone());
        Box::pin(async move {
            let as_status = request.metadata().get("triton_grpc_error").is_some();
            let mut messages = request.into_inner();
            let first = messages.message().await?.unwrap();
            received.send(Some((first, as_status))).await.unwrap();
            assert!(messages.message().await?.is_none(), "it is half-closed");
            let left = Left(script.waits.then_some(received));
            let items = stream::iter(script.items);
            let items: Items = if script.waits {
                let waiting = stream::pending().map(move |item| {
                    let _held = &left;
                    item
                });
                Box::pin(items.chain(waiting))
            } else {
                Box::pin(items)
            };
            Ok(tonic::Response::new(items))
        })
    }
}

async fn answer(
    request: HttpRequest<Incoming>,
    script: Script,
    received: Received,
) -> Result<::http::Response<tonic::body::Body>, std::convert::Infallible> {
    async fn unary<Q, T>(
        request: HttpRequest<Incoming>,
        reply: Result<T, Status>,
    ) -> ::http::Response<tonic::body::Body>
    where
        Q: Message + Default + 'static,
        T: Message + Default + Clone + 'static,
    {
        let codec = ProstCodec::<T, Q>::default();
        tonic::server::Grpc::new(codec)
            .unary(Says(reply), request)
            .await
    }
    let method = request.uri().path().rsplit('/').next().unwrap().to_owned();
    Ok(match &*method {
        "ServerReady" => {
            unary::<ServerReadyRequest, _>(request, Ok(ServerReadyResponse { ready: true })).await
        }
        "ModelReady" => {
            unary::<ModelReadyRequest, _>(request, Ok(ModelReadyResponse { ready: false })).await
        }
        "RepositoryIndex" => unary::<RepositoryIndexRequest, _>(request, Ok(index())).await,
        "ModelMetadata" => unary::<ModelMetadataRequest, _>(request, Ok(metadata())).await,
        "ModelConfig" => unary::<ModelConfigRequest, _>(request, Ok(config())).await,
        "ModelInfer" => {
            let first = script.items.into_iter().next().unwrap();
            let reply = first.map(|message| message.infer_response.unwrap());
            unary::<ModelInferRequest, _>(request, reply).await
        }
        _ => {
            let codec = ProstCodec::<ModelStreamInferResponse, ModelInferRequest>::default();
            tonic::server::Grpc::new(codec)
                .streaming(Streams(script, received), request)
                .await
        }
    })
}

impl Server {
    async fn saying(script: Script) -> (Self, TritonClient) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address =
            ServerAddress::new(format!("triton+grpc://{}", listener.local_addr().unwrap()));
        let (notify, incoming) = mpsc::channel(64);
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let (script, notify) = (script.clone(), notify.clone());
                tokio::spawn(async move {
                    let service =
                        service_fn(|request| answer(request, script.clone(), notify.clone()));
                    let builder = auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(tcp), service).await;
                });
            }
        });
        let server = Self {
            address,
            received: incoming,
            _task: AbortOnDropHandle::new(task),
        };
        let client = TritonClient::connect(&server.address).await.unwrap();
        (server, client)
    }
}

fn index() -> RepositoryIndexResponse {
    let model = |name: &str, state: &str| ModelIndex {
        name: name.into(),
        version: "1".into(),
        state: state.into(),
        reason: String::new(),
    };
    RepositoryIndexResponse {
        models: vec![model("demo", "READY"), model("old", "UNAVAILABLE")],
    }
}

fn metadata() -> ModelMetadataResponse {
    let tensor = |name: &str, datatype: &str| TensorMetadata {
        name: name.into(),
        datatype: datatype.into(),
        shape: vec![-1, 1],
    };
    ModelMetadataResponse {
        name: "demo".into(),
        versions: vec!["1".into()],
        platform: "test".into(),
        inputs: vec![
            tensor("text_input", "BYTES"),
            tensor("max_tokens", "INT32"),
            tensor("stream", "BOOL"),
        ],
        outputs: vec![tensor("text_output", "BYTES"), tensor("score", "FP32")],
    }
}

fn config() -> ModelConfigResponse {
    let input = |name: &str| ModelInput {
        name: name.into(),
        optional: true,
        ..ModelInput::default()
    };
    let config = ModelConfig {
        input: vec![input("max_tokens"), input("stream")],
        model_transaction_policy: Some(ModelTransactionPolicy { decoupled: true }),
        ..ModelConfig::default()
    };
    ModelConfigResponse {
        config: Some(config),
    }
}

/// A response with this text, if any, and with the mark whether it is the last, if any.
fn reply_of(text: Option<&str>, last: Option<bool>) -> Result<ModelStreamInferResponse, Status> {
    let mut response = ModelInferResponse {
        id: "1".into(),
        ..ModelInferResponse::default()
    };
    if let Some(text) = text {
        response.outputs.push(InferOutputTensor {
            name: "text_output".into(),
            datatype: "BYTES".into(),
            shape: vec![1],
            ..InferOutputTensor::default()
        });
        let raw = texts(&[text]).to_raw(Datatype::Bytes);
        response.raw_output_contents.push(raw.into());
    }
    if let Some(last) = last {
        let flag = InferParameter {
            parameter_choice: Some(ParameterChoice::BoolParam(last)),
        };
        response
            .parameters
            .insert("triton_final_response".into(), flag);
    }
    Ok(ModelStreamInferResponse {
        error_message: String::new(),
        infer_response: Some(response),
    })
}

fn script(items: impl IntoIterator<Item = Result<ModelStreamInferResponse, Status>>) -> Script {
    Script {
        items: items.into_iter().collect(),
        waits: false,
    }
}

#[tokio::test]
async fn tr_906_the_request_asks_for_the_final_mark_and_errors_as_statuses() {
    let (mut server, client) = Server::saying(script([reply_of(None, Some(true))])).await;
    let (found, end) = asked(&client, two_words()).await;
    assert_eq!((found.len(), end), (0, Ok(())));
    let (request, as_status) = server.received.recv().await.unwrap().unwrap();
    assert!(as_status);
    let choice = |value| InferParameter {
        parameter_choice: Some(value),
    };
    let parameters: BTreeMap<_, _> = [
        ("timeout", ParameterChoice::Int64Param(1_500_000)),
        ("top_k", ParameterChoice::Int64Param(5)),
        (
            "triton_enable_empty_final_response",
            ParameterChoice::BoolParam(true),
        ),
    ]
    .map(|(name, value)| (name.to_owned(), choice(value)))
    .into();
    assert_eq!(request.parameters, parameters);
    assert_eq!(
        (&*request.model_name, &*request.model_version),
        ("demo", "")
    );
    let inputs: Vec<_> = request
        .inputs
        .iter()
        .map(|it| (&*it.name, &*it.datatype, &*it.shape))
        .collect();
    let one = &[1, 1][..];
    assert_eq!(
        inputs,
        [
            ("text_input", "BYTES", one),
            ("max_tokens", "INT32", one),
            ("stream", "BOOL", one)
        ]
    );
    let raw: [&[u8]; 3] = [b"\x0d\0\0\0Say two words", b"\x10\0\0\0", b"\x01"];
    assert_eq!(request.raw_input_contents, raw.map(Bytes::from_static));
}

/// The mark is in a response of its own, in the last payload, or missing; then the end of the call is the end.
#[tokio::test]
async fn tr_906_the_final_mark_ends_the_responses() {
    let cut = Status::unavailable("gone");
    for (items, expect, end) in [
        (
            vec![reply_of(Some("a"), Some(false)), reply_of(None, Some(true))],
            &["a"][..],
            Ok(()),
        ),
        (
            vec![
                reply_of(Some("a"), Some(false)),
                reply_of(Some("b"), Some(true)),
            ],
            &["a", "b"],
            Ok(()),
        ),
        (
            vec![
                reply_of(Some(""), Some(true)),
                reply_of(Some("past the end"), Some(true)),
            ],
            &[""],
            Ok(()),
        ),
        (
            vec![reply_of(Some("a"), None), reply_of(Some("b"), None)],
            &["a", "b"],
            Ok(()),
        ),
        (vec![], &[], Ok(())),
        (
            vec![
                reply_of(Some("a"), Some(false)),
                reply_of(None, Some(false)),
                reply_of(Some("b"), Some(false)),
            ],
            &["a", "b"],
            Err(Error::Truncated),
        ),
        (vec![reply_of(None, Some(true)), Err(cut)], &[], Ok(())),
    ] {
        let (_server, client) = Server::saying(script(items)).await;
        let (found, ended) = asked(&client, two_words()).await;
        assert_eq!(found, expect);
        assert_eq!(ended, end);
    }
}

#[tokio::test]
async fn tr_905_errors_come_as_text_or_status_first_or_later() {
    let text = |text: &str| {
        Ok(ModelStreamInferResponse {
            error_message: text.into(),
            ..ModelStreamInferResponse::default()
        })
    };
    for (items, code, started) in [
        (vec![text("tired")], Code::UpstreamFailed, false),
        (
            vec![reply_of(Some("a"), Some(false)), text("tired")],
            Code::UpstreamFailed,
            true,
        ),
        (
            vec![text("Request for unknown model: 'demo' is not found")],
            Code::NotFound,
            false,
        ),
        (
            vec![Err(Status::invalid_argument("bad"))],
            Code::InvalidRequest,
            false,
        ),
        (
            vec![
                reply_of(Some("a"), None),
                Err(Status::unavailable("draining")),
            ],
            Code::Unavailable,
            true,
        ),
        (
            vec![Err(Status::internal("tired"))],
            Code::UpstreamFailed,
            false,
        ),
        (
            vec![Err(Status::unimplemented("no"))],
            Code::Unimplemented,
            false,
        ),
    ] {
        let (_server, client) = Server::saying(script(items)).await;
        let (found, end) = asked(&client, two_words()).await;
        assert_eq!(found.len(), usize::from(started));
        let received = reply(end.unwrap_err());
        assert_eq!(
            (received.code, received.started),
            (code, started),
            "{}",
            received.message
        );
    }
}

/// Before the first response, and in the middle.
#[tokio::test]
async fn tr_907_dropping_the_responses_cancels_the_call() {
    for first in [vec![], vec![reply_of(Some("a"), Some(false))]] {
        let some = !first.is_empty();
        let script = Script {
            items: first,
            waits: true,
        };
        let (mut server, client) = Server::saying(script).await;
        let mut responses = client.generate(two_words()).await.unwrap();
        if some {
            assert!(responses.next().await.unwrap().is_ok());
        }
        assert!(server.received.recv().await.unwrap().is_some());
        drop(responses);
        assert!(
            server.received.recv().await.unwrap().is_none(),
            "it has left"
        );
    }
}

#[tokio::test]
async fn tr_901_outputs_come_as_bytes_or_contents_of_their_type() {
    let contents = |name: &str, datatype: &str, contents| {
        Ok(ModelStreamInferResponse {
            infer_response: Some(ModelInferResponse {
                outputs: vec![InferOutputTensor {
                    name: name.into(),
                    datatype: datatype.into(),
                    shape: vec![1],
                    contents: Some(contents),
                    ..InferOutputTensor::default()
                }],
                ..ModelInferResponse::default()
            }),
            ..ModelStreamInferResponse::default()
        })
    };
    let half = InferTensorContents {
        fp32_contents: vec![0.5],
        ..InferTensorContents::default()
    };
    let good = contents("score", "FP32", half.clone());
    let (_server, client) = Server::saying(script([good])).await;
    let mut responses = client.generate(two_words()).await.unwrap();
    let response = responses.next().await.unwrap().unwrap();
    assert_eq!(response.outputs, [(1, TensorData::Float(vec![0.5]))]);
    let mut short = reply_of(Some("abc"), None).unwrap();
    let raw = &mut short.infer_response.as_mut().unwrap().raw_output_contents[0];
    *raw = raw.slice(..5);
    for bad in [
        Ok(short),
        contents("nobody", "FP32", half.clone()),
        contents("score", "QUAD", half),
    ] {
        let (_server, client) = Server::saying(script([bad])).await;
        let (_, end) = asked(&client, two_words()).await;
        assert!(matches!(end, Err(Error::Protocol(_))), "{end:?}");
    }
}

/// A model that is not decoupled gives exactly one response.
#[tokio::test]
async fn tr_903_a_model_that_is_not_decoupled_is_asked_once() {
    for (item, expect) in [
        (reply_of(Some("all"), None), Ok(())),
        (Err(Status::unavailable("full")), Err(Code::Unavailable)),
    ] {
        let (_server, client) = Server::saying(script([item])).await;
        let mut request = two_words();
        Arc::make_mut(&mut request.model).decoupled = false;
        let (found, end) = asked(&client, request).await;
        assert_eq!(found.len(), usize::from(expect.is_ok()));
        assert_eq!(end.map_err(|error| error.code()), expect);
    }
}

/// A message of two bytes per element on the wire takes hundreds once it is decoded, so it is not decoded.
#[tokio::test]
async fn d_47_an_answer_that_would_take_much_memory_is_not_decoded() {
    let empty = ModelInferResponse {
        outputs: vec![InferOutputTensor::default(); 100_000],
        ..ModelInferResponse::default()
    };
    let item = Ok(ModelStreamInferResponse {
        infer_response: Some(empty),
        ..ModelStreamInferResponse::default()
    });
    for decoupled in [true, false] {
        let (_server, client) = Server::saying(script([item.clone()])).await;
        let mut request = two_words();
        Arc::make_mut(&mut request.model).decoupled = decoupled;
        let (found, end) = asked(&client, request).await;
        assert!(found.is_empty());
        let limit = Error::Limit {
            name: "bytes of an answer once it is decoded",
            max: 32 << 20,
        };
        assert_eq!(end, Err(limit));
    }
}

#[tokio::test]
async fn tr_908_models_are_listed_and_described() {
    let (server, client) = Server::saying(Script::default()).await;
    let names: Vec<_> = client
        .models()
        .await
        .unwrap()
        .into_iter()
        .map(|it| it.name)
        .collect();
    assert_eq!(names, ["demo"]);
    let model = client.model("demo").await.unwrap();
    assert_eq!(Arc::new(model), {
        let mut demo = (*demo()).clone();
        demo.outputs.iter_mut().for_each(|it| it.optional = false);
        Arc::new(demo)
    });
    let mut only = server.address.clone();
    only.url.push_str("/demo");
    let error = TritonClient::connect(&only).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "the model is not ready");
}
