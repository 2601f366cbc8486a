//! A Triton server over gRPC (section 9 of the page).
//!
//! Each request has its own call of `ModelStreamInfer`. It ends with the response that is marked as final or, if a
//! server does not mark responses, when the call ends successfully. An error of the request ends the call with its
//! status (`triton_grpc_error`, TR-905), or arrives as text from servers that do not support that.

use std::time::Duration;

use ::http::header::{AUTHORIZATION, HeaderValue};
use ::http::uri::PathAndQuery;
use futures::{StreamExt, stream};
use prost::Message;
use sapwood_proto::generate::{decoded_answer_bytes, decoded_part_bytes};
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_proto::generated::inference::repository_index_response::ModelIndex;
use sapwood_proto::generated::inference::{
    InferParameter, ModelConfigRequest, ModelConfigResponse, ModelInferRequest, ModelInferResponse,
    ModelMetadataRequest, ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse,
    ModelStreamInferResponse, RepositoryIndexRequest, RepositoryIndexResponse, ServerReadyRequest,
    ServerReadyResponse,
};
use std::sync::Arc;
use tokio::time::timeout;
use tonic::codec::Codec;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;

use super::address::TritonTarget;
use super::bounded::{BoundedCodec, DECODED_BYTES_MAX, TAKES_TOO_MUCH};
use super::error::{Error, LOST};
use super::model::ModelSignature;
use super::request::{InferRequest, ModelResponse};
use super::{IDLE_TIMEOUT, ModelResponses};
use crate::address::ServerAddress;
use crate::connection::grpc_endpoint;

/// A connected server.
#[derive(Debug)]
pub(super) struct Grpc {
    channel: Channel,
    key: Option<HeaderValue>,
}

impl Grpc {
    pub(super) async fn connect(
        target: &TritonTarget,
        address: &ServerAddress,
    ) -> Result<Self, Error> {
        let scheme = if target.secure { "https" } else { "http" };
        let uri = format!("{scheme}://{}", target.authority);
        let uri = uri
            .parse()
            .map_err(|_| Error::Address("its host is invalid"))?;
        let endpoint = grpc_endpoint(uri, address.authorities.as_deref())
            .map_err(Error::Address)?
            .connect_timeout(address.connect_timeout)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_while_idle(true);
        let key = address.bearer().map_err(Error::Address)?;
        let channel = endpoint.connect().await.map_err(|cause| {
            tracing::debug!(%cause, "cannot connect");
            Error::Unreachable("is the server running there?")
        })?;
        Ok(Self { channel, key })
    }

    /// Returns whether the server, or this model, is ready.
    pub(super) async fn ready(&self, model: Option<&str>) -> Result<bool, Error> {
        let Some(name) = model.map(str::to_owned) else {
            let answer: ServerReadyResponse =
                self.ask("ServerReady", ServerReadyRequest {}).await?;
            return Ok(answer.ready);
        };
        let version = String::new();
        let request = ModelReadyRequest { name, version };
        let answer: ModelReadyResponse = self.ask("ModelReady", request).await?;
        Ok(answer.ready)
    }

    pub(super) async fn index(&self) -> Result<Vec<ModelIndex>, Error> {
        let request = RepositoryIndexRequest {
            ready: true,
            ..RepositoryIndexRequest::default()
        };
        let answer: RepositoryIndexResponse = self.ask("RepositoryIndex", request).await?;
        Ok(answer.models)
    }

    pub(super) async fn model(&self, name: &str) -> Result<ModelSignature, Error> {
        let (name, version) = (name.to_owned(), String::new());
        let request = ModelMetadataRequest {
            name: name.clone(),
            version: version.clone(),
        };
        let metadata: ModelMetadataResponse = self.ask("ModelMetadata", request).await?;
        let mut model = ModelSignature::from_message(metadata)?;
        let request = ModelConfigRequest { name, version };
        match self
            .ask::<_, ModelConfigResponse>("ModelConfig", request)
            .await
        {
            Ok(answer) => model.configure_by(&answer.config.unwrap_or_default()),
            // KServe v2 servers other than Triton have no configurations. An error of the connection is passed on.
            Err(Error::Reply(reply)) => tracing::debug!(code = %reply.code, "no configuration"),
            Err(error) => return Err(error),
        }
        Ok(model)
    }

    /// Sends a request and returns its stream of responses.
    pub(super) async fn generate(&self, request: InferRequest) -> Result<ModelResponses, Error> {
        let mut message = request.message(ID)?;
        // `ModelInfer` is one response without the bookkeeping of a stream, and refused for decoupled models (TR-903).
        if !request.model.decoupled {
            let codec = BoundedCodec::<_, ModelInferResponse>::by(decoded_answer_bytes);
            let asked = self.ask_by(codec, "ModelInfer", message);
            let answer = timeout(IDLE_TIMEOUT, asked).await.map_err(|_| LOST)??;
            let response = ModelResponse::from_message(&request.model, answer).ok_or(UNREAD)?;
            return Ok(stream::iter([Ok(response)]).boxed());
        }
        let flag = InferParameter {
            parameter_choice: Some(ParameterChoice::BoolParam(true)),
        };
        // Without it, only some models mark their end at all (TR-906).
        message.parameters.insert(EMPTY_FINAL.into(), flag);
        let mut asked = self.request(stream::iter([message]));
        let flag = AsciiMetadataValue::from_static("true");
        // Errors then have a code and not only a text. Servers that do not know it ignore it.
        asked.metadata_mut().insert(ERROR_AS_STATUS, flag);
        let mut client = self.client().await?;
        let codec =
            BoundedCodec::<ModelInferRequest, ModelStreamInferResponse>::by(decoded_part_bytes);
        let answer = client.streaming(asked, path("ModelStreamInfer")?, codec);
        let answer = timeout(IDLE_TIMEOUT, answer).await.map_err(|_| LOST)?;
        let answer = answer.map_err(|status| Error::of_grpc(&status, false))?;
        let streamed = GrpcResponses {
            model: request.model,
            answer: answer.into_inner(),
            started: false,
            marked: false,
            ended: false,
        };
        Ok(stream::try_unfold(streamed, GrpcResponses::next).boxed())
    }

    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(key) = &self.key {
            request
                .metadata_mut()
                .as_mut()
                .insert(AUTHORIZATION, key.clone());
        }
        request
    }

    async fn client(&self) -> Result<tonic::client::Grpc<Channel>, Error> {
        let mut client = tonic::client::Grpc::new(self.channel.clone())
            .max_decoding_message_size(ANSWER_BYTES_MAX)
            .max_encoding_message_size(REQUEST_BYTES_MAX);
        client.ready().await.map_err(|cause| {
            tracing::debug!(%cause, "the connection is gone");
            LOST
        })?;
        Ok(client)
    }

    async fn ask<Q, A>(&self, method: &str, message: Q) -> Result<A, Error>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        self.ask_by(ProstCodec::<Q, A>::default(), method, message)
            .await
    }

    async fn ask_by<Q, A>(
        &self,
        codec: impl Codec<Encode = Q, Decode = A>,
        method: &str,
        message: Q,
    ) -> Result<A, Error>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let mut client = self.client().await?;
        let asked = client.unary(self.request(message), path(method)?, codec);
        let answer = asked.await.map_err(|status| failed(&status, false))?;
        Ok(answer.into_inner())
    }
}

fn path(method: &str) -> Result<PathAndQuery, Error> {
    let path = format!("/inference.GRPCInferenceService/{method}");
    path.try_into()
        .map_err(|_| Error::Request("no such method"))
}

/// The responses of a call.
struct GrpcResponses {
    model: Arc<ModelSignature>,
    answer: Streaming<ModelStreamInferResponse>,
    started: bool,
    /// The server marks the final response (TR-906).
    marked: bool,
    ended: bool,
}

impl GrpcResponses {
    async fn next(mut self) -> Result<Option<(ModelResponse, Self)>, Error> {
        while !self.ended {
            let message = timeout(IDLE_TIMEOUT, self.answer.message()).await;
            let message = message.map_err(|_| Error::Truncated)?;
            let message = message.map_err(|status| failed(&status, self.started))?;
            // A server that has marked a response must mark its last one too. One that marks none ends the call.
            let Some(message) = message else {
                return if self.marked {
                    Err(Error::Truncated)
                } else {
                    Ok(None)
                };
            };
            if !message.error_message.is_empty() {
                return Err(Error::of_text(&message.error_message, self.started));
            }
            let message = message.infer_response.unwrap_or_default();
            if let Some(last) = last(&message) {
                self.marked = true;
                self.ended = last;
            }
            // The mark may arrive in a response of its own (TR-906).
            // The one parameter is the mark itself. A response without outputs but with other parameters is the
            // model's.
            if message.outputs.is_empty() && (self.ended || message.parameters.len() <= 1) {
                continue;
            }
            let response = ModelResponse::from_message(&self.model, message).ok_or(UNREAD)?;
            self.started = true;
            return Ok(Some((response, self)));
        }
        Ok(None)
    }
}

/// A message that is too large is an error of this client's library, not one that the server sent.
fn failed(status: &Status, started: bool) -> Error {
    let is_limit = matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted);
    let message = status.message();
    let (name, max) = if is_limit && message.contains(TOO_LARGE) {
        ("bytes of an answer", ANSWER_BYTES_MAX)
    } else if is_limit && message == TAKES_TOO_MUCH {
        ("bytes of an answer once it is decoded", DECODED_BYTES_MAX)
    } else {
        return Error::of_grpc(status, started);
    };
    Error::Limit {
        name,
        max: max as u64,
    }
}

fn last(message: &ModelInferResponse) -> Option<bool> {
    match message.parameters.get(FINAL)?.parameter_choice {
        Some(ParameterChoice::BoolParam(last)) => Some(last),
        _ => None,
    }
}

/// The request id; each call has a single request.
const ID: &str = "1";
const FINAL: &str = "triton_final_response";
const EMPTY_FINAL: &str = "triton_enable_empty_final_response";
const ERROR_AS_STATUS: &str = "triton_grpc_error";
const UNREAD: Error = Error::Protocol("an output is not what it is declared to be");
/// The library's message for a message with too many bytes.
const TOO_LARGE: &str = "decoded message length too large";
const REQUEST_BYTES_MAX: usize = 64 << 20;
/// The maximum of bytes of a response. It is text or model metadata, and its decoded size is computed on the task that
/// reads it.
const ANSWER_BYTES_MAX: usize = 16 << 20;
const KEEPALIVE: Duration = Duration::from_secs(30);
