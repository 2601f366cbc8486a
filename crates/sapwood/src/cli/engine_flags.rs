//! Flags of `serve` for keys of `engine`: when models are loaded, and what is cached.

use std::path::PathBuf;

use clap::Args;

use crate::config::layers::Flags;

/// How the engine of each model works. The keys of `engine` say more.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Engine")]
pub(super) struct EngineFlags {
    /// When models are loaded: when the server starts, or by the first call
    #[arg(long, value_parser = ["start", "first-use"])]
    load: Option<String>,
    /// Unload a model after this long without a call; the next call loads it again. 0s: never
    #[arg(long, value_name = "DURATION")]
    idle_unload: Option<String>,
    /// Milliseconds that a step should take at most: fewer make streams smoother, more make prompts faster
    #[arg(long, value_name = "MS")]
    step_ms: Option<u64>,
    /// Size of the KV cache in tokens, for running sequences and cached prefixes together; 0: by the context and the memory
    #[arg(long, value_name = "TOKENS")]
    cache_tokens: Option<u32>,
    /// Size of the prefix cache in sequences; 0: no prefix is kept
    #[arg(long, value_name = "N")]
    kept_prefixes: Option<u32>,
    /// Bytes of memory for prefixes that have lost their place in the KV cache; 0: an eighth of what is available
    #[arg(long, value_name = "BYTES")]
    prefix_ram_bytes: Option<u64>,
    /// Folder for cached prefixes that the memory has no room for, also those of an earlier run
    #[arg(long, value_name = "DIR")]
    prefix_dir: Option<PathBuf>,
}

impl EngineFlags {
    pub(super) fn set(&self, flags: &mut Flags) {
        // As the configuration writes it.
        let load = self.load.as_ref().map(|load| load.replace('-', "_"));
        let folder = self.prefix_dir.as_ref();
        let folder = folder.map(|path| path.to_string_lossy().into_owned());
        flags.set("engine.load", "--load", load);
        flags.set(
            "engine.idle_unload",
            "--idle-unload",
            self.idle_unload.clone(),
        );
        flags.set("engine.step_ms", "--step-ms", self.step_ms);
        flags.set("engine.cache_tokens", "--cache-tokens", self.cache_tokens);
        flags.set(
            "engine.kept_prefixes",
            "--kept-prefixes",
            self.kept_prefixes,
        );
        flags.set(
            "engine.prefix_ram_bytes",
            "--prefix-ram-bytes",
            self.prefix_ram_bytes,
        );
        flags.set("engine.prefix_dir", "--prefix-dir", folder);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use clap::Parser;

    use super::*;
    use crate::config::LoadTime;
    use crate::config::layers::Layers;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        engine: EngineFlags,
    }

    #[test]
    fn each_flag_sets_its_key() {
        let given = "sapwood --load first-use --idle-unload 5m --step-ms 50 --cache-tokens 4096 --kept-prefixes 3 \
                     --prefix-ram-bytes 1000000 --prefix-dir /var/p";
        let parsed = Only::try_parse_from(given.split_whitespace()).unwrap();
        let mut flags = Flags::default();
        parsed.engine.set(&mut flags);
        let config = Layers::read(None, flags).unwrap().config().unwrap();
        let engine = config.engine;
        assert_eq!(engine.load, LoadTime::FirstUse);
        assert_eq!(engine.idle_unload, Duration::from_secs(300));
        assert_eq!((engine.step_ms, engine.cache_tokens), (50, 4_096));
        assert_eq!(
            (engine.kept_prefixes, engine.prefix_ram_bytes),
            (3, 1_000_000)
        );
        assert_eq!(engine.prefix_dir.as_deref(), Some(Path::new("/var/p")));
    }
}
