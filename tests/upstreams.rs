//! A model behind each kind of upstream, called over each face: the text is the model's own, and what an upstream
//! cannot give is `unimplemented`, before anything is sent to it (D-5).

use futures::{StreamExt, stream};
use sapwood_engine::{Engine, scripted};
use sapwood_kernel::connect::{evergreen, lmtp, triton};
use sapwood_kernel::{Error, Fun, GenerateConfig, Kernel, Port, PromptMode, Run, args};
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_net::lmtp::pool::{LmtpPool, PoolEndpoint};
use sapwood_net::lmtp::{ConnectOptions as LmtpOptions, PeerAddress as LmtpAddress};
use sapwood_net::triton::TritonClient;
use sapwood_proto::lmtp::pool as machine;
use sapwood_server::ops::health::HealthState;
use sapwood_tests::http::Wire;
use sapwood_tests::socket::Socket;
use sapwood_tests::{Running, request, spawned, with_model};
use serde_json::{Value, json};

use crate::generate::grpc::{Grpc, prompt, text};
use crate::lmtp::{stream as items, tokens_and_end};

/// The model repeats it, byte by byte.
const PROMPT: &str = "two w\u{f6}rds";

/// The kinds of upstream.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Upstream {
    EvergreenGrpc,
    EvergreenSocket,
    /// With the model's tokenizer, and without.
    Lmtp,
    LmtpTokens,
    TritonHttp,
    TritonGrpc,
}

const UPSTREAMS: [Upstream; 6] = [
    Upstream::EvergreenGrpc,
    Upstream::EvergreenSocket,
    Upstream::Lmtp,
    Upstream::LmtpTokens,
    Upstream::TritonHttp,
    Upstream::TritonGrpc,
];

impl Upstream {
    /// Whether it takes and gives text.
    fn has_text(self) -> bool {
        self != Self::LmtpTokens
    }

    /// Whether it takes and gives token ids, with log-probabilities.
    fn has_tokens(self) -> bool {
        !matches!(self, Self::TritonHttp | Self::TritonGrpc)
    }
}

/// A server with the model `parrot`, and the engine behind it.
async fn there() -> (Running, Engine) {
    there_with(scripted::Config::default()).await
}

async fn there_with(config: scripted::Config) -> (Running, Engine) {
    let engine = spawned(scripted::Config {
        name: "parrot".into(),
        ..config
    });
    let kernel = with_model(engine.clone());
    let server = Running::start(kernel, Default::default(), Vec::new()).await;
    (server, engine)
}

async fn pool(server: &Running) -> LmtpPool {
    let endpoint = PoolEndpoint {
        address: LmtpAddress::parse(&format!("{}/lmtp", server.address)).unwrap(),
        model: "parrot".into(),
        weight: 1,
    };
    let (options, settings) = (LmtpOptions::default(), machine::PoolOptions::default());
    LmtpPool::connect(vec![endpoint], &options, settings)
        .await
        .unwrap()
}

/// The model of `server`, imported as a function.
async fn function(server: &Running, engine: &Engine, kind: Upstream) -> Fun {
    let model = |all: Vec<Fun>| {
        let mut all = all.into_iter();
        all.find(|one| one.spec().name == *"parrot").unwrap()
    };
    let at = server.address;
    match kind {
        Upstream::EvergreenGrpc | Upstream::EvergreenSocket => {
            let scheme = match kind {
                Upstream::EvergreenGrpc => "http",
                _ => "ws",
            };
            let address = ServerAddress::new(format!("{scheme}://{at}"));
            let options = ClientSessionOptions {
                partial_failure: true,
                ..ClientSessionOptions::default()
            };
            let session = ClientSession::connect(&address, options).await.unwrap();
            model(evergreen::import(&session).await.unwrap())
        }
        Upstream::Lmtp | Upstream::LmtpTokens => {
            let known = kind == Upstream::Lmtp;
            let terms = lmtp::LmtpModelTerms {
                vocabulary: known.then(|| engine.vocabulary().clone()),
                ..lmtp::LmtpModelTerms::default()
            };
            lmtp::function(&pool(server).await, "parrot", terms)
        }
        Upstream::TritonHttp | Upstream::TritonGrpc => {
            let scheme = match kind {
                Upstream::TritonHttp => "triton+http",
                _ => "triton+grpc",
            };
            let address = ServerAddress::new(format!("{scheme}://{at}"));
            let client = TritonClient::connect(&address).await.unwrap();
            model(triton::import(&client).await.unwrap())
        }
    }
}

/// A server in front of an upstream.
struct Front {
    kernel: Kernel,
    server: Running,
}

impl Front {
    async fn of(server: &Running, engine: &Engine, kind: Upstream) -> Self {
        let kernel = Kernel::new();
        kernel.add(function(server, engine, kind).await).unwrap();
        kernel
            .add(sapwood_kernel::generate(Default::default()))
            .unwrap();
        let server = Running::start(kernel.clone(), Default::default(), Vec::new()).await;
        Self { kernel, server }
    }

    /// The text that a face gives, or the code of its error.
    async fn ask(&self, face: Face) -> Result<String, String> {
        match face {
            Face::Kernel => {
                let config = GenerateConfig {
                    prompt_mode: PromptMode::Raw,
                    ..GenerateConfig::default()
                };
                let args = args! { prompt: PROMPT, config: config.into_chunk() };
                let run: Run<String> = self.kernel.run("parrot", args);
                run.await.map_err(|error| code(&error))
            }
            Face::Evergreen => self.evergreen().await,
            Face::Lmtp => self.lmtp().await,
            Face::Generate | Face::GenerateStream | Face::Infer => self.http(face).await,
            Face::ModelInfer | Face::ModelStreamInfer => self.grpc(face).await,
        }
    }

    async fn evergreen(&self) -> Result<String, String> {
        let session = self.server.partial().await;
        let mut input = session.write().unwrap();
        let node = input.node().clone();
        let mut request = request("GENERATE", &[("prompt", &node)], &["response"]);
        request.target = "parrot".into();
        let call = session.call(request).unwrap();
        let plain = std::sync::Arc::new(sapwood_proto::evergreen::Metadata::of("text/plain"));
        input.write(&plain, PROMPT.into()).await.unwrap();
        input.end(&plain).unwrap();
        let reply = call.output("response").unwrap().read().whole().await;
        reply
            .map(|reply| String::from_utf8(reply.to_vec()).unwrap())
            .map_err(|status| status.code.name().to_owned())
    }

    async fn lmtp(&self) -> Result<String, String> {
        let mut socket = Socket::open(&self.server, "/lmtp", &[]).await.unwrap();
        let prompt: Vec<u32> = PROMPT.bytes().map(u32::from).collect();
        let message = json!({"stream_id": 1, "model": "parrot", "prompt": prompt, "max_tokens": 99, "top_logprobs": 2});
        socket.send_text(&format!("GENERATE {message}")).await;
        let items = items(&mut socket, 1).await;
        let (tokens, end) = tokens_and_end(&items);
        if end != "stop" {
            return Err(end);
        }
        assert_eq!(tokens.last(), Some(&257), "EOS is sent (LM-404)");
        assert!(
            items
                .iter()
                .all(|item| item["logprob"].as_f64().is_some_and(|it| it <= 0.0))
        );
        let bytes = tokens.iter().filter_map(|token| u8::try_from(*token).ok());
        Ok(String::from_utf8(bytes.collect()).unwrap())
    }

    async fn http(&self, face: Face) -> Result<String, String> {
        let (path, body) = match face {
            Face::Generate => (
                "generate",
                json!({"text_input": PROMPT, "return_finish_reason": true}),
            ),
            Face::GenerateStream => (
                "generate_stream",
                json!({"text_input": PROMPT, "stream": true}),
            ),
            _ => (
                "infer",
                json!({"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}]}),
            ),
        };
        let mut wire = Wire::connect(self.server.address).await;
        let path = format!("/v2/models/parrot/{path}");
        let answer = wire.post(&path, &body.to_string()).await;
        if answer.summary().0 != 200 {
            return Err(answer.head.header("sapwood-error").unwrap());
        }
        let reply = |value: &Value| value["text_output"].as_str().unwrap().to_owned();
        Ok(match face {
            Face::Generate => reply(&answer.json()),
            Face::GenerateStream => answer.events().iter().map(reply).collect(),
            _ => answer.json()["outputs"][0]["data"][0]
                .as_str()
                .unwrap()
                .to_owned(),
        })
    }

    async fn grpc(&self, face: Face) -> Result<String, String> {
        let mut grpc = Grpc::connect(&self.server).await;
        let streams = face == Face::ModelStreamInfer;
        let message = prompt("parrot", "1", PROMPT, streams);
        let refused = |status: tonic::Status| {
            assert_eq!(status.code(), tonic::Code::Unimplemented, "{status}");
            "unimplemented".to_owned()
        };
        if !streams {
            let answer = grpc.send("ModelInfer", tonic::Request::new(message)).await;
            return answer.map(|answer| text(&answer)).map_err(refused);
        }
        let mut answers = grpc.stream(stream::iter([message]), true).await;
        let mut reply = String::new();
        while let Some(answer) = answers.message().await.map_err(refused)? {
            reply.push_str(&text(&answer.infer_response.unwrap()));
        }
        Ok(reply)
    }
}

fn code(error: &Error) -> String {
    error.code().name().to_owned()
}

/// The faces over which a model can be called.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Face {
    Kernel,
    Evergreen,
    Lmtp,
    Generate,
    GenerateStream,
    Infer,
    ModelInfer,
    ModelStreamInfer,
}

const FACES: [Face; 8] = [
    Face::Kernel,
    Face::Evergreen,
    Face::Lmtp,
    Face::Generate,
    Face::GenerateStream,
    Face::Infer,
    Face::ModelInfer,
    Face::ModelStreamInfer,
];

/// LM-712, TR-1311: every face before every kind of upstream.
#[tokio::test]
async fn d_5_every_face_gives_the_text_of_the_model_through_every_kind_of_upstream() {
    let (server, engine) = there().await;
    for kind in UPSTREAMS {
        let front = Front::of(&server, &engine, kind).await;
        for face in FACES {
            let asked = engine.stats().prompt_tokens.get();
            let given = front.ask(face).await;
            let can = if face == Face::Lmtp {
                kind.has_tokens()
            } else {
                kind.has_text()
            };
            if can {
                assert_eq!(given.as_deref(), Ok(PROMPT), "{kind:?} {face:?}");
                continue;
            }
            let code = given.unwrap_err();
            let expect = if face == Face::Lmtp {
                "unsupported_operation"
            } else {
                "unimplemented"
            };
            assert_eq!(code, expect, "{kind:?} {face:?}");
            let after = engine.stats().prompt_tokens.get();
            assert_eq!(after, asked, "{kind:?} {face:?}: refused before any work");
        }
    }
}

/// D-5: log-probabilities are returned by upstreams that have them, and refused for the others.
#[tokio::test]
async fn d_5_log_probabilities_are_returned_or_refused_and_never_omitted() {
    let (server, engine) = there().await;
    for kind in UPSTREAMS {
        if !kind.has_text() {
            continue;
        }
        let front = Front::of(&server, &engine, kind).await;
        let asked = engine.stats().prompt_tokens.get();
        let config = json!({"prompt_mode": "raw", "top_logprobs": 2});
        let run = front
            .kernel
            .run::<sapwood_kernel::Chunk>("parrot", args! { prompt: PROMPT, config: config });
        let lines: Vec<_> = run.port(Port::LOGPROBS).collect().await;
        let mut wire = Wire::connect(front.server.address).await;
        let body = json!({"text_input": PROMPT, "return_logprobs": true, "logprobs": 1});
        let answer = wire
            .post("/v2/models/parrot/generate", &body.to_string())
            .await;
        if kind.has_tokens() {
            assert!(lines.len() >= PROMPT.len(), "{kind:?}: {lines:?}");
            let received = answer.json();
            let received = received["logprobs"].as_str().unwrap();
            let received: Value = serde_json::from_str(received).unwrap();
            assert!(
                received.as_array().unwrap().len() >= PROMPT.len(),
                "{received}"
            );
            continue;
        }
        let error = lines.into_iter().find_map(Result::err).unwrap();
        assert_eq!(code(&error), "unimplemented", "{kind:?}");
        assert_eq!(answer.summary().0, 501, "{kind:?}: {}", answer.text());
        let after = engine.stats().prompt_tokens.get();
        assert_eq!(after, asked, "{kind:?}: refused before any work");
    }
}

/// LM-331: MODEL_INFO has what is known of the model.
#[tokio::test]
async fn lm_331_model_info_describes_models_of_upstreams() {
    let (server, engine) = there().await;
    for kind in UPSTREAMS {
        let front = Front::of(&server, &engine, kind).await;
        let mut socket = Socket::open(&front.server, "/lmtp", &[]).await.unwrap();
        socket
            .send_text(r#"MODEL_INFO {"stream_id":1,"model":"parrot"}"#)
            .await;
        let (word, answer) = crate::lmtp::message(&mut socket).await;
        let facts = &answer[0]["model_info"];
        assert_eq!((&*word, &facts["model"]), ("MSG", &json!("parrot")));
        let known = matches!(kind, Upstream::Lmtp | Upstream::LmtpTokens);
        assert_eq!(facts["vocab_size"].as_u64(), known.then_some(258));
        assert_eq!(facts["max_context"].is_null(), !known, "{kind:?}: {facts}");
        let has_tokenizer = !facts["tokenizer"].is_null();
        assert_eq!(has_tokenizer, kind == Upstream::Lmtp, "{kind:?}");
    }
}

/// LM-804, OA-902, TR-204: the only upstream is lost, and no face reports that as its own failure.
#[tokio::test]
async fn lm_804_a_server_without_any_upstream_is_unavailable_and_not_ready() {
    let (server, engine) = there().await;
    let front = Front::of(&server, &engine, Upstream::Lmtp).await;
    let health = &front.server.shared.health;
    health.running("parrot", Box::new(|| std::time::Duration::ZERO));
    server.kill().await;
    health.away("parrot");
    assert_eq!(health.state("parrot"), Some(HealthState::Away));
    let mut wire = Wire::connect(front.server.address).await;
    for path in ["/readyz", "/v2/health/ready", "/v2/models/parrot/ready"] {
        let answer = wire.get(path).await;
        assert_ne!(answer.summary().0, 200, "{path}");
    }
    for path in ["generate", "generate_stream"] {
        let path = format!("/v2/models/parrot/{path}");
        let answer = wire.post(&path, r#"{"text_input":"x"}"#).await;
        assert_eq!(answer.summary().0, 503, "{path}: {}", answer.text());
        assert!(answer.head.header("retry-after").is_some());
    }
    assert_eq!(front.ask(Face::Evergreen).await, Err("unavailable".into()));
    assert_eq!(front.ask(Face::Kernel).await, Err("unavailable".into()));
    assert_eq!(front.ask(Face::Lmtp).await, Err("upstream_error".into()));
}

/// The prefix and the suffix are put together at the upstream, or here if it takes tokens alone and the tokenizer is known.
#[tokio::test]
async fn a_suffix_reaches_the_model_of_an_upstream() {
    let config = scripted::Config {
        infill: true,
        ..scripted::Config::default()
    };
    let (there, engine) = there_with(config).await;
    for kind in UPSTREAMS {
        let front = Front::of(&there, &engine, kind).await;
        let args = args! { prompt: "ab", suffix: "cd" };
        let run: Run<String> = front.kernel.run("parrot", args);
        let answered = run.finish().await;
        let answered = answered.map(|(text, meta)| (text, meta.usage.prompt_tokens));
        // BOS and the three tokens around the texts.
        let expected = match kind.has_text() {
            true => Ok(("abcd".to_owned(), 8)),
            false => Err("unimplemented".to_owned()),
        };
        assert_eq!(answered.map_err(|error| code(&error)), expected, "{kind:?}");
    }
}
