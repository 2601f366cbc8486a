//! Tests of layers and their origins, of the example file, and of refused configurations.

mod llama;
mod sampling;

use std::path::Path;

use figment::Jail;

use super::layers::{Flags, Layers, ValueOrigin};
use super::*;

fn in_jail(test: impl FnOnce(&mut Jail)) {
    #[expect(
        clippy::result_large_err,
        reason = "the shape that figment's test harness asks for"
    )]
    Jail::expect_with(|jail| {
        test(jail);
        Ok(())
    });
}

#[test]
fn oa_912_flags_win_over_environment_and_file_and_origins_are_recorded() {
    in_jail(|jail| {
        jail.create_file(
            "sapwood.toml",
            "listen = \"a:1\"\nlog = \"warn\"\n[engine]\nctx = 1\nthreads = 2\n",
        )
        .unwrap();
        jail.set_env("SAPWOOD_LOG", "debug");
        jail.set_env("SAPWOOD_ENGINE__THREADS", "3");
        jail.set_env("SAPWOOD_ENGINE__PARALLEL", "4");
        jail.set_env("SAPWOOD_SERVER", "http://x:1");
        jail.set_env("SAPWOOD_API_KEY", "01234567");
        let mut flags = Flags::default();
        flags.set("engine.parallel", "--parallel", Some(5_u32));
        flags.set("engine.ctx", "--ctx", None::<u32>);
        let layers = Layers::read(None, flags).unwrap();
        let config = layers.config().unwrap();
        assert_eq!(
            (config.listen.as_str(), config.log.as_str()),
            ("a:1", "debug")
        );
        assert_eq!(
            (
                config.engine.ctx,
                config.engine.threads,
                config.engine.parallel
            ),
            (1, 3, 5)
        );
        assert_eq!(
            config.client.server.as_ref().map(SecretUrl::expose),
            Some("http://x:1")
        );
        assert_eq!(
            config.client.key.as_ref().map(Secret::expose),
            None,
            "the server's own key is no client's"
        );
        for (key, origin) in [
            ("listen", "file sapwood.toml"),
            ("log", "environment SAPWOOD_LOG"),
            ("engine.ctx", "file sapwood.toml"),
            ("engine.threads", "environment SAPWOOD_ENGINE__THREADS"),
            ("engine.parallel", "flag --parallel"),
            ("client.server", "environment SAPWOOD_SERVER"),
            ("drain.grace", "default"),
            ("auth.key", "environment SAPWOOD_API_KEY"),
            ("auth.key_file", "default"),
        ] {
            assert_eq!(layers.origin(key).to_string(), origin, "{key}");
        }
        assert_eq!(
            config.auth.key.as_ref().map(Secret::expose),
            Some("01234567"),
            "digits stay text"
        );
        assert_eq!(layers.origin("models"), ValueOrigin::Default);
    });
}

/// A file, and the expected error.
const WRONG: &[(&str, [&str; 3])] = &[
    (
        "lisen = \"a:1\"",
        [
            "lisen",
            "unknown field; did you mean `listen`?",
            "sapwood.toml",
        ],
    ),
    (
        "[drain]\ngrace = \"5 parsecs\"",
        ["drain.grace", "5 parsecs", "sapwood.toml"],
    ),
    (
        "[engine]\nctx = \"many\"",
        ["engine.ctx", "many", "sapwood.toml"],
    ),
    (
        "[engine.sampling]\ntemperature = 101",
        [
            "engine.sampling.temperature: must be",
            "not 101",
            "sapwood.toml",
        ],
    ),
    (
        "[engine.sampling]\ntop_kk = 4",
        ["engine.sampling", "did you mean `top_k`?", "sapwood.toml"],
    ),
    (
        "[engine.sampling]\nn = 2",
        ["unknown field", "frequency_penalty", "sapwood.toml"],
    ),
    (
        "[[models]]\nname = \"a\"\nbackend = \"scripted\"\nsampling = { samplers = [\"top_q\"] }",
        ["sampling.samplers: must be", "top_n_sigma", "sapwood.toml"],
    ),
    (
        "[[models]]\nname = \"a\"\nbackend = \"scripted\"\nembedding = true\nsampling = { seed = 1 }",
        ["models.sampling", "`a`", "embeds"],
    ),
    (
        "[[models]]\nname = \"a\"\nbakend = \"mock\"",
        ["bakend", "did you mean `backend`?", "sapwood.toml"],
    ),
    (
        "[[models]]\nname = \"a\"\nbackend = \"scripted\"\ntool_parser = \"hermez\"",
        ["tool_parser", "hermez", "`qwen3_coder`"],
    ),
    (
        "[limits]\nwhatever_else = 1",
        [
            "limits.whatever_else",
            "there are: connections, ",
            "sapwood.toml",
        ],
    ),
    ("[[models]]\nname = \"a\"", ["models.path", "`a`", "GGUF"]),
    (
        "default_model = \"b\"\n[[models]]\nname = \"a\"\nbackend = \"mock\"",
        ["default_model", "`b`", "a"],
    ),
    (
        "upstreams = [\"openai+http://x:1\"]",
        ["upstreams", "openai+http", "not built yet"],
    ),
    (
        "upstreams = [\"lmtp://x:1\"]",
        ["upstreams", "lmtp://x:1", "MODEL"],
    ),
    (
        "[[models]]\nname = \"far\"\nbackend = \"upstream\"",
        ["models.upstream", "`far`", "endpoints"],
    ),
    (
        "[[models]]\nname = \"far\"\nbackend = \"upstream\"\nupstream = { endpoints = [] }",
        ["models.upstream.endpoints", "`far`", "at least one"],
    ),
    (
        "[[models]]\nname = \"far\"\nbackend = \"upstream\"\nupstream = { endpoints = [\"ftp://x\"] }",
        ["models.upstream.endpoints", "`far`", "host:port"],
    ),
    (
        "[[models]]\nname = \"far\"\nbackend = \"upstream\"\n\
         upstream = { endpoints = [{ url = \"x:1\", weight = 0 }] }",
        ["models.upstream.endpoints", "`far`", "weight"],
    ),
    (
        "[[models]]\nname = \"near\"\nbackend = \"scripted\"\nupstream = { endpoints = [\"x:1\"] }",
        ["models.upstream", "`near`", "backend"],
    ),
    (
        "[lmtp]\nmax_frame_out = 4194304",
        ["lmtp.max_frame_out", "4194303", "clients"],
    ),
    (
        "[lmtp]\nmax_streams = 0",
        ["lmtp.max_streams", "at least", "1"],
    ),
    (
        "[tls]\nkey = \"a.key\"",
        ["tls.certificate", "--tls-cert", "both"],
    ),
    (
        "[tls]\nclient_ca = \"ca.pem\"",
        ["tls.certificate", "--tls-key", "both"],
    ),
    (
        "[limits]\nheader_bytes = 8191",
        ["limits.header_bytes", "from 8192", "to 1048576"],
    ),
    (
        "[limits]\nheaders = 10001",
        ["limits.headers", "from 10", "to 10000"],
    ),
    (
        "[limits]\nqueue_requests = 9223372036854775807",
        ["limits.queue_requests", "from 0", "to 1048576"],
    ),
    (
        "[limits]\nstall = \"0s\"",
        ["limits.stall", "more than 0", "365d"],
    ),
    (
        "[limits]\nhandshake = \"0ms\"",
        ["limits.handshake", "more than 0", "no limit"],
    ),
    (
        "[limits]\nidle = \"0s\"",
        ["limits.idle", "more than 0", "no limit"],
    ),
    (
        "[limits]\nbody_idle = \"0s\"",
        ["limits.body_idle", "more than 0", "no limit"],
    ),
    (
        "[limits]\nreverse_timeout = \"0s\"",
        ["limits.reverse_timeout", "more than 0", "no limit"],
    ),
    (
        "[lmtp]\nstall_timeout = \"0s\"",
        ["lmtp.stall_timeout", "more than 0", "no limit"],
    ),
    (
        "[engine]\nwatchdog = \"0s\"",
        ["engine.watchdog", "more than 0", "no limit"],
    ),
    (
        "[engine]\nkept_prefixes = 65537",
        ["engine.kept_prefixes", "from 0", "to 65536"],
    ),
    (
        "[engine]\ndraft_tokens_max = 65",
        ["engine.draft_tokens_max", "from 1", "to 64"],
    ),
    (
        "[engine]\ndraft_p_min = 1.5",
        ["engine.draft_p_min", "from 0", "to 1"],
    ),
    (
        "[[models]]\nname = \"p\"\npath = \"a.gguf\"\nspeculation = \"draft\"",
        ["models.speculation", "`p`", "draft_model"],
    ),
    (
        "[[models]]\nname = \"p\"\npath = \"a.gguf\"\ndraft_ctx = 5",
        ["models.draft_ctx", "`p`", "no draft_model"],
    ),
    (
        "[[models]]\nname = \"p\"\npath = \"a.gguf\"\ndraft_model = \"hf:x\"",
        ["models.draft_model", "`p`", "hf:"],
    ),
    (
        "[engine]\nspeculation = \"ngram\"",
        ["engine.speculation", "`off`", "`lookup`"],
    ),
    (
        "[engine]\nparallel = 65537",
        ["engine.parallel", "from 1", "to 65536"],
    ),
    (
        "[[models]]\nname = \"p\"\nbackend = \"scripted\"\nkept_prefixes = 4294967295",
        ["models.kept_prefixes", "from 0", "to 65536"],
    ),
    (
        "[engine.llama]\ncache_type_k = \"q6_k\"",
        ["engine.llama.cache_type_k", "q6_k", "`iq4_nl`"],
    ),
    (
        "[engine.llama]\ngpu_layers = \"some\"",
        ["engine.llama.gpu_layers", "\"auto\"", "\"all\""],
    ),
    (
        "[engine.llama]\nbatch_tokens = 0",
        ["engine.llama.batch_tokens", "from 1", "to 16384"],
    ),
    (
        "[engine.llama]\ngpu_layer = 1",
        ["gpu_layer", "did you mean `gpu_layers`?", "sapwood.toml"],
    ),
    (
        "[engine.llama]\nflash_attn = \"off\"\n\
         [[models]]\nname = \"p\"\nbackend = \"scripted\"\nllama = { cache_type_v = \"q8_0\" }",
        ["models.llama", "`p`", "cache_type_v"],
    ),
    (
        "[[models]]\nname = \"p\"\nbackend = \"scripted\"\nllama = { numa = \"isolate\" }",
        ["models.llama", "`p`", "engine.llama.numa"],
    ),
    (
        "[[models]]\nname = \"p\"\nbackend = \"scripted\"\nlora = [{ path = \"a\" }, { path = \"a\" }]",
        ["models.lora", "`p`", "twice"],
    ),
    (
        "[[models]]\nname = \"p\"\nbackend = \"scripted\"\nlora = [{ path = \"a\", scale = nan }]",
        ["models.lora", "`p`", "scale of a"],
    ),
    (
        "[[models]]\nname = \"p\"\nbackend = \"scripted\"\nlora = [{ path = \"x/a.gguf\" }, { path = \"y/a.gguf\" }]",
        ["models.lora", "\"a\"", "another `name`"],
    ),
    (
        "[[models]]\nname = \"p\"\nbackend = \"scripted\"\nlora = [{ path = \"a\", name = \"[a]\" }]",
        ["models.lora", "`p`", "bracket"],
    ),
    (
        "upstreams = [\"x\"]",
        ["upstreams", "`x`", "triton+grpc://"],
    ),
];

#[test]
fn oa_912_unknown_keys_and_wrong_types_name_key_and_place() {
    for (text, parts) in WRONG {
        in_jail(|jail| {
            jail.create_file("sapwood.toml", text).unwrap();
            let failure = Layers::read(None, Flags::default())
                .unwrap()
                .config()
                .unwrap_err();
            assert_eq!(failure.exit as u8, 2);
            for part in parts {
                assert!(
                    failure.message.contains(part),
                    "{part} is missing in: {failure}"
                );
            }
        });
    }
    in_jail(|jail| {
        jail.set_env("SAPWOOD_ENGINE__CTX", "many");
        let failure = Layers::read(None, Flags::default()).and_then(|layers| layers.config());
        let message = failure.unwrap_err().message;
        let origin = "environment SAPWOOD_ENGINE__CTX";
        assert!(message.contains(origin), "{message}");
        let missing = Layers::read(Some(Path::new("nowhere.toml")), Flags::default());
        let message = missing.err().unwrap().message;
        assert!(message.contains("nowhere.toml"), "{message}");
    });
}

/// A larger value of each key is among [`WRONG`].
#[test]
fn the_maximum_number_of_sequences_is_valid() {
    in_jail(|jail| {
        let text = "[engine]\nparallel = 65536\nkept_prefixes = 65536";
        jail.create_file("sapwood.toml", text).unwrap();
        let config = Layers::read(None, Flags::default()).unwrap().config();
        let engine = config.unwrap().engine;
        assert_eq!((engine.parallel, engine.kept_prefixes), (65_536, 65_536));
    });
}

/// Those of the engine have milliseconds, of which 0 is no limit.
#[test]
fn a_queue_timeout_of_zero_is_none_and_a_shorter_one_than_a_millisecond_is_one() {
    for (text, milliseconds) in [("0s", 0), ("500us", 1), ("1500us", 2), ("60s", 60_000)] {
        in_jail(|jail| {
            let file = format!("[limits]\nqueue_timeout = \"{text}\"\nrequest = \"0s\"");
            jail.create_file("sapwood.toml", &file).unwrap();
            let config = Layers::read(None, Flags::default()).unwrap().config();
            let limits = config.unwrap().limits;
            assert_eq!(limits.queue_timeout_ms(), milliseconds, "{text}");
        });
    }
}

/// A file, a variable, and the expected error.
type WrongSecret = (
    &'static str,
    Option<(&'static str, &'static str)>,
    [&'static str; 2],
);
const WRONG_SECRETS: &[WrongSecret] = &[
    (
        "[trace]\nheaders = \"x: hush\"",
        None,
        ["trace.headers", "sapwood.toml"],
    ),
    (
        "",
        Some(("SAPWOOD_TRACE__HEADERS", "authorization: Bearer hush")),
        ["trace.headers", "environment SAPWOOD_TRACE__HEADERS"],
    ),
    (
        "[auth]\nkey = [\"hush\"]",
        None,
        ["auth.key", "sapwood.toml"],
    ),
    (
        "[references]\nstore_options = { aws_token = [\"hush\"] }",
        None,
        ["references.store_options", "sapwood.toml"],
    ),
    ("[auth]\nkey = \"hush", None, ["line 2", "sapwood.toml"]),
    (
        "upstreams = \"lmtp://h/m?key=hush\"",
        None,
        ["upstreams", "sapwood.toml"],
    ),
    (
        "upstreams = [\"x://h?key=hush\"]",
        None,
        ["upstreams", "key=***"],
    ),
    (
        "upstreams = [\"lmtp://h/m?key=hush&hush\"]",
        None,
        ["upstreams", "without a value"],
    ),
    (
        "[[upstreams]]\nurl = \"x://h\"\nkey = \"hush\"",
        None,
        ["upstreams", "`x://h`"],
    ),
    (
        "[[upstreams]]\nurl = \"lmtp://h/m\"\nkey = 123\nkeyfile = \"hush\"",
        None,
        ["upstreams", "sapwood.toml"],
    ),
    (
        "[[models]]\nname = \"m\"\nbackend = \"upstream\"\nupstream = { endpoints = \"h?key=hush\" }",
        None,
        ["endpoints", "sapwood.toml"],
    ),
    (
        "",
        Some(("SAPWOOD_CLIENT", "{server=[\"http://hush@h\"]}")),
        ["client.server", "environment SAPWOOD_CLIENT"],
    ),
];

/// A value of a file or a variable that cannot be parsed may be a secret.
#[test]
fn oa_912_errors_about_a_wrong_secret_do_not_contain_it() {
    for (text, variable, parts) in WRONG_SECRETS.iter().copied() {
        in_jail(|jail| {
            jail.create_file("sapwood.toml", text).unwrap();
            if let Some((name, value)) = variable {
                jail.set_env(name, value);
            }
            let layers = Layers::read(None, Flags::default());
            let failure = layers.and_then(|layers| layers.config()).unwrap_err();
            let message = &failure.message;
            assert!(
                !message.contains("hush") && !message.contains('\n'),
                "{message}"
            );
            for part in parts {
                assert!(message.contains(part), "{part} is missing in: {message}");
            }
        });
    }
}

/// The example must match: it sets the defaults, and no key is missing in it.
#[test]
fn the_example_file_holds_every_key_with_its_default() {
    let example = include_str!("../../../../config.example.toml");
    in_jail(|jail| {
        jail.create_file("sapwood.toml", example).unwrap();
        let config = Layers::read(None, Flags::default())
            .unwrap()
            .config()
            .unwrap();
        assert_eq!(config, Config::default());
    });
    let mut full = Config {
        models: vec![ServedModelConfig::default()],
        ..Config::default()
    };
    full.models[0].name = "x".into();
    full.upstreams = vec![EndpointConfig {
        key: Some("k".into()),
        key_file: Some("f".into()),
        ca: Some("c".into()),
        ..EndpointConfig::new("u")
    }];
    let mut keys = Vec::new();
    names(&serde_json::to_value(&full).unwrap(), &mut keys);
    assert!(keys.len() > 25);
    for key in keys {
        let set = example.lines().any(|line| {
            let line = line.trim_start_matches(['#', ' ']);
            line.strip_prefix(key.as_str())
                .is_some_and(|rest| rest.trim_start().starts_with('='))
                || line == format!("[{key}]")
                || line == format!("[[{key}]]")
        });
        assert!(set, "config.example.toml lacks {key}");
    }
}

fn names(value: &serde_json::Value, into: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(table) => {
            for (key, value) in table {
                into.push(key.clone());
                names(value, into);
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|value| names(value, into)),
        _ => {}
    }
}

/// D-46: no output of a configuration contains its secrets.
#[test]
fn d_46_a_shown_configuration_contains_no_secrets() {
    let text = r#"
        [[upstreams]]
        url = "lmtp://h:1/m?key=hush1"
        [[upstreams]]
        url = "evergreen+http://h:2"
        key = "hush2"
        [auth]
        key = "hush3"
        [client]
        server = "http://hush4@h"
        key = "hush5"
        [trace]
        endpoint = "http://h/?api-key=hush6"
        headers = ["x-key: hush7", "hush8"]
        [references]
        store_options = { aws_token = "hush9" }
        [generate]
        restricted = { trace = { header = "x", value = "hush10" } }
        [[models]]
        name = "m"
        backend = "upstream"
        upstream = { endpoints = ["ws://h/?key=hush11", { url = "h:1", key = "hush12", weight = 2 }] }
    "#;
    in_jail(|jail| {
        jail.create_file("sapwood.toml", text).unwrap();
        let layers = Layers::read(None, Flags::default()).unwrap();
        let config = layers.config().unwrap();
        let shown = format!("{config:?} {}", serde_json::to_string(&config).unwrap());
        assert!(!shown.contains("hush"), "{shown}");
        for part in ["lmtp://h:1/m?key=***", "x-key: ***", "evergreen+http://h:2"] {
            assert!(shown.contains(part), "{part} is missing in {shown}");
        }
    });
}

/// TR-105
#[test]
fn d_55_a_model_may_be_compatible_with_a_tensorrt_llm_ensemble() {
    in_jail(|jail| {
        let table = "[[models]]\nname = \"m\"\nbackend = \"scripted\"\ncompat = \"tensorrt_llm\"\n";
        let read = |jail: &mut Jail, more: &str| {
            jail.create_file("sapwood.toml", &format!("{table}{more}"))
                .unwrap();
            let config = Layers::read(None, Flags::default()).unwrap().config();
            config.map_err(|failure| failure.to_string())
        };
        let signature = read(jail, "").unwrap().models[0].signature();
        let signature = signature.unwrap().unwrap();
        assert!(signature.tensorrt_llm && signature.max_batch_size == 16);
        let signature = read(jail, "max_batch_size = 4\n").unwrap().models[0].signature();
        assert_eq!(signature.unwrap().unwrap().max_batch_size, 4);
        let own =
            "inputs = [{ name = \"Q\", datatype = \"BYTES\", shape = [1], role = \"prompt\" }]\n";
        let refused = read(jail, own).unwrap_err();
        assert!(refused.contains("remove its own"), "{refused}");
    });
}

/// For example the value of an environment variable that is not set.
#[test]
fn tr_210_a_restriction_with_an_empty_value_is_refused() {
    in_jail(|jail| {
        let table = "[generate.restricted.inference]\nheader = \"admin-key\"\nvalue = \"\"\n";
        jail.create_file("sapwood.toml", table).unwrap();
        let layers = Layers::read(None, Flags::default()).unwrap();
        let refused = layers.config().unwrap_err().to_string();
        let key = "generate.restricted.inference.value: must not be empty";
        assert!(refused.contains(key), "{refused}");
    });
}

/// The parsers of a model's output, also by the names that vLLM has for them.
#[test]
fn d_10_the_parsers_of_a_models_output_are_configured() {
    use sapwood_kernel::{OutputParsers, ReasoningParser, ToolParser};
    in_jail(|jail| {
        let parsers = |keys: &str| {
            let table = format!("[[models]]\nname = \"a\"\nbackend = \"scripted\"\n{keys}");
            jail.create_file("sapwood.toml", &table).unwrap();
            let config = Layers::read(None, Flags::default())
                .unwrap()
                .config()
                .unwrap();
            let planned = crate::models::planned(&config, &config.models[0]);
            planned.unwrap().unwrap().parsers
        };
        assert_eq!(parsers(""), OutputParsers::default());
        let (tools, reasoning) = (ToolParser::Llama3, ReasoningParser::None);
        let chosen = OutputParsers { tools, reasoning };
        for name in ["llama3", "llama3_json"] {
            let keys = format!("tool_parser = \"{name}\"\nreasoning_parser = \"none\"");
            assert_eq!(parsers(&keys), chosen);
        }
        let keys = "reasoning_parser = \"deepseek_r1\"";
        assert_eq!(parsers(keys).reasoning, ReasoningParser::Think);
    });
}

#[test]
fn the_demo_model_is_served_beside_others_by_name_without_a_file() {
    in_jail(|jail| {
        let read = |jail: &mut Jail, name: &str| {
            let other = "[[models]]\nname = \"other\"\nbackend = \"scripted\"\n";
            let table = format!("{other}[[models]]\nname = \"{name}\"\nctx = 512\n");
            jail.create_file("sapwood.toml", &table).unwrap();
            Layers::read(None, Flags::default()).unwrap().config()
        };
        let config = read(jail, "demo").unwrap();
        let demos: Vec<_> = config
            .models
            .iter()
            .map(ServedModelConfig::is_demo)
            .collect();
        assert_eq!(demos, [false, true]);
        let planned = crate::models::planned(&config, &config.models[1]);
        if cfg!(feature = "demo-model") {
            assert!(planned.unwrap().unwrap().is_demo());
        } else {
            let why = planned.unwrap_err().to_string();
            assert!(why.contains("built without the demo model"), "{why}");
        }
        let why = read(jail, "mine").unwrap_err().to_string();
        assert!(
            why.contains("`mine` needs the path of its GGUF file"),
            "{why}"
        );
        assert!(why.contains("is called `demo`"), "{why}");
    });
}

#[test]
fn durations_are_parsed_as_people_write_them() {
    #[derive(serde::Deserialize, serde::Serialize)]
    struct One {
        #[serde(with = "humantime_serde")]
        span: Duration,
    }
    let read = |text: &str| serde_json::from_value::<One>(serde_json::json!({ "span": text }));
    for (text, milliseconds, shown) in [
        ("500ms", 500, "500ms"),
        ("30s", 30_000, "30s"),
        ("90s", 90_000, "1m 30s"),
        ("1m 30s", 90_000, "1m 30s"),
        ("1.5s", 1_500, "1s 500ms"),
        ("5m", 300_000, "5m"),
        ("2h", 7_200_000, "2h"),
        ("0s", 0, "0s"),
    ] {
        let one = read(text).unwrap();
        assert_eq!(one.span, Duration::from_millis(milliseconds), "{text}");
        let one = serde_json::to_value(one).unwrap();
        assert_eq!(one["span"], shown, "{text}");
    }
    for text in ["", "5", "s", "-5s", "99999999999999999999h"] {
        assert!(read(text).is_err(), "{text}");
    }
}
