//! Options of llama.cpp, and LoRA adapters.

use super::*;

/// Of each option the model's own value counts, then that of a flag, of the environment and of the file.
#[test]
fn options_of_llama_cpp_are_merged_for_each_model() {
    use sapwood_engine::llama_options::{CacheType, GpuLayers};
    in_jail(|jail| {
        let text = "[engine.llama]\ngpu_layers = 5\ncache_type_k = \"q8_0\"\nmmap = false\n\
                    [[models]]\nname = \"a\"\nbackend = \"scripted\"\nllama = { gpu_layers = \"all\", rope_scale = 2 }\n";
        jail.create_file("sapwood.toml", text).unwrap();
        jail.set_env("SAPWOOD_ENGINE__LLAMA__CACHE_TYPE_K", "q4_0");
        jail.set_env("SAPWOOD_ENGINE__LLAMA__TENSOR_SPLIT", "[3, 1.5]");
        let mut flags = Flags::default();
        flags.set("engine.llama.gpu_layers", "--gpu-layers", Some("7"));
        let layers = Layers::read(None, flags).unwrap();
        let config = layers.config().unwrap();
        let merged = config.models[0].llama.or(&config.engine.llama);
        assert_eq!(config.engine.llama.gpu_layers, Some(GpuLayers::Number(7)));
        assert_eq!(merged.gpu_layers, Some(GpuLayers::All));
        assert_eq!(merged.cache_type_k, Some(CacheType::Q4_0));
        assert_eq!(merged.tensor_split, Some(vec![3.0, 1.5]));
        assert_eq!((merged.mmap, merged.rope_scale), (Some(false), Some(2.0)));
        for (key, origin) in [
            ("engine.llama.gpu_layers", "flag --gpu-layers"),
            ("engine.llama.mmap", "file sapwood.toml"),
            (
                "engine.llama.cache_type_k",
                "environment SAPWOOD_ENGINE__LLAMA__CACHE_TYPE_K",
            ),
        ] {
            assert_eq!(layers.origin(key).to_string(), origin, "{key}");
        }
    });
}

/// The child process that tries a file loads it with the options of the server.
#[cfg(feature = "embedded")]
#[test]
fn a_trial_has_the_options_and_adapters_of_its_model() {
    in_jail(|jail| {
        let text = "[engine.llama]\ncache_type_k = \"q8_0\"\n[[models]]\nname = \"a\"\npath = \"a.gguf\"\nrequired = false\n\
                    llama = { gpu_layers = 3 }\nlora = [{ path = \"style.gguf\", scale = 0.5 }]\n\
                    draft_model = \"b.gguf\"\ndraft_gpu_layers = \"all\"\n";
        jail.create_file("sapwood.toml", text).unwrap();
        let config = Layers::read(None, Flags::default()).unwrap().config();
        let config = config.unwrap();
        let planned = crate::models::planned(&config, &config.models[0]);
        let planned = planned.unwrap().unwrap();
        let arguments = planned.trial().unwrap();
        let size = arguments[1].to_str().unwrap();
        let read: crate::models::ModelSize = serde_json::from_str(size).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), size);
        let size: serde_json::Value = serde_json::from_str(size).unwrap();
        assert_eq!(size["llama"]["cache_type_k"], "q8_0");
        assert_eq!(size["llama"]["gpu_layers"], 3);
        assert_eq!(size["lora"][0]["path"], "style.gguf");
        assert_eq!(size["lora"][0]["scale"], 0.5);
        assert_eq!(size["speculation"], "draft");
        assert_eq!(size["draft"]["path"], "b.gguf");
        assert_eq!(size["draft"]["gpu_layers"], "all");
        assert_eq!(size["draft"]["p_min"], 0.75);
        let files = planned.trial_files();
        assert_eq!(files, ["a.gguf", "style.gguf", "b.gguf"].map(PathBuf::from));
    });
}

#[cfg(feature = "embedded")]
#[test]
fn speculation_of_all_models_wins_over_a_draft_model() {
    in_jail(|jail| {
        for (speculation, expected) in [
            ("", "draft"),
            ("speculation = \"off\"", "off"),
            ("speculation = \"lookup\"", "lookup"),
            ("speculation = \"draft\"", "draft"),
        ] {
            let text = format!(
                "[engine]\n{speculation}\n[[models]]\nname = \"a\"\npath = \"a.gguf\"\nrequired = false\n\
                 draft_model = \"b.gguf\"\n"
            );
            jail.create_file("sapwood.toml", &text).unwrap();
            let config = Layers::read(None, Flags::default()).unwrap().config();
            let config = config.unwrap();
            let planned = crate::models::planned(&config, &config.models[0]);
            let arguments = planned.unwrap().unwrap().trial().unwrap();
            let size: serde_json::Value =
                serde_json::from_str(arguments[1].to_str().unwrap()).unwrap();
            assert_eq!(size["speculation"], expected);
            assert_eq!(size["draft"].is_object(), expected == "draft");
        }
    });
}
