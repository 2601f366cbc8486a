//! A model of a scripted LMTP server, called like any function.

use sapwood_net::lmtp::{ConnectOptions, LmtpClient};
use sapwood_proto::code::Code;
use sapwood_proto::lmtp::LmtpReason;
use sapwood_proto::params::GenerationParams;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex};

use sapwood_engine::api::Sampled;
use sapwood_engine::model::Model;
use sapwood_engine::scripted::{Config, Scripted};
use sapwood_proto::lmtp::LmtpError;
use serde_json::Value;

use super::*;
use crate::meta::ChoiceFinish;
use crate::model::{GenerateConfig, PromptMode};
use crate::name::Mime;
use crate::want::RequestedPorts;
use crate::{Kernel, Run, args};

/// The server, after the request for its model's facts.
struct Fake(BufReader<DuplexStream>);

impl Fake {
    async fn received(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).await.unwrap();
        line.trim_end().to_owned()
    }

    async fn send(&mut self, line: &str) {
        self.0.write_all(line.as_bytes()).await.unwrap();
        self.0.write_all(b"\n").await.unwrap();
    }
}

const FACTS: &str =
    r#"MSG [{"stream_id":1,"model_info":{"model":"tiny","vocab_size":300,"max_context":64}}]"#;

async fn joined(facts: &str) -> Result<(Kernel, Fake), LmtpError> {
    joined_on(facts, LmtpModelTerms::default()).await
}

/// A peer whose tokens are bytes.
async fn of_bytes() -> (Kernel, Fake) {
    joined_on(FACTS, byte_terms()).await.unwrap()
}

fn byte_terms() -> LmtpModelTerms {
    let script = Config {
        chat: true,
        ..Config::default()
    };
    LmtpModelTerms {
        vocabulary: Some(Scripted::new(script).unwrap().vocabulary()),
        chat: true,
        ..LmtpModelTerms::default()
    }
}

async fn joined_on(facts: &str, terms: LmtpModelTerms) -> Result<(Kernel, Fake), LmtpError> {
    let (ours, theirs) = duplex(1 << 16);
    let client = LmtpClient::over(ours, ConnectOptions::base());
    let mut fake = Fake(BufReader::new(theirs));
    let answering = async {
        fake.received().await;
        fake.send(facts).await;
    };
    let (made, ()) = tokio::join!(LmtpPool::of(client, "tiny"), answering);
    let kernel = Kernel::new();
    kernel.add(function(&made?, "far", terms)).unwrap();
    Ok((kernel, fake))
}

fn ids(ids: &[u32]) -> Chunk {
    let data: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Chunk::bytes(data).with_mime(Mime::TOKENS)
}

/// Requests every port, and the raw objects of engines.
fn typed(kernel: &Kernel, prompt: &[u32], config: GenerateConfig) -> Run<Chunk> {
    kernel.run(
        "far",
        args! { prompt: ids(prompt), config: config.into_chunk() },
    )
}

/// The tokens of the chunks.
fn sampled(chunks: &[Chunk]) -> Vec<Sampled> {
    let tokens = chunks.iter().filter_map(Chunk::inner::<Tokens>);
    tokens.flat_map(|tokens| tokens.tokens.clone()).collect()
}

#[tokio::test]
async fn lm_712_an_upstream_model_without_tokenizer_takes_and_returns_tokens() {
    let (kernel, mut fake) = joined(FACTS).await.unwrap();
    let config = GenerateConfig::from(GenerationParams {
        max_tokens: Some(2),
        temperature: Some(0.0),
        top_logprobs: Some(2),
        logit_bias: [(9, 1.0), (3, f32::NEG_INFINITY)].into(),
        ..GenerationParams::default()
    });
    let run = typed(&kernel, &[1, 2], config);
    let answering = async {
        assert_eq!(
            fake.received().await,
            r#"GENERATE {"max_tokens":2,"temperature":0.0,"top_logprobs":2,"model":"tiny","prompt":[1,2],"stream_id":2,"logit_bias":{"3":-100.0,"9":1.0}}"#
        );
        fake.send(r#"TOKEN [{"stream_id":2,"token":7,"logprob":-2.5,"top_logprobs":{"7":-2.5,"4":-0.5,"5":-1.5}}]"#).await;
        fake.send(r#"TOKEN [{"stream_id":2,"token":4,"logprob":-0.5,"finish_reason":"stop","top_logprobs":{"4":-0.5,"5":-1.0}}]"#).await;
    };
    let (ended, ()) = tokio::join!(run.finish(), answering);
    let (chunks, meta) = ended.unwrap();
    let tokens = sampled(&chunks);
    let seen: Vec<_> = tokens
        .iter()
        .map(|token| (token.id, token.logprob, token.top.clone()))
        .collect();
    assert_eq!(
        seen,
        [
            (7, -2.5, vec![(4, -0.5), (5, -1.5)]),
            (4, -0.5, vec![(4, -0.5), (5, -1.0)]),
        ]
    );
    let port = chunks.iter().filter(|chunk| chunk.port == Port::TOKENS);
    let listed: Vec<u8> = port.flat_map(|chunk| chunk.data.to_vec()).collect();
    assert_eq!(listed, [7, 0, 0, 0, 4, 0, 0, 0]);
    assert_eq!(meta.finish[&0], ChoiceFinish::Stop);
    assert_eq!(
        (meta.usage.prompt_tokens, meta.usage.completion_tokens),
        (2, 2)
    );
}

/// D-42: no LMTP server has bad words, and to detect them here would take a stream for each.
#[tokio::test]
async fn tr_401_bad_words_of_a_model_on_another_server_are_refused() {
    let (tokens, _silent) = joined(FACTS).await.unwrap();
    let (bytes, _silent) = of_bytes().await;
    for kernel in [&tokens, &bytes] {
        let config = GenerateConfig {
            params: GenerationParams {
                bad_words: vec!["x".into()],
                ..GenerationParams::default()
            },
            prompt_mode: PromptMode::Raw,
            ..GenerateConfig::default()
        };
        let error = typed(kernel, &[1], config).finish().await.unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented, "{error}");
        assert!(error.to_string().contains("bad_words"), "{error}");
    }
}

#[tokio::test]
async fn lm_712_unsupported_requests_are_refused_before_anything_is_sent() {
    let (kernel, mut fake) = joined(FACTS).await.unwrap();
    let one = || {
        GenerateConfig::from(GenerationParams {
            max_tokens: Some(1),
            ..GenerationParams::default()
        })
    };
    let far = |prompt: Chunk, config: Value| -> Run<Chunk> {
        kernel.run("far", args! { prompt: prompt, config: config })
    };
    let half = Chunk::bytes(&b"123"[..]).with_mime(Mime::TOKENS);
    let messages = json!([{"role": "user", "content": "x"}]);
    for (what, run, code) in [
        (
            "a text",
            far(Chunk::text("x"), json!({})),
            Code::Unimplemented,
        ),
        (
            "chat",
            kernel.run("far", args! { messages: messages }),
            Code::Unimplemented,
        ),
        (
            "text as an answer",
            typed(&kernel, &[1], one()).wanting(RequestedPorts::main().into()),
            Code::Unimplemented,
        ),
        (
            "a seed",
            far(ids(&[1]), json!({"seed": 2})),
            Code::Unimplemented,
        ),
        (
            "a stop text",
            far(ids(&[1]), json!({"stop": "x"})),
            Code::Unimplemented,
        ),
        (
            "a bias by text",
            far(ids(&[1]), json!({"logit_bias": {"a": 1}})),
            Code::InvalidRequest,
        ),
        (
            "no token of its own",
            far(ids(&[1]), json!({"logit_bias": {"300": 1}})),
            Code::InvalidRequest,
        ),
        ("half a token", far(half, json!({})), Code::InvalidRequest),
        (
            "no prompt",
            kernel.run("far", args! { config: json!({}) }),
            Code::InvalidRequest,
        ),
    ] {
        let error = run.finish().await.expect_err(what);
        assert_eq!(error.code(), code, "{what}: {error}");
    }
    let run = typed(&kernel, &[1], one());
    let answering = async {
        let incoming = fake.received().await;
        assert!(incoming.contains("\"stream_id\":2"), "nothing was sent");
        fake.send(r#"TOKEN [{"stream_id":2,"token":7}]"#).await;
    };
    let (ended, ()) = tokio::join!(run.finish(), answering);
    assert!(ended.is_ok());
}

/// D-30
#[tokio::test]
async fn lm_712_errors_of_the_peer_are_reported_with_their_code() {
    let (kernel, mut fake) = joined(FACTS).await.unwrap();
    let run = typed(&kernel, &[1], GenerateConfig::default());
    let answering = async {
        fake.received().await;
        fake.send(r#"TOKEN [{"stream_id":2,"error":"busy","code":"server_overloaded","retry_after_ms":70}]"#).await;
    };
    let (ended, ()) = tokio::join!(run.finish(), answering);
    let error = ended.unwrap_err();
    assert_eq!(error.code(), Code::Overloaded);
    assert!(matches!(
        error,
        Error::Remote {
            retryable: true,
            retry_after: Some(_),
            ..
        }
    ));
}

/// LM-703: without a limit of the caller, the remaining context.
#[tokio::test]
async fn lm_712_a_json_config_is_decoded_and_scoring_is_forwarded() {
    let (kernel, mut fake) = joined(FACTS).await.unwrap();
    let run: Run<Chunk> = kernel.run(
        "far",
        args! { prompt: ids(&[1, 2, 3]), config: json!({"topK": 5}) },
    );
    let answering = async {
        let incoming = fake.received().await;
        assert!(
            incoming.starts_with(r#"GENERATE {"max_tokens":61,"temperature":1.0,"#),
            "{incoming}"
        );
        assert!(incoming.ends_with(r#","top_k":5}"#), "{incoming}");
        fake.send(r#"TOKEN [{"stream_id":2,"token":7,"finish_reason":"length"}]"#)
            .await;
    };
    let (ended, ()) = tokio::join!(run.finish(), answering);
    assert_eq!(ended.unwrap().1.finish[&0], ChoiceFinish::Length);
    let config = GenerateConfig {
        scored: Some(vec![5, 6]),
        ..GenerateConfig::default()
    };
    let run = typed(&kernel, &[1], config);
    let answering = async {
        let incoming = fake.received().await;
        assert_eq!(
            incoming,
            r#"SCORE {"model":"tiny","prompt":[1],"scored":[5,6],"stream_id":3}"#
        );
        fake.send(r#"TOKEN [{"stream_id":3,"token":5,"logprob":-1.0},{"stream_id":3,"token":6,"logprob":-2.0,"finish_reason":"stop"}]"#).await;
    };
    let (ended, ()) = tokio::join!(run.finish(), answering);
    let scores: Vec<f32> = sampled(&ended.unwrap().0)
        .iter()
        .map(|token| token.logprob)
        .collect();
    assert_eq!(scores, [-1.0, -2.0]);
}

#[tokio::test]
async fn lm_711_invalid_log_probabilities_are_dropped() {
    let (kernel, mut fake) = joined(FACTS).await.unwrap();
    let config = GenerateConfig::from(GenerationParams {
        max_tokens: Some(1),
        top_logprobs: Some(1),
        ..GenerationParams::default()
    });
    let run = typed(&kernel, &[1], config);
    let answering = async {
        fake.received().await;
        fake.send(r#"TOKEN [{"stream_id":2,"token":7,"logprob":12.5,"top_logprobs":{"7":12.5}}]"#)
            .await;
    };
    let (ended, ()) = tokio::join!(run.finish(), answering);
    let tokens = sampled(&ended.unwrap().0);
    assert!(tokens[0].logprob.is_nan() && tokens[0].top.is_empty());
}

/// LM-331: the facts that the reference server reports.
#[tokio::test]
async fn lm_712_a_model_without_reported_facts_is_served_and_a_missing_one_is_an_error() {
    let little = r#"MSG [{"stream_id":1,"model_info":"<unavailable>"}]"#;
    let (kernel, mut fake) = joined(little).await.unwrap();
    let run: Run<Chunk> = kernel.run("far", args! { prompt: ids(&[1]) });
    let answering = async {
        assert!(fake.received().await.contains("\"max_tokens\":32,"));
        drop(fake);
    };
    let (ended, ()) = tokio::join!(run.finish(), answering);
    // The server was lost, and there is no other.
    let error = ended.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.retryable() && error.retry_after().is_some());
    let absent = r#"MSG [{"stream_id":1,"error":"no","code":"model_not_found"}]"#;
    let refused = joined(absent).await.err().unwrap();
    assert_eq!(refused.reason, LmtpReason::ModelNotFound);
}

/// LM-704: stop texts are matched here.
#[tokio::test]
async fn lm_712_with_a_tokenizer_text_goes_in_and_text_comes_out() {
    let (kernel, mut fake) = of_bytes().await;
    let asking: Run<String> = kernel.run(
        "far",
        args! { prompt: "Hi", config: json!({"promptMode": "raw", "maxTokens": 9, "stop": ["c\u{f6}"]}) },
    );
    let answering = async {
        assert_eq!(
            fake.received().await,
            r#"GENERATE {"max_tokens":9,"temperature":1.0,"top_logprobs":1,"model":"tiny","prompt":[256,72,105],"stream_id":2}"#
        );
        for token in b"a c\xc3\xb6!".map(u32::from) {
            fake.send(&format!(r#"TOKEN [{{"stream_id":2,"token":{token}}}]"#))
                .await;
        }
    };
    let (ended, ()) = tokio::join!(asking.finish(), answering);
    let (text, meta) = ended.unwrap();
    assert_eq!(text, "a ");
    assert_eq!(meta.finish[&0], ChoiceFinish::Stop);
    // The tokens of the stop text were computed.
    assert_eq!(
        (meta.usage.prompt_tokens, meta.usage.completion_tokens),
        (3, 5)
    );
    assert!(!meta.extra.contains_key("seed"), "nobody knows it");
}

#[tokio::test]
async fn lm_712_messages_use_the_chat_template_and_an_eog_token_gives_no_text() {
    let (kernel, mut fake) = of_bytes().await;
    let messages = json!([{"role": "user", "content": "x"}]);
    let asking: Run<String> = kernel.run("far", args! { messages: messages });
    let answering = async {
        let incoming = fake.received().await;
        let open: Vec<String> = b"user\nx".map(|byte| byte.to_string()).into();
        let prompt = format!("\"prompt\":[256,{},257,256,", open.join(","));
        assert!(incoming.contains(&prompt), "{incoming}");
        // A finish reason of the server that is not one of ours; and a token after it.
        fake.send(r#"TOKEN [{"stream_id":2,"token":121},{"stream_id":2,"token":257,"finish_reason":"eos"},{"stream_id":2,"token":9}]"#).await;
    };
    let (ended, ()) = tokio::join!(asking.finish(), answering);
    let (text, meta) = ended.unwrap();
    assert_eq!(text, "y");
    assert_eq!(meta.finish[&0], ChoiceFinish::Other(Name::new("eos")));
}

#[tokio::test]
async fn lm_704_each_choice_is_a_stream_of_its_own() {
    let (kernel, mut fake) = of_bytes().await;
    let config = json!({"n": 2, "maxTokens": 2, "promptMode": "raw"});
    let asking: Run<Chunk> = kernel.run("far", args! { prompt: "x", config: config });
    let answering = async {
        let (first, second) = (fake.received().await, fake.received().await);
        assert!(first.ends_with(r#""stream_id":2}"#), "{first}");
        assert_eq!(
            second,
            first.replace(r#""stream_id":2}"#, r#""stream_id":3}"#)
        );
        fake.send(r#"TOKEN [{"stream_id":3,"token":98},{"stream_id":2,"token":97}]"#)
            .await;
        fake.send(r#"TOKEN [{"stream_id":2,"token":97,"finish_reason":"length"},{"stream_id":3,"token":257,"finish_reason":"stop"}]"#).await;
    };
    let (ended, ()) = tokio::join!(asking.finish(), answering);
    let (chunks, meta) = ended.unwrap();
    let reply = |choice| {
        let chunks = chunks
            .iter()
            .filter(|chunk| chunk.port == Port::MAIN && chunk.choice == choice);
        let bytes: Vec<u8> = chunks.flat_map(|chunk| chunk.data.to_vec()).collect();
        String::from_utf8(bytes).unwrap()
    };
    assert_eq!((reply(0), reply(1)), ("aa".into(), "b".into()));
    assert_eq!(
        (&meta.finish[&0], &meta.finish[&1]),
        (&ChoiceFinish::Length, &ChoiceFinish::Stop)
    );
    assert_eq!(meta.usage.completion_tokens, 4);
}

#[tokio::test]
async fn lm_712_max_tokens_of_zero_sends_no_request() {
    let (kernel, _fake) = of_bytes().await;
    let config = json!({"maxTokens": 0});
    let asking: Run<String> = kernel.run("far", args! { prompt: "x", config: config });
    let (text, meta) = asking.finish().await.unwrap();
    assert_eq!(
        (text.as_str(), &meta.finish[&0]),
        ("", &ChoiceFinish::Length)
    );
}
