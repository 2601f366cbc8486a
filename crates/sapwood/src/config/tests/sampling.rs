//! Sampling defaults: the layers, and a model's own.

use serde_json::{Value, json};

use super::*;

/// A model's own value counts first, then that of a flag, of the environment and of the file.
#[test]
fn sampling_defaults_are_merged_parameter_by_parameter() {
    in_jail(|jail| {
        let text = "[engine.sampling]\ntemperature = 0.5\ntop_k = 5\nstop = [\"a\", \"b\"]\nseed = 3\n\
                    [[models]]\nname = \"a\"\nbackend = \"scripted\"\n[models.sampling]\nmin_p = 0.1\nstop = [\"c\"]\n";
        jail.create_file("sapwood.toml", text).unwrap();
        jail.set_env("SAPWOOD_ENGINE__SAMPLING__TOP_K", "6");
        jail.set_env("SAPWOOD_ENGINE__SAMPLING__SAMPLERS", "[min_p, top_k]");
        let mut flags = Flags::default();
        let key = "engine.sampling.temperature";
        flags.set(key, "--temperature", Some(0.25));
        let layers = Layers::read(None, flags).unwrap();
        let config = layers.config().unwrap();
        let params = |model: &ServedModelConfig| {
            let defaults = model.sampling.of(&config.engine.sampling);
            Value::from(defaults.params().to_json().unwrap())
        };
        let expected = json!({
            "temperature": 0.25, "top_k": 6, "min_p": 0.1, "samplers": ["min_p", "top_k"], "seed": 3, "stop": ["c"],
        });
        assert_eq!(params(&config.models[0]), expected);
        // Of a model on other servers its own alone.
        let own = config.models[0].sampling.alone();
        let own = own.params().to_json().map(Value::from);
        assert_eq!(own, Some(json!({"min_p": 0.1, "stop": ["c"]})));
        for (key, origin) in [
            (key, "flag --temperature"),
            (
                "engine.sampling.top_k",
                "environment SAPWOOD_ENGINE__SAMPLING__TOP_K",
            ),
            ("engine.sampling.stop", "file sapwood.toml"),
            ("engine.sampling.min_p", "default"),
        ] {
            assert_eq!(layers.origin(key).to_string(), origin, "{key}");
        }
    });
}
