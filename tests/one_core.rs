//! Every face reaches the same function: the same prompt and seed give the same tokens.

use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use sapwood_engine::api::Vocabulary;
use sapwood_engine::scripted::{self, Script};
use sapwood_engine::tokenizer::{FileTokenizer, SpecialTokens, TokenizerFiles};
use sapwood_kernel::connect::lmtp::{LmtpModelTerms, function};
use sapwood_kernel::{Kernel, model};
use sapwood_net::evergreen::SessionNode;
use sapwood_net::lmtp::pool::LmtpPool;
use sapwood_net::lmtp::{ConnectOptions, LmtpClient, PeerAddress};
use sapwood_proto::evergreen::Metadata;
use sapwood_proto::generated::inference::model_infer_request::InferInputTensor;
use sapwood_proto::generated::inference::{
    ModelInferRequest, ModelInferResponse, ModelStreamInferResponse,
};
use sapwood_tests::http::Wire;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, request, spawned};
use serde_json::{Value, json};
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

const PROMPT: &str = "two roads diverged";
const TOKENS: u32 = 24;
const SEED: u64 = 20_260;

/// The output of a face, as far as the face shows it.
#[derive(Debug, PartialEq)]
struct Given {
    tokens: Option<Vec<u64>>,
    text: Option<String>,
}

/// A model whose output depends on the seed.
fn wanderer() -> scripted::Config {
    scripted::Config {
        name: "wanderer".into(),
        script: Script::Tokens,
        gap: 1.0,
        vocab: 2000,
        ..scripted::Config::default()
    }
}

async fn evergreen(server: &Running) -> Given {
    let session = server.session().await;
    let leaf = async |mime: &str, data: Vec<u8>| {
        let metadata = Arc::new(Metadata::of(mime));
        let mut writer = session.write().unwrap();
        writer.write(&metadata, Bytes::from(data)).await.unwrap();
        writer.end(&metadata).unwrap()
    };
    let config = json!({"prompt_mode": "raw", "temperature": 0.9, "top_p": 0.95, "max_tokens": TOKENS, "seed": SEED});
    let prompt = leaf("text/plain", PROMPT.into()).await;
    let config = leaf("application/json", config.to_string().into()).await;
    let inputs = [("prompt", &prompt), ("config", &config)];
    let call = session
        .call(request("wanderer", &inputs, &["response", "tokens"]))
        .unwrap();
    let whole = async |node: Option<SessionNode>| node.unwrap().read().whole().await.unwrap();
    let (text, tokens) =
        futures::join!(whole(call.output("response")), whole(call.output("tokens")));
    let (words, rest) = tokens.as_chunks::<4>();
    assert!(rest.is_empty());
    Given {
        tokens: Some(
            words
                .iter()
                .map(|id| u32::from_le_bytes(*id).into())
                .collect(),
        ),
        text: Some(String::from_utf8(text).unwrap()),
    }
}

async fn lmtp(server: &Running, prompt: &[u32]) -> Given {
    let mut socket = Socket::open(server, "/lmtp", &[]).await.unwrap();
    let generate = json!({"model": "wanderer", "stream_id": 1, "prompt": prompt, "temperature": 0.9, "top_p": 0.95,
        "max_tokens": TOKENS, "seed": SEED});
    socket.send_text(&format!("GENERATE {generate}")).await;
    let mut tokens = Vec::new();
    loop {
        let SocketReply::Text(text) = socket.received().await else {
            panic!("no message");
        };
        let items: Vec<Value> = serde_json::from_str(text.strip_prefix("TOKEN ").unwrap()).unwrap();
        for item in items {
            tokens.push(item["token"].as_u64().unwrap());
            if !item["finish_reason"].is_null() {
                return Given {
                    tokens: Some(tokens),
                    text: None,
                };
            }
        }
    }
}

fn generate_body(stream: bool) -> String {
    json!({"text_input": PROMPT, "stream": stream, "temperature": 0.9, "top_p": 0.95, "max_tokens": TOKENS,
        "seed": SEED})
    .to_string()
}

fn text_alone(text: String) -> Given {
    Given {
        tokens: None,
        text: Some(text),
    }
}

async fn generate(server: &Running) -> Given {
    let mut wire = Wire::connect(server.address).await;
    let answer = wire
        .post("/v2/models/wanderer/generate", &generate_body(false))
        .await;
    text_alone(answer.json()["text_output"].as_str().unwrap().to_owned())
}

async fn generate_stream(server: &Running) -> Given {
    let mut wire = Wire::connect(server.address).await;
    let path = "/v2/models/wanderer/generate_stream";
    let answer = wire.post(path, &generate_body(true)).await;
    let pieces = answer.events();
    assert!(pieces.len() > 1, "it is streamed");
    let texts = pieces
        .iter()
        .map(|event| event["text_output"].as_str().unwrap());
    text_alone(texts.collect())
}

async fn infer(server: &Running) -> Given {
    let input = |name: &str, datatype: &str, data: Value| json!({"name": name, "datatype": datatype, "shape": [1], "data": [data]});
    let body = json!({"inputs": [
        input("text_input", "BYTES", PROMPT.into()),
        input("temperature", "FP32", 0.9.into()),
        input("top_p", "FP32", 0.95.into()),
        input("max_tokens", "INT32", TOKENS.into()),
        input("seed", "UINT64", SEED.into()),
    ]});
    let mut wire = Wire::connect(server.address).await;
    let answer = wire
        .post("/v2/models/wanderer/infer", &body.to_string())
        .await;
    let text = &answer.json()["outputs"][0]["data"][0];
    text_alone(text.as_str().unwrap().to_owned())
}

/// `ModelInfer`, or `ModelStreamInfer`.
async fn grpc(server: &Running, stream: bool) -> Given {
    let input = |name: &str, datatype: &str| InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: vec![1],
        ..InferInputTensor::default()
    };
    let length = u32::try_from(PROMPT.len()).unwrap().to_le_bytes();
    let inputs: [(&str, &str, Vec<u8>); 6] = [
        ("text_input", "BYTES", [&length, PROMPT.as_bytes()].concat()),
        ("stream", "BOOL", vec![stream.into()]),
        ("temperature", "FP32", 0.9_f32.to_le_bytes().into()),
        ("top_p", "FP32", 0.95_f32.to_le_bytes().into()),
        ("max_tokens", "INT32", TOKENS.to_le_bytes().into()),
        ("seed", "UINT64", SEED.to_le_bytes().into()),
    ];
    let message = ModelInferRequest {
        model_name: "wanderer".into(),
        inputs: inputs.iter().map(|it| input(it.0, it.1)).collect(),
        raw_input_contents: inputs.into_iter().map(|it| it.2.into()).collect(),
        ..ModelInferRequest::default()
    };
    let text = |answer: &ModelInferResponse| {
        let text = answer.raw_output_contents.first().map(|raw| &raw[4..]);
        String::from_utf8(text.unwrap_or_default().to_vec()).unwrap()
    };
    let address = format!("http://{}", server.address);
    let channel = Channel::from_shared(address).unwrap();
    let mut client = tonic::client::Grpc::new(channel.connect().await.unwrap());
    client.ready().await.unwrap();
    let path = |method| format!("/inference.GRPCInferenceService/{method}");
    if !stream {
        let codec = ProstCodec::<ModelInferRequest, ModelInferResponse>::default();
        let path = path("ModelInfer").parse().unwrap();
        let answer = client
            .unary(tonic::Request::new(message), path, codec)
            .await;
        return text_alone(text(answer.unwrap().get_ref()));
    }
    let codec = ProstCodec::<ModelInferRequest, ModelStreamInferResponse>::default();
    let path = path("ModelStreamInfer").parse().unwrap();
    let messages = tonic::Request::new(futures::stream::iter([message]));
    let answer = client.streaming(messages, path, codec).await.unwrap();
    let answers: Vec<_> = answer.into_inner().try_collect().await.unwrap();
    assert!(answers.len() > 1, "it is streamed");
    let texts = answers
        .iter()
        .map(|it| text(it.infer_response.as_ref().unwrap()));
    text_alone(texts.collect())
}

/// The output of Evergreen, after checking that every other face gives the same.
async fn agreed(server: &Running, vocabulary: &dyn Vocabulary) -> Given {
    let mut prompt: Vec<u32> = vocabulary.bos().into_iter().collect();
    prompt.extend(vocabulary.tokenize(PROMPT, false));
    let first = evergreen(server).await;
    let tokens = first.tokens.as_ref().unwrap();
    assert_eq!(tokens.len(), TOKENS as usize);
    let reply: Vec<u8> = tokens
        .iter()
        .flat_map(|id| vocabulary.bytes(u32::try_from(*id).unwrap()).to_vec())
        .collect();
    assert_eq!(
        first.text.as_deref(),
        Some(&*String::from_utf8_lossy(&reply))
    );
    let others = [
        ("lmtp", lmtp(server, &prompt).await),
        ("generate", generate(server).await),
        ("generate_stream", generate_stream(server).await),
        ("infer", infer(server).await),
        ("ModelInfer", grpc(server, false).await),
        ("ModelStreamInfer", grpc(server, true).await),
    ];
    for (face, given) in others {
        let expected = Given {
            tokens: given.tokens.as_ref().and_then(|_| first.tokens.clone()),
            text: given.text.as_ref().and_then(|_| first.text.clone()),
        };
        assert_eq!(given, expected, "{face}");
    }
    first
}

/// D-21, D-24
#[tokio::test]
async fn lm_605_tr_1311_the_same_prompt_and_seed_give_the_same_tokens_at_every_face() {
    let engine = spawned(wanderer());
    let vocabulary = engine.vocabulary().clone();
    let kernel = Kernel::new();
    kernel.add(model("wanderer", engine)).unwrap();
    let server = Running::start(kernel, Default::default(), Vec::new()).await;
    agreed(&server, &*vocabulary).await;
}

/// LM-951: the server behind it sends its tokenizer, and the faces in front behave as with a local model.
#[tokio::test]
async fn lm_712_every_face_gives_the_tokens_of_the_model_through_an_upstream() {
    let engine = spawned(scripted::Config {
        tokenizer: Some(scripted::ScriptedTokenizer::Bytes),
        ..wanderer()
    });
    let vocabulary = engine.vocabulary().clone();
    let kernel = Kernel::new();
    kernel.add(model("wanderer", engine)).unwrap();
    let back = Running::start(kernel, Default::default(), Vec::new()).await;
    let near = agreed(&back, &*vocabulary).await;
    let address = PeerAddress::parse(&format!("{}/lmtp", back.address)).unwrap();
    let file = address.fetch("/lmtp/tokenizer/wanderer").await.unwrap();
    let client = LmtpClient::connect(address, ConnectOptions::default())
        .await
        .unwrap();
    let pool = LmtpPool::of(client, "wanderer").await.unwrap();
    let files = TokenizerFiles {
        tokenizer: file,
        ..TokenizerFiles::default()
    };
    let ends = SpecialTokens {
        bos: Some(vocabulary.bos()),
        ends: vec![257],
        infill: None,
    };
    let tokenizer = Arc::new(FileTokenizer::new(&files, ends).unwrap());
    let terms = LmtpModelTerms {
        vocabulary: Some(tokenizer.clone()),
        ..LmtpModelTerms::default()
    };
    let kernel = Kernel::new();
    kernel.add(function(&pool, "wanderer", terms)).unwrap();
    let front = Running::start(kernel, Default::default(), Vec::new()).await;
    assert_eq!(agreed(&front, &*tokenizer).await, near);
}
