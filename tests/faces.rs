//! Tests that run over every face: turns (D-54), limits of one caller, ends of requests, heads.

mod ends;
mod heads;
mod shares;
mod turns;

use std::net::SocketAddr;

use futures::StreamExt;
use sapwood_kernel::connect::{evergreen, triton};
use sapwood_kernel::{Kernel, args};
use sapwood_net::evergreen::ClientSession;
use sapwood_net::lmtp::LmtpClient;
use sapwood_proto::lmtp::GenerateRequest;
use sapwood_proto::params::GenerationParams;
use sapwood_server::ops::metrics::FaceLabel;
use sapwood_tests::http::{Answer, Wire, post};
use sapwood_tests::{Running, spawned, with_model};
use serde_json::json;

use crate::generate::grpc::{self, Grpc};
use crate::lmtp::parrot;

/// A way in which a client calls a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// A session over gRPC.
    EvergreenGrpc,
    /// A session over a WebSocket, in the dialect of this query.
    EvergreenSocket(&'static str),
    /// A WebSocket.
    Lmtp,
    /// `POST /lmtp`
    LmtpPost,
    /// `generate`
    Generate,
    /// `generate_stream`
    GenerateStream,
    /// `infer`
    Infer,
    /// `ModelInfer`
    ModelInfer,
    /// `ModelStreamInfer`
    StreamInfer,
}

/// Every way.
pub(crate) const WAYS: [Way; 11] = [
    Way::EvergreenGrpc,
    Way::EvergreenSocket(""),
    Way::EvergreenSocket("?dialect=json"),
    Way::EvergreenSocket("?dialect=msgpack"),
    Way::Lmtp,
    Way::LmtpPost,
    Way::Generate,
    Way::GenerateStream,
    Way::Infer,
    Way::ModelInfer,
    Way::StreamInfer,
];

impl Way {
    /// The face that the request is counted under.
    pub(crate) const fn face(self) -> FaceLabel {
        match self {
            Self::EvergreenGrpc | Self::EvergreenSocket(_) => FaceLabel::Evergreen,
            Self::Lmtp | Self::LmtpPost => FaceLabel::Lmtp,
            Self::Generate
            | Self::GenerateStream
            | Self::Infer
            | Self::ModelInfer
            | Self::StreamInfer => FaceLabel::Generate,
        }
    }

    /// Calls `parrot` on a connection of its own: its text, or the error.
    pub(crate) async fn ask(self, server: SocketAddr, prompt: &str) -> Result<String, String> {
        self.ask_as(None, server, prompt).await
    }

    /// The same with a key.
    pub(crate) async fn ask_as(
        self,
        key: Option<&str>,
        server: SocketAddr,
        prompt: &str,
    ) -> Result<String, String> {
        match self {
            Self::EvergreenGrpc => session(format!("http://{server}"), key, prompt).await,
            Self::EvergreenSocket(query) => {
                session(format!("ws://{server}/{query}"), key, prompt).await
            }
            Self::Lmtp => lmtp(server, key, prompt).await,
            Self::LmtpPost => lmtp_post(server, key, prompt).await,
            Self::Generate | Self::GenerateStream | Self::Infer => {
                self.http(server, key, prompt).await
            }
            Self::ModelInfer => model_infer(server, key, prompt).await,
            Self::StreamInfer => stream_infer(server, key, prompt).await,
        }
    }

    async fn http(
        self,
        server: SocketAddr,
        key: Option<&str>,
        prompt: &str,
    ) -> Result<String, String> {
        let mut wire = Wire::connect(server).await;
        let (path, body) = match self {
            Self::Infer => {
                let input = json!({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]});
                ("infer", json!({"inputs": [input]}))
            }
            Self::GenerateStream => (
                "generate_stream",
                json!({"text_input": prompt, "stream": true}),
            ),
            _ => ("generate", json!({"text_input": prompt})),
        };
        let path = format!("/v2/models/parrot/{path}");
        let answer = wire.ask(posted(&path, key, &body.to_string())).await;
        let answer = succeeded(answer)?;
        match self {
            Self::Infer => {
                let outputs = answer.json()["outputs"].clone();
                let mut outputs = outputs.as_array().into_iter().flatten();
                let text = outputs.find(|output| output["name"] == "text_output");
                let text = text.and_then(|output| output["data"][0].as_str());
                text.map(str::to_owned)
                    .ok_or_else(|| answer.text().to_owned())
            }
            Self::GenerateStream => {
                let events = answer.events();
                let texts = events.iter().map(|event| event["text_output"].as_str());
                texts
                    .collect::<Option<String>>()
                    .ok_or_else(|| answer.text().to_owned())
            }
            _ => match answer.json()["text_output"].as_str() {
                Some(text) => Ok(text.to_owned()),
                None => Err(answer.text().to_owned()),
            },
        }
    }
}

/// A POST of JSON or of lines.
fn posted(path: &str, key: Option<&str>, body: &str) -> Vec<u8> {
    let key = key.map(|key| format!("authorization: Bearer {key}"));
    let headers: Vec<_> = key.as_deref().into_iter().collect();
    post(path, &headers, body.as_bytes())
}

fn to_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn refused(error: impl std::fmt::Debug) -> String {
    format!("{error:?}")
}

fn succeeded(answer: Answer) -> Result<Answer, String> {
    if answer.head.status == 200 {
        return Ok(answer);
    }
    Err(format!("{} {}", answer.head.status, answer.text()))
}

/// Built by hand, because our own client streams from every model that can.
async fn model_infer(
    server: SocketAddr,
    key: Option<&str>,
    prompt: &str,
) -> Result<String, String> {
    let mut grpc = Grpc::at(server).await.map_err(to_text)?;
    let mut request = tonic::Request::new(grpc::prompt("parrot", "1", prompt, false));
    if let Some(key) = key {
        let bearer = format!("Bearer {key}").parse().map_err(to_text)?;
        request.metadata_mut().insert("authorization", bearer);
    }
    let answer = grpc.send("ModelInfer", request).await.map_err(to_text)?;
    Ok(grpc::text(&answer))
}

async fn stream_infer(
    server: SocketAddr,
    key: Option<&str>,
    prompt: &str,
) -> Result<String, String> {
    let mut address = sapwood_net::triton::ServerAddress::new(format!("triton+grpc://{server}"));
    address.key = key.map(Into::into);
    let client = sapwood_net::triton::TritonClient::connect(&address)
        .await
        .map_err(to_text)?;
    let kernel = Kernel::new();
    kernel
        .add_all(triton::import(&client).await.map_err(to_text)?)
        .map_err(to_text)?;
    called(&kernel, prompt).await
}

async fn session(url: String, key: Option<&str>, prompt: &str) -> Result<String, String> {
    let mut address = sapwood_net::evergreen::ServerAddress::new(url);
    if let Some(key) = key {
        address = address.with_key(key);
    }
    let session = ClientSession::connect(&address, Default::default())
        .await
        .map_err(to_text)?;
    let kernel = Kernel::new();
    let functions = evergreen::import(&session).await.map_err(to_text)?;
    kernel.add_all(functions).map_err(to_text)?;
    called(&kernel, prompt).await
}

async fn called(kernel: &Kernel, prompt: &str) -> Result<String, String> {
    let config = json!({"prompt_mode": "raw"});
    let run = kernel.run::<String>("parrot", args! { prompt: prompt, config: config });
    let (text, _) = run.finish().await.map_err(to_text)?;
    Ok(text)
}

async fn lmtp(server: SocketAddr, key: Option<&str>, prompt: &str) -> Result<String, String> {
    let mut address =
        sapwood_net::lmtp::PeerAddress::parse(&format!("{server}/lmtp")).map_err(refused)?;
    if let Some(key) = key {
        address = address.with_key(key);
    }
    let client = LmtpClient::connect(address, Default::default())
        .await
        .map_err(refused)?;
    let wanted = GenerateRequest {
        prompt: prompt.bytes().map(u32::from).collect(),
        params: GenerationParams {
            max_tokens: Some(1_000),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    };
    let mut items = client.generate("parrot", wanted).await.map_err(refused)?;
    let mut reply = Vec::new();
    while let Some(item) = items.next().await {
        match item {
            Ok(item) => reply.extend(item.token.and_then(|token| u8::try_from(token).ok())),
            Err(error) => return Err(refused(error)),
        }
    }
    String::from_utf8(reply).map_err(to_text)
}

async fn lmtp_post(server: SocketAddr, key: Option<&str>, prompt: &str) -> Result<String, String> {
    let mut wire = Wire::connect(server).await;
    let prompt: Vec<_> = prompt.bytes().map(u32::from).collect();
    let wanted = json!({"model": "parrot", "prompt": prompt, "max_tokens": 1_000, "stream_id": 1});
    let line = format!("GENERATE {wanted}\n");
    let request = posted("/lmtp", key, &line);
    let answer = succeeded(wire.ask(request).await)?;
    let mut reply = Vec::new();
    for line in answer.text().lines() {
        let Some(items) = line.strip_prefix("TOKEN ") else {
            continue;
        };
        let items: Vec<serde_json::Value> = serde_json::from_str(items).map_err(to_text)?;
        for item in items {
            if let Some(error) = item.get("error") {
                return Err(format!("{error} {item}"));
            }
            let token = item["token"].as_u64();
            reply.extend(token.and_then(|token| u8::try_from(token).ok()));
        }
    }
    String::from_utf8(reply).map_err(to_text)
}

/// A face that is missing here would be missing from every table of these tests.
#[tokio::test]
async fn every_face_is_in_the_table_of_requests_and_answers_all_of_them() {
    let faces = [FaceLabel::Evergreen, FaceLabel::Lmtp, FaceLabel::Generate];
    for face in faces {
        assert!(WAYS.iter().any(|way| way.face() == face), "{}", face.name());
    }
    let server = Running::start(
        with_model(spawned(parrot())),
        Default::default(),
        Vec::new(),
    )
    .await;
    for way in WAYS {
        let reply = way.ask(server.address, "Hi").await;
        assert_eq!(reply.as_deref(), Ok("Hi"), "{way:?}");
    }
}
