//! Tests of GENERATE.

use sapwood_engine::scripted::{Config, Scripted};
use sapwood_engine::{Config as EngineConfig, Engine};

use super::*;
use crate::args;
use crate::from_chunks::Json;
use crate::kernel::Kernel;
use crate::probe::whole;

fn states(name: &'static str, text: &str) -> Fun {
    let config: Config =
        serde_json::from_value(serde_json::json!({"script": "text", "text": text})).unwrap();
    let engine = Engine::spawn(
        Box::new(Scripted::new(config).unwrap()),
        EngineConfig::default(),
    )
    .unwrap();
    model(name, engine)
}

fn kernel(models: &[&'static str], targets: Targets) -> Kernel {
    let kernel = Kernel::new();
    kernel.add(generate(targets)).unwrap();
    for name in models {
        kernel.add(states(name, &format!("I am {name}"))).unwrap();
    }
    kernel
}

fn asked(kernel: &Kernel, target: Option<&str>) -> Result<String, (String, String)> {
    let args = args! { prompt: "x" };
    let args = match target {
        Some(target) => args.with("target", target),
        None => args,
    };
    whole(kernel.run::<String>("GENERATE", args))
        .map_err(|error| (error.code().name().into(), error.reason().into()))
}

#[test]
fn ev_503_targets_are_found_by_name_uri_and_alias() {
    let targets = Targets {
        default: Some("two".into()),
        aliases: [
            ("gpt".into(), "one".into()),
            ("evergreen://odd".into(), "one".into()),
            ("gone".into(), "away".into()),
        ]
        .into(),
    };
    let kernel = kernel(&["one", "two"], targets);
    let is = |name: &str| Ok(format!("I am {name}"));
    assert_eq!(asked(&kernel, None), is("two"));
    assert_eq!(asked(&kernel, Some("")), is("two"));
    for target in [
        "one",
        "evergreen://one",
        "gpt",
        "evergreen://gpt",
        "evergreen://odd",
    ] {
        assert_eq!(asked(&kernel, Some(target)), is("one"), "{target}");
    }
    for target in ["three", "gone", "GENERATE", "One"] {
        let expect = ("not-found".to_owned(), "UNKNOWN_TARGET".to_owned());
        assert_eq!(asked(&kernel, Some(target)), Err(expect), "{target}");
    }
    let error = whole(kernel.run::<String>("GENERATE", args! { prompt: "x", target: "three" }))
        .unwrap_err();
    assert!(error.to_string().contains("one, two"), "{error}");
}

/// Errors quote a client's text only up to a limit, however it is escaped.
#[test]
fn d_47_a_target_of_megabytes_makes_a_short_error() {
    let kernel = kernel(&["one"], Targets::default());
    let target = "\u{200b}".repeat(1 << 20);
    let error = whole(kernel.run::<String>("GENERATE", args! { prompt: "x", target: target }));
    let received = error.unwrap_err().to_string();
    assert!(
        received.len() < 2048 && received.contains("one"),
        "{}",
        received.len()
    );
    let error = Error::argument("x".repeat(1 << 20), "y".repeat(1 << 20));
    assert!(error.to_string().len() < 5_000);
}

#[test]
fn ev_503_a_request_without_target_and_default_takes_the_only_model() {
    assert_eq!(
        asked(&kernel(&["only"], Targets::default()), None),
        Ok("I am only".into())
    );
    let several = asked(&kernel(&["one", "two"], Targets::default()), None);
    assert_eq!(
        several,
        Err(("invalid-request".into(), "TARGET_REQUIRED".into()))
    );
    let none = asked(&kernel(&[], Targets::default()), None);
    assert_eq!(none, Err(("not-found".into(), "UNKNOWN_TARGET".into())));
}

/// EV-601: the same ports under both pairs of names.
#[test]
fn ke_611_generate_has_the_models_ports_and_wants() {
    let kernel = kernel(&["m"], Targets::default());
    let spec = kernel.get("GENERATE").unwrap();
    let model = kernel.get("m").unwrap();
    assert_eq!(spec.spec().outputs.len(), model.spec().outputs.len());
    assert!(spec.spec().input("text").is_some() && spec.spec().input("target").is_some());
    let meta = kernel
        .run::<Json<serde_json::Value>>("GENERATE", args! { text: "x" })
        .port("meta");
    let meta = whole(meta).unwrap();
    assert_eq!(
        meta[0].get("finish_reason"),
        Some(&serde_json::json!("stop"))
    );
}
