//! `[controllers]`: programs and constraints that steer decoding.

use std::path::PathBuf;

use sapwood_control::host::ControllerRandom;
use sapwood_kernel::HoldPolicy;
use serde::{Deserialize, Serialize};

use crate::failure::CliError;

/// How controllers are stored and limited.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ControllersConfig {
    /// The folder of uploaded modules and tags; `None`: `controllers` in the user's state folder.
    pub(crate) dir: Option<PathBuf>,
    /// Bytes that this folder may hold; above it modules without a tag go, of the owner with most bytes the least recently used one.
    pub(crate) store_bytes: u64,
    /// Milliseconds that a controller has for one step before its sequence skips steps (AI-812).
    pub(crate) step_ms: u64,
    /// Milliseconds that it has to start.
    pub(crate) init_ms: u64,
    /// Bytes of memory of one sequence's controller.
    pub(crate) memory_bytes: u64,
    /// Bytes of memory of all controllers together.
    pub(crate) memory_bytes_total: u64,
    /// Bytes of the states of all constraints of a model (AI-841).
    pub(crate) constraint_memory_bytes: u64,
    /// Live sequences that one request's controller may fork into.
    pub(crate) forks: u32,
    /// Tokens that constraints force are appended without sampling (AI-841).
    pub(crate) ff_constraints: bool,
    /// Work of one request with a controller: twice its sampled tokens plus all computed ones (AI-825); 0: ten times the
    /// context.
    pub(crate) fuel_tokens: u64,
    /// How long text is held that a controller may take back, for clients that cannot take it back (AI-936).
    pub(crate) hold: HoldSetting,
    /// Instructions of one callback, counted instead of its time (AI-733); 0: time limits it.
    pub(crate) fuel: u64,
    /// What controllers get from `random_get` (AI-1010).
    pub(crate) random: RandomSetting,
    /// Where controllers run (AI-701).
    pub(crate) isolation: IsolationSetting,
    /// Another program that runs them, over shared memory (AI-850); `None`: this one does.
    pub(crate) runtime: Option<RuntimeConfig>,
}

/// Where random numbers of controllers are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RandomSetting {
    /// There are none.
    Off,
    /// The seed of the request, and the path of forks.
    Seeded,
}

impl RandomSetting {
    pub(crate) const fn of_host(self) -> ControllerRandom {
        match self {
            Self::Off => ControllerRandom::Off,
            Self::Seeded => ControllerRandom::Seeded,
        }
    }
}

/// Where controllers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IsolationSetting {
    /// On threads of this process.
    Shared,
    /// In a child process for each model, which this process starts.
    Process,
}

/// A runtime of controllers that this process starts for each model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RuntimeConfig {
    /// Its program.
    pub(crate) command: PathBuf,
    /// The form of the protocol.
    #[serde(default)]
    pub(crate) dialect: DialectSetting,
    /// How the two processes wait for each other.
    #[serde(default)]
    pub(crate) sync: SyncSetting,
    /// Its arguments; the names and sizes of the shared objects are added to them.
    #[serde(default)]
    pub(crate) args: Vec<String>,
}

/// A form of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DialectSetting {
    /// As the runtime answers.
    #[default]
    Auto,
    P1,
    P2,
}

/// A kind of waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SyncSetting {
    /// On named semaphores, which every runtime has.
    #[default]
    Semaphores,
    Futex,
}

/// `"end"`, or a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "it must be \"end\" or a number of tokens")]
pub(crate) enum HoldSetting {
    Word(HoldWord),
    Tokens(u32),
}

/// The settings that are no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HoldWord {
    /// Until the sequence ends.
    End,
}

impl HoldSetting {
    pub(crate) const fn policy(self) -> HoldPolicy {
        match self {
            Self::Word(HoldWord::End) => HoldPolicy::End,
            Self::Tokens(tokens) => HoldPolicy::Tokens(tokens),
        }
    }
}

impl Default for ControllersConfig {
    fn default() -> Self {
        Self {
            dir: None,
            store_bytes: 10 << 30,
            step_ms: 25,
            init_ms: 1000,
            memory_bytes: 64 << 20,
            memory_bytes_total: 4 << 30,
            constraint_memory_bytes: 1 << 30,
            forks: 16,
            ff_constraints: true,
            fuel_tokens: 0,
            fuel: 0,
            hold: HoldSetting::Word(HoldWord::End),
            random: RandomSetting::Off,
            isolation: IsolationSetting::Shared,
            runtime: None,
        }
    }
}

impl ControllersConfig {
    /// Checks the constraints that the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`].
    pub(crate) fn check(&self) -> Result<(), CliError> {
        let wrong = |key: &str, must: &str| {
            Err(CliError::usage(format!(
                "controllers.{key}: it must be {must}"
            )))
        };
        if !(1..=60_000).contains(&self.step_ms) {
            return wrong("step_ms", "from 1 to 60000");
        }
        if !(1..=600_000).contains(&self.init_ms) {
            return wrong("init_ms", "from 1 to 600000");
        }
        if !(1..=64).contains(&self.forks) {
            return wrong("forks", "from 1 to 64");
        }
        // A page of Wasm is 64 KiB; a 32-bit memory ends at 4 GiB.
        if !(65_536..=4 << 30).contains(&self.memory_bytes) {
            return wrong("memory_bytes", "from 65536 to 4294967296");
        }
        if self.memory_bytes_total < self.memory_bytes {
            return wrong("memory_bytes_total", "at least memory_bytes");
        }
        // An eighth of it is what one constraint may have, and the states of a usual schema take a few megabytes.
        if self.constraint_memory_bytes < 16 << 20 {
            return wrong("constraint_memory_bytes", "at least 16777216");
        }
        if self.runtime.is_some() && self.isolation == IsolationSetting::Process {
            return wrong(
                "isolation",
                "\"shared\", or left out, beside controllers.runtime",
            );
        }
        if self.runtime.is_some() && self.fuel > 0 {
            return wrong(
                "fuel",
                "0, or left out, beside controllers.runtime, which has limits of its own",
            );
        }
        let other_process = self.runtime.is_some() || self.isolation == IsolationSetting::Process;
        // The seed of a request does not reach them there.
        if other_process && self.random == RandomSetting::Seeded {
            return wrong(
                "random",
                "\"off\" where controllers run in another process: for \"seeded\" leave out controllers.runtime, and \
                 controllers.isolation or set it to \"shared\"",
            );
        }
        if other_process && cfg!(not(target_os = "linux")) {
            return wrong(
                "isolation",
                "\"shared\", without controllers.runtime, on this system",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// AI-733
    #[test]
    fn ai_1010_what_has_no_effect_in_another_process_is_refused() {
        let refused = |config: ControllersConfig| config.check().err().map(|why| why.to_string());
        let default = ControllersConfig::default;
        let runtime = || {
            Some(RuntimeConfig {
                command: "aicirt".into(),
                dialect: DialectSetting::Auto,
                sync: SyncSetting::Semaphores,
                args: Vec::new(),
            })
        };
        let (random, isolation) = (RandomSetting::Seeded, IsolationSetting::Process);
        assert_eq!(
            refused(ControllersConfig {
                random,
                ..default()
            }),
            None
        );
        for config in [
            ControllersConfig {
                random,
                isolation,
                ..default()
            },
            ControllersConfig {
                random,
                runtime: runtime(),
                ..default()
            },
        ] {
            let why = refused(config).unwrap();
            assert!(
                why.contains("controllers.random: it must be \"off\""),
                "{why}"
            );
            assert!(why.contains("leave out controllers.runtime"), "{why}");
        }
        let fuel = 1_000;
        for isolation in [IsolationSetting::Shared, isolation] {
            let config = ControllersConfig {
                fuel,
                isolation,
                ..default()
            };
            assert_eq!(refused(config), None);
        }
        let why = refused(ControllersConfig {
            fuel,
            runtime: runtime(),
            ..default()
        });
        assert!(why.unwrap().contains("controllers.fuel: it must be 0"));
    }

    #[test]
    fn ai_936_text_is_held_until_the_end_or_for_a_number_of_tokens() {
        use figment::providers::{Format, Serialized, Toml};
        let read = |text: &str| {
            let defaults = Serialized::defaults(ControllersConfig::default());
            let figment = figment::Figment::from(defaults).merge(Toml::string(text));
            figment
                .extract::<ControllersConfig>()
                .map_err(|error| error.to_string())
        };
        for (text, expect) in [
            ("", HoldPolicy::End),
            ("hold = \"end\"", HoldPolicy::End),
            ("hold = 0", HoldPolicy::Tokens(0)),
            ("hold = 40", HoldPolicy::Tokens(40)),
        ] {
            assert_eq!(read(text).unwrap().hold.policy(), expect, "{text}");
        }
        for text in [
            "hold = \"never\"",
            "hold = -1",
            "hold = true",
            "hold = 4294967296",
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains("or a number of tokens"), "{text}: {error}");
        }
    }

    #[test]
    fn ai_850_a_runtime_needs_a_command_and_excludes_the_own_one() {
        use figment::providers::{Format, Serialized, Toml};
        let read = |text: &str| {
            let defaults = Serialized::defaults(ControllersConfig::default());
            let figment = figment::Figment::from(defaults).merge(Toml::string(text));
            let config = figment.extract::<ControllersConfig>();
            let config = config.map_err(|error| error.to_string())?;
            config.check().map_err(|error| error.to_string())?;
            Ok::<_, String>(config)
        };
        let runtime = read("runtime = { command = \"aicirt\" }").unwrap().runtime;
        let runtime = runtime.unwrap();
        assert_eq!(runtime.command, PathBuf::from("aicirt"));
        assert_eq!(
            (runtime.dialect, runtime.sync, runtime.args.len()),
            (DialectSetting::Auto, SyncSetting::Semaphores, 0)
        );
        let all = "runtime = { command = \"r\", dialect = \"p2\", sync = \"futex\", args = [\"-t\", \"x\"] }";
        assert_eq!(read(all).unwrap().runtime.unwrap().args, ["-t", "x"]);
        assert_eq!(
            read("isolation = \"process\"").unwrap().isolation,
            IsolationSetting::Process
        );
        for (text, part) in [
            ("runtime = {}", "command"),
            ("runtime = { command = \"r\", colour = 1 }", "colour"),
            ("runtime = { command = \"r\", dialect = \"p3\" }", "p3"),
            (
                "isolation = \"process\"\nruntime = { command = \"r\" }",
                "isolation",
            ),
            ("isolation = \"thread\"", "thread"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
