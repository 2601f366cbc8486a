//! Our client, and remote models, against our own face.

use futures::StreamExt;
use sapwood_engine::api::Tokens;
use sapwood_kernel::connect::lmtp::{LmtpModelTerms, function};
use sapwood_kernel::{Chunk, GenerateConfig, Kernel, Mime, PromptMode, args};
use sapwood_net::lmtp::pool::LmtpPool;
use sapwood_net::lmtp::{ConnectOptions, LmtpClient, PeerAddress, StreamItems};
use sapwood_proto::lmtp::{GenerateRequest, LmtpReason, Score, StreamFinish};
use sapwood_proto::params::GenerationParams;
use sapwood_tests::http::Wire;
use sapwood_tests::socket::Socket;
use sapwood_tests::{Running, spawned};

use super::{kernel, of_parrot, parrot, stream};

async fn connected(server: &Running) -> LmtpClient {
    let address = PeerAddress::parse(&format!("{}/lmtp", server.address)).unwrap();
    LmtpClient::connect(address, ConnectOptions::default())
        .await
        .unwrap()
}

fn wanted(text: &str) -> GenerateRequest {
    GenerateRequest {
        prompt: text.bytes().map(u32::from).collect(),
        ..GenerateRequest::default()
    }
}

/// The tokens of a stream, and how it ended.
async fn whole(mut items: StreamItems) -> (Vec<u32>, Result<StreamFinish, LmtpReason>) {
    let mut tokens = Vec::new();
    while let Some(item) = items.next().await {
        match item {
            Ok(item) => {
                tokens.extend(item.token);
                assert!(item.logprob.is_some_and(|logprob| logprob <= 0.0));
                if let Some(finish) = item.finish {
                    return (tokens, Ok(finish));
                }
            }
            Err(error) => return (tokens, Err(error.reason)),
        }
    }
    panic!("no stream ends silently");
}

/// LM-701, LM-703
#[tokio::test]
async fn lm_702_our_client_works_against_our_face() {
    let server = of_parrot().await;
    let client = connected(&server).await;
    let facts = client.model_info("parrot").await.unwrap();
    assert!(facts.contains("\"vocab_size\":258"), "{facts}");
    let first = client.generate("parrot", wanted("Hi")).await.unwrap();
    let second = client.generate("parrot", wanted("there")).await.unwrap();
    let absent = client.generate("absent", wanted("x")).await.unwrap();
    let scored = Score {
        prompt: vec![72],
        scored: vec![72, 105],
        ..Score::default()
    };
    let scored = client.score("parrot", scored).await.unwrap();
    let all = tokio::join!(whole(first), whole(second), whole(absent), whole(scored));
    assert_eq!(all.0, (vec![72, 105, 257], Ok(StreamFinish::Stop)));
    let there = "there".bytes().map(u32::from).chain([257]);
    assert_eq!(all.1, (there.collect(), Ok(StreamFinish::Stop)));
    assert_eq!(all.2, (Vec::new(), Err(LmtpReason::ModelNotFound)));
    assert_eq!(all.3, (vec![72, 105], Ok(StreamFinish::Stop)));
    assert_eq!(client.outstanding(), 0);
    assert!(!client.raw_logprobs());
}

/// LM-113: one long request, and its response.
#[tokio::test]
async fn lm_701_our_client_works_over_one_long_post_request() {
    let server = of_parrot().await;
    let address = PeerAddress::parse(&format!("post+http://{}", server.address)).unwrap();
    let client = LmtpClient::connect(address, ConnectOptions::default())
        .await
        .unwrap();
    let facts = client.model_info("parrot").await.unwrap();
    assert!(facts.contains("\"vocab_size\":258"), "{facts}");
    let first = client.generate("parrot", wanted("Hi")).await.unwrap();
    let second = client.generate("parrot", wanted("there")).await.unwrap();
    let both = tokio::join!(whole(first), whole(second));
    assert_eq!(both.0, (vec![72, 105, 257], Ok(StreamFinish::Stop)));
    assert_eq!(both.1.1, Ok(StreamFinish::Stop));
    // Another path does not serve LMTP.
    let url = format!("post+http://{}/elsewhere", server.address);
    let refused =
        LmtpClient::connect(PeerAddress::parse(&url).unwrap(), ConnectOptions::default()).await;
    assert_eq!(refused.err().unwrap().reason, LmtpReason::InvalidValue);
    drop(client);
    let open = &server.shared.metrics.lmtp.connections_open;
    sapwood_tests::until("the request has ended", || open.get() == 0).await;
}

/// The output of a function for a prompt of tokens: ids, log-probabilities, alternatives.
async fn sampled(kernel: &Kernel, name: &str) -> Vec<(u32, f32, Vec<(u32, f32)>)> {
    let ids: Vec<u8> = [72_u32, 105]
        .iter()
        .flat_map(|id| id.to_le_bytes())
        .collect();
    let config = GenerateConfig {
        params: GenerationParams {
            max_tokens: Some(9),
            temperature: Some(0.0),
            top_logprobs: Some(3),
            ..GenerationParams::default()
        },
        prompt_mode: PromptMode::Raw,
        ..GenerateConfig::default()
    };
    let prompt = Chunk::bytes(ids).with_mime(Mime::TOKENS);
    let args = args! { prompt: prompt, config: config.into_chunk() };
    let (chunks, _) = kernel.run::<Chunk>(name, args).finish().await.unwrap();
    let tokens = chunks.iter().filter_map(Chunk::inner::<Tokens>);
    let tokens = tokens.flat_map(|tokens| &tokens.tokens);
    tokens
        .map(|token| (token.id, token.logprob, token.top.clone()))
        .collect()
}

#[tokio::test]
async fn lm_712_a_remote_model_gives_the_tokens_of_the_local_one() {
    let server = of_parrot().await;
    let client = connected(&server).await;
    let here = kernel("parrot", spawned(parrot()));
    let pool = LmtpPool::of(client, "parrot").await.unwrap();
    here.add(function(&pool, "far", LmtpModelTerms::default()))
        .unwrap();
    let near = sampled(&here, "parrot").await;
    assert_eq!(near.len(), 3);
    assert_eq!(sampled(&here, "far").await, near);
}

/// A model without a known tokenizer: token ids are served, and text is refused.
#[tokio::test]
async fn lm_712_without_a_tokenizer_text_is_refused_and_token_ids_are_served() {
    let server = of_parrot().await;
    let pool = LmtpPool::of(connected(&server).await, "parrot")
        .await
        .unwrap();
    let here = Kernel::new();
    here.add(function(&pool, "far", LmtpModelTerms::default()))
        .unwrap();
    let front = Running::start(here, Default::default(), Vec::new()).await;
    let mut wire = Wire::connect(front.address).await;
    for path in ["generate", "generate_stream"] {
        let path = format!("/v2/models/far/{path}");
        let answer = wire.post(&path, r#"{"text_input":"x"}"#).await;
        let code = answer.head.header("sapwood-error");
        assert_eq!(code.as_deref(), Some("unimplemented"), "{}", answer.text());
    }
    let client = connected(&front).await;
    let stops = GenerateRequest {
        params: GenerationParams {
            stop: vec!["x".into()],
            ..GenerationParams::default()
        },
        ..wanted("Hi")
    };
    let refused = whole(client.generate("far", stops).await.unwrap()).await;
    assert_eq!(refused.1, Err(LmtpReason::UnsupportedOperation));
    let tokens = whole(client.generate("far", wanted("Hi")).await.unwrap()).await;
    assert_eq!(tokens, (vec![72, 105, 257], Ok(StreamFinish::Stop)));
}

/// LM-974: what a peer cannot give is refused rather than omitted.
#[tokio::test]
async fn lm_974_prompt_logprobs_of_a_remote_model_are_refused() {
    let server = of_parrot().await;
    let pool = LmtpPool::of(connected(&server).await, "parrot")
        .await
        .unwrap();
    let here = Kernel::new();
    here.add(function(&pool, "far", LmtpModelTerms::default()))
        .unwrap();
    let front = Running::start(here, Default::default(), Vec::new()).await;
    let headers = [("sec-websocket-protocol", "lmtp.v2")];
    let mut socket = Socket::open(&front, "/lmtp", &headers).await.unwrap();
    socket
        .send_text(r#"GENERATE {"model":"far","prompt":[72],"prompt_logprobs":true,"stream_id":1}"#)
        .await;
    let items = stream(&mut socket, 1).await;
    assert_eq!(items[0]["code"], "unsupported_operation", "{items:?}");
}
