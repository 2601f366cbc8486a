//! `inference.GRPCInferenceService`, with messages built by hand and with our own client.

mod additional;
mod ensemble;
mod streams;

use std::net::SocketAddr;

use futures::stream;
use prost::Message;
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_proto::generated::inference::model_infer_request::{
    InferInputTensor, InferRequestedOutputTensor,
};
use sapwood_proto::generated::inference::*;
use sapwood_server::ops::drain::DrainPhase;
use serde_json::json;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::*;

const FINAL: &str = "triton_final_response";

pub(crate) struct Grpc(tonic::client::Grpc<Channel>);

impl Grpc {
    pub(crate) async fn connect(server: &Running) -> Self {
        Self::at(server.address).await.unwrap()
    }

    pub(crate) async fn at(address: SocketAddr) -> Result<Self, tonic::transport::Error> {
        let channel = Channel::from_shared(format!("http://{address}")).unwrap();
        // A small window: a client that does not read blocks the server soon.
        let channel = channel.initial_stream_window_size(Some(1 << 16));
        let channel = channel.connect().await?;
        let most = usize::MAX;
        let grpc = tonic::client::Grpc::new(channel).max_encoding_message_size(most);
        Ok(Self(grpc))
    }

    fn path(method: &str) -> http::uri::PathAndQuery {
        let path = format!("/inference.GRPCInferenceService/{method}");
        path.parse().unwrap()
    }

    async fn ask<Q, A>(&mut self, method: &str, message: Q) -> Result<A, Status>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        self.send(method, Request::new(message)).await
    }

    /// The same with metadata.
    pub(crate) async fn send<Q, A>(
        &mut self,
        method: &str,
        request: Request<Q>,
    ) -> Result<A, Status>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        self.0.ready().await.unwrap();
        let codec = ProstCodec::<Q, A>::default();
        let answer = self.0.unary(request, Self::path(method), codec).await?;
        Ok(answer.into_inner())
    }

    pub(crate) async fn infer(
        &mut self,
        message: ModelInferRequest,
    ) -> Result<ModelInferResponse, Status> {
        self.ask("ModelInfer", message).await
    }

    pub(crate) async fn stream(
        &mut self,
        messages: impl futures::Stream<Item = ModelInferRequest> + Send + 'static,
        error_as_status: bool,
    ) -> Streaming<ModelStreamInferResponse> {
        self.0.ready().await.unwrap();
        let codec = ProstCodec::<ModelInferRequest, ModelStreamInferResponse>::default();
        let mut request = Request::new(messages);
        if error_as_status {
            let flag = AsciiMetadataValue::from_static("true");
            request.metadata_mut().insert("triton_grpc_error", flag);
        }
        let path = Self::path("ModelStreamInfer");
        let answer = self.0.streaming(request, path, codec).await;
        answer.unwrap().into_inner()
    }

    /// All responses to these requests.
    async fn all(&mut self, messages: Vec<ModelInferRequest>) -> Vec<ModelStreamInferResponse> {
        let mut answers = self.stream(stream::iter(messages), false).await;
        let mut list = Vec::new();
        while let Some(answer) = answers.message().await.unwrap() {
            list.push(answer);
        }
        list
    }
}

fn flag(value: bool) -> InferParameter {
    InferParameter {
        parameter_choice: Some(ParameterChoice::BoolParam(value)),
    }
}

/// A parameter.
pub(super) fn number(value: i64) -> InferParameter {
    InferParameter {
        parameter_choice: Some(ParameterChoice::Int64Param(value)),
    }
}

fn tensor(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..InferInputTensor::default()
    }
}

fn bytes(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).unwrap();
    [&length.to_le_bytes(), text.as_bytes()].concat()
}

/// A prompt; with `stream`, one response for each piece.
pub(crate) fn prompt(model: &str, id: &str, text: &str, stream: bool) -> ModelInferRequest {
    let mut message = ModelInferRequest {
        model_name: model.into(),
        id: id.into(),
        inputs: vec![tensor("text_input", "BYTES", &[1])],
        raw_input_contents: vec![bytes(text).into()],
        ..ModelInferRequest::default()
    };
    if stream {
        message.inputs.push(tensor("stream", "BOOL", &[1]));
        message.raw_input_contents.push(vec![1].into());
    }
    message
}

/// The first string of the first output.
pub(crate) fn text(message: &ModelInferResponse) -> String {
    assert_eq!(message.outputs.len(), message.raw_output_contents.len());
    let raw = message.raw_output_contents.first();
    raw.map_or_else(String::new, |raw| {
        String::from_utf8_lossy(&raw[4..]).into_owned()
    })
}

pub(super) fn last(message: &ModelInferResponse) -> bool {
    match message.parameters[FINAL].parameter_choice {
        Some(ParameterChoice::BoolParam(last)) => last,
        ref other => panic!("{other:?}"),
    }
}

/// Calls the parrot with this metadata, by `ModelInfer` and then on a stream; returns which calls succeeded.
pub(super) async fn with_metadata(
    server: &Running,
    name: &'static str,
    value: &'static str,
) -> [bool; 2] {
    let message = ModelInferRequest {
        model_name: "parrot".into(),
        inputs: vec![
            tensor("QUESTION", "BYTES", &[1, 1]),
            tensor("LIVE", "BOOL", &[1, 1]),
        ],
        raw_input_contents: vec![bytes("x").into(), vec![0].into()],
        ..ModelInferRequest::default()
    };
    let value = AsciiMetadataValue::from_static(value);
    let mut grpc = Grpc::connect(server).await;
    let mut request = Request::new(message.clone());
    request.metadata_mut().insert(name, value.clone());
    let infer: Result<ModelInferResponse, _> = grpc.send("ModelInfer", request).await;
    grpc.0.ready().await.unwrap();
    let codec = ProstCodec::<ModelInferRequest, ModelStreamInferResponse>::default();
    let mut request = Request::new(stream::iter([message]));
    request.metadata_mut().insert(name, value);
    let path = Grpc::path("ModelStreamInfer");
    let answers = grpc.0.streaming(request, path, codec).await;
    let first = answers.unwrap().into_inner().message().await.unwrap();
    [infer.is_ok(), first.unwrap().error_message.is_empty()]
}

/// TR-203, TR-803: typed contents and raw bytes are equivalent.
#[tokio::test]
async fn tr_901_inputs_are_all_in_typed_contents_or_all_raw() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    let raw = prompt("demo", "7", "one two three", false);
    let contents = ModelInferRequest {
        inputs: vec![InferInputTensor {
            contents: Some(InferTensorContents {
                bytes_contents: vec![b"one two three".to_vec()],
                ..InferTensorContents::default()
            }),
            ..tensor("text_input", "BYTES", &[1])
        }],
        raw_input_contents: Vec::new(),
        ..raw.clone()
    };
    for message in [raw.clone(), contents.clone()] {
        let answer = grpc.infer(message).await.unwrap();
        assert_eq!(text(&answer), "one two three");
        assert_eq!(
            (&*answer.model_name, &*answer.model_version, &*answer.id),
            ("demo", "1", "7")
        );
        let output = &answer.outputs[0];
        assert_eq!(
            (&*output.name, &*output.datatype, &*output.shape),
            ("text_output", "BYTES", &[1][..])
        );
        assert!(output.contents.is_none());
    }
}

#[tokio::test]
async fn tr_401_the_output_has_no_bad_words_over_grpc() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    for stream in [false, true] {
        let mut message = prompt("demo", "7", "one two three", stream);
        message.inputs.push(tensor("bad_words", "BYTES", &[2]));
        let words = [bytes(""), bytes("e two")].concat();
        message.raw_input_contents.push(words.into());
        let reply = if stream {
            let answers = grpc.all(vec![message]).await;
            let answers = answers
                .iter()
                .filter_map(|answer| answer.infer_response.as_ref());
            answers
                .filter(|answer| !answer.outputs.is_empty())
                .map(text)
                .collect()
        } else {
            text(&grpc.infer(message).await.unwrap())
        };
        assert!(
            reply.starts_with("one") && reply.ends_with(" three"),
            "{reply}"
        );
        assert!(!reply.contains("e two"), "{reply}");
    }
}

/// Invalid tensors; TR-805.
#[tokio::test]
async fn tr_901_bad_tensors_are_refused_by_name() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    for (message, why) in bad() {
        let status = grpc.infer(message).await.unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (Code::InvalidArgument, why)
        );
        let code = status.metadata().get("sapwood-error").unwrap();
        assert_eq!(code, "invalid-request");
    }
}

fn bad() -> Vec<(ModelInferRequest, &'static str)> {
    let input = |change: fn(&mut ModelInferRequest)| {
        let mut message = prompt("demo", "7", "one two three", false);
        change(&mut message);
        message
    };
    vec![
        (
            input(|it| it.inputs[0].contents = Some(InferTensorContents::default())),
            "contents field must not be specified when using raw_input_contents for 'text_input' for model 'demo'",
        ),
        (
            input(|it| it.raw_input_contents.push(vec![0].into())),
            "unexpected additional input data for model 'demo'",
        ),
        (
            input(|it| it.inputs.push(tensor("stream", "BOOL", &[1]))),
            "unexpected end of input data for input 'stream'",
        ),
        (
            input(|it| it.raw_input_contents = Vec::new()),
            "[request id: 7] input 'text_input' has no data",
        ),
        (
            input(|it| it.raw_input_contents[0] = vec![2, 0, 0, 0, 1].into()),
            "[request id: 7] incomplete string data for inference input 'text_input' for model 'demo'",
        ),
        (
            input(|it| it.inputs[0].datatype = "INT8".into()),
            "[request id: 7] inference input 'text_input' data-type is 'INT8', but model 'demo' expects 'BYTES'",
        ),
        (
            input(|it| it.inputs[0].name = "prompt".into()),
            "[request id: 7] unexpected inference input 'prompt' for model 'demo'",
        ),
        (
            input(|it| {
                it.outputs = vec![InferRequestedOutputTensor {
                    name: "nothing".into(),
                    ..InferRequestedOutputTensor::default()
                }];
            }),
            "[request id: 7] unexpected inference output 'nothing' for model 'demo'",
        ),
        (
            input(|it| {
                it.parameters.insert("triton_x".into(), flag(true));
            }),
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            input(|it| {
                it.parameters.insert("x".into(), InferParameter::default());
            }),
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            input(|it| {
                it.raw_input_contents.clear();
                it.inputs[0].contents = Some(InferTensorContents::default());
            }),
            "[request id: 7] unexpected number of elements 0 for inference input 'text_input' for model 'demo', \
             expecting 1",
        ),
    ]
}

/// TR-204, TR-202.
#[tokio::test]
async fn tr_902_unknown_models_and_versions_have_exact_statuses_and_texts() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    for (model, version, code, why) in [
        (
            "nobody",
            "",
            Code::InvalidArgument,
            "Request for unknown model: 'nobody' is not found",
        ),
        (
            "demo",
            "2",
            Code::NotFound,
            "Request for unknown model: 'demo' version 2 is not found",
        ),
        (
            "demo",
            "x",
            Code::InvalidArgument,
            "failed to get model version from specified version string 'x' (details: stol), version should be an \
             integral value > 0",
        ),
    ] {
        let mut message = prompt(model, "", "x", false);
        message.model_version = version.into();
        let status = grpc.infer(message).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (code, why));
        let asked = ModelMetadataRequest {
            name: model.into(),
            version: version.into(),
        };
        let received: Result<ModelMetadataResponse, _> = grpc.ask("ModelMetadata", asked).await;
        assert_eq!(received.unwrap_err().code(), code);
    }
    let unknown: Result<(), _> = grpc.ask("ModelDream", ()).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Unimplemented);
    let large = prompt("demo", "", &"x".repeat(64 << 20), false);
    let status = grpc.infer(large).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
}

/// TR-901: at the limit and one past it, as a single message and on a stream; compressed messages count decompressed.
#[tokio::test]
async fn tr_907_the_size_limit_of_a_message_is_configurable() {
    let message = prompt("demo", "", "green tea", false);
    let exact = message.encoded_len();
    for (most, code) in [(exact, Code::Ok), (exact - 1, Code::ResourceExhausted)] {
        let config = Config {
            grpc_message_size: most,
            ..Config::default()
        };
        let kernel = kernel(&[("demo", script(Script::Echo))]);
        let server = Running::generating(kernel, config).await;
        let mut grpc = Grpc::connect(&server).await;
        let received = grpc.infer(message.clone()).await;
        assert_eq!(received.map_or_else(|it| it.code(), |_| Code::Ok), code);
        let mut answers = grpc.stream(stream::iter([message.clone()]), false).await;
        let received = answers.message().await;
        assert_eq!(received.map_or_else(|it| it.code(), |_| Code::Ok), code);
        let mut packing = Grpc::connect(&server).await;
        packing.0 = packing
            .0
            .send_compressed(tonic::codec::CompressionEncoding::Gzip);
        let received = packing
            .infer(prompt("demo", "", &"x".repeat(most * 9), false))
            .await;
        assert_eq!(received.unwrap_err().code(), Code::ResourceExhausted);
    }
}

#[tokio::test]
async fn tr_903_model_infer_with_stream_is_refused() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    let status = grpc.infer(prompt("demo", "", "x", true)).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (
            Code::Unimplemented,
            "ModelInfer RPC doesn't support models with decoupled transaction policy"
        )
    );
}

/// OA-901: a server that is shutting down is live and not ready.
#[tokio::test]
async fn oa_904_probes_of_triton_are_answered_in_a_drain() {
    let server = Running::that_drains_at_once().await;
    let drain = server.shared.drain.clone();
    let _work = drain.hold();
    let draining = drain.clone();
    tokio::spawn(async move { draining.run().await });
    drain.reached(DrainPhase::Refusing).await;
    for (path, status) in [
        ("/v2/health/live", 200),
        ("/v2/health/ready", 400),
        ("/v2", 503),
    ] {
        let mut wire = Wire::connect(server.address).await;
        assert_eq!(wire.get(path).await.summary().0, status, "{path}");
    }
    let mut grpc = Grpc::connect(&server).await;
    let live: ServerLiveResponse = grpc.ask("ServerLive", ServerLiveRequest {}).await.unwrap();
    let mut grpc = Grpc::connect(&server).await;
    let ready: ServerReadyResponse = grpc
        .ask("ServerReady", ServerReadyRequest {})
        .await
        .unwrap();
    assert!(live.live && !ready.ready);
}

/// TR-701, TR-703, TR-704, TR-709: as messages.
#[tokio::test]
async fn tr_702_metadata_over_grpc_equals_metadata_over_http() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    let live: ServerLiveResponse = grpc.ask("ServerLive", ServerLiveRequest {}).await.unwrap();
    let ready: ServerReadyResponse = grpc
        .ask("ServerReady", ServerReadyRequest {})
        .await
        .unwrap();
    assert!(live.live && ready.ready);
    let (name, version) = ("demo".to_owned(), String::new());
    let asked = ModelReadyRequest {
        name: name.clone(),
        version: version.clone(),
    };
    let ready: ModelReadyResponse = grpc.ask("ModelReady", asked).await.unwrap();
    assert!(ready.ready);
    let received: ServerMetadataResponse = grpc.ask("ServerMetadata", ()).await.unwrap();
    assert_eq!(received.name, "sapwood");
    assert!(received.extensions.iter().any(|it| it == "generate"));

    let asked = ModelMetadataRequest {
        name: name.clone(),
        version: version.clone(),
    };
    let received: ModelMetadataResponse = grpc.ask("ModelMetadata", asked).await.unwrap();
    let http = Wire::connect(server.address)
        .await
        .get("/v2/models/demo")
        .await
        .json();
    assert_eq!(received.versions, ["1"]);
    let tensors = |list: &[model_metadata_response::TensorMetadata]| {
        let list = list.iter();
        let list =
            list.map(|it| json!({"name": it.name, "datatype": it.datatype, "shape": it.shape}));
        json!(list.collect::<Vec<_>>())
    };
    assert_eq!(tensors(&received.inputs), http["inputs"]);
    assert_eq!(tensors(&received.outputs), http["outputs"]);

    let asked = ModelConfigRequest {
        name: name.clone(),
        version: version.clone(),
    };
    let received: ModelConfigResponse = grpc.ask("ModelConfig", asked).await.unwrap();
    let config = received.config.unwrap();
    assert!(config.model_transaction_policy.unwrap().decoupled);
    assert_eq!(config.input[0].name, "text_input");
    assert_eq!(config.input[0].data_type(), DataType::TypeString);
    assert!(!config.input[0].optional && config.input[1].optional);

    grpc.infer(prompt("demo", "", "x", false)).await.unwrap();
    let asked = ModelStatisticsRequest { name, version };
    let received: ModelStatisticsResponse = grpc.ask("ModelStatistics", asked).await.unwrap();
    let stats = &received.model_stats[0];
    assert_eq!((stats.inference_count, &*stats.version), (1, "1"));
    assert_eq!(
        stats
            .inference_stats
            .as_ref()
            .unwrap()
            .success
            .unwrap()
            .count,
        1
    );
    assert_eq!(stats.response_stats.len(), 1);
}

/// TR-706, TR-707, TR-708
#[tokio::test]
async fn tr_705_the_repository_and_settings_can_be_read_over_grpc() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    let asked = RepositoryIndexRequest::default();
    let received: RepositoryIndexResponse = grpc.ask("RepositoryIndex", asked).await.unwrap();
    let first = &received.models[0];
    assert_eq!(
        (&*first.name, &*first.version, &*first.state),
        ("demo", "1", "READY")
    );
    let asked = RepositoryIndexRequest {
        repository_name: "mine".into(),
        ready: false,
    };
    let received: Result<RepositoryIndexResponse, _> = grpc.ask("RepositoryIndex", asked).await;
    assert_eq!(received.unwrap_err().code(), Code::Unimplemented);
    for (method, code) in [
        ("RepositoryModelLoad", Code::Unavailable),
        ("RepositoryModelUnload", Code::Unavailable),
        ("SystemSharedMemoryRegister", Code::Unimplemented),
        ("CudaSharedMemoryRegister", Code::Unimplemented),
        ("SystemSharedMemoryStatus", Code::Ok),
        ("CudaSharedMemoryUnregister", Code::Ok),
    ] {
        let received: Result<(), _> = grpc.ask(method, ()).await;
        assert_eq!(
            received.err().map_or(Code::Ok, |it| it.code()),
            code,
            "{method}"
        );
    }
    let asked = TraceSettingRequest::default();
    let received: TraceSettingResponse = grpc.ask("TraceSetting", asked).await.unwrap();
    assert_eq!(received.settings["trace_level"].value, ["OFF"]);
    assert_eq!(received.settings["trace_rate"].value, ["1000"]);
    let mut asked = TraceSettingRequest::default();
    for (level, code) in [("OFF", Code::Ok), ("TIMESTAMPS", Code::Unimplemented)] {
        let value = trace_setting_request::SettingValue {
            value: vec![level.into()],
        };
        asked.settings.insert("trace_level".into(), value);
        let received: Result<TraceSettingResponse, _> =
            grpc.ask("TraceSetting", asked.clone()).await;
        assert_eq!(
            received.err().map_or(Code::Ok, |it| it.code()),
            code,
            "{level}"
        );
    }
    let received: LogSettingsResponse = grpc.ask("LogSettings", ()).await.unwrap();
    assert_eq!(received.settings.len(), 6);
}

#[tokio::test]
async fn tr_908_health_and_reflection_name_the_service() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    grpc.0.ready().await.unwrap();
    // The message `HealthCheckRequest`: its first field is the name of the service.
    let codec = ProstCodec::<String, i32>::default();
    let path = "/grpc.health.v1.Health/Check".parse().unwrap();
    let asked = Request::new("inference.GRPCInferenceService".to_owned());
    let received = grpc.0.unary(asked, path, codec).await.unwrap();
    assert_eq!(received.into_inner(), 1, "it serves");
    grpc.0.ready().await.unwrap();
    // Field 7 of the request asks for the list; the answer holds the names.
    let codec = ProstCodec::<ListServices, ListedServices>::default();
    let path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        .parse()
        .unwrap();
    let asked = stream::iter([ListServices { list: "*".into() }]);
    let received = grpc
        .0
        .streaming(Request::new(asked), path, codec)
        .await
        .unwrap();
    let received = received.into_inner().message().await.unwrap().unwrap();
    let received = String::from_utf8_lossy(&received.list).into_owned();
    assert!(
        received.contains("inference.GRPCInferenceService"),
        "{received}"
    );
}

#[derive(Clone, PartialEq, Message)]
struct ListServices {
    #[prost(string, tag = "7")]
    list: String,
}

#[derive(Clone, PartialEq, Message)]
struct ListedServices {
    #[prost(bytes = "vec", tag = "6")]
    list: Vec<u8>,
}
